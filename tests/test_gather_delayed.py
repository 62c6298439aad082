"""`handle.gather()`, and evaluation, where update="delayed" keeps two ages of the parameters: no
pass mixes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import harness, models
from tests.delayed import assert_same_states, opened, reference_of, take_step
from tests.harness import Training, policy
from tests.test_states_in_modes import LLAMA, MIN, NAME, small


@pytest.mark.parametrize("where", ["forward and backward", "forward", "backward"])
def test_a_training_pass_of_what_gather_shows_is_refused(where: str, tmp_path: Path) -> None:
    """Otherwise forward and backward of one pass would compute with different values."""
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=1)
    plain, reference = reference_of(LLAMA, warmup=1)
    batches = models.token_batches(6)
    with harness.one_thread():
        for batch in batches[:3]:
            take_step(model, optimizer, batch)
            take_step(plain, reference, batch)
        param = dict(model.named_parameters())[NAME]
        if where == "backward":
            loss = models.loss_of(model, batches[3])
            with (
                pytest.raises(RuntimeError, match=r"gather\(\).*update='delayed'"),
                handle.gather(param),
            ):
                loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"gather\(\).*update='delayed'"):
                with handle.gather(param):
                    loss = models.loss_of(model, batches[3])
                    if where == "forward and backward":
                        loss.backward()
                loss.backward()
        optimizer.zero_grad()
        with handle.gather(param), torch.no_grad():
            models.loss_of(model, batches[3])  # an evaluation takes the newest values, too
        for batch in batches[3:]:
            assert take_step(model, optimizer, batch) == take_step(plain, reference, batch)
    assert_same_states(model, handle, reference)
    handle.close()


def test_a_training_pass_in_gather_computes_as_ever_where_no_update_is_delayed(
    tmp_path: Path,
) -> None:
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=10)
    plain, reference = reference_of(LLAMA, warmup=10)
    with harness.one_thread():
        for batch in models.token_batches(3):
            with handle.gather(model.parameters()):
                loss = models.loss_of(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == take_step(plain, reference, batch)
    assert_same_states(model, handle, reference)
    handle.close()


def test_a_weight_that_gather_shows_is_no_part_of_a_training_pass(tmp_path: Path) -> None:
    """No module is called that would hold its unit: the window itself goes into the graph."""
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=0)
    with harness.one_thread():
        for batch in models.token_batches(2):
            take_step(model, optimizer, batch)
        param = dict(model.named_parameters())[NAME]
        with handle.gather(param):
            loss = (param * 2).sum()
            with pytest.raises(RuntimeError, match=r"gather\(\).*update='delayed'"):
                loss.backward()
    handle.close()


def test_gather_in_a_backward_does_not_show_what_is_older_than_the_update(tmp_path: Path) -> None:
    """Otherwise a write would reset the parameter to its value before the update."""
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=0)
    with harness.one_thread():
        batches = models.token_batches(4)
        for batch in batches[:2]:
            take_step(model, optimizer, batch)
        param = dict(model.named_parameters())[NAME]

        def clamp(_: torch.Tensor) -> None:
            with torch.no_grad(), handle.gather(param):
                param.clamp_(-1e-3, 1e-3)

        def hook(_module: nn.Module, _args: object, out: Any) -> None:
            # backward has passed the layers after it by then
            (out[0] if isinstance(out, tuple) else out).register_hook(clamp)

        hooked = model.model.layers[0].register_forward_hook(hook)
        loss = models.loss_of(model, batches[2])
        hooked.remove()
        with pytest.raises(RuntimeError, match=r"gather\(\).*update='delayed'"):
            loss.backward()
        optimizer.zero_grad()
        # allowed between the passes, with the newest values
        with torch.no_grad(), handle.gather(param):
            shown = param.detach().float()
        assert torch.equal(shown, handle.optimizer_state(param)["master"].bfloat16().float())
        take_step(model, optimizer, batches[3])
    handle.close()


class _Slope(nn.Module):
    """Evaluation that differentiates inside, as forces are the slope of an energy."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, batch: models.Batch) -> torch.Tensor:
        with torch.enable_grad():
            loss = models.loss_of(self.body, batch)
            loss.backward()
        return loss.detach()


def test_a_backward_inside_an_evaluation_takes_the_parameters_of_its_forward(
    tmp_path: Path,
) -> None:
    training = Training(lambda: _Slope(models.llama()), steps=6, accumulation=1, max_norm=None)
    model, optimizer, handle = opened(
        training, policy(tmp_path, **MIN, update="delayed", delayed_warmup=0)
    )
    with harness.one_thread():
        for batch in models.token_batches(3):
            take_step(model.body, optimizer, batch)
        plain = training.model()
        plain.load_state_dict(model.state_dict())
        batch = models.token_batches(4)[3]
        with torch.no_grad():
            assert model(batch).item() == plain(batch).item()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            assert torch.equal(handle.full_grad(mine).to(theirs.dtype), theirs.grad)  # type: ignore[union-attr]
    handle.close()


@pytest.mark.parametrize("look", ["evaluation", "state_dict", "gather"])
def test_what_was_looked_at_before_an_update_shows_that_update_after_it(
    look: str, tmp_path: Path
) -> None:
    """Also if the step before did not update the unit, so that training computes with the same
    values."""
    model, optimizer, handle = small(tmp_path, "delayed", delayed_warmup=0)
    plain, reference = reference_of(LLAMA, warmup=0)
    param = dict(model.named_parameters())[NAME]
    with harness.one_thread():
        for index, batch in enumerate(models.token_batches(4)):
            for each, stepper in ((model, optimizer), (plain, reference)):
                models.loss_of(each, batch).backward()
                for name, other in each.named_parameters():
                    if index == 1 and name.startswith("model.layers.1."):
                        other.grad = None
                if each is model and look == "evaluation":
                    with torch.no_grad():
                        models.loss_of(model, batch)
                elif each is model and look == "state_dict":
                    model.state_dict()
                elif each is model:
                    with handle.gather(param):
                        pass
                stepper.step()
                stepper.zero_grad()
            assert_same_states(model, handle, reference)
        with torch.no_grad(), handle.gather(param):
            param[0, 0] = 1.0  # and nothing else of it
        reference.newest[NAME][0, 0] = 1.0
    assert torch.equal(model.state_dict()[NAME], reference.newest[NAME])
    handle.close()
