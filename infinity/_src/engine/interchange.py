"""Values in and out of an offloaded model, in the formats of others: safetensors,
torch.distributed.checkpoint, DeepSpeed.

All of it is streamed (one tensor of a parameter in memory at a time, or one shard of an export),
blocks, and is collective on several ranks: all call, all see the same files, and if one rank fails,
all raise. Nothing that is read is ever unpickled freely: a file may use the names of a fixed list
only, and none is imported for its sake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from infinity._src.base.dtypes import check_kept, check_torch_saves
from infinity._src.base.paths import absolute
from infinity._src.checkpoint.formats.dcp import (
    DCPFiles,
    DCPWriter,
    Key,
    ModelPart,
    StatePart,
    groups_of,
    tensors_of,
)
from infinity._src.checkpoint.formats.deepspeed import DeepSpeedStates, open_deepspeed
from infinity._src.checkpoint.formats.deepspeed_run import LoadedDeepSpeed, match_groups, notes_on
from infinity._src.checkpoint.formats.hub_conversion import is_hub_model
from infinity._src.checkpoint.formats.hub_files import hub_parts, open_weights
from infinity._src.checkpoint.formats.load import (
    MASTER,
    Held,
    Loaded,
    check_idle,
    match,
    match_states,
    take_in,
    take_in_states,
)
from infinity._src.checkpoint.formats.safetensors import (
    module_parts,
    read_value,
    wholes_of,
    write_safetensors,
)
from infinity._src.checkpoint.metadata import buffers_of, persistent_buffers
from infinity._src.checkpoint.reshard import rounding
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.engine.handle import Handle, handle
from infinity._src.memory.layout import state_format
from infinity._src.optim.base import Optimizer
from infinity._src.params.materialize import NamedTensors


def export_safetensors(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    shard_bytes_max: int | str = "2GiB",
    masters: bool = False,
    names: Literal["hub", "modules"] | Callable[[str], str | None] = "hub",
) -> None:
    """Write an offloaded model's parameters and persistent buffers as safetensors, loadable by
    `from_pretrained`. Blocks.

    names: "hub" gives the tensors of a model of transformers the names and shapes that its
    checkpoints have on the hub (experts apart, say), by transformers' own conversion: those of the
    checkpoint that it was loaded from, else those of its kind. "modules" writes names and shapes of
    the model's state dict. For other models both are the same. A function gives the name in the
    files for each name of the state dict, or None to leave the tensor out. masters: write the fp32
    masters of the parameters that an optimizer holds, instead of the rounded values that compute.

    Streams: one shard is in memory at a time, of `shard_bytes_max`, or one unit if that is larger
    (with the hub's names: one group of tensors that are converted together). Waits for pending
    updates. A tied parameter is written once, under its first name. Files get their names together,
    when all are on the drive; an earlier export in the directory stays until then, so there has to
    be room for both. On several ranks all must call it; rank 0 writes.

    Raises: MemoryError, before anything is read, where a shard (a group that is converted counts
    twice) is more than the memory that is left; OSError naming the path; ValueError for a model
    that is not offloaded, and for one whose conversion has no way back, or that the release of
    transformers cannot convert.
    """
    if not callable(names) and names not in ("hub", "modules"):
        raise ValueError(f"names={names!r}: give 'hub', 'modules', or a function of a name")
    of, target = handle(model), absolute(directory, "directory")
    of.flush()
    if callable(names):
        parts = module_parts(model, of, masters=masters, rename=names)
    else:
        parts_of = hub_parts if names == "hub" and is_hub_model(model) else module_parts
        parts = parts_of(model, of, masters=masters)
    write_safetensors(parts, of.comm, target, shard_bytes_max=shard_bytes_max)


def load_safetensors(
    model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> Loaded:
    """Set an offloaded model's parameters and persistent buffers from safetensors: a directory (its
    index decides; without one, its model.safetensors if it has that, else all) or a file.

    A model of transformers takes the hub's files, converted as `from_pretrained` converts them,
    those with the names of its modules, and a GGUF file.

    Masters take the values in the precision of the file (an fp32 file sets all 32 bits), so that
    the model holds what the file says and nothing of what was there; a parameter without optimizer
    states keeps what its dtype holds. Moments, step counts, gradients and hyper-parameters stay as
    they are. Waits for pending updates; blocks. One name of a tied parameter is enough. Names,
    shapes and kinds of dtype are checked before anything is written.

    strict=False: names that either side lacks are left out, and returned. On several ranks all call
    it, and each stores its shard.

    Raises: ValueError naming what is missing, unexpected or different, an index that points out of
    its directory, a broken file (WeightsError); FileNotFoundError; RuntimeError inside forward,
    backward or gather(). After an OSError or AioError some parameters are loaded and others not:
    load again before going on.
    """
    source = absolute(path, "path")
    return _load(model, lambda: open_weights(model, source), strict=strict)


def export_dcp(
    model: torch.nn.Module,
    opt: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    masters: bool = True,
    keys: tuple[str, str] = ("model", "optim"),
) -> None:
    """Write a checkpoint that `torch.distributed.checkpoint.load` reads: parameters, buffers,
    optimizer states. Blocks.

    The checkpoint stands for `{"model": ..., "optim": ...}` (`keys`) as
    torch.distributed.checkpoint.state_dict makes them, so that a plain or sharded torch model and
    optimizer go on from it: `model.<name>`, `optim.state.<name>.exp_avg` (and each other state,
    "step" included), `optim.param_groups.<i>.<name>`. Parameters and states are those that `opt`
    holds; None writes the model.

    masters: `model.<name>` is the fp32 master, which loses nothing. False: the value that computes,
    and masters lie in `optim.state.<name>.master`. Streams, one parameter in memory at a time.
    Waits for pending updates. On several ranks all call it; rank 0 writes. The directory is a
    checkpoint once it is whole and on the drive.

    Raises: ValueError for `keys` that are empty or equal, a directory that has a checkpoint, or an
    optimizer of another model; OSError naming the path.
    """
    if not all(keys) or keys[0] == keys[1]:
        raise ValueError(
            f"keys={keys!r}: the model and its optimizer are written under two different names"
        )
    of, target = handle(model), absolute(directory, "directory")
    comm = of.comm
    of.flush()
    every = {held.param: held for held in _held(of, opt)}
    buffers = persistent_buffers(model)
    check_kept(buffers.items(), "a checkpoint of torch.distributed.checkpoint")
    dtypes = [(name, buffer.dtype) for name, buffer in buffers.items()]
    dtypes += [(param.name, param.dtype) for unit in of.units for param in unit.params]
    check_torch_saves(dtypes, "a checkpoint of torch.distributed.checkpoint")
    with contextlib.ExitStack() as undo:
        writer: DCPWriter | None = None
        # Each part is a rendezvous: when one rank fails, all raise, and none waits for it.
        with Rendezvous(comm, f"making {target}"):
            if comm.rank == 0:
                writer = DCPWriter(target)
                undo.callback(writer.abandon)

        def put(values: Iterable[tuple[Key, Any]]) -> None:
            with Rendezvous(comm, f"writing {target}"):
                if writer is not None:
                    for key, value in values:
                        writer.put(key, value)

        for whole in wholes_of(param for unit in of.units for param in unit.params):
            value = whole.merged(
                lambda param: read_value(of, param, masters=masters and param in every)
            )
            # Written one at a time: only one parameter is in memory.
            put([((keys[0], whole.name), value)])
            for pair in tensors_of(whole, every, keys, with_master=not masters):
                put([pair])
        put(((keys[0], name), value) for name, value in buffers_of(model).items())
        put(groups_of(opt, keys[1]) if opt is not None else ())
        with Rendezvous(comm, f"finishing {target}"):
            if writer is not None:
                writer.finish()


def load_dcp(
    model: torch.nn.Module,
    opt: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    keys: tuple[str, str] = ("model", "optim"),
    strict: bool = True,
) -> Loaded:
    """Set parameters, buffers and optimizer states from a checkpoint of
    torch.distributed.checkpoint (FileSystemWriter). Blocks.

    Reads what `export_dcp` writes, and what torch writes of `{"model": model.state_dict(), "optim":
    ...}` on any number of ranks, with `optim` from torch.distributed.checkpoint.state_dict. Masters
    are `optim.state.<name>.master` where there are such, else the parameters, in the precision of
    the file. Moments are rounded to what the policy's `state` holds. Hyper-parameters stay those of
    `opt`; None loads the model alone; keys[0] is "" for a model that was saved without a key
    (`dcp.save(model.state_dict())`). Its `.metadata` is a pickle, and is read by a parser that
    knows the few classes which belong there and imports nothing; tensors are read with
    weights_only=True.

    Everything is checked by name and shape before anything is written. strict=False: names that
    either side lacks are left out, and returned. On several ranks all call it, and each stores its
    shard.

    Raises: ValueError naming what is missing, unexpected, different, damaged or refused;
    FileNotFoundError; RuntimeError inside forward, backward or gather(). After an error of reading
    or writing some values are loaded and others not.
    """
    of, place = handle(model), absolute(directory, "directory")
    comm = of.comm
    of.flush()
    with contextlib.ExitStack() as undo:
        with Rendezvous(comm, f"opening {place}"):
            check_idle(of.units)
            files = DCPFiles(place)
            undo.callback(files.close)
            part = ModelPart(files, keys[0])
            # Everything is matched before anything is written, on all ranks.
            matched = match(model, of.units, part, strict=strict)
            part_states = StatePart(files, keys[1])
            states = (
                match_states(part_states, _held(of, opt), strict=strict)
                if opt is not None
                else None
            )
        with Rendezvous(comm, f"loading {place}"):
            take_in(of, part, matched)
            if states is not None:
                take_in_states(part_states, states)
    others = states.left_out if states is not None else Loaded((), ())
    return Loaded(
        matched.left_out.missing + others.missing, matched.left_out.unexpected + others.unexpected
    )


def load_deepspeed(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    tag: str | None = None,
    *,
    opt: Optimizer | None = None,
    strict: bool = True,
) -> LoadedDeepSpeed:
    """Go on from a checkpoint of DeepSpeed's ZeRO 1, 2 or 3, or a universal one, whatever the
    number of ranks that wrote it. Blocks.

    directory: the one given to `save_checkpoint`; `tag` names a folder in it, and None is the one
    that `latest` (or else `latest_universal`) names. Masters take the fp32 weights; frozen
    parameters and buffers have the dtype that they had there. opt: the optimizer of the model's
    parameters, which takes moments, step counts, and the hyper-parameters of each group by the
    names of its parameters. Moments are rounded to what the policy's `state` holds. Without it,
    they stay as they are. The result has what the loop has to take over itself: the loss scaler,
    the scheduler's state, client state and the count of steps.

    Nothing of DeepSpeed is imported, and no file is unpickled freely. All is matched by name and
    shape, and every byte that is used is compared with the checksums of its file, before anything
    is written. One tensor is in memory at a time. strict=False: names that either side lacks are
    left out, and returned. On several ranks all call it, and each stores its shard.

    Raises: FileNotFoundError; ValueError naming what is missing, unexpected, different, damaged or
    refused: model and pipeline parallelism, DeepSpeed's experts, ZenFlow, files that name classes
    other than DeepSpeed's own (as `client_state` may), an optimizer that was offloaded to NVMe, of
    which DeepSpeed writes a part; RuntimeError inside forward, backward or gather(). After an error
    of reading or writing some values are loaded and others not.
    """
    of, place = handle(model), absolute(directory, "directory")
    comm = of.comm
    of.flush()
    with contextlib.ExitStack() as undo:
        with Rendezvous(comm, f"opening {place}"):
            check_idle(of.units)
            source = open_deepspeed(place, tag)
            undo.callback(source.close)
            matched = match(model, of.units, source, strict=strict)
            missing, unexpected = matched.left_out
            states, held = None, _held(of, opt)
            if opt is not None:
                found = DeepSpeedStates(source)
                states = match_states(found, held, strict=strict)
                groups = match_groups(opt, source.hyper, source.group_of, source.label)
                missing += states.left_out.missing
                unexpected += states.left_out.unexpected
            # Each rank reads some of the files: together all.
            wanted = {state for each in held for state in each.tensors}
            source.verify(wanted, comm.rank, comm.world)
        with Rendezvous(comm, f"loading {source.label}"):
            take_in(of, source, matched)
            if opt is not None and states is not None:
                take_in_states(found, states)
                for group, taken in zip(opt.param_groups, groups, strict=True):
                    group.update(taken)
    run = source.run
    if opt is not None:
        run = dataclasses.replace(run, notes=(*run.notes, *notes_on(source.hyper, source.label)))
    return LoadedDeepSpeed(Loaded(missing, unexpected), run, _rounding(of, held))


def _rounding(of: Handle, every: Iterable[Held]) -> str:
    """Say how the state formats of these parameters round exact states; "" if they do not."""
    texts = []
    for param in dict.fromkeys(held.param for held in every):
        target = of.states.store[param.flat].format
        exact = state_format("exact", param.dtype, target.count)
        texts.append(rounding(exact, target) if exact is not None else "")
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _held(of: Handle, opt: Optimizer | None) -> list[Held]:
    """The parameters of this model that an optimizer holds. Raises: ValueError if there is none."""
    found = (
        [param for param in opt.params_with_states if param.unit.engine is of]
        if opt is not None
        else []
    )
    if opt is not None and not found:
        raise ValueError(
            f"this {opt.title} holds no parameter of this model; give the optimizer of "
            "model.parameters()"
        )
    return [
        Held(
            param,
            of.optimizer_state(param.at_rest),
            (MASTER, *opt.moments_of(param)),
            tuple(opt.scalars(param)),
        )
        for param in found
        if opt is not None
    ]


def _load(model: torch.nn.Module, opened: Callable[[], NamedTensors], *, strict: bool) -> Loaded:
    """Open, match, and only when all ranks could, write."""
    of = handle(model)
    comm = of.comm
    of.flush()
    with Rendezvous(comm, "opening the values to load"):
        check_idle(of.units)
        source = opened()
        matched = match(model, of.units, source, strict=strict)
    # Only when every rank could open and match: none is half loaded alone.
    with Rendezvous(comm, f"loading {source.label}"):
        take_in(of, source, matched)
    return matched.left_out
