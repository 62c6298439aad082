"""The order of calls of every update mode is the one that tests/data/call_order has, on one rank
and on two.

Files of modes that are nearly alike say where they differ. INFINITY_RECORD_CALL_ORDER=1 writes the
files anew; look at the difference before it is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity.errors import StateInvalid
from tests import harness
from tests.call_order import Recorder, recording
from tests.device import simulated
from tests.distributed.ranks import on_ranks

EXPECTED = Path(__file__).parent / "data" / "call_order"
WIDTH = 128  # of which two ranks both get a part
NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}

MODES: dict[str, dict[str, Any]] = {
    "deferred": {**NVME},
    "deferred_2_generations": {**NVME, "generations": 2},
    "backward": {**NVME, "update": "backward"},
    "speculative": {**NVME, "update": "backward", "generations": 2},
    "delayed": {**NVME, "update": "delayed", "delayed_warmup": 1},
    "device": {**NVME, "update_on": "device"},
}
ON_SIMULATED = {  # gradients and updates by way of a device with memory of its own
    "device": MODES["device"],
    "backward_on_gpu": MODES["backward"],
    "speculative_on_gpu": MODES["speculative"],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Small(nn.Module):
    """Three units and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().pow(2).mean()


class Breaks(torch.autograd.Function):
    """Backward raises here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the middle of backward")


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=generator).bfloat16()


def clips(values: dict[str, Any]) -> bool:
    return values.get("update") != "backward" or "generations" in values


@dataclasses.dataclass
class Loop:
    """A training loop that says what it does next."""

    model: nn.Module
    optimizer: Any
    recorder: Recorder
    clips: bool

    def micro(self, number: int, what: str) -> None:
        self.recorder.told(f"forward, {what}")
        loss = self.model(batch(number))
        self.recorder.told(f"backward, {what}")
        loss.backward()

    def step(self, max_norm: float) -> None:
        if self.clips:
            self.recorder.told(f"clip_grad_norm_ to {max_norm:g}")
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.recorder.told("opt.step()")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read(self) -> None:
        handle = inf.handle(self.model)
        self.recorder.told("gather() of the head, read")
        with handle.gather(self.model.head.weight):
            self.model.head.weight.detach().float().sum()

    def broken(self, number: int) -> None:
        """A backward that raises when the head and the last block are done."""
        first = self.model.blocks[0]
        hook = first.register_forward_hook(lambda _module, _args, output: Breaks.apply(output))
        self.recorder.told("forward, of a backward that will raise")
        loss = self.model(batch(number))
        self.recorder.told("backward, raises")
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        hook.remove()

    def tried(self, what: str, function: Callable[[], object]) -> None:
        """Run the call; add a line with the error that it raised."""
        self.recorder.told(what)
        try:
            function()
        except (StateInvalid, RuntimeError, OSError) as error:
            self.recorder.told(f"raised {type(error).__name__}")


def whole(loop: Loop) -> None:
    """Three steps: clipped to nothing after two micro-batches; after an evaluation and a window;
    after a look at the states."""
    handle = inf.handle(loop.model)
    with handle.no_sync():
        loop.micro(0, "micro-batch 0 of 2 in no_sync")
    loop.micro(1, "micro-batch 1 of 2")
    loop.step(1e-3)
    loop.recorder.told("evaluation")
    with torch.no_grad():
        loop.model(batch(2))
    loop.read()
    with handle.no_sync():
        loop.micro(3, "micro-batch 0 of 2 in no_sync")
    loop.micro(4, "micro-batch 1 of 2")
    loop.step(1e6)
    with handle.no_sync():
        loop.micro(5, "micro-batch 0 of 2 in no_sync")
    loop.micro(6, "micro-batch 1 of 2")
    loop.read()
    loop.step(1e6)
    loop.recorder.told("gather() of the head, write")
    with handle.gather(loop.model.head.weight), torch.no_grad():
        loop.model.head.weight.mul_(0.5)
    loop.recorder.told("flush()")
    handle.flush()


def aborted(loop: Loop) -> None:
    """A step; then a backward that raises, and what is tried after it."""
    loop.micro(0, "whole")
    loop.step(1e6)
    loop.broken(1)
    loop.tried("opt.step() after the backward that raised", loop.optimizer.step)
    loop.tried("zero_grad()", loop.optimizer.zero_grad)
    loop.tried("forward, no_grad", lambda: torch.no_grad()(loop.model)(batch(2)))
    loop.tried("flush()", inf.handle(loop.model).flush)


def undone(loop: Loop) -> None:
    """A step whose update is reported as failed; with two generations it is undone, and training
    continues."""
    loop.micro(0, "whole")
    loop.step(1e6)
    loop.micro(1, "whole")
    loop.step(1e6)
    inf.handle(loop.model).pipeline.set_fault(StateInvalid("an update failed, says the test"))
    loop.tried("flush() after an update that failed", inf.handle(loop.model).flush)
    loop.micro(2, "whole")
    loop.tried("opt.step()", lambda: loop.step(1e6))
    loop.tried("flush()", inf.handle(loop.model).flush)


SCENARIOS: dict[str, Callable[[Loop], None]] = {
    "steps": whole,
    "aborted": aborted,
    "undone": undone,
}


def recorded(values: dict[str, Any], place: Path, scenario: str) -> list[str]:
    """Record the calls of the engine's parts in this scenario."""
    with harness.one_thread(), recording() as recorder:
        torch.manual_seed(0)
        model = Small().bfloat16()
        inf.offload(model, inf.Policy(**values, nvme=place))
        try:
            optimizer = inf.AdamW(model.parameters(), lr=1e-3)
            loop = Loop(model, optimizer, recorder, clips(values))
            recorder.on = True
            SCENARIOS[scenario](loop)
            recorder.told("close()")
        finally:
            try:
                inf.handle(model).close()
            except StateInvalid:  # a step that is half done stays so
                recorder.told("raised StateInvalid")
            recorder.on = False
    return recorder.lines


UNIT = re.compile(r"\b(?:blocks\.\d|head)\b")


def folded(lines: list[str]) -> list[str]:
    """The same, shorter: neighbouring events of one unit are a line, and a section that repeats
    an earlier one names it."""
    sections: list[tuple[str, list[str]]] = [("# before", [])]
    unit: str | None = None
    for line in lines:
        named = UNIT.search(line)
        about = named[0] if named else ""
        if line.startswith("# "):
            sections.append((line, []))
            about = "#"
        elif sections[-1][1] and about == unit and len(sections[-1][1][-1]) + len(line) < 98:
            sections[-1][1][-1] += f"; {line}"
        else:
            sections[-1][1].append(line)
        unit = about
    first: dict[tuple[str, ...], str] = {}
    found = []
    for title, events in sections[0 if sections[0][1] else 1 :]:
        known = first.setdefault(tuple(events), title) if events else title
        found += [title, *events] if known is title else [f"{title}, as: {known[2:]}"]
    return found


LIKE_DEFERRED = ("deferred_2_generations", "deferred_local_sums", "delayed", "device")


def base_of(name: str) -> str | None:
    """Name the file that this one is told apart from; None for a file that holds all lines."""
    mode, scenario, ranks = name.split(".")
    if mode.endswith("_on_gpu"):
        return f"{mode.removesuffix('_on_gpu')}.{scenario}.{ranks}"
    if mode in LIKE_DEFERRED and scenario != "undone":
        return f"deferred.{scenario}.{ranks}"
    return None


def expected(name: str) -> list[str]:
    return (EXPECTED / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def apart(base: list[str], lines: list[str]) -> list[str]:
    """Lines that are not those of the base, each group behind its place there."""
    found = []
    for _, begin, end, first, last in difflib.SequenceMatcher(
        None, base, lines, autojunk=False
    ).get_opcodes():
        if base[begin:end] != lines[first:last]:
            removed = [f"-{line}" for line in base[begin:end]]
            found += [f"@ {begin + 1}", *removed, *(f"+{line}" for line in lines[first:last])]
    return found


def check(recorded: list[str], name: str) -> None:
    """These are the lines that are expected."""
    lines, base = folded(recorded), base_of(name)
    if base is not None:
        lines = [f"as {base}, but:", *apart(expected(base), lines)]
    if os.environ.get("INFINITY_RECORD_CALL_ORDER") == "1":
        (EXPECTED / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == expected(name)


@pytest.mark.parametrize("scenario", ["steps", "aborted"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "device"])
def test_one_rank(mode: str, scenario: str, tmp_path: Path) -> None:
    check(recorded(MODES[mode], tmp_path, scenario), f"{mode}.{scenario}.1")


@pytest.mark.parametrize("mode", ["deferred_2_generations", "speculative"])
def test_a_step_that_is_undone(mode: str, tmp_path: Path) -> None:
    check(recorded(MODES[mode], tmp_path, "undone"), f"{mode}.undone.1")


@pytest.mark.parametrize("scenario", ["steps", "aborted"])
@pytest.mark.parametrize("mode", ON_SIMULATED)
def test_one_rank_on_a_simulated_device(
    mode: str, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated(monkeypatch, seed=len(mode)):
        lines = recorded(ON_SIMULATED[mode], tmp_path, scenario)
    check(lines, f"{mode}.{scenario}.1")


@dataclasses.dataclass(frozen=True)
class Recording:
    """Run one rank. gpu: on a simulated device."""

    values: tuple[tuple[str, Any], ...]
    scenario: str
    gpu: bool = False

    def __call__(self, rank: int, place: Path) -> list[str]:
        assert dist.get_world_size() == 2
        device = (
            simulated(pytest.MonkeyPatch(), seed=rank) if self.gpu else contextlib.nullcontext()
        )
        with device:
            return recorded(dict(self.values), place, self.scenario)


LOCAL = {"zero": 1, "params": "device", "optim": "nvme", "ram": "min", "accumulate": "local"}


@pytest.mark.parametrize(
    ("mode", "values", "gpu"),
    [
        # Generations alone differ in what one rank does.
        *(
            (mode, values, mode == "device")
            for mode, values in MODES.items()
            if mode != "deferred_2_generations"
        ),
        ("deferred_local_sums", LOCAL, False),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_two_ranks(mode: str, values: dict[str, Any], gpu: bool, tmp_path: Path) -> None:
    """Both do the same."""
    first, second = on_ranks(Recording(tuple(values.items()), "steps", gpu), tmp_path / "run", 2)
    assert first == second
    check(first, f"{mode}.steps.2")


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_two_ranks_whose_backward_raises(mode: str, tmp_path: Path) -> None:
    first, second = on_ranks(
        Recording(tuple(MODES[mode].items()), "aborted", False), tmp_path / "run", 2
    )
    assert first == second
    check(first, f"{mode}.aborted.2")
