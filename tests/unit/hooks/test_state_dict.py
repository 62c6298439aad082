"""`state_dict`, `load_state_dict`, `save_pretrained` and `torch.save` behave as on a plain
model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity._src.params.sharded_param import ShardedParameter
from infinity.errors import BudgetError, ParameterReleased
from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig


@pytest.fixture(params=[True, False], ids=["evicts_at_once", "never_evicts"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(models.stack(), models.stack_groups, eager=request.param)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_state_dict_gives_ordinary_cpu_copies(rig: Rig) -> None:
    state = rig.model.state_dict()
    assert same(state, rig.plain.state_dict())
    for value in state.values():
        assert type(value) is torch.Tensor
        assert not value.requires_grad
    state["head.weight"].zero_()
    assert same(rig.model.state_dict(), rig.plain.state_dict())


def test_the_state_dict_of_a_part_and_with_a_prefix(rig: Rig) -> None:
    assert same(rig.model.blocks[1].state_dict(), rig.plain.blocks[1].state_dict())
    assert same(rig.model.state_dict(prefix="x."), rig.plain.state_dict(prefix="x."))


def test_keep_vars_gives_the_parameters_at_rest(rig: Rig) -> None:
    state = rig.model.state_dict(keep_vars=True)
    assert all(type(value) is ShardedParameter for value in state.values())
    with pytest.raises(ParameterReleased):
        state["head.weight"].sum()


def test_buffers_come_along() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rig = Rig(model, lambda m: {"all": [m]})
    rig.model(torch.randn(3, 4))
    state = rig.model.state_dict()
    assert state["1.num_batches_tracked"] == 1
    assert list(state) == list(rig.plain.state_dict())


def test_tied_names_share_one_copy(tmp_path: Path) -> None:
    rig = Rig(models.gpt2(), models.gpt2_groups)
    state = rig.model.state_dict()
    assert same(state, rig.plain.state_dict())
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    prefixed = rig.model.state_dict(prefix="base.")
    assert prefixed["base.lm_head.weight"] is prefixed["base.transformer.wte.weight"]


def test_a_state_dict_saved_and_loaded_trains_on(rig: Rig) -> None:
    rig.train(models.stack_loss, steps=1)
    file = io.BytesIO()
    torch.save(rig.model.state_dict(), file)
    file.seek(0)
    fresh = Rig(models.stack(), models.stack_groups)
    for model in (fresh.plain, fresh.model):
        result = model.load_state_dict(torch.load(file))
        assert not result.missing_keys
        assert not result.unexpected_keys
        file.seek(0)
    fresh.check_values()
    fresh.train(models.stack_loss, steps=1)


def test_loading_casts_as_copy_does_and_needs_no_gather(rig: Rig) -> None:
    state = {name: value.double() for name, value in rig.plain.state_dict().items()}
    before = list(rig.unsharder.events)
    rig.model.load_state_dict(state)
    assert rig.unsharder.events == before
    assert same(rig.model.state_dict(), rig.plain.state_dict())


def test_loading_checks_names_and_shapes_as_torch_does(rig: Rig) -> None:
    state = dict(rig.plain.state_dict())
    state["other"] = state.pop("head.bias")
    state["head.weight"] = torch.zeros(1, 2)
    texts = []
    for model in (rig.plain, rig.model):
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(state)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert "size mismatch for head.weight" in texts[1]
    del state["head.weight"]
    result = rig.model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["head.weight", "head.bias"]
    assert result.unexpected_keys == ["other"]
    with pytest.raises(ParameterReleased), torch.no_grad():
        rig.model.head.weight.copy_(torch.zeros(4, 16))


def test_loading_what_is_no_tensor_is_reported_as_torch_does(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        rig.model.load_state_dict({**rig.plain.state_dict(), "head.bias": [1.0]})


def test_loading_by_assignment_is_refused_before_anything_changes(rig: Rig) -> None:
    with pytest.raises(ValueError, match="assign"):
        rig.model.load_state_dict(rig.plain.state_dict(), assign=True)
    with pytest.raises(ValueError, match="assign"):
        rig.model.head.load_state_dict(rig.plain.head.state_dict(), assign=True)
    rig.train(models.stack_loss, steps=1)


def test_loading_between_forward_and_backward_raises_what_torch_raises(rig: Rig) -> None:
    loss = models.stack_loss(rig.model, 0)
    rig.model.load_state_dict(rig.plain.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_check_may_refuse_copies_that_do_not_fit() -> None:
    asked: list[int] = []

    def check(size_bytes: int) -> None:
        asked.append(size_bytes)
        if size_bytes > 4000:
            raise BudgetError(
                "too large; use inf.export_safetensors(model, directory)", smallest_bytes=1
            )

    rig = Rig(models.stack(), models.stack_groups, check_state_dict=check)
    with pytest.raises(BudgetError, match="export_safetensors"):
        rig.model.state_dict()
    assert asked[0] == sum(p.numel() * 4 for p in rig.plain.parameters())
    assert same(rig.model.head.state_dict(), rig.plain.head.state_dict())
    rig.model.state_dict(keep_vars=True)
    rig.train(models.stack_loss, steps=1)


def test_a_failed_read_leaves_no_trace(rig: Rig) -> None:
    copies, rig.unsharder.copies = rig.unsharder.copies, {}
    with pytest.raises(KeyError):
        rig.model.state_dict()
    rig.unsharder.copies = copies
    with pytest.raises(ParameterReleased):
        rig.model.head.weight.detach()
    assert same(rig.model.state_dict(), rig.plain.state_dict())


def test_save_pretrained_writes_what_the_plain_model_writes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for make, groups in ((models.llama, models.llama_groups), (models.gpt2, models.gpt2_groups)):
        rig = Rig(make(), groups)
        rig.plain.save_pretrained(tmp_path / "plain")
        rig.model.save_pretrained(tmp_path / "offloaded")
        expected = load_file(tmp_path / "plain" / "model.safetensors")
        assert same(load_file(tmp_path / "offloaded" / "model.safetensors"), expected)
