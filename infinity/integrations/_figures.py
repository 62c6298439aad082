"""A callback that logs drive statistics with the loss."""

from __future__ import annotations

import time
from typing import Any

import transformers

import infinity as inf
from infinity._embedding import only_engine


class DriveFigures(transformers.TrainerCallback):
    """Callback of an embedded trainer that adds drive statistics to each logged loss: in every
    `report_to` backend, the progress bar and `trainer_state.json`:

        drive_read_gb_per_s, drive_write_gb_per_s   all drives of this rank, while training
        waiting                                     share of the time spent waiting for drives
        eta                                         lower bound of the step time / measured time,
                                                    from the second step on
        written_tb_per_day                          drive wear of a day of training at this rate

    The first three are means since the previous log line; evaluations and saves do not count.
    `eta` is omitted until it is known, and if the drives' bandwidths (`Policy(io=...)`) are not.
    """

    def __init__(self) -> None:
        self._module: Any = None
        self._seconds = self._waited_s = 0.0
        self._read = self._written = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any  # noqa: ARG002
    ) -> None:
        """Start counting. Raises: ValueError for a model that is not offloaded."""
        self._module = only_engine(kwargs["model"], "DriveFigures")
        self._begin()

    def on_step_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any  # noqa: ARG002
    ) -> None:
        """Count a step."""
        last, begun = self._last, self._begun
        self._begin()
        now = self._last
        self._seconds += self._begun - begun
        self._read += now.bytes_read - last.bytes_read
        self._written += now.bytes_written - last.bytes_written
        self._waited_s += now.io_wait_s - last.io_wait_s
        self._waited_s += now.update_wait_s - last.update_wait_s

    def on_evaluate(
        self, args: Any, state: Any, control: Any, **kwargs: Any  # noqa: ARG002
    ) -> None:
        """Exclude the evaluation: restart the interval."""
        if self._module is not None:
            self._begin()

    def on_save(
        self, args: Any, state: Any, control: Any, **kwargs: Any  # noqa: ARG002
    ) -> None:
        """Exclude the save: restart the interval."""
        self._begin()

    def on_train_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any  # noqa: ARG002
    ) -> None:
        """Drop the reference to the model."""
        self._module = None

    def take(self) -> dict[str, float]:
        """Return the figures since the last call; an empty dict if no step has ended since."""
        if not self._seconds:
            return {}
        stats, seconds = self._last, self._seconds
        figures = {
            "drive_read_gb_per_s": self._read / seconds / 1e9,
            "drive_write_gb_per_s": self._written / seconds / 1e9,
            "waiting": self._waited_s / seconds,
            "eta": stats.terms.eta_floor if stats.terms is not None else None,
            "written_tb_per_day": stats.written_tb_per_day,
        }
        self._seconds = self._waited_s = 0.0
        self._read = self._written = 0
        return {name: value for name, value in figures.items() if value is not None}

    def _begin(self) -> None:
        self._last = inf.handle(self._module).stats()
        self._begun = time.monotonic()
