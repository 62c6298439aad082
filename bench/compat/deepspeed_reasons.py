"""Reasons why a test of DeepSpeed says nothing about the adapter, or does not apply to it.

Only looked up for tests that did not pass: by the failure's message (a test that reads a field of
DeepSpeed's own optimizer fails naming it), or by the test's name if the message is not specific.
"""

from __future__ import annotations

import re

_CONFIG = "looks inside: the classes of its configuration; the adapter reads the JSON itself"

INSIDE_NAMES = {
    r"deepspeed\.runtime\.zero\.(config|offload_config|leaf_module_config)\b": _CONFIG,
    r"deepspeed\.runtime\.(precision_config|config_utils|constants)\b": _CONFIG,
    r"deepspeed\.runtime\.config\.": _CONFIG,
    r"deepspeed\.runtime\.zero\.(stage3|stage_1_and_2|parameter_offload|partition_parameters"
    r"|offload_states)\b": "looks inside: its partitions, buckets and hooks",
    r"deepspeed\.runtime\.(fp16|bf16_optimizer|torch_autocast)\b":
        "looks inside: the classes of its optimizers, and its dtypes on the wire",
    r"deepspeed\.runtime\.zero\.linear\b": "looks inside: its own linear layer of stage 3",
    r"deepspeed\.runtime\.utils\.": "looks inside: functions of its engine",
    r"deepspeed\.utils\.set_log_level_from_string$": "looks inside: what it logs",
    r"deepspeed\.(pipe|runtime\.pipe|runtime\.checkpoint_engine)\b":
        "pipeline parallelism, which is refused",
    r"deepspeed\.moe\b": "its own MoE layer; experts of a model are offloaded as they are",
    r"deepspeed\.(module_inject|runtime\.tensor_parallel)\b":
        "tensor parallelism, which is refused",
    r"deepspeed\.checkpoint\b|deepspeed\.runtime\.engine\._checkpoint":
        "looks inside: the layout of its checkpoint files",
    r"hjson\b": "Hjson files: JSON is read",
}  # fmt: skip
"""Names of DeepSpeed that are no part of what scripts call, and what they are."""

INSIDE_ATTRIBUTES = frozenset({
    # of its optimizers
    "accumulated_grads_in_cpu", "averaged_gradients", "bit16_groups_flat", "fp16_groups",
    "fp32_groups_gradients_flat", "get_fp32_grad_partitions", "_get_norm_groups",
    "grad_partitions_flat_buffer", "leaf_parameters", "nccl_start_alignment_factor",
    "single_partition_of_fp32_groups", "_set_fp32_optimizer_param_groups", "loss_scale_config",
    "parameter_offload", "unscale_and_clip_grads",
    # of its engine
    "allreduce_gradients", "tput_timer", "_flush_coalesced_reduction_zero3",
    "_is_gradient_accumulation_boundary", "_backward_epilogue", "fp32_partitioned_groups_flat",
    "_change_recovery_script_permissions", "_get_zero_param_shapes", "offload_states",
    # of its parameters and modules
    "all_gather_coalesced", "ds_active_sub_modules", "ds_param_alias", "ds_tensor",
    "_external_params", "_partition_param_sec",
})  # fmt: skip
"""Fields and methods of DeepSpeed's objects that its documentation does not have."""

BY_DETAIL = {
    r"^SecondOrderUnsupported": "refused by name: torch.func of an offloaded model",
    r'gradient_allreduce_op="sum" is refused': "refused by name: gradient_allreduce_op",
    r'"optimizer.torch_adam"=\w+: there is no such key':
        "refused by name: a key that DeepSpeed does not know either, and ignores",
    r"ns_method|type=\"Muon\"": "refused by name: Muon",
    r'type="(Lamb|OneBit\w+|ZeroOne\w+)"': "refused by name: optimizers with their own compression",
    r"MiCS_Init|mics_shard_size": "refused by name: MiCS",
    r"(bf16|fp16)_master_weights_and_grads": "refused by name: masters in 16 bits",
    r"sparse_gradients": "refused by name: sparse_gradients",
    r"load_universal": "refused by name: checkpoint.load_universal",
    r"attribute name must be string, not 'Absent'":
        "looks inside: its dtypes on the wire (after the losses agreed)",
    r"tensor_parallel\.\w+=\d+ is refused": "tensor parallelism, which is refused",
    r"data is not allocated yet":
        "keeps a view of a gathered parameter past its context: on a CPU, `.cpu()` copies nothing",
    r"moe\.layer\.MoE: the engine splits": "its own MoE layer, which is refused",
    r"a model that trains in another engine": "refused by name: two engines over one model",
    r"is not consistent across all ranks":
        "refused by name: a checkpoint of which each rank has another tag",
    r"is not instantiated but Client LR Scheduler":
        "refused by name: a schedule of an optimizer that the engine does not get",
}  # fmt: skip
"""Patterns of what a failure says: what the engine refuses, with the fix in its message."""

_NOT_REFUSED = "asks for a refusal of what works here"
_OPTIMIZER_CLASS = "asks for the class of the optimizer; the engine's takes the place of any"
_AT_REST = "asks that a parameter at rest has no elements, or none gathered; it keeps its shape"

BY_NAME = {
    r"TestOptimizerImplementation::test$": _NOT_REFUSED,
    r"test_zero1_no_offload_uses_bf16_optimizer$": _NOT_REFUSED,
    r"TestUnmanagedGradientAccumulationOverlapCommValidation": _NOT_REFUSED,
    r"TestZero0DirectBackwardStillRaises": _NOT_REFUSED,
    r"TestIncorectAllgatherBucketSize": _NOT_REFUSED,
    r"TestZeroOffloadOptim::": _NOT_REFUSED,
    r"test_no_grad_input_error$": _NOT_REFUSED,
    r"(TestClientOptimizer|TestConfigOptimizer)::test$": _OPTIMIZER_CLASS,
    r"(TestZeroGatheredParametersFree|TestZeroPartitionCache)": _AT_REST,
    r"TestZero3ParamPartitioningManyParams": "looks inside: the status of parameters in forward",
    r"TestZeroUserBackwardLeafModule": "refused by name: a leaf that is never called (ModuleList)",
    r"test_get_autocast_decorators": "looks inside: its own linear layer of stage 3",
    r"TestGatheredParametersAllRanksErrorOnModification": _NOT_REFUSED,
    r"TestReturnParam::test_ext_param_return$": "looks inside: the aliases of external parameters",
    r"TestHookAttributeDelegation": "looks inside: its hooks",
    r"TestUnwrapModel::": "looks inside: its hooks",
    r"test_fp32_adapter_with_bf16_base_params": "refused by name: masters in 16 bits",
    r"test_reused_checkpointed_module_invocations": "looks inside: its own linear layer of stage 3",
    r"TestZero3ActivationCheckpointLifecycle": "looks inside: the status of parameters in backward",
    r"test_flat_buffers_on_accelerator": "looks inside: its flat buffers",
    r"TestGradientClippingConfig": "looks inside: functions of its configuration",
    r"test_user_cpu_adam_must_enable_bf16_states": "refused by name: masters in 16 bits",
    r"TestCoalesceCollectiveCount": "looks inside: which collectives it calls",
    r"test_safe_get_full_grad_returns_local_pre_reduce_value": "looks inside: p.grad of a bucket",
    r"test_pipeline_parallelism_rejected": "pipeline parallelism, which is refused",
    r"TestZeroDtypeCocktail": "looks inside: which collectives it calls",
}
"""Patterns of test names."""

_NOT_THERE = re.compile(r"^(?:[\w.]*)NotThere: the adapter has no ([\w.]+)")
_NO_ATTRIBUTE = re.compile(r"has no attribute '(\w+)'")


def reason_of(name: str, detail: str) -> str | None:
    """Return why a test that failed says nothing about the adapter; None: it does."""
    found = _NOT_THERE.match(detail)
    if found is not None:
        for pattern, reason in INSIDE_NAMES.items():
            if re.match(pattern, found[1]):
                return reason
    found = _NO_ATTRIBUTE.search(detail)
    if found is not None and found[1] in INSIDE_ATTRIBUTES:
        return f"looks inside: {found[1]}"
    for patterns, text in ((BY_DETAIL, detail), (BY_NAME, name)):
        for pattern, reason in patterns.items():
            if re.search(pattern, text):
                return reason
    return None
