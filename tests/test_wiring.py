"""No behaviour is assigned after construction, and imports form no new cycles; see tests/wiring.py.
"""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import wiring

ROOT = Path(__file__).resolve().parent.parent
LATE_BOUND = {
    "UpdateMode._parts": "the mode asks the step pipeline, and the pipeline, the unsharder and "
    "the reducer ask the mode; one record, by the one call of attach",
    "EngineAccess._background": "gathers ask for the faults of updates and saves, which are made "
    "of what gathers",
    "Transaction._durable": "commits go through the durable run, which reads the steps that the "
    "pipeline counts",
    "Device._executor": "the executor is opened with sizes that depend on the device, and the "
    "device copies by the executor",
    "on_failure": "the watchdog watches before a communication stream is made, since making one "
    "waits for all ranks; at the first failure groups are aborted, and streams that wait are woken",
}
"""Fields that may be bound late, and why. At most 5."""
FLOORS_MAX, ARROWS_MAX = 10, 107
"""Floors of folders, and imports from folder to folder."""


@pytest.fixture(autouse=True, scope="module")
def trees_are_dropped() -> Iterator[None]:
    gc.disable()  # it would go through the nodes again and again while files are parsed
    yield
    wiring.forget()
    gc.enable()


def test_behaviour_is_given_by_constructors() -> None:
    # Integrations and stand-ins change what a trainer made: its constructors are not ours to call.
    theirs = ("infinity/integrations/", "infinity/compat/", "infinity/_embedding.py")
    sites = [site for site in wiring.late_bound(ROOT) if not str(site.path).startswith(theirs)]
    new = [f"{site.path}:{site.line}: {site.text}" for site in sites if site.attr not in LATE_BOUND]
    assert not new, "give it by the constructor, or by a method that says what it does"
    assert {site.attr for site in sites} == LATE_BOUND.keys(), "the list has what is gone"
    assert len(LATE_BOUND) <= 5


def test_imports_run_in_no_circles() -> None:
    """Imports under TYPE_CHECKING and inside of functions count, too."""
    assert wiring.cycles(wiring.imports(ROOT)) == []


def test_calls_between_c_files_point_down() -> None:
    """Workers append ended runs to a list that a higher file pops, as executor.h explains."""
    floor, calls = wiring.c_floors(ROOT / "native"), wiring.c_calls(ROOT / "native")
    files = {path.relative_to(ROOT / "native").as_posix() for path in ROOT.glob("native/*/*.c")}
    assert floor.keys() == files, "executor.h lists the files of native/, and no others"
    assert ("executor/jobs.c", "inf_drive_queue_run", "executor/drive.c") in calls
    assert [call for call in sorted(calls) if floor[call[2]] >= floor[call[0]]] == []


def test_kernels_and_memory_do_not_know_the_executor() -> None:
    for path in (*ROOT.glob("native/kernels/*"), *ROOT.glob("native/memory/*")):
        assert "executor.h\"" not in path.read_text(), path


def test_a_call_up_between_c_files_is_found(tmp_path: Path) -> None:
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "low.c").write_text("void inf_low(int a) { use(inf_high); }\n")
    (tmp_path / "executor" / "high.c").write_text(
        "/* inf_low */ static int inf_own(void) {}\nint *inf_high(\n    int a) { inf_own(); }\n"
    )
    (tmp_path / "executor" / "executor.h").write_text(
        "/* Floors:\n *\n *   executor/low.c   the lowest\n *   executor/high.c\n */\n"
    )
    assert wiring.c_floors(tmp_path) == {"executor/low.c": 0, "executor/high.c": 1}
    assert wiring.c_calls(tmp_path) == {("executor/low.c", "inf_high", "executor/high.c")}


def test_rooms_stand_on_few_floors() -> None:
    """A folder is above all folders that it imports; the counts may only shrink."""
    rooms = wiring.rooms(wiring.imports(ROOT))
    assert max(wiring.floors(rooms).values()) <= FLOORS_MAX
    assert sum(map(len, rooms.values())) <= ARROWS_MAX


def test_rooms_that_import_each_other_have_no_floor() -> None:
    assert wiring.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}
    with pytest.raises(RecursionError):
        wiring.floors({"a": {"b"}, "b": {"a"}})


LATE = """
    import functools
    from collections.abc import Callable
    from typing import NamedTuple

    class Part:
        hook: Callable[[], None]
        def __init__(self, other: "Part") -> None:
            self.other = other
            self.told = lambda: None
            self.count = 0
            self.found: list[Part] = []
            self.callbacks: list[Callable[[], None]] = []
            self.table: dict[str, Callable[[], None]] = {}
        def work(self) -> None: ...

    class Parts(NamedTuple):
        part: Part
        count: int

    class Ticket: ...

    class User:
        def __init__(self, part: Part, maker: Part, callbacks: list[Callable[[], None]]) -> None:
            LINE
        def run(self) -> None: ...

    class Setter:
        def __init__(self, given: Part) -> None:
            self._build(given)
        def _build(self, given: Part) -> None:
            self.part = given
        def take(self, part: Part, parts: Parts, call: Callable[[], None], ticket: Ticket,
                 count: int) -> None:
            SETTER
"""


def count_in(tmp_path: Path, *, line: str = "pass", setter: str = "pass") -> int:
    (tmp_path / "infinity").mkdir()
    text = textwrap.dedent(LATE).replace("LINE", line).replace("SETTER", setter)
    (tmp_path / "infinity" / "one.py").write_text(text)
    return len(wiring.late_bound(tmp_path))


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("part.hook = maker.work", True),
        ("part.hook = None", True),
        ("part.told = print", True),
        ("part.other = maker", True),
        ("part.anything = lambda: None", True),
        ("part.anything = self.run", True),
        ("part.anything = self", True),
        ("part.anything = functools.partial(print, 1)", True),
        ("part.anything = self.run or None", True),
        ("part.anything = self.run if maker else None", True),
        ("part.anything = (1, self.run)", True),
        ("setattr(part, 'anything', self.run)", True),
        ("object.__setattr__(part, 'anything', self.run)", True),
        ("setattr(part, 'hook', maker)", True),
        ("part.__dict__['anything'] = self.run", True),
        ("vars(part)['anything'] = self.run", True),
        ("part.__dict__.update(anything=self.run)", True),
        ("part.callbacks.append(self.run)", True),
        ("part.callbacks += [self.run]", True),
        ("part.callbacks.extend([self.run])", True),
        ("part.table['key'] = self.run", True),
        ("part.table.update({'key': self.run})", True),
        ("part.table.setdefault('key', self.run)", True),
        ("part.other.callbacks.append(self.run)", True),
        ("callbacks.append(self.run)", True),
        ("part.count = 3", False),
        ("part.count += 1", False),
        ("part.hook = PENDING", False),
        ("part.count = maker.count", False),
        ("part.found = [maker.count]", False),
        ("part.table['key'] = 3", False),
        ("mine = []; mine.append(self.run)", False),
        ("setattr(part, 'count', 3)", False),
    ],
)
def test_what_counts_from_outside(line: str, counted: bool, tmp_path: Path) -> None:
    assert count_in(tmp_path, line=line) == counted


@pytest.mark.parametrize(
    ("setter", "counted"),
    [
        ("self.mine = part", True),
        ("self.mine = call", True),
        ("self.mine = call or None", True),
        ("self.mine = parts", True),
        ("self.mine = parts.part", True),
        ("self.mine = part.hook", True),
        ("self.mine = lambda: None", True),
        ("self.calls.append(call)", True),
        ("self.calls['key'] = call", True),
        ("self.calls += [call]", True),
        ("self.mine, self.size = part, 1", True),
        ("setattr(self, 'mine', part)", True),
        ("self.__dict__['mine'] = part", True),
        ("self.mine = ticket", False),
        ("self.mine = count", False),
        ("self.mine = parts.count", False),
        ("self.sizes.append(count)", False),
        ("self.part.work()", False),
    ],
)
def test_what_counts_in_a_method_of_any_name(setter: str, counted: bool, tmp_path: Path) -> None:
    assert count_in(tmp_path, setter=setter) == counted


def test_an_object_that_was_just_made_may_be_completed(tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()
    text = (
        "class Part:\n    pass\n\n\ndef make():\n"
        "    part = Part()\n    part.told = lambda: None\n    return part\n"
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
    found = wiring.cycles(wiring.imports(tmp_path))
    assert found == [("infinity.one", "infinity.three", "infinity.two")]
