"""Each semi-private corner of torch still does what the engine stands on."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from infinity._src.base import torch_compat as compat


def test_a_resized_storage_frees_its_memory_and_takes_new_values_under_the_same_views() -> None:
    flat = torch.arange(64.0)
    view = flat[8:16].view(2, 4)
    compat.resize_storage(flat, 0)
    assert compat.storage_size(view) == 0
    compat.resize_storage(flat, 256)
    flat.fill_(3.0)
    assert torch.equal(view, torch.full((2, 4), 3.0))
    assert compat.is_resizable(flat)


def test_a_storage_that_numpy_has_seen_is_known_not_to_be_resizable() -> None:
    flat = torch.zeros(8)
    flat.numpy()
    assert not compat.is_resizable(flat)


def test_exchanged_tensors_have_all_that_the_other_had_and_keep_their_references() -> None:
    first, second = nn.Parameter(torch.ones(3)), torch.zeros(2)
    first.tag, seen = "mine", []  # type: ignore[attr-defined]
    handle = first.register_hook(lambda _: seen.append("grad"))
    first.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    weak, graph = weakref.ref(first), (first * 2).sum()
    node = compat.gradient_node(first)
    compat.exchange(first, second)
    assert weak() is first
    assert (type(first), type(second)) == (torch.Tensor, nn.Parameter)
    assert first.shape == (2,)
    assert second.tag == "mine"
    assert not first.__dict__
    assert not first._backward_hooks
    assert compat.gradient_node(second) is node
    graph.backward()
    assert seen == ["grad", "accumulated"]
    assert torch.equal(second.grad, torch.full((3,), 2.0))
    compat.exchange(first, second)
    handle.remove()
    (first * 2).sum().backward()
    assert seen == ["grad", "accumulated", "accumulated"]
    assert torch.equal(first.grad, torch.full((3,), 4.0))


def test_a_weak_reference_in_c_forbids_an_exchange_and_nothing_changes() -> None:
    first, second = nn.Parameter(torch.ones(3)), torch.zeros(2)
    weak = torch._C._WeakTensorRef(first)
    with pytest.raises(RuntimeError, match="weakrefs"):
        compat.exchange(first, second)
    assert type(first) is nn.Parameter
    assert not weak.expired()


def test_the_tensors_of_a_storage_and_the_graphs_of_a_leaf_are_known() -> None:
    leaf = nn.Parameter(torch.ones(3))
    storage = compat.storage_of(leaf)
    assert storage is not None
    assert compat.storage_uses(storage) == 1
    view = leaf.detach()
    assert compat.storage_uses(storage) == 2
    del view
    assert compat.storage_uses(storage) == 1
    assert compat.storage_of(torch.eye(3).to_sparse()) is None
    assert compat.gradient_node(leaf) is None
    graph = leaf * 2
    assert compat.gradient_node(leaf) is graph.grad_fn.next_functions[0][0]
    del graph
    assert compat.gradient_node(leaf) is None


def test_a_separate_tensor_shares_storage_but_not_the_version_counter() -> None:
    flat = torch.zeros(8)
    separate = compat.separate_version(flat)
    flat.add_(1)
    assert compat.version_of(flat) == 1
    assert compat.version_of(separate) == 0
    assert torch.equal(separate, flat)


def test_backward_compares_version_counters_that_can_be_set() -> None:
    w = nn.Parameter(torch.ones(3))
    compat.set_versions([w], [5])
    loss = (w * w).sum()
    compat.set_versions([w], [6])
    with pytest.raises(RuntimeError, match="is at version 6; expected version 5"):
        loss.backward()
    loss = (w * w).sum()
    compat.set_versions([w], [7])
    compat.set_versions([w], [6])
    loss.backward()
    compat.bump_version(w)
    assert compat.version_of(w) == 7


def test_set_data_keeps_the_object_and_its_version() -> None:
    w = nn.Parameter(torch.ones(3))
    compat.set_versions([w], [5])
    compat.set_data(w, torch.zeros(3))
    assert compat.version_of(w) == 5
    assert not w.any()


def test_a_callback_runs_once_at_the_end_of_backward_and_not_after_a_failure() -> None:
    ran: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    z = y * 3

    def queue(_grad: torch.Tensor) -> None:
        ran.append(compat.graph_task_id())
        compat.queue_callback(lambda: ran.append(compat.graph_task_id()))

    y.register_hook(queue)
    z.sum().backward(retain_graph=True)
    assert len(ran) == 2
    assert ran[0] >= 0

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("boom")

    x.register_hook(fail)
    ran.clear()
    with pytest.raises(ValueError, match="boom"):
        z.sum().backward()
    assert len(ran) == 1


def test_nested_backwards_have_their_own_graph_task() -> None:
    ids: list[int] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ids.append(compat.graph_task_id())
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True) * 2
                inner.register_hook(lambda _: ids.append(compat.graph_task_id()))
                inner.sum().backward()
            ids.append(compat.graph_task_id())
            return grad

    assert compat.graph_task_id() == compat.NO_TASK
    Nested.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize("kept", [False, True])
def test_a_backward_tells_whether_its_graph_is_kept(kept: bool) -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _grad: seen.append(compat.graph_is_kept()))
    y.sum().backward(retain_graph=kept)
    assert seen == [kept]


def test_sequence_numbers_order_nodes_by_when_they_were_made() -> None:
    x = torch.ones(2, requires_grad=True)
    before = x * 2
    mark = compat.sequence_number()
    after = before * 2
    assert (
        compat.node_sequence_number(before.grad_fn)
        < mark
        <= compat.node_sequence_number(after.grad_fn)
    )


def test_backward_runs_the_ready_node_with_the_highest_number_that_was_set() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    order: list[int] = []
    x = torch.ones(2, requires_grad=True)
    made = [Own.apply(x), x * 2, x * 3]
    for index, each in enumerate(made):
        each.register_hook(lambda _, index=index: order.append(index))
    numbers = [compat.node_sequence_number(each.grad_fn) for each in made]
    assert numbers == sorted(numbers)
    for each, number in zip(made, reversed(numbers), strict=True):
        compat.set_sequence_number(each.grad_fn, number)
    torch.autograd.backward([each.sum() for each in made])
    assert order == [0, 1, 2]


def test_node_numbers_of_a_new_thread_begin_at_zero() -> None:
    """So nodes of several threads have the same numbers, and no order among each other."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(compat.sequence_number()))
    _ = torch.ones(1, requires_grad=True) * 2
    thread.start()
    thread.join()
    assert found == [0] < [compat.sequence_number()]


def test_a_node_prehook_survives_in_place_changes_and_runs_after_tensor_hooks() -> None:
    order: list[str] = []
    x = torch.ones(2, 3, requires_grad=True)
    y = (x * 2).view(6)
    assert y._base is not None
    y._base.grad_fn.register_prehook(lambda _: order.append("node"))
    y += 1
    y.register_hook(lambda _: order.append("tensor"))
    y.sum().backward()
    assert order == ["tensor", "node"]


def test_a_wrapper_subclass_has_metadata_and_no_storage() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(func)

    with torch.inference_mode():
        made = compat.make_wrapper(
            Wrapper, torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), True
        )
    with compat.DisableTorchFunctionSubclass():
        assert made.shape == (2, 3)
        assert made.dtype is torch.bfloat16
        assert made.requires_grad
        assert not made.is_inference()


def test_the_arguments_of_to_are_understood() -> None:
    assert compat.parse_to(("cpu",), {}) == (torch.device("cpu"), None, False)
    assert compat.parse_to((torch.float16,), {"copy": True}) == (None, torch.float16, True)
    assert compat.parse_to((), {"device": "meta", "dtype": torch.float16})[:2] == (
        torch.device("meta"),
        torch.float16,
    )
    assert compat.parse_to((torch.zeros(1),), {}) == (torch.device("cpu"), torch.float32, False)


def test_tensors_without_an_address_have_address_zero() -> None:
    x = torch.ones(3)
    assert compat.address_of(x) == x.data_ptr()
    assert compat.address_of(x.to("meta")) == 0
    assert compat.address_of(x.to_sparse()) == 0
    seen: list[int] = []

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.append(compat.address_of(y))
        return y

    torch.func.vmap(look)(torch.ones(2, 3))
    assert seen == [0]


def test_the_frame_of_a_module_call_is_found_from_its_hooks_and_known_to_run() -> None:
    found: list[FrameType] = []

    def hook(*_: Any) -> None:
        frame = compat.calling_module_frame()
        assert frame is not None
        found.append(frame)
        assert compat.is_running(frame, threading.get_ident())

    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(compat.dynamo_disable(hook))
    module.register_forward_hook(hook)
    module(torch.ones(1, 2))
    assert found[0] is found[1]
    assert found[0].f_locals["self"] is module
    assert not compat.is_running(found[0], threading.get_ident())


@pytest.mark.parametrize("recursive", [True, False])
def test_functions_are_excluded_from_compilation_as_torch_excludes_them(recursive: bool) -> None:
    def compiled_with(disable: Any) -> tuple[int, int, list[float]]:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        def scaled_by(factor: int) -> Any:
            return lambda x: inner(x) * factor

        # More functions than torch would compile for one code.
        several = [disable(scaled_by(k), recursive=recursive) for k in range(10)]

        def outer(x: torch.Tensor) -> torch.Tensor:
            for each in several:
                x = each(x + 1)
            return x + 1

        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        found = torch.compile(outer, backend=counter)(torch.ones(2))
        torch._dynamo.reset()
        return counter.frame_count, counter.op_count, found.tolist()

    assert compiled_with(compat.dynamo_disable) == compiled_with(torch.compiler.disable)


def test_data_parallel_is_known_while_it_copies() -> None:
    seen: list[bool] = []

    class Asked(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            seen.append(compat.is_replicating())
            return super().parameters(recurse)

    module = Asked(2, 2)
    module.parameters()
    # On a CPU torch goes no further.
    with pytest.raises(AssertionError, match="CPU"):
        torch.nn.parallel.replicate(module, [0, 1])
    assert seen == [False, True]


def test_a_frame_of_another_thread_is_known_to_run() -> None:
    frames: list[FrameType] = []
    entered, leave = threading.Event(), threading.Event()

    def body() -> None:
        frames.append(sys._getframe())
        entered.set()
        leave.wait(10)

    thread = threading.Thread(target=body)
    thread.start()
    entered.wait(10)
    assert thread.ident is not None
    assert compat.is_running(frames[0], thread.ident)
    leave.set()
    thread.join()
    assert not compat.is_running(frames[0], thread.ident)


def test_post_hooks_are_called_after_an_exception_and_not_after_an_interrupt() -> None:
    called: list[str] = []
    module = nn.Identity()
    module.register_forward_hook(lambda *_: called.append("post"), always_call=True)
    for error, expected in ((ValueError(), ["post"]), (KeyboardInterrupt(), [])):
        called.clear()

        def forward(_x: Any, error: BaseException = error) -> None:
            raise error

        module.forward = forward
        with pytest.raises(type(error)):
            module(1)
        assert called == expected


def test_modules_save_and_load_by_iterating_their_parameters_once() -> None:
    class Spy(dict):
        calls = 0

        def items(self) -> Any:
            Spy.calls += 1
            return super().items()

    module = nn.Linear(2, 2)
    module.__dict__["_parameters"] = Spy(module._parameters)
    state = module.state_dict()
    assert Spy.calls == 1
    module.load_state_dict(state)
    assert Spy.calls == 2
    assert pickle.loads(pickle.dumps(state))["weight"].shape == (2, 2)


def test_a_version_witness_counts_with_its_tensor_and_holds_no_memory() -> None:
    tensor = (torch.ones(8, requires_grad=True) * 2).view(2, 4)
    witness = compat.version_witness(tensor)
    assert witness.numel() == 0
    assert witness.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    with torch.no_grad():
        tensor[0].add_(1)
    assert compat.version_of(witness) == compat.version_of(tensor) == 1
    assert torch.equal(tensor[1], torch.full((4,), 2.0))


class _Watcher:
    """Notes checkpointed calls, and takes their inputs."""

    def __init__(self) -> None:
        self.begun: list[compat.CheckpointCall] = []
        self.inputs: list[list[torch.Tensor]] = []

    def checkpoint_begins(self, call: compat.CheckpointCall) -> None:
        self.begun.append(call)

    def checkpoint_saved(self, call: compat.CheckpointCall) -> None:
        pairs = call.pairs()
        self.inputs.append([tensor for tensor, _ in pairs])
        for tensor, saved in pairs:
            kept = 3 * tensor.detach()
            saved.register_hooks(lambda _, kept=kept: kept, lambda kept: kept)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_inputs_of_checkpoints_can_be_told_and_taken(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    watcher = _Watcher()
    end = compat.watch_checkpoints(watcher)
    weight, x = torch.tensor(2.0, requires_grad=True), torch.ones(4)

    def function(text: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert text == "text"
        return x * w

    try:
        out = checkpoint(function, "text", x, weight, use_reentrant=reentrant)
        with torch.no_grad():
            checkpoint(function, "text", x, weight, use_reentrant=reentrant)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            checkpoint(function, "text", x, weight, use_reentrant=reentrant)
    finally:
        end()
        end()
    checkpoint(function, "text", x, weight, use_reentrant=reentrant)
    assert len(watcher.inputs) == len(watcher.begun) == 1
    assert [id(tensor) for tensor in watcher.inputs[0]] == [id(x), id(weight)]
    out.sum().backward()  # recomputes with what was taken: 3 x
    assert torch.equal(weight.grad, torch.tensor(12.0))  # type: ignore[arg-type]


def test_a_checkpoint_has_the_name_of_the_module_that_begins_it() -> None:
    from torch.utils.checkpoint import checkpoint

    watcher = _Watcher()
    end = compat.watch_checkpoints(watcher)
    x = torch.ones(4, requires_grad=True)
    try:
        with compat.named_checkpoints("outer"):
            with compat.named_checkpoints("inner"):
                checkpoint(torch.exp, x, use_reentrant=False)
            checkpoint(torch.exp, x, use_reentrant=True)
        checkpoint(torch.exp, x, use_reentrant=False)
    finally:
        end()
    assert [call.label for call in watcher.begun] == ["inner", "outer", ""]


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_a_module_and_of_all_modules_are_found(kind: str) -> None:
    def hook(*_: object) -> None:
        """Do nothing."""

    module = torch.nn.Linear(2, 2)
    assert compat.hooks_of(module) == []
    of_all = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
    for register in (getattr(module, f"register_{kind}_hook"), of_all):
        handle = register(hook)
        assert compat.hooks_of(module) == [hook]
        handle.remove()
    assert compat.hooks_of(module) == []


def test_where_a_tensor_lies_in_a_distributed_checkpoint_is_noted_as_torch_notes_it() -> None:
    info = compat.dcp_storage_info("__0_0.distcp", 3, 5)
    assert (info.relative_path, info.offset, info.length, info.transform_descriptors) == (
        "__0_0.distcp",
        3,
        5,
        None,
    )
    assert pickle.loads(pickle.dumps(info)) == info


def test_memory_that_runs_out_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert compat.is_out_of_memory(caught.value)
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        assert compat.is_out_of_memory(error)
    assert not compat.is_out_of_memory(RuntimeError("a shape"))


def test_an_assertion_on_a_tensor_raises_with_its_message() -> None:
    compat.assert_async(torch.tensor(True), "never")
    with pytest.raises(RuntimeError, match="index out of range: 3 rows"):
        compat.assert_async(torch.tensor(False), "index out of range: 3 rows")


def test_a_memory_pool_can_serve_allocations_outside_of_it_in_need() -> None:
    options = inspect.signature(torch.cuda.MemPool.__init__).parameters
    assert options["use_on_oom"].default is False


def test_clearing_autocasts_cache_casts_a_weight_anew() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)

    def cast_node() -> Any:
        return (x @ weight).grad_fn.next_functions[1][0]  # type: ignore[union-attr]

    with torch.autocast("cpu", torch.bfloat16):
        first = cast_node()
        assert cast_node() is first
        compat.clear_autocast_cache("cpu")
        second = cast_node()
        assert second is not first
        with torch.autocast("cpu", enabled=False):
            compat.clear_autocast_cache("cpu")  # no region is open here
        assert cast_node() is second


def test_ranges_are_in_a_profile_and_cost_nothing_outside_of_one() -> None:
    with compat.profiled("outside"):
        torch.zeros(2) + 1
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        compat.profiled("a range of ours"),
    ):
        torch.zeros(2) + 1
    names = {event.key for event in profile.key_averages()}
    assert "a range of ours" in names
    assert "outside" not in names


def test_the_versions_that_were_tested_include_the_floor_of_the_metadata_and_the_pin() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    floor = re.search(r'"torch>=([\d.]+)"', (root / "pyproject.toml").read_text())
    pin = re.search(
        r"^torch==([\d.]+)$", (root / ".ci" / "constraints.txt").read_text(), re.MULTILINE
    )
    assert floor is not None
    assert pin is not None
    assert compat.TESTED[0] == floor[1] + ".0"
    assert pin[1] in compat.TESTED


def test_every_corner_has_a_line_that_says_what_breaks_without_it() -> None:
    table = (compat.__doc__ or "").partition("what breaks without it")[2]
    named = set(re.findall(r"\w+", "\n".join(line[:33] for line in table.splitlines())))
    corners = {
        name
        for name, value in vars(compat).items()
        if not name.startswith("_")
        and getattr(value, "__module__", compat.__name__) == compat.__name__
        and callable(value)
    } | {"graph_task_id", "graph_is_kept", "sequence_number", "METADATA", "NO_TORCH_FUNCTION"}
    assert corners - {"BackwardWatcher", "CheckpointWatcher", "F"} <= named
