"""A torch.cuda for machines without one: it computes nothing, and notes each call with the device
that was current then."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@dataclasses.dataclass(frozen=True)
class FakeEvent:
    """An event, recorded on a device and over at once."""

    device: torch.device

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@dataclasses.dataclass(eq=False)
class FakeStream:
    """A stream, and the events that it waits for."""

    device: torch.device
    cuda_stream: int
    waited: list[FakeEvent] = dataclasses.field(default_factory=list)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.device)

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)


class FakeCuda:
    """Two devices with two streams each. calls: (name, the device that was current).

    capturing: devices whose current stream captures a graph.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, backend: str = "native") -> None:
        self.calls: list[tuple[str, int]] = []
        self.current = 0
        self.pools: list[tuple[int, dict[str, Any]]] = []
        self.inside: list[tuple[Any, torch.device]] = []
        self.capturing: set[int] = set()
        self.streams = {
            index: [FakeStream(torch.device("cuda", index), 10 * index + k) for k in range(2)]
            for index in range(2)
        }
        self.chosen = {0: 0, 1: 0}
        replaced = {
            "device": self.device,
            "current_device": lambda: self.current,
            "current_stream": self.current_stream,
            "get_allocator_backend": lambda: backend,
            "MemPool": self.pool,
            "use_mem_pool": self.use_mem_pool,
            "empty_cache": lambda: self.calls.append(("empty_cache", self.current)),
            "memory_allocated": lambda device: 3 << 20,
            "is_current_stream_capturing": self.is_capturing,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        index = device.index if isinstance(device, torch.device) else int(device)
        self.calls.append((f"device {index}", self.current))
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: Any = None) -> FakeStream:
        index = self.current if device is None else torch.device(device).index
        assert index is not None
        return self.streams[index][self.chosen[index]]

    def pool(self, **options: Any) -> object:
        self.calls.append(("MemPool", self.current))
        self.pools.append((self.current, options))
        return self.pools[-1]

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Any, device: Any = None) -> Iterator[None]:
        self.inside.append((pool, device))
        try:
            yield
        finally:
            self.inside.pop()

    def is_capturing(self) -> bool:
        self.calls.append(("is_current_stream_capturing", self.current))
        return self.current in self.capturing
