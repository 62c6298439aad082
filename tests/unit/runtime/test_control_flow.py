"""Whatever a loop does between forward and backward, numbers are those of the plain loop and nothing stays held."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.runtime import models
from tests.unit.runtime.rig import Rig, at_rest

both = pytest.mark.parametrize("eager", [True, False], ids=["evicts_at_once", "never_evicts"])


def stack_rig(eager: bool = True, **options: Any) -> Rig:
    return Rig(models.stack(**options), models.stack_groups, eager=eager)


def run_both(rig: Rig, body: Callable[[nn.Module], Any]) -> None:
    """Run `body` on both models, then compare gradients; nothing may stay held."""
    torch.manual_seed(1)
    body(rig.plain)
    torch.manual_seed(1)
    body(rig.model)
    rig.check_idle()
    rig.check_grads()


# -- checkpointing -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", ["llama", "gpt2_tied", "t5_shared", "qwen3_moe"])
def test_gradient_checkpointing_of_both_kinds_is_bit_equal(case: str, reentrant: bool, eager: bool) -> None:
    make, groups, loss = models.LM_CASES[case]
    rig = Rig(make(), groups, eager=eager)
    for model in (rig.plain, rig.model):
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.train()
    rig.train(loss, steps=2)


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_over_three_units_is_bit_equal(reentrant: bool, eager: bool) -> None:
    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def segment(x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

            x = x.clone().requires_grad_()
            return self.head(checkpoint(segment, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    Rig(Net([models.Block() for _ in range(3)]), models.stack_groups, eager=eager).train(models.stack_loss)


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_passed_into_a_checkpoint_by_their_parent_are_bit_equal(reentrant: bool, eager: bool) -> None:
    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            x = x.clone() if x.requires_grad else x.clone().requires_grad_()
            return checkpoint(
                lambda x, w: torch.nn.functional.linear(x, w), x, self.head.weight, use_reentrant=reentrant
            )

    torch.manual_seed(0)
    Rig(Net([models.Block() for _ in range(2)]), models.stack_groups, eager=eager).train(models.stack_loss)


# -- orders of forward and backward ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_either_order(order: tuple[int, int], eager: bool) -> None:
    def body(model: nn.Module) -> None:
        losses = [models.stack_loss(model, seed) for seed in range(2)]
        for index in order:
            losses[index].backward()

    run_both(stack_rig(eager), body)


@both
def test_summed_losses_of_two_forwards(eager: bool) -> None:
    run_both(stack_rig(eager), lambda m: (models.stack_loss(m, 0) + models.stack_loss(m, 1)).backward())


@both
def test_retain_graph_and_a_second_backward(eager: bool) -> None:
    def body(model: nn.Module) -> None:
        loss = models.stack_loss(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()

    run_both(stack_rig(eager), body)


@both
def test_a_loss_on_hidden_states(eager: bool) -> None:
    def body(model: Any) -> None:
        out = model(input_ids=models.tokens(0), output_hidden_states=True)
        (out.hidden_states[2].float().square().mean() + out.logits.float().mean()).backward()

    run_both(Rig(models.llama(), models.llama_groups, eager=eager), body)


@both
def test_a_loss_on_an_inner_hidden_state_alone(eager: bool) -> None:
    def body(model: Any) -> None:
        out = model(input_ids=models.tokens(0), output_hidden_states=True)
        out.hidden_states[2].float().square().mean().backward()

    run_both(Rig(models.llama(), models.llama_groups, eager=eager), body)


@both
def test_eval_and_no_grad_between_forward_and_backward(eager: bool) -> None:
    def body(model: nn.Module) -> None:
        loss = models.stack_loss(model, 0)
        model.eval()
        with torch.no_grad():
            models.stack_loss(model, 1)
        with torch.inference_mode():
            models.stack_loss(model, 2)
        model.train()
        loss.backward()

    run_both(stack_rig(eager), body)


def test_a_forward_under_inference_mode_may_be_the_first() -> None:
    model = models.stack()
    plain = copy.deepcopy(model)
    with torch.inference_mode():
        rig = Rig(model, models.stack_groups)
        models.stack_loss(rig.model, 0)
    rig.plain = plain
    for param, value in rig.residency.copies.items():  # the rig's own copies, made under inference mode
        with torch.no_grad():
            rig.residency.copies[param] = value.clone()
    rig.train(models.stack_loss)


@both
def test_a_step_between_two_backwards_raises_what_torch_raises_and_the_next_step_is_right(eager: bool) -> None:
    rig = stack_rig(eager)
    loss = models.stack_loss(rig.model, 0)
    loss.backward(retain_graph=True)
    models.stack_loss(rig.plain, 0).backward()
    rig.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    rig.zero_grad()
    del loss
    rig.train(models.stack_loss)


@both
def test_backward_in_another_thread(eager: bool) -> None:
    def body(model: nn.Module) -> None:
        loss = models.stack_loss(model, 0)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    run_both(stack_rig(eager), body)


def test_two_threads_in_forward_at_once_are_refused() -> None:
    model = models.stack()
    failures: list[BaseException] = []

    def other() -> None:
        try:
            models.stack_loss(model, 1)
        except RuntimeError as error:
            failures.append(error)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    rig = Rig(model, models.stack_groups)
    handle = rig.model.blocks[1].up.register_forward_hook(hook)
    models.stack_loss(rig.model, 0)
    handle.remove()
    assert len(failures) == 1
    assert "two threads" in str(failures[0])
    rig.train(models.stack_loss)


# -- what modules do ---------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("wrap", [Result, Slotted, lambda x: Data(x, {}), lambda x: {"a": [(x,)]}, lambda x: [Result(x)]])
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
    Rig(Net([Wrapped() for _ in range(3)]), models.stack_groups, eager=eager).train(models.stack_loss)


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
        assert rig.residency.peak_numel == rig.largest_unit


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
    run_both(Rig(models.Stack([Keeping() for _ in range(3)]), models.stack_groups, eager=eager), body)


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


@both
def test_a_custom_autograd_function_may_take_a_weight(eager: bool) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w, (grad.flatten(0, -2).t() @ x.flatten(0, -2))

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(x, self.weight)

    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(super().forward(x), self.head.weight[:, :4])  # of a unit that no frame holds

    torch.manual_seed(0)
    Rig(Net([Custom(), models.Block()]), models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_a_custom_autograd_function_may_take_a_captured_parameter(eager: bool) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w, (grad.flatten(0, -2).t() @ x.flatten(0, -2))

    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(super().forward(x), self.captured[0])

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
        assert rig.residency.peak_numel == rig.largest_unit


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
            return super().forward(x) * self.down.bias.detach() + torch.mm(x[0], self.up.weight.detach().t()).mean()

    torch.manual_seed(0)
    Rig(models.Stack([Detached() for _ in range(3)]), models.stack_groups, eager=eager).train(models.stack_loss)


@both
def test_a_module_whose_output_is_its_own_weight_keeps_it_gathered_for_its_parent(eager: bool) -> None:
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
        assert torch.equal(rig.model.generate(models.tokens(0), num_beams=beams, **options), expected)
        rig.check_idle()
    run_both(rig, lambda m: m.encoder(models.tokens(0)).last_hidden_state.float().sum().backward())
    run_both(rig, lambda m: m.encoder.block[0](torch.ones(1, 4, 32, dtype=torch.bfloat16))[0].float().sum().backward())


@both
def test_llama_generates_what_it_generated(eager: bool) -> None:
    rig = Rig(models.llama(), models.llama_groups, eager=eager)
    expected = rig.plain.generate(models.tokens(0), max_new_tokens=6, do_sample=False)
    assert torch.equal(rig.model.generate(models.tokens(0), max_new_tokens=6, do_sample=False), expected)
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
        model.blocks[1].register_full_backward_hook(lambda _m, _i, out, mine=mine: mine.append(out[0].clone()))
    rig.train(loss)
    plain, offloaded = seen.values()
    assert len(plain) == 6
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


# -- accidents ---------------------------------------------------------------------------------------------------------


class Exploding(models.Block):
    """Raises what it is told to."""

    fuse: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.fuse is not None and self.training:
            raise self.fuse
        return out


def exploding_rig(eager: bool) -> Rig:
    torch.manual_seed(0)
    return Rig(models.Stack([Exploding() for _ in range(3)]), models.stack_groups, eager=eager)


@both
def test_an_exception_in_forward_leaves_a_clean_state(eager: bool) -> None:
    rig = exploding_rig(eager)
    rig.model.blocks[1].fuse = ValueError("boom")
    with pytest.raises(ValueError, match="boom"):
        models.stack_loss(rig.model, 0)
    rig.check_idle()
    rig.model.blocks[1].fuse = None
    rig.train(models.stack_loss)


@both
def test_keyboard_interrupt_in_forward_is_cleaned_up_by_the_next_forward(eager: bool) -> None:
    rig = exploding_rig(eager)
    rig.model.blocks[1].fuse = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        models.stack_loss(rig.model, 0)
    rig.model.blocks[1].fuse = None
    rig.train(models.stack_loss)


def test_after_keyboard_interrupt_a_released_parameter_still_raises() -> None:
    from infinity.errors import ParameterReleased

    rig = exploding_rig(True)
    rig.model.blocks[1].fuse = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        models.stack_loss(rig.model, 0)
    with pytest.raises(ParameterReleased, match=r"head\.weight"):
        at_rest(rig.model, "head.weight").sum()
    with pytest.raises(ParameterReleased, match=r"head\.weight"):
        rig.model.head.weight.sum()


@both
def test_an_interrupt_that_an_outer_module_catches_leaves_the_frames_right(eager: bool) -> None:
    class Catching(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                self.blocks[1](x)
            except KeyboardInterrupt:
                self.caught = True
            return self.head(self.blocks[0](x))

    torch.manual_seed(0)
    rig = Rig(Catching([Exploding(), Exploding()]), models.stack_groups, eager=eager)
    for model in (rig.plain, rig.model):
        model.blocks[1].fuse = KeyboardInterrupt()
    rig.train(models.stack_loss)
    assert rig.model.caught


@both
def test_an_exception_in_backward_is_cleaned_up_by_the_next_forward(eager: bool) -> None:
    rig = stack_rig(eager)

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("boom")

    hidden: list[torch.Tensor] = []
    handle = rig.model.blocks[1].register_forward_hook(lambda _m, _a, out: hidden.append(out))
    loss = models.stack_loss(rig.model, 0)
    handle.remove()
    hidden[0].register_hook(fail)
    with pytest.raises(ValueError, match="boom"):
        loss.backward()
    rig.zero_grad()
    rig.train(models.stack_loss)


@both
def test_a_failed_backward_may_be_repeated_without_a_forward(eager: bool) -> None:
    failing = [True]

    def fail(_grad: torch.Tensor) -> None:
        if failing[0]:
            raise ValueError("boom")

    rig = stack_rig(eager)
    hidden: list[torch.Tensor] = []
    handle = rig.model.blocks[0].register_forward_hook(lambda _m, _a, out: hidden.append(out))
    loss = models.stack_loss(rig.model, 0)
    handle.remove()
    hidden[0].register_hook(fail)
    with pytest.raises(ValueError, match="boom"):
        loss.backward(retain_graph=True)
    rig.zero_grad()
    failing[0] = False
    loss.backward()
    models.stack_loss(rig.plain, 0).backward()
    rig.check_grads()
    rig.zero_grad()
    rig.train(models.stack_loss)


def test_a_user_hook_that_fails_before_ours_does_not_end_the_frame_of_another_call() -> None:
    rig = stack_rig()

    def fail(*_: Any) -> None:
        raise ValueError("boom")

    handle = rig.model.blocks[1].register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ValueError, match="boom"):
        models.stack_loss(rig.model, 0)
    handle.remove()
    rig.check_idle()
    rig.train(models.stack_loss)


def test_detached_models_have_no_hooks_left() -> None:
    rig = stack_rig()
    rig.lifecycle.detach()
    rig.lifecycle.detach()
    for module in rig.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert type(module._parameters) is dict
