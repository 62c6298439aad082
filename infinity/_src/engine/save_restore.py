"""`inf.save` and `inf.restore`: a run's states in a directory, and back. The parts are in
`infinity._src.checkpoint`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
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
    """Start saving everything that training goes on from; training goes on meanwhile. `.wait()` of
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
    has a copy of the manifests, so any one that is left will do, and the newest is taken. The
    model stays as it was built, and `.step` is 0, if that is the run that this engine's own policy
    goes on with and no commit of it exists.

    opt: as in `save`, in the same order; None restores the parameters alone (not where the policy
    goes on with a durable run). strict: False restores what fits, as torch's load_state_dict:
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
    # Other runs may have copies there, too.
    mine = run is not None and run.must_restore(several)
    source = run.files.source if run is not None and mine else run_among(several)
    own = run is not None and source.resolve() in (
        run.files.home.resolve(),
        run.files.source.resolve(),
    )
    if run is not None and own:
        _check_own(of, run, opt, run.files.home.parent)
        if run.before is None:
            return Restored(0, None, "", ())
        # Where the home has lost its manifests, a copy has them.
        source = run.files.source
    elif run is not None and run.waits:
        run.check()
    restored = RestoreJob(
        of.saving, of.gradients, of.pipeline, of.saving.comm, of.policy,
        strict=strict, damaged=damaged,
    ).restore(model, opt, source)  # fmt: skip
    if restored.damaged:
        _warn_of_damage(source, restored, damaged)
    _stay(of, run, restored.extra)
    return restored


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
    """Raise ValueError where the run that this engine goes on with cannot be restored."""
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
