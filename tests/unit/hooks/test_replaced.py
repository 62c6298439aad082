"""Parameters that are replaced, deleted or written behind the engine's back are reported, never
trained wrongly."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ParameterReleased, ReplacedOutsideEngine, WeightWritten
from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig, at_rest

both = pytest.mark.parametrize("eager", [True, False], ids=["evicts_at_once", "never_evicts"])


@pytest.fixture
def rig() -> Rig:
    return Rig(models.stack(), models.stack_groups)


def old_weight_norm(model: Any) -> None:
    nn.utils.weight_norm(model.head)


def old_prune(model: Any) -> None:
    from torch.nn.utils import prune

    prune.random_unstructured(model.head, "weight", 0.5)


REPLACING: dict[str, Callable[[Any], Any]] = {
    "assign a parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(4, 16))),
    "assign None": lambda m: setattr(m.head, "weight", None),
    "delete": lambda m: delattr(m.head, "weight"),
    "pop": lambda m: m.head._parameters.pop("weight"),
    "clear": lambda m: m.head._parameters.clear(),
    "update": lambda m: m.head._parameters.update(weight=nn.Parameter(torch.zeros(4, 16))),
    "functional_call": lambda m: torch.func.functional_call(
        m, {"head.weight": torch.zeros(4, 16)}, (torch.zeros(1, 1, 16),)
    ),
    "weight_norm": old_weight_norm,
    "new weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.head),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m.head),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m.head),
    "prune": old_prune,
    "remake parameters": lambda m: m.head.reset_parameters(),
    "deepcopy the model": copy.deepcopy,
    "pickle the model": lambda m: torch.save(m, io.BytesIO()),
    "convert": lambda m: m.half(),
}


@pytest.mark.parametrize("how", REPLACING)
def test_replacing_a_parameter_raises_and_leaves_the_model_whole(rig: Rig, how: str) -> None:
    before = {name: id(p) for name, p in rig.model.named_parameters()}
    with pytest.raises(
        (ReplacedOutsideEngine, ParameterReleased), match=r"(head|blocks)[.\w]*\.(weight|bias)"
    ):
        REPLACING[how](rig.model)
    after = {name: id(p) for name, p in rig.model.named_parameters()}
    assert set(before.items()) <= set(after.items())
    rig.train(models.stack_loss, steps=1)


def test_assigning_the_same_parameter_is_no_replacement(rig: Rig) -> None:
    rig.model.head.weight = rig.model.head.weight
    rig.train(models.stack_loss, steps=1)


def test_what_gets_past_the_dict_is_found_by_the_next_forward(rig: Rig) -> None:
    dict.__setitem__(rig.model.head._parameters, "weight", nn.Parameter(torch.zeros(4, 16)))
    with pytest.raises(
        ReplacedOutsideEngine, match=r"head\.weight was replaced outside the engine"
    ):
        models.stack_loss(rig.model, 0)
    for unit in rig.units:
        assert unit.refs == 0


def test_a_replaced_dict_of_parameters_is_found_by_the_next_forward(rig: Rig) -> None:
    rig.model.head.__dict__["_parameters"] = {
        "weight": nn.Parameter(torch.zeros(4, 16)),
        "bias": None,
    }
    with pytest.raises(ReplacedOutsideEngine, match="replaced outside the engine"):
        models.stack_loss(rig.model, 0)


def test_a_parameter_of_the_engine_may_be_tied_to_a_module_added_later(rig: Rig) -> None:
    for model in (rig.plain, rig.model):
        extra = nn.Linear(16, 4, bias=False)
        extra.weight = model.head.weight
        model.blocks[0].extra = extra
        model.blocks[0].register_forward_hook(lambda m, _a, out: out + m.extra(out).mean())
    rig.train(models.stack_loss)


class Writing(models.Block):
    """Writes to a weight in forward, as weight clipping does."""

    how: Callable[[torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how is not None:
            with torch.no_grad():
                self.how(self.down.weight)
        return super().forward(x)


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w.clamp_(-0.01, 0.01),
    lambda w: w.detach().zero_(),
    lambda w: w[0].fill_(1),
    lambda w: w.data.clamp_(-0.01, 0.01),
    lambda w: setattr(w, "data", torch.zeros_like(w)),
    lambda w: w.data.view(-1)[3:5].zero_(),
]


@both
@pytest.mark.parametrize("how", WRITES)
def test_a_weight_written_in_forward_raises_and_keeps_its_value(
    how: Callable[[torch.Tensor], Any], eager: bool
) -> None:
    torch.manual_seed(0)
    rig = Rig(models.Stack([Writing() for _ in range(2)]), models.stack_groups, eager=eager)
    rig.model.blocks[1].how = how
    with pytest.raises(WeightWritten, match=r"blocks\.1\.down\.weight"):
        models.stack_loss(rig.model, 0)
    rig.model.blocks[1].how = None
    rig.train(models.stack_loss)


def test_an_outermost_module_that_returns_its_weight_is_told_to_copy(rig: Rig) -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.copy = False

        def forward(self) -> torch.Tensor:
            return self.weight[1].clone() if self.copy else self.weight[1]

    rig = Rig(Weight(), lambda m: {"all": [m]})
    with pytest.raises(ParameterReleased, match=r"weight.*clone"):
        rig.model()
    rig.check_idle()
    rig.model.copy = True
    assert torch.equal(rig.model(), torch.ones(4))


def test_a_parameter_with_a_gradient_is_refused_at_offload() -> None:
    model = models.stack()
    models.stack_loss(model, 0).backward()
    with pytest.raises(ValueError, match="zero_grad"):
        Rig(model, models.stack_groups)


def test_iteration_inside_forward_still_gives_the_parameters_at_rest(rig: Rig) -> None:
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.extend(module.parameters())
        assert module.up.weight is rig.params["blocks.0.up.weight"].gathered

    rig.model.blocks[0].register_forward_pre_hook(look)
    models.stack_loss(rig.model, 0)
    assert seen == [at_rest(rig.model, name) for name in rig.params if name.startswith("blocks.0.")]
