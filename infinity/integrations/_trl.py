"""Support for TRL's trainers, beyond transformers' Trainer. `embed` of
infinity.integrations.transformers imports this module if a trainer's class is TRL's.

    TRL                                here
    SyncRefModelCallback               gathers one parameter of each model at a time
    checkpoints with sync_ref_model    include the reference model, which training changes
    activation_offloading, vLLM, continuous batching, BEMACallback
                                       refused by name

For every trainer `embed` itself offloads the reference model and keeps ranks generating in step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trl.trainer.callbacks import BEMACallback, SyncRefModelCallback

import infinity as inf
from infinity._embedding import check_methods, only_engine

TESTED = "1.16.0"
"""The release of TRL that this was written against."""

_REFERENCE = "infinity_reference"
"""Directory of a synchronised reference model inside a checkpoint."""


def check_trainer(trainer: Any) -> None:
    """Raise ValueError for settings of a TRL trainer that an offloaded model does not support,
    naming an alternative.
    """
    if getattr(trainer.args, "activation_offloading", False):
        raise ValueError(
            "activation_offloading=True: TRL would move gathered weights with the activations; "
            "leave it out, and write inf.Policy(activations='cpu') (or 'nvme')"
        )
    if getattr(trainer, "use_vllm", False):
        raise ValueError(
            "use_vllm=True: TRL copies parameters to vLLM directly from memory, where those of an "
            "offloaded model are not; leave it out, and the offloaded model generates"
        )
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise ValueError(
            "use_transformers_continuous_batching=True: generation would run in a second thread, "
            "and only one thread may use an offloaded model; leave it out"
        )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, BEMACallback):
            raise ValueError(
                "BEMACallback keeps two more copies of all parameters in memory, and reads "
                "parameters without gathering them; leave it out"
            )


def adapt(trainer: Any) -> type:
    """Replace a TRL trainer's SyncRefModelCallback, and return the mixin for the trainer's class.
    """
    callbacks = trainer.callback_handler.callbacks
    for at, callback in enumerate(callbacks):
        if isinstance(callback, SyncRefModelCallback):
            callbacks[at] = _SyncOffloaded(callback.ref_model, callback.accelerator)
    return EmbeddedTRLTrainer


class _SyncOffloaded(SyncRefModelCallback):  # type: ignore[misc]
    """SyncRefModelCallback for two offloaded models. Gathers one parameter of each at a time."""

    @staticmethod
    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        """Set each target parameter to (1 - alpha) target + alpha model."""
        source, sink = (
            inf.handle(only_engine(each, "embed(trainer)")) for each in (model, target_model)
        )
        pairs = zip(target_model.parameters(), model.parameters(), strict=True)
        for target, param in pairs:
            # Not through `.data`: writes to it do not raise the version counter.
            with source.gather(param), sink.gather(target), torch.no_grad():
                target.mul_(1.0 - alpha).add_(param, alpha=alpha)


class EmbeddedTRLTrainer:
    """Mixin of an embedded TRL trainer. Its class lists it before EmbeddedTrainer."""

    callback_handler: Any
    ref_model: Any

    def _infinity_changing_reference(self) -> torch.nn.Module | None:
        """Return the offloaded reference model if training changes it, else None."""
        syncs = any(isinstance(each, _SyncOffloaded) for each in self.callback_handler.callbacks)
        return only_engine(self.ref_model, "embed(trainer)") if syncs else None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        reference = self._infinity_changing_reference()
        if reference is not None:
            inf.save(reference, None, Path(output_dir) / _REFERENCE).wait()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        reference = self._infinity_changing_reference()
        # A checkpoint of a run without sync_ref_model has no reference model.
        if reference is not None and checkpoint and (Path(checkpoint) / _REFERENCE).is_dir():
            inf.restore(reference, None, Path(checkpoint) / _REFERENCE)


check_methods(SyncRefModelCallback, ("sync_target_model",), "trl", TESTED)
