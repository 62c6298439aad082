"""A run of tests that leaves a backend out says so, and fails when it must not."""

from __future__ import annotations

import pytest

from tests import forks

WITHOUT_LIBURING = (
    "import sys; sys.modules['liburing'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)
ONE = "tests/unit/aio/test_executor_jobs.py::test_a_submission_of_nothing_is_done"


@pytest.mark.parametrize("accepted", ["", pytest.param("io_uring", marks=pytest.mark.slow)])
def test_a_backend_that_is_not_tested_is_named_and_fails_the_run_unless_accepted(accepted):
    done = forks.run_code(
        WITHOUT_LIBURING, "-q", "-p", "no:cacheprovider", ONE,
        INFINITY_REQUIRE_BACKENDS="1", INFINITY_WITHOUT_BACKENDS=accepted,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "NOT TESTED: io_uring: the package liburing is not usable here" in done.stdout
    assert "NOT TESTED: threads" not in done.stdout
    assert (done.returncode == 0) == bool(accepted)
