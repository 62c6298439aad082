"""Staging through host memory, with a device whose copies come late and a backend that fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from infinity._src.distributed.transport import (
    GlooTransport,
    Message,
    NcclTransport,
    StagedTransport,
    Transport,
    transport_for,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Stream:
    """A stream of a device: copies wait in it until somebody waits for them."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        while self.pending:
            self.pending.pop(0)()


STREAM = Stream()


class OnDevice(torch.Tensor):
    """A tensor of the device. Copies from and to it that do not block come late."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            to, source = (each.as_subclass(torch.Tensor) for each in args)
            STREAM.pending.append(lambda: to.copy_(source))
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


def on_device(values: torch.Tensor) -> torch.Tensor:
    return values.clone().as_subclass(OnDevice)


def at_rest(tensor: torch.Tensor) -> torch.Tensor:
    """The values, once the device has nothing left to do."""
    STREAM.synchronize()
    return tensor.as_subclass(torch.Tensor)


class Echo(Transport):
    """A backend in which rank r answers each message with its values plus r. It can be made to
    fail."""

    backend = "gloo"

    def __init__(self) -> None:
        super().__init__(None, CPU)  # type: ignore[arg-type]
        self.sent: list[list[Message]] = []
        self.addresses: list[int] = []
        self.fails = False

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        assert not any(isinstance(tensor, OnDevice) for _, tensor in [*sends, *receives])
        self.sent.append([(rank, tensor.clone()) for rank, tensor in sends])
        self.addresses = [tensor.data_ptr() for _, tensor in [*sends, *receives]]
        if self.fails:
            raise RuntimeError("connection closed by peer")
        for rank, to in receives:
            to.copy_(next(tensor for other, tensor in sends if other == rank) + rank)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A device "cuda" with the stream above. Yields, for each staging buffer, if it was pinned."""
    made = torch.empty
    pinned: list[bool] = []

    def empty(*size: Any, pin_memory: bool = False, **values: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return made(*size, **values)

    def current_stream(device: torch.device) -> Stream:
        assert device == GPU
        return STREAM

    STREAM.pending.clear()
    STREAM.waits = 0
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch, "empty", empty)
    yield pinned
    STREAM.pending.clear()


def swapped(transport: Transport, numel: int = 5) -> list[torch.Tensor]:
    """One part sent to the ranks 1 and 2, and an answer from each of them."""
    part = on_device(torch.arange(numel, dtype=torch.float32))
    answers = [on_device(torch.zeros(numel)) for _ in range(2)]
    # Views of one part, as rows of a whole are when they are named again for each rank.
    transport.exchange([(1, part[:]), (2, part[:])], list(enumerate(answers, 1)))
    return answers


def test_the_backend_gets_copies_that_have_landed_and_the_device_its_answers(
    gpu: list[bool],
) -> None:
    over = Echo()
    answers = swapped(StagedTransport(None, GPU, over=over))  # type: ignore[arg-type]
    part = torch.arange(5.0)
    # Not waited for: what was sent is what the device had, since the transport waited itself.
    assert [rank for rank, _ in over.sent[0]] == [1, 2]
    assert all(torch.equal(tensor, part) for _, tensor in over.sent[0])
    # The answers are on their way, behind which the communication stream's event is recorded:
    # nothing waits twice.
    assert STREAM.waits == 1
    assert len(STREAM.pending) == 2
    assert [at_rest(answer).tolist() for answer in answers] == [
        (part + 1).tolist(),
        (part + 2).tolist(),
    ]
    assert gpu == [True]


def test_a_part_that_goes_to_several_ranks_is_copied_once_and_memory_is_used_again(
    gpu: list[bool],
) -> None:
    over = Echo()
    staged = StagedTransport(None, GPU, over=over)  # type: ignore[arg-type]
    swapped(staged)
    to_first, to_second, *_ = first = over.addresses
    assert to_first == to_second
    assert staged.held_bytes == 3 * 64  # a part and two answers, each at a multiple of 64
    # The answers of the exchange before are read from the same memory before it is written anew.
    answers = swapped(staged)
    assert over.addresses == first
    assert at_rest(answers[1]).tolist() == [2, 3, 4, 5, 6]
    swapped(staged, 100)
    assert staged.held_bytes == 3 * 448
    swapped(staged)
    assert staged.held_bytes == 3 * 448
    assert gpu == [True, True]


def test_tensors_of_every_dtype_and_shape_keep_their_bits(gpu: list[bool]) -> None:
    class Same(Echo):
        def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
            for (_, source), (_, to) in zip(sends, receives, strict=True):
                assert to.dtype is source.dtype
                assert to.shape == source.shape
                to.copy_(source)

    staged = StagedTransport(None, GPU, over=Same())  # type: ignore[arg-type]
    values = [
        torch.tensor(3, dtype=torch.uint8),
        torch.tensor([[float("nan"), -0.0], [1e-40, float("inf")]]),
        torch.randn(7).bfloat16(),
        torch.tensor([2**62 + 1]),
        torch.empty(0, dtype=torch.float16),
    ]
    found = [on_device(torch.zeros_like(value)) for value in values]
    staged.exchange([(1, on_device(value)) for value in values], [(1, answer) for answer in found])
    for value, answer in zip(values, found, strict=True):
        ours = at_rest(answer).contiguous().view(-1).view(torch.uint8)
        assert torch.equal(ours, value.contiguous().view(-1).view(torch.uint8))


def test_an_exchange_that_fails_leaves_its_memory_free_and_the_next_has_its_own(
    gpu: list[bool],
) -> None:
    """Messages of the broken one may still come: none of its memory is used again, or kept."""
    over = Echo()
    staged = StagedTransport(None, GPU, over=over)  # type: ignore[arg-type]
    swapped(staged)
    assert staged._host is not None
    before = weakref.ref(staged._host)
    over.fails = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        swapped(staged)
    gc.collect()
    assert staged.held_bytes == 0
    STREAM.pending.clear()
    assert before() is None
    over.fails = False
    answers = swapped(staged)
    assert at_rest(answers[0]).tolist() == [1, 2, 3, 4, 5]
    assert gpu == [True, True]


def test_on_the_cpu_copies_block_and_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("there is no stream of the CPU")

    monkeypatch.setattr(torch.cuda, "current_stream", refused)
    over = Echo()
    part, answer = torch.arange(3.0), torch.zeros(3)
    staged = StagedTransport(None, CPU, over=over)  # type: ignore[arg-type]
    staged.exchange([(1, part)], [(1, answer)])
    assert answer.tolist() == [1, 2, 3]
    assert part.data_ptr() not in over.addresses
    assert answer.data_ptr() not in over.addresses
    assert staged._host is not None
    assert not staged._host.is_pinned()


def test_a_device_has_its_transport_and_none_stages_by_default() -> None:
    assert transport_for(CPU) is GlooTransport
    assert transport_for(GPU) is NcclTransport
    assert (GlooTransport.backend, NcclTransport.backend) == ("gloo", "nccl")
    assert StagedTransport.backend == "gloo"
