"""Parameters that are replaced, deleted or written behind the engine's back are reported, never
trained wrongly."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity._src.hooks.gather_context import gather
from infinity.errors import ParameterReleased, ReplacedOutsideEngine, WeightWritten
from tests.marks import alternating
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


class Doubled(nn.Module):
    """A parametrization that differs from its parameter."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight


class Halved(Doubled):
    """One that writes the parameter when it is registered."""

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


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
    "parametrize": lambda m: parametrize.register_parametrization(m.head, "weight", Doubled()),
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


class Changing(models.Block):
    """Changes its module in forward, by `how`."""

    how: Callable[[Any, torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.how is None else self.how(self, x) + x


def changing(how: Any, *, eager: bool = True) -> Rig:
    torch.manual_seed(0)
    rig = Rig(models.Stack([Changing() for _ in range(2)]), models.stack_groups, eager=eager)
    for model in (rig.plain, rig.model):
        model.blocks[1].how = how
    return rig


def parametrized(b: Any, x: torch.Tensor) -> torch.Tensor:
    parametrize.register_parametrization(b.up, "weight", Doubled())
    try:
        with parametrize.cached():
            return b.down(b.up(x) + b.up(x)) / len(list(b.parameters()))
    finally:  # checkpoints stop recomputation early
        parametrize.remove_parametrizations(b.up, "weight", leave_parametrized=False)


def called_with_its_own(b: Any, x: torch.Tensor) -> torch.Tensor:
    return b.down(torch.func.functional_call(b.up, {"weight": b.up.weight * 2}, (x,)))


def called_with_others(b: Any, x: torch.Tensor) -> torch.Tensor:
    values = {"up.weight": b.down.weight.t(), "up.bias": torch.ones(32)}
    with nn.utils.stateless._reparametrize_module(b, values):
        return b.down(b.up(x))


def held_by_another(b: Any, x: torch.Tensor) -> torch.Tensor:
    weight = b.up._parameters.pop("weight")
    b.up.other = weight
    y = x @ b.up.other.t()
    del b.up.other
    b.up.weight = weight
    return b.down(y + b.up(x))


def a_plain_attribute(b: Any, x: torch.Tensor) -> torch.Tensor:
    weight = b.up.weight
    del b.up.weight
    b.up.weight = weight * 2  # as torch's first weight_norm
    y = b.up(x)
    del b.up.weight
    b.up.register_parameter("weight", weight)
    return b.down(y)


LENDING = [
    parametrized, called_with_its_own, called_with_others, held_by_another, a_plain_attribute
]  # fmt: skip


@pytest.mark.parametrize(("how", "eager"), alternating(LENDING, [True, False]))
def test_a_parameter_that_forward_takes_out_and_puts_back_trains(how: Any, eager: bool) -> None:
    rig = changing(how, eager=eager)
    rig.train(models.stack_loss)
    # Also without a frame of its own: recomputed in backward.
    recompute = functools.partial(checkpoint, use_reentrant=False)
    for model in (rig.plain, rig.model):
        block = model.blocks[1]
        block.how = functools.partial(recompute, how)
    rig.train(models.stack_loss, steps=1)


def stays_parametrized(b: Any, x: torch.Tensor) -> torch.Tensor:
    parametrize.register_parametrization(b.up, "weight", Doubled())
    return b.down(b.up(x))


def deletes(b: Any, x: torch.Tensor) -> torch.Tensor:
    weight = b.up.weight
    del b.up.weight
    return b.down(x @ weight.t())


def assigns(b: Any, x: torch.Tensor) -> torch.Tensor:
    b.up.weight = nn.Parameter(b.up.weight.detach() * 2)
    return b.down(b.up(x))


def normed(b: Any, x: torch.Tensor) -> torch.Tensor:
    nn.utils.weight_norm(b.up)
    y = b.down(b.up(x))
    nn.utils.remove_weight_norm(b.up)
    return y


@pytest.mark.parametrize("how", [stays_parametrized, deletes, assigns, normed])
def test_a_parameter_that_forward_takes_out_for_good_is_named(how: Any) -> None:
    rig = changing(how)
    with pytest.raises(ReplacedOutsideEngine, match=r"forward took blocks\.1\.up\.weight out of"):
        models.stack_loss(rig.model, 0)
    rig.check_idle()
    with pytest.raises(ParameterReleased, match=r"blocks\.1\.up\.weight"):
        rig.model.blocks[1].up.weight.sum()  # a parametrization that stayed has no memory to read
    for model in (rig.plain, rig.model):
        model.blocks[1].how = None
    if how is stays_parametrized:
        parametrize.remove_parametrizations(rig.model.blocks[1].up, "weight", False)
    rig.train(models.stack_loss, steps=1)


def test_a_parametrization_takes_values_inside_of_gather_only(rig: Rig) -> None:
    torch.manual_seed(0)
    model = models.stack()
    parametrize.register_parametrization(model.head, "weight", Halved())
    rig = Rig(model, models.stack_groups)
    values = torch.ones(4, 16)
    with pytest.raises(ParameterReleased, match=r"weight\.original.*gather"):
        rig.model.head.weight = values
    with gather(rig.lifecycle, rig.model.head):
        rig.model.head.weight = values
        with pytest.raises(ValueError, match=r"`set_` of shape \(2, 2\)"):
            rig.model.head.weight = torch.ones(2, 2)
    rig.plain.head.weight = values
    rig.train(models.stack_loss, steps=1)


NORMS: dict[str, Callable[[Any], Any]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "a parametrization": lambda m: parametrize.register_parametrization(m, "weight", Halved()),
}


@pytest.mark.parametrize("how", NORMS)
def test_modules_parametrized_before_offload_train(how: str) -> None:
    model = models.stack()
    for block in model.blocks:
        with torch.no_grad():  # the first weight_norm leaves a tensor that could not be copied
            NORMS[how](block.up)
    rig = Rig(model, models.stack_groups)
    rig.train(models.stack_loss, steps=1)

    def cached(each: nn.Module, seed: int) -> torch.Tensor:
        with parametrize.cached():
            return models.stack_loss(each, seed) + models.stack_loss(each, seed + 1)

    rig.train(cached, steps=1)


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
    lambda w: w.set_(torch.zeros_like(w)),
    lambda w: w.set_(torch.zeros(2, 2)),
]


@pytest.mark.parametrize(("how", "eager"), alternating(WRITES, [True, False]))
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


class WritingInBackward(Writing):
    """Writes to a weight when backward has used it for the last time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def write(grad: torch.Tensor) -> None:
            if self.how is not None:
                with torch.no_grad():
                    self.how(self.down.weight)

        inner = torch.tanh(self.up(x))
        if inner.requires_grad:
            inner.register_hook(write)
        return x + self.down(inner)


@both
def test_a_weight_written_in_backward_raises_and_keeps_its_value(eager: bool) -> None:
    torch.manual_seed(0)
    blocks = [WritingInBackward() for _ in range(2)]
    rig = Rig(models.Stack(blocks), models.stack_groups, eager=eager)
    rig.model.blocks[1].how = WRITES[0]
    with pytest.raises(WeightWritten, match=r"blocks\.1\.down\.weight"):
        models.stack_loss(rig.model, 0).backward()
    rig.model.zero_grad()
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
