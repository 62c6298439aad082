"""An end that comes whole: every step of it is taken, whatever the others raise."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

log = logging.getLogger("infinity")


@contextlib.contextmanager
def run_all(*steps: Callable[[], object]) -> Iterator[None]:
    """After the block, however that ends, take every step in turn, also after one that raised. What
    failed first is raised; what fails after it is logged."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001  raised below, after the steps
        failure = error
    for step in steps:
        try:
            step()
        except BaseException as error:
            if failure is not None:
                log.exception("an end that goes on after %s: %s", type(failure).__name__, failure)
            failure = failure or error
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame
