"""The small state from which a killed `infinity train` resumes, stored with the states of a step:
the options that determine losses, random generators, scheduler and held-out losses.

    --durable        the run in the --nvme directories, committed every --durable-every steps
    --save-every     checkpoints in --save-dir
    --resume         resume from durable run or checkpoint, whichever has the later step; from the
                     durable run if their steps are equal; from the checkpoint if the durable run
                     has lost a drive; begin anew if there is neither

A resumed run replaces the source that it does not resume from, so both must be of the same run:
each run draws an id when it begins. With a durable run, a checkpoint in --out is ignored unless an
option names it.

The engine stores `handle.extra` during `opt.step()`, before the scheduler's step. So `SmallState`
captures the state before `opt.step()`, and a resumed run repeats the scheduler's step.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import secrets
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity._src.checkpoint.directory import check_length, newest_heads, read_attachment
from infinity._src.checkpoint.durable.copies import FoundRun, newest_run
from infinity._src.checkpoint.formats.safe_pickle import read_extra
from infinity._src.checkpoint.manifest import Head
from infinity._src.cli.corpus import Corpus
from infinity._src.config.policy import Policy
from infinity.errors import AioError

RULES = (
    "seq", "accumulate", "optimizer", "lr", "warmup", "weight_decay", "clip", "seed", "dtype",
    "state", "update", "delayed_warmup", "tile_linears", "tile_loss", "tile_experts", "lora",
)  # fmt: skip
"""Options that determine the losses of later steps, so a resumed run must not change them. --steps
also does, by the schedule of the learning rate, but may change, so that an ended run can continue.
"""
RULE_OF_STEPS = "--steps"

TIED = "--schedule (with tied weights)"
"""Name of a rule that only affects models with tied weights: the bits of other models do not depend
on the schedule."""
BEFORE = {
    TIED: "horizontal", "--tile-linears": None, "--tile-loss": None, "--tile-experts": None,
    "--lora": None, "--optimizer": "adamw",
}  # fmt: skip
"""Rules that earlier releases did not store, with their values in those releases."""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """Progress of earlier processes of the run. step: number of steps. held_out: (step, loss).
    text: the prompt's continuation before training. same_ranks: rank and number of ranks have not
    changed, so the random generators were restored.
    """

    step: int = 0
    held_out: tuple[tuple[int, float], ...] = ()
    text: str = ""
    same_ranks: bool = True


@dataclasses.dataclass(frozen=True)
class Source:
    """A place to resume from. place: the directory for `inf.restore`.

    step: the step of the newest whole generation. extra: rank 0's small state of that step; None
    before the first step. lost: the missing file of states, of this source or of the durable run
    that this checkpoint replaces; "" if no file is missing.
    """

    place: Path
    step: int
    extra: Any
    lost: str = ""

    @property
    def run(self) -> str:
        """The id of the run that wrote this source; "" if the source does not state one."""
        return str(self.extra.get("run", "")) if isinstance(self.extra, Mapping) else ""

    def rule(self, name: str) -> Any:
        """Return the value of a rule when this source was written; None if the source lacks it."""
        extra = self.extra
        rules = extra.get("train") if isinstance(extra, Mapping) else None
        return rules.get(name) if isinstance(rules, Mapping) else None


def find_source(options: argparse.Namespace, directories: Sequence[Path]) -> Source | None:
    """Return the source to resume from; None for a run from the beginning. Writes nothing.

    directories: directories of the durable run on this rank. Only whole generations are sources; an
    interrupted first commit is not.

    Raises: ValueError if the run would replace a durable run or a checkpoint that `options` do not
    resume; AioError, ChecksumError if the source is damaged, or if the durable run has lost a drive
    and there is no checkpoint.
    """
    run: Source | None = None
    saved: Source | None = None
    if options.durable and directories and (found := newest_run(directories)) is not None:
        run = _look(options, "durable run", directories[0], found)
    named = options.save_every or options.save_dir is not None
    # With a durable run, a checkpoint counts only if an option names it: another run with the same
    # --out may have written the default one.
    if named or (options.resume and (run is None or run.lost)):
        place = save_directory(options)
        saved = _look(options, "checkpoint", place, _newest(place))
    if run is not None and run.lost and saved is None:
        raise AioError(
            f"the durable run cannot resume from step {run.step}: {run.lost}; and there is no "
            f"checkpoint in {save_directory(options)}. Mount the drive again and name it in "
            "--nvme, give --save-dir, or continue in your own loop with the remaining states, by "
            "inf.restore(damaged='report')"
        )
    if run is None or saved is None:
        return run or saved
    same = run.run == saved.run and run.run != ""
    # A run at step 0 has trained nothing, so a checkpoint may replace it.
    if not same and (run.step or not saved.step):
        raise ValueError(
            f"{run.place} holds a durable run at step {run.step}, and {saved.place} a checkpoint "
            f"at step {saved.step} that is not known to be of the same run; resuming would replace "
            "one of them. Give another --save-dir to continue the run, or another first --nvme "
            "to resume from the checkpoint"
        )
    if run.lost:
        return dataclasses.replace(saved, lost=f"step {run.step} of the durable run: {run.lost}")
    # Resuming from the older source would replace the later one.
    return run if run.step >= saved.step else saved


def _look(
    options: argparse.Namespace, kind: str, place: Path, found: FoundRun | None
) -> Source | None:
    """Return `found` in `place` as a source; None if `found` is None. Raises: as `find_source`."""
    if found is None:
        return None
    if not options.resume:
        option = "--nvme" if kind == "durable run" else "--save-dir"
        raise ValueError(
            f"{place} already holds a {kind}: continue it by --resume; for another run name "
            f"another directory ({option}), or move {found.place} elsewhere"
        )
    # All ranks read rank 0's state, so that they decide alike; rules are equal on all ranks.
    head = found.heads[0]
    extra = read_extra(read_attachment(found.place, head.extra)) if head.extra is not None else None
    return Source(place, head.step, extra, _lost(found.place, found.heads))


def _lost(place: Path, heads: Sequence[Head]) -> str:
    """Return the error of a file of states that is missing or too short; "" without one."""
    for file in (file for head in heads for file in head.files):
        try:
            check_length(place / file.name, file)
        except AioError as error:
            return str(error)
    return ""


def _newest(place: Path) -> FoundRun | None:
    """Return the newest whole checkpoint; None if there is none."""
    try:
        return FoundRun(place, newest_heads(place))
    except AioError as error:
        # ENOENT: no checkpoint, or parts of a first save whose ranks were killed. Other errors mean
        # damage.
        if error.errno != errno.ENOENT:
            raise
        return None


def newest_step(place: Path) -> int:
    """Return the step of the newest whole checkpoint; -1 without a checkpoint. Raises: AioError,
    ChecksumError for a damaged checkpoint.
    """
    found = _newest(place)
    return found.heads[0].step if found is not None else -1


def save_directory(options: argparse.Namespace) -> Path:
    """Return the directory of checkpoints: --save-dir, by default `checkpoint` in --out."""
    directory: Path = options.save_dir or options.out / "checkpoint"
    return directory


def value_of(options: argparse.Namespace, name: str) -> Any:
    """Return the value of an option; if it was left out, the default of the policy's field."""
    given = getattr(options, name)
    # Options that are not fields of the policy, such as --tile-linears, have the default None.
    return getattr(Policy, name, None) if given is None else given


def _shown(value: Any) -> str:
    return f"{value[0]} (checksum {value[1]:08x})" if isinstance(value, list) else str(value)


class SmallState:
    """The small state of one rank. device: the rank's compute device. source: the source to resume
    from; None: the run begins. tied: the model has tied weights. base: checksum of the frozen model
    that a resumed run reads again; None: the states have all of the model.

    The constructor checks the source, so it must run before the model is offloaded: after
    `inf.restore`, states are rounded to this run's format, and a replaced durable run is gone.

    Raises: ValueError if infinity train did not write the source, or wrote it with other options.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        corpus: Corpus,
        device: torch.device,
        source: Source | None,
        *,
        rank: int,
        world: int,
        tied: bool = False,
        base: int | None = None,
    ) -> None:
        self._device = device
        self._place = [rank, world]
        self._steps = options.steps
        self._rules: dict[str, Any] = {
            f"--{name.replace('_', '-')}": value_of(options, name) for name in RULES
        }
        if tied and options.accumulate > 1:
            self._rules[TIED] = options.schedule
        # The number of ranks may change if the rows of a batch, over all ranks, stay as many.
        self._rules["--batch times ranks"] = world * options.batch
        self._rules["training windows of the text"] = [
            len(corpus.train),
            zlib.crc32(corpus.train.numpy().tobytes()),
        ]
        if base is not None:
            self._rules["checksum of the model beside the adapters"] = base
        # Held-out windows do not affect steps, but losses on other windows would break the curve.
        self._rules["held-out windows of the text (--eval-batches, --holdout)"] = [
            len(corpus.held_out),
            zlib.crc32(corpus.held_out.numpy().tobytes()),
        ]
        if source is not None:
            self._check(source)
        # Each rank draws an id, but only rank 0's id is read again.
        self.run = (source.run if source is not None else "") or secrets.token_hex(8)

    def _check(self, source: Source) -> None:
        # At step 0 no step depends on any rule.
        if source.step == 0:
            return
        extra = source.extra
        if not isinstance(extra, Mapping) or "train" not in extra:
            raise ValueError(
                f"{source.place} was not written by infinity train, so its position in the text is "
                "unknown; continue it by inf.restore in the loop that wrote it"
            )
        # A rule that an earlier release did not store counts as unchanged.
        changed = [
            f"{name} was {_shown(was)} and is {_shown(now)}"
            for name, now in self._rules.items()
            if (was := extra["train"].get(name, BEFORE.get(name, now))) != now
        ]
        if changed:
            raise ValueError(
                f"{source.place}, step {source.step}, cannot resume with changed options: "
                f"{'; '.join(changed)}. Give the options as they were, or begin anew from an "
                "exported model"
            )

    def capture(
        self, scheduler: Any, held_out: Sequence[tuple[int, float]], text: str
    ) -> dict[str, Any]:
        """Return the state to store with the step. Call it just before `opt.step()`. held_out:
        (step, loss). text: the prompt's continuation before training.
        """
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return {
            "train": {**self._rules, RULE_OF_STEPS: self._steps},
            "run": self.run,
            "place": self._place,
            "rng": rng,
            "scheduler": scheduler.state_dict(),
            "held_out": [list(each) for each in held_out],
            "text": text,
        }

    def take_up(self, extra: Any, step: int, scheduler: Any) -> Earlier:
        """Restore scheduler and random generators from `extra`, which `capture` returned at `step`.
        Step 0: no step was committed, and nothing is restored.
        """
        if step == 0:
            return Earlier()
        scheduler.load_state_dict(extra["scheduler"])
        with warnings.catch_warnings():
            # An earlier process has run the `opt.step()` before this scheduler's step, of which
            # torch would warn.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            scheduler.step()
        same = extra["place"] == self._place
        if same:
            torch.set_rng_state(extra["rng"]["cpu"])
            if "cuda" in extra["rng"] and self._device.type == "cuda":
                torch.cuda.set_rng_state(extra["rng"]["cuda"], self._device)
        held_out = tuple((int(at), float(loss)) for at, loss in extra["held_out"])
        return Earlier(step, held_out, str(extra["text"]), same)
