"""Record of the rehearsal of sizes (bench/rehearsal/sizes.py), of a model of toy width."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity._src.memory.constants import SPARES_PER_DRIVE

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives the script, imported as it imports others, with another width."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH / "rehearsal"))
    script = importlib.import_module("sizes")
    whole = script.config

    def narrow(layers: int, vocabulary: int) -> Any:
        found = whole(layers, vocabulary)
        found.hidden_size, found.intermediate_size, found.head_dim = 1024, 2048, 8
        return found

    monkeypatch.setattr(script, "config", narrow)
    yield script
    for name in ("sizes", "bench_path", "harness", "meter"):
        sys.modules.pop(name, None)


def test_all_states_go_through_null_drives_and_the_record_says_what_moved(
    sizes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.jsonl"
    arguments = ["--layers=2", "--vocab=1024", "--steps=2", "--drives=2", f"--results={results}"]
    monkeypatch.setattr(sys, "argv", ["sizes.py", f"--dir={tmp_path}", *arguments])
    assert sizes.main() == 0
    record = sizes.harness.json.loads(results.read_text())
    # Embedding, head, and 2 layers of 4 attention and 3 MLP matrices; norms are small change.
    attention, mlp = 2 * 1024 * 1024 + 2 * 1024 * 64, 3 * 1024 * 2048
    assert record["parameters"] == 2 * 1024 * 1024 + 2 * (attention + mlp) + 5 * 1024
    # Norms are half a group of elements, and are padded to one.
    # Spare ranges of a chunk's 4.5 MiB on each of two drives come on top.
    states_bytes = record["file_bytes"] - 2 * SPARES_PER_DRIVE * (9 << 19)
    assert 12 <= states_bytes / record["parameters"] < 12.01
    assert record["last_chunk_end"] <= states_bytes < 2 * record["last_chunk_end"]
    assert record["updates"] == 2 * record["chunks"]
    steps = [phase for phase in record["phases"] if phase["phase"].startswith("step")]
    written = [step["written_bytes_per_param"] for step in steps]
    assert written == [states_bytes / record["parameters"]] * 2
    # In the first step the moments are known to be zeros: 8 bytes that nobody reads.
    more = steps[1]["read_bytes_per_param"] - steps[0]["read_bytes_per_param"]
    assert 8 <= more < 8.01
    assert all(step["trainer_us_per_chunk"] > 0 for step in steps)
    forecast = record["forecast"]
    assert forecast["file_bytes"] == record["file_bytes"]
    assert forecast["written_bytes"] == written[1] * record["parameters"]
    assert list(tmp_path.iterdir()) == [results]
