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
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from infinity._src.base.dtypes import check_kept, check_torch_saves
from infinity._src.base.paths import absolute, check_link
from infinity._src.base.wording import listed
from infinity._src.checkpoint.durable.copies import run_among
from infinity._src.checkpoint.durable.run import DurableRun
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
from infinity._src.checkpoint.restore import Damaged, Restored, RestoreJob
from infinity._src.checkpoint.save import Save
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
    twice) is more than the memory that remains; OSError naming the path; ValueError for a model
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
    of, place = handle(model), absolute(path, "path")
    of.flush()
    with Rendezvous(of.comm, "opening the values to load"):
        check_idle(of.units)
        source = open_weights(model, place)
        matched = match(model, of.units, source, strict=strict)
    # Only when every rank could open and match: none is half loaded alone.
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

    The checkpoint stands for `{"model": ..., "optim": ...}` (`keys`) as
    torch.distributed.checkpoint.state_dict makes them, so that a plain or sharded torch model and
    optimizer resume from it: `model.<name>`, `optim.state.<name>.exp_avg` (and each other state,
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


# -- inf.save and inf.restore ----------------------------------------------------------------------


__all__ = ["Restored", "Save", "restore", "save"]


def save(
    model: torch.nn.Module,
    opt: Any,
    directory: str | os.PathLike[str],
    *,
    extra: Any = None,
    frozen: bool = True,
) -> Save:
    """Start saving everything that training resumes from; training goes on meanwhile. `.wait()` of
    the result returns when the checkpoint is whole.

    Saved: parameters, masters, moments, step counts, parameter groups, persistent buffers, and
    `extra`: small state of yours (the scheduler's `state_dict()`, random generators, the place in
    the data; each rank its own), or `handle.extra`. Not saved: gradients that wait for a step. With
    update="delayed" the parameters after the last step are, with which the first step after a
    restore computes: the delay begins anew.

    opt: the optimizer that holds the parameters, a list of all of them, or None where none does.
    frozen: False leaves out the parameters that require no gradient and have no optimizer states,
    so that a checkpoint of adapters is as small as they are; `inf.restore` then wants a model that
    has those values already, by load= or from_pretrained. (One that was frozen after `inf.offload`,
    beside others of its unit that learn, is saved all the same.)

    Call it between steps. Waits for pending updates and for the save before; then an update of
    states that are not copied yet waits until they are. A save takes about 30 MiB beside the
    policy's `ram` while it runs, 9 MiB more for each drive and half a KiB for each chunk of states.

    The checkpoint appears as a whole, on the drive and with checksums, or not at all: one that is
    in `directory` already stays valid until then, and is removed after. So there has to be room for
    both. Each model has a directory of its own. On several ranks all call it, with one directory
    that all of them see.

    Raises: ValueError for what cannot be saved; AioError while another model is saved into the
    directory; RuntimeError inside forward, backward and `gather()`; the error of the save before.
    Later errors are raised by `.wait()`, or else by the next call that meets the engine.
    """
    of, target = handle(model), absolute(directory, "directory")
    # A save begins between steps: no update may be pending.
    of.flush()
    kept = extra if extra is not None else of.extra
    return of.saving.begin(
        model, opt, target, step=of.pipeline.steps, extra=kept, run=of.durable, frozen=frozen
    )


def restore(
    model: torch.nn.Module,
    opt: Any,
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    strict: bool = True,
    damaged: Damaged = "raise",
) -> Restored:
    """Go on from a checkpoint of the same model and optimizer; world size, tiers, budget, drives,
    state format and tiles may differ (but tiles of linears along their inputs, and those that begin
    inside of a group of 64 moments with state="compact").

    Sets parameters, masters, moments, step counts, the values of parameter groups and persistent
    buffers, and drops gradients. Parameters that `inf.save(frozen=False)` left out keep the values
    that they have, and have to be frozen here. Under the same numerics training goes on bit for bit
    as if nothing had been (update="delayed": as `save` says). Another state format rounds to
    nearest, and `.rounded` says what; `.notes` says what else is different.

    directory: a checkpoint, or an `nvme` directory of a durable run, or several of one run: each
    has a copy of the manifests, so any one that remains will do, and the newest is taken. The
    model stays as it was built, and `.step` is 0, if that is the run that this engine's own policy
    continues with and no commit of it exists.

    opt: as in `save`, in the same order; None restores the parameters alone (not where the policy
    continues with a durable run). strict: False restores what fits, as torch's load_state_dict:
    parameters and buffers that the checkpoint lacks are kept, with their states, others that it has
    are left out, and `.notes` names both; another shape or dtype raises as ever, and so does a
    parameter that has states here and none there. damaged: "report" brings back all that can be
    read: what cannot, of a bad block or a drive that is gone, keeps the values and moments that the
    model has, and `.damaged` names parameter, elements and file; a warning says how much.
    "from-older" restores the newest commit that is whole, of those that a durable run keeps
    (`Policy.generations`): training from it is as from one that was never damaged, and `.step` says
    which it is. If none is whole, the newest is restored, with what is damaged there from older
    ones; `.damaged` has each such range, and its `reason` the step, or that nothing has it, as with
    "report". Blocks. On several ranks all call it, and each reports its shard.

    Raises: ValueError naming what does not fit (names, shapes, dtypes, another optimizer), AioError
    (ENOENT) where there is no whole checkpoint, ChecksumError naming file and offset of what is
    damaged, RuntimeError inside forward, backward and `gather()`, PeerFailed where another rank
    raises one of these. Damage that is met when some states were written already: later calls raise
    StateInvalid.
    """
    if damaged not in get_args(Damaged):
        raise ValueError(f"damaged={damaged!r}: give 'raise', 'report' or 'from-older'")
    given = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    several = [absolute(each, "directory") for each in given]
    # One of several may be a drive that is lost.
    if len(several) == 1:
        check_link(several[0])
    of = handle(model)
    of.flush()
    run = of.durable
    source = run_among(several) if run is None else _source_of_run(of, run, opt, several)
    if source is None:
        return Restored(0, None, "", ())
    restored = RestoreJob(
        of.saving, of.gradients, of.pipeline, of.saving.comm, of.policy,
        strict=strict, damaged=damaged,
    ).restore(model, opt, source)  # fmt: skip
    if restored.damaged:
        _warn_of_damage(source, restored, damaged)
    _stay(of, run, restored.extra)
    return restored


def _source_of_run(
    of: Handle, run: DurableRun, opt: Any, several: Sequence[str | os.PathLike[str]]
) -> Path | None:
    """Return the directory that a durable run restores; None: it is its own, without a commit."""
    # Other runs may have copies there, too.
    source = run.files.source if run.must_restore(several) else run_among(several)
    if source.resolve() in (run.files.home.resolve(), run.files.source.resolve()):
        _check_own(of, run, opt, run.files.home.parent)
        # Where the home has lost its manifests, a copy has them.
        return None if run.before is None else run.files.source
    if run.waits:
        run.check()
    return source


def _stay(of: Handle, run: DurableRun | None, extra: object) -> None:
    """Let no undo go back behind a restore. extra: that was restored. Collective in a durable
    run."""
    if run is not None:
        of.pipeline.begun = False
        run.restored(extra)
        of.pipeline.commit()  # what is written from here on stands beside it
    elif of.pipeline.transaction is not None:
        of.pipeline.transaction.states_replaced()


def _check_own(of: Handle, run: DurableRun, opt: Any, directory: str | os.PathLike[str]) -> None:
    """Raise ValueError where the run that this engine continues with cannot be restored."""
    # The first step of this process has replaced what the directories held.
    if run.begun and (run.files.before is not None or of.pipeline.steps):
        raise ValueError(
            f"the durable run in {directory} goes on in this process: what was there before is "
            "replaced already"
        )
    # Going on without the optimizer would lose its states at the next commit.
    if run.before is not None and not opt and run.has_states and of.policy.durable != "new":
        raise ValueError(
            f"opt={opt!r}: the durable run in {directory} would go on without its optimizer "
            "states, and lose them: give its optimizer; or read the parameters with a policy "
            "that is not durable"
        )


def _warn_of_damage(directory: str | os.PathLike[str], restored: Restored, mode: Damaged) -> None:
    kept = ", and keep the values that the model had" if mode == "report" else ""
    log.warning(
        "restoring %s: %d elements of %s could not be read%s: %s",
        directory,
        sum(each.stop - each.start for each in restored.damaged),
        listed(dict.fromkeys(each.name for each in restored.damaged)),
        kept,
        restored.damaged[0].reason,
    )
