"""The page of `infinity report`: its figures are those that were recorded, whatever the files."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("plotly")

from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs

from infinity._src.base.metrics_file import MetricsFile
from infinity._src.cabi.installation import install_line
from infinity._src.cli import html_report, page_style, run_history
from infinity._src.cli import train as command
from infinity._src.cli import watch as watching
from infinity._src.cli.html_report import run_report, sections
from infinity._src.cli.run_history import POINTS_MAX, Series, read_run, runs_of
from infinity._src.measure.swap import measure_swap
from tests.tiny_llama import TEXT, write_model
from tests.unit.cli.commands import run
from tests.unit.cli.run_pages import (
    HOSTILE,
    hostile_run,
    run_row,
    step_row,
    train_run,
    write_run,
)

KINDS = {
    "loss", "lr", "norm", "speed", "eta", "time-0", "drives-0", "tiers-0", "memory-0",
    "timeline-0", "wear-0",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _drives_are_measured_in_no_time() -> Iterator[None]:
    def short(task: Any) -> Any:
        return measure_swap(dataclasses.replace(task, size_bytes=32 << 20, rounds=1, phase_s=0.05))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure_swap", short)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("trained"))


def report(*arguments: str | Path) -> tuple[int, str]:
    return run(run_report, "report", *arguments)


def rows_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def charts_of(*directories: Path) -> dict[str, dict[str, Any]]:
    """The traces of each chart by name."""
    found = sections([read_run(directory) for directory in directories])
    return {
        chart.name: {trace.name: trace for trace in chart.figure.data}
        for section in found
        for chart in section.charts
    }


class Tags(html.parser.HTMLParser):
    """Counts tags, and keeps the texts that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.inside = ""
        self.texts: list[str] = []
        # Without the 5 MB of plotly.js, which would take seconds to parse.
        self.feed(text.replace(get_plotlyjs(), ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside not in {"script", "style"}:
            self.texts.append(data)


def test_a_real_run_has_all_charts_with_the_figures_that_were_recorded(trained: Path) -> None:
    rows = rows_of(trained, "step")
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, 10))
    charts = charts_of(trained)
    assert charts.keys() == KINDS
    loss = charts["loss"]
    assert list(loss["training"].x) == steps
    assert list(loss["training"].y) == [row["loss"] for row in rows]
    held_out = rows_of(trained, "held_out")
    assert list(loss["held out"].x) == [row["step"] for row in held_out] == [0, 3, 6, 9]
    assert list(loss["held out"].y) == [row["loss"] for row in held_out]
    times = charts["time-0"]
    assert list(times["compute"].y) == [row["compute_s"] for row in rows]
    assert list(times["waiting"].y) == [max(row["io_wait_s"], 0) for row in rows]
    assert list(times["update"].y) == [row["update_s"] for row in rows]
    for index, row in enumerate(rows):
        whole = sum(times[name].y[index] for name in ("compute", "waiting", "update", "rest"))
        assert whole == pytest.approx(row["step_s"], rel=0.05)
    drives, (about,) = charts["drives-0"], rows_of(trained, "run")
    assert list(drives["read"].y) == [row["bytes_read"] / row["step_s"] / 1e9 for row in rows]
    assert list(drives["written"].y) == [row["bytes_written"] / row["step_s"] / 1e9 for row in rows]
    assert set(drives["limit of reads"].y) == {about["bandwidth"]["read_gbps"]}
    assert set(drives["limit of writes"].y) == {about["bandwidth"]["write_gbps"]}
    assert set(drives["limit of both at once"].y) == {about["bandwidth"]["mixed_gbps"]}
    memory = charts["memory-0"]
    assert list(memory["RSS"].y) == [row["rss_bytes"] / 1e9 for row in rows]
    tiers = {name: trace.x[0] for name, trace in charts["tiers-0"].items()}
    ram = {name: size for name, size in tiers.items() if name.startswith("RAM: ")}
    last = rows[-1]["memory"]
    assert ram == {f"RAM: {name}": size / 1e9 for name, size in last["ram"].items()}
    assert tiers["NVMe: states"] == last["nvme"]["states"] / 1e9
    (written,) = charts["wear-0"].values()
    assert written.y[-1] == pytest.approx(sum(row["bytes_written"] for row in rows) / 1e9)
    assert {"phase", "gather", "compute", "update", "write"} <= charts["timeline-0"].keys()
    for lane in charts["timeline-0"].values():
        assert len(lane.x) == len(lane.base) == len(lane.hovertext) > 0


def test_training_writes_the_page_and_the_command_writes_it_again(trained: Path) -> None:
    first = (trained / "report.html").read_text()
    for name in KINDS:
        assert f'id="{name}"' in first
    status, shown = report(trained, "--out", trained / "again.html", "--tbw", "1200")
    assert status == 0, shown
    again = (trained / "again.html").read_text()
    assert "rated for 1200 terabytes" in again
    assert "until 1,200 TB" in again or "until 1200 TB" in again
    # The page requests nothing, so it must contain all that it needs.
    tags = Tags(again)
    assert tags.tags["link"] == 1  # the icon, which is empty
    assert not tags.attributes & {"src", "onerror", "onload"}
    assert "Plotly.newPlot" in again
    assert "default-src 'none'" in again
    (trained / "again.html").unlink()


def test_texts_of_files_are_texts(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "_")
    directory = hostile_run(tmp_path / name)
    plain = write_run(tmp_path / "plain", run_row(), step_row(1), step_row(2))
    status, shown = report(tmp_path)
    assert status == 0, shown
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = Tags(text)
    plain_page = Tags(html_report.page([read_run(plain), read_run(plain)]))
    for tag in ("img", "b", "a", "svg", "iframe"):
        assert not found.tags[tag], tag
    charts = sum(len(each.charts) for each in sections([read_run(directory), read_run(plain)]))
    plotted = sum(len(each.charts) for each in sections([read_run(plain), read_run(plain)]))
    # One script for each chart, and plotly.js.
    assert found.tags["script"] - charts == plain_page.tags["script"] - plotted
    assert "<script>alert" not in text
    assert "onerror" not in found.attributes
    assert any("<img src=x" in each for each in found.texts)
    # A path of 100,000 letters is not shown whole.
    assert "x" * 1000 not in text.split("Plotly.newPlot", 1)[1]
    for chart in charts_of(directory).values():
        for trace in chart.values():
            shown_texts = [trace.name, *(trace.hovertext or ()), *(trace.text or ())]
            assert not any("<img" in each or "<b>" in each for each in shown_texts)


def test_a_line_that_a_kill_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "run", run_row(), step_row(1), step_row(2))
    text = (whole / "metrics.jsonl").read_text()
    last = text.rstrip("\n").rsplit("\n", 1)[1]
    for cut in (1, len(last) // 2, len(last) - 1):
        (whole / "metrics.jsonl").write_text(text[: -1 - len(last) + cut])
        run = read_run(whole)
        assert run.steps == 1
        assert run.notes == ["the last line is incomplete, as after a kill, and is left out"]
    (whole / "metrics.jsonl").write_text(text.rstrip("\n"))
    assert (read_run(whole).steps, read_run(whole).notes) == (2, [])
    (whole / "metrics.jsonl").write_bytes(text.encode() + b"\0" * 100)  # blocks without data
    assert (read_run(whole).steps, len(read_run(whole).notes)) == (2, 1)
    status, shown = report(whole)
    assert status == 0, shown
    assert "the last line is incomplete" in (whole / "report.html").read_text()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("not json\n", "is not a JSON object"),
        ("[1]\n", "is not a JSON object"),
        ('{"kind": 3}\n', "is not a JSON object"),
        ("[" * 50_000 + "\n", "is not a JSON object"),
        ("\udcff\n", "is not a JSON object"),
        ('{"kind": "step", "step": ' + "9" * 5000 + "}\n", "is not a JSON object"),
        ("x" * (1 << 21), "more than 1048576 bytes"),
        (json.dumps(step_row(1)) + "\n", "step 1 follows step 1, so the file mixes two"),
        (json.dumps({**step_row(2), "step": "2"}) + "\n", "step is '2', not a step's number"),
        (json.dumps(step_row(-1)) + "\n", "step is -1"),
        (json.dumps(step_row(2, loss=None)) + "\n", "the step has no loss"),
        (json.dumps(step_row(2, loss="1")) + "\n", "loss is '1', not a number"),
        (json.dumps(step_row(2, step_s=None)) + "\n", "the step has no step_s"),
        (json.dumps(step_row(2, step_s=math.nan)) + "\n", "step_s is nan, not a size or time"),
        (json.dumps(step_row(2, rss_bytes=True)) + "\n", "rss_bytes is True"),
        (json.dumps(step_row(2, bytes_read=10**400)) + "\n", "bytes_read is 1000"),
        (json.dumps(step_row(2, drives=3)) + "\n", "drives is not a list of at most 64"),
        (json.dumps(step_row(2, drives=[3])) + "\n", "a drive has no path"),
        (json.dumps(step_row(2, drives=[{"path": str(n)} for n in range(64)])) + "\n", "64 drives"),
        (json.dumps(step_row(2, memory={})) + "\n", "memory has no device"),
        (json.dumps(run_row(schema="infinity.train/9")) + "\n", "the schema is 'infinity.train/9'"),
        ('{"kind": "held_out", "step": 1, "loss": "x"}\n', "loss is 'x'"),
    ],
)
def test_a_line_that_is_none_of_ours_is_named_with_its_place(
    tmp_path: Path, line: str, told: str
) -> None:
    directory = write_run(tmp_path, run_row(), step_row(1))
    path = directory / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3") as error:
        read_run(directory)
    assert told in str(error.value)
    assert len(str(error.value)) < 1000
    status, shown = report(directory)
    assert status == 2
    assert "metrics.jsonl, line 3" in shown
    assert not (directory / "report.html").exists()


def test_lines_of_other_kinds_and_older_ones_are_no_faults(tmp_path: Path) -> None:
    bare = {"kind": "step", "loss": 1.5, "step_s": 0.5}
    run = write_run(
        tmp_path, {"kind": "later"}, {**bare, "step": 1}, {**bare, "step": 2}, tail="\n  \n"
    )
    assert charts_of(run).keys() == {"loss", "time-0", "memory-0"}
    status, shown = report(run)
    assert status == 0, shown
    text = (run / "report.html").read_text()
    assert "No timeline was recorded" in text
    assert "Nothing rests on a drive" in text


def test_losses_that_are_no_numbers_or_huge_have_a_place(tmp_path: Path) -> None:
    values = [2.0, math.nan, 1.0, math.inf, -math.inf, 10**400, 1e308, -1e308, 1.5]
    rows = [step_row(step, loss=loss) for step, loss in enumerate(values, 1)]
    charts = charts_of(write_run(tmp_path, run_row(), *rows))["loss"]
    known = [2.0, None, 1.0, None, None, None, 1e308, -1e308, 1.5]
    assert list(charts["training"].y) == known
    assert list(charts["NaN or infinite"].x) == [2, 4, 5, 6]
    status, shown = report(tmp_path)
    assert status == 0, shown
    # If the loss explodes late, the earlier values stay visible: the axis is logarithmic.
    rows = [step_row(step, loss=loss) for step, loss in enumerate([2.0, 1.0, 1e30], 1)]
    found = sections([read_run(write_run(tmp_path, run_row(), *rows))])
    (chart,) = next(each.charts for each in found if each.title == "Loss")
    assert chart.figure.layout.yaxis.type == "log"


def test_a_drive_that_nobody_measured_has_no_limit(tmp_path: Path) -> None:
    for bandwidth in (None, {}, {"read_gbps": math.nan, "write_gbps": 0.0, "mixed_gbps": "x"}):
        run = write_run(tmp_path, run_row(bandwidth=bandwidth), step_row(1))
        assert charts_of(run)["drives-0"].keys() == {"read", "written"}
        status, _ = report(run)
        assert status == 0
        assert "limits of the drives: not measured" in (run / "report.html").read_text()


WRITING = {"path": "/mnt/a", "bytes_read": 0.0, "bytes_written": 3e11}


def test_wear_is_that_of_the_drives(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, run_row(), step_row(1), step_row(2)))
    (section,) = [each for each in sections([run], 864.0) if each.title == "Wear"]
    # Four seconds are too few to extrapolate to days.
    short = ("/mnt/a", "3.7 GiB", "1.9 GiB", "the run is too short", "-")
    assert section.table[1][1:] == short
    assert "extrapolates to days if the steps took 10 min or more" in section.about
    steps = [step_row(n, step_s=300.0, drives=[WRITING]) for n in (1, 2)]
    run = read_run(write_run(tmp_path, run_row(), *steps))
    (section,) = [each for each in sections([run], 864.0) if each.title == "Wear"]
    assert section.table[1][1:] == ("/mnt/a", "558.8 GiB", "279.4 GiB", "86.4 TB", "10 days")
    (section,) = [each for each in sections([run]) if each.title == "Wear"]
    assert "the example is a drive rated for 600 terabytes" in section.about


def test_runs_in_a_directory_are_shown_beside_each_other(trained: Path, tmp_path: Path) -> None:
    for name in ("horizontal", "vertical"):
        run = write_run(tmp_path / name, run_row(), step_row(1), step_row(2))
        (run / "timeline.json").write_text((trained / "timeline.json").read_text())
    (tmp_path / "checkpoint").mkdir()
    assert [each.name for each in runs_of(tmp_path)] == ["horizontal", "vertical"]
    charts = charts_of(*runs_of(tmp_path))
    assert {"timeline-0", "timeline-1", "time-0", "time-1"} <= charts.keys()
    assert {"horizontal: training", "vertical: training"} <= charts["loss"].keys()
    found = sections([read_run(each) for each in runs_of(tmp_path)])
    figures = [chart.figure for each in found for chart in each.charts if "timeline" in chart.name]
    # One scale: a bar twice as long took twice as long.
    assert figures[0].layout.xaxis.range == figures[1].layout.xaxis.range
    assert "vertical" in figures[1].layout.title.text


def test_a_directory_without_runs_or_with_too_many_is_refused(tmp_path: Path) -> None:
    status, shown = report(tmp_path / "none")
    assert (status, "none is not a directory" in shown) == (2, True)
    status, shown = report(tmp_path)
    assert (status, "a directory in it has a metrics.jsonl" in shown) == (2, True)
    write_run(tmp_path, run_row())
    status, shown = report(tmp_path)
    assert (status, "no step was recorded yet" in shown) == (2, True)
    status, shown = report(tmp_path, "--tbw", "nan")
    assert (status, "--tbw nan must be" in shown) == (2, True)
    for index in range(run_history.RUNS_MAX):
        write_run(tmp_path / str(index), run_row(), step_row(1))
    status, shown = report(tmp_path)
    assert (status, "has 9 runs" in shown) == (2, True)


def test_without_plotly_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    run = write_run(tmp_path, run_row(), step_row(1))
    status, shown = report(run)
    assert status == 2
    assert f"no page: plotly is not installed: {install_line('train')}" in shown


def test_training_without_the_libraries_of_its_pictures_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("plotly", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")
    (tmp_path / "text").write_text(TEXT)
    given = "--params cpu --optim cpu --steps 1 --seq 32 --eval-batches 1 --no-save --no-trace"
    paths = (tmp_path / "model", "--text", tmp_path / "text", "--out", tmp_path / "out")
    status, shown = run(command.run_train, "train", *paths, *given.split())
    assert status == 0, shown
    for missing, package in (("loss.png", "matplotlib"), ("report.html", "plotly")):
        assert f"no {missing}: {package} is not installed: {install_line('train')}\n" in shown
        assert not (tmp_path / "out" / missing).exists()


@pytest.mark.parametrize("count", [1, 2, POINTS_MAX, POINTS_MAX + 1, 3 * POINTS_MAX + 7, 5000])
def test_a_series_of_any_length_has_few_points_and_keeps_its_means(count: int) -> None:
    chance = random.Random(count)
    values = [chance.random() for _ in range(count)]
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(
            step, {"loss": value} | ({"x": value} if step % 3 == 0 else {}), odd=step % 7 == 0
        )
    points = series.points
    assert len(points) <= POINTS_MAX
    assert sum(point.steps for point in points) == count
    assert sum(point.odd for point in points) == count // 7
    assert (points[0].first, points[-1].last) == (1, count)
    for point in points:
        assert point.steps == series.steps_each or point is points[-1]
        part = values[point.first - 1 : point.last]
        assert point.means["loss"] == pytest.approx(sum(part) / len(part))
        assert (point.low, point.high) == (min(part), max(part))
        thirds = [values[step - 1] for step in range(point.first, point.last + 1) if step % 3 == 0]
        assert point.counts.get("x", 0) == len(thirds)
        if thirds:
            assert point.means["x"] == pytest.approx(sum(thirds) / len(thirds))


def test_ten_times_the_steps_take_ten_times_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is counted as joined points: thinning does nothing else."""
    joined = 0
    join = run_history.Point.join

    def counted(self: Any, later: Any) -> None:
        nonlocal joined
        joined += 1
        join(self, later)

    monkeypatch.setattr(run_history.Point, "join", counted)
    counts = []
    for count in (2_000, 20_000):
        joined, series = 0, Series()
        for step in range(count):
            series.add(step, {"loss": 1.0})
        counts.append(joined)
    assert counts[1] <= 12 * counts[0]


def test_a_long_run_has_a_page_as_small_as_a_short_one(tmp_path: Path) -> None:
    sizes = []
    for count in (POINTS_MAX, 4 * POINTS_MAX):
        run = write_run(tmp_path / str(count), run_row(), *(step_row(n + 1) for n in range(count)))
        status, shown = report(run)
        assert status == 0, shown
        sizes.append((run / "report.html").stat().st_size)
    text = (run / "report.html").read_text()
    assert f"{4 * POINTS_MAX} steps, each point is the mean of 4" in text
    assert sizes[1] < sizes[0] + 100_000


def facts_of(directory: Path) -> dict[str, str]:
    found = sections([read_run(directory)])
    (section,) = [each for each in found if each.title == "Runs"]
    return dict(section.table[1:])


def test_the_header_says_what_ran_how_long_and_what_bounded_it(tmp_path: Path) -> None:
    options = {
        "lr": 3e-5, "batch": 2, "seq": 64, "accumulate": 4, "seed": 7, "model": "m",
        "chat": "talks.jsonl", "eval": "held.jsonl",
    }  # fmt: skip
    about = {"command": "infinity train m --batch 2", "date": "2026-01-02 03:04:05+00:00",
             "version": "0.1.0", "torch": "2.13.0", "options": options}  # fmt: skip
    row = run_row(**about)
    first = [step_row(n, tokens=512, elapsed_s=100.0 + 2 * n) for n in (1, 2)]
    later = [step_row(n, tokens=512, elapsed_s=30.0 + n) for n in (3, 4)]
    run = write_run(tmp_path, row, *first, {**row, "goes_on_after": 2}, *later)
    facts = facts_of(run)
    assert facts["command"] == "infinity train m --batch 2"
    assert facts["date"] == "2026-01-02 03:04:05+00:00"
    assert facts["version"] == "infinity 0.1.0, torch 2.13.0"
    # The times of both processes, 104 and 34 s.
    assert facts["total time"] == "2 min, with loading and measurements; 8 s in steps"
    assert facts["tokens/s"] == "256, mean of all steps"
    assert facts["bound by"].startswith("compute 50%, waiting for units and updates 25%")
    assert facts["training"] == "lr 3e-05; batch 2; accumulate 4; seq 64; seed 7"
    assert facts["text"] == "chat talks.jsonl; the held-out part is in held.jsonl"


def test_schedule_and_speed_have_curves(tmp_path: Path) -> None:
    norms = [1.5, math.inf, None]
    rows = [
        step_row(n, lr=n / 10, grad_norm=norm, tokens=100) for n, norm in enumerate(norms, 1)
    ]
    charts = charts_of(write_run(tmp_path, run_row(), *rows))
    assert list(charts["lr"]["learning rate"].y) == [0.1, 0.2, 0.3]
    assert list(charts["norm"]["gradient norm, before clipping"].y) == [1.5, None, None]
    assert list(charts["speed"]["tokens/s"].y) == [50.0] * 3
    # A step takes 2 s. Its limit is 3 / 4 + 2 / 2 s, which the drives need for its bytes; compute
    # needs only 1 s.
    assert list(charts["eta"]["η"].y) == [1.75 / 2] * 3
    bare = charts_of(write_run(tmp_path, run_row(bandwidth=None), step_row(1)))
    assert not {"lr", "norm", "speed", "eta"} & bare.keys()


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG computes it."""

    def luminance(colour: str) -> float:
        parts = (
            [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
            if colour.startswith("#")
            else [float(part) for part in re.findall(r"[\d.]+", colour)]
        )
        linear = [
            part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4
            for part in parts
        ]
        return sum(weight * part for weight, part in zip(weights, linear, strict=True))

    weights = (0.2126, 0.7152, 0.0722)
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_is_seen_on_the_light_and_on_the_dark_page() -> None:
    scale, share = page_style.UNITS
    units = sample_colorscale(scale, [share * place / 20 for place in range(21)])
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for colour in (*page_style.PALETTE, *units):
        for page in page_style.PAGES.values():
            assert contrast(colour, page) >= 3, (colour, page)
    assert len(set(page_style.PALETTE)) >= run_history.RUNS_MAX


def colours_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from colours_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from colours_in(each)
    elif isinstance(value, str) and re.fullmatch(r"#[0-9a-fA-F]{6}", value):
        yield value


def test_charts_have_no_colours_but_the_palette_s(trained: Path) -> None:
    found = sections([read_run(trained)])
    used = {
        colour
        for each in found
        for chart in each.charts
        for trace in chart.figure.to_dict()["data"]
        for colour in colours_in(trace)
    }
    assert used
    assert used <= set(page_style.PALETTE)


def test_a_page_is_written_again_until_its_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model that is loading has no record yet.
    run, page = tmp_path, tmp_path / "report.html"
    told: list[bool | None] = []

    def sleeping(seconds: float) -> None:
        assert seconds == 5.0
        told.append("location.reload(), 5000)" in page.read_text() if page.exists() else None)
        rows = [step_row(n) for n in range(1, len(told) + 1)]
        ends = [{"kind": "summary"}] if len(told) == 3 else []
        write_run(tmp_path, run_row(), *rows, *ends)

    monkeypatch.setattr(watching.time, "sleep", sleeping)
    status, shown = report(run, "--watch", "--every", "5")
    assert status == 0, shown
    # There is no page before the first step; pages reload while the run continues; the last does
    # not.
    assert told == [None, True, True]
    assert "location.reload" not in page.read_text().replace(get_plotlyjs(), "")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "report.html"}


def test_a_run_that_is_killed_before_its_first_step_replaces_no_record(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_row(), step_row(1)) / "metrics.jsonl"
    before = path.read_text()
    for keeps in (False, True):
        killed = MetricsFile(path)
        killed.add("run", run_row())
        assert path.read_text() != before
        MetricsFile(path, keeps=keeps).close()
        assert path.read_text() == before
    ended = MetricsFile(path)
    ended.add("step", step_row(2))
    ended.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert path.read_text().count("\n") == 1


def test_a_record_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(path)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        file.add("step", step_row(1))
    with pytest.raises(OSError, match="No space left"):
        file.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_watch_and_leaves_a_page_that_stays(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, run_row(), step_row(1))
    monkeypatch.setattr(watching.time, "sleep", lambda _: os.kill(os.getpid(), number))
    status, shown = report(run, "--watch")
    assert status == 128 + number, shown
    page = (tmp_path / "report.html").read_text()
    assert "location.reload" not in page.replace(get_plotlyjs(), "")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "report.html"}


def test_a_watch_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, run_row(), step_row(1))
    for more, message in (
        (("--every", "5"), "--every 5 sets how often --watch writes the page; add --watch"),
        (("--watch", "--every", "0"), "--every 0 must be a number of seconds above 0"),
        (("--watch", "--every", "nan"), "--every nan must be"),
    ):
        status, shown = report(run, *more)
        assert (status, shown.count("\n")) == (2, 1)
        assert message in shown
        assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    run = read_run(
        write_run(
            tmp_path, run_row(), step_row(1), step_row(2), run_row(goes_on_after=2, params=7),
            step_row(3), {"kind": "summary", "eta_floor": 0.9},
        )
    )  # fmt: skip
    assert (run.steps, run.last_step, run.resumed) == (3, 3, [2])
    (section,) = [each for each in sections([run]) if each.title == "Runs"]
    facts = dict(section.table[1:])
    assert facts["steps"] == "3, up to step 3, resumed 1 times, last after step 2"
    assert "η 0.90" in facts["time per step"]
