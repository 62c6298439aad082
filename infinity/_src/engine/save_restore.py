"""`inf.save` and `inf.restore`: checkpoints from which training continues bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from infinity._src.base.paths import absolute, check_link
from infinity._src.base.wording import listed
from infinity._src.checkpoint.durable.copies import run_among
from infinity._src.checkpoint.durable.run import DurableRun
from infinity._src.checkpoint.restore import Damaged, Restored, RestoreJob
from infinity._src.checkpoint.save import Save
from infinity._src.engine.handle import Handle, handle

log = logging.getLogger("infinity")

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
    _forget_older_states(of, run, restored.extra)
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
        # `run.files.source` is a copy if the home directory has lost its manifests.
        return None if run.before is None else run.files.source
    if run.waits:
        run.check()
    return source


def _forget_older_states(of: Handle, run: DurableRun | None, extra: object) -> None:
    """Make a later undo return to the restored states, not to states before the restore. extra: the
    caller's restored state. Collective in a durable run."""
    if run is not None:
        of.pipeline.begun = False
        run.restored(extra)
        of.pipeline.commit()  # so that later steps do not overwrite the restored states
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
