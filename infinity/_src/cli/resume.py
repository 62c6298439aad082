"""State that a killed `infinity train` goes on from: the place in the text, random generators,
scheduler and held-out losses, kept with the states of a step.

    --durable        the run in the --nvme directories, committed with every step
    --save-every     checkpoints in --save-dir
    --resume         the later step of the two, the run's where both have one step; the beginning
                     where there is neither; the checkpoint where the run has lost a drive

Going on from one of the two replaces the other, so they have to be of one run: each run has an id,
drawn when it begins. A checkpoint in --out that no option names is passed over beside a run.

The state that is kept is the one at `opt.step()`, as `handle.extra` is taken then: the scheduler
moves on after it, and does so again when a run goes on.
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
    "steps", "seq", "accumulate", "lr", "warmup", "weight_decay", "clip", "seed", "dtype", "state",
    "update", "delayed_warmup", "tile_linears", "tile_experts",
)  # fmt: skip
"""Options that decide the losses of the steps to come, and that going on must not change."""

TIED = "--schedule (with tied weights)"
"""A rule of models with such weights; the bits of others have it not."""
BEFORE = {TIED: "horizontal"}
"""Rules that earlier releases did not keep, as they had them."""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """Steps that were taken before this process: their number, held-out losses, and the prompt's
    continuation before them. same_ranks: random generators went on, too.
    """

    step: int = 0
    held_out: tuple[tuple[int, float], ...] = ()
    text: str = ""
    same_ranks: bool = True


@dataclasses.dataclass(frozen=True)
class Source:
    """A place to go on from: the directory that `inf.restore` shall read.

    step: of its newest whole generation. extra: rank 0's small state of that step; None where it
    has none, as before the first step. lost: what the run that it stands in for has lost, or it
    itself; "" where all is there.
    """

    place: Path
    step: int
    extra: Any
    lost: str = ""

    @property
    def run(self) -> str:
        """The id of the run that wrote it; "" where it does not say."""
        return str(self.extra.get("run", "")) if isinstance(self.extra, Mapping) else ""


def find_source(options: argparse.Namespace, directories: Sequence[Path]) -> Source | None:
    """Return what to go on from; None for a run from the beginning. Reads, and writes nothing.

    Only whole generations count: parts of a first commit hold nothing to go on from.

    Raises: ValueError where a run or a checkpoint would be replaced that `options` do not go on
    with; AioError, ChecksumError for one that is damaged, or has lost a drive without a checkpoint.
    """
    run: Source | None = None
    saved: Source | None = None
    if options.durable and directories and (found := newest_run(directories)) is not None:
        run = _look(options, "durable run", directories[0], found)
    named = options.save_every or options.save_dir is not None
    # Beside a run only where it is named: another run, with the same --out, may have left it.
    if named or (options.resume and (run is None or run.lost)):
        place = save_directory(options)
        saved = _look(options, "checkpoint", place, _newest(place))
    if run is not None and run.lost and saved is None:
        raise AioError(
            f"the durable run cannot go on from step {run.step}: {run.lost}; and there is no "
            f"checkpoint in {save_directory(options)}. Mount the drive again and name it in "
            "--nvme, give --save-dir, or go on in a loop of yours with what is left, by "
            "inf.restore(damaged='report')"
        )
    if run is None or saved is None:
        return run or saved
    same = run.run == saved.run and run.run != ""
    # At step 0 a run has only begun: a checkpoint may replace it.
    if not same and (run.step or not saved.step):
        raise ValueError(
            f"{run.place} holds a durable run at step {run.step}, and {saved.place} a checkpoint "
            f"at step {saved.step} that is not known to be of the same run; going on would replace "
            "one of them. Give another --save-dir to go on with the run, or another first --nvme "
            "to go on from the checkpoint"
        )
    if run.lost:
        return dataclasses.replace(saved, lost=f"step {run.step} of the durable run: {run.lost}")
    # The later: steps that go on from an older one would replace it. Of equals the run.
    return run if run.step >= saved.step else saved


def _look(
    options: argparse.Namespace, kind: str, place: Path, found: FoundRun | None
) -> Source | None:
    """Return what there is to go on from. Raises: as `find_source`."""
    if found is None:
        return None
    if not options.resume:
        option = "--nvme" if kind == "durable run" else "--save-dir"
        raise ValueError(
            f"{place} holds a {kind} already: go on with it by --resume; for another run name "
            f"another directory ({option}), or move {found.place} to where you keep it"
        )
    # Of rank 0 on all ranks, which have to decide alike; the rules are the same on each.
    head = found.heads[0]
    extra = read_extra(read_attachment(found.place, head.extra)) if head.extra is not None else None
    return Source(place, head.step, extra, _lost(found.place, found.heads))


def _lost(place: Path, heads: Sequence[Head]) -> str:
    """Say which file of states is gone; "" where all are there, in their lengths."""
    for file in (file for head in heads for file in head.files):
        try:
            check_length(place / file.name, file)
        except AioError as error:
            return str(error)
    return ""


def _newest(place: Path) -> FoundRun | None:
    """Return the newest whole checkpoint; None where there is none."""
    try:
        return FoundRun(place, newest_heads(place))
    except AioError as error:
        # Ranks that were killed in their first save leave parts of it. Damage is no such thing.
        if error.errno != errno.ENOENT:
            raise
        return None


def newest_step(place: Path) -> int:
    """Return the step of the newest whole checkpoint; -1 where there is none. Raises: AioError,
    ChecksumError for one that is damaged.
    """
    found = _newest(place)
    return found.heads[0].step if found is not None else -1


def save_directory(options: argparse.Namespace) -> Path:
    """Return the place of checkpoints."""
    directory: Path = options.save_dir or options.out / "checkpoint"
    return directory


def value_of(options: argparse.Namespace, name: str) -> Any:
    """Return the value of an option, or that of the policy where it was left out."""
    given = getattr(options, name)
    # Of what is no field of the policy, as tiles, None is the default.
    return getattr(Policy, name, None) if given is None else given


class SmallState:
    """The small state of one rank's run. device: the one it computes on. source: what the run goes
    on from; None from the beginning. tied: the model has weights that it uses several times.

    Make it before the model is offloaded: once `inf.restore` has returned, the states are rounded
    to this run's format, and a durable run's own are removed.

    Raises: ValueError for a source of something else than infinity train, or of other options.
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
    ) -> None:
        self._device = device
        self._place = [rank, world]
        self._rules: dict[str, Any] = {
            f"--{name.replace('_', '-')}": value_of(options, name) for name in RULES
        }
        if tied and options.accumulate > 1:
            self._rules[TIED] = options.schedule
        # Ranks may be fewer or more, if together they take as many rows of a batch.
        self._rules["--batch times ranks"] = world * options.batch
        self._rules["training windows of the text"] = [
            len(corpus.train),
            zlib.crc32(corpus.train.numpy().tobytes()),
        ]
        # They decide no step, but losses of other windows are no one curve.
        self._rules["held-out windows of the text (--eval-batches, --holdout)"] = [
            len(corpus.held_out),
            zlib.crc32(corpus.held_out.numpy().tobytes()),
        ]
        if source is not None:
            self._check(source)
        # Of all ranks rank 0's is read again.
        self._run = (source.run if source is not None else "") or secrets.token_hex(8)

    def _check(self, source: Source) -> None:
        # At step 0 nothing was trained under any rules.
        if source.step == 0:
            return
        extra = source.extra
        if not isinstance(extra, Mapping) or "train" not in extra:
            raise ValueError(
                f"{source.place} was not written by infinity train: it does not say how far in the "
                "text its step is; go on with it by inf.restore in the loop that wrote it"
            )
        changed = [
            f"{name} was {extra['train'].get(name, BEFORE.get(name))} and is {now}"
            for name, now in self._rules.items()
            # An earlier release may have kept fewer.
            if extra["train"].get(name, BEFORE.get(name, now)) != now
        ]
        if changed:
            raise ValueError(
                f"{source.place}, step {source.step}, cannot go on under other rules: "
                f"{'; '.join(changed)}. Give them as they were, or begin anew from an exported "
                "model"
            )

    def capture(
        self, scheduler: Any, held_out: Sequence[tuple[int, float]], text: str
    ) -> dict[str, Any]:
        """Return the state as it is now, just before `opt.step()`."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return {
            "train": dict(self._rules),
            "run": self._run,
            "place": self._place,
            "rng": rng,
            "scheduler": scheduler.state_dict(),
            "held_out": [list(each) for each in held_out],
            "text": text,
        }

    def take_up(self, extra: Any, step: int, scheduler: Any) -> Earlier:
        """Go on from the state that was captured at `step`, which is 0 where no step was committed.
        """
        if step == 0:
            return Earlier()
        scheduler.load_state_dict(extra["scheduler"])
        with warnings.catch_warnings():
            # It followed the committed step, which was taken by another process.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            scheduler.step()
        same = extra["place"] == self._place
        if same:
            torch.set_rng_state(extra["rng"]["cpu"])
            if "cuda" in extra["rng"] and self._device.type == "cuda":
                torch.cuda.set_rng_state(extra["rng"]["cuda"], self._device)
        held_out = tuple((int(at), float(loss)) for at, loss in extra["held_out"])
        return Earlier(step, held_out, str(extra["text"]), same)
