"""Steps of a clean-up all run: the first failure is raised, later ones are logged."""

from __future__ import annotations

import logging

import pytest

from infinity._src.params.cleanup import run_all


def test_a_failure_after_the_first_is_logged_and_the_first_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[str] = []

    def failing(name: str) -> None:
        ran.append(name)
        raise OSError(name)

    caplog.set_level(logging.ERROR)
    steps = (lambda: failing("first"), lambda: failing("second"), lambda: ran.append("third"))
    with pytest.raises(OSError, match="first"), run_all(*steps):
        ran.append("block")
    assert ran == ["block", "first", "second", "third"]
    (record,) = caplog.records
    assert record.getMessage() == "clean-up continues after OSError: first"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "second"


def test_the_failure_of_the_block_comes_first() -> None:
    ran: list[str] = []
    with pytest.raises(KeyError), run_all(lambda: ran.append("step")):
        raise KeyError
    assert ran == ["step"]
