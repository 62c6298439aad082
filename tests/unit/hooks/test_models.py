"""Modules that hold their weights in unusual ways train bit-equal to a plain loop with the harshest
eviction, and no model holds more than it must. test_matrix.py has the model families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig


@pytest.mark.parametrize(
    ("make", "groups", "loss", "units"),
    [
        (models.llama, models.llama_groups, models.lm_loss, 1),
        (models.t5, models.t5_groups, models.t5_loss, 2),
        (models.qwen3_moe, models.llama_groups, models.lm_loss, 1),
    ],
)
def test_the_peak_is_the_units_in_use_and_no_more(
    make: Any, groups: Any, loss: Any, units: int
) -> None:
    rig = Rig(make(), groups)
    loss(rig.model, 0).backward()
    sizes = sorted((sum(p.numel for p in unit.params) for unit in rig.units), reverse=True)
    assert rig.unsharder.peak_numel <= sum(sizes[:units])


def test_gradients_are_accumulated_unit_by_unit_in_backward() -> None:
    rig = Rig(models.llama(), models.llama_groups)
    models.lm_loss(rig.model, 0).backward()
    assert rig.unsharder.done == ["head", "head", "layer3", "layer2", "layer1", "layer0", "embed"]
    assert all(param.gathered.grad is None for param in rig.params.values())


def test_unused_experts_do_not_keep_the_model_gathered() -> None:
    width, count = 16, 8
    torch.manual_seed(0)
    model = models.Stack([models.Experts(width, count) for _ in range(4)], width)
    rig = Rig(model, models.stack_groups)
    rig.train(models.stack_loss)
    assert rig.unsharder.peak_numel == rig.largest_unit


@pytest.mark.parametrize("return_sequences", [1, 2])
def test_an_lstm_that_keeps_its_own_list_of_weights_trains_bit_equal(return_sequences: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, return_sequences, batch_first=True)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(x)[0])

    torch.manual_seed(0)
    rig = Rig(Net(), lambda m: {"rnn": [m.rnn], "out": [m.out]})
    rig.train(lambda m, seed: m(models.stack_input(m, seed, 8)).sum())


def test_a_transformer_encoder_layer_and_its_fast_path_in_eval_are_bit_equal() -> None:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    rig = Rig(models.Stack(layers), models.stack_groups)
    rig.train(models.stack_loss, steps=2)
    rig.plain.eval()
    rig.model.eval()
    x = models.stack_input(rig.model, 3)
    with torch.no_grad():
        assert torch.equal(rig.model(x), rig.plain(x))
    rig.check_idle()


def test_a_unit_that_serves_many_modules_and_a_module_with_many_units_train_bit_equal() -> None:
    def groups(model: nn.Module) -> models.Groups:
        up = [block.up for block in model.blocks]
        down = [block.down for block in model.blocks]
        return {"ups": up, "downs": down, "head": [model.head]}

    Rig(models.stack(), groups).train(models.stack_loss)


def test_parameters_of_no_hooked_module_are_gathered_by_whoever_looks_them_up() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((16,), 1.5))
            self.inner = models.stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scale).mean(-1) * self.scale.mean()

    rig = Rig(Net(), lambda m: models.stack_groups(m.inner))
    assert [unit.name for unit in rig.units if not unit.modules] == ["rest"]
    rig.train(models.stack_loss)
