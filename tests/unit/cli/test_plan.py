"""`infinity plan` from the command line."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity

transformers = pytest.importorskip("transformers")


from infinity._src.base.sizes import MIB  # noqa: E402
from infinity._src.cli.main import build_parser  # noqa: E402
from infinity._src.cli.plan import read_shape, run_plan  # noqa: E402
from infinity._src.cli.train_setup import check_options  # noqa: E402
from infinity._src.memory.host_overhead import PIECES_BYTES  # noqa: E402
from infinity._src.plan.predict import EFFICIENCY  # noqa: E402
from tests import tiny_llama  # noqa: E402
from tests.unit.cli.commands import run  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]

LLAMA_405B = {
    "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
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
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=12,
            num_attention_heads=8,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        ),
    )


def plan(*arguments: str | Path) -> tuple[int, str]:
    """Plan the job as given, with every table unless --as-given is among the arguments."""
    if "--as-given" not in arguments:
        arguments += ("--as-given", "--all")
    return searched(*arguments)


def searched(*arguments: str | Path) -> tuple[int, str]:
    status, shown = run(run_plan, "plan", *arguments, width=160)
    return status, " ".join(shown.split())  # however it was wrapped


DEEPSEEK = {
    "one H200": ["--gpu", "h200"],
    "eight H100": ["--gpu", "h100", "--gpus", "8"],
    "one card of 24 GB": ["--gpu", "rtx4090"],
}
"""Machines of a table in docs/performance.md."""

MACHINE = [
    "--ram", "8GiB", "--nvme-read", "6.8", "--nvme-write", "5.0", "--tokens-per-step", "4096",
]  # fmt: skip


# -- the command -----------------------------------------------------------------------------------


def test_the_answer_says_what_fits_where_it_rests_how_long_it_takes_and_what_would_help(
    small: Path,
) -> None:
    status, shown = plan(small, *MACHINE, "--ram", "384MiB", "--gpus", "2", "--gpu-mem", "24GiB")
    assert status == 0, shown
    for wanted in (
        "It fits",
        "one GPU",
        "NVMe",
        "gradients",
        "optimizer states",
        "read from NVMe",
        "s/step expected",
        "η",
        "tokens per second",
        "written per day",
        "the drives last",
        "twice the RAM",
        "one more drive",
        "state compact",
        "twice the tokens",
        "one more GPU",
        "Not given",
        "assumed",
        "tbw",
        "--drives: 1, assumed",
        "Policy(ram=...)",
        "more in a fill",
        "sequences of 2,048, checkpointed",
    ):
        assert wanted in shown, wanted
    assert "--nvme-read" not in shown
    assert shown.count("It fits.") == 1


def test_what_gpus_need_is_shown_part_by_part_and_where_updates_could_run(
    small: Path, tmp_path: Path
) -> None:
    arguments = [
        *MACHINE, "--ram", "1GiB", "--gpus", "8", "--gpu", "rtx4090", "--micro-batches", "1",
        "--tokens-per-step", "16384",
    ]  # fmt: skip
    status, shown = plan(small, *arguments, "--json", tmp_path / "plan.json")
    assert status == 0, shown
    for wanted in (
        "gathered units",
        "fresh gradients",
        "inputs of blocks",
        "logits and loss (estimated)",
        "CUDA and libraries (assumed)",
        "copied to GPUs",
        "copied from GPUs",
        "PCIe, alone",
        "MFU",
        "Where updates run",
        "'cpu'",
        "'device'",
        "Updates run on the CPU, concurrently with the next forward",
        "--gpu-mem: 23.6 GiB, of rtx4090 (GeForce RTX 4090, 24 GB)",
        "--pcie-host: 100 GB/s each way, assumed: two GPUs share a link to the CPU",
        "--peers: through the CPU's memory",
    ):
        assert wanted in shown, wanted
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["update_on"]["cpu"] == record["plan"]
    assert record["update_on"]["device"]["job"]["update_on"] == "device"
    assert record["plan"]["gpu"]["bytes"] == sum(record["plan"]["gpu"]["parts"].values())
    assert record["plan"]["mfu"] == pytest.approx(
        record["plan"]["model_flops_per_s_per_gpu"] / 165e12
    )
    _, other = plan(
        small, *arguments, "--update-on", "device", "--tile-linears", "4", "--tile-loss", "8",
        "--pcie-host", "50",
    )  # fmt: skip
    for wanted in (
        "linears in 4 tiles, the loss in 8;",
        "update deferred, on the GPU",
        "states in update",
    ):
        assert wanted in other, wanted
    assert "--pcie-host" not in other
    assert "Where updates run" not in plan(small, *MACHINE, "--gpus", "0")[1]


def test_a_model_too_large_for_its_gpus_says_what_would_do(small: Path) -> None:
    arguments = ["--gpu-mem", "1250MiB", "--tokens-per-step", "32768", "--micro-batches", "2"]
    status, shown = plan(small, *MACHINE, *arguments)
    assert status == 1
    # Of 16,384 tokens: 192 MiB of inputs and 640 MiB of logits; 30.7 MiB of units and gradients,
    # 640 MiB of CUDA. With half of the logits a block's 368 MiB are the larger.
    assert (
        "GPU memory: 1.5 GiB is needed on each, 1.2 GiB is there; it fits with the loss in 2 tiles"
        in shown
    )
    assert (
        "(inf.tile_loss(model, tiles=2)): 1.2 GiB, or 4 micro-batches (8,192 tokens in each, not "
        "16,384): 1.1 GiB" in shown
    )
    assert "One change with which it fits" in shown
    assert plan(small, *MACHINE, *arguments, "--tile-loss", "2")[0] == 0


DRIVE_BOUND = ["--flops", "6", "--micro-batches", "1", "--resident", "params=0",
               "--resident", "optim=0"]  # fmt: skip
"""Forward and backward, and the drives' part of an update, take about as long."""


def test_the_fastest_way_comes_ready_to_paste(small: Path, tmp_path: Path) -> None:
    arguments = [*MACHINE, "--ram", "1GiB", *DRIVE_BOUND, "--json", tmp_path / "plan.json"]
    status, shown = searched(small, *arguments, "--total-tokens", "1000000000")
    assert status == 0, shown
    record = json.loads((tmp_path / "plan.json").read_text())
    now, ways = record["plan"], record["ways"]
    assert ways["1"] == now
    assert ways.get("exact", now)["job"]["state"] == "exact"
    assert now["step_s"] <= min(way["step_s"] for way in ways.values()) * 1.05
    # The policy is one that can be made, with the values of the plan.
    policy = eval(record["policy"].replace("DIR", str(tmp_path)), {"inf": infinity})
    for name in ("state", "update", "generations", "params", "grads", "activations"):
        assert getattr(policy, name) == now["job"][name], name
    assert policy.ram <= now["policy_ram_bytes"] < policy.ram * 1.01
    assert record["policy"] in shown
    written = int(record["total"]["written_bytes"])
    assert f", and {written / 1e12:,.1f} TB written: " in " ".join(shown.split())
    # So is the command.
    words = record["command"].split()
    assert words[:2] == ["infinity", "train"]
    options = build_parser().parse_args(words[1:])
    assert options.state == now["job"]["state"]
    assert options.batch * options.seq * options.accumulate == now["job"]["tokens"]
    job = record["total"]
    assert job["steps"] == -(-(10**9) // now["job"]["tokens"])
    assert job["days"] == pytest.approx(job["steps"] * now["step_s"] / 86400)
    assert f"{job['steps']:,} steps" in shown
    assert {"one more drive", "32 GiB more RAM"} == set(record["more"])
    _, shown = searched(small, *arguments, "--exact")
    assert "rounds" not in shown
    # Values that an option gives are kept.
    _, shown = searched(small, *arguments, "--state", "bf16", "--update", "deferred")
    found = json.loads((tmp_path / "plan.json").read_text())["plan"]["job"]
    assert (found["state"], found["update"]) == ("bf16", "deferred")


def test_a_command_is_one_that_train_takes_and_none_where_nothing_fits(
    small: Path, tmp_path: Path
) -> None:
    arguments = [*MACHINE, "--tokens-per-step", "12288", "--json", tmp_path / "plan.json"]
    status, shown = searched(small, *arguments, "--durable")
    assert status == 0, shown
    command = json.loads((tmp_path / "plan.json").read_text())["command"].split()
    assert "--resident" not in command
    check_options(build_parser().parse_args(command[1:]))
    # A device has whole sequences, also where it has few tokens.
    _, shown = searched(small, *arguments, "--tokens-per-step", "4096", "--gpus", "8")
    assert "in sequences of 512 on 8 GPUs" in shown
    assert "--batch 1 --seq 512" in shown
    # A step that is no whole number of batches is rounded up, and said.
    status, shown = searched(small, *arguments, "--tokens-per-step", "10000", "--resident",
                             "optim=0.25", "--dtype", "float32")  # fmt: skip
    assert status == 0, shown
    assert "Its steps have 10,240 tokens, not 10,000" in shown
    command = json.loads((tmp_path / "plan.json").read_text())["command"].split()
    options = build_parser().parse_args(command[1:])
    assert (options.resident, options.dtype) == (["optim=0.25"], "float32")
    for given in (["--dtype", "float16"], ["--grad-dtype", "float32"]):
        status, shown = searched(small, *arguments, *given)
        assert (status, "infinity train cannot run this way" in shown) == (0, True)
    assert "puts adapters on whole layers" in searched(
        small, *arguments, "--lora", "8", "--tile-linears", "2"
    )[1]
    status, _ = searched(small, *arguments, "--ram", "16MiB")
    record = json.loads((tmp_path / "plan.json").read_text())
    assert (status, record["policy"], record["command"]) == (1, None, None)
    # The answer names the option that is in the way.
    status, shown = searched(small, *arguments, "--micro-batches", "1", "--gpu-mem", "900MiB")
    assert (status, "No way that the options allow fits. The job as given:" in shown) == (1, True)
    assert "without --micro-batches: it fits, " in shown
    _, shown = searched(small, *arguments, "--no-checkpointing", "--gpu-mem", "900MiB")
    assert "without --no-checkpointing: it fits, " in shown
    assert "without --ram" not in shown


def test_only_the_trained_adapters_have_states(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    target = tmp_path / "plan.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, shown = plan(small, *MACHINE, "--as-given", "--lora", "8", "--json", target)
    assert (status, "LoRA of rank 8" in shown) == (0, True)
    record = json.loads(target.read_text())
    # q, k, v, o: 512 to 512; gate, up, down: 512 and 1408.
    assert record["model"]["trainable"] == 12 * 8 * (4 * 1024 + 3 * (512 + 1408))
    assert "--lora 8" in record["command"]
    whole = json.loads(target.read_text())["plan"]
    plan(small, *MACHINE, "--as-given", "--json", target)
    full = json.loads(target.read_text())["plan"]
    # Frozen weights need no gradient of their own: of forward's 4 parts with recomputation, 3.
    compute = whole["terms_s"]["compute"] / full["terms_s"]["compute"]
    assert 0.7 < compute < 0.85


def test_the_vertical_schedule_is_planned_as_told(small: Path, tmp_path: Path) -> None:
    arguments = [
        *MACHINE, "--ram", "1GiB", "--micro-batches", "4", "--resident", "params=0",
        "--json", tmp_path / "plan.json",
    ]  # fmt: skip
    records = []
    for schedule in ("horizontal", "vertical"):
        status, shown = plan(small, *arguments, "--schedule", schedule)
        assert status == 0, shown
        assert ("schedule vertical;" in shown) == (schedule == "vertical")
        assert ("each unit is gathered once in forward" in shown) == (schedule == "vertical")
        records.append(json.loads((tmp_path / "plan.json").read_text()))
        assert records[-1]["plan"]["job"]["schedule"] == schedule
    horizontal, vertical = (record["plan"] for record in records)
    params = horizontal["on_nvme"]["params"]
    assert horizontal["read_bytes"] - vertical["read_bytes"] == pytest.approx(6 * params, rel=0.01)
    names = {change["change"] for change in records[0]["changes"]}
    assert {"vertical schedule", "vertical schedule, activations on the drives"} <= names
    status, shown = plan(small, *MACHINE, "--schedule", "vertical", "--no-checkpointing")
    assert status == 2
    assert "--schedule vertical checkpoints each block" in shown


def test_muon_is_planned_with_its_bytes_flops_and_room(small: Path, tmp_path: Path) -> None:
    arguments = [*MACHINE, "--ram", "1GiB", "--gpus", "2", "--resident", "params=0",
                 "--resident", "optim=0", "--json", tmp_path / "plan.json"]  # fmt: skip
    plans = {}
    for optimizer in ("adamw", "muon"):
        status, shown = plan(small, *arguments, "--optimizer", optimizer)
        assert status == 0, shown
        plans[optimizer] = json.loads((tmp_path / "plan.json").read_text())
        for wanted in (
            "optimizer muon",
            "matrices in update",
            "matrices to their owners",
            "results back",
            "whole matrices",
            "FLOP of Newton-Schulz",
            "first update",
            "Newton-Schulz, alone",
        ):
            assert (wanted in shown) == (optimizer == "muon"), wanted
    record = plans["muon"]
    adamw, muon = (each["plan"] for each in plans.values())
    assert muon["job"]["optimizer"] == "muon"
    numel = 12 * (4 * 512 * 512 + 3 * 512 * 1408)
    assert (muon["matrices"]["numel"], adamw["matrices"]["numel"]) == (numel, 0)
    assert muon["matrices"]["device_bytes"] == muon["gpu"]["parts"]["matrices in update"]
    assert 4 * numel <= muon["on_nvme"]["first"] < 4.2 * numel
    assert 3.5 * numel < adamw["written_bytes"] - muon["written_bytes"] < 4 * numel
    assert record["calls"] == ["inf.Muon(model.parameters())"]
    words = record["command"].split()
    options = build_parser().parse_args(words[words.index("train") :])
    check_options(options)
    assert options.optimizer == "muon"
    # The search takes it, too, and a mistake is one line.
    status, shown = searched(small, *MACHINE, "--optimizer", "muon")
    assert (status, "optimizer" in shown) == (0, True)
    status, shown = plan(small, *MACHINE, "--optimizer", "muon", "--tile-linears", "2")
    assert (status, "--tile-linears 2 cuts them; leave one out" in shown) == (2, True)


def test_changes_that_change_nothing_are_one_line(small: Path) -> None:
    status, shown = plan(small, *MACHINE, "--ram", "64GiB", "--tokens-per-step", "1000000")
    assert status == 0, shown
    assert "No faster and no slower: " in shown
    assert "twice the RAM; " in shown.partition("No faster and no slower: ")[2]


def test_two_generations_and_durable_runs_show_their_room(small: Path, tmp_path: Path) -> None:
    for option, said in ((["--generations", "2"], "two generations"), (["--durable"], "durable")):
        status, shown = plan(
            small, *MACHINE, "--ram", "256MiB", *option, "--json", tmp_path / "plan.json"
        )
        assert status == 0, shown
        assert f"update deferred, {said}" in shown
        assert "the other generation" in shown
        record = json.loads((tmp_path / "plan.json").read_text())["plan"]
        assert record["nvme"]["parts"]["the other generation"] == sum(record["on_nvme"].values())
        assert (record["job"]["generations"], record["job"]["durable"]) == (2, said == "durable")


def test_the_json_holds_the_same_figures(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = plan(
        small / "config.json", *MACHINE, "--ram", "256MiB", "--json", tmp_path / "plan.json"
    )
    assert status == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["schema"] == "infinity.plan/1"
    assert (
        record["model"]["params"]
        == 2 * 4096 * 512 + 12 * (4 * 512 * 512 + 3 * 512 * 1408 + 2 * 512) + 512
    )
    found = record["plan"]
    assert found["fits"]
    assert found["ram"]["bytes"] <= 256 * MIB
    beside = found["ram"]["parts"]["beside the budget"]
    assert found["ram"]["bytes"] == sum(found["ram"]["parts"].values())
    assert found["policy_ram_bytes"] == 256 * MIB - beside
    assert record["outside"]["ram_peak_bytes"] == beside
    assert record["outside"]["ram_passing_bytes"]["fill"] == PIECES_BYTES
    assert found["step_s"] == pytest.approx(found["limit_schedule_s"] / EFFICIENCY)
    assert found["written_bytes_per_day"] == pytest.approx(
        found["written_bytes"] / found["step_s"] * 86400
    )
    assert record["machine"]["sources"]["read"] == "given"
    assert found["efficiency"] == EFFICIENCY
    assert {change["change"] for change in record["changes"]} >= {"twice the RAM", "one more drive"}
    for change in record["changes"]:
        assert change["gain"] == (
            pytest.approx(change["tokens_per_s"] / found["tokens_per_s"])
            if change["fits"]
            else None
        )
    assert plan(small, *MACHINE, "--json", "-", "--as-given") == (0, "")
    assert json.loads(capsys.readouterr().out)["changes"] == []
    options = build_parser().parse_args(["plan", str(small), *MACHINE, "--seq", "0", "--json", "-"])
    assert run_plan(options) == 2
    printed = capsys.readouterr()
    assert (printed.out, "--seq 0" in printed.err) == ("", True)


def test_what_does_not_fit_is_said_with_the_least_that_would(small: Path) -> None:
    quick = [*MACHINE, "--as-given"]
    status, shown = plan(small, *quick, "--ram", "16MiB", "--gpu-mem", "8MiB")
    assert status == 1
    assert "It does not fit" in shown
    assert "GPU memory:" in shown
    assert "RAM:" in shown
    assert (
        "is the least that this job takes, 16 MiB is there; spilled gradients (--grads nvme) or "
        "update backward" in shown
    )
    # Without drives nothing can spill.
    given = ["--tokens-per-step", "4096", "--as-given", "--ram", "16MiB", "--drives", "0"]
    _, none = plan(small, *given)
    assert "16 MiB is there; update backward needs less" in none
    _, spilled = plan(small, *quick, "--ram", "16MiB", "--grads", "nvme")
    assert "--grads nvme" not in spilled
    least = spilled.split("RAM: ")[1].split(" is the least")[0].replace(" ", "")
    assert plan(small, *quick, "--ram", least, "--grads", "nvme")[0] == 0


def test_bandwidths_come_from_a_benchmark(small: Path, tmp_path: Path) -> None:
    settings_ = {
        "block_bytes": None,
        "depth": 32,
        "bandwidths": {"/a": [3e9, 2e9], "/b": [1e9, 1e9]},
        "backend": None,
    }
    (tmp_path / "bench.json").write_text(
        json.dumps({"schema": "infinity.bench.swap/1", "settings": settings_})
    )
    target = tmp_path / "plan.json"
    rest = ["--ram", "300MiB", "--tokens-per-step", "4096", "--as-given", "--json", target]
    assert plan(small, "--bench", tmp_path / "bench.json", *rest)[0] == 0
    machine = json.loads(target.read_text())["machine"]
    assert (machine["drives"], machine["read_bytes_per_s"], machine["write_bytes_per_s"]) == (
        2,
        4e9,
        3e9,
    )
    assert machine["sources"]["read"].startswith("measured")
    assert (
        plan(small, "--bench", tmp_path / "bench.json", *rest, "--drives", "4", "--ram", "1GiB")[0]
        == 0
    )
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
        (["--gpus", "-1"], "--gpus -1 must be at least 0"),
        (["--cores", "0"], "--cores 0 must be at least 1"),
        (["--lora", "0"], "--lora 0 must be at least 1"),
        (["--drives", "0"], "--drives 0 with --nvme-read, --nvme-write, which need a drive"),
        (["--drives", "0", "--tbw", "5", "--nvme-size", "1TB"], "--nvme-size, --tbw, which need"),
        (["--drives", "0", "--durable", "--optim", "nvme"], "--durable, --optim nvme, which need"),
        (["--durable", "--generations", "1"], "--generations 1 with --durable"),
        (["--resident", "params=1TiB"], "--resident params=1.0 TiB is more than the model has"),
        (["--resident", "params=64MiB", "--ram", "32MiB"], "more than the machine has RAM"),
        (["--tile-linears", "5000"], "--tile-linears 5000 is more than the 4096 outputs"),
        (["--tile-loss", "5000"], "--tile-loss 5000 is more than the 4096 words"),
        (["--flops", "2000"], "--flops 2000 is more than the GPU's peak of 989 TFLOP/s"),
        (
            ["--seq", "2048", "--tokens-per-step", "100"],
            "--seq 2048 is more than --tokens-per-step 100: give shorter sequences, or",
        ),
        (["--seq", "2048", "--gpus", "4"], "for each of 4 micro-batches: give shorter sequences"),
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
        (["--gpu", "b300"], "--gpu b300 is not known; use rtx3090"),
        (["--flops-peak", "0"], "--flops-peak 0.0: give a positive number"),
        (["--pcie-host", "none"], "--pcie-host none: give GB/s"),
        (["--peers", "-1"], "--peers -1: give GB/s"),
        (["--update-on", "device", "--gpus", "0"], "the CPU is the only device"),
        (["--tile-linears", "1"], "--tile-linears 1 must be at least 2; leave it out to cut"),
        (["--tile-loss", "1"], "--tile-loss 1 must be at least 2"),
        (["--tile-experts", "0"], "--tile-experts 0 must be at least 1"),
        (["--tile-experts", "2"], "--tile-experts 2: the model has no stack of experts"),
        (["--activations", "cpu", "--no-checkpointing"], "leave --no-checkpointing out"),
        (["--activations", "cpu", "--gpus", "0"], "in CPU memory already"),
        (["--bench", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_a_mistake_is_one_line_that_names_value_and_fix(
    small: Path, change: list[str], message: str
) -> None:
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
    config |= {
        "model_type": "hostile",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n"
    )
    # Its shape is that of the class of transformers that it names, as Kimi-K2's is.
    assert plan(tmp_path, *MACHINE)[0] == 0
    config["architectures"] = ["HostileForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, shown = plan(tmp_path, *MACHINE)
    assert status == 2
    assert "model_type 'hostile' comes with the model, and infinity does not run" in shown
    assert '"architectures": ["DeepseekV3ForCausalLM"]' in shown
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{ no JSON", "it cannot be read (Expecting property name"),
        ("{}", "model_type"),
        ("[1, 2]", "it is a list, not an object"),
        ('{"model_type": "zork"}', "zork"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size"),
        (
            '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}',
            "hidden size (100)",
        ),
    ],
)
def test_a_broken_configuration_is_one_line_that_names_the_file(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    status, shown = plan(tmp_path, *MACHINE)
    assert status == 2, shown
    assert shown.startswith(f"error: {tmp_path / 'config.json'}: ")
    assert message in shown


def test_small_figures_are_shown_with_digits_that_say_something(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**tiny_llama.CONFIG)
    status, shown = plan(write_config(tmp_path, config), *MACHINE)
    assert status == 0, shown
    assert "0.144 M parameters" in shown
    assert "in 1 micro-batch of" in shown
    assert "0.00 s" not in shown


def test_the_drive_that_has_most_of_the_data_decides_how_long_drives_last(
    small: Path, tmp_path: Path
) -> None:
    def rated(*pairs: tuple[float, float]) -> float:
        """Bytes until the first drive has had what it is rated for."""
        bandwidths = {f"/{index}": list(pair) for index, pair in enumerate(pairs)}
        settings_ = {"block_bytes": None, "depth": 32, "bandwidths": bandwidths, "backend": None}
        (tmp_path / "bench.json").write_text(
            json.dumps({"schema": "infinity.bench.swap/1", "settings": settings_})
        )
        plan(
            small, "--bench", tmp_path / "bench.json", "--ram", "256MiB", "--tokens-per-step",
            "4096", "--as-given", "--json", tmp_path / "out",
        )  # fmt: skip
        found = json.loads((tmp_path / "out").read_text())["plan"]
        return float(found["drive_days"] * found["written_bytes_per_day"])

    assert rated((2e9, 2e9), (2e9, 2e9)) == pytest.approx(2 * rated((2e9, 2e9)))
    assert rated((3e9, 3e9), (1e9, 1e9)) == pytest.approx(4 / 3 * rated((2e9, 2e9)))


def test_a_change_that_would_leave_devices_idle_is_not_offered(small: Path) -> None:
    status, shown = plan(small, *MACHINE, "--ram", "256MiB", "--tokens-per-step", "1")
    assert status == 0, shown
    assert "one more GPU" not in shown


def test_a_directory_of_weights_is_not_opened(small: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((small / "config.json").read_text())
    (tmp_path / "model.safetensors").write_text("these are no weights")
    assert read_shape(tmp_path, torch.bfloat16).params > 0


# -- several ranks ---------------------------------------------------------------------------------

RANKS = [
    "--gpus", "4", "--nodes", "2", "--link-gbps", "10", "--micro-batches", "2", "--tokens-per-step",
    "65536",
]  # fmt: skip


def test_several_ranks_are_told_by_stage_and_tier_and_what_they_exchange(
    small: Path, tmp_path: Path
) -> None:
    status, shown = plan(small, *MACHINE, *RANKS, "--json", tmp_path / "plan.json")
    assert status == 0, shown
    for wanted in (
        "on each of 4 GPUs of each of 2 nodes",
        "What each rank holds",
        "stage 1",
        "stage 2",
        "stage 3 (planned)",
        "whole sums of gradients",
        "parameters on the device",
        "parameters gathered, at most",
        "optimizer states",
        "What each rank receives in a step",
        "gather in forward",
        "gather in backward",
        "reduction of gradients",
        "from other nodes",
        "6 M",
        "link between nodes, alone",
        "ZeRO++ with all of it (rounds)",
        "one more node",
    ):
        assert wanted in shown, wanted
    assert "--link-gbps" not in shown  # given
    assert "as given" in shown
    record = json.loads((tmp_path / "plan.json").read_text())
    meet = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 4 "
    assert record["command"].startswith(f"torchrun {meet}-m infinity train ")
    assert set(record["rank_bytes"]) == {"1", "2", "3"}
    one, two, three = (record["rank_bytes"][stage] for stage in "123")
    assert one["together"]["cpu"] - one["whole sums of gradients"]["cpu"] == two["together"]["cpu"]
    assert three["together"]["device"] < two["together"]["device"]
    assert three["together"]["cpu"] * 4 == record["plan"]["ram"]["bytes"]
    exchanged = record["plan"]["exchanged"]
    assert exchanged["volume"] == pytest.approx(6, rel=1e-4)
    assert exchanged["across_bytes"] == sum(
        each["count"] * each["across"] for each in exchanged["each"]
    )
    assert (
        "--link-gbps: 100 Gbit/s each way, assumed"
        in plan(small, *MACHINE, *RANKS[:4], "--tokens-per-step", "65536")[1]
    )
    assert "What each rank holds" not in plan(small, *MACHINE)[1]


def test_stages_and_switches_are_planned_as_told(small: Path, tmp_path: Path) -> None:
    arguments = [*MACHINE, *RANKS, "--as-given", "--all", "--json", tmp_path / "plan.json"]
    status, shown = plan(small, *arguments, "--zero", "1")  # parameters then are on the device
    assert status == 0, shown
    assert "stage 1 (planned)" in shown
    job = json.loads((tmp_path / "plan.json").read_text())["plan"]["job"]
    assert (job["zero"], job["params"], job["accumulate"]) == (1, "device", None)
    status, shown = plan(
        small, *arguments, "--qwz", "--hpz", "cpu", "--qgz", "--error-feedback", "--accumulate-in",
        "local",
    )  # fmt: skip
    assert status == 0, shown
    for wanted in (
        "gather from the node's copy",
        "the node's copy (hpZ)",
        "errors fed back (qgZ)",
        "whole sums of gradients",
    ):
        assert wanted in shown, wanted
    plan_of = json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert plan_of["exchanged"]["volume"] == pytest.approx(
        (1 + 2 / 64) / 2 + (0.5 + 2 / 64) / 2, rel=1e-3
    )
    shown = plan(small, *MACHINE, "--gpus", "0", "--ranks", "3")[1]
    assert "on each of 3 ranks on CPUs" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--zero", "2", "--params", "nvme"], "use params='device', or zero=3"),
        (["--zero", "1", "--accumulate-in", "shard"], "which is zero=2"),
        (["--zero", "1", "--hpz", "cpu"], "hpz='cpu': with zero=1"),
        (["--error-feedback"], "set qgz=True"),
        (["--qwz", "--nodes", "1", "--gpus", "1"], "has one rank: leave them out"),
        (["--link-gbps", "0"], "--link-gbps 0.0: give a positive number"),
        (["--link-gbps", "10", "--nodes", "1"], "add --nodes"),
        (["--ranks", "2"], "--ranks 2 beside --gpus 4"),
    ],
)
def test_mistakes_about_ranks_name_the_fix(small: Path, change: list[str], message: str) -> None:
    status, shown = plan(
        small, *MACHINE, "--gpus", "4", "--nodes", "2", "--tokens-per-step", "65536", *change
    )
    assert status == 2
    assert message in shown


LARGE = {
    "Llama-3-405B": (
        ["--gpu", "h100", "--ram", "256GiB"],
        lambda: transformers.LlamaConfig(**LLAMA_405B, tie_word_embeddings=False),
    ),
    "Qwen3-235B-A22B": (
        ["--gpu", "h100", "--ram", "256GiB"],
        lambda: transformers.Qwen3MoeConfig(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
            num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128,
            moe_intermediate_size=1536, num_experts_per_tok=8, max_position_embeddings=40960,
            tie_word_embeddings=False,
        ),
    ),
    "DeepSeek-V3": (
        ["--gpu", "h200", "--ram", "1500GiB"],
        lambda: transformers.DeepseekV3Config(),
    ),
}  # fmt: skip
"""Machines and models of the table of schedules in docs/performance.md."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("model", LARGE)
def test_schedules_have_the_documented_forecast(model: str, schedule: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {model} \| {schedule} \| (.*) \|$", page, flags=re.MULTILINE)
    (command,) = re.findall(
        r"^infinity plan MODEL (--gpu h100 --ram .*?)\n"
        r"# the vertical schedule: the same, and\n(.*?)```",
        page, flags=re.MULTILINE | re.DOTALL,
    )  # fmt: skip
    machine, config = LARGE[model]
    given = " ".join(command[: 1 if schedule == "horizontal" else 2]).replace("\\", "").split()
    # If an argument is given twice, the last one counts.
    found = [*given, *machine, "--as-given", "--json", tmp_path / "plan.json"]
    status, shown = plan(write_config(tmp_path, config()), *found)
    assert status == 0, shown
    record = json.loads((tmp_path / "plan.json").read_text())
    assert row.split(" | ") == [
        str(record["plan"]["job"]["micro_batches"]),
        *documented_row(record),
    ]


def documented_row(record: dict[str, Any]) -> list[str]:
    """The figures of a plan, as docs/performance.md has them."""
    told, params = record["plan"], record["model"]["params"]
    return [
        f"{told['step_s']:,.0f}",
        f"{told['read_bytes'] / params:.2f}",
        f"{told['written_bytes'] / params:.2f}",
        f"{told['h2d_bytes'] / 1e12:.1f} TB",
        f"{told['mfu']:.1%}",
        told["bound_by"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["one H200", "eight H100"])
@pytest.mark.parametrize("model", LARGE)
def test_micro_batches_of_one_sequence_have_the_documented_forecast(
    model: str, machine: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (options,) = re.findall(rf"^\| {machine} \| `([^`]+)` \|$", page, flags=re.MULTILINE)
    row = rf"^\| {model} \| {machine} \| (\d+) \| (\w+) \| (.*) \|$"
    rows = re.findall(row, page, flags=re.MULTILINE)
    assert [(count, schedule) for count, schedule, _ in rows] == [
        (count, schedule) for count in ("8", "64") for schedule in ("horizontal", "vertical")
    ]
    (command,) = re.findall(
        r"^infinity plan MODEL MACHINE (.*?)\n# the vertical schedule: the same, and\n(.*?)```",
        page, flags=re.MULTILINE | re.DOTALL,
    )  # fmt: skip
    config = write_config(tmp_path, LARGE[model][1]())
    several = machine == "eight H100"
    tiles = ["--tile-experts", "128"] if several and model == "DeepSeek-V3" else []
    for count, schedule, told in rows:
        given = " ".join(command[: 1 if schedule == "horizontal" else 2]).replace("\\", "").split()
        known = {"TOKENS": str(int(count) * 4096 * (8 if several else 1)), "N": count}
        words = [*options.split(), *(known.get(word, word) for word in given), *tiles]
        status, _ = plan(config, *words, "--as-given", "--json", tmp_path / "plan.json")
        record = json.loads((tmp_path / "plan.json").read_text())
        found = ["does not fit", *5 * ["-"]] if status else documented_row(record)
        assert told.split(" | ") == found


@pytest.mark.slow
@pytest.mark.parametrize("machine", DEEPSEEK)
def test_deepseek_v3_has_the_documented_answer(machine: str, tmp_path: Path) -> None:
    """With nothing but the options of the table, and the change that it names."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {machine} \| `(.+)` \| it fits(.*) \|$", page, flags=re.MULTILINE)
    options, change = row
    model = write_config(tmp_path, transformers.DeepseekV3Config())
    given = [model, *DEEPSEEK[machine], *options.split(), "--tokens-per-step", "262144"]
    given += ["--seq", "4096", "--drives", "4", "--nvme-read", "27", "--nvme-write", "11"]
    given += ["--nvme-size", "16TB", "--as-given"]
    status, shown = plan(*given)
    assert "36.63 B compute for a token" in shown
    if change:
        (experts,) = re.findall(r"^ with `inf.tile_experts\(model, experts=(\d+)\)`$", change)
        assert status == 1, shown
        assert f"(inf.tile_experts(model, experts={experts}))" in shown
        status, shown = plan(*given, "--tile-experts", experts)
    assert status == 0, shown
    assert "It fits." in shown


KIMI_K2 = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 1,
    "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_kimi_k2_has_the_documented_forecast(optimizer: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{optimizer}` \| (.* TB .*) \|$", page, flags=re.MULTILINE)
    (options,) = re.findall(
        r"^infinity plan MODEL (.*?) --optimizer muon\n", page, flags=re.MULTILINE | re.DOTALL
    )
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    target = tmp_path / "plan.json"
    given = [*options.replace("\\\n", "").split(), "--optimizer", optimizer, "--json", target]
    status, shown = searched(tmp_path, *given)
    assert status == 0, shown
    record = json.loads(target.read_text())
    told, params = record["plan"], record["model"]["params"]
    assert params == 1_026_408_209_408
    assert (told["job"]["update"], told["job"]["expert_tile"]) == ("backward", 24)
    assert row.split(" | ") == [
        f"{(told['at_rest']['params'] + told['at_rest']['optim']) / 1e12:.1f} TB",
        f"{told['read_bytes'] / params:.2f}",
        f"{told['written_bytes'] / params:.2f}",
        f"{told['terms_s']['drives']:,.0f} s",
        f"{told['terms_s'].get('Newton-Schulz', 0):,.0f} s",
        f"{told['step_s']:,.0f}",
    ]


# -- from DeepSpeed --------------------------------------------------------------------------------

DS_CONFIG = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "max_in_cpu": 1000},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
    },
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}


@pytest.fixture
def ds_config(tmp_path: Path) -> Path:
    """A DeepSpeed configuration as Hugging Face's trainer has it."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DS_CONFIG))
    return path


def test_a_deepspeed_configuration_is_shown_and_planned(small: Path, ds_config: Path) -> None:
    record = ds_config.with_name("plan.json")
    status, shown = plan(
        small, *MACHINE, "--ds-config", ds_config, "--as-given", "--json", record
    )
    assert status == 0, shown
    for wanted in (
        "ds.json, as the engine reads it",
        "zero=3",
        "params='nvme'",
        "resident={'params': 2000}",
        "communication always runs beside computation",
        "as the trainer fills it",
        "inf.AdamW",
        "micro-batches │ 2 ",
        "infinity train has no option for on_nonfinite='skip'.",
    ):
        assert wanted in shown, wanted
    found = json.loads(record.read_text())
    job = found["plan"]["job"]
    assert (job["params"], job["optim"], job["micro_batches"]) == ("nvme", "cpu", 2)
    assert job["resident"] == {"params": 2000}
    keys = {key["key"]: (key["fate"], key["became"]) for key in found["deepspeed"]["keys"]}
    assert keys["zero_optimization.stage"] == ("mapped", "zero=3")
    assert keys["zero_optimization.overlap_comm"][0] == "no meaning"
    assert keys["bf16.enabled"] == ("mapped", "dtype='bfloat16'")
    assert found["deepspeed"]["policy"]["nvme"] == ["/local_nvme"]
    assert any("overlap_comm=true" in note for note in found["deepspeed"]["notes"])


def test_changes_of_a_deepspeed_configuration_are_those_that_its_policy_takes(
    small: Path, ds_config: Path
) -> None:
    status, shown = plan(small, *MACHINE, "--ds-config", ds_config)
    assert status == 0, shown
    # A step that is not finite is skipped: no update may be taken before it is known.
    assert "update backward, two generations" in shown
    assert "no clipping by norm" not in shown


def test_muon_of_a_deepspeed_configuration_is_planned(small: Path, ds_config: Path) -> None:
    muon = {"type": "Muon", "params": {"lr": 1e-3, "ns_method": "standard"}}
    config = {**DS_CONFIG, "optimizer": muon, "gradient_clipping": 0.0}
    ds_config.write_text(json.dumps(config))
    record = ds_config.with_name("plan.json")
    arguments = [small, *MACHINE, "--ds-config", ds_config, "--json", record]
    for given, wanted in (([], "muon"), (["--optimizer", "adamw"], "adamw")):
        status, shown = plan(*arguments, *given)
        assert status == 0, shown
        assert json.loads(record.read_text())["plan"]["job"]["optimizer"] == wanted


def test_options_replace_a_deepspeed_configuration(small: Path, ds_config: Path) -> None:
    record = ds_config.with_name("plan.json")
    given = ["--params", "cpu", "--optim", "nvme", "--state", "compact", "--micro-batches", "1"]
    arguments = [small, *MACHINE, "--ds-config", ds_config, "--as-given", "--json", record]
    assert plan(*arguments, *given)[0] == 0
    job = json.loads(record.read_text())["plan"]["job"]
    assert (job["params"], job["optim"], job["state"]) == ("cpu", "nvme", "compact")
    assert (job["micro_batches"], job["resident"]) == (1, None)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage=0 shards"),
        ({"train_batch_size": 3}, "train_batch_size must be"),
        ({"amp": {"enabled": True}}, "amp={'enabled': True} is refused"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}}, "a trainer"),
    ],
)
def test_a_mistake_in_a_deepspeed_configuration_is_one_line(
    small: Path, ds_config: Path, change: dict[str, Any], wanted: str
) -> None:
    ds_config.write_text(json.dumps({**DS_CONFIG, **change}))
    status, shown = plan(small, *MACHINE, "--ds-config", ds_config)
    assert status == 2
    assert wanted in shown
    assert "ds.json: " in shown
    assert plan(small, *MACHINE, "--ds-config", ds_config.with_name("none.json"))[0] == 2
