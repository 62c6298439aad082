"""Whatever a loop does between forward and backward, numbers are those of the plain loop and
nothing stays held."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.hooks import models
from tests.unit.hooks.both_models import both, run_both, stack_rig
from tests.unit.hooks.rig import Rig

# -- checkpointing ---------------------------------------------------------------------------------


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
    Rig(Net([models.Block() for _ in range(3)]), models.stack_groups, eager=eager).train(
        models.stack_loss
    )


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_passed_into_a_checkpoint_by_their_parent_are_bit_equal(
    reentrant: bool, eager: bool
) -> None:
    class Net(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            x = x.clone() if x.requires_grad else x.clone().requires_grad_()
            return checkpoint(
                lambda x, w: torch.nn.functional.linear(x, w),
                x,
                self.head.weight,
                use_reentrant=reentrant,
            )

    torch.manual_seed(0)
    Rig(Net([models.Block() for _ in range(2)]), models.stack_groups, eager=eager).train(
        models.stack_loss
    )


# -- orders of forward and backward ----------------------------------------------------------------


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
    # the rig's own copies, made under inference mode
    for param, value in rig.unsharder.copies.items():
        with torch.no_grad():
            rig.unsharder.copies[param] = value.clone()
    rig.train(models.stack_loss)


@both
def test_a_step_between_two_backwards_raises_what_torch_raises_and_the_next_step_is_right(
    eager: bool,
) -> None:
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
