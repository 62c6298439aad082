"""`infinity train`: an ordinary training loop over an offloaded model, with a report.

The loop is the one that a user would write, with measurements and saves. Results in --out:

    metrics.jsonl   one record per line (`infinity._src.base.metrics_file`)
    timeline.json   one step, unit by unit (`infinity._src.base.step_timeline`)
    report.html     a page of these two files (needs plotly); `infinity report` makes it again
    trace.json      the timeline, for https://ui.perfetto.dev
    loss.png        training and held-out loss (needs matplotlib)
    metrics.csv, tensorboard/, wandb/  with --report-to (`infinity._src.cli.trackers`)
    *.safetensors, config.json, tokenizer ...: the trained model; from_pretrained(out) loads it
    checkpoint/     with --save-every; --resume resumes from it or from the durable run
                    (`infinity._src.cli.resume`)

With --schedule vertical the micro-batches of a step share a pass (`inf.microbatched`); with
--schedule horizontal each has a pass. Both give the same bits if a micro-batch uses each parameter
once.

A resumed run keeps the records up to the step from which it resumes. It drops the records of later
steps, which were lost and are repeated.

On several ranks (torchrun; `infinity._src.cli.torchrun`) each rank trains on its rows of a larger
batch: N ranks with --batch 1 compute what one rank computes with --batch N, except that in a mean
over tokens (--chat) the rows of each rank are a micro-batch. Rank 0 records its traffic, memory and
times.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

import infinity as inf
from infinity._src.base.console import say
from infinity._src.base.cpu_features import bf16_instructions
from infinity._src.base.metrics_file import FILE_NAME, SCHEMA, MetricsFile, read_rows
from infinity._src.base.rss import peak_rss_bytes, reset_peak_rss
from infinity._src.base.sizes import MIB
from infinity._src.base.step_timeline import FILE_NAME as TIMELINE_NAME
from infinity._src.base.telemetry import configure_logging
from infinity._src.cabi.installation import is_installed, not_installed
from infinity._src.cli import hf_model
from infinity._src.cli.corpus import (
    Corpus,
    arguments_of,
    build_corpus,
    ids_of,
    steps_of,
    weight_of,
)
from infinity._src.cli.html_report import PAGE_NAME, write_report
from infinity._src.cli.report import (
    StepDisplay,
    StepRecord,
    Summary,
    drives_text,
    plot_loss,
    show_summary,
    steady,
    step_display,
    step_limits,
)
from infinity._src.cli.resume import (
    RULE_OF_STEPS,
    Earlier,
    SmallState,
    Source,
    find_source,
    newest_step,
    save_directory,
)
from infinity._src.cli.stop_signals import name_of, status_of
from infinity._src.cli.torchrun import Joined, joined
from infinity._src.cli.trackers import Tracker, open_trackers, reported
from infinity._src.cli.train_errors import is_foreseen, say_error, text_of_error
from infinity._src.cli.train_setup import (
    check_options,
    learning_rate,
    make_optimizer,
    policy_of,
    slices_of,
)
from infinity._src.engine.step_limits import micro_batches_text
from infinity._src.engine.step_log import StepMeter
from infinity._src.measure import hardware
from infinity._src.measure.swap import SwapTask, measure_swap
from infinity._src.memory.flat_layout import state_format
from infinity._src.memory.roofline import AtRest, Drives, Moved
from infinity._src.microbatch.random_streams import RandomStreams
from infinity._src.params.discover import find_parameters
from infinity.aio._swap_file import resolve_directories
from infinity.errors import (
    AioError,
    EngineClosed,
    ProcessGroupChanged,
    RankError,
    SlicesError,
    StateInvalid,
    StepUndone,
)

log = logging.getLogger("infinity")

_SAVE_FAULTS = (OSError, MemoryError, RuntimeError)
"""Errors of a save after which training continues; RuntimeError: a thread cannot start."""
_ENGINE_FAULTS = (StepUndone, StateInvalid, RankError, EngineClosed, ProcessGroupChanged)
"""Errors of the engine, which are not faults of a save even if a save raises them."""
STEPS = 20
"""Steps of a run without --steps and --epochs."""
_BENCH_BYTES = 512 * MIB
_UNDONE_MAX = 20
"""Undos without progress after which the run ends."""
_ALONE_STEP = 3
"""The step of a process that begins with no update pending, so that its first forward is measured
undisturbed. Caches and pools are warm by then.
"""


def run_train(options: argparse.Namespace, console: Console | None = None) -> int:
    """Run the training of `options`. Returns the exit status: 0 for success, 1 for a fault, 2 for a
    user's mistake, 128 + n after the signal n (`infinity._src.cli.stop_signals`).

    If an error stops one of several ranks, one rank prints it, and no rank returns 0.
    """
    configure_logging()
    console = console or Console()
    try:
        check_options(options)
        with joined(options.device) as ranks:
            return _train(options, console, ranks)
    except ValueError as error:
        # Ranks raise the same error before they join: rank 0 prints it.
        if os.environ.get("RANK", "0") == "0":
            say_error(console, error)
        return 2


def _train(options: argparse.Namespace, console: Console, ranks: Joined) -> int:
    # True once this rank has called `tells`, which it must not call twice.
    reported = False
    # True after an error whose traceback is shown, even if closing then raises another error.
    unforeseen = False
    # torch.distributed raises RuntimeError if another rank has ended.
    lost = (RuntimeError,) if ranks.world > 1 else ()
    shown = console if ranks.first else Console(quiet=True)
    try:
        with ranks.signals:
            with ExitStack() as stack:
                run: _Run | None = None
                try:
                    run = _Run(options, shown, stack, ranks)
                    status = run.run()
                except (KeyboardInterrupt, Exception) as error:
                    # Record the error before the stack closes the connections to other ranks, which
                    # look for it.
                    reported, tells = True, ranks.tells(error)
                    unforeseen = isinstance(error, Exception) and not is_foreseen(error)
                    if tells:
                        kept = run is not None and bool(run.records)
                        say_error(console, error, options, ranks, kept=kept)
                    raise
            # Wait for all ranks, since torchrun ends the remaining ranks when one has ended. Ranks
            # also agree on a signal, so that all return the same status.
            ranks.sums()
            return 128 + ranks.signal if ranks.signal else status
    except KeyboardInterrupt as error:
        return status_of(error)
    except Exception as error:
        if not isinstance(error, lost) and (unforeseen or not is_foreseen(error)):
            raise
        if not reported and ranks.tells(error):
            say_error(console, error, options, ranks)
        number = ranks.ended_by()
        return 128 + number if number else 2 if isinstance(error, ValueError) else 1


def _one_by_one(error: SlicesError) -> str:
    return f"{error}. With --schedule horizontal micro-batches pass the model one by one"


@dataclasses.dataclass
class _Phase:
    """Times of one step's passes, in seconds, without waits."""

    first_forward_s: float = 0.0
    last_backward_s: float = 0.0
    compute_s: float = 0.0


class _Turn(NamedTuple):
    """State of the loop when a step begins: scheduler and random generators."""

    scheduler: dict[str, Any]
    cpu: torch.Tensor
    cuda: torch.Tensor | None


def _text_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_text_of(each) for each in value]
    return str(value) if isinstance(value, Path) else value


class _Run:
    """One run. `stack` closes the files, the model and the trackers that the run opens, in reverse
    order, also after an error.
    """

    # The save in progress. A class attribute, since a callback of `stack` reads it even if
    # `__init__` fails.
    save: inf.Save | None = None
    # The error of the newest save, if it failed.
    unsaved: Exception | None = None
    # True once a save of this process has begun.
    saves = False
    # The step of the newest save that the run has tried.
    saved_step: int | None = None
    # The step of the newest save that could not read states.
    misread: int | None = None

    def __init__(
        self, options: argparse.Namespace, console: Console, stack: ExitStack, ranks: Joined
    ) -> None:
        self.began_s = time.monotonic()
        self.options = options
        self.console = console
        self.ranks = ranks
        self.policy = policy_of(options, ranks.device)
        self._say(f"reading the tokenizer of {options.model} and the text")
        self.pretrained = hf_model.find_pretrained(options.model)
        self.corpus: Corpus = build_corpus(
            options,
            self.pretrained.tokenize,
            tokenizer=self.pretrained.tokenizer,
            ranks=ranks.world,
        )
        for note in self.corpus.notes:
            self._say(f"  {note}")
        self.directories = resolve_directories(
            self.policy.directories, rank=ranks.rank, local_rank=ranks.local_rank
        )
        # Before the run writes anything: `find_source` raises if it would replace a durable run or
        # checkpoint.
        found = find_source(options, self.directories)
        self._set_steps(found)
        self.device = torch.device(self.policy.device)
        self._choose_dtype(found)
        self.passes = options.accumulate // slices_of(options)
        self.model: Any = self._make_model()
        # `SmallState` checks the source before the model is offloaded: a restore, or a new durable
        # run, discards the source's states.
        self.small = self._make_small_state(found)
        self._choose_source(found)
        if ranks.first:
            _make_out(options.out, stack)
        self._load(stack)
        # Opened after `_load`, which may refuse the options or fail to measure drives and memory.
        self.metrics = MetricsFile(
            options.out / FILE_NAME if ranks.first else None, keeps=self.source is not None
        )
        stack.callback(self.metrics.close)
        self.optimizer = make_optimizer(options, self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate(step, options.warmup, options.steps)
        )
        self.records: list[StepRecord] = []
        self.last = self.handle.stats()
        self.held_out: list[tuple[int, float]] = []
        self.text_before = ""
        # Loading may need more RAM than training, so their peaks are separate. 0: not measured yet.
        self.peak_before = self.peak_training = 0
        # If earlier processes have taken all steps: steps with a held-out loss in the file.
        self.recorded = set[int]()
        self.earlier, self.earlier_records = self._go_on()
        self.trackers = self._open_trackers(stack)
        # A stopped run also writes its page.
        stack.callback(self._leave_page)

    def _open_trackers(self, stack: ExitStack) -> list[Tracker]:
        """Open the trackers of --report-to, which `stack` closes."""
        if not self.ranks.first:
            return []
        names, out = self.options.report_to or (), self.options.out
        after = 0 if self.ended else self.earlier.step
        about = self._description()
        found = open_trackers(names, out, about, run=self.small.run, after=after)
        for tracker in found:
            stack.callback(tracker.close)
        return found

    def _report(self, kind: str, row: dict[str, Any]) -> None:
        """Record the figures of a step or a held-out measurement, and report them to trackers."""
        self.metrics.add(kind, row)
        figures = reported(row) if kind == "step" else {"held_out_loss": row["loss"]}
        for tracker in self.trackers:
            tracker.log(row["step"], figures)

    def _choose_source(self, found: Source | None) -> None:
        """Set the source to restore, and whether the model's files are read nevertheless."""
        options = self.options
        self.source = found.place if found is not None else None
        self.lost = found.lost if found is not None else ""
        if options.durable and self.source is not None and self.source != self.directories[0]:
            # Resume from a checkpoint of a later step: the next commit replaces the durable run.
            self.policy = dataclasses.replace(self.policy, durable="new")
        # A restore brings all values, so the model's files need not be read. A new durable run may
        # commit before the restore, so it reads them.
        if options.durable:
            self.unread = self.source == self.directories[0]
        else:
            # A checkpoint of adapters lacks the base model.
            self.unread = self.source is not None and options.lora is None

    def _load(self, stack: ExitStack) -> None:
        """Measure the drives, and offload the model. `stack` closes it."""
        options = self.options
        # Measured before the model is loaded, while nothing else uses the drives.
        self.drives = self._measure_drives()
        # As in DDP scripts, each rank draws different dropout masks.
        torch.manual_seed(options.seed + self.ranks.rank)
        self._say(f"loading {options.model}")
        hf_model.offload_pretrained(
            self.model,
            self.pretrained,
            self.policy,
            read=not self.unread,
            adapted=options.lora is not None,
        )
        self.handle = inf.handle(self.model)
        self._check_run()
        # The stack calls `_warn_of_save` after `close`, which waits for the save.
        stack.callback(self._warn_of_save)
        stack.callback(self.handle.close)
        self.params = self.handle.stats().params
        if options.packing:
            hf_model.check_packing(self.model, self.device)

    def run(self) -> int:
        options = self.options
        self.ranks.signals.defer()
        self.metrics.add("run", self._description())
        several = (
            f" on {self.ranks.world} ranks, ZeRO stage {self.policy.zero}"
            if self.ranks.world > 1
            else ""
        )
        trained = sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        adapters = f", {trained / 1e6:.2f} M more in adapters" if options.lora is not None else ""
        self._say(
            f"{(self.params - trained if adapters else self.params) / 1e6:.1f} M parameters"
            f"{adapters}{several}; {len(self.corpus.train)} training and "
            f"{len(self.corpus.held_out)} held-out windows of {options.seq} tokens"
        )
        if options.accumulate > 1:
            self._say(f"each step: {micro_batches_text(options.accumulate, self.passes)}")
        try:
            with step_display(self.console, options.steps) as display:
                text_after = self._train(display)
        except BaseException:
            # An interrupted run also writes its files.
            self._write_files()
            raise
        if text_after is None:
            self._say_stopped()
            return 0
        if not options.no_save:
            what = "model" if options.lora is None else "adapter"
            self._say(f"the trained {what} is in {options.out}")
        if self.records:
            summary = self._summary((self.text_before, text_after))
            elapsed = {"elapsed_s": time.monotonic() - self.began_s}
            self.metrics.add("summary", summary.as_dict() | elapsed)
            show_summary(self.console, summary)
        else:
            self._say(f"earlier processes have taken all {options.steps} steps")
        self._check_saved(options.steps)
        return 0

    def _say_stopped(self) -> None:
        """Print from where a run that a signal has stopped can resume. Raises the error of a failed
        save.
        """
        options, step = self.options, self.handle.stats().step_count
        self._check_saved(step)
        resumes = "; the same command with --resume continues"
        if not step:
            kept = "no step was taken"
        elif options.durable:
            kept = f"the durable run in {self.directories[0]} has this step{resumes}"
        elif options.save_every:
            kept = f"the step is saved in {save_directory(options)}{resumes}"
        else:
            kept = "nothing was saved, as neither --save-every nor --durable was given"
        self._say(f"{name_of(self.ranks.signal)}: stopped after step {step}; {kept}")

    def _set_steps(self, found: Source | None) -> None:
        """Set the number of steps: from --steps or --epochs, else from the source to resume from.
        Raises: ValueError for fewer steps than the source has taken.
        """
        options = self.options
        before = found.rule(RULE_OF_STEPS) if found is not None else None
        if options.epochs is not None:
            windows = len(self.corpus.train)
            per_step = self.ranks.world * options.batch * options.accumulate
            options.steps = steps_of(options.epochs, windows, per_step)
            self._say(
                f"{options.epochs:g} epochs: {options.steps} steps of {per_step} of the {windows} "
                "training windows"
            )
        elif options.steps is None:
            options.steps = before or STEPS
        if found is not None and found.step > options.steps:
            option = "--steps" if options.epochs is None else f"--epochs {options.epochs:g}, steps"
            raise ValueError(
                f"{found.place} has taken {found.step} steps, and {option} {options.steps} is "
                f"fewer; give {found.step} or more"
            )
        self.steps_before = before

    def _choose_dtype(self, found: Source | None) -> None:
        """Replace --dtype auto by the dtype of the source to resume from; else by bfloat16, or by
        float32 if the CPU of a rank lacks bf16 instructions. Collective.
        """
        options = self.options
        if options.dtype != "auto":
            return
        emulates = self.device.type == "cpu" and not bf16_instructions()
        # All ranks compute in one dtype, even if their CPUs differ.
        (emulating,) = self.ranks.sums(float(emulates))
        before = found.rule("--dtype") if found is not None else None
        options.dtype = before or ("float32" if emulating else "bfloat16")
        if options.dtype == "float32" and emulating:
            self._say(
                "computing in float32, since this CPU has no bf16 instructions; --dtype bfloat16 "
                "computes in bf16, many times slower"
            )

    def _make_small_state(self, found: Source | None) -> SmallState:
        return SmallState(
            self.options,
            self.corpus,
            self.device,
            found,
            rank=self.ranks.rank,
            world=self.ranks.world,
            tied=any(len(each.names) > 1 for each in find_parameters(self.model)),
            base=self.pretrained.checksum() if self.options.lora is not None else None,
        )

    def _make_model(self) -> Any:
        options = self.options
        try:
            model = hf_model.model_on_meta(
                self.pretrained,
                getattr(torch, options.dtype),
                checkpointing=options.checkpointing,
                tile_linears=options.tile_linears,
                tile_loss=options.tile_loss,
                tile_experts=options.tile_experts,
                slices=slices_of(options),
                adapters=options.lora,
            )
        except SlicesError as error:
            raise ValueError(_one_by_one(error)) from error
        prompt = self.pretrained.tokenizer(options.prompt or "", return_tensors="pt")["input_ids"]
        tokens = (ids_of(self.corpus.train), ids_of(self.corpus.held_out), prompt)
        hf_model.check_tokens(model, self.pretrained, tokens)
        if note := hf_model.check_length(model, options.seq):
            self._say(f"  {note}")
        if options.prompt:
            length = prompt.shape[1] + options.prompt_tokens
            hf_model.check_length(model, length, "--prompt, continued,")
        return model

    def _check_run(self) -> None:
        """Raise ValueError if the durable run to restore has disappeared since `find_source`:
        `inf.restore` would leave all values at zero.
        """
        run = self.handle.durable
        if self.unread and run is not None and run.before is None:
            # A commit would store the zeros.
            self.handle.end(commit=False)
            raise ValueError(
                f"the durable run in {self.source} has just been removed; to begin anew, leave "
                "--resume out"
            )

    def _go_on(self) -> tuple[Earlier, list[StepRecord]]:
        """Restore the source, if there is one. Returns (progress of earlier processes, records of
        their steps).
        """
        if self.source is None:
            if self.options.resume:
                self._say("no step was committed or saved yet: training begins")
            return Earlier(), []
        found = inf.restore(
            self.model, self.optimizer, self.source, damaged=self.options.damaged
        )
        earlier = self.small.take_up(found.extra, found.step, self.scheduler)
        self.held_out += earlier.held_out
        self._say(f"continuing after step {found.step}, from {self.source}")
        if self.steps_before not in (None, self.options.steps):
            self._say(
                f"  from now on the learning rate follows the schedule of {self.options.steps} "
                f"steps; before, it followed that of {self.steps_before}"
            )
        if self.lost:
            self._say(f"  instead of {self.lost}")
        notes = [*found.notes, *([found.rounded] if found.rounded else [])]
        if not earlier.same_ranks:
            notes.append("the number of ranks has changed, so dropout draws other masks")
        for note in notes:
            self._say(f"  {note}")
        # If earlier processes have taken all steps, their records stay unchanged.
        if earlier.step >= self.options.steps:
            # A missing checkpoint is saved with this small state, since no step captures another.
            self.handle.extra = found.extra
            if self.ranks.first:
                self.recorded |= _recorded_losses(self.options.out)
            return earlier, []
        self.metrics.cut(found.step)
        return earlier, _earlier_records(self.options.out) if self.ranks.first else []

    @property
    def ended(self) -> bool:
        """True if earlier processes have taken all steps."""
        return bool(self.earlier.step >= self.options.steps)

    def _evaluates(self, step: int) -> bool:
        """Return whether the held-out loss is measured between this step and the next."""
        every = self.options.eval_every
        return bool(every) and step % every == 0 and step < self.options.steps

    def _keep(self, step: int) -> None:
        """If --save-every selects `step`, which has ended, wait for the earlier save and begin to
        save the step. Raises: StepUndone.
        """
        every = self.options.save_every
        if not every or (step % every and step < self.options.steps):
            return
        self._end_save()
        self._begin_save(step)

    def _begin_save(self, step: int) -> None:
        """Begin to save `step`. If the save cannot begin, log the error, and training continues.
        But the first save of a process raises the error if steps remain, since the cause may be a
        user's mistake. Raises: StepUndone.
        """
        # Wait for updates first, so that their faults are not taken for faults of the save.
        self.handle.flush()
        self.saved_step = step
        try:
            self.save = inf.save(
                self.model,
                self.optimizer,
                save_directory(self.options),
                frozen=self.options.lora is None,
            )
        # Any error: ranks may raise different errors for one cause, and all must continue alike.
        except Exception as error:
            if isinstance(error, _ENGINE_FAULTS) or not (
                self.saves or step >= self.options.steps
            ):
                raise
            self._save_failed(step, error)
            return
        self.saves = True
        self.unsaved = None
        # Only `_end_save` raises the save's error. Otherwise the engine's next call would raise it,
        # at a different place on each rank.
        self.save.leave_error_to_wait()

    def _end_save(self) -> None:
        """Wait for the save in progress. If the save failed, log the error, and training continues:
        the earlier checkpoint is whole. Raises: StepUndone and StateInvalid if the save could not
        read states, as the next read of these states would.
        """
        save, self.save = self.save, None
        if save is None:
            return
        try:
            save.wait()
        except _SAVE_FAULTS as error:
            if isinstance(error, _ENGINE_FAULTS):
                raise
            self._save_failed(save.step, error)
            if not isinstance(error, AioError) or error.op != "read":
                return
            # At most once for a step: if a drive fails reads only while a save runs, each save
            # would undo the step again.
            if self.misread != save.step:
                self.misread = save.step
                self.handle.parts.access.read_failed(error)

    def _save_failed(self, step: int, error: Exception) -> None:
        """Record and log the error of a save. If an error has ended the engine, raise that error.
        """
        self.unsaved = error
        log.warning("no checkpoint of step %d was written: %s", step, text_of_error(error))
        # The loss of a drive or a rank ends the engine: report the loss, not the save.
        self.handle.parts.access.check_open()

    def _warn_of_save(self) -> None:
        """Warn of a failed save when a run is interrupted, unless `close` has. Does not block."""
        # Without waiting: a save may wait for ranks that have ended.
        if self.save is not None:
            self.save.report_error()

    def _lacks_checkpoint(self) -> bool:
        """Return whether earlier processes took all steps, but failed to save the last step.
        Collective.
        """
        if not (self.ended and self.options.save_every):
            return False
        step = newest_step(save_directory(self.options)) if self.ranks.first else self.earlier.step
        # Ranks agree, since saving is collective.
        (lacks,) = self.ranks.sums(float(step < self.earlier.step))
        return bool(lacks)

    def _check_saved(self, step: int) -> None:
        error = self.unsaved
        if isinstance(error, AioError):
            raise error
        if error is not None:
            # `run_train` prints an AioError in one line.
            raise AioError(
                f"no checkpoint of step {step} was written: {text_of_error(error)}"
            ) from error

    def _train(self, display: StepDisplay) -> str | None:
        """Measure, take the steps, measure, export. After a fault has undone steps, repeat them
        from the engine's current step. Returns the prompt's continuation after training; None if a
        signal has stopped training.
        """
        first, steps = self.earlier.step, self.options.steps
        draws = self.ranks.first and not self.options.no_trace
        timeline = self.options.out / TIMELINE_NAME if draws else None
        self.last = self.handle.stats()
        meter = StepMeter(self.handle, timeline, self.last)
        batches, undone, farthest = self._batches(first), 0, first
        # State of the loop at each step to which a fault may return it: a fault undoes one step, or
        # all steps since the last commit of a durable run; during a measurement, none.
        turns: dict[int, _Turn] = {}
        step = first
        while True:
            turns[step] = self._turn()
            turns.pop(step - self.options.durable_every - 1, None)
            try:
                # A signal may come before a measurement or during it.
                if not self._stops(step):
                    self._measure(step, meter, display)
                if self._stops(step):
                    self._finish_saves(step, wanted=self._unsaved(step))
                    # A stopped run also writes its files.
                    self._write_files()
                    return None
                if step == steps:
                    return self._end()
                self._take_step(step + 1, batches, meter, display)
                step += 1
            except StepUndone as error:
                step = self.handle.stats().step_count
                undone = undone + 1 if step <= farthest else 1
                farthest = max(farthest, step)
                if undone == _UNDONE_MAX:
                    raise
                if step < steps:
                    display.say(f"step {step + 1} is taken again: {error}")
                else:
                    # No step was undone, although the error's text says so: show the error's cause.
                    display.say(f"the end of the run is repeated: {error.__cause__ or error}")
                self._go_back(step, turns[step])
                batches = self._batches(step)
                self.last = self.handle.stats()
                meter.begin(self.last)

    def _measure(self, step: int, meter: StepMeter, display: StepDisplay) -> None:
        """Take the measurements that are due after this step: the prompt's continuation, the
        held-out loss, the peak memory of loading. Raises: StepUndone.
        """
        opens = not self.peak_before
        if opens:
            self.text_before = self.earlier.text or self._continue()
        # If an ended run continues, its final loss has been cut from the file.
        extends = opens and step == self.steps_before
        evaluates = not step or extends or self._evaluates(step)
        if evaluates:
            loss = self._measure_held_out(step)
            when = f"step {step}: held-out loss" if step else "held-out loss before:"
            display.say(f"{when} {loss:.4f}")
        if opens:
            self.peak_before = peak_rss_bytes()
            reset_peak_rss()
        if opens or evaluates:
            # Steps must not include the bytes and waits of measurements.
            self.last = self.handle.stats()
            meter.begin(self.last)

    def _end(self) -> str:
        """Finish the last save, measure, and export. Returns the prompt's continuation. Raises:
        StepUndone.
        """
        # `_finish_saves` also waits for the last update, whose memory counts to training's peak.
        self._finish_saves(self.options.steps, wanted=self._lacks_checkpoint())
        self.peak_training = peak_rss_bytes()
        self._measure_held_out(self.options.steps)
        # Before generation and export, whose spans would replace the last steps' in the trace.
        self._write_files()
        text = self._continue()
        if not self.options.no_save:
            whole = self.options.lora is None
            write = hf_model.save_pretrained if whole else hf_model.save_adapters
            write(self.model, self.pretrained.tokenizer, self.options.out, first=self.ranks.first)
        return text

    def _stops(self, step: int) -> bool:
        """Return whether a signal stops training after this step. After the last step a signal does
        not stop measurement and export.
        """
        return bool(self.ranks.signal) and step < self.options.steps

    def _unsaved(self, step: int) -> bool:
        """Return whether --save-every is given and the run has not tried to save this step."""
        return bool(self.options.save_every) and step not in (self.earlier.step, self.saved_step)

    def _finish_saves(self, step: int, *, wanted: bool) -> None:
        """Finish the save in progress; if `wanted`, also save `step`. Repeat a failed save once,
        since no later save follows. Raises: StepUndone.
        """
        self.handle.flush()
        self._end_save()
        if wanted:
            self._begin_save(step)
            self._end_save()
        if self.unsaved is not None:
            self._begin_save(step)
            self._end_save()

    def _batches(self, step: int) -> Iterator[torch.Tensor]:
        """Return this rank's micro-batches after those of the first `step` steps."""
        return self.corpus.batches(
            self.options.batch,
            self.options.seed,
            rank=self.ranks.rank,
            ranks=self.ranks.world,
            start=step * self.options.accumulate,
        )

    def _turn(self) -> _Turn:
        cuda = self.device.type == "cuda"
        return _Turn(
            self.scheduler.state_dict(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self.device) if cuda else None,
        )

    def _go_back(self, step: int, turn: _Turn) -> None:
        """Return the loop to `step`, since the engine has undone all later steps."""
        # A measurement may have been interrupted in eval mode.
        self.model.train()
        self.optimizer.zero_grad()
        self.scheduler.load_state_dict(turn.scheduler)
        for group, rate in zip(
            self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        torch.set_rng_state(turn.cpu)
        if turn.cuda is not None:
            torch.cuda.set_rng_state(turn.cuda, self.device)
        self.records = [record for record in self.records if record.step <= step]
        if not self.ended:
            self.metrics.cut(step)
        # `cut` also drops the held-out loss of this step, which is measured again.
        self.held_out = [each for each in self.held_out if each[0] < step]

    def _take_step(
        self, step: int, batches: Iterator[torch.Tensor], meter: StepMeter, display: StepDisplay
    ) -> None:
        """Take one step, record the step, and save it if a save is due. Raises: StepUndone."""
        options = self.options
        alone = step - self.earlier.step == _ALONE_STEP and options.steps > step
        if alone:
            # So no update is pending when the step begins, and the step's figures exclude the last
            # update.
            self.handle.flush()
            self.last = self.handle.stats()
            meter.begin(self.last)
        last = self.last
        start = time.monotonic()
        phase, loss = self._passes(batches)
        transformed_s = self.handle.stats().matrices_s
        norm = None
        if options.clip:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip))
        if self.save is not None and self.save.done:
            # Before `opt.step()`: until then the engine can undo the saved step if the save could
            # not read the step's states.
            self._end_save()
        # The rate of this step, since the scheduler's step follows.
        rate = float(self.scheduler.get_last_lr()[0])
        if options.durable or options.save_every:
            self.handle.extra = self.small.capture(self.scheduler, self.held_out, self.text_before)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self._evaluates(step):
            # Otherwise the update would end during the measurement, and the step's figures would
            # lack the update's bytes and waits.
            self.handle.flush()
        now = self.handle.stats()
        step_s = time.monotonic() - start
        # Matrices that backward transformed count in its time.
        phase.compute_s += now.matrices_s - transformed_s
        figures = meter.end(now, step=step)
        own = dataclasses.asdict(phase) | {
            "step": step,
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "tokens": self.ranks.world * options.batch * options.seq * options.accumulate,
            "step_s": step_s,
            "alone": alone,
            "params_read": now.params_read_bytes - last.params_read_bytes,
            "grads_read": now.grads_read_bytes - last.grads_read_bytes,
            "grads_written": now.grads_written_bytes - last.grads_written_bytes,
            "activations_read": now.activations.fetched_bytes - last.activations.fetched_bytes,
            "activations_written": now.activations.stored_bytes - last.activations.stored_bytes,
        }
        record = StepRecord.of(figures | own)
        self.records.append(record)
        elapsed = {"elapsed_s": time.monotonic() - self.began_s}
        self._report("step", figures | record.as_dict() | elapsed)
        display.show(record, Moved(now.bytes_read, now.bytes_written))
        self._keep(step)
        self.last = now

    def _passes(self, batches: Iterator[torch.Tensor]) -> tuple[_Phase, float]:
        """Run forward and backward of every micro-batch. Returns (times, mean loss over all ranks).
        Collective.
        """
        phase = _Phase()
        losses = []
        micro_batches = self.options.accumulate // self.passes
        # Each micro-batch draws dropout from the same stream as in a shared pass.
        streams = RandomStreams() if self.passes > 1 else None
        for index in range(self.passes):
            ids = torch.cat(list(islice(batches, micro_batches))).to(self.device)
            waited, start = self.handle.stats().io_wait_s, time.monotonic()
            # Only the last pass runs outside of `no_sync`, so that the engine finishes gradients.
            with nullcontext() if index == self.passes - 1 else self.handle.no_sync():
                with streams.of(index, self.device) if streams is not None else nullcontext():
                    loss = self._loss(ids)
                self._synchronize()
                forward_s = time.monotonic() - start - (self.handle.stats().io_wait_s - waited)
                loss.backward()
                self._synchronize()
            waited = self.handle.stats().io_wait_s - waited
            passes_s = time.monotonic() - start - waited
            phase.compute_s += passes_s
            # The last pass sets the final value.
            phase.last_backward_s = passes_s - forward_s
            if index == 0:
                phase.first_forward_s = forward_s
            losses.append(loss.detach())
        if streams is not None:
            streams.end()
        # Losses are added in the order and dtype of a shared pass. `float` waits for the device, so
        # the clock is read before.
        total = float(functools.reduce(torch.add, losses))
        return phase, self.ranks.sums(total)[0] / self.ranks.world

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a pass over windows, divided by the number of passes."""
        try:
            loss: torch.Tensor = self.model(**arguments_of(batch), use_cache=False).loss
        except SlicesError as error:
            raise ValueError(_one_by_one(error)) from error
        return loss / self.passes if self.passes > 1 else loss

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _measure_held_out(self, step: int) -> float:
        """Return the mean loss per token of the held-out part, and record it. Collective."""
        self.model.eval()
        total, weight, count = 0.0, 0.0, 0.0
        rows = self.corpus.held_out_rows(
            self.options.batch, rank=self.ranks.rank, ranks=self.ranks.world
        )
        with torch.no_grad():
            for batch, counts in rows:
                found = self.model(**arguments_of(batch.to(self.device)), use_cache=False)
                # Weighted, so that all tokens count alike: the last batch may have fewer windows.
                mean, of_batch = float(found.loss), weight_of(batch)
                if counts:
                    total, weight = total + mean * of_batch, weight + of_batch
                    count += len(batch)
        self.model.train()
        total, weight, count = self.ranks.sums(total, weight, count)
        loss = total / weight
        self.held_out.append((step, loss))
        if step not in self.recorded:
            self._report("held_out", {"step": step, "loss": loss, "windows": round(count)})
        if self.ended:
            self.recorded.add(step)
        return loss

    def _continue(self) -> str:
        if not self.options.prompt:
            return ""
        return hf_model.continue_text(
            self.model,
            self.pretrained.tokenizer,
            self.options.prompt,
            self.options.prompt_tokens,
            self.device,
        )

    def _measure_drives(self) -> dict[str, float] | None:
        """Measure the bandwidth of the policy's drives, in GB/s; None if nothing rests on NVMe. All
        ranks measure at once, so each measures its share of the drives. Collective.
        """
        if not self.policy.directories:
            return None
        self._say("measuring the drive")
        self.ranks.together()
        task = SwapTask(
            directories=self.directories,
            size_bytes=_BENCH_BYTES,
            block_bytes=self.policy.io_settings.block_bytes,
            depth=self.policy.io_settings.depth,
            backend=self.policy.io_backend,
            rounds=3,
            phase_s=1.0,
        )
        found = {
            f"{kind}_gbps": phase.spread.gbps for kind, phase in measure_swap(task).phases.items()
        }
        self._say(f"  {drives_text(found)}")
        return found

    def _write_files(self) -> None:
        # Without a step the files would be empty, and would replace an earlier run's.
        if not (self.records and self.ranks.first):
            return
        if not self.options.no_trace:
            self.handle.trace(self.options.out / "trace.json")
        if not plot_loss(
            [*self.earlier_records, *self.records], self.held_out, self.options.out / "loss.png"
        ):
            self._say(f"no loss.png: {escape(not_installed('matplotlib'))}")

    def _leave_page(self) -> None:
        """Write the page of this run, if it has taken steps."""
        if not (self.records and self.ranks.first):
            return
        if not is_installed("plotly"):
            self._say(f"no {PAGE_NAME}: {escape(not_installed('plotly'))}")
            return
        write_report([self.options.out], self.options.out / PAGE_NAME)
        self._say(f"the page of the run is {self.options.out / PAGE_NAME}")

    def _description(self) -> dict[str, Any]:
        options = {key: _text_of(value) for key, value in vars(self.options).items()}
        drives = [hardware.drive(path) for path in self.directories]
        return {
            "schema": SCHEMA,
            "version": inf.__version__,
            # Local time, with its zone.
            "date": datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "command": shlex.join(["infinity", *sys.argv[1:]]),
            "options": options,
            "hardware": {**hardware.machine(), "drives": drives},
            "torch": torch.__version__,
            "params": self.params,
            "ranks": self.ranks.world,
            "goes_on_after": self.earlier.step,
            "bandwidth": self.drives,
        }

    def _summary(self, texts: tuple[str, str]) -> Summary:
        mean = steady(self.records)
        limit = in_loop = None
        engine = self.handle.stats().as_dict()
        rests = state_format(self.policy.state, getattr(torch, self.options.dtype))
        known = self.drives is not None and all(
            math.isfinite(value) for value in self.drives.values()
        )
        # `step_limits` has no term for an update on the device, which no pass overlaps.
        if self.drives is not None and known and self.policy.update_on == "cpu":
            drives = Drives(self.drives["read_gbps"] * 1e9, self.drives["write_gbps"] * 1e9)
            update = self.policy.update
            given: dict[str, Any] = {"update": update, "frozen_bytes": engine["frozen_bytes"]}
            limit = step_limits(mean, drives, self.passes, **given)
            in_loop = step_limits(mean, drives, self.passes, **given, alone=False)
        return Summary(
            params=self.params,
            micro_batches=self.options.accumulate,
            passes=self.passes,
            held_out=(self.held_out[0][1], self.held_out[-1][1]),
            mean=mean,
            limits=limit,
            limits_loop=in_loop,
            drives=self.drives,
            engine=engine,
            peak_rss_loading_bytes=self.peak_before,
            peak_rss_training_bytes=self.peak_training,
            texts=texts if self.options.prompt else None,
            update=self.policy.update,
            state_bytes=self.params * AtRest.per_param(rests.sections).states if rests else 0.0,
        )

    def _say(self, text: str) -> None:
        say(self.console, text)


def _make_out(out: Path, stack: ExitStack) -> None:
    """Make --out. `stack` removes the new directories again if they stay empty, as after a user's
    mistake.
    """
    stack.callback(_remove_empty, [each for each in (out, *out.parents) if not each.exists()])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be made: {error.strerror}; name a directory that you can write to"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out} is not writable; name a directory that you can write to")


def _remove_empty(directories: Sequence[Path]) -> None:
    # A directory that is not empty, or that the user has removed, is not a fault.
    with suppress(OSError):
        for each in directories:
            each.rmdir()


def _earlier_records(out: Path) -> list[StepRecord]:
    """Return the records of earlier processes that `MetricsFile.cut` has left in the file."""
    return [
        StepRecord.of(row) for _, row in read_rows(out / FILE_NAME) if row["kind"] == "step"
    ]


def _recorded_losses(out: Path) -> set[int]:
    rows = [row for _, row in read_rows(out / FILE_NAME) if row["kind"] == "held_out"]
    return {row["step"] for row in rows}
