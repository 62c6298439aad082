"""inf.save(frozen=False): a checkpoint of the trained parameters only, restored into a model that
has the frozen values."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from tests import models
from tests.harness import Training, assert_same
from tests.marks import alternating
from tests.test_checkpoint import AT, STEPS, TIERS, Run, policy

LORA = Training(functools.partial(models.lora, 2), steps=STEPS, accumulation=1)


def save(run: Run, place: Path, **values: Any) -> inf.Save:
    extra = {"sched": run.scheduler.state_dict()}
    return inf.save(run.model, run.optimizer, place, extra=extra, **values)


@pytest.mark.parametrize(("tier", "state"), alternating(TIERS, ["exact", "bf16", "compact"]))
def test_training_of_adapters_goes_on_bit_for_bit(tier: str, state: str, tmp_path: Path) -> None:
    chosen = policy(tmp_path, state=state, **TIERS[tier])
    with Run(LORA, chosen) as run:
        run.train(0, AT)
        saved = save(run, tmp_path / "ckpt", frozen=False)
        losses = run.train(AT, STEPS)  # during the save
        saved.wait()
        states = run.everything()
        whole = save(run, tmp_path / "whole")
        frozen = [value for value in run.model.parameters() if not value.requires_grad]
        assert whole.size_bytes - saved.size_bytes >= sum(2 * value.numel() for value in frozen)
        whole.wait()
    with Run(LORA, chosen) as fresh:
        restored = fresh.restore(tmp_path / "ckpt")
        assert restored.step == AT
        assert len(restored.notes) == 1
        assert "frozen elements in all, are not in the checkpoint" in restored.notes[0]
        assert fresh.train(AT, STEPS) == losses
        assert_same(fresh.everything(), states)
        # A complete checkpoint is restored as before.
        assert fresh.restore(tmp_path / "whole").notes == ()


def adapted(base: int = 1024, *, frozen: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A large linear, frozen, with a small one that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, base), nn.ReLU(), nn.Linear(base, 4)).to(dtype)
    model[0].requires_grad_(not frozen)
    return model


def step(model: nn.Module, optimizer: inf.AdamW) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 64, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(place: Path, model: Any = None, **values: Any) -> Any:
    """A model after a step, saved."""
    made = offload(adapted() if model is None else model, inf.Policy(**values))
    # Frozen parameters may be in the group, as with a trainer's.
    optimizer = inf.AdamW(made.parameters(), lr=1e-2)
    step(made, optimizer)
    saved = inf.save(made, optimizer, place, frozen=False)
    saved.wait()
    assert saved.copied_bytes == saved.size_bytes
    return made, optimizer


def test_it_is_as_large_as_what_is_trained(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "ckpt", adapted(16384))
    inf.handle(model).close()
    size = sum(file.stat().st_size for file in (tmp_path / "ckpt").iterdir())
    # 65,540 trained parameters of 12 bytes; 2 MiB are frozen.
    assert 12 * 65_540 <= size < 12 * 65_540 + 64 * 1024


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_frozen_values_stay_beside_restored_ones_in_one_chunk(tier: str, tmp_path: Path) -> None:
    """For evaluation all is frozen, and lies together."""
    model, _ = trained(tmp_path / "ckpt")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    inf.handle(model).close()
    fresh = adapted()
    fresh.requires_grad_(False)
    with torch.no_grad():
        fresh[0].bias.add_(1.0)
    base = {name: value.clone() for name, value in fresh.state_dict().items()}
    (tmp_path / "swap").mkdir()
    chosen = policy(tmp_path, **TIERS[tier])
    offload(fresh, chosen)
    assert inf.restore(fresh, None, tmp_path / "ckpt").step == 1
    found = fresh.state_dict()
    for name in ("0.weight", "0.bias"):
        assert torch.equal(found[name], base[name]), name
    for name in ("2.weight", "2.bias"):
        assert torch.equal(found[name], expected[name]), name
        assert not torch.equal(found[name], base[name]), name
    inf.handle(fresh).close()


def test_another_state_format_and_tiles_of_what_is_frozen(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "ckpt")
    step(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    inf.handle(model).close()
    fresh = adapted()
    inf.tile_linears(fresh, tiles=(2, 1))
    assert any("tile" in name for name, _ in fresh.named_parameters())
    offload(fresh, inf.Policy(state="bf16"))
    again = inf.AdamW(fresh.parameters(), lr=1e-2)
    restored = inf.restore(fresh, again, tmp_path / "ckpt")
    assert restored.rounded == "rounded to nearest: moments to bf16"
    step(fresh, again)
    for name, value in fresh.state_dict().items():
        assert torch.allclose(value.float(), expected[name].float(), atol=2e-2), name
    assert torch.equal(fresh.state_dict()["0.weight"], expected["0.weight"])
    inf.handle(fresh).close()


def test_a_durable_run_copies_it(tmp_path: Path) -> None:
    """Its files have the frozen parameters, too, and would be linked as a whole."""
    (tmp_path / "run").mkdir()
    values = {"params": "nvme", "optim": "nvme", "nvme": tmp_path / "run", "durable": "new"}
    model, optimizer = trained(tmp_path / "ckpt", **values)
    whole = inf.save(model, optimizer, tmp_path / "whole")
    whole.wait()
    assert whole.copied_bytes == 0
    inf.handle(model).close()
    fresh = offload(adapted(), inf.Policy())
    assert inf.restore(fresh, inf.AdamW(fresh.parameters()), tmp_path / "ckpt").step == 1
    inf.handle(fresh).close()


def test_states_keep_a_parameter_that_was_frozen_since(tmp_path: Path) -> None:
    model = offload(adapted(frozen=False), inf.Policy())
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    model[0].requires_grad_(False)  # type: ignore[index]
    saved = inf.save(model, optimizer, tmp_path / "ckpt", frozen=False)
    saved.wait()
    whole = inf.save(model, optimizer, tmp_path / "whole")
    whole.wait()
    assert saved.size_bytes == whole.size_bytes
    inf.handle(model).close()


def other_shape() -> Any:
    model = adapted()
    model[0] = nn.Linear(32, 1024, dtype=torch.bfloat16).requires_grad_(False)
    return model


def without_bias() -> Any:
    model = adapted()
    model[0].bias = None
    return model


def one_more() -> Any:
    model = adapted()
    model.append(nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False))
    return model


def frozen_in_fp32() -> Any:
    model = adapted()
    model[0].float()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: adapted(frozen=False),
            r"0\.weight is trained now, but was frozen when .*ckpt was saved with frozen=False",
        ),
        (
            other_shape,
            r"0\.weight, which was frozen .* shape \(1024, 64\) .* shape \(1024, 32\)",
        ),
        (without_bias, r"0\.bias \(\[1024\], frozen when saved.*\) not in the model"),
        (one_more, r"3\.weight .*, 3\.bias .* missing in it"),
        (frozen_in_fp32, r"0\.weight, which .* bfloat16; .* float32: .* in the same dtype"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_written(
    make: Any, message: str, tmp_path: Path
) -> None:
    model, _ = trained(tmp_path / "ckpt")
    inf.handle(model).close()
    fresh = offload(make(), inf.Policy())
    optimizer = inf.AdamW(fresh.parameters())
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    for given in (optimizer, None):
        with pytest.raises(ValueError, match=message):
            inf.restore(fresh, given, tmp_path / "ckpt")
    assert_same(dict(fresh.state_dict()), before)
    inf.handle(fresh).close()


def test_a_save_of_nothing_is_refused(tmp_path: Path) -> None:
    model = offload(adapted().requires_grad_(False), inf.Policy())
    with pytest.raises(ValueError, match="none requires a gradient or has optimizer states"):
        inf.save(model, None, tmp_path / "ckpt", frozen=False)
    inf.save(model, None, tmp_path / "ckpt").wait()
    inf.handle(model).close()
