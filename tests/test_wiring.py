"""Nobody's behaviour is assigned from outside after construction, and imports run in no new
circles; see tests/wiring.py."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import wiring

ROOT = Path(__file__).resolve().parent.parent
LATE_BOUND = {
    "DeferredUpdate.attach": "the mode asks the step pipeline, and the pipeline, the unsharder and "
    "the reducer ask the mode",
    "EngineAccess.attach": "gathers ask for the faults of updates and saves, which are made of "
    "what gathers",
    "Transaction.attach": "commits go through the durable run, which reads the steps that the "
    "pipeline counts",
    "Device.attach": "the executor is opened with sizes that depend on the device, and the device "
    "copies by the executor",
    "driver": "the executor's core keeps the device's functions alive, which C calls, and calls "
    "none of them itself",
}
"""What may be bound late, and why. At most 5."""
CIRCLES = {
    ("hooks.forward", "hooks.gather_window"): "one life cycle in two files",
    (
        "params.sharded_param",
        "params.unit",
        "params.unsharded_param",
    ): "a record and what it points to",
    ("kernels.comm_codec", "kernels.triton.comm_codec"): "the choice and its implementation",
    ("kernels.quantize", "kernels.triton.quantize"): "the choice and its implementation",
}
"""Circles of imports, TYPE_CHECKING and imports inside of functions counted. The list may only
shrink."""


def test_behaviour_is_given_by_constructors() -> None:
    sites = wiring.late_bound(ROOT)
    new = [f"{site.path}:{site.line}: {site.text}" for site in sites if site.attr not in LATE_BOUND]
    assert not new, "give it by the constructor, or by a method that says what it does"
    assert {site.attr for site in sites} == LATE_BOUND.keys(), "the list has what is gone"
    assert len(LATE_BOUND) <= 5


def test_imports_run_in_no_new_circles() -> None:
    found = {
        tuple(name.removeprefix("infinity._src.") for name in group)
        for group in wiring.cycles(ROOT)
    }
    assert found == CIRCLES.keys()


LATE = """
    import functools
    from collections.abc import Callable

    class Part:
        hook: Callable[[], None]
        def __init__(self, other: "Part") -> None:
            self.other = other
            self.told = lambda: None
            self.count = 0
            self.found: list[Part] = []
        def work(self) -> None: ...

    class User:
        def __init__(self, part: Part, maker: Part) -> None:
            part.{line}
        def run(self) -> None: ...
"""


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("hook = maker.work", True),
        ("hook = None", True),
        ("told = print", True),
        ("other = maker", True),
        ("anything = lambda: None", True),
        ("anything = self.run", True),
        ("anything = self", True),
        ("anything = functools.partial(print, 1)", True),
        ("count = 3", False),
        ("hook = PENDING", False),
        ("count = maker.count", False),
        ("found = [maker]", False),
    ],
)
def test_what_counts(line: str, counted: bool, tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "one.py").write_text(textwrap.dedent(LATE).format(line=line))
    assert len(wiring.late_bound(tmp_path)) == counted


def test_an_object_that_was_just_made_may_be_completed(tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()
    text = (
        "class Part:\n    pass\n\n\n"
        "def make():\n    part = Part()\n    part.told = lambda: None\n    return part\n"
    )
    (tmp_path / "infinity" / "one.py").write_text(text)
    assert wiring.late_bound(tmp_path) == []


def test_circles_are_found_under_type_checking_and_in_functions(tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "one.py").write_text(
        "if TYPE_CHECKING:\n    from infinity.two import X\n"
    )
    (tmp_path / "infinity" / "two.py").write_text("def late():\n    import infinity.three\n")
    (tmp_path / "infinity" / "three.py").write_text("from infinity import one\n")
    (tmp_path / "infinity" / "four.py").write_text("from infinity import one\n")
    assert wiring.cycles(tmp_path) == [("infinity.one", "infinity.three", "infinity.two")]
