"""`infinity bench swap --for MODEL`: a forecast from the measured rates, after the figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")


from infinity._src.base.sizes import MIB  # noqa: E402
from infinity._src.cli import plan  # noqa: E402
from infinity._src.cli.bench_model import read_model  # noqa: E402
from infinity._src.cli.main import main  # noqa: E402
from infinity._src.measure import command  # noqa: E402
from infinity.aio import IoSettings  # noqa: E402


@pytest.fixture(autouse=True)
def _swap_may_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a Llama whose states exceed the RAM that the machine seems to have."""
    monkeypatch.setattr(plan, "memory_left_bytes", lambda: 384 * MIB)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
        num_attention_heads=8, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_drives_twice_as_fast_need_half_the_time_and_a_rating_is_days(
    model: Path, tmp_path: Path
) -> None:
    def forecast(rate: float, tbw: float | None = None) -> command.Meaning:
        return read_model(model, tbw)(IoSettings(bandwidths={str(tmp_path): (rate, rate)}))

    slow, fast, rated = forecast(1e6), forecast(2e6), forecast(1e6, 1200)
    assert slow.record["written_bytes"] == fast.record["written_bytes"] > 0
    assert slow.record["drives_s"] == pytest.approx(2 * fast.record["drives_s"])
    assert slow.record["bound_by"] == "drives"
    assert rated.record["drive_days"] == pytest.approx(2 * slow.record["drive_days"])
    assert "each drive is rated for 1200 TB, given" in "\n".join(rated.lines)
    assert "600 TB, assumed" in "\n".join(slow.lines)
    # Compute bounds the step if drives are fast enough; the output also says what the drives could
    # do.
    computes = forecast(1e12)
    ((step_s, days),) = re.findall(
        r"compute were as fast as the drives: (\S+) s a step, and new drives last (\S+) days",
        "\n".join(computes.lines),
    )
    # Scale the drives' time by the step / drives ratio of a step that drives bound.
    at_drives = computes.record["drives_s"] * slow.record["step_s"] / slow.record["drives_s"]
    assert float(step_s) == pytest.approx(at_drives, rel=1e-2)
    all_days = computes.record["drive_days"] * at_drives / computes.record["step_s"]
    assert float(days) == pytest.approx(all_days, rel=0.1, abs=0.1)
    assert "if compute" not in "\n".join(slow.lines)
    # Both in decimal units, as drives are rated.
    ((each, day),) = re.findall(r"(\S+) GB written a step, (\S+) TB a day", "\n".join(slow.lines))
    assert float(each) == pytest.approx(slow.record["written_bytes"] / 1e9, abs=0.1)
    assert float(day) == pytest.approx(slow.record["written_bytes_per_day"] / 1e12, abs=0.01)


def test_directories_of_one_drive_have_its_rate_together(model: Path, tmp_path: Path) -> None:
    halves = {str(tmp_path / name): (5e5, 5e5) for name in "ab"}
    for directory in halves:
        Path(directory).mkdir()
    both = read_model(model, None)(IoSettings(bandwidths=halves)).record
    one = read_model(model, None)(IoSettings(bandwidths={str(tmp_path): (1e6, 1e6)})).record
    assert both["drives_s"] == pytest.approx(one["drives_s"])
    assert both["drive_days"] == pytest.approx(one["drive_days"])


def test_a_model_that_does_not_fit_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = IoSettings(bandwidths={str(tmp_path): (1e9, 1e9)})
    monkeypatch.setattr(plan, "memory_left_bytes", lambda: 32 * MIB)
    found = read_model(model, None)(settings)
    assert not found.record["fits"]
    assert found.lines[1].startswith("  it does not fit here: ")
    assert "Policy(" not in "\n".join(found.lines)


def test_the_command_shows_it_and_writes_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive, record = tmp_path / "drive", tmp_path / "a.json"
    drive.mkdir()
    arguments = ["--dir", str(drive), "--size", "24MiB", "--rounds", "1", "--seconds", "0.02"]
    arguments += ["--limit", "off", "--for", str(model / "config.json"), "--json", str(record)]
    assert main(["bench", "swap", *arguments]) == 0
    assert "for small, " in " ".join(capsys.readouterr().out.split())
    found = json.loads(record.read_text())
    assert (found["schema"], found["model"]["name"]) == ("infinity.bench.swap/1", "small")
    assert found["model"]["step_s"] > 0
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--for", "/nonexistent/model"], "is neither a directory with a config.json"),
        (["--for", "{empty}"], "is neither a directory with a config.json"),
        (["--tbw", "600"], "--tbw 600.0 has no effect without --for"),
        (["--for", "{model}", "--tbw", "0"], "--tbw 0.0"),
        (["--for", "{model}", "--tbw", "nan"], "--tbw nan"),
        (["--for", "{bad}"], "config.json"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    model: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("empty", "bad", "drive"):
        (tmp_path / name).mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    monkeypatch.setattr(command, "measure_swap", None)
    given = [
        each.format(model=model, empty=tmp_path / "empty", bad=tmp_path / "bad")
        for each in arguments
    ]
    assert main(["bench", "swap", "--dir", str(tmp_path / "drive"), *given]) == 2
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert shown.startswith("error: ")
    assert list((tmp_path / "drive").iterdir()) == []
