"""Loads and exports of an offloaded model in formats of other projects (safetensors,
torch.distributed.checkpoint, DeepSpeed), and `inf.save` and `inf.restore`.

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
            # Parameters take the place of masters. torch's SGD and Muon count no steps.
            (MASTER,) if opt.counts_steps(param) else (MASTER, "step"),
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
    """Start to save everything that training resumes from, while training continues. `.wait()` of
    the result blocks until the checkpoint is complete.

    Saved: parameters, masters, moments, step counts, parameter groups, persistent buffers, and
    `extra`: small state of the caller (the scheduler's `state_dict()`, random generators, the
    position in the data; each rank saves its own), or `handle.extra`. Not saved: gradients that
    wait for a step. With update="delayed" the saved parameters are those after the last step, and
    the first step after a restore computes with them: the delay begins anew.

    opt: the optimizer that owns the parameters, a list of all optimizers, or None without one.
    frozen: False leaves out parameters that require no gradient and have no optimizer states, so
    that a checkpoint of adapters is small; `inf.restore` then needs a model that already has those
    values, by load= or from_pretrained. (A parameter that was frozen after `inf.offload`, in a unit
    with trainable parameters, is saved nevertheless.)

    Call it between steps. It blocks for the save before, and with two or more generations for
    pending updates; otherwise each chunk is copied when its pending update has ended. Later updates
    wait until the states that they replace are copied. While a save runs it takes about 40 MiB in
    addition to the policy's `ram`, 18 MiB for each drive but the first, and 1.5 KiB for each chunk
    of states.

    The checkpoint appears as a whole, on the drive and with checksums, or not at all. An earlier
    checkpoint in `directory` stays valid until then, and is removed afterwards, so the drive needs
    space for both. Each model needs a separate directory. Collective on several ranks, with one
    directory that all of them see.

    Raises: ValueError for what cannot be saved; AioError while another model is saved into the
    directory; RuntimeError inside forward, backward and `gather()`; the error of the save before.
    Later errors are raised by `.wait()`, or else by the next call to the engine.
    """
    of, target = handle(model), absolute(directory, "directory")
    of.flush_versions()
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
    """Resume from a checkpoint of the same model and optimizer. World size, tiers, budget, drives,
    state format and tiles may differ (except tiles of linears along their inputs, and, with
    state="compact", tiles that begin inside of a group of 64 moments).

    Sets parameters, masters, moments, step counts, the values of parameter groups and persistent
    buffers, and drops gradients. Parameters that `inf.save(frozen=False)` left out retain their
    values, and have to be frozen here. Under the same numerics training continues bit for bit as if
    it had not been interrupted (for update="delayed" see `save`). Another state format rounds to
    nearest, which `.rounded` describes; `.notes` lists other differences.

    directory: a checkpoint, or one or several `nvme` directories of a durable run. Each of these
    has a copy of the manifests, so one that remains is enough, and the newest copy is read. If the
    run is the one that this engine's policy continues, and it has no commit, the model stays as it
    was built, and `.step` is 0.

    opt: as in `save`, in the same order; None restores only the parameters (not allowed if the
    policy continues a durable run). strict: False restores what fits, as torch's load_state_dict
    does. Parameters and buffers that the checkpoint lacks are retained, with their states; others
    that the model lacks are left out; `.notes` names both. A different shape or dtype raises
    nevertheless, and so does a parameter that has states here and none in the checkpoint. damaged:
    "report" restores everything that can be read. Elements that cannot be read, because of a bad
    block or a lost drive, retain the values and moments that the model has; `.damaged` names
    parameter, elements and file, and a warning gives the amount. "from-older" restores the newest
    undamaged commit that a durable run retains (`Policy.generations`): training continues from its
    step, `.step`, as without damage. If all are damaged, the newest is restored, and its damaged
    ranges are read from older commits. `.damaged` then lists each such range; its `reason` gives
    the step that it was read from, or says that no commit has it, which is treated as in "report".
    Blocks. Collective on several ranks; each reports the damage of its shard.

    Raises: ValueError naming what does not fit (names, shapes, dtypes, another optimizer); AioError
    (ENOENT) where there is no complete checkpoint; ChecksumError naming file and offset of damage;
    RuntimeError inside forward, backward and `gather()`; PeerFailed where another rank raises one
    of these. If damage is found after some states were written, later calls raise StateInvalid.
    """
    if damaged not in get_args(Damaged):
        raise ValueError(f"damaged={damaged!r}: give 'raise', 'report' or 'from-older'")
    given = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    several = [absolute(each, "directory") for each in given]
    # Several directories are not checked: one may be on a lost drive.
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
    """Return the directory from which a durable run restores; None if it restores itself and has no
    commit."""
    # The directories may also have copies of other runs.
    source = run.files.source if run.must_restore(several) else run_among(several)
    if source.resolve() in (run.files.home.resolve(), run.files.source.resolve()):
        _check_own(of, run, opt, run.files.home.parent)
        # `source` is a copy where the home has lost its manifests.
        return None if run.before is None else run.files.source
    if run.waits:
        run.check()
    return source


def _stay(of: Handle, run: DurableRun | None, extra: object) -> None:
    """Prevent undoing to states before a restore. extra: the caller's restored state. Collective in
    a durable run."""
    if run is not None:
        of.pipeline.begun = False
        run.restored(extra)
        of.pipeline.commit()  # later steps write the other places
    elif of.pipeline.transaction is not None:
        of.pipeline.transaction.states_replaced()


def _check_own(of: Handle, run: DurableRun, opt: Any, directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if the run that this engine continues cannot be restored."""
    # The first step of this process has overwritten the earlier states in the directories.
    if run.begun and (run.files.before is not None or of.pipeline.steps):
        raise ValueError(
            f"this process continues the durable run in {directory}: its earlier states are "
            "already overwritten"
        )
    # Without the optimizer the next commit would lose its states.
    if run.before is not None and not opt and run.has_states and of.policy.durable != "new":
        raise ValueError(
            f"opt={opt!r}: the durable run in {directory} would continue without its optimizer "
            "states, and lose them: give its optimizer; or read the parameters with a policy that "
            "is not durable"
        )


def _warn_of_damage(directory: str | os.PathLike[str], restored: Restored, mode: Damaged) -> None:
    kept = ", and keep the model's values" if mode == "report" else ""
    log.warning(
        "restoring %s: %d elements of %s could not be read%s: %s",
        directory,
        sum(each.stop - each.start for each in restored.damaged),
        listed(dict.fromkeys(each.name for each in restored.damaged)),
        kept,
        restored.damaged[0].reason,
    )
