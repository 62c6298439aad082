"""Whatever modules do with parameters, inputs and outputs, numbers are those of the plain model and
nothing stays held."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.hooks import models
from tests.unit.hooks.both_models import both, run_both, stack_rig
from tests.unit.hooks.rig import Rig


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_may_be_modified_in_place(dtype: torch.dtype, eager: bool) -> None:
    class Net(models.Stack):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            x += 1.0
            x[..., 0].mul_(2.0)
            return x

    torch.manual_seed(0)
    model = Net([models.Block(), nn.Linear(16, 16), models.Block()]).to(dtype)
    Rig(model, models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_inputs_may_be_modified_in_place_by_a_unit(eager: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += self.lin(x).detach() + self.lin.bias
            return x

    torch.manual_seed(0)
    model = models.Stack([models.Block(), InPlace(), models.Block()])
    Rig(model, models.stack_groups, eager=eager).train(models.stack_loss)


class Result:
    """An output that is no container."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    extra: dict[str, Any]


@both
@pytest.mark.parametrize(
    "wrap", [Result, Slotted, lambda x: Data(x, {}), lambda x: {"a": [(x,)]}, lambda x: [Result(x)]]
)
def test_outputs_of_any_shape(wrap: Callable[[torch.Tensor], Any], eager: bool) -> None:
    class Wrapped(models.Block):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    class Net(models.Stack):
        def between(self, x: Any) -> torch.Tensor:
            if isinstance(x, (dict, list)):
                x = x["a"][0][0] if isinstance(x, dict) else x[0]
            return x if isinstance(x, torch.Tensor) else x.x

    torch.manual_seed(0)
    Rig(Net([Wrapped() for _ in range(3)]), models.stack_groups, eager=eager).train(
        models.stack_loss
    )


@both
def test_tensors_passed_through_do_not_gather_finished_units_again(eager: bool) -> None:
    class Passing(models.Block):
        def forward(self, pair: Any) -> Any:
            x, bias = pair
            return super().forward(x) + bias, bias

    class Net(models.Stack):
        def __init__(self, blocks: Any) -> None:
            super().__init__(blocks)
            self.bias = nn.Linear(1, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pair = (x, self.bias(x[..., :1]))
            for block in self.blocks:
                pair = block(pair)
            return self.head(pair[0])

    torch.manual_seed(0)
    rig = Rig(
        Net([Passing() for _ in range(4)]),
        lambda m: {"bias": [m.bias], **models.stack_groups(m)},
        eager=eager,
    )
    rig.train(models.stack_loss)
    if eager:
        assert rig.unsharder.peak_numel == rig.largest_unit


@both
def test_a_loss_on_nothing_but_an_attribute_that_a_module_keeps(eager: bool) -> None:
    class Keeping(models.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.aux = (self.up.weight * x.mean()).square().sum()
            return out

    def body(model: Any) -> None:
        models.stack_loss(model, 0)
        sum(block.aux for block in model.blocks).backward()

    torch.manual_seed(0)
    run_both(
        Rig(models.Stack([Keeping() for _ in range(3)]), models.stack_groups, eager=eager), body
    )


@both
def test_auxiliary_losses_returned_by_every_block(eager: bool) -> None:
    class Aux(models.Block):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return out, self.up.weight.square().sum() * out.mean()

    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for block in self.blocks:
                x, aux = block(x)
                total = total + aux
            return self.head(x).mean() + 0.01 * total

    torch.manual_seed(0)
    rig = Rig(Net([Aux() for _ in range(4)]), models.stack_groups, eager=eager)
    rig.train(models.stack_loss)


class Product(torch.autograd.Function):
    """x @ w.T."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, (grad.flatten(0, -2).t() @ x.flatten(0, -2))


@both
def test_a_custom_autograd_function_may_take_a_weight(eager: bool) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(x, self.weight)

    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # of a unit that no frame holds
            return Product.apply(super().forward(x), self.head.weight[:, :4])

    torch.manual_seed(0)
    Rig(Net([Custom(), models.Block()]), models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_a_custom_autograd_function_may_take_a_captured_parameter(eager: bool) -> None:
    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(super().forward(x), self.captured[0])

    torch.manual_seed(0)
    model = Net([models.Block() for _ in range(2)])
    model.extra = nn.Linear(4, 4, bias=False)
    model.captured = [model.extra.weight]
    Rig(model, models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_a_captured_reference_to_a_parameter_gathers_inside_forward(eager: bool) -> None:
    class Captured(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w, table = self.captured
            x = super().forward(x)
            x = torch.nn.functional.linear(x, w.t() @ w) + torch.cat([w.data.sum()[None], w[0, :3]])
            return x + torch.einsum("ij,ij->j", w.t(), table["w"].t()).mean()

    torch.manual_seed(0)
    model = Captured([models.Block() for _ in range(2)])
    extra = nn.Linear(4, 4, bias=False)
    model.extra = extra
    model.captured = (extra.weight, {"w": extra.weight})
    Rig(model, models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_nested_units_and_a_unit_used_five_times(eager: bool) -> None:
    class Twice(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = self.blocks[0](x) * 0.5
            return self.head(self.blocks[1](x))

    torch.manual_seed(0)
    model = Twice([models.Block(), models.Block()])

    def groups(m: Any) -> models.Groups:
        return {"inner": [m.blocks[0].up], "outer": [m.blocks[0]], "other": [m.blocks[1]]}

    Rig(model, groups, eager=eager).train(models.stack_loss)


@both
@pytest.mark.parametrize("frozen", ["blocks.0.", "blocks.1.", "head.", "blocks."])
def test_frozen_units_anywhere(frozen: str, eager: bool) -> None:
    model = models.stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    rig = Rig(model, models.stack_groups, eager=eager)
    rig.train(models.stack_loss)
    if eager:
        assert rig.unsharder.peak_numel == rig.largest_unit


@both
def test_requires_grad_may_be_toggled_after_offload(eager: bool) -> None:
    rig = stack_rig(eager)
    for flag in (False, True):
        for model in (rig.plain, rig.model):
            model.blocks[1].requires_grad_(flag)
            assert not any(p.requires_grad for p in model.blocks[1].parameters()) or flag
        rig.train(models.stack_loss, steps=2)


@both
def test_a_frozen_parameter_may_become_trainable_after_offload(eager: bool) -> None:
    model = models.stack()
    model.head.requires_grad_(False)
    rig = Rig(model, models.stack_groups, eager=eager)
    for each in (rig.plain, rig.model):
        each.head.requires_grad_(True)
    rig.train(models.stack_loss)


@both
def test_a_weight_used_through_detach_does_not_outlive_its_unit(eager: bool) -> None:
    class Detached(models.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                super().forward(x) * self.down.bias.detach()
                + torch.mm(x[0], self.up.weight.detach().t()).mean()
            )

    torch.manual_seed(0)
    Rig(models.Stack([Detached() for _ in range(3)]), models.stack_groups, eager=eager).train(
        models.stack_loss
    )


@both
def test_a_module_whose_output_is_its_own_weight_keeps_it_gathered_for_its_parent(
    eager: bool,
) -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self) -> torch.Tensor:
            return self.weight.t()

    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.relu(self.blocks[-1]().mean(0)))

    torch.manual_seed(0)
    model = Net([models.Block()])
    model.blocks.append(Weight())
    model.blocks[1].__class__.__call__  # noqa: B018  a plain module: called without arguments below

    class Last(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * torch.relu(self.blocks[1]().mean(0))
            return self.head(self.blocks[0](x))

    model.__class__ = Last
    Rig(model, models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_sub_models_called_on_their_own_and_generate(eager: bool) -> None:
    rig = Rig(models.t5(), models.t5_groups, eager=eager)
    for model in (rig.plain, rig.model):
        model.eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    for beams in (1, 2):
        expected = rig.plain.generate(models.tokens(0), num_beams=beams, **options)
        assert torch.equal(
            rig.model.generate(models.tokens(0), num_beams=beams, **options), expected
        )
        rig.check_idle()
    run_both(rig, lambda m: m.encoder(models.tokens(0)).last_hidden_state.float().sum().backward())
    run_both(
        rig,
        lambda m: (
            m.encoder.block[0](torch.ones(1, 4, 32, dtype=torch.bfloat16))[0]
            .float()
            .sum()
            .backward()
        ),
    )


@both
def test_llama_generates_what_it_generated(eager: bool) -> None:
    rig = Rig(models.llama(), models.llama_groups, eager=eager)
    expected = rig.plain.generate(models.tokens(0), max_new_tokens=6, do_sample=False)
    assert torch.equal(
        rig.model.generate(models.tokens(0), max_new_tokens=6, do_sample=False), expected
    )
    rig.check_idle()


@both
def test_autocast_full_backward_hooks_and_saved_tensor_hooks(eager: bool) -> None:
    seen: dict[int, list[Any]] = {}

    def loss(model: Any, seed: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu():
            return models.stack_loss(model, seed)

    rig = Rig(models.stack(inplace=False), models.stack_groups, eager=eager)
    for model in (rig.plain, rig.model):
        mine = seen.setdefault(id(model), [])
        model.blocks[1].register_full_backward_hook(
            lambda _m, _i, out, mine=mine: mine.append(out[0].clone())
        )
    rig.train(loss)
    plain, offloaded = seen.values()
    assert len(plain) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


@both
def test_scalars_empty_and_integer_parameters(eager: bool) -> None:
    class Odd(models.Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.table = nn.Parameter(torch.arange(5), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale + self.nothing.sum() + 0.01 * self.table.sum()

    torch.manual_seed(0)
    rig = Rig(models.Stack([Odd() for _ in range(2)]), models.stack_groups, eager=eager)
    rig.train(models.stack_loss)
    rig.model.load_state_dict(rig.plain.state_dict())
    rig.check_values()
