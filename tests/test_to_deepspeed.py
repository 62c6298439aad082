"""`infinity checkpoint export --to deepspeed-universal`: all states are kept, and DeepSpeed itself
continues with them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.cli.main import main
from tests import models
from tests.data.deepspeed import go_on, make
from tests.harness import assert_same, states_of, train
from tests.test_interchange import opened

CPU = {"params": "cpu", "optim": "cpu"}
DEEPSPEED = Path(__file__).parents[1] / "bench" / ".venv-deepspeed"
"""The environment that bench/compare_deepspeed.py makes."""
RATES = (0.0, 0.0, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
"""The rates of the cases' WarmupLR."""


def export(source: Path, out: Path, *options: str) -> int:
    """Run the command."""
    return main(
        ["checkpoint", "export", "--to", "deepspeed-universal", *options, str(source), str(out)]
    )


class Run:
    """A run of `Net` here, with the groups of DeepSpeed's cases. decay: of matrices; of all, where
    stage 3 makes one group of them.
    """

    def __init__(self, case: make.Case, **values: Any) -> None:
        self.case = case
        torch.manual_seed(0)
        self.model: nn.Module = make.Net().to(make.dtype_of(case))
        inf.offload(self.model, inf.Policy(**(values or CPU)))
        self.opt = inf.AdamW(make.groups_of(self.model), betas=(0.8, 0.95))
        if case.stage == 3:
            for group in self.opt.param_groups:
                group["weight_decay"] = 0.1

    def step(self, index: int) -> float:
        """The loss of a step of all ranks' batches."""
        for group in self.opt.param_groups:
            group["lr"] = RATES[index]
        ranks = range(self.case.ranks)
        loss = sum(self.model(make.tokens(index, rank)) for rank in ranks) / len(ranks)
        loss.backward()
        trained = [param for param in self.model.parameters() if param.requires_grad]
        nn.utils.clip_grad_norm_(trained, 1.0)
        self.opt.step()
        self.opt.zero_grad()
        return float(loss.item())

    def saved(self, place: Path) -> Path:
        """Save after SAVED_AT steps, the scheduler stepped."""
        for index in range(make.SAVED_AT):
            self.step(index)
        for group in self.opt.param_groups:
            group["lr"] = RATES[make.SAVED_AT]
        inf.save(self.model, self.opt, place / "saved").wait()
        return place / "saved"


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
def test_all_states_come_back(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = make.CASES["zero2_cpu"]
    run = Run(case, **CPU, state=state)
    source = run.saved(tmp_path)
    expected, groups = states_of(run.model), run.opt.param_groups
    assert export(source, tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "8 parameters in" in shown
    assert "stage 3 loads the first group's values for all" in shown
    other = Run(case, **CPU)
    with torch.no_grad():
        other.model.get_buffer("scale").zero_()
    for group in other.opt.param_groups:
        group.update(lr=1.0, betas=(0.1, 0.1), weight_decay=7.0)
    loaded = inf.load_deepspeed(other.model, tmp_path / "out", opt=other.opt)
    assert loaded == ((), ())
    assert (loaded.step, loaded.lr_scheduler["last_batch_iteration"]) == (3, 2)
    assert_same(expected, states_of(other.model))
    assert other.model.get_buffer("scale") == 2
    frozen = "frozen.weight"
    assert torch.equal(other.model.state_dict()[frozen], run.model.state_dict()[frozen])
    for group, wanted in zip(other.opt.param_groups, groups, strict=True):
        same = ("lr", "betas", "eps", "weight_decay")
        assert {key: group[key] for key in same} == {key: wanted[key] for key in same}
    for each in (run, other):
        inf.handle(each.model).close()


@pytest.mark.parametrize("groups", [1, 2])
def test_stage_3_gets_the_step_as_its_sub_groups_can_count_it(groups: int, tmp_path: Path) -> None:
    """A tensor, as torch's optimizers want it; a number where several would add to one tensor."""
    model = inf.offload(make.Net().bfloat16(), inf.Policy(**CPU))
    held = make.groups_of(model)
    if groups == 1:
        held = [{"params": [param for group in held for param in group["params"]]}]
    optimizer = inf.AdamW(held)
    for param in (param for group in held for param in group["params"]):
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    optimizer.step()
    inf.save(model, optimizer, tmp_path / "saved").wait()
    inf.handle(model).close()
    assert export(tmp_path / "saved", tmp_path / "out") == 0
    place = next(tmp_path.glob("out/*/zero/optimizer_state.pt"))
    state = torch.load(place, weights_only=True)["optimizer_state_dict"]["state"]
    assert [float(each["step"]) for each in state.values()] == [1.0] * groups
    assert isinstance(state[0]["step"], torch.Tensor) == (groups == 1)
    loaded = torch.load(next(place.parent.glob("*/step.pt")), weights_only=True)
    assert isinstance(loaded, torch.Tensor)


def test_a_weight_in_tiles_is_one_parameter_there(tmp_path: Path) -> None:
    def tiled() -> nn.Module:
        return inf.tile_linears(models.llama(), tiles=(2, 2))

    with opened(tiled, tmp_path) as (model, optimizer):
        train(model, optimizer)
        inf.save(model, optimizer, tmp_path / "saved").wait()
        inf.export_dcp(model, optimizer, tmp_path / "dcp")
    assert export(tmp_path / "saved", tmp_path / "out") == 0
    with opened(models.llama, tmp_path, seed=1) as (model, optimizer):
        inf.load_dcp(model, optimizer, tmp_path / "dcp")
        expected = states_of(model)
    with opened(models.llama, tmp_path, seed=2) as (model, optimizer):
        inf.load_deepspeed(model, tmp_path / "out", opt=optimizer)
        assert_same(expected, states_of(model))


def test_what_deepspeed_has_no_place_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(source: Path, *options: str) -> str:
        assert export(source, tmp_path / "out", *options) == 2
        assert not list(tmp_path.glob("out/*"))
        return capsys.readouterr().err

    run = Run(make.CASES["zero2_cpu"])
    source = run.saved(tmp_path)
    for option in (("--masters",), ("--dtype", "float16"), ("--shard-bytes-max", "1MiB")):
        assert f"{option[0]} works for safetensors only" in refused(source, *option)
    handle = inf.handle(run.model)
    handle.optimizer_state(run.model.get_parameter("norm.bias"))["step"] = 9
    inf.save(run.model, run.opt, tmp_path / "steps").wait()
    assert "has made 3 steps and norm.bias 9" in refused(tmp_path / "steps")
    handle.close()
    torch.manual_seed(0)
    model = inf.offload(make.Net().bfloat16(), inf.Policy(**CPU))
    lion = inf.Lion([param for param in model.parameters() if param.requires_grad])
    inf.save(model, lion, tmp_path / "lion").wait()
    assert "the moments ['exp_avg'] of Lion" in refused(tmp_path / "lion")
    inf.handle(model).close()
    assert export(source, tmp_path / "twice") == 0
    capsys.readouterr()
    assert export(source, tmp_path / "twice") == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.deepspeed
@pytest.mark.skipif(not DEEPSPEED.is_dir(), reason="needs DeepSpeed's environment")
@pytest.mark.parametrize("name", ["zero1", "zero2_cpu", "zero3_cpu"])
def test_deepspeed_goes_on_with_equal_losses(name: str, tmp_path: Path) -> None:
    run = Run(make.CASES[name])
    source = run.saved(tmp_path)
    steps = range(make.SAVED_AT, make.SAVED_AT + make.LATER)
    losses = [run.step(index) for index in steps]
    inf.handle(run.model).close()
    assert export(source, tmp_path / "out") == 0
    environment = {
        **os.environ,
        "PATH": f"{DEEPSPEED / 'bin'}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(DEEPSPEED / "torch_extensions"),
    }
    arguments = [name, str(tmp_path / "out"), str(make.SAVED_AT), str(make.LATER)]
    done = subprocess.run(
        [str(DEEPSPEED / "bin" / "python"), go_on.__file__, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    assert found["losses"] == pytest.approx(losses, rel=2e-7)
    assert set(found["steps"]) == {float(make.SAVED_AT + make.LATER)}
    assert [rates[0] for rates in found["lr"]] == pytest.approx([RATES[index] for index in steps])
