"""`infinity train --lora`: an adapter trains, PEFT loads its file, and a killed run resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

from infinity._src.cli import lora  # noqa: E402
from infinity._src.cli.train import run_train  # noqa: E402
from tests.tiny_llama import TEXT, write_model  # noqa: E402
from tests.unit.cli.commands import run  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")

GIVEN = "--steps 4 --batch 2 --seq 32 --lr 3e-2 --eval-batches 1 --dtype bfloat16 --no-trace"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("place")
    (found / "model").mkdir()
    write_model(found / "model")
    (found / "text.txt").write_text(TEXT)
    return found


def train(place: Path, out: Path, *more: str) -> str:
    paths = (place / "model", "--text", place / "text.txt", "--out", out)
    status, shown = run(run_train, "train", *paths, *GIVEN.split(), *more)
    assert status == 0, shown
    return shown


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_an_adapter_trains_and_loads_by_peft(place: Path, tmp_path: Path) -> None:
    import transformers

    out = tmp_path / "out"
    shown = train(place, out, "--lora", "4", "--accumulate", "2", "--prompt", "In")
    assert "M more in adapters" in shown
    assert f"the trained adapter is in {out}" in shown
    before, after = [row["loss"] for row in records(out, "held_out")]
    assert after < before
    assert not (out / "model.safetensors").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
    adapted = peft.PeftModel.from_pretrained(base, out)
    assert adapted.peft_config["default"].base_model_name_or_path == str(place / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    # The measured windows of the held-out part: its first.
    held_out = "".join(TEXT.splitlines(keepends=True)[-3:])
    ids = torch.tensor(tokenizer(held_out)["input_ids"][:64]).reshape(2, 32)
    with torch.no_grad():
        assert float(adapted(input_ids=ids, labels=ids).loss) == pytest.approx(after, abs=0.02)
        with adapted.disable_adapter():
            assert float(adapted(input_ids=ids, labels=ids).loss) == pytest.approx(before, abs=0.02)


@pytest.mark.slow
def test_a_run_of_adapters_goes_on_from_a_small_checkpoint(place: Path, tmp_path: Path) -> None:
    """The checkpoint has no base; a resumed run has the bits of one that nothing stopped."""
    chosen = ("--lora", "4", "--warmup", "9", "--save-every", "2")
    train(place, tmp_path / "whole", *chosen, "--steps", "3")
    train(place, tmp_path / "out", *chosen, "--steps", "2", "--no-save")
    size = sum(file.stat().st_size for file in (tmp_path / "out" / "checkpoint").iterdir())
    assert size < (place / "model" / "model.safetensors").stat().st_size
    train(place, tmp_path / "out", *chosen, "--steps", "3", "--resume")
    losses = [[row["loss"] for row in records(tmp_path / n, "step")] for n in ("whole", "out")]
    assert losses[0] == losses[1]
    whole, out = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("whole", "out"))
    assert whole.keys() == out.keys()
    assert all(torch.equal(whole[name], out[name]) for name in whole)
    other = shutil.copytree(place / "model", tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, other / "model.safetensors")
    given = (other, "--text", place / "text.txt", "--out", tmp_path / "out", *GIVEN.split())
    status, shown = run(run_train, "train", *given, *chosen, "--steps", "4", "--resume")
    assert status == 2
    assert "with changed options: checksum of the model beside the adapters was" in shown


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "tokenizer.json"])
def test_a_file_of_an_adapter_that_cannot_be_written_is_one_line(
    place: Path, tmp_path: Path, name: str
) -> None:
    if name == "tokenizer.json":
        (tmp_path / name).symlink_to("/dev/full")
    else:
        # PEFT replaces a link.
        (tmp_path / name).mkdir()
    given = (place / "model", "--text", place / "text.txt", "--out", tmp_path, *GIVEN.split())
    status, shown = run(run_train, "train", *given, "--lora", "1", "--steps", "1")
    assert status == 1
    (line,) = [line for line in shown.splitlines() if "error:" in line]
    assert f"error: {tmp_path}" in line
    assert "No space left on device" in line or "Is a directory" in line


def test_adapters_that_cannot_be_are_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (place / "model", "--text", place / "text.txt", "--out", tmp_path / "out")
    for more, message in (
        (("--lora", "0"), "--lora 0 must be at least 1"),
        (("--lora", "2", "--tile-linears", "2"), "adapters on whole layers, and --tile-linears 2"),
        (("--lora", "2", "--tile-experts", "2"), "and --tile-experts 2 cuts them; leave one out"),
        (("--lora", "2"), "--lora needs peft, which is not installed: pip install"),
    ):
        with monkeypatch.context() as patch:
            if "needs peft" in message:
                patch.setattr(lora, "is_installed", lambda _name: False)
            status, shown = run(run_train, "train", *paths, *more)
        assert status == 2
        assert message in shown
        assert shown.count("\n") == 1
        assert not (tmp_path / "out").exists()
