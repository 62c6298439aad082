"""The modules of `deepspeed` that scripts import, and where this package defines their names.

Each row of TABLE: a module, and (home, names) pairs. A home is a module of this package or of torch
(`torch...`). `theirs=ours` exports the home's name `ours` as `theirs`.
"""

from __future__ import annotations

import importlib
from typing import Any

VERSION = "0.19.8"
"""The DeepSpeed release whose configuration and calls this package implements."""
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.split("."))
COMMIT = "unknown"
"""The value of `__git_hash__` and `__git_branch__`, as in DeepSpeed's releases."""

_HOME = "infinity.compat.deepspeed"
_RELEASE = (
    "__version__=VERSION version=VERSION __version_major__=MAJOR __version_minor__=MINOR "
    "__version_patch__=PATCH __git_hash__=COMMIT __git_branch__=COMMIT"
)
_STATES = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
)
_LEAVES = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module "
    "z3_leaf_parameter set_z3_leaf_module set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix"
)
_ZERO = (
    "Init GatheredParameters MiCS_Init ZeroParamStatus ZeroParamType register_external_parameter "
    "unregister_external_parameter TiledLinear TiledLinearReturnBias unwrap_model_for_generation"
)
_SCHEDULES = (
    "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR VALID_LR_SCHEDULES "
    "LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_MIN_LR "
    "WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE "
    "WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS CYCLE_MIN_LR CYCLE_MAX_LR "
    "CYCLE_FIRST_STEP_SIZE CYCLE_SECOND_STEP_SIZE CYCLE_FIRST_STAIR_COUNT "
    "CYCLE_SECOND_STAIR_COUNT CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_STEP_SIZE DECAY_LR_RATE "
    "DECAY_MOM_RATE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
    "LR_RANGE_TEST_STAIRCASE add_tuning_arguments"
)
_CHECKPOINTING = "checkpoint configure is_configured reset get_cuda_rng_tracker"
_GROUPS = (
    "mpu get_data_parallel_group=get_world_group _get_data_parallel_group=get_world_group "
    "get_data_parallel_rank=get_rank _get_data_parallel_rank=get_rank "
    "get_data_parallel_world_size=get_world_size _get_data_parallel_world_size=get_world_size "
    "get_model_parallel_rank=rank_in_group_of_one "
    "_get_sequence_parallel_rank=rank_in_group_of_one "
    "get_model_parallel_world_size=world_size_of_one "
    "_get_model_parallel_world_size=world_size_of_one "
    "_get_sequence_parallel_world_size=world_size_of_one"
)
_MEMORY = (
    "estimate_zero3_model_states_mem_needs_all_live "
    "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs"
)

TABLE: dict[str, tuple[tuple[str, str], ...]] = {
    "deepspeed": (
        ("initialization", "initialize add_config_arguments"),
        ("engine", "DeepSpeedEngine"),
        ("comm", "init_distributed"),
        ("accelerator", "get_accelerator"),
        ("schedules", "add_tuning_arguments"),
        ("optimizers", "DeepSpeedOptimizer=ZeROOptimizer"),
        ("utilities", "DeepSpeedDataLoader"),
        ("names", _RELEASE),
        ("errors", "DeepSpeedConfigError=DeepSpeedRefusal"),
        ("utilities", "logger log_dist OnDevice"),
    ),
    "deepspeed.accelerator": (
        ("accelerator", "get_accelerator is_current_accelerator_supported"),
    ),
    "deepspeed.accelerator.real_accelerator": (("accelerator", "get_accelerator"),),
    "deepspeed.checkpointing": (("checkpointing", _CHECKPOINTING),),
    "deepspeed.checkpoint": (),
    "deepspeed.checkpoint.utils": (("utilities", "clone_tensors_for_torch_save"),),
    "deepspeed.comm": (("comm", "*"),),
    "deepspeed.comm.comm": (("comm", "*"),),
    "deepspeed.constants": (("comm", "TORCH_DISTRIBUTED_DEFAULT_PORT=DEFAULT_PORT"),),
    "deepspeed.moe": (),
    "deepspeed.moe.layer": (("utilities", "MoE"),),
    "deepspeed.moe.utils": (
        ("utilities", "is_moe_param split_params_into_different_moe_groups_for_optimizer"),
    ),
    "deepspeed.ops": (),
    "deepspeed.ops.adam": (("ops", "DeepSpeedCPUAdam FusedAdam"),),
    "deepspeed.ops.adagrad": (("ops", "DeepSpeedCPUAdagrad"),),
    "deepspeed.ops.aio": (("ops", "AsyncIOBuilder"),),
    "deepspeed.ops.op_builder": (("ops", "AsyncIOBuilder"),),
    "deepspeed.ops.lion": (("ops", "DeepSpeedCPULion FusedLion"),),
    "deepspeed.runtime": (),
    "deepspeed.runtime.activation_checkpointing": (),
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        ("checkpointing", _CHECKPOINTING),
    ),
    "deepspeed.runtime.base_optimizer": (
        ("optimizers", "DeepSpeedOptimizer=ZeROOptimizer ZeROOptimizer"),
    ),
    "deepspeed.runtime.config": (
        ("errors", "DeepSpeedConfigError=DeepSpeedRefusal"),
        ("utilities", ("ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LION_OPTIMIZER "
                      "SGD_OPTIMIZER")),
    ),
    "deepspeed.runtime.dataloader": (("utilities", "DeepSpeedDataLoader RepeatingLoader"),),
    "deepspeed.runtime.engine": (("engine", "DeepSpeedEngine"),),
    "deepspeed.runtime.fp16": (),
    "deepspeed.runtime.fp16.loss_scaler": (("loss_scale", "LossScaler DynamicLossScaler"),),
    "deepspeed.runtime.lr_schedules": (("schedules", _SCHEDULES),),
    "deepspeed.runtime.utils": (
        ("utilities", "see_memory_usage"),
        ("torch.nn.utils", "clip_grad_norm_"),
    ),
    "deepspeed.runtime.zero": (("zero", _ZERO),),
    "deepspeed.runtime.zero.partition_parameters": (
        ("zero", _ZERO),
        ("parameters", "is_zero_param"),
        ("accelerator", "get_accelerator"),
        ("utilities", "zero_wrapper_for_fp_tensor_constructor"),
        ("torch", "_orig_torch_arange=arange"),
    ),
    "deepspeed.runtime.zero.stage3": (
        ("optimizers", "DeepSpeedZeroOptimizer_Stage3"),
        ("utilities", _MEMORY),
        ("zero", "unwrap_model_for_generation"),
    ),
    "deepspeed.runtime.zero.tiling": (("zero.tiling", "TiledLinear TiledLinearReturnBias"),),
    "deepspeed.runtime.zero.stage_1_and_2": (("optimizers", "DeepSpeedZeroOptimizer"),),
    "deepspeed.runtime.zero.utils": (
        ("parameters", "is_zero_param"),
        ("errors", "ZeRORuntimeException=DeepSpeedRefusal"),
    ),
    "deepspeed.utils": (
        ("utilities", "logger log_dist OnDevice"),
        ("utilities", "RepeatingLoader"),
        ("zero.access", _STATES),
        ("zero.leaf_modules", _LEAVES),
    ),
    # All ranks are data-parallel; no other groups exist.
    "deepspeed.utils.groups": (("comm", _GROUPS),),
    "deepspeed.utils.logging": (("utilities", "logger log_dist"),),
    "deepspeed.utils.tensor_fragment": (("zero.access", _STATES),),
    "deepspeed.utils.z3_leaf_module": (("zero.leaf_modules", _LEAVES),),
    "deepspeed.utils.zero_to_fp32": (
        ("zero_to_fp32", ("get_fp32_state_dict_from_zero_checkpoint "
                         "convert_zero_checkpoint_to_fp32_state_dict "
                         "load_state_dict_from_zero_checkpoint")),
    ),
    "deepspeed.zero": (("zero", _ZERO),),
}  # fmt: skip


def contents(module: str) -> dict[str, Any]:
    """Return the attributes of a module of TABLE, by name."""
    found: dict[str, Any] = {}
    for home, names in TABLE[module]:
        source = importlib.import_module(home if home.startswith("torch") else f"{_HOME}.{home}")
        listed = source.__all__ if names == "*" else names.split()
        for name in listed:
            theirs, _, ours = name.partition("=")
            found[theirs] = getattr(source, ours or theirs)
    return found
