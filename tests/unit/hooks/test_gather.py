"""Inside `gather()` parameters are readable and writable, and what was written is kept, to the bit
and no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity._src.hooks.gather_context import gather
from infinity.errors import ParameterReleased
from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig, at_rest

both = pytest.mark.parametrize("eager", [True, False], ids=["evicts_at_once", "never_evicts"])
NAME = "blocks.1.up.weight"


@pytest.fixture(params=[True, False], ids=["evicts_at_once", "never_evicts"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(models.stack(), models.stack_groups, eager=request.param)


def plain(rig: Rig, name: str = NAME) -> nn.Parameter:
    return dict(rig.plain.named_parameters())[name]


def test_values_are_readable_inside_and_released_outside(rig: Rig) -> None:
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p):
        assert torch.equal(p, plain(rig))
        assert torch.equal(p.detach().clone(), plain(rig))
        assert torch.equal(torch.from_numpy(p.detach().numpy().copy()), plain(rig))
        assert p.norm() == plain(rig).norm()
        assert torch.equal(p[0] + p.data[1], plain(rig)[0] + plain(rig)[1])
        with pytest.raises(ParameterReleased):
            at_rest(rig.model, "head.weight").sum()
    with pytest.raises(ParameterReleased):
        p.sum()
    rig.check_idle()
    assert rig.unsharder.writes == 0
    rig.train(models.stack_loss, steps=2)  # numpy made the storage unresizable: it was renewed


@pytest.mark.parametrize("many", ["module", "generator", "list"])
def test_a_module_a_generator_or_a_list_can_be_gathered(rig: Rig, many: str) -> None:
    what = {
        "module": rig.model,
        "generator": rig.model.parameters(),
        "list": list(rig.model.blocks[1].parameters()),
    }[many]
    with gather(rig.lifecycle, what):
        assert torch.equal(at_rest(rig.model, NAME), plain(rig))
    rig.check_idle()


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.mul_(2),
        lambda p: p.copy_(torch.ones(32, 16)),
        lambda p: p.data.copy_(torch.ones(32, 16)),
        lambda p: p.data.add_(1),
        lambda p: setattr(p, "data", torch.ones(32, 16)),
        lambda p: p.__setitem__((0, slice(None)), 3.0),
        lambda p: p.view(-1)[7:9].fill_(4.0),
        lambda p: nn.init.constant_(p, 0.25),
        lambda p: nn.utils.vector_to_parameters(torch.arange(512.0) / 512, [p]),
        lambda p: torch._foreach_add_([p], 1.0),
    ],
)
def test_what_is_written_inside_is_kept_and_nothing_else_is_touched(rig: Rig, write) -> None:
    with torch.no_grad():
        write(plain(rig))
        p = at_rest(rig.model, NAME)
        with gather(rig.lifecycle, rig.model):
            write(p)
    assert rig.unsharder.writes == 1
    rig.check_idle()
    rig.check_values()
    rig.train(models.stack_loss, steps=1)


def test_in_place_operations_return_the_parameter_itself(rig: Rig) -> None:
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p), torch.no_grad():
        assert p.mul_(2) is p


def test_writes_are_kept_when_the_body_raises(rig: Rig) -> None:
    p = at_rest(rig.model, NAME)
    with pytest.raises(ValueError, match="boom"), torch.no_grad(), gather(rig.lifecycle, p):
        p.zero_()
        raise ValueError("boom")
    rig.check_idle()
    assert not rig.unsharder.copies[rig.params[NAME]].any()


def test_a_leaf_that_requires_grad_cannot_be_written_without_no_grad_as_in_torch(rig: Rig) -> None:
    p = at_rest(rig.model, NAME)
    with (
        gather(rig.lifecycle, p),
        pytest.raises(RuntimeError, match="leaf Variable that requires grad"),
    ):
        p.mul_(2)
    rig.check_idle()


def test_a_forward_and_backward_inside_see_what_was_written(rig: Rig) -> None:
    with torch.no_grad():
        plain(rig).mul_(0.5)
    models.stack_loss(rig.plain, 0).backward()
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, rig.model):
        with torch.no_grad():
            p.mul_(0.5)
        models.stack_loss(rig.model, 0).backward()
    rig.check_grads()
    rig.check_idle()
    rig.check_values()


def test_a_backward_after_gather_and_a_write_raises_what_torch_raises(rig: Rig) -> None:
    loss = models.stack_loss(rig.model, 0)
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p), torch.no_grad():
        p.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_inside_gather_after_a_write_raises_what_torch_raises(rig: Rig) -> None:
    loss = models.stack_loss(rig.model, 0)
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p):
        with torch.no_grad():
            p.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    models.stack_loss(rig.model, 0)
    rig.check_idle()


def test_reading_between_forward_and_backward_changes_nothing(rig: Rig) -> None:
    loss = models.stack_loss(rig.model, 0)
    with gather(rig.lifecycle, rig.model):
        sum(float(p.sum()) for p in rig.model.parameters())
    loss.backward()
    models.stack_loss(rig.plain, 0).backward()
    rig.check_grads()


def test_a_regulariser_made_inside_has_gradients_there(rig: Rig) -> None:
    (0.1 * plain(rig).square().sum()).backward()
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p):
        (0.1 * p.square().sum()).backward()
    rig.check_grads()
    assert rig.unsharder.events[-3:].count("backward_end") == 1


def test_a_graph_made_inside_runs_backward_outside(rig: Rig) -> None:
    """Its memory is gathered again, after other passes, too."""
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p):
        with torch.no_grad():
            p.mul_(0.5)
        penalty = p.square().sum()
    models.stack_loss(rig.model, 0).backward()
    penalty.backward()
    with torch.no_grad():
        plain(rig).mul_(0.5)
    models.stack_loss(rig.plain, 0).backward()
    plain(rig).square().sum().backward()
    rig.check_grads()
    rig.check_idle()


def test_a_graph_made_inside_raises_what_torch_raises_after_a_step(rig: Rig) -> None:
    p = at_rest(rig.model, NAME)
    with gather(rig.lifecycle, p):
        penalty = p.square().sum()
    for model in (rig.plain, rig.model):
        models.stack_loss(model, 0).backward()
    rig.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_gathers_nest(rig: Rig) -> None:
    p = at_rest(rig.model, NAME)
    with torch.no_grad(), gather(rig.lifecycle, p):
        with gather(rig.lifecycle, rig.model):
            p.zero_()
            at_rest(rig.model, "head.bias").zero_()
        assert not p.any()
    assert not rig.unsharder.copies[rig.params[NAME]].any()
    assert not rig.unsharder.copies[rig.params["head.bias"]].any()
    rig.check_idle()


def test_parameters_that_are_not_offloaded_are_let_through(rig: Rig) -> None:
    adapter = nn.Parameter(torch.ones(3))
    with gather(rig.lifecycle, [adapter, at_rest(rig.model, NAME)]):
        assert torch.equal(at_rest(rig.model, NAME), plain(rig))


def test_mistakes_are_named(rig: Rig) -> None:
    other = Rig(models.stack(), models.stack_groups)
    with pytest.raises(ValueError, match="another model"), gather(rig.lifecycle, other.model):
        pass
    with (
        pytest.raises(ValueError, match="named_parameters"),
        gather(rig.lifecycle, rig.model.named_parameters()),
    ):
        pass
    rig.check_idle()
