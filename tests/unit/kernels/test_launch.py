"""Triton launches on the current device: each is made under that of its tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity
from infinity._src.base.torch_device import on_device, table_on
from tests.fake_cuda import FakeCuda

PACKAGE = Path(infinity.__file__).parent
KERNELS = PACKAGE / "_src" / "kernels" / "triton"
NON_BLOCKING = {
    "measure/device_copy.py": "it measures both kinds of memory",
    "distributed/transport.py": "host memory of its own, pinned",
    "params/accumulator.py": "the storage of gradients is in pinned slabs",
    "params/reduce.py": "flags for the host, in pinned memory",
    "base/torch_device.py": "`table_on` pins",
    "params/param_copies.py": "shards are in pinned slabs",
}
"""Files with copies that must not wait, and why their host memory is pinned: from pageable memory
the driver may wait for the stream."""


def test_the_device_of_the_tensors_is_current_inside_and_the_users_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    with on_device(torch.device("cuda", 1)):
        assert cuda.current == 1
    assert cuda.current == 0


def test_no_context_is_entered_where_there_is_nothing_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    nothing = on_device(torch.device("cpu"))
    assert on_device(torch.device("cuda", 0)) is nothing
    assert not cuda.calls


def launches(tree: ast.Module) -> list[tuple[int, bool]]:
    """(line, whether `on_device` is around it) of each `kernel[grid](...)`, and of each entry into
    that context by a stack."""
    found: list[tuple[int, bool]] = []

    def walk(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.With):
            inside = inside or "on_device(" in "".join(map(ast.unparse, node.items))
            # An ExitStack that enters it first has it around all that follows.
            inside = inside or "enter_context(on_device(" in ast.unparse(node.body[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            found.append((node.lineno, inside))
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(tree, False)
    return found


def test_every_launch_is_made_under_the_device_of_its_tensors() -> None:
    count = 0
    for path in sorted(KERNELS.glob("*.py")):
        for line, inside in launches(ast.parse(path.read_text(encoding="utf-8"))):
            assert inside, f"{path.name}:{line}: a launch outside of on_device()"
            count += 1
    assert count >= 8


def test_tables_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Pinned:
        def __init__(self, shape: torch.Size, **how: Any) -> None:
            self.how = how
            made.append(self)

        def copy_(self, source: torch.Tensor) -> Pinned:
            self.words = source.tolist()
            return self

        def to(self, device: torch.device, *, non_blocking: bool) -> tuple[Any, torch.device]:
            assert non_blocking
            return self.words, device

    words = np.array([3, 1 << 60, -5], np.int64)
    assert table_on(torch.device("cpu"), words).tolist() == words.tolist()
    monkeypatch.setattr(torch, "empty", Pinned)
    there = torch.device("cuda", 1)
    assert table_on(there, words) == (words.tolist(), there)
    (pinned,) = made
    assert pinned.how == {"dtype": torch.int64, "device": "cpu", "pin_memory": True}


@pytest.mark.gpu
def test_tables_arrive_in_order_behind_a_busy_stream() -> None:
    """The memory of one is not reused before the copy has read it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    torch.cuda._sleep(200_000_000)
    tables = [table_on(device, np.full(1000, index, np.int64)) for index in range(50)]
    for index, table in enumerate(tables):
        assert bool((table == index).all())


def test_copies_that_must_not_wait_are_known() -> None:
    found = {
        str(path.relative_to(PACKAGE / "_src"))
        for path in PACKAGE.rglob("*.py")
        if "non_blocking=True" in path.read_text(encoding="utf-8")
    }
    assert found == NON_BLOCKING.keys()
