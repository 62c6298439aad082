"""Training through methods that are not `forward`: bits of the plain loop, with the units gathered
and released as in forward."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.errors import EngineClosed, ParameterReleased
from tests.harness import assert_same, one_thread
from tests.reference import ReferenceAdamW

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) * self.gain

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.gain)


class Clip(nn.Module):
    """Two towers and what a contrastive loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.ModuleList(Block() for _ in range(5))
        self.text = nn.ModuleList(Block() for _ in range(5))
        self.scale = nn.Parameter(torch.ones(()))

    def encode_image(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.image:
            x = block(x)
        return x * self.scale

    def encode_text(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.text:
            x = block(x)
        return x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode_image(x).square().mean() + self.encode_text(x).square().mean()

    def rollout(self, x: torch.Tensor) -> torch.Tensor:
        """A loop of its own around forward, as `generate` is."""
        return self(x) + self(x * 0.5) * self.scale

    def fails(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError(self.encode_image(x).sum().item())

    def halves(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from self.encode_image(x).chunk(2)

    async def later(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode_image(x)

    async def halves_later(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        for half in self.halves(x):
            yield half

    @property
    def temperature(self) -> torch.Tensor:
        raise AssertionError("a property is not evaluated to be refused")

    def features(self, x: torch.Tensor, into: dict[str, torch.Tensor]) -> None:
        into["x"] = self.encode_text(x)


def both_towers(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model.encode_image(x) - model.encode_text(x + 1)).square().mean()


def through_a_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    into: dict[str, torch.Tensor] = {}
    model.features(x, into)
    return into["x"].square().mean()


def of_a_block(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.image[2].gate(model.image[1](x)).square().mean()


LOSSES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "two encoders": (both_towers, ("encode_image", "encode_text")),
    "a loop around forward": (lambda model, x: model.rollout(x), ("rollout",)),
    "forward, whose methods are hooked": (lambda model, x: model(x), ("encode_image",)),
    "a result in a dict": (through_a_dict, ("features",)),
    "of a block": (of_a_block, ()),
}
PLACES = ("cpu", "nvme")


def make() -> Clip:
    torch.manual_seed(0)
    return Clip().to(torch.bfloat16)


def train(
    model: nn.Module, optimizer: Any, loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
) -> list[float]:
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = loss_of(model, torch.randn(2, WIDTH, dtype=torch.bfloat16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(params=PLACES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Clip]:
    """An offloaded model, all of whose units do not fit on the device at a time."""
    policy = inf.Policy(
        params=request.param, optim=request.param, nvme=[str(tmp_path)], ram="min", units=[Block]
    )
    with one_thread():
        model = inf.offload(make(), policy)
        assert isinstance(model, Clip)
        yield model
        inf.handle(model).close()


@pytest.mark.parametrize("case", LOSSES)
def test_a_method_trains_with_the_bits_of_the_plain_loop(model: Clip, case: str) -> None:
    loss_of, names = LOSSES[case]
    if names:
        inf.forward_methods(model, *names)
        inf.forward_methods(model, *names)  # again changes nothing
    else:
        inf.forward_methods(model.image[2], "gate")
    plain = make()
    want = train(plain, ReferenceAdamW([{"params": list(plain.parameters())}], lr=1e-2), loss_of)
    assert train(model, inf.AdamW(model.parameters(), lr=1e-2), loss_of) == want
    assert_same(model, plain)


def test_gather_serves_a_backward_that_comes_later(model: Clip) -> None:
    """The advice of the error that an unhooked method gets, with the backward after the window."""

    def loss_of(trained: Any, x: torch.Tensor) -> torch.Tensor:
        if trained is not model:
            return both_towers(trained, x)
        with pytest.raises(ParameterReleased, match=r'forward_methods\(model, "method"\)'):
            both_towers(trained, x)
        with inf.handle(model).gather(model):
            return both_towers(trained, x)

    plain = make()
    want = train(plain, ReferenceAdamW([{"params": list(plain.parameters())}], lr=1e-2), loss_of)
    assert train(model, inf.AdamW(model.parameters(), lr=1e-2), loss_of) == want
    assert_same(model, plain)


def test_a_method_that_raises_leaves_a_clean_state_and_close_puts_methods_back(
    model: Clip,
) -> None:
    inf.forward_methods(model, "fails", "encode_image")
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(KeyError):
        model.fails(x)
    with torch.no_grad():
        assert torch.equal(model.encode_image(x), make().encode_image(x))
    handle = inf.handle(model)
    handle.close()
    assert "encode_image" not in model.__dict__
    with pytest.raises(EngineClosed):
        model.encode_image(x)
    with pytest.raises(EngineClosed, match="forward_methods"):
        inf.forward_methods(model, "encode_image")


REFUSED = {
    "image": r"Clip\.image is a module.*forward_methods\(model\.image, ",
    "halves": r"Clip\.halves returns a generator",
    "later": r"Clip\.later returns a coroutine",
    "halves_later": r"Clip\.halves_later returns a generator",
    "temperature": r"Clip\.temperature is a property",
}


def test_mistakes_are_named(model: Clip) -> None:
    with pytest.raises(ValueError, match="no method 'encode_sound'"):
        inf.forward_methods(model, "encode_sound")
    with pytest.raises(ValueError, match="no method 'scale'"):
        inf.forward_methods(model, "scale")
    with pytest.raises(ValueError, match="got no names"):
        inf.forward_methods(model)
    for name, why in REFUSED.items():
        with pytest.raises(ValueError, match=why):
            inf.forward_methods(model, "encode_image", name)
    assert "encode_image" not in model.__dict__
    with pytest.raises(ValueError, match="0 offloaded models"):
        inf.forward_methods(nn.Linear(2, 2), "forward")
