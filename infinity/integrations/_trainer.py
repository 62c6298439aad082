"""A mixin of the Trainer methods that work differently with an offloaded model.

    Trainer method                     here
    _move_model_to_device              does nothing: the engine places parameters
    _wrap_model                        applies autocast and compile; no DDP: the engine reduces
    create_optimizer                   builds infinity's optimizer for `TrainingArguments.optim`
    training_step                      enters no_sync; averages gradients of plain adapters
    _get_grad_norm                     returns None if updates consume gradients in backward
    log                                adds the statistics of a DriveFigures callback
    evaluation_loop                    does not cast the model
    _save                              streams the weights; collective
    _save_optimizer_and_scheduler, _load_from_checkpoint,
    _load_optimizer_and_scheduler, _load_best_model
                                       the engine's states, in a subdirectory of the checkpoint

Trainer itself saves random generators, scheduler, scaler and the position in the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers

import infinity as inf
from infinity._embedding import (
    STATES,
    check_methods,
    engine_optimizer,
    has_states,
    only_engine,
    share_values,
)
from infinity.integrations._weights import (
    TESTED,
    export_adapters,
    has_own_adapters,
    is_adapted,
    is_peft_model,
    load_own_adapter,
    save_new,
    save_pretrained,
)

# -- Figures of the drives beside the loss ---------------------------------------------------------


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

    def on_train_begin(self, *_arguments: Any, **kwargs: Any) -> None:
        """Start counting. Raises: ValueError for a model that is not offloaded."""
        self._module = only_engine(kwargs["model"], "DriveFigures")
        self._begin()

    def on_step_end(self, *_arguments: Any, **_kwargs: Any) -> None:
        """Count a step."""
        last, begun = self._last, self._begun
        self._begin()
        now = self._last
        self._seconds += self._begun - begun
        self._read += now.bytes_read - last.bytes_read
        self._written += now.bytes_written - last.bytes_written
        self._waited_s += now.io_wait_s - last.io_wait_s
        self._waited_s += now.update_wait_s - last.update_wait_s

    def on_evaluate(self, *_arguments: Any, **_kwargs: Any) -> None:
        """Exclude the evaluation: restart the interval."""
        if self._module is not None:
            self._begin()

    def on_save(self, *_arguments: Any, **_kwargs: Any) -> None:
        """Exclude the save: restart the interval."""
        self._begin()

    def on_train_end(self, *_arguments: Any, **_kwargs: Any) -> None:
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


# -- Optimizers by name ----------------------------------------------------------------------------


class Adagrad(inf.Elementwise):
    """`torch.optim.Adagrad` over offloaded parameters, with the signature that Trainer calls."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(torch.optim.Adagrad, params, **settings)


class RMSprop(inf.Elementwise):
    """`torch.optim.RMSprop` over offloaded parameters, with the signature that Trainer calls."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(torch.optim.RMSprop, params, **settings)


_OF_TORCH: dict[str, type] = {
    "adamw_torch": inf.AdamW,
    "adamw_torch_fused": inf.AdamW,
    "sgd": inf.SGD,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
}
"""Names for which Trainer chooses a torch class; infinity's class accepts the same settings."""

_SAME_RULE = ("adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit")
"""Other implementations of 32-bit AdamW. Each requires a package or a device that infinity's does
not."""

_LION = ("lion_32bit", "paged_lion_32bit")

_FEW_BITS = {
    "adamw_torch_4bit": "adamw_torch", "adamw_torch_8bit": "adamw_torch",
    "adamw_bnb_8bit": "adamw_torch", "adamw_8bit": "adamw_torch",
    "paged_adamw_8bit": "adamw_torch", "lion_8bit": "lion_32bit", "paged_lion_8bit": "lion_32bit",
}  # fmt: skip
"""Name that also sets a storage format of moments, which the policy sets here -> name of the same
update rule without a format."""

Build = Callable[[], tuple[Any, dict[str, Any]]]


def optimizer_of(args: Any, build: Build) -> tuple[type, dict[str, Any]]:
    """Return infinity's optimizer class and its settings for `args.optim`.

    build: returns Trainer's own choice; called only for the names of torch's classes.

    Raises: ValueError for an optimizer that infinity does not have, naming an alternative.
    """
    name = getattr(args.optim, "value", args.optim)
    if name in _OF_TORCH:
        _, settings = build()
        # "fused" selects torch's kernel, not the update rule.
        return _OF_TORCH[name], {key: settings[key] for key in settings if key != "fused"}
    betas = (args.adam_beta1, args.adam_beta2)
    if name in _SAME_RULE:
        return inf.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    if name in _LION:
        return inf.Lion, {"lr": args.learning_rate, "betas": betas}
    if name in _FEW_BITS:
        raise ValueError(
            f"optim={name!r} names a storage format of moments, which the policy sets here: give "
            f"optim={_FEW_BITS[name]!r} and inf.Policy(state='compact'), with moments in 8 bits, "
            "or state='bf16'"
        )
    raise ValueError(
        f"optim={name!r}: the engine has no such optimizer; give one of "
        f"{', '.join([*_OF_TORCH, *_SAME_RULE, *_LION])}, or optimizer_cls_and_kwargs=(inf.AdamW, "
        "{...}) (inf.Lion, inf.SGD, or a subclass of inf.Elementwise)"
    )


log = logging.getLogger("infinity")

_TRAINING_ARGS = "training_args.bin"
_SCHEDULER = "scheduler.pt"
_OPTIMIZER = "optimizer.pt"
_MANIFEST_BYTES_MAX = 1 << 30
"""An optimizer.pt above this size has moments: the names and step counts of any model need less."""

_TRAINER = "_infinity_trainer"
"""Attribute of an offloaded module that refers to its trainer."""


class EmbeddedTrainer:
    """Mixin of a trainer whose model is offloaded. `embed` puts it before the trainer's class."""

    # Attributes that Trainer sets.
    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    # The policy given to `embed`; None if the model was offloaded before.
    _infinity_policy: inf.Policy | None

    @property
    def _infinity_module(self) -> torch.nn.Module:
        return only_engine(self.model, "embed(trainer)")

    @property
    def _infinity_optimizer(self) -> Any:
        return engine_optimizer(self.optimizer)

    @property
    def _infinity_plain(self) -> list[torch.nn.Parameter]:
        """Trainable parameters added after the offload: adapters in ordinary memory, updated by a
        torch optimizer.
        """
        params = self.model.parameters()
        return [param for param in params if param.requires_grad and not inf.is_offloaded(param)]

    # -- the model ---------------------------------------------------------------------------------

    def call_model_init(self, trial: Any = None) -> Any:
        """Build the model of another trial, and offload it; close the previous model's engine."""
        for module in inf.offloaded_modules(self.model):
            inf.handle(module).close()
        model = super().call_model_init(trial)  # type: ignore[misc]
        return offload_for(model, self._infinity_policy, self.args.device)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if not inf.offloaded_modules(model):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _wrap_model(
        self, model: Any, training: bool = True, dataloader: Any = None  # noqa: ARG002
    ) -> Any:
        if self.accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
            return model  # an earlier call has compiled it
        if not training and self.accelerator._models:
            return model
        begin = time.monotonic()
        # Applies autocast and compile; with these arguments it neither moves nor wraps the model.
        wrapped = self.accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        if not training:
            self.model_preparation_time = round(time.monotonic() - begin, 4)
        return wrapped

    # -- the optimizer -----------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Build the optimizer that the arguments name, over the offloaded parameters.

        Raises: ValueError for a torch optimizer and for a name without an optimizer of infinity;
        with updates in backward, for max_grad_norm and enable_jit_checkpoint.
        """
        if not _has_norm(inf.handle(self._infinity_module).policy):
            self._check_backward()
        plain = self._infinity_plain
        if plain and _world() > 1:
            share_values(plain, self.args.device)
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if not plain:
            check_optimizer(optimizer)
        return optimizer

    def _check_backward(self) -> None:
        if self.args.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm={self.args.max_grad_norm} with Policy(update='backward'): an "
                "update takes each gradient before the norm of all is known; give max_grad_norm=0, "
                "or Policy(update='backward', generations=2)"
            )
        if getattr(self.args, "enable_jit_checkpoint", False):
            raise ValueError(
                "enable_jit_checkpoint=True with Policy(update='backward'): Trainer would save "
                "between backward and the step, when some parameters are updated already; leave it "
                "out, or give Policy(update='backward', generations=2)"
            )

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return infinity's optimizer class and settings for `args.optim`; Trainer's own if plain
        adapters are trained.
        """
        own = super().get_optimizer_cls_and_kwargs  # type: ignore[misc]
        if self._infinity_plain:
            found: tuple[Any, Any] = own(args, model)
            return found
        return optimizer_of(args, lambda: own(args, model))

    # -- a step ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a micro-batch, under no_sync unless it ends a step."""
        last = self.accelerator.gradient_state.sync_gradients
        engine = inf.handle(self._infinity_module)
        with contextlib.nullcontext() if last else engine.no_sync():
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if last and _world() > 1:
            _average(self._infinity_plain)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and not _has_norm(inf.handle(self._infinity_module).policy):
            return None
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; add the statistics of a `DriveFigures` callback to each loss."""
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, DriveFigures):
                    logs.update(callback.take())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    # -- evaluation --------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate in the model's dtype: bf16_full_eval and fp16_full_eval are ignored, with one
        warning. The memory that they save is not used by an offloaded model.
        """
        with self._without_cast():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _without_cast(self) -> Iterator[None]:
        names = [name for name in ("fp16_full_eval", "bf16_full_eval") if getattr(self.args, name)]
        if names and not self.__dict__.get("_infinity_warned_dtype"):
            self._infinity_warned_dtype = True
            log.warning(
                "%s has no effect: an offloaded model is evaluated in its parameters' dtype, %s",
                names[0],
                next(self.model.parameters()).dtype,
            )
        for name in names:
            setattr(self.args, name, False)
        try:
            yield
        finally:
            for name in names:
                setattr(self.args, name, True)

    # -- weights out -------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        """Stream the weights to files, and write the tokenizer and the arguments. Collective."""
        out = Path(output_dir if output_dir is not None else self.args.output_dir)
        if self.args.should_save:
            out.mkdir(parents=True, exist_ok=True)
            # States of an earlier run in this directory do not belong to these weights. This run's
            # states are written later.
            shutil.rmtree(out / STATES, ignore_errors=True)
        if is_adapted(self.model):
            export_adapters(self.model, out, first=self.args.should_save)
        else:
            save_pretrained(self.model, out, first=self.args.should_save)
        if self.args.should_save:
            self._save_beside(out)
        self.accelerator.wait_for_everyone()

    def _save_beside(self, out: Path) -> None:
        collator: Any = getattr(self, "data_collator", None)
        processing = getattr(self, "processing_class", None)
        if processing is None:
            processing = getattr(collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(out)
        save_new(self.args, out / _TRAINING_ARGS)

    # -- states ------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        out = Path(output_dir)
        if self._infinity_optimizer is None:
            # Plain adapters: the base is frozen, and no checkpoint includes it.
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        # Checkpoints of adapters omit the frozen parameters, which belong to the base model.
        inf.save(
            self._infinity_module,
            self._infinity_optimizer,
            out / STATES,
            frozen=not is_adapted(self.model),
        ).wait()
        if self.args.should_save:
            # Names and step counts only. Without this file, a Trainer that is not embedded would
            # silently resume with a fresh optimizer.
            save_new(self.optimizer.state_dict(), out / _OPTIMIZER)
            save_new(self.lr_scheduler.state_dict(), out / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        directory = Path(resume_from_checkpoint)
        own: Any = super()
        if self._has_states(directory):
            if is_peft_model(self.model) and len(self.model.peft_config) > 1:
                # Adapters that are not trained (a reference) are only in PEFT's files.
                with _activity(self.model):
                    own._load_from_checkpoint(resume_from_checkpoint, model)
            # In training, _load_optimizer_and_scheduler restores all states together.
            if not self.is_in_train:  # type: ignore[attr-defined]
                inf.restore(self._infinity_module, None, directory / STATES)
        elif has_own_adapters(self.model):
            load_own_adapter(self.model, directory)
        elif is_adapted(self.model) or not any(directory.glob("model*.safetensors")):
            own._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(directory)

    def _has_states(self, directory: Path) -> bool:
        """Return whether a checkpoint has the engine's states.

        Raises: ValueError if a trainer that was not embedded has since overwritten the other files,
        so that the states are an earlier run's; and if adapters were added after `inf.offload`,
        while the checkpoint has states of offloaded adapters.
        """
        if not has_states(directory):
            return False
        if self._infinity_plain:
            raise ValueError(
                f"{directory} has states of adapters that were offloaded; here they were added "
                "after inf.offload: embed(trainer, policy) on a model that is not offloaded yet, "
                "after get_peft_model"
            )
        manifest = directory / _OPTIMIZER
        # Only a small file may be a manifest; a large one has torch's moments.
        kept = (
            torch.load(manifest, map_location="cpu", weights_only=True)
            if manifest.is_file() and manifest.stat().st_size < _MANIFEST_BYTES_MAX
            else {}
        )
        if "infinity_manifest" not in kept:
            raise ValueError(
                f"{directory / STATES} has states of an earlier run: a trainer that was not "
                f"embedded has written {directory} since; move {directory / STATES} elsewhere to "
                "begin with the weights that are there"
            )
        return True

    def _load_weights(self, directory: Path) -> None:
        loaded = inf.load_safetensors(self._infinity_module, directory, strict=False)
        for kind, names in (("missing", loaded.missing), ("unexpected", loaded.unexpected)):
            if names:
                log.warning("%s: %s tensors: %s", directory, kind, ", ".join(names))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._infinity_optimizer is None:
            # _has_states raises if the checkpoint has states of offloaded adapters.
            if checkpoint is not None:
                self._has_states(Path(checkpoint))
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        directory = Path(checkpoint)
        if not self._has_states(directory):
            if (directory / _OPTIMIZER).exists():
                raise ValueError(
                    f"{directory / _OPTIMIZER} has the states of an optimizer of torch, which an "
                    "offloaded model does not take: resume without embed(trainer), or from a "
                    "checkpoint of an embedded trainer; without the file training begins with "
                    "its weights"
                )
            return
        inf.restore(self._infinity_module, self._infinity_optimizer, directory / STATES)
        if (directory / _SCHEDULER).is_file():
            self.lr_scheduler.load_state_dict(
                torch.load(directory / _SCHEDULER, weights_only=True)
            )

    def _load_best_model(self) -> None:
        directory = Path(self.state.best_model_checkpoint)
        if self._has_states(directory):
            log.info("best model: %s (score %s)", directory, self.state.best_metric)
            # Restores parameters, and sets masters to their values. Moments stay, as in Trainer.
            inf.restore(self._infinity_module, None, directory / STATES)
        elif has_own_adapters(self.model):
            load_own_adapter(self.model, directory)
        elif is_adapted(self.model) or not any(directory.glob("model*.safetensors")):
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_weights(directory)

    def end(self) -> None:
        """End training. On several ranks this destroys the process groups. Engines need their
        groups to close, so they are closed first.
        """
        if _world() > 1:
            for model in (self.model, getattr(self, "ref_model", None)):
                for module in inf.offloaded_modules(model) if model is not None else ():
                    inf.handle(module).close()
        super().end()  # type: ignore[misc]


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _average(params: list[torch.nn.Parameter]) -> None:
    """Replace gradients by their means over the ranks. Collective."""
    for param in params:
        # A rank whose batch did not use the parameter must join the all_reduce, too.
        grad = param.grad if param.grad is not None else torch.zeros_like(param)
        dist.all_reduce(grad)
        param.grad = grad.div_(_world())


def _has_norm(policy: inf.Policy) -> bool:
    """Return whether all gradients of a step exist before an update consumes the first."""
    return policy.update != "backward" or policy.generations > 1


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that is not infinity's."""
    if engine_optimizer(optimizer) is None:
        kind = type(optimizer)
        raise ValueError(
            f"the trainer has an optimizer {kind.__module__}.{kind.__qualname__}, and the states "
            "of an offloaded model need one of the engine: leave optimizers= out, and embed "
            "builds what TrainingArguments(optim=...) names; or give optimizer_cls_and_kwargs="
            "(inf.AdamW, {...})"
        )


def offload_for(
    model: Any, policy: inf.Policy | None, device: torch.device, load: Any = None
) -> Any:
    """Offload a trainer's model, if it is not offloaded yet, and return it. All ranks start with
    rank 0's values, also of new heads and adapters. device: the trainer's.
    """
    engines = inf.offloaded_modules(model)
    for module in engines:
        _check_ranks(module, inf.handle(module).comm.world)
    if not engines:
        if policy is not None and policy.mesh is not None:
            _check_ranks(model, policy.mesh.size())
        if _world() > 1:
            share_values((*model.parameters(), *model.buffers()), device)
        inf.offload(model, policy, load=load)
    elif load is not None:
        raise ValueError(
            f"load={load!r} for a model that is offloaded already: give load= to inf.offload"
        )
    _check_plain(model)
    if _world() > 1:
        _generate_in_step(model.get_base_model() if is_peft_model(model) else model)
    return model


def _check_ranks(model: Any, ranks: int) -> None:
    """Raise ValueError unless engine and trainer have the same number of ranks: otherwise each rank
    would train a separate model on its part of the data."""
    if ranks != _world():
        raise ValueError(
            f"{type(model).__name__} is offloaded for {ranks} rank(s), and the trainer runs "
            f"{_world()}: leave Policy(mesh=) out, and offload it once the process group exists "
            "(embed(trainer, policy) does)"
        )


@contextlib.contextmanager
def _activity(model: Any) -> Iterator[None]:
    """Preserve which PEFT adapters are active and trained: after loading several adapters, Trainer
    activates only the first."""
    active = list(model.active_adapters)
    trained = [param for param in model.parameters() if param.requires_grad]
    yield
    if len(active) > 1:
        model.base_model.set_adapter(active)
        for param in trained:
            param.requires_grad_(True)


def _check_plain(model: Any) -> None:
    """Raise ValueError for trainable parameters that are not offloaded and would not be saved."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    plain = [name for name, param in trained if not inf.is_offloaded(param)]
    if plain and (len(plain) < len(trained) or not is_adapted(model)):
        raise ValueError(
            f"{plain[0]} was added after inf.offload, and is trained beside offloaded parameters "
            f"({len(plain)} such): call embed(trainer, policy) on a model that is not offloaded "
            "yet, once all of it is there"
        )


def _generate_in_step(model: Any) -> None:
    """Keep `model.generate` running on each rank until all ranks are done: each of its forwards
    gathers parameters from all ranks.
    """
    if not hasattr(model, "generate") or "generate" in model.__dict__:
        return
    own = model.generate

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        # Overrides the False that Seq2SeqTrainer passes without DeepSpeed or FSDP.
        return own(*args, **(kwargs | {"synced_gpus": True}))

    model.generate = generate


def embed_trainer(trainer: Any, policy: inf.Policy | None, load: Any) -> Any:
    """Implement `infinity.integrations.transformers.embed`."""
    if isinstance(trainer, EmbeddedTrainer):
        raise ValueError("this trainer is embedded already")
    _check_trainer(trainer)
    kind = type(trainer)
    of_trl = any(base.__module__.partition(".")[0] == "trl" for base in kind.__mro__)
    if of_trl:
        # Imported here: TRL need not be installed for other trainers.
        from infinity.integrations import _trl

        _trl.check_trainer(trainer)
    _check_device(trainer)
    policy = _on_its_device(policy, trainer.args.device)
    offload_for(trainer.model, policy, trainer.args.device, load)
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, torch.nn.Module) and not inf.offloaded_modules(reference):
        own = policy or inf.handle(only_engine(trainer.model, "embed(trainer)")).policy
        # The reference model takes no steps, so a durable run has nothing to commit.
        frozen = dataclasses.replace(own, durable=False, durable_every=1)
        offload_for(reference.requires_grad_(False), frozen, trainer.args.device)
    for module in inf.offloaded_modules(trainer.model):
        _take_over(module, trainer)
    trainer._infinity_policy = policy
    parts = (_trl.adapt(trainer), EmbeddedTrainer) if of_trl else (EmbeddedTrainer,)
    trainer.__class__ = type(f"Infinity{kind.__name__}", (*parts, kind), {})
    return trainer


def _check_device(trainer: Any) -> None:
    """Raise ValueError for a model that was offloaded for another kind of device than the
    trainer's."""
    for module in inf.offloaded_modules(trainer.model):
        computes = next(module.parameters()).device
        if computes.type != trainer.args.device.type:
            raise ValueError(
                f"the model computes on {computes}, and the trainer's batches are on "
                f"{trainer.args.device}: give Policy(device={str(trainer.args.device)!r}) when it "
                "is offloaded"
            )


def _on_its_device(policy: inf.Policy | None, device: torch.device) -> inf.Policy | None:
    """Return the policy with the trainer's device, if it names none: otherwise a model that is
    still on the CPU or on meta would compute on the CPU.
    """
    if device.type == "cpu" or (policy is not None and policy.device is not None):
        return policy
    return dataclasses.replace(policy or inf.Policy(), device=device)


def _take_over(module: torch.nn.Module, trainer: Any) -> None:
    """Record that a module belongs to this trainer. If a previous trainer still exists, drop its
    optimizer: a parameter can have only one.
    """
    reference = module.__dict__.get(_TRAINER)
    before = reference() if reference is not None else None
    module.__dict__[_TRAINER] = weakref.ref(trainer)
    if before is not None and before is not trainer:
        before.optimizer = before.lr_scheduler = None
        before.callback_handler.optimizer = before.callback_handler.lr_scheduler = None
        before.accelerator.free_memory()
        gc.collect()


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, transformers.Trainer):
        raise ValueError(
            f"embed takes a transformers.Trainer, or a subclass, not a {type(trainer).__name__}"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            f"{'deepspeed' if trainer.is_deepspeed_enabled else 'fsdp'} shards the model already: "
            "leave it out of TrainingArguments, or do not embed"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{trainer.args.n_gpu} GPUs without ranks: Trainer would wrap the model in "
            "nn.DataParallel, which copies parameters; start the script with torchrun, or set "
            "CUDA_VISIBLE_DEVICES to one GPU"
        )
    if inf.offloaded_modules(trainer.model) and is_adapted(trainer.model):
        return  # adapters added after the offload have a torch optimizer
    if trainer.optimizer is not None:
        check_optimizer(trainer.optimizer)
    given = trainer.optimizer_cls_and_kwargs
    if given is not None and not issubclass(
        given[0], (inf.AdamW, inf.SGD, inf.Lion, inf.Elementwise, inf.Matrixwise)
    ):
        raise ValueError(
            f"optimizer_cls_and_kwargs=({given[0].__name__}, ...) is no optimizer of the engine: "
            "give inf.AdamW, inf.SGD, inf.Lion, inf.Muon, or a subclass of inf.Elementwise"
        )


check_methods(
    accelerate.Accelerator,
    ("prepare_model", "unwrap_model", "wait_for_everyone", "free_memory"),
    "accelerate",
    "1.15.0",
)
check_methods(
    transformers.Trainer,
    (
        "call_model_init", "_move_model_to_device", "_wrap_model", "create_optimizer",
        "get_optimizer_cls_and_kwargs", "training_step", "_get_grad_norm", "log", "evaluation_loop",
        "_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint",
        "_load_optimizer_and_scheduler", "_load_best_model",
    ),
    "transformers",
    TESTED,
)  # fmt: skip
