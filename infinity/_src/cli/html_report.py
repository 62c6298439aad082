"""`infinity report`: one HTML page of one or several training runs.

The page includes the plotting library (plotly.js), so it opens without a network; its content
security policy forbids all requests. Texts from files are escaped, so browsers never interpret them
as HTML.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape

from infinity._src.base.atomic_file import write_named
from infinity._src.base.console import say, say_error
from infinity._src.base.progress import format_left
from infinity._src.base.sizes import format_size
from infinity._src.base.step_timeline import Bar, StepTimeline
from infinity._src.cabi.installation import is_installed, not_installed
from infinity._src.cli.page_style import (
    AXIS,
    BLUE,
    CHART,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    POLICY,
    PURPLE,
    RED,
    STYLE,
    UNITS,
    reloads,
)
from infinity._src.cli.run_history import Point, RunHistory, read_run, runs_of
from infinity._src.cli.watch import watch
from infinity._src.memory.roofline import EXAMPLE_TBW, WEAR_LEAST_S

if TYPE_CHECKING:
    import plotly.graph_objects as go

PAGE_NAME: Final = "report.html"

EVERY_S: Final = 10.0
"""Seconds between two pages of --watch."""
_TEXT_MAX = 120
_COMMAND_MAX = 1000
_OF_TIME = {
    "compute": GREEN,
    "waiting": RED,
    "update": PURPLE,
    "rest": GREY,
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: the id of its HTML element, and its figure."""

    name: str
    figure: go.Figure


@dataclasses.dataclass(frozen=True)
class Section:
    """Charts under one heading. about: an explanation for the reader. wide: charts take the whole
    width. table: rows of texts; the first row has the headings.
    """

    title: str
    about: str
    charts: tuple[Chart, ...] = ()
    wide: bool = False
    table: tuple[tuple[str, ...], ...] = ()


def run_report(options: argparse.Namespace, console: Console | None = None) -> int:
    """Write the page of a directory's runs. Returns the exit status: 0; 2 for a mistake, or if
    plotly is missing.
    """
    console = console or Console()
    try:
        out = options.out or options.directory / PAGE_NAME
        if options.tbw is not None and not 0 < options.tbw < math.inf:
            raise ValueError(f"--tbw {options.tbw:g} must be a number of terabytes above 0")
        if not is_installed("plotly"):
            raise ValueError(f"no page: {not_installed('plotly')}")
        _check_watch(options)
        directories = runs_of(options.directory, wanted=not options.watch)
        if options.watch:
            say(console, f"{escape(str(out))} is rewritten while the run continues; Ctrl-C ends it")
            return watch(
                lambda: runs_of(options.directory, wanted=False),
                lambda runs, seconds: _write(runs, out, options.tbw, seconds),
                options.every or EVERY_S,
            )
        size = write_report(directories, out, rated_tb=options.tbw)
    except (ValueError, OSError) as error:
        say_error(console, error)
        return 2
    say(console, f"{escape(str(out))} ({format_size(size)})")
    return 0


def write_report(directories: Sequence[Path], out: Path, *, rated_tb: float | None = None) -> int:
    """Read the runs of these directories and write their page to `out`. Returns its size in bytes.

    rated_tb: rated terabytes written of each drive; None: an example.
    Raises: ValueError if no run has a step, and for files that infinity did not write; OSError.
    """
    runs = [read_run(directory) for directory in directories]
    if not any(run.series.points for run in runs):
        raise ValueError(
            f"{', '.join(map(str, directories))}: no step was recorded yet; make the page later"
        )
    return _write(runs, out, rated_tb)


def _check_watch(options: argparse.Namespace) -> None:
    if options.every is None:
        return
    if not options.watch:
        raise ValueError(
            f"--every {options.every:g} sets how often --watch writes the page; add --watch"
        )
    if not 0 < options.every < math.inf:
        raise ValueError(f"--every {options.every:g} must be a number of seconds above 0")


def _write(
    runs: Sequence[RunHistory],
    out: Path,
    rated_tb: float | None,
    reload_s: float | None = None,
) -> int:
    # A directory's name may contain bytes that are not UTF-8.
    data = page(runs, rated_tb, reload_s).encode(errors="replace")
    write_named(out, data)
    return len(data)


def page(
    runs: Sequence[RunHistory], rated_tb: float | None = None, reload_s: float | None = None
) -> str:
    """Return the page as HTML. reload_s: seconds after which the page reloads itself; None: never.
    """
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    body = []
    for section in sections(runs, rated_tb):
        body.append(f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.about)}</p>")
        if section.table:
            body.append(_table(section.table))
        if section.charts:
            # The grid comes before its charts, since plotly draws them in the width at that moment.
            beside = len(section.charts) > 1 and not section.wide
            body.append(f'<div class="charts{" beside" if beside else ""}">')
            body += [
                to_html(
                    chart.figure,
                    config={"displaylogo": False, "responsive": True},
                    include_plotlyjs=False,
                    full_html=False,
                    div_id=chart.name,
                )
                for chart in section.charts
            ]
            body.append("</div>")
    title = html.escape(f"infinity: {', '.join(_short(run.name) for run in runs)}")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>{''.join(body)}"
        f"{reloads(reload_s)}</body></html>\n"
    )


def sections(runs: Sequence[RunHistory], rated_tb: float | None = None) -> list[Section]:
    """Return the sections of the page, in order. Runs without steps have no charts."""
    shown = [run for run in runs if run.series.points]

    def each(kind: str, draw: Callable[[RunHistory], go.Figure | None]) -> tuple[Chart, ...]:
        drawn = [(f"{kind}-{index}", draw(run)) for index, run in enumerate(shown)]
        return tuple(Chart(name, figure) for name, figure in drawn if figure is not None)

    def charted(title: str, about: str, charts: tuple[Chart, ...]) -> Section:
        return Section(title, about if charts else "", charts)

    longest_s = max((run.timeline.seconds for run in shown if run.timeline), default=0.0)
    found = [
        Section("Runs", _thinned(shown), table=_facts(runs)),
        Section(
            "Loss",
            "Training loss of each step, and the held-out loss where it was measured.",
            (Chart("loss", _loss(shown)),),
            wide=True,
        ),
        charted(
            "Time of a step",
            "compute: forward and backward; waiting: waits for units and updates; update: "
            "opt.step(); rest: everything else, such as clipping and loading data.",
            each("time", _times),
        ),
        Section(
            "Schedule and speed",
            _speed_text(shown),
            _curves(shown),
        ),
        charted(
            "Drives",
            "Bytes over the step's time, of all drives together, and their measured bandwidths. "
            "The limit of this mix is the drives' bandwidth for the step's share of reads and "
            "writes.",
            each("drives", _rates),
        ),
        charted(
            "Memory by tier",
            "Bytes that the engine holds on each tier after the newest step; unused budget.",
            each("tiers", _tiers),
        ),
        charted(
            "Memory over the run",
            "RSS is the memory of the whole process, with torch; if the CPU computes, also "
            "gathered units and activations.",
            each("memory", _memory),
        ),
        Section(
            "One step, unit by unit",
            _timeline_text(shown),
            each("timeline", lambda run: _timeline(run, longest_s)),
            wide=True,
        ),
        Section(
            "Wear",
            _wear_text(shown, rated_tb),
            each("wear", _written),
            table=_wear(shown, EXAMPLE_TBW if rated_tb is None else rated_tb),
        ),
    ]
    # Omit sections without charts, such as "Drives" for runs without drives: they have no text.
    return [section for section in found if section.about]


# -- Charts ----------------------------------------------------------------------------------------


def _figure(title: str, y: str, **layout: Any) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure(
        layout={
            "template": "none",
            "colorway": PALETTE,
            **CHART,
            "title": {"text": title, "font": {"size": 14}, "x": 0.05, "y": 0.97},
            "margin": {"l": 60, "r": 20, "t": 40, "b": 45},
            "height": 340,
            "yaxis": {"title": {"text": y}, "rangemode": "tozero"},
            "xaxis": {"title": {"text": "step"}},
            "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
            **layout,
        }
    )
    figure.update_xaxes(**AXIS)
    figure.update_yaxes(**AXIS)
    return figure


def _line(name: str, points: Sequence[Point], values: Iterable[float | None], **more: Any) -> Any:
    import plotly.graph_objects as go

    mode = "lines+markers" if len(points) <= 60 else "lines"
    return go.Scatter(
        name=name, x=[point.at for point in points], y=_finite(values), mode=mode, **more
    )


def _stack(name: str, points: Sequence[Point], values: Iterable[float | None], colour: str) -> Any:
    import plotly.graph_objects as go

    return go.Bar(
        name=name,
        x=[point.at for point in points],
        y=_finite(values),
        width=points[0].steps,
        marker={"color": colour, "line": {"width": 0}},
    )


def _loss(runs: Sequence[RunHistory]) -> go.Figure:
    import plotly.graph_objects as go

    figure = _figure("", "loss")
    lows, highs = [], []
    for index, run in enumerate(runs):
        colour, points = PALETTE[index], run.series.points
        label = f"{_plain(run.name)}: " if len(runs) > 1 else ""
        losses = [point.get("loss") for point in points]
        figure.add_trace(_line(f"{label}training", points, losses, line={"color": colour}))
        lows += [point.low for point in points if math.isfinite(point.low)]
        highs += [point.high for point in points if math.isfinite(point.high)]
        if run.series.steps_each > 1:
            for name, values in (
                ("least", [p.low for p in points]),
                ("most", [p.high for p in points]),
            ):
                figure.add_trace(
                    _line(
                        f"{label}{name} of {run.series.steps_each} steps",
                        points,
                        values,
                        line={"color": colour, "width": 0.7, "dash": "dot"},
                    )
                )
        if run.held_out.points:
            held = [point.get("loss") for point in run.held_out.points]
            figure.add_trace(
                _line(
                    f"{label}held out",
                    run.held_out.points,
                    held,
                    line={"color": colour, "dash": "dash"},
                    marker={"size": 9, "symbol": "diamond"},
                )
            )
        odd = [point for point in points if point.odd]
        if odd:
            figure.add_trace(
                go.Scatter(
                    name=f"{label}NaN or infinite",
                    x=[point.at for point in odd],
                    # NaN and infinity have no place on the axis: draw them at the smallest loss.
                    y=[min(lows, default=0.0)] * len(odd),
                    mode="markers",
                    marker={"color": RED, "symbol": "x", "size": 9},
                )
            )
    # On a linear axis a single huge loss would flatten all others.
    if lows and min(lows) > 0 and max(highs) > 1e3 * min(lows):
        figure.update_yaxes(type="log")
    else:
        figure.update_yaxes(rangemode="normal")
    return figure


def _curves(runs: Sequence[RunHistory]) -> tuple[Chart, ...]:
    """Draw the figures of steps that need one curve per run."""
    curves: tuple[tuple[str, str, Callable[[RunHistory, Point], float | None]], ...] = (
        ("lr", "learning rate", lambda _, point: point.get("lr")),
        ("norm", "gradient norm, before clipping", lambda _, point: point.get("grad_norm")),
        ("speed", "tokens/s", lambda _, point: tokens_per_s(point)),
        ("eta", "η", eta),
    )
    found = []
    for name, label, value in curves:
        figure = _figure("", label)
        for index, run in enumerate(runs):
            values = [value(run, point) for point in run.series.points]
            if any(each is not None for each in values):
                line = {"color": PALETTE[index]}
                title = _plain(run.name) if len(runs) > 1 else label
                figure.add_trace(_line(title, run.series.points, values, line=line))
        if figure.data:
            found.append(Chart(name, figure))
    return tuple(found)


def tokens_per_s(point: Point) -> float | None:
    """Return a point's tokens per second; None if unknown."""
    tokens, seconds = point.get("tokens"), point.means["step_s"]
    return tokens / seconds if tokens is not None and seconds > 0 else None


def eta(run: RunHistory, point: Point) -> float | None:
    """Return the least possible time of a point's steps over their time. The least time is the
    larger of compute and the drives' time for the steps' bytes. None if the drives were not
    measured.
    """
    compute_s, seconds = point.get("compute_s"), point.means["step_s"]
    if compute_s is None or seconds <= 0 or not {"read", "write"} <= run.bandwidth.keys():
        return None
    drives_s = (
        (point.get("bytes_read") or 0.0) / run.bandwidth["read"]
        + (point.get("bytes_written") or 0.0) / run.bandwidth["write"]
    ) / 1e9
    return max(compute_s, drives_s) / seconds


def _speed_text(runs: Sequence[RunHistory]) -> str:
    if not _curves(runs):
        return ""
    return (
        "η of a step is the larger of compute time and the drives' time for the step's bytes, "
        "divided by the step's time. Concurrent updates slow compute, which raises η here; the "
        "summary of infinity train excludes this effect."
    )


def _times(run: RunHistory) -> go.Figure:
    points = run.series.points
    figure = _figure(_plain(run.name), "seconds", barmode="stack", bargap=0)
    known: dict[str, list[float | None]] = {
        "compute": [point.get("compute_s") for point in points],
        "waiting": [point.get("io_wait_s") for point in points],
        "update": [point.get("update_s") for point in points],
    }
    rest: list[float | None] = []
    for index, point in enumerate(points):
        parts = sum(values[index] or 0.0 for values in known.values())
        rest.append(max(point.means["step_s"] - parts, 0.0))
    for name, values in {**known, "rest": rest}.items():
        figure.add_trace(_stack(name, points, values, _OF_TIME[name]))
    return figure


def _rates(run: RunHistory) -> go.Figure | None:
    points = run.series.points
    if not any(point.get("bytes_read") or point.get("bytes_written") for point in points):
        return None
    figure = _figure(f"{_plain(run.name)}; {_limit_text(run)}", "GB/s", barmode="stack", bargap=0)
    for name, field, colour in (
        ("read", "bytes_read", BLUE),
        ("written", "bytes_written", ORANGE),
    ):
        figure.add_trace(_stack(name, points, [_rate(point, field) for point in points], colour))
    if len(run.drives) > 1:
        for path in run.drives:
            rates = [_rate(point, f"moved {path}") for point in points]
            figure.add_trace(_line(f"both, {_plain(path)}", points, rates, line={"width": 1}))
    names = {"read": "limit of reads", "write": "limit of writes", "mixed": "limit of both at once"}
    for (kind, name), colour in zip(names.items(), (BLUE, ORANGE, GREY), strict=True):
        if kind in run.bandwidth:
            values = [run.bandwidth[kind]] * len(points)
            line = {"color": colour, "dash": "dash", "width": 1.5}
            figure.add_trace(_line(name, points, values, line=line))
    if {"read", "write"} <= run.bandwidth.keys():
        line = {"color": PURPLE, "width": 1.5}
        mixes = [_mix_limit(point, run.bandwidth) for point in points]
        figure.add_trace(_line("limit of this mix", points, mixes, line=line))
    return figure


def _rate(point: Point, field: str) -> float | None:
    size, seconds = point.get(field), point.means["step_s"]
    return size / seconds / 1e9 if size is not None and seconds > 0 else None


def _mix_limit(point: Point, bandwidth: dict[str, float]) -> float | None:
    """Return the GB/s of the drives for a point's mix of reads and writes, which share the drives'
    time.
    """
    read, written = point.get("bytes_read") or 0.0, point.get("bytes_written") or 0.0
    busy = read / bandwidth["read"] + written / bandwidth["write"]
    return (read + written) / busy if busy else None


def _limit_text(run: RunHistory) -> str:
    if not run.bandwidth:
        return "limits of the drives: not measured"
    return f"limits: {_plain(run.bandwidth_source)}"


def _tiers(run: RunHistory) -> go.Figure | None:
    import plotly.graph_objects as go

    if not run.memory:
        return None
    names = {"device": "device", "ram": "RAM", "nvme": "NVMe"}
    figure = _figure(
        _plain(run.name),
        "",
        barmode="stack",
        xaxis={"title": {"text": "GB"}},
        yaxis={"autorange": "reversed"},
    )
    parts = [
        (tier, part, size)
        for tier, each in run.memory.items()
        for part, size in each.items()
        if size
    ]
    for index, (tier, part, size) in enumerate(parts):
        figure.add_trace(
            go.Bar(
                name=f"{names[tier]}: {_plain(part)}",
                y=[names[tier]],
                x=[size / 1e9],
                orientation="h",
                marker={"color": PALETTE[index % len(PALETTE)]},
            )
        )
    if run.budget_bytes is not None:
        left = max(run.budget_bytes - sum(run.memory["ram"].values()), 0.0)
        edge = {"color": "rgba(0,0,0,0)", "line": {"color": GREY, "width": 1.5}}
        figure.add_trace(
            go.Bar(
                name="RAM: left of the budget",
                y=["RAM"],
                x=[left / 1e9],
                orientation="h",
                marker=edge,
            )
        )
    return figure


def _memory(run: RunHistory) -> go.Figure:
    points = run.series.points
    figure = _figure(_plain(run.name), "GB")
    for name, field in (("RSS", "rss_bytes"), ("RAM for offloading, by plan", "ram_bytes")):
        sizes = [point.get(field) for point in points]
        if any(size is not None for size in sizes):
            figure.add_trace(_line(name, points, [_gb(size) for size in sizes]))
    if run.budget_bytes is not None:
        values = [run.budget_bytes / 1e9] * len(points)
        figure.add_trace(_line("budget (ram=)", points, values, line={"dash": "dash"}))
    return figure


def _gb(size: float | None) -> float | None:
    return size / 1e9 if size is not None else None


def _written(run: RunHistory) -> go.Figure | None:
    if not any(drive.written_bytes for drive in run.drives.values()):
        return None
    figure = _figure(_plain(run.name), "GB written by training")
    points = run.series.points
    for path in run.drives:
        sizes = [_gb(point.get(f"written {path}")) for point in points]
        figure.add_trace(_line(_plain(path), points, sizes))
    return figure


def _timeline(run: RunHistory, longest_s: float) -> go.Figure | None:
    """Draw a step, with a band of rows for each kind of work. All charts of a page have the same
    time axis of `longest_s` seconds.
    """
    timeline = run.timeline
    if timeline is None or not timeline.lanes:
        return None
    figure = _figure(
        f"{_plain(run.name)}: step {timeline.step}, {1e3 * timeline.seconds:.0f} ms",
        "",
        barmode="overlay",
        showlegend=False,
        uniformtext={"mode": "hide", "minsize": 8},
        xaxis={"title": {"text": "ms"}, "range": [0, 1e3 * longest_s]},
    )
    ticks, at = [], 0
    for lane, bars in timeline.lanes.items():
        rows = 1 + max((bar.row for bar in bars), default=0)
        figure.add_trace(_lane(lane, bars, at, timeline))
        ticks.append((at + (rows - 1) / 2, lane))
        at += rows
    figure.update_layout(height=120 + 22 * at)
    figure.update_yaxes(
        autorange="reversed",
        tickvals=[place for place, _ in ticks],
        ticktext=[lane for _, lane in ticks],
        showgrid=False,
    )
    return figure


def _lane(lane: str, bars: Sequence[Bar], at: int, timeline: StepTimeline) -> Any:
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale

    labels = [_label(bar, timeline.names) for bar in bars]
    last = max(len(timeline.names) - 1, 1)
    scale, share = UNITS
    # Each bar has an explicit colour: with a colour scale, plotly's text would lack contrast.
    colours: Any = sample_colorscale(scale, [share * bar.first / last for bar in bars])
    colours = {"waiting": RED, "phase": GREY}.get(lane, colours)
    return go.Bar(
        name=lane,
        orientation="h",
        y=[at + bar.row for bar in bars],
        base=[1e3 * bar.start_s for bar in bars],
        x=[1e3 * (bar.end_s - bar.start_s) for bar in bars],
        width=0.86,
        marker={"color": colours, "line": {"width": 0}},
        text=labels if lane in ("phase", "compute") else None,
        textposition="inside",
        insidetextanchor="middle",
        hoverinfo="text",
        hovertext=[
            f"{lane}, {label}<br>{1e3 * bar.start_s:.1f} to {1e3 * bar.end_s:.1f} ms"
            + (f"<br>{format_size(bar.size_bytes)}" if bar.size_bytes else "")
            for bar, label in zip(bars, labels, strict=True)
        ],
    )


def _label(bar: Bar, names: Sequence[str]) -> str:
    first = _plain(names[bar.first])
    return first if bar.first == bar.last else f"{first} … {_plain(names[bar.last])}"


# -- Tables and texts ------------------------------------------------------------------------------


def _thinned(runs: Sequence[RunHistory]) -> str:
    many = [
        f"{_short(run.name)}: {run.steps} steps, each point is the mean of {run.series.steps_each}"
        for run in runs
        if run.series.steps_each > 1
    ]
    return "; ".join(many) or "Each point of the charts is one step."


def _facts(runs: Sequence[RunHistory]) -> tuple[tuple[str, ...], ...]:
    rows: list[tuple[str, Callable[[RunHistory], str]]] = [
        ("command", lambda run: _about_text(run, "command")),
        ("date", lambda run: _about_text(run, "date")),
        ("version", _version_text),
        ("steps", _steps_text),
        ("total time", _total_text),
        ("time per step", _time_text),
        ("tokens/s", _tokens_text),
        ("bound by", _bound_text),
        ("parameters", _params_text),
        ("machine", _machine_text),
        ("training", _training_text),
        ("text", _source_text),
        ("chosen", _options_text),
        ("notes", lambda run: "; ".join(run.notes)),
    ]
    table = [("", *(_short(run.name) for run in runs))]
    table += [(title, *(tell(run) for run in runs)) for title, tell in rows]
    # Omit rows that are empty for all runs.
    return tuple(row for row in table if row is table[0] or any(row[1:]))


def _steps_text(run: RunHistory) -> str:
    after = run.resumed
    resumed = f", resumed {len(after)} times, last after step {after[-1]}" if after else ""
    return f"{run.steps}, up to step {run.last_step}{resumed}" if run.steps else "none"


def _time_text(run: RunHistory) -> str:
    mean, points = run.mean("step_s"), run.series.points
    eta = run.summary.get("eta_floor")
    if mean is None:
        return ""
    left_out = f" without the first {points[0].steps}" if len(points) > 1 else ""
    text = f"{mean:.3g} s, mean{left_out}"
    if isinstance(eta, float) and math.isfinite(eta):
        text += f"; η {eta:.2f} of the limit of any schedule"
    return text


def _about_text(run: RunHistory, name: str) -> str:
    text = run.about.get(name)
    return _short(text, _COMMAND_MAX) if isinstance(text, str) else ""


def _version_text(run: RunHistory) -> str:
    versions = [
        f"{label} {_short(str(run.about[name]))}"
        for label, name in (("infinity", "version"), ("torch", "torch"))
        if run.about.get(name) is not None
    ]
    return ", ".join(versions)


def _total_text(run: RunHistory) -> str:
    if not run.steps:
        return ""
    text = f"{format_left(run.total('step_s'))} in steps"
    if run.elapsed_s:
        text = f"{format_left(run.elapsed_s)}, with loading and measurements; {text}"
    return text


def _tokens_text(run: RunHistory) -> str:
    seconds, tokens = run.total("step_s"), run.total("tokens")
    return f"{tokens / seconds:,.4g}, mean of all steps" if tokens and seconds else ""


def _bound_text(run: RunHistory) -> str:
    """Format the parts of the steps' time as shares, the largest part first."""
    seconds = run.total("step_s")
    known = {
        "compute": run.total("compute_s"),
        "waiting for units and updates": run.total("io_wait_s"),
        "update": run.total("update_s"),
    }
    if not seconds or not any(known.values()):
        return ""
    parts = {**known, "the rest": max(seconds - sum(known.values()), 0.0)}
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {part / seconds:.0%}" for name, part in ordered)


def _training_text(run: RunHistory) -> str:
    options = run.about.get("options")
    names = ("lr", "warmup", "batch", "accumulate", "seq", "seed", "clip", "dtype", "lora")
    return _chosen_text(options, names)


def _source_text(run: RunHistory) -> str:
    options = run.about.get("options")
    if not isinstance(options, dict):
        return ""
    text = _chosen_text(options, ("text", "jsonl", "sqlite", "chat"))
    if not text:
        return ""
    held_out = options.get("eval")
    where = f"in {held_out}" if held_out is not None else "at its end"
    return _short(f"{text}; the held-out part is {where}")


def _chosen_text(options: Any, names: Sequence[str]) -> str:
    if not isinstance(options, dict):
        return ""
    return _short(
        "; ".join(f"{name} {options[name]}" for name in names if options.get(name) is not None)
    )


def _params_text(run: RunHistory) -> str:
    params = run.about.get("params")
    ranks = run.about.get("ranks")
    text = f"{params / 1e6:.1f} M" if isinstance(params, (int, float)) else ""
    return text + (
        f", {ranks} ranks; figures of rank 0" if isinstance(ranks, int) and ranks > 1 else ""
    )


def _machine_text(run: RunHistory) -> str:
    hardware = run.about.get("hardware")
    if not isinstance(hardware, dict):
        return ""
    return _short(f"{hardware.get('cpu', '')}, {hardware.get('cores', '?')} cores")


def _options_text(run: RunHistory) -> str:
    options = run.about.get("options")
    names = ("model", "schedule", "state", "update", "generations", "ram")
    return _chosen_text(options, names)


def _timeline_text(runs: Sequence[RunHistory]) -> str:
    if not any(run.timeline for run in runs):
        return (
            "No timeline was recorded: a run records one at steps 2, 4, 8 and so on, unless "
            "--no-trace is given."
        )
    lost = [
        f" {_short(run.name)} had {run.timeline.dropped} spans more than the timeline can hold."
        for run in runs
        if run.timeline is not None and run.timeline.dropped
    ]
    return (
        "Each bar is work on one unit; its colour shows the unit's place in the model. Bars of a "
        "lane overlap while several units are in progress. compute: the unit is gathered and in "
        f"use; on a GPU, measured between kernel launches.{''.join(lost)}"
    )


def _wear_text(runs: Sequence[RunHistory], rated_tb: float | None) -> str:
    if not any(run.drives for run in runs):
        return "Nothing rests on a drive."
    least = (
        f" The page extrapolates to days if the steps took {format_left(WEAR_LEAST_S)} or more: in "
        "a shorter run, loading and the first steps distort the rate."
    )
    if rated_tb is not None:
        rated = f"How long drives rated for {rated_tb:g} terabytes written (TBW) last at this rate."
        return rated + least
    return (
        f"The drives' ratings are unknown: the example is a drive rated for {EXAMPLE_TBW} "
        f"terabytes written (TBW). Give yours with --tbw.{least}"
    )


def _wear(runs: Sequence[RunHistory], rated_tb: float) -> tuple[tuple[str, ...], ...]:
    """Return a row of texts for each drive: bytes that training wrote, and the drive's life."""
    rows = []
    for run in runs:
        for drive in run.drives.values():
            long = drive.seconds >= WEAR_LEAST_S
            # Drives are rated in decimal terabytes.
            day = drive.written_bytes / drive.seconds * 86_400 / 1e12 if long else None
            days = rated_tb / day if day else math.inf
            rows.append(
                (
                    _short(run.name),
                    _short(drive.path),
                    format_size(drive.written_bytes),
                    format_size(drive.written_bytes / max(drive.steps, 1)),
                    f"{day:.3g} TB" if day is not None else "the run is too short",
                    f"{days:,.0f} days" if math.isfinite(days) else "-",
                )
            )
    heads = ("run", "drive", "written", "per step", "per day", f"until {rated_tb:g} TB")
    return (heads, *rows) if rows else ()


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _short(text: str, most: int = _TEXT_MAX) -> str:
    """Shorten a text from a file to `most` characters, and replace unprintable characters."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in short)


def _plain(text: str) -> str:
    """Shorten and escape a text from a file for a chart, since plotly interprets some HTML tags."""
    return html.escape(_short(text), quote=False)


def _finite(values: Iterable[float | None]) -> list[float | None]:
    """Replace NaN and infinity by None, which plotly draws as a gap."""
    return [value if value is not None and math.isfinite(value) else None for value in values]
