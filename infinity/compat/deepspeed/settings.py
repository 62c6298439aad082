"""An engine's configuration: parsed once, then read through methods.

    Settings      the configuration as given, and parsed (`DeepSpeedRun`)
    ConfigNames   DeepSpeedEngine's methods that return settings of the configuration
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

import infinity as inf
from infinity._src.config.deepspeed import load
from infinity.compat.deepspeed.errors import DeepSpeedRefusal

log = logging.getLogger("infinity")

Config = str | os.PathLike[str] | Mapping[str, Any]
_STRAYS = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
)
"""Keys that TRL adds at the top level for a reference model, where DeepSpeed ignores them. infinity
uses none of these settings."""
_STAGE_0 = (
    "zero_optimization.stage=0: states rest in CPU memory and are split over the ranks, as with "
    "stage 1, with the same numbers"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """config: the configuration as given. run: its parsed settings. stage: ZeRO stage, 0 to 3."""

    config: Mapping[str, Any]
    run: inf.DeepSpeedRun
    stage: int

    @classmethod
    def read(cls, config: Config, world_size: int) -> Settings:
        """Read a configuration: a mapping, a path, or a JSON object in base64.

        Raises: DeepSpeedRefusal naming key, value and fix.
        """
        if isinstance(config, Mapping):
            config = {name: value for name, value in config.items() if name not in _STRAYS}
        values = written(config)
        stage = _stage(values)
        try:
            run = inf.read_deepspeed(
                config if stage else _as_stage_1(values),
                world_size=world_size,
                ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None,
                keep_auto=True,
            )
        except ValueError as error:
            raise DeepSpeedRefusal(str(error)) from error
        if run.micro_batch_size is None:
            raise DeepSpeedRefusal(
                "train_batch_size and train_micro_batch_size_per_gpu are left out: give one of them"
            )
        if not stage:
            log.info("DeepSpeed configuration: %s", _STAGE_0)
        return cls(values, run, stage)

    def check_filled(self, world_size: int, *, optimizer: bool, scheduler: bool) -> None:
        """Check that the caller has replaced every "auto" value that will be used, as DeepSpeed
        expects. optimizer, scheduler: whether the configuration's section is used.

        Raises: DeepSpeedRefusal naming the keys and the fix.
        """
        taken = {"optimizer": optimizer, "scheduler": scheduler}
        values = {name: value for name, value in self.config.items() if taken.get(name, True)}
        try:
            inf.read_deepspeed(
                values if self.stage else _as_stage_1(values), world_size=world_size
            )
        except ValueError as error:
            raise DeepSpeedRefusal(str(error)) from error

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to which parameters are cast; None: no cast."""
        return None if self.run.dtype is None else getattr(torch, self.run.dtype)

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast around forward; None: no autocast."""
        return None if self.run.autocast is None else getattr(torch, self.run.autocast)

    def policy(self, device: torch.device) -> inf.Policy:
        """Return the policy for a model that computes on `device`. Raises: DeepSpeedRefusal for
        settings that a Policy cannot express."""
        try:
            return inf.Policy.from_deepspeed(self.run, device=device)
        except ValueError as error:
            raise DeepSpeedRefusal(str(error)) from error

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the configuration as given; an empty mapping if it is missing."""
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section zero_optimization."""
        return self.section("zero_optimization")


def written(config: Config) -> Mapping[str, Any]:
    """Return a configuration as a mapping, without parsing its settings. config: a mapping, a path,
    or base64. Raises: DeepSpeedRefusal for anything else.
    """
    try:
        return load(config)[1]
    except ValueError as error:
        raise DeepSpeedRefusal(str(error)) from error


def _stage(config: Mapping[str, Any]) -> Any:
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        return zero.get("stage", 0)
    return 1 if zero is True else 0


def _as_stage_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage 0 configuration rewritten to stage 1, the lowest stage that infinity has."""
    zero = config.get("zero_optimization")
    kept = dict(zero) if isinstance(zero, Mapping) else {}
    return {**config, "zero_optimization": {**kept, "stage": 1}}


class ConfigNames:
    """DeepSpeedEngine's methods that return settings of the configuration, by DeepSpeed's names."""

    settings: Settings
    micro_batch_size: int
    accumulation_steps: int
    world_size: int

    # -- batches -----------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples of a step on all ranks together."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one rank's micro-batch."""
        return self.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step."""
        return self.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, micro-batch size of a rank, gradient accumulation steps)."""
        return self.train_batch_size(), self.micro_batch_size, self.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of a step by changing its micro-batches. Raises: DeepSpeedRefusal."""
        part = self.micro_batch_size * self.world_size
        if train_batch_size <= 0 or train_batch_size % part:
            raise DeepSpeedRefusal(
                f"train_batch_size={train_batch_size!r}: Train batch size must be divisible by "
                f"micro-batch data parallelism, {part} here"
            )
        self.accumulation_steps = train_batch_size // part

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples of a micro-batch; a step's number of micro-batches stays."""
        self.micro_batch_size = micro_batch_size

    def managed_gradient_accumulation(self) -> bool:
        """Return whether the engine counts micro-batches; else each `step()` is a step."""
        return self.settings.run.managed_accumulation

    def gradient_clipping(self) -> float:
        """Return the norm to which a step's gradients are clipped; 0: no clipping."""
        return self.settings.run.clip_norm

    def steps_per_print(self) -> Any:
        """Return the steps between two progress lines in the log; None: no lines."""
        return self.settings.config.get("steps_per_print")

    # -- precision ---------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16."""
        return self.settings.run.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16."""
        return self.settings.run.dtype == "bfloat16"

    def fp16_auto_cast(self) -> bool:
        """Return whether floating inputs of forward are cast to fp16."""
        return self.settings.run.cast_inputs

    def torch_autocast_enabled(self) -> bool:
        """Return whether forward runs under autocast."""
        return self.settings.run.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of autocast."""
        return self.settings.autocast

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of parameters and of accumulated gradients."""
        params = self.settings.dtype or torch.float32
        grads = self.settings.run.policy.get("grad_dtype")
        return params, params if grads is None else getattr(torch, grads)

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts to overflows."""
        scaling = self.settings.run.loss_scaling
        return scaling is not None and scaling.static is None

    def loss_scale(self) -> float:
        """Return the configuration's static loss scale; 0 if it is dynamic or there is none."""
        scaling = self.settings.run.loss_scaling
        return (scaling.static or 0.0) if scaling is not None else 0.0

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale."""
        scaling = self.settings.run.loss_scaling
        return 1.0 if scaling is None else scaling.initial_scale

    # -- ZeRO --------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self.settings.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO, 0 to 3."""
        return self.settings.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are split: stages 2 and 3."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are split: stage 3."""
        return self.settings.stage >= 3

    def zero_offload_param(self) -> Mapping[str, Any] | None:
        """Return the section offload_param; None without one."""
        return self.settings.zero.get("offload_param")

    def zero_offload_optimizer(self) -> Mapping[str, Any] | None:
        """Return the section offload_optimizer; None without one."""
        return self.settings.zero.get("offload_optimizer")

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the configuration offloads optimizer states."""
        return (self.zero_offload_optimizer() or {}).get("device") in ("cpu", "nvme")

    zero_cpu_offload = zero_use_cpu_optimizer

    def zero_nvme_offload_optimizer(self) -> bool:
        """Return whether the configuration offloads optimizer states to NVMe."""
        return (self.zero_offload_optimizer() or {}).get("device") == "nvme"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether `save_16bit_model` writes a file with stage 3."""
        return bool(self.settings.zero.get("stage3_gather_16bit_weights_on_model_save"))

    def zero_allow_untested_optimizer(self) -> bool:
        """Return whether `initialize` accepts an optimizer of any class."""
        return bool(self.settings.config.get("zero_allow_untested_optimizer"))

    def zero_ignore_unused_parameters(self) -> bool:
        """Return whether a step skips parameters without a gradient; else it raises."""
        return bool(self.settings.zero.get("ignore_unused_parameters", True))

    # -- optimizer and schedule --------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """Return the configuration's optimizer type: adam, adamw, lion, adagrad, muon in lower
        case, others as written; None without one.
        """
        name = self.settings.section("optimizer").get("type")
        own = ("adam", "adamw", "lion", "adagrad", "muon")
        return name.lower() if isinstance(name, str) and name.lower() in own else name

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Return the settings of the configuration's optimizer."""
        return self.settings.section("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        """Return the configuration's scheduler type; None without one."""
        return self.settings.section("scheduler").get("type")

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Return the settings of the configuration's scheduler."""
        return self.settings.section("scheduler").get("params")

    # -- modes that infinity lacks -----------------------------------------------------------------

    def _never(self) -> bool:
        """Return False: infinity has no such mode, or refuses a configuration that enables it."""
        return False

    amp_enabled = eigenvalue_enabled = pld_enabled = curriculum_learning_enabled = _never
    sparse_gradients_enabled = elasticity_enabled = autotuning_enabled = _never
    wall_clock_breakdown = flops_profiler_enabled = memory_breakdown = _never
    load_universal_checkpoint = use_node_local_storage = is_deepcompile_enabled = _never
