"""A result may leave a block in any way: returned, in the batch, in an attribute, an object, a
closure, an exception, through a hook on an inner layer. Numbers are those of the plain loop, in
every update mode, with more blocks than fit in memory at a time."""

from __future__ import annotations

import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.hooks import graph_calls
from infinity.errors import ReleasedInBackward
from tests.harness import assert_same, one_thread, values_of
from tests.marks import alternating
from tests.reference import ReferenceAdamW
from tests.slopes import COSTS

WIDTH = 8
Result = tuple[torch.Tensor, torch.Tensor]  # a block's output and its part of the loss


class Done(Exception):
    """Ends a forward early, with its result."""


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("value",)


class Carrier:
    """Holds what blocks do not return."""

    def __init__(self, rows: int, blocks: int) -> None:
        self.batch: dict[str, Any] = {}
        self.queue: deque[Result] = deque()
        self.nested: list[Any] = [[[[]]]]
        self.slots = Slots()
        self.namespace = types.SimpleNamespace()
        self.buffer = torch.zeros(blocks, rows, WIDTH, dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, index: int, way: str) -> None:
        super().__init__()
        self.index, self.way = index, way
        self.norm, self.lin = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, carrier: Carrier) -> Any:
        return WAYS[self.way][0](self, carrier, (y := self.compute(x), y.square().mean()))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.lin(x) @ self.lin.weight.t())) * self.scale


class Net(nn.Module):
    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, way) for index, way in enumerate(ways))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        carrier, parts = Carrier(len(x), len(self.blocks)), []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, part = WAYS[block.way][1](block, carrier, x)
            parts.append(part)
        return [x.float().square().mean(), *parts]


def _return(_block: Block, _carrier: Carrier, result: Result) -> Any:
    return result


def _called(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    return block(x, carrier)


def _put(name: str) -> tuple[Callable[..., None], Callable[..., Any]]:
    """A way by an attribute of the carrier's parts, or of the block."""

    def where(block: Block, carrier: Carrier) -> Any:
        return block if name == "own" else getattr(carrier, name)

    def put(block: Block, carrier: Carrier, result: Result) -> None:
        where(block, carrier).value = result

    def take(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
        assert block(x, carrier) is None
        result, where(block, carrier).value = where(block, carrier).value, None
        return result

    return put, take


def _by(
    keep: Callable[[Carrier, Result], Any], take: Callable[[Carrier], Result]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """A way by a container of the carrier's."""

    def put(_block: Block, carrier: Carrier, result: Result) -> None:
        keep(carrier, result)

    def called(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
        assert block(x, carrier) is None
        return take(carrier)

    return put, called


def _closure(_block: Block, _carrier: Carrier, result: Result) -> Callable[[], Result]:
    return lambda: result


def _call_closure(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    return block(x, carrier)()


def _generator(_block: Block, _carrier: Carrier, result: Result) -> Iterator[torch.Tensor]:
    yield from result


def _exhaust(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    return tuple(block(x, carrier))


def _raise(_block: Block, _carrier: Carrier, result: Result) -> None:
    raise Done(result)


def _catch(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    try:
        block(x, carrier)
    except Done as done:
        return done.args[0]
    raise AssertionError("the block has returned")


def _in_buffer(block: Block, carrier: Carrier, result: Result) -> torch.Tensor:
    carrier.buffer[block.index] = result[0]
    return result[1]


def _from_buffer(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    part = block(x, carrier)
    return carrier.buffer[block.index].clone(), part


def _hooked(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    """The features of an inner layer are the block's part of the loss."""
    features: list[torch.Tensor] = []
    handle = block.lin.register_forward_hook(lambda _module, _args, out: features.append(out))
    y, _ = block(x, carrier)
    handle.remove()
    return y, features[0].float().square().mean()


def _only_hooked(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    """A hook on an inner layer takes the result that the model uses; the block's own output is
    dropped."""
    outputs: list[torch.Tensor] = []
    handle = block.norm.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    block(x, carrier)
    handle.remove()
    return outputs[0], outputs[0].square().mean()


def _modified(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
    y, _ = block(x, carrier)
    y += 1  # in place: another node has made it now
    return y, y.square().mean()


def _checkpointed(reentrant: bool) -> Callable[..., Any]:
    def call(block: Block, carrier: Carrier, x: torch.Tensor) -> Any:
        return checkpoint(block, x, carrier, use_reentrant=reentrant)

    return call


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "returned": (_return, _called),
    "batch": _by(
        lambda carrier, result: carrier.batch.update(h=result[0], part=result[1]),
        lambda carrier: (carrier.batch.pop("h"), carrier.batch.pop("part")),
    ),
    "queue": _by(
        lambda carrier, result: carrier.queue.append(result),
        lambda carrier: carrier.queue.popleft(),
    ),
    "nested list": _by(
        lambda carrier, result: carrier.nested[0][0][0].append(result),
        lambda carrier: carrier.nested[0][0][0].pop(),
    ),
    "namespace": _put("namespace"),
    "slots": _put("slots"),
    "attribute": _put("own"),
    "closure": (_closure, _call_closure),
    "generator": (_generator, _exhaust),
    "exception": (_raise, _catch),
    "buffer": (_in_buffer, _from_buffer),
    "inner hook": (_return, _hooked),
    "inner hook alone": (_return, _only_hooked),
    "modified": (_return, _modified),
    "checkpoint": (_return, _checkpointed(reentrant=False)),
    "reentrant checkpoint": (_return, _checkpointed(reentrant=True)),
}

MODES: dict[str, dict[str, Any]] = {
    "deferred": {},
    "backward": {"update": "backward"},
    "speculative": {"update": "backward", "generations": 2},
    "delayed": {"update": "delayed"},
}


def make(ways: tuple[str, ...]) -> Net:
    torch.manual_seed(0)
    return Net(ways).to(torch.bfloat16)


def train(model: nn.Module, optimizer: Any) -> list[float]:
    """Three steps."""
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
        loss = sum(model(x.requires_grad_()), torch.zeros(()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def freeze(model: Net) -> None:
    """Leave the first block, the last, and the norms to learn."""
    for block in model.blocks[1:-1]:
        assert isinstance(block, Block)
        block.lin.requires_grad_(False)
        block.scale.requires_grad_(False)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def reference(ways: tuple[str, ...], *, frozen: bool) -> tuple[list[float], dict[str, Any]]:
    model = make(ways)
    if frozen:
        freeze(model)
    optimizer = ReferenceAdamW([{"params": trained(model)}], lr=1e-2)
    return train(model, optimizer), values_of(model)


def offloaded(
    ways: tuple[str, ...], directory: Path, *, mode: str, frozen: bool, ram: str = "min"
) -> tuple[list[float], dict[str, Any]]:
    model = make(ways)
    if frozen:
        freeze(model)
    places = {"params": "nvme", "optim": "nvme"} if ram == "min" else {}
    policy = inf.Policy(nvme=[str(directory)], ram=ram, **places, **MODES[mode])
    inf.offload(model, policy)
    try:
        optimizer = inf.AdamW(trained(model), lr=1e-2)
        losses = train(model, optimizer)
        return losses, values_of(model)
    finally:
        inf.handle(model).close()


def check(ways: tuple[str, ...], directory: Path, *, mode: str, frozen: bool) -> None:
    with one_thread():
        got = offloaded(ways, directory, mode=mode, frozen=frozen)
        if mode == "delayed":  # another algorithm than the plain loop's
            want = offloaded(ways, directory, mode=mode, frozen=frozen, ram="1GiB")
        else:
            want = reference(ways, frozen=frozen)
    assert_same(got, want)


@pytest.mark.parametrize("begin", range(4))
def test_each_way_out_of_a_block_has_the_bits_of_the_plain_loop(begin: int, tmp_path: Path) -> None:
    """Four ways, by three blocks each, one after the other."""
    ways = tuple(way for way in list(WAYS)[begin::4] for _ in range(3))
    check(ways, tmp_path, mode="deferred", frozen=False)


@given(
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=8, max_size=40).map(tuple),
    mode=st.sampled_from(sorted(MODES)),
    frozen=st.booleans(),
)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
def test_ways_drawn_at_random_have_the_bits_of_the_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...], mode: str, frozen: bool
) -> None:
    check(ways, tmp_path_factory.mktemp("ways"), mode=mode, frozen=frozen)


def test_a_backward_that_no_walk_has_prepared_is_a_named_error_and_the_next_one_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The net below the walk: freed memory is never read."""
    ways = ("queue",) * 10
    monkeypatch.setattr(graph_calls, "_hook", lambda _node, _hook: None)
    with one_thread():
        model = make(ways)
        inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=[str(tmp_path)], ram="min"))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        with pytest.raises(ReleasedInBackward, match=r"blocks\.\d\..* from its forward on"):
            train(model, optimizer)
        monkeypatch.undo()
        optimizer.zero_grad()
        losses = train(model, optimizer)
        assert losses == reference(ways, frozen=False)[0]
        inf.handle(model).close()


# -- what the search costs, and whose graphs it takes for the model's ------------------------------


def noted(model: nn.Module) -> int:
    return sum(map(len, inf.handle(model).parts.lifecycle.backward._calls))


def x_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, WIDTH, dtype=torch.bfloat16, generator=generator)


def bound(modules: int) -> int:
    """Calls that are noted at most, where the graph of one pass lives."""
    return 2 * max(graph_calls.ROOM, (graph_calls.HOOKED_MAX + 1) * modules)


@pytest.mark.parametrize("way", ["returned", "queue"])
def test_the_calls_noted_have_a_bound_whatever_a_loop_keeps(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_calls, "HOOKED_MAX", 3)
    monkeypatch.setattr(graph_calls, "UNHOOKED_MAX", 5)
    model = inf.offload(make((way,) * 8), inf.Policy(nvme=[str(tmp_path)]))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    for step in range(25):
        loss = sum(model(x_of(step)), torch.zeros(()))
        loss.backward()  # the last one's graph lives until here
        optimizer.step()
        optimizer.zero_grad()
        assert noted(model) <= bound(9)
    for step in range(25):
        kept = model(x_of(step))
        assert noted(model) <= bound(9)
    for step in range(25):
        in_a_thread(lambda step=step: len(model(x_of(step))))
        assert noted(model) <= 2 * bound(9)
    del kept
    for _ in range(25):
        with inf.handle(model).gather(model):
            (model.blocks[0].scale * 1).sum()
        assert noted(model) <= 2 * bound(9)
    inf.handle(model).close()


def in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_another_models_graph_in_another_thread_is_left_alone(tmp_path: Path) -> None:
    """Its nodes have the numbers of this model's."""
    model = inf.offload(make(("returned",) * 8), inf.Policy(nvme=[str(tmp_path)]))
    kept = in_a_thread(lambda: model(x_of(0)))
    plain = make(("returned",) * 8)

    def penalty() -> bool:
        x = x_of(1).requires_grad_()
        loss = plain(x)[0] ** 2
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.float().square().sum().backward()
        return next(plain.parameters()).grad is not None

    assert in_a_thread(penalty)
    sum(kept, torch.zeros(())).backward()
    inf.handle(model).close()


@pytest.mark.parametrize("shift", [0, 7, 31])
def test_forwards_of_two_threads_have_one_backward(shift: int, tmp_path: Path) -> None:
    """Each thread numbers its nodes from 0, and the second takes the first one's identity over."""

    def losses(model: Any) -> torch.Tensor:
        def feature(nodes: int, block: int) -> torch.Tensor:
            p = torch.zeros(1, requires_grad=True)
            for _ in range(nodes):
                p = p.tanh()
            found: list[torch.Tensor] = []
            hook = model.blocks[block].lin.register_forward_hook(
                lambda _module, _args, out: found.append(out)
            )
            model(x_of(block))
            hook.remove()
            return found[0].float().square().mean()

        return in_a_thread(lambda: feature(0, 3)) + in_a_thread(lambda: feature(shift, 7))

    with one_thread():
        plain, model = make(("returned",) * 10), make(("returned",) * 10)
        inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=[str(tmp_path)], ram="min"))
        for each, optimizer in (
            (plain, ReferenceAdamW([{"params": list(plain.parameters())}], lr=1e-2)),
            (model, inf.AdamW(model.parameters(), lr=1e-2)),
        ):
            for _ in range(2):
                losses(each).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(model, plain)
        inf.handle(model).close()


def test_interrupted_forwards_leave_no_calls(tmp_path: Path) -> None:
    model = inf.offload(make(("returned",) * 8), inf.Policy(nvme=[str(tmp_path)]))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[6].lin.register_forward_pre_hook(interrupt)
    for step in range(40):
        with pytest.raises(KeyboardInterrupt):
            model(x_of(step))
        assert noted(model) <= graph_calls.ROOM
    hook.remove()
    inf.handle(model).close()


# -- programs that run backward more than once -----------------------------------------------------


class KeptWeight(torch.autograd.Function):
    """Keeps the weight on `ctx`, where autograd does not check its version."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return grads[0] @ ctx.weight, grads[0].t() @ ctx.x if ctx.needs_input_grad[1] else None


STATE: deque[torch.Tensor] = deque()


class Branches(nn.Module):
    """Returns its input passed on, and leaves two results in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor | None = None, into: Any = None) -> Any:
        if x is None:
            STATE.append(self.out(torch.tanh(KeptWeight.apply(STATE.pop(), self.lin.weight))))
            return None
        x = self.out(torch.tanh(KeptWeight.apply(x, self.lin.weight)))
        into.append(
            (KeptWeight.apply(torch.tanh(x), self.out.weight), KeptWeight.apply(x, self.lin.weight))
        )
        return x


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for block in self.blocks:
            x = block(x, found)
        first, second = zip(*found, strict=True)
        return x.float().sum(), mean_of(first), mean_of(second)


def mean_of(found: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.float().square().mean() for each in found]).mean()


def twice(model: nn.Module, x: torch.Tensor, _step: int) -> None:
    y, a, b = model(x)
    loss = y + a + b
    loss.backward(retain_graph=True)
    loss.backward()


def saliency(model: nn.Module, x: torch.Tensor, _step: int) -> None:
    y, a, _ = model(x)
    torch.autograd.grad(y, x, retain_graph=True)
    (y + a).backward()


def in_turn(model: nn.Module, x: torch.Tensor, step: int) -> None:
    y, *others = model(x)
    (y + others[step % 2]).backward()


def part_by_part(model: nn.Module, x: torch.Tensor, _step: int) -> None:
    _, a, b = model(x)
    a.backward(retain_graph=True)
    with torch.no_grad():
        model(x)
    model(x)
    b.backward()


def in_a_hook(model: nn.Module, x: torch.Tensor, _step: int) -> None:
    y, a, b = model(x)
    loss, other = y + a + b, model(x + 1)[1]
    y.register_hook(lambda _grad: other.backward())
    z = torch.ones(1, requires_grad=True)
    z.register_hook(lambda _grad: loss.backward())
    (z * 2).sum().backward()


def states(model: Any, x: torch.Tensor, _step: int) -> None:
    """Many calls whose arguments and results no hook can find."""
    STATE.append(x)
    for turn in range(300):
        model.blocks[turn % 12]()
    STATE.pop().float().square().mean().backward()


def loss_of_a_thread(model: nn.Module, x: torch.Tensor, _step: int) -> None:
    """The loss has lower numbers than the calls, which another thread makes."""

    def forward() -> Any:
        p = torch.zeros(1, requires_grad=True)
        for _ in range(3000):
            p = p.tanh()
        return model(x)

    sum(in_a_thread(forward), torch.zeros(())).backward()


PROGRAMS = (
    twice, saliency, in_turn, part_by_part, in_a_hook, states, loss_of_a_thread,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "mode"), alternating(PROGRAMS, ["deferred", "speculative", "frozen"])
)
def test_backwards_over_parts_of_a_graph_have_the_bits_of_the_plain_loop(
    program: Callable[[nn.Module, torch.Tensor, int], None], mode: str, tmp_path: Path
) -> None:
    """frozen: only biases learn, and the graph has the weights as Python objects alone."""
    values = []
    with one_thread():
        for offload in (False, True):
            torch.manual_seed(0)
            model: Any = Branched().to(torch.bfloat16)
            if mode == "frozen":
                for block in model.blocks:
                    for each in (block.lin.weight, block.lin.bias, block.out.weight):
                        each.requires_grad_(False)
            optimizer: Any = ReferenceAdamW([{"params": trained(model)}], lr=1e-2)
            if offload:
                drive = {"params": "nvme", "optim": "nvme", "nvme": [str(tmp_path)], "ram": "min"}
                inf.offload(model, inf.Policy(**drive, **MODES.get(mode, {})))
                optimizer = inf.AdamW(trained(model), lr=1e-2)
            for step in range(3):
                x = x_of(step).requires_grad_()
                if offload and mode == "speculative":
                    with inf.handle(model).no_sync():
                        program(model, x, step)
                else:
                    program(model, x, step)
                optimizer.step()
                optimizer.zero_grad()
            values.append(values_of(model))
        inf.handle(model).close()
    assert_same(values[1], values[0])


@pytest.mark.parametrize("backwards", ["one", "each"])
def test_forwards_that_wait_for_backward_cost_the_same_however_many_there_are(
    backwards: str, tmp_path: Path
) -> None:
    model = inf.offload(make(("returned",) * 4), inf.Policy(nvme=[str(tmp_path)]))

    def step(count: int) -> None:
        losses = [sum(model(x_of(seed)), torch.zeros(())) for seed in range(count)]
        if backwards == "one":
            losses = [torch.stack(losses).sum()]
        for loss in losses:
            loss.backward()
        model.zero_grad()

    step(2)
    counts = (5, 10, 40, 80)
    costs = [COSTS["calls"](functools.partial(step, count), on_device=False)[0] for count in counts]
    first, last = (costs[1] - costs[0]) / 5, (costs[3] - costs[2]) / 40
    assert 0 < last <= 1.1 * first
    inf.handle(model).close()


class Kept(nn.Module):
    """Leaves its result where no hook finds it, and its weight on a `ctx`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.01, requires_grad=False)

    def forward(self) -> None:
        STATE.append(KeptWeight.apply(STATE.pop(), self.weight))


def test_frozen_weights_that_a_graph_has_as_python_objects_alone_are_gathered(
    tmp_path: Path,
) -> None:
    found = []
    for offload in (False, True):
        model: Any = nn.ModuleList([*(Kept() for _ in range(12)), nn.Linear(WIDTH, WIDTH)])
        model = model.to(torch.bfloat16)
        if offload:
            drive = {"params": "nvme", "nvme": [str(tmp_path)], "ram": "min"}
            inf.offload(model, inf.Policy(**drive))
        x = x_of(0).requires_grad_()
        STATE.append(x)
        for turn in range(200):
            model[turn % 12]()
        model[12](torch.zeros(1, WIDTH, dtype=torch.bfloat16))
        with one_thread():
            STATE.pop().float().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    inf.handle(model).close()


def test_a_second_backward_after_its_units_were_updated_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branched().to(torch.bfloat16)
    drive = {"params": "nvme", "optim": "nvme", "nvme": [str(tmp_path)], "ram": "min"}
    inf.offload(model, inf.Policy(**drive, update="backward"))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    y, a, _ = model(x_of(0))
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"blocks\.\d+.*updated since.*no_sync"):
        a.backward()
    del optimizer
