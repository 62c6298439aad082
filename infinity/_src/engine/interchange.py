"""Loads and exports of an offloaded model in formats of other projects (safetensors,
torch.distributed.checkpoint, DeepSpeed). `inf.save` and `inf.restore` are in save_restore.py.

Loads and exports stream: one tensor of a parameter, or one shard of an export, is in memory at a
time. They block, and are collective on several ranks: all ranks call them and see the same files,
and if one rank fails, all raise. Pickles are parsed, not executed: a file may use only names of a
fixed list, and no name is imported because a file uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
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
from infinity._src.checkpoint.formats.safetensors_writer import (
    module_parts,
    read_value,
    wholes_of,
    write_safetensors,
)
from infinity._src.checkpoint.metadata import buffers_of, persistent_buffers
from infinity._src.checkpoint.reshard import rounding
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.engine.handle import Handle, handle
from infinity._src.memory.flat_layout import state_format
from infinity._src.optim.base import Optimizer

log = logging.getLogger("infinity")


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
    checkpoints have on the hub (for example one tensor per expert), by transformers' conversion:
    as in the checkpoint that the model was loaded from, otherwise as usual for its architecture.
    "modules" writes names and shapes of the model's state dict. For other models both are the same.
    A function returns the name in the files for each name of the state dict, or None to leave the
    tensor out. masters: write the fp32 masters of parameters with an optimizer, instead of the
    rounded values that forward computes with.

    Streams: one shard is in memory at a time, of `shard_bytes_max`, or one unit if that is larger
    (with the hub's names: one group of tensors that are converted together). Blocks for pending
    updates. A tied parameter is written once, under its first name. Files get their names together,
    when all are on the drive. An earlier export in the directory stays until then, so the drive
    needs space for both. Collective on several ranks; rank 0 writes.

    Raises: MemoryError, before anything is read, where a shard (a group that is converted counts
    twice) is larger than the free memory; OSError naming the path; ValueError for a model that is
    not offloaded, and for one whose conversion cannot be reversed, or that this release of
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
    index decides; without an index, its model.safetensors, or else all files) or a file.

    A model of transformers takes the hub's files, converted as `from_pretrained` converts them,
    files with the names of its modules, and a GGUF file.

    Masters take the values in the precision of the file (an fp32 file sets all 32 bits). A
    parameter without optimizer states takes them rounded to its dtype. Moments, step counts,
    gradients and hyper-parameters stay as they are. Blocks, also for pending updates. The file
    needs only one name of a tied parameter. Names, shapes and kinds of dtype are checked before
    anything is written.

    strict=False: names missing in the model or the file are omitted, and returned. Collective on
    several ranks; each stores its shard.

    Raises: ValueError naming what is missing, unexpected or different, an index that points out of
    its directory, a broken file (WeightsError); FileNotFoundError; RuntimeError inside forward,
    backward or gather(). After an OSError or AioError some parameters are loaded and others are
    not: load again before training continues.
    """
    of, place = handle(model), absolute(path, "path")
    of.flush()
    with Rendezvous(of.comm, "opening the values to load"):
        check_idle(of.units)
        source = open_weights(model, place)
        matched = match(model, of.units, source, strict=strict)
    # Only after every rank has opened and matched the files, so that no rank loads alone.
    with Rendezvous(of.comm, f"loading {source.label}"):
        take_in(of, source, matched)
    return matched.left_out


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

    The checkpoint contains `{"model": ..., "optim": ...}` (`keys`) as
    torch.distributed.checkpoint.state_dict makes them, so that a plain or sharded torch model and
    optimizer resume from it: `model.<name>`, `optim.state.<name>.exp_avg` (and all other states,
    "step" included), `optim.param_groups.<i>.<name>`. The groups of inf.Muon are those of a
    torch.optim.Muon and, after them, of a torch.optim.AdamW. opt: the optimizer whose states are
    written; None writes the model only.

    masters: `model.<name>` is the fp32 master, without a loss. False: `model.<name>` is the value
    that forward computes with, and masters lie in `optim.state.<name>.master`. Streams, one
    parameter in memory at a time. Blocks for pending updates. Collective on several ranks; rank 0
    writes. The directory becomes a checkpoint once all of it is on the drive.

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
        # Each part is a rendezvous: when one rank fails, all raise, and no rank waits for it.
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
            # One at a time, so that only one parameter is in memory.
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
    are set from `optim.state.<name>.master` where the checkpoint has it, otherwise from the
    parameters, in the precision of the file. Moments are rounded to the format of the policy's
    `state`. Hyper-parameters stay those of `opt`; None loads only the model. keys[0] is "" for a
    model that was saved without a key (`dcp.save(model.state_dict())`). `.metadata` is a pickle,
    and is read by a parser that knows the few classes which belong there and imports nothing;
    tensors are read with weights_only=True.

    Everything is checked by name and shape before anything is written. strict=False: names that the
    model or the checkpoint lacks are left out, and returned. Blocks. Collective on several ranks;
    each stores its shard.

    Raises: ValueError naming what is missing, unexpected, different, damaged or refused;
    FileNotFoundError; RuntimeError inside forward, backward or gather(). After an error of reading
    or writing some values are loaded and others are not.
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
            # All ranks match everything before any rank writes.
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
    """Resume from a checkpoint of DeepSpeed's ZeRO 1, 2 or 3, or a universal one, written by any
    number of ranks. Blocks.

    directory: the one given to `save_checkpoint`. tag: a folder in it; None takes the folder that
    `latest`, or else `latest_universal`, names. Masters take the fp32 weights; frozen parameters
    and buffers are converted from their dtype in the files. opt: the optimizer of the model's
    parameters. It takes moments, step counts, and the hyper-parameters of each group, matched by
    the names of its parameters. Moments are rounded to the format of the policy's `state`. None
    leaves optimizer states as they are. The result has what the training loop has to take over: the
    loss scaler, the scheduler's state, client state and the count of steps.

    Nothing of DeepSpeed is imported, and pickles are parsed, not executed. Everything is matched by
    name and shape, and every byte that is used is compared with the checksums of its file, before
    anything is written. One tensor is in memory at a time. strict=False: names that the model or
    the checkpoint lacks are left out, and returned. Collective on several ranks; each stores its
    shard.

    Raises: FileNotFoundError; ValueError naming what is missing, unexpected, different, damaged or
    refused: model and pipeline parallelism, DeepSpeed's experts, ZenFlow, files with classes that
    are not DeepSpeed's (`client_state` may have such), an optimizer that was offloaded to NVMe,
    whose states DeepSpeed writes only in part; RuntimeError inside forward, backward or gather().
    After an error of reading or writing some values are loaded and others are not.
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
            # Each rank verifies some of the files; together they verify all.
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
    """Describe how the state formats of these parameters round exact states; "" if they do not."""
    texts = []
    for param in dict.fromkeys(held.param for held in every):
        target = of.states.store[param.flat].format
        exact = state_format("exact", param.dtype, target.count)
        texts.append(rounding(exact, target) if exact is not None else "")
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _held(of: Handle, opt: Optimizer | None) -> list[Held]:
    """Return the parameters of this model that `opt` owns; none for opt=None. Raises: ValueError if
    `opt` owns none."""
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
            # Optional tensors: the parameter can replace a missing master, and torch's SGD and
            # Muon count no steps.
            (MASTER,) if opt.counts_steps(param) else (MASTER, "step"),
        )
        for param in found
        if opt is not None
    ]
