"""After exceptions and interrupts in forward and backward training can continue; rows of
test_matrix.py have the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.hooks import models
from tests.unit.hooks.both_models import both, stack_rig
from tests.unit.hooks.rig import Rig, at_rest


class Exploding(models.Block):
    """Raises the exceptions that the test sets."""

    fuse: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.fuse is not None and self.training:
            raise self.fuse
        return out


def exploding_rig(eager: bool) -> Rig:
    torch.manual_seed(0)
    return Rig(models.Stack([Exploding() for _ in range(3)]), models.stack_groups, eager=eager)


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
