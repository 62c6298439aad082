"""The engine that `initialize` returns: DeepSpeed's methods on an offloaded model.

    loss = engine(batch)          the module's forward, under the configuration's autocast
    engine.backward(loss)         divides the loss by the micro-batches of a step, multiplies it by
                                  the loss scale, and runs backward
    engine.step()                 at a step's last micro-batch: overflow check, clipping, the
                                  optimizer's step, gradients dropped, the scheduler's step

`inf.handle(engine.module)` is infinity's handle of the offloaded model.

A script may call `loss.backward()` itself. The engine's forward therefore returns a view of each
output. A hook on the view divides its gradient by the micro-batches of a step, as `engine.backward`
divides the loss, and raises if the loss scale is needed and the loss was not scaled. If one output
was computed from another (a loss from logits), no gradient is divided twice, since the model has
used the original tensor and not the view. Inside of `engine.backward` the hooks leave gradients
unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

import infinity as inf
from infinity.compat.deepspeed import checkpoints, comm
from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.optimizers import ZeROOptimizer
from infinity.compat.deepspeed.settings import ConfigNames, Settings
from infinity.compat.deepspeed.utilities import DeepSpeedDataLoader, check_dataset
from infinity.compat.deepspeed.zero.leaf_modules import fill_missing_grads

# -- Backwards that a script runs itself -----------------------------------------------------------


_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
_NO_TASK = -1


class OutputHooks:
    """Hooks on the outputs of one engine's forwards.

    divisor: returns the micro-batches of a step. needs_scale: whether a loss must be scaled.
    """

    def __init__(self, divisor: Callable[[], int], needs_scale: Callable[[], bool]) -> None:
        self._divisor, self._needs_scale = divisor, needs_scale
        self._inside = False
        # Id of the autograd graph task that began at a scaled loss. An id and not a flag: nothing
        # would reset a flag after a backward that raised.
        self._scaled_task = _NO_TASK

    def attach(self, outputs: Any) -> Any:
        """Return the outputs, each tensor that has a grad_fn replaced by a view with a hook."""
        if not torch.is_grad_enabled() or (self._divisor() == 1 and not self._needs_scale()):
            return outputs
        return _mapped(outputs, self._viewed)

    def _viewed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(self._hook)
        return view

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Enter a context in which the hooks leave gradients unchanged."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def note_scaled(self, loss: torch.Tensor) -> None:
        """Accept the backward that begins at `loss`, which `engine.scale` has scaled."""
        loss.register_hook(self._begin_scaled)

    def _begin_scaled(self, _: torch.Tensor) -> None:
        self._scaled_task = _graph_task_id()

    def _hook(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self._inside:
            return None
        if self._needs_scale() and self._scaled_task != _graph_task_id():
            raise RuntimeError(
                "Loss scaling is required for this configuration, but backward() was called "
                "directly without scaling the loss: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return grad / self._divisor()


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to each tensor of a value. Containers and dataclasses are copied, not changed.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(each, change) for each in value]
        # A named tuple's constructor expects separate arguments.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = _mapped(each, change)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _mapped(getattr(value, field.name), change))
        return made
    return value


log = logging.getLogger("infinity")

Client = dict[str, Any]


class DeepSpeedEngine(ConfigNames, torch.nn.Module):
    """An offloaded model with DeepSpeed's training calls. `initialize` creates it.

    module: the offloaded model. optimizer, lr_scheduler: may be None. training_dataloader: loads
    `initialize(training_data=)`. global_steps: steps taken or skipped; skipped_steps: steps
    skipped; micro_steps: calls of `step()`; global_samples: samples of all steps. Other attributes
    resolve to the module's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        settings: Settings,
        optimizer: ZeROOptimizer | None,
        lr_scheduler: Any,
        *,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings = settings
        self.config = settings.config
        self.optimizer = optimizer
        self.basic_optimizer = None if optimizer is None else optimizer.optimizer
        self.lr_scheduler = lr_scheduler
        self.collate_fn = collate_fn
        self.device = get_accelerator().device()
        self.world_size = self.dp_world_size = self.seq_dp_world_size = comm.get_world_size()
        self.mp_world_size = 1
        self.global_rank = comm.get_rank()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        assert settings.run.micro_batch_size is not None, "Settings.read sees to it"
        self.micro_batch_size = settings.run.micro_batch_size
        self.accumulation_steps = settings.run.accumulation_steps
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.inside_no_sync_ctxt = False
        self._coalescing = self._autocast_noted = False
        self._boundary: bool | None = None
        self._stepping = False
        self._micro_batches = 0
        self._step_applied = False
        self._hooks = OutputHooks(
            self.gradient_accumulation_steps,
            lambda: self.optimizer is not None and self.optimizer.needs_scaler(),
        )
        self.training_dataloader = None if training_data is None else self.deepspeed_io(
            training_data
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # The constructor may not have set `module` yet.
            modules = self.__dict__.get("_modules", {})
            if name == "module" or "module" not in modules:
                raise
            return getattr(modules["module"], name)

    # -- a step ------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward under the configuration's autocast. A torch.autocast around the
        call is disabled inside it.
        """
        if self.fp16_auto_cast():
            inputs, kwargs = _as_half(inputs), _as_half(kwargs)
        with self._autocast():
            outputs = self.module(*inputs, **kwargs)
        return self._hooks.attach(outputs)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        device, dtype = self.device.type, self.settings.autocast
        if dtype is not None:
            return torch.autocast(device, dtype)
        if not torch.is_autocast_enabled(device):
            return contextlib.nullcontext()
        if not self._autocast_noted:
            self._autocast_noted = True
            log.warning(
                "torch.autocast around the engine has no effect inside the engine, as with "
                "DeepSpeed: to use autocast, set torch_autocast.enabled and .dtype in the "
                "configuration"
            )
        return torch.autocast(device, enabled=False)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run the backward of a loss of one element.

        scale_wrt_gas: divide the loss by the micro-batches of a step first. Returns the loss after
        that division, without the loss scale. Collective on several ranks. Raises: DeepSpeedRefusal
        without an optimizer, and for a loss that is not a scalar tensor with a gradient.
        """
        optimizer = self._trained("backward")
        _check_loss(loss)
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = optimizer.scale_if_loss(loss)
        self._micro_batches += 1
        with self._hooks.inside(), self._reduction():
            scaled.backward(retain_graph=retain_graph)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss times the loss scale, for `engine.scale(loss).backward()`. Hooks on the
        engine's outputs divide the gradients by the micro-batches of a step.
        """
        optimizer = self._trained("scale")
        _check_loss(loss)
        scaled: torch.Tensor = optimizer.scale_if_loss(loss)
        self._hooks.note_scaled(scaled)
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; after a step's last one, take the step. lr_kwargs: arguments of
        `lr_scheduler.step`. Collective on several ranks.

        Raises: what `ZeROOptimizer.step` raises; DeepSpeedRefusal inside `no_sync`.
        """
        if self.inside_no_sync_ctxt:
            raise DeepSpeedRefusal(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it first"
            )
        self._trained("step")
        self._step_applied = False
        self._stepping = True
        try:
            if self.is_gradient_accumulation_boundary():
                self._take_step(lr_kwargs or {})
        finally:
            self._stepping = False
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self._trained("step")
        fill_missing_grads(self.module)
        self._check_unused()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.overflow:
            self.skipped_steps += 1
        else:
            self._step_applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        if self.managed_gradient_accumulation():
            self.global_samples += self.train_batch_size()
        else:
            self.global_samples += self.micro_batch_size * self.world_size * self._micro_batches
        self._micro_batches = 0
        every = self.steps_per_print()
        if every and math.isfinite(every) and self.global_steps % every == 0:
            self._report_progress(self.global_steps)

    def _check_unused(self) -> None:
        """Raise if a parameter has no gradient and ignore_unused_parameters is false."""
        if self.zero_ignore_unused_parameters():
            return
        unused = [
            name
            for name, param in self.module.named_parameters()
            if param.requires_grad and param.grad is None
        ]
        if unused:
            raise DeepSpeedRefusal(
                f"{len(unused)} parameters have no gradient (the first is {unused[0]}), with "
                "zero_optimization.ignore_unused_parameters=false: set that to true, or freeze "
                "these parameters"
            )

    def _report_progress(self, step: int) -> None:
        if self.global_rank == 0:
            log.info(
                "step=%s, skipped=%s, lr=%s, mom=%s",
                step,
                self.skipped_steps,
                self.get_lr(),
                self.get_mom(),
            )

    def _trained(self, call: str) -> ZeROOptimizer:
        if self.optimizer is None:
            raise DeepSpeedRefusal(
                f"engine.{call}: must provide optimizer during init in order to use {call}: name "
                "one in the configuration, or give it to initialize"
            )
        return self.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Drop the gradients of all parameters."""
        for param in self.module.parameters():
            param.grad = None

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` call took a step: it ended a step's last micro-batch,
        and gradients did not overflow."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients, before clipping and without the loss scale;
        infinity if that step was skipped, None before the first step.
        """
        return None if self.optimizer is None else self.optimizer._global_grad_norm

    # -- accumulation ------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this micro-batch is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return self._stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether this micro-batch and every later one ends a step."""
        if not self.managed_gradient_accumulation():
            raise DeepSpeedRefusal(
                "set_gradient_accumulation_boundary with managed_gradient_accumulation=false: "
                "step() is the boundary"
            )
        self._boundary = is_boundary

    def _reduction(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a backward: `handle.no_sync`, unless the backward ends a step."""
        last = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        # All backwards inside coalesce_grad_reduction belong to one step, which follows them.
        if self._coalescing or (last and not self.inside_no_sync_ctxt):
            return contextlib.nullcontext()
        return inf.handle(self.module).no_sync()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter a context in which gradients are not reduced. For stages 0 and 1.

        Raises: DeepSpeedRefusal with stages 2 and 3, and when nested.
        """
        if self.zero_optimization_partition_gradients():
            raise DeepSpeedRefusal(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO "
                f"stage {self.zero_optimization_stage()}: leave it out, gradients go to their shard"
            )
        with self._without_step("no_sync"):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Enter a context for all backwards of one step. Gradients are the same without it.
        Raises: NotImplementedError with stage 0, as DeepSpeed does; DeepSpeedRefusal inside
        `no_sync`, and with managed_gradient_accumulation=false.
        """
        if not self.managed_gradient_accumulation():
            raise DeepSpeedRefusal(
                "coalesce_grad_reduction with managed_gradient_accumulation=false: leave it out, "
                "step() is the boundary"
            )
        if not self.zero_optimization():
            raise NotImplementedError(
                "coalesce_grad_reduction requires ZeRO stage 1/2/3: set zero_optimization.stage"
            )
        with self._without_step("coalesce_grad_reduction"):
            self._coalescing = True
            try:
                yield
            finally:
                self._coalescing = False

    @contextlib.contextmanager
    def _without_step(self, name: str) -> Iterator[None]:
        if self.inside_no_sync_ctxt:
            raise DeepSpeedRefusal(
                f"{name} context manager reentry is unsupported: it cannot be nested inside of "
                "itself or of another one of no_sync and coalesce_grad_reduction; leave that first"
            )
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    # -- what scripts read -------------------------------------------------------------------------

    def _of_groups(self, name: str) -> list[Any]:
        if self.optimizer is None:
            return []
        return [group.get(name, 0.0) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return each parameter group's momentum (SGD, RMSprop), else its betas."""
        momentum = self.optimizer_name() in ("SGD", "RMSprop")
        return self._of_groups("momentum" if momentum else "betas")

    def get_type(self) -> list[Any]:
        """Return the "type" of each parameter group."""
        return self._of_groups("type")

    @property
    def cur_scale(self) -> float | None:
        """The loss scale of the next backward; None without an optimizer."""
        return None if self.optimizer is None else self.optimizer.cur_scale

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",  # noqa: ARG002
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's part of a data set, in micro-batches. Raises:
        DeepSpeedRefusal unless `dataset` is a data set of torch.
        """
        check_dataset(dataset)
        return DeepSpeedDataLoader(
            dataset,
            self.micro_batch_size if batch_size is None else batch_size,
            pin_memory=pin_memory and self.device.type == "cuda",
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            data_sampler=data_sampler,
            drop_last=self.settings.run.drop_last,
            num_workers=num_local_io_workers or 0,
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Client | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save states, schedule, loss scale and counts in `save_dir`/`tag`, and return True. Blocks
        until the checkpoint is complete. Collective.

        tag: default "global_step<n>"; the same on all ranks. client_state: the script's state:
        numbers, strings, tensors and containers of these. save_latest: write the tag to the file
        "latest". exclude_frozen_parameters: omit parameters without requires_grad. Raises:
        ValueError for a client_state of other types, and if the ranks' tags differ; AioError.
        """
        checkpoints.save(
            self, save_dir, tag, client_state or {}, latest=save_latest,
            frozen=not exclude_frozen_parameters,
        )  # fmt: skip
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Client | None]:
        """Resume from a checkpoint, on any number of ranks. Blocks. Collective.

        tag: default: the tag in the file "latest". load_module_strict: True: the checkpoint must
        have all parameters of the model, except frozen ones that the save excluded. False:
        parameters that the checkpoint lacks keep their values, and the log names them.
        load_module_only: parameters alone. custom_load_fn: called as `custom_load_fn(src=, dst=)`
        with the saved state dict, which is then whole in memory, and the module; sets parameters.
        Gradients of a step in progress are dropped: the next micro-batch is the first of a step.
        Returns the checkpoint's path and client_state; (None, None) if there is no "latest".

        Raises: ValueError naming what does not fit; AioError if there is no complete checkpoint.
        """
        return checkpoints.load(
            self,
            load_dir,
            tag,
            checkpoints.Wanted(
                optimizer=load_optimizer_states and not load_module_only,
                scheduler=load_lr_scheduler_states and not load_module_only,
                counts=not load_module_only,
            ),
            custom_load_fn,
            strict=load_module_strict,
        )

    def begin_step(self) -> None:
        """Restart micro-batch counting: the next micro-batch is the first of a step."""
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._micro_batches = 0

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's full state dict, on every rank. Collective."""
        state: dict[str, Any] = self.module.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load the module from `checkpoint["module"]`, a state dict in memory. Collective."""
        checkpoints.load_module(self.module, checkpoint["module"], strict, custom_load_fn)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the module's state dict on rank 0, in CPU memory, and None on other ranks. Gathers
        one submodule at a time. Collective. Raises: ValueError unless the stage is 3.
        """
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode: set zero_optimization.stage=3")
        return checkpoints.consolidated(self.module, frozen=not exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the module's state dict by torch.save on rank 0, which holds all of it in memory
        (`inf.export_safetensors` streams). Collective. Returns False and writes nothing with stage
        3 unless stage3_gather_16bit_weights_on_model_save is true.
        """
        asked = self.zero_gather_16bit_weights_on_model_save()
        if self.zero_optimization_partition_weights() and not asked:
            log.info(
                "save_16bit_model: nothing is written, since "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save is false"
            )
            return False
        checkpoints.save_weights(
            self.module, save_dir, save_filename, frozen=not exclude_frozen_parameters
        )
        return True

    save_fp16_model = save_16bit_model

    def empty_partition_cache(self) -> None:
        """Release the device's cached free memory."""
        get_accelerator().empty_cache()

    def destroy(self) -> None:
        """Close the engine and free its states. Parameters cannot be read afterwards."""
        handle = inf.handle(self.module)
        if not handle.closed:
            handle.close()


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise DeepSpeedRefusal(
            f"loss must be a scalar tensor that requires a gradient, not {what}; call "
            "output.backward(grad) of outputs themselves"
        )


def _as_half(value: Any) -> Any:
    """Cast the floating-point tensors of a value to fp16."""
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _as_half(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_half(each) for each in value)
    return value
