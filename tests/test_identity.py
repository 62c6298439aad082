"""A parameter keeps its identity: references from before `inf.offload` stay valid, or an error
names them. A failed `offload` changes nothing."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

import infinity as inf
from infinity._src.base import torch_compat as _torch_compat
from infinity._src.engine.handle import _OPEN, offload
from infinity._src.memory.ledger import LEDGER
from infinity._src.params import aliases
from infinity._src.params.sharded_param import Rollback
from infinity.errors import EngineClosed, ParameterReleased
from tests import forks
from tests.reference import ReferenceAdamW

WIDTH = 8
BATCHES = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(4)]
LR = 1e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four blocks, each a unit; the first block's parameter is used again after the last."""

    use: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    @property
    def weight(self) -> Any:
        return self.blocks[0].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.use(x) * self.scale).pow(2).mean()


def policy(tier: str, path: Path, **values: Any) -> inf.Policy:
    return inf.Policy(params=tier, optim=tier, nvme=path, ram="min", **values)


# -- who may hold a parameter ----------------------------------------------------------------------


@dataclasses.dataclass
class Held:
    weight: Any


def outside(net: Net) -> Any:
    other = nn.Linear(WIDTH, WIDTH)
    other.weight, other.bias = net.weight, net.blocks[0].linear.bias
    return lambda x: other(x)


def lstm(net: Net) -> Any:
    net.rnn = nn.LSTM(WIDTH, WIDTH)
    other = copy.deepcopy(net.rnn)
    other._parameters.update(net.rnn._parameters)
    other._flat_weights = list(net.rnn._flat_weights)
    return lambda x: other(net.rnn(x)[0])[0]


def hook(net: Net) -> Any:
    weight = net.weight
    net.blocks[3].register_forward_hook(lambda _m, _a, out: out @ weight)
    return lambda x: x


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized(net: Net) -> Any:
    nn.utils.parametrize.register_parametrization(net.blocks[0].linear, "weight", Scaled())
    original = net.blocks[0].linear.parametrizations.weight.original
    return lambda x: F.linear(x, original)


def old_norms(net: Net) -> Any:
    nn.utils.weight_norm(net.blocks[1].linear)
    nn.utils.spectral_norm(net.blocks[2].linear)
    direction = net.blocks[1].linear.weight_v
    return lambda x: F.linear(x, direction)


def of_weak(net: Net) -> Any:
    weight, table = weakref.ref(net.weight), WeakTensorKeyDictionary({net.weight: 2.0})
    return lambda x: F.linear(x, weight()) * table[weight()]


def of_view(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Net], Any]:
    def how(net: Net) -> Any:
        net.held = make(net.weight)
        return lambda x: x * net.held if net.held.dim() == 1 else x @ net.held

    return how


def within(make: Callable[[Any], Any], get: Callable[[Any], Any]) -> Callable[[Net], Any]:
    def how(net: Net) -> Any:
        held = make(net.weight)
        return lambda x: F.linear(x, get(held))

    return how


HOLDERS: dict[str, Callable[[Net], Any]] = {
    "an object": within(Held, lambda held: held.weight),
    "a closure": within(lambda weight: lambda: weight, lambda held: held()),
    "a partial": lambda net: functools.partial(F.linear, weight=net.weight),
    "a deep list": within(lambda weight: [[[[weight]]]], lambda held: held[0][0][0][0]),
    "a deque": within(lambda weight: collections.deque([weight]), lambda held: held[0]),
    "a key": within(lambda weight: {weight: 2.0}, lambda held: next(iter(held))),
    "a weak reference": of_weak,
    "a module outside of the tree": outside,
    "an LSTM outside of the tree": lstm,
    "a hook": hook,
    "a parametrization": parametrized,
    "the old norms": old_norms,
    "a transposed view": of_view(lambda weight: weight.t()),
    "a part of a view": of_view(lambda weight: weight.view(-1)[3:].reshape(-1)[: WIDTH * 4].view(
        WIDTH, 4).expand(WIDTH, 4)[:, :1]),
    "a detached view": of_view(lambda weight: weight.detach().t()),
    "data": of_view(lambda weight: weight.data),
    "a view without gradients": of_view(torch.no_grad()(lambda weight: weight.view(-1)[1:9])),
}  # fmt: skip


def trained(net: Net, optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the parameters in the end."""
    losses = []
    for batch in BATCHES:
        loss = net(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("how", HOLDERS)
def test_what_held_a_parameter_before_holds_it_afterwards(tmp_path: Path, how: str) -> None:
    plain, net = Net(), Net()
    for each in (plain, net):
        torch.manual_seed(1)
        each.use = HOLDERS[how](each)
    wanted = trained(plain, ReferenceAdamW([{"params": plain.parameters()}], lr=LR))
    parameters = list(net.parameters())
    offload(net, policy("nvme", tmp_path, unit_bytes_max=300))
    assert len(inf.handle(net).units) > 4
    assert all(map(lambda one, other: one is other, parameters, net.parameters()))
    losses, values = trained(net, inf.AdamW(net.parameters(), lr=LR))
    inf.handle(net).close()
    assert losses == wanted[0]
    for name, value in wanted[1].items():
        assert torch.equal(values[name], value), name


def two_parameters(net: Net) -> Any:
    net.blocks[1].linear.weight.data = net.weight.data


def of_numpy(net: Net) -> Any:
    net.table = net.weight.detach().numpy()


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "two parameters": (
        two_parameters,
        r"blocks\.0\.linear\.weight and blocks\.1\.linear\.weight are two parameters over the same",
    ),
    "a buffer": (
        lambda net: net.register_buffer("held", net.weight.data[1:]),
        r"buffer held shares the memory of the parameter blocks\.0\.linear\.weight.*clone",
    ),
    "a numpy array": (of_numpy, r"memory of blocks\.0\.linear\.weight.*holder is a numpy array"),
    "another leaf": (
        lambda net: setattr(net, "held", net.weight.detach().requires_grad_()),
        r"memory of blocks\.0\.linear\.weight.*leaf of its own.*holder is Net\.held",
    ),
    "another dtype": (
        lambda net: net.__dict__.update(held=Held(net.weight.detach().view(torch.int32))),
        r"memory of blocks\.0\.linear\.weight.*another dtype.*holder is a Held",
    ),
    "a tensor around it": (
        lambda net: setattr(net.weight, "data", net.__dict__.setdefault(
            "held", torch.zeros(3, WIDTH, WIDTH))[1]),
        r"memory of blocks\.0\.linear\.weight.*goes beyond.*holder is Net\.held",
    ),
    "a gradient": (
        lambda net: net(BATCHES[0]).backward(), r"scale has a gradient.*zero_grad"
    ),
    "a script": (
        lambda net: net.blocks.append(torch.jit.script(nn.Linear(WIDTH, WIDTH))),
        r"Net\.blocks\.4 is a RecursiveScriptModule of torch\.jit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_follow_a_parameter_is_refused_by_name(how: str) -> None:
    net = Net()
    net.use = nn.Identity()
    REFUSED[how][0](net)
    with unchanged(net), pytest.raises(ValueError, match=rf"(?s){REFUSED[how][1]}"):
        offload(net, policy("cpu", Path("/tmp")))


# -- earlier optimizers and
# graphs-------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=LR),
    "SGD, one by one": lambda params: torch.optim.SGD(params, lr=LR, foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=LR),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_torch_built_before_raises_in_its_step(kind: str, stepped: bool) -> None:
    net = Net()
    net.use = nn.Identity()
    optimizer = OPTIMIZERS[kind](net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if stepped:
        net(BATCHES[0]).backward()
        optimizer.step()
    optimizer.zero_grad()
    offload(net, policy("cpu", Path("/tmp")))
    net(BATCHES[0]).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"(scale|blocks\.\d\.linear\.\w+)[ .].*AdamW.*SGD"):
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    # Its parameters are the model's: the engine's optimizer accepts them.
    trained(net, inf.AdamW(optimizer.param_groups, lr=LR))
    inf.handle(net).close()
    with pytest.raises(EngineClosed, match="scale"):
        net.scale + 1


def test_views_held_outside_answer_as_the_parameter_does() -> None:
    net = Net()
    net.use = nn.Identity()
    state, view = net.state_dict(), net.weight.t()
    values = net.weight.detach().clone()
    offload(net, policy("cpu", Path("/tmp")))
    for held in (state["blocks.0.linear.weight"], view):
        assert held.shape == (WIDTH, WIDTH)
        for touch in (torch.sum, copy.deepcopy, lambda t: t.tolist(), lambda t: t.zero_()):
            with pytest.raises(ParameterReleased, match=r"blocks\.0\.linear\.weight"):
                touch(held)
        with pytest.raises(ParameterReleased, match=r"do it on the parameter"):
            held.data = torch.zeros(1)
        assert "blocks.0.linear.weight" in f"{held!r}{held}"
    with inf.handle(net).gather(net.weight), torch.no_grad():
        assert torch.equal(view, values.t())
        state["blocks.0.linear.weight"].mul_(2)
    assert torch.equal(net.state_dict()["blocks.0.linear.weight"], 2 * values)
    inf.handle(net).close()


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    # Frozen garbage is collected, and the other objects are frozen again.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def a_view_that_gc_freeze_hides_is_found() -> None:
    net = Net()
    net.use, view = nn.Identity(), net.weight.t()
    values = view.clone()
    with frozen():
        assert not any(each is view for each in gc.get_objects())
        offload(net, policy("cpu", Path("/tmp")))
        assert gc.get_freeze_count() > 0
        with pytest.raises(ParameterReleased, match=r"blocks\.0\.linear\.weight"):
            view.sum()
        with inf.handle(net).gather(net.weight):
            assert torch.equal(view, values)
        inf.handle(net).close()


class EqualTypes(type):
    """A metaclass that compares its types has no hash of them."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, EqualTypes)

    __hash__ = None  # type: ignore[assignment]


class OfEqualTypes(metaclass=EqualTypes):
    """Its instances are known to the garbage collector."""


def test_a_view_is_found_beside_objects_whose_types_have_no_hash() -> None:
    net, beside = Net(), OfEqualTypes()
    view = net.weight.view(-1)
    offload(net, inf.Policy(params="cpu", optim="cpu"))
    with inf.handle(net).gather(net.weight):
        assert torch.equal(view, net.weight.view(-1))
    inf.handle(net).close()
    assert type(beside) is OfEqualTypes


def test_a_buffer_that_is_a_view_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.use = nn.Identity()
    net.register_buffer("mask", torch.ones(3, 3).tril().view(1, 3, 3))
    monkeypatch.setattr(aliases, "_living_aliases", None)
    offload(net, inf.Policy())
    inf.handle(net).close()


def test_hooks_of_users_go_on_and_their_handles_remove_them() -> None:
    net, seen = Net(), []
    net.use, weight = nn.Identity(), net.weight
    weight.tag = "mine"
    handles = [
        weight.register_hook(lambda grad: seen.append(type(grad).__name__)),
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight)),
    ]
    offload(net, policy("cpu", Path("/tmp")))
    assert net.weight.tag == "mine"
    net(BATCHES[0]).backward()
    assert seen == ["Tensor", True]
    for handle in handles:
        handle.remove()
    net(BATCHES[0]).backward()
    assert seen == ["Tensor", True]
    inf.handle(net).close()


def backward_of_a_graph_from_before_is_refused_by_name() -> None:
    net = Net()
    net.use = nn.Identity()
    early = net(BATCHES[0])
    offload(net, policy("cpu", Path("/tmp")))
    with pytest.raises(ParameterReleased, match=r"before inf\.offload.*scale"):
        early.backward()
    optimizer = inf.AdamW(net.parameters(), lr=LR)
    losses, _ = trained(net, optimizer)
    assert losses[0] == early.item()
    inf.handle(net).close()


def test_a_model_that_has_run_compiled_is_right_after_it_is_offloaded() -> None:
    plain, net = Net(), Net()
    for each in (plain, net):
        each.use = nn.Identity()
        for block in each.blocks:
            block.compile(backend="eager")
        each(BATCHES[0]).backward()
        each.zero_grad()
    wanted = trained(plain, ReferenceAdamW([{"params": plain.parameters()}], lr=LR))
    offload(net, policy("cpu", Path("/tmp")))
    assert trained(net, inf.AdamW(net.parameters(), lr=LR))[0] == wanted[0]
    inf.handle(net).close()


def a_model_that_ddp_reduces_is_refused_by_name() -> None:
    net = Net()
    net.use = nn.Identity()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        around = nn.parallel.DistributedDataParallel(net)
        for model, name in ((net, "built around this model"), (around, "^Dist.* offload its")):
            for hidden in (contextlib.nullcontext, frozen):
                with hidden(), unchanged(net), pytest.raises(ValueError, match=name):
                    offload(model, policy("cpu", Path("/tmp")))
    finally:
        torch.distributed.destroy_process_group()


SEARCHES = (
    a_view_that_gc_freeze_hides_is_found,
    backward_of_a_graph_from_before_is_refused_by_name,
    a_model_that_ddp_reduces_is_refused_by_name,
)


def test_what_a_search_of_all_objects_finds() -> None:
    """In a process with few objects: that of the tests has millions, which each search visits."""
    told = forks.in_a_fork("tests.test_identity")
    assert told.split() == [search.__name__ for search in SEARCHES]


def test_a_parameter_that_an_engine_holds_is_refused_with_its_model() -> None:
    net = Net()
    net.use = nn.Identity()
    offload(net, policy("cpu", Path("/tmp")))
    other = nn.Sequential(net.blocks[0], nn.Linear(WIDTH, 1))
    around = nn.ModuleList([net])
    for wrapper, name in ((other, r"Sequential\.0\.linear\.weight"), (around, "ModuleList.0")):
        with pytest.raises(ValueError, match=rf"{name}.*engine of Net, as \w+.*ModuleList"):
            offload(wrapper, policy("cpu", Path("/tmp")))
    inf.handle(net).close()
    with pytest.raises(ValueError, match=r"Sequential\.0\.linear.*engine of Net.*was closed"):
        offload(other, policy("cpu", Path("/tmp")))


# -- an offload that fails -------------------------------------------------------------------------


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Compare the model and the process's resources before and after."""

    def objects() -> list[Any]:
        found: list[Any] = []
        for module in model.modules():
            for name, value in module.__dict__.items():
                table = value.items() if isinstance(value, dict) else ()
                found.append((id(module), type(module), name, id(value), type(value)))
                found += [(key, id(each), type(each)) for key, each in table]
        for tensor in (*model.parameters(), *model.buffers()):
            found.append((type(tensor), dict(tensor.__dict__), tensor.data_ptr()))
            found.append([list(hooks or ()) for hooks in (
                tensor._backward_hooks, tensor._post_accumulate_grad_hooks)])  # fmt: skip
        return found

    def process() -> tuple[Any, ...]:
        entries = list(Path("/proc/self/fd").iterdir())
        files = {str(entry.readlink()) for entry in entries if entry.is_symlink()}
        # The heap's descriptor closes with its object.
        files = {name for name in files if not name.endswith("/statm")}
        threads = len(list(Path("/proc/self/task").iterdir()))
        return threads, files, dict(LEDGER._reserved), list(_torch_compat._watchers), set(_OPEN)

    before, held = objects(), process()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert objects() == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert process() == held


def test_a_warning_that_a_filter_makes_an_error_undoes_the_offload(tmp_path: Path) -> None:
    net = Net()
    net.use, net.weight.data = nn.Identity(), net.weight.data.t()
    with unchanged(net), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"blocks\.0\.linear\.weight"):
            offload(net, policy("nvme", tmp_path))
    assert not list(tmp_path.iterdir())


class Injected(BaseException):
    """Raised in place of a call."""


WIRING = (
    *("engine/handle.py", "hooks/forward.py", "hooks/module_params.py"),
    "engine/build.py",
)
"""Files in which each call of a Python function fails once. The last one opens the parts before the
model changes."""
Site = tuple[str, str, str]
UNDOING = {each.__code__ for each in vars(Rollback).values() if isinstance(each, FunctionType)}


class Calls:
    """Calls of the wiring, by file, function and called function; one of them raises."""

    def __init__(self, broken: Site | None = None) -> None:
        self.seen: dict[Site, None] = {}
        self._broken = broken

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        caller = frame.f_back
        called = frame.f_code
        if event != "call" or caller is None or called.co_name == "__del__":
            return
        # Not calls of the undo, nor of libraries (finalizers).
        theirs = any(part in called.co_filename for part in ("/_src/", "/aio/", "/torch/"))
        file = caller.f_code.co_filename
        if file.endswith(WIRING) and theirs and called not in UNDOING:
            site = file, caller.f_code.co_name, called.co_name
            if site == self._broken and site not in self.seen:
                raise Injected
            self.seen[site] = None

    def offload(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        sys.settrace(self)
        try:
            offload(model, *args, **kwargs)
        finally:
            sys.settrace(None)


def with_all(tmp_path: Path) -> tuple[Net, dict[str, Any]]:
    """Return a model with everything that an offload changes, and its arguments."""
    net = Net()
    net.use, net.norm, net.tied = nn.Identity(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    net.tied.weight = net.weight
    net.weight.tag = "mine"
    net.weight.register_hook(lambda grad: grad)
    net.weight.register_post_accumulate_grad_hook(lambda _: None)
    net.register_forward_hook(lambda _module, _args, out: out)
    load = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    for name in ("blocks.0.linear.weight", "norm.running_mean"):
        load[name] = torch.ones_like(load[name])
    return net, {"load": load, "policy": policy("nvme", tmp_path, activations="nvme")}


@pytest.mark.parametrize(
    ("files", "every"), [(WIRING[:3], 2), pytest.param(WIRING, 1, marks=pytest.mark.slow)]
)
def test_whichever_step_of_an_offload_fails_the_model_is_as_it_was(
    tmp_path: Path, files: tuple[str, ...], every: int
) -> None:
    net, arguments = with_all(tmp_path)
    gc.collect()  # Otherwise threads of earlier tests' engines end during this test.
    found, other = Calls(), with_all(tmp_path)[0]
    # The first run opens permanent descriptors, and imports modules.
    found.offload(other, **arguments)
    inf.handle(other).close()
    sites = [site for site in found.seen if site[0].endswith(files)]
    assert len(sites) > 40
    assert {part for part in files if any(site[0].endswith(part) for site in sites)} == {*files}
    for site in sites[::every]:
        calls = Calls(site)
        with unchanged(net), pytest.raises(Injected):
            calls.offload(net, **arguments)
        assert not list(tmp_path.iterdir()), site
    # A view and a graph from before the offload still work.
    early, net.view = net.tied(BATCHES[0]).sum(), net.weight.t()
    with unchanged(net), pytest.raises(Injected):
        Calls(sites[-1]).offload(net, **arguments)
    early.backward()
    assert net.weight.grad is not None
    assert torch.equal(net.view, net.weight.t())
    net.zero_grad()
    offload(net, **arguments)
    assert torch.equal(net.state_dict()["norm.running_mean"], torch.ones(WIDTH))
    net(BATCHES[0]).backward()
    inf.handle(net).close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for search in SEARCHES:
        search()
        print(search.__name__)
