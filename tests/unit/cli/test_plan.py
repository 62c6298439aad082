"""`infinity plan` from the command line, and the predictions behind it."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

import infinity as inf  # noqa: E402
from infinity.cli.main import build_parser  # noqa: E402
from infinity.cli.plan import read_shape, run_plan  # noqa: E402
from infinity.planning.changes import fewest_micro_batches, one_change  # noqa: E402
from infinity.planning.job import Job  # noqa: E402
from infinity.planning.machine import Machine, describe_machine  # noqa: E402
from infinity.planning.predict import EFFICIENCY, predict  # noqa: E402
from infinity.planning.shape import FlatShape, ModelShape, UnitShape, shape_of  # noqa: E402
from infinity.sizes import GIB, MIB, parse_size  # noqa: E402
from tests import models  # noqa: E402

LLAMA_405B = {
    "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip


def write_config(directory: Path, config: Any) -> Path:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a Llama of some million parameters; no weights."""
    return write_config(
        tmp_path_factory.mktemp("small"),
        transformers.LlamaConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8,
            max_position_embeddings=2048, tie_word_embeddings=False,
        ),
    )  # fmt: skip


def plan(*arguments: str | Path) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=160)
    options = build_parser().parse_args(["plan", *map(str, arguments)])
    status = run_plan(options, console)
    assert isinstance(console.file, io.StringIO)
    return status, " ".join(console.file.getvalue().split())  # however it was wrapped


MACHINE = ["--ram", "8GiB", "--nvme-read", "6.8", "--nvme-write", "5.0", "--tokens-per-step", "4096"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_answer_says_what_fits_where_it_rests_how_long_it_takes_and_what_would_help(small: Path) -> None:
    status, shown = plan(small, *MACHINE, "--ram", "256MiB", "--gpus", "2", "--gpu-mem", "24GiB")
    assert status == 0, shown
    for wanted in (
        "It fits", "one GPU", "NVMe", "gradients", "optimizer states", "read from NVMe", "s/step expected", "η",
        "tokens per second", "written per day", "the drives last", "twice the RAM", "one more drive", "state compact",
        "twice the tokens", "one more GPU", "Not given", "assumed", "tbw", "drives assumed (1)", "sequences of 2,048, checkpointed",
    ):  # fmt: skip
        assert wanted in shown, wanted
    assert "read assumed" not in shown


def test_the_json_holds_the_same_figures(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = plan(small / "config.json", *MACHINE, "--ram", "256MiB", "--json", tmp_path / "plan.json")
    assert status == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["schema"] == "infinity.plan/1"
    assert record["model"]["params"] == 2 * 4096 * 512 + 12 * (4 * 512 * 512 + 3 * 512 * 1408 + 2 * 512) + 512
    found = record["plan"]
    assert found["fits"]
    assert found["ram"]["bytes"] <= 256 * MIB
    assert found["step_s"] == pytest.approx(found["limit_schedule_s"] / EFFICIENCY)
    assert found["written_bytes_per_day"] == pytest.approx(found["written_bytes"] / found["step_s"] * 86400)
    assert record["machine"]["sources"]["read"] == "given"
    assert found["efficiency"] == EFFICIENCY
    assert {change["change"] for change in record["changes"]} >= {"twice the RAM", "one more drive"}
    for change in record["changes"]:
        assert change["gain"] == (pytest.approx(change["tokens_per_s"] / found["tokens_per_s"]) if change["fits"] else None)
    assert plan(small, *MACHINE, "--json", "-", "--no-changes") == (0, "")
    assert json.loads(capsys.readouterr().out)["changes"] == []
    options = build_parser().parse_args(["plan", str(small), *MACHINE, "--seq", "0", "--json", "-"])
    assert run_plan(options) == 2
    printed = capsys.readouterr()
    assert (printed.out, "--seq 0" in printed.err) == ("", True)


def test_what_does_not_fit_is_said_with_the_least_that_would(small: Path) -> None:
    status, shown = plan(small, *MACHINE, "--ram", "16MiB", "--gpu-mem", "8MiB")
    assert status == 1
    assert "It does not fit" in shown
    assert "GPU memory:" in shown
    assert "RAM:" in shown
    assert "is the least that works, 16 MiB is there; spilled gradients (--grads nvme) or update backward" in shown
    _, spilled = plan(small, *MACHINE, "--ram", "16MiB", "--grads", "nvme")
    assert "--grads nvme" not in spilled
    least = spilled.split("RAM: ")[1].split(" is the least")[0].replace(" ", "")
    assert plan(small, *MACHINE, "--ram", least, "--grads", "nvme")[0] == 0


def test_bandwidths_come_from_a_benchmark(small: Path, tmp_path: Path) -> None:
    settings_ = {"block_bytes": None, "depth": 32, "bandwidths": {"/a": [3e9, 2e9], "/b": [1e9, 1e9]}, "backend": None}
    (tmp_path / "bench.json").write_text(json.dumps({"schema": "infinity.bench.swap/1", "settings": settings_}))
    target = tmp_path / "plan.json"
    rest = ["--ram", "256MiB", "--tokens-per-step", "4096", "--json", target]
    assert plan(small, "--bench", tmp_path / "bench.json", *rest)[0] == 0
    machine = json.loads(target.read_text())["machine"]
    assert (machine["drives"], machine["read_bytes_per_s"], machine["write_bytes_per_s"]) == (2, 4e9, 3e9)
    assert machine["sources"]["read"].startswith("measured")
    assert plan(small, "--bench", tmp_path / "bench.json", *rest, "--drives", "4", "--ram", "1GiB")[0] == 0
    machine = json.loads(target.read_text())["machine"]
    assert machine["read_bytes_per_s"] == 8e9
    assert "scaled from 2 drives to 4" in machine["sources"]["read"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--tokens-per-step", "0"], "--tokens-per-step 0 must be at least 1"),
        (["--tokens-per-step", "1", "--gpus", "2"], "1 tokens per step leave nothing"),
        (["--nvme-read", "0"], "--nvme-read 0"),
        (["--nvme-read", "fast"], "--nvme-read fast"),
        (["--ram", "lots"], "--ram lots"),
        (["--gpus", "-1"], "--gpus -1"),
        (["--drives", "0"], "--drives 0 beside --nvme-read"),
        (["--seq", "2048", "--tokens-per-step", "100"], "--seq 2048 is more than --tokens-per-step 100"),
        (["--resident", "params=2.0"], "between 0.0 and 1.0"),
        (["--resident", "params"], "--resident params: give each kind once"),
        (["--resident", "optim=0.5", "--optim", "cpu"], "rests in memory anyway"),
        (["--seq", "999999"], "--seq 999999"),
        (["--micro-batches", "0"], "--micro-batches 0 must be at least 1"),
        (["--seq", "0"], "--seq 0 must be at least 1"),
        (["--ram", "0"], "--ram 0: give a size above 0"),
        (["--gpu-mem", "0GiB"], "--gpu-mem 0GiB"),
        (["--flops", "nan"], "--flops nan"),
        (["--tbw", "-1"], "--tbw -1"),
        (["--pcie", "quick"], "--pcie quick: give GB/s as a number"),
        (["--activations", "cpu", "--no-checkpointing"], "leave --no-checkpointing out"),
        (["--activations", "cpu", "--gpus", "0"], "in CPU memory already"),
        (["--bench", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_a_mistake_is_one_line_that_names_value_and_fix(small: Path, change: list[str], message: str) -> None:
    status, shown = plan(small, *MACHINE, *change)
    assert status == 2, shown
    assert shown.startswith("error:")
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


def test_a_path_that_is_no_model_says_so(tmp_path: Path) -> None:
    assert "config.json" in plan(tmp_path, *MACHINE)[1]
    (tmp_path / "config.json").write_text("{}")
    status, shown = plan(tmp_path, *MACHINE)
    assert status == 2
    assert str(tmp_path) in shown


def test_code_that_comes_with_a_model_is_not_run(small: Path, tmp_path: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    config |= {"model_type": "hostile", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    assert plan(tmp_path, *MACHINE)[0] == 2
    assert not (tmp_path / "ran").exists()


def test_a_model_of_405_billion_parameters_takes_seconds(tmp_path: Path) -> None:
    write_config(tmp_path, transformers.LlamaConfig(**LLAMA_405B, tie_word_embeddings=False))
    start_s = time.process_time()
    status, shown = plan(
        tmp_path, "--gpus", "8", "--ram", "1TiB", "--nvme-read", "27", "--nvme-write", "20", "--drives", "4",
        "--tokens-per-step", "1000000",
    )  # fmt: skip
    assert status == 0, shown
    assert "405.85 B parameters" in shown
    assert time.process_time() - start_s < 60  # about 8 s on one core of a quiet machine


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{ no JSON", "not a valid JSON file"),
        ("{}", "model_type"),
        ("[1, 2]", "model_type"),
        ('{"model_type": "zork"}', "zork"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}', "hidden size (100)"),
    ],
)
def test_a_broken_configuration_is_one_line_that_names_the_file(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    status, shown = plan(tmp_path, *MACHINE)
    assert status == 2, shown
    assert shown.startswith(f"error: {tmp_path / 'config.json'}: ")
    assert message in shown


def test_small_figures_are_shown_with_digits_that_say_something(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    status, shown = plan(write_config(tmp_path, config), *MACHINE)
    assert status == 0, shown
    assert "0.144 M parameters" in shown
    assert "in 1 micro-batch of" in shown
    assert "0.00 s" not in shown


# -- what it is planned from -------------------------------------------------------------------------------------------


def test_experts_that_are_not_routed_to_cost_no_operations_but_all_are_moved() -> None:
    with torch.device("meta"):
        dense, sparse = shape_of(models.llama()), shape_of(models.mixtral())
    assert dense.active_params == dense.params - dense.vocabulary * dense.width  # the input embedding is looked up
    assert sparse.active_params < sparse.params - sparse.vocabulary * sparse.width
    assert sum(flat.numel for flat in sparse.flats) == sparse.params


def test_tied_words_count_once_and_compute() -> None:
    with torch.device("meta"):
        shape = shape_of(models.gpt2())
    assert shape.active_params >= shape.vocabulary * shape.width
    assert shape.params == sum(p.numel() for p in models.make(models.gpt2).parameters())


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("ram", ["min", "150MiB", "250MiB", "1GiB"])
def test_the_plan_is_the_engine_s_own(tmp_path: Path, state: str, ram: str) -> None:
    torch.manual_seed(0)
    model = models.llama(layers=12, hidden=512).bfloat16()
    shape = shape_of(model)
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram=ram, state=state))
    inf.AdamW(model.parameters())
    stats = inf.handle(model).stats()
    inf.handle(model).close()
    size = stats.ram_min_bytes if ram == "min" else parse_size(ram)
    machine = describe_machine(gpus=0, ram_bytes=size, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    found = predict(shape, machine, Job(tokens=64, sequence=64, state=state))
    assert found.ram.bytes == stats.ram_bytes
    assert found.nvme.bytes == pytest.approx(stats.nvme_bytes, rel=0.01)  # blocks are rounded up to 4096 bytes on the drive
    assert found.fits


@pytest.mark.parametrize("values", [
    {"resident": {"params": 0.5, "optim": 0.25}, "ram": 300 * MIB},
    {"grad_dtype": torch.float32, "ram": 300 * MIB},
    {"grads": "nvme", "ram": 90 * MIB},
    {"grads": "nvme", "grad_dtype": torch.float32, "update": "delayed", "ram": 220 * MIB},
], ids=str)  # fmt: skip
def test_it_is_so_with_every_part_of_the_policy(tmp_path: Path, values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.llama(layers=12, hidden=512).bfloat16()
    shape = shape_of(model)
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, **values))
    inf.AdamW(model.parameters())
    stats = inf.handle(model).stats()
    inf.handle(model).close()
    job = Job(tokens=64, sequence=64, **{name: value for name, value in values.items() if name != "ram"})
    found = predict(shape, machine_of(values["ram"], gpus=0), job)
    assert found.ram.bytes == stats.ram_bytes
    assert bool(stats.spilled_bytes) == ("grads" in values)
    assert found.on_nvme.grads == pytest.approx(stats.spilled_bytes, rel=0.01)
    assert found.on_nvme.states == pytest.approx(stats.nvme_bytes, rel=0.01)


def shape_1b(dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """Sixteen units of 64M elements, and words."""
    units = tuple(UnitShape(str(index), (FlatShape((1 << 26,), dtype, True),)) for index in range(16))
    return ModelShape("1B", units, 1 << 30, 16, 2048, 2048, 8192, 32000, 4096, dtype.itemsize)


def terms(job: Job, **machine: Any) -> dict[str, float]:
    given_ = {"gpus": 1, "ram_bytes": 64 * GIB, "pcie_per_gpu": 1e10, "dram_bytes_per_s": 1e11} | machine
    return predict(shape_1b(), describe_machine(**given_), job).terms_s


JOB = Job(tokens=8 * 4096, sequence=4096, micro_batches=4)
BOUNDARY = 2 * 16 * 2048 * 8192  # of a micro-batch


def test_activations_on_drives_need_their_room() -> None:
    job = dataclasses.replace(JOB, activations="nvme")
    machine = dataclasses.replace(machine_of(64 * GIB), nvme_bytes=12.0 * (1 << 30) + BOUNDARY - 1)
    found = predict(shape_1b(), machine, job)
    assert found.nvme.parts["activations"] == BOUNDARY
    kept = dataclasses.replace(job, resident={"params": 0.0, "optim": 0.0})  # all of the states on the drive
    assert not predict(shape_1b(), machine, kept).fits
    assert predict(shape_1b(), dataclasses.replace(machine, nvme_bytes=machine.nvme_bytes + 1), kept).fits


def test_activations_that_leave_the_device_go_through_the_cpu_s_memory() -> None:
    here = terms(JOB)
    for where in ("cpu", "nvme"):
        there = terms(dataclasses.replace(JOB, activations=where))
        drives = 2 * 4 * BOUNDARY if where == "nvme" else 0
        assert there["CPU memory"] - here["CPU memory"] == pytest.approx((2 * 4 * BOUNDARY + drives) / 1e11)
        assert there["PCIe"] - here["PCIe"] == pytest.approx(4 * BOUNDARY / 1e10)


def test_parameters_that_stay_on_the_device_go_there_once_when_updated() -> None:
    params = 2 * (1 << 30)
    stay = terms(dataclasses.replace(JOB, params="device", optim="cpu"), gpu_mem_bytes=80 * GIB)
    assert stay["PCIe"] == pytest.approx(4 * params / 1e10)  # the gradients of four micro-batches come back
    assert terms(dataclasses.replace(JOB, optim="cpu"))["PCIe"] == pytest.approx(2 * 4 * params / 1e10)


def test_activations_are_as_wide_as_what_computes() -> None:
    half, whole = shape_1b(), shape_1b(torch.float32)
    assert whole.boundary_bytes_per_token == 2 * half.boundary_bytes_per_token
    with torch.device("meta"):
        assert (shape_of(models.llama().bfloat16()).itemsize, shape_of(models.llama()).itemsize) == (2, 4)


def test_an_encoder_and_a_decoder_both_have_layers() -> None:
    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=3, num_decoder_layers=5, num_heads=4, vocab_size=256)
    with torch.device("meta"):
        assert shape_of(transformers.T5ForConditionalGeneration(config)).layers == 8


def test_the_drive_that_has_most_of_the_data_decides_how_long_drives_last(small: Path, tmp_path: Path) -> None:
    def rated(*pairs: tuple[float, float]) -> float:
        """Bytes until the first drive has had what it is rated for."""
        bandwidths = {f"/{index}": list(pair) for index, pair in enumerate(pairs)}
        settings_ = {"block_bytes": None, "depth": 32, "bandwidths": bandwidths, "backend": None}
        (tmp_path / "bench.json").write_text(json.dumps({"schema": "infinity.bench.swap/1", "settings": settings_}))
        plan(small, "--bench", tmp_path / "bench.json", "--ram", "256MiB", "--tokens-per-step", "4096", "--json", tmp_path / "out")
        found = json.loads((tmp_path / "out").read_text())["plan"]
        return float(found["drive_days"] * found["written_bytes_per_day"])

    assert rated((2e9, 2e9), (2e9, 2e9)) == pytest.approx(2 * rated((2e9, 2e9)))
    assert rated((3e9, 3e9), (1e9, 1e9)) == pytest.approx(4 / 3 * rated((2e9, 2e9)))


# -- properties --------------------------------------------------------------------------------------------------------

FLATS = st.builds(
    lambda numels, trainable: FlatShape(tuple(numels), torch.bfloat16, trainable),
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=3),
    st.booleans(),
)
SHAPES = st.lists(FLATS, min_size=1, max_size=8).map(
    lambda flats: ModelShape(
        "drawn", tuple(UnitShape(str(index), (flat,)) for index, flat in enumerate(flats)),
        sum(flat.numel for flat in flats), 4, 64, 64, 128, 1000, 512,
    )
)  # fmt: skip
JOBS = st.builds(
    Job,
    tokens=st.integers(64, 100_000),
    sequence=st.just(64),
    micro_batches=st.integers(1, 8),
    state=st.sampled_from(["exact", "bf16", "compact"]),
    update=st.sampled_from(["deferred", "backward", "delayed"]),
    params=st.sampled_from(["cpu", "nvme"]),
    optim=st.sampled_from(["cpu", "nvme"]),
    grads=st.sampled_from(["cpu", "nvme"]),
    activations=st.sampled_from(["device", "cpu", "nvme"]),
)


def machine_of(ram_bytes: float, gpus: int = 1) -> Machine:
    return describe_machine(
        gpus=gpus, gpu_mem_bytes=8 * GIB, ram_bytes=ram_bytes, read_bytes_per_s=2e9, write_bytes_per_s=1e9
    )


@settings(max_examples=60, deadline=None)
@given(SHAPES, JOBS, st.integers(1 << 20, 400_000_000), st.integers(0, 2))
def test_a_plan_that_fits_is_within_every_budget_and_deterministic(
    shape: ModelShape, job: Job, ram_bytes: int, gpus: int
) -> None:
    found = predict(shape, machine_of(ram_bytes, gpus), job)
    assert found == predict(shape, machine_of(ram_bytes, gpus), job)
    if found.fits:
        assert found.ram.bytes <= ram_bytes
        assert found.gpu.bytes <= 8 * GIB
    elif not found.ram.fits:  # the least that works does, and less does not
        assert predict(shape, machine_of(found.ram.bytes, gpus), job).ram.fits
        assert not predict(shape, machine_of(found.ram.bytes - gpus - 1, gpus), job).ram.fits
    if not found.fits:
        assert all(reason.partition(":")[0] in ("GPU memory", "RAM", "NVMe") or "CPU" in reason for reason in found.why_not)
    assert found.step_s > 0
    assert found.limits.floor_s <= found.limits.schedule_s * (1 + 1e-9)
    assert found.on_nvme.total <= found.at_rest.total + 1


@settings(max_examples=60, deadline=None)
@given(SHAPES, JOBS, st.integers(1 << 20, 400_000_000), st.integers(0, 400_000_000))
def test_more_ram_never_predicts_slower_nor_fits_less(shape: ModelShape, job: Job, ram_bytes: int, more: int) -> None:
    few, many = predict(shape, machine_of(ram_bytes), job), predict(shape, machine_of(ram_bytes + more), job)
    if few.fits:
        assert many.fits
        assert many.step_s <= few.step_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(SHAPES, JOBS)
def test_another_drive_never_predicts_slower(shape: ModelShape, job: Job) -> None:
    machine = machine_of(1e9)
    assert predict(shape, machine.with_drives(2), job).step_s <= predict(shape, machine, job).step_s * (1 + 1e-9)


def test_changes_are_sorted_and_each_changes_one_thing() -> None:
    shape = ModelShape("m", (UnitShape("u", (FlatShape((50_000_000,), torch.bfloat16, True),)),), 50_000_000, 4, 64, 64, 128, 1000, 512)
    now = predict(shape, machine_of(400 * MIB), Job(tokens=4096, sequence=512))
    changes = one_change(shape, now)
    gains = [change.prediction.tokens_per_s for change in changes if change.prediction.fits]
    assert gains == sorted(gains, reverse=True)
    by_name = {change.name: change.prediction for change in changes}
    assert by_name["one more drive"].machine.drives == 2
    assert by_name["one more drive"].step_s < now.step_s
    assert by_name["state compact (rounds)"].moved.total.written < now.moved.total.written / 2
    more = by_name["twice the RAM"]
    assert dataclasses.replace(more.machine, ram_bytes=now.machine.ram_bytes) == now.machine
    assert more.job == now.job


def test_a_change_that_would_leave_devices_idle_is_not_offered(small: Path) -> None:
    status, shown = plan(small, *MACHINE, "--ram", "256MiB", "--tokens-per-step", "1")
    assert status == 0, shown
    assert "one more GPU" not in shown


def test_the_fewest_micro_batches_are_those_whose_activations_fit() -> None:
    flat = FlatShape((1_000_000,), torch.bfloat16, True)
    shape = ModelShape("m", (UnitShape("u", (flat,)),), 1_000_000, 100, 1024, 1024, 4096, 1000, 4096)
    machine = dataclasses.replace(machine_of(1e9), gpu_mem_bytes=4 * GIB)
    job = Job(tokens=1 << 16, sequence=512)
    chosen = fewest_micro_batches(shape, machine, job)
    assert predict(shape, machine, chosen).gpu.fits
    fewer = dataclasses.replace(chosen, micro_batches=chosen.micro_batches // 2)
    assert chosen.micro_batches > 1
    assert not predict(shape, machine, fewer).gpu.fits


def test_a_directory_of_weights_is_not_opened(small: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((small / "config.json").read_text())
    (tmp_path / "model.safetensors").write_text("these are no weights")
    assert read_shape(tmp_path, torch.bfloat16).params > 0
