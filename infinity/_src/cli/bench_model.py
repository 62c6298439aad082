"""`infinity bench swap --for MODEL`: predicts the training of a model on this machine from the
measured rates.

The command reads the model before it measures, so that mistakes show at once. The prediction uses
the measured rates of the drives, and this machine's memory and free space. Compute is assumed, as
in `infinity plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

import infinity as inf
from infinity._src.cli.plan import SEQUENCE, machine_here, read_shape
from infinity._src.cli.plan_answer import policy_text
from infinity._src.cli.plan_tables import (
    format_count,
    format_days,
    format_seconds,
    prediction_record,
)
from infinity._src.measure.command import Forecast, Meaning
from infinity._src.plan.predict import EFFICIENCY, Prediction, predict
from infinity._src.plan.search import search
from infinity._src.plan.workload import Job, ModelShape
from infinity.aio import IoSettings
from infinity.aio._probe import probe_directory


def read_model(path: Path, tbw: float | None) -> Forecast:
    """Read a model's shape, and return the function that forecasts its training from measured
    rates. path: a directory or its config.json. tbw: rated terabytes written of each drive.

    Raises: ValueError for a path that is not a model, or for a wrong rating.
    """
    if tbw is not None and not 0 < tbw < math.inf:
        raise ValueError(f"--tbw {tbw}: give a positive number of terabytes")
    shape = read_shape(path, torch.bfloat16)
    return lambda settings: _forecast(shape, settings, tbw)


def _forecast(shape: ModelShape, settings: IoSettings, tbw: float | None) -> Meaning:
    drives = [probe_directory(directory) for directory in settings.bandwidths]
    sequence = min(SEQUENCE, shape.positions or SEQUENCE)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=list(settings.bandwidths))
    machine = machine_here(drives, settings, tbw)
    job = Job(policy, tokens=sequence, sequence=sequence)
    # The tiers are fixed, since the forecast is about these drives; the search might prefer RAM.
    ways = search(shape, machine, job, {"params", "optim"}, exact=True).ways
    found = ways[0] if ways else predict(shape, machine, job)
    record = {
        "name": shape.name,
        "params": shape.params,
        "tokens_per_step": sequence,
        "drives_s": found.terms_s.get("drives", 0.0),
        "sources": dict(machine.sources),
        **prediction_record(found),
    }
    return Meaning(tuple(_lines(shape, found)), record)


def _lines(shape: ModelShape, found: Prediction) -> Iterator[str]:
    machine, job, written = found.machine, found.job, found.moved.total.written
    drives_s = found.terms_s.get("drives", 0.0)
    yield (
        f"for {shape.name}, {format_count(shape.params)} parameters, exact, states on these drives:"
    )
    for reason in found.why_not:
        yield f"  it does not fit here: {reason}"
    yield (
        f"  {format_seconds(found.step_s)} s a step of {job.tokens:,} tokens, bound by "
        f"{found.bottleneck}; the drives are busy for {format_seconds(drives_s)} s of it"
    )
    if not written:
        yield "  all states fit in RAM: a step writes nothing to the drives"
    else:
        yield (
            f"  {written / 1e9:,.1f} GB written a step, {found.written_per_day / 1e12:,.2f} TB a "
            f"day: new drives last {format_days(found.days)}"
        )
        if found.bottleneck != "drives":
            # As for step_s: the limit divided by the efficiency.
            step_s = drives_s / EFFICIENCY
            days = format_days(found.days * step_s / found.step_s)
            yield (
                f"  if compute were as fast as the drives: {format_seconds(step_s)} s a step, and "
                f"new drives last {days}"
            )
        source = machine.sources["tbw"]
        rated = f"{machine.tbw_per_drive / 1e12:g} TB, given" if source == "given" else source
        yield f"  each drive is rated for {rated}"
    if found.fits:
        yield f"  way: {policy_text(found)}"
    yield f"  the drives' rates are measured; compute is not: {machine.sources['flops']}"
