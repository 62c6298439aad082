"""Data loaders: that of `initialize(training_data=)`, and a wrapper that restarts a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.errors import DeepSpeedRefusal


class RepeatingLoader:
    """An endless iterator: it restarts its loader whenever the loader is exhausted."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """A loader of this rank's part of a data set, by default shuffled by a `DistributedSampler`.
    `iter()` restarts it and returns the loader itself.

    batch_size: samples of one rank's micro-batch. num_workers: as torch's; 0: in this process.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        pin_memory: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Any = None,
        drop_last: bool = False,
        num_workers: int = 0,
    ) -> None:
        streamed = isinstance(dataset, IterableDataset)
        if data_sampler is None and not streamed:
            data_sampler = DistributedSampler(
                dataset, num_replicas=comm.get_world_size(), rank=comm.get_rank()
            )
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, data_sampler
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
        )
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._iterator = iter(self.loader)
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        return next(self._iterator)


def check_dataset(dataset: Any) -> None:
    """Raise DeepSpeedRefusal unless `dataset` is a data set of torch."""
    if not (
        isinstance(dataset, (IterableDataset, torch.utils.data.Dataset))
        or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
    ):
        raise DeepSpeedRefusal(
            f"training_data={type(dataset).__name__}: give a torch.utils.data.Dataset"
        )
