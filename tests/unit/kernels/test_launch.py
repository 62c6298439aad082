"""Triton launches on the current device: each is made under that of its tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import infinity
from infinity._src.kernels.launch import on_device
from tests.fake_cuda import FakeCuda

KERNELS = Path(infinity.__file__).parent / "_src" / "kernels" / "triton"


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
