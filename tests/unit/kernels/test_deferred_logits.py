"""Logits that are not computed give no answer that an ordinary head's would not give: they raise
where they cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf

ROWS, CLASSES = (2, 5), 13
TARGET = torch.arange(10) % CLASSES


def pair() -> list[nn.Module]:
    """An ordinary model of hidden layer and head, and the same with a tiled loss."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    tiled = copy.deepcopy(plain)
    inf.tile_loss(tiled, tiles=3, head="2")
    return [plain, tiled]


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 2, 80).view(*ROWS, 8)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, CLASSES), TARGET)


def same(does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """`does(model, logits)` gives the same for both models, in value and dtype, and in whether it
    has a gradient."""
    found = [does(model, model(inputs())) for model in pair()]
    torch.testing.assert_close(found[1] + 0, found[0] + 0)
    assert found[1].requires_grad == found[0].requires_grad


def set_column(logits: torch.Tensor) -> None:
    logits[..., 3] = -5.0


def scale_rows(logits: torch.Tensor) -> None:
    logits[:, 1:].mul_(3.0)


def fill_through_a_view(logits: torch.Tensor) -> None:
    with torch.no_grad():
        logits.detach()[..., 2].fill_(4.0)


WRITES: list[Callable[[torch.Tensor], Any]] = [
    set_column,
    scale_rows,
    lambda x: x.mul_(3.0),
    lambda x: x.view(-1, CLASSES).masked_fill_(torch.arange(CLASSES) == 1, -9.0),
    lambda x: x.data.mul_(2.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_the_logits_is_in_their_loss(
    write: Callable[[torch.Tensor], Any],
) -> None:
    def does(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
        write(logits)
        return loss_of(logits)

    same(does)


def test_a_write_through_a_view_of_computed_logits_is_not_lost() -> None:
    found = []
    for model in pair():
        logits = model(inputs())
        fill_through_a_view(logits)
        found.append(loss_of(logits).detach())
    torch.testing.assert_close(found[1], found[0])


def test_a_cast_is_a_copy_that_writes_do_not_reach() -> None:
    def does(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
        wide = logits.double()
        shifted = logits[..., :-1, :].contiguous()
        logits.mul_(2.0)
        return loss_of(wide) + shifted.sum()

    same(does)


def test_hooks_and_gradients_of_logits_are_seen() -> None:
    def hooked(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        logits.register_hook(seen.append)
        loss_of(logits).backward()
        return seen[0]

    def retained(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
        logits.retain_grad()
        loss_of(logits).backward()
        assert logits.grad is not None
        return logits.grad

    same(hooked)
    same(retained)
    for model in pair():
        logits = model(inputs())
        assert logits.requires_grad
        assert not logits.is_leaf
        assert logits.grad_fn is not None


def test_logits_of_no_grad_have_no_graph_later_either() -> None:
    """Otherwise a reference model (distillation, DPO) would be trained."""
    for model in pair():
        with torch.no_grad():
            logits = model(inputs())
        assert not logits.requires_grad
        assert not (logits + 0).requires_grad
        assert not loss_of(logits).requires_grad
        with torch.inference_mode():
            logits = model(inputs())
        assert not (logits + 0).requires_grad


@pytest.mark.parametrize("offloaded", [False, True])
def test_logits_of_weights_that_have_changed_are_refused(offloaded: bool) -> None:
    model = pair()[1]
    if offloaded:
        model = inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram="64MiB"))
    opt: Any = (inf.AdamW if offloaded else torch.optim.AdamW)(model.parameters(), lr=0.1)
    logits = model(inputs())
    kept = logits.clone()
    early = model(inputs())
    early.argmax(-1)
    loss_of(logits).backward()
    opt.step()
    logits._computed = None  # type: ignore[attr-defined]
    for use in (
        lambda: logits.argmax(-1),
        lambda: logits[:, -1],
        lambda: loss_of(logits),
        logits.bfloat16,
    ):
        with pytest.raises(RuntimeError, match="modified in place since"):
            use()
    torch.testing.assert_close(early.argmax(-1), kept.argmax(-1))  # computed before


def test_logits_of_hidden_states_that_have_changed_are_refused() -> None:
    head = pair()[1][2]  # type: ignore[index]
    hidden = torch.ones(2, 8)
    logits = head(hidden)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place since"):
        logits.sum()


def test_a_reentrant_checkpoint_around_the_head_is_refused() -> None:
    """Its gradients were silently lost."""
    model = pair()[1]
    logits = checkpoint(model, inputs().requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss_of(logits)


def test_a_hook_that_alters_the_heads_output_alters_it_once() -> None:
    def does(model: Any, _logits: torch.Tensor) -> torch.Tensor:
        model[2].register_forward_hook(lambda _module, _args, output: output * 2)
        return loss_of(model(inputs()))

    same(does)


def test_conversions_that_are_no_casts_are_those_of_the_values() -> None:
    same(lambda _model, logits: logits.to(torch.int64).float())
    assert pair()[1](inputs()).view(torch.int32).dtype == torch.int32


def test_the_loss_under_autocast_is_fp32_and_does_not_round_logits_made_outside() -> None:
    for late in (False, True):
        found = []
        for model in pair():
            if late:
                logits = model(inputs())
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(loss_of(logits))
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(loss_of(model(inputs())))
        assert found[1].dtype == torch.float32
        torch.testing.assert_close(found[1], found[0], rtol=1e-6 if late else 2e-3, atol=0)
