"""DeepSpeed configurations: the status of each key, common examples, and for every mistake an error
with key, value and fix."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.config import policy as policy_module
from infinity._src.config.deepspeed import OPTIMIZERS, SCHEDULES, LossScaling
from infinity._src.config.deepspeed_keys import (
    AUTO,
    KEYS,
    LEFT_OUT,
    MAPPED,
    NO_MEANING,
    REFUSED,
    SECTIONS,
    SPELLINGS,
)
from tests import deepspeed_page

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = os.environ.get("DEEPSPEED_SOURCE")
"""Return the package `deepspeed` of the table's version, installed or in a checkout."""


def config(*given: tuple[str, Any], stage: int = 3) -> dict[str, Any]:
    """Return a configuration of a stage, with values of dotted keys."""
    found: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    for name, value in given:
        section = found
        *above, last = name.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return found


def read(*pairs: tuple[str, Any], stage: int = 3, **more: Any) -> inf.DeepSpeedRun:
    return inf.read_deepspeed(config(*pairs, stage=stage), **more)


def message(value: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as found:
        inf.read_deepspeed(value, **more)
    return str(found.value)


# -- Keys that are mapped --------------------------------------------------------------------------

NVME = (
    ("zero_optimization.offload_param.device", "nvme"),
    ("zero_optimization.offload_param.nvme_path", "/a"),
)
BF16 = (("bf16.enabled", True),)
FP16 = (("fp16.enabled", True),)
OPTIMIZED = (("optimizer.type", "AdamW"),)
Z, P, O = "zero_optimization.", "optimizer.params.", "optimizer.type"  # noqa: E741
S, T = "scheduler.params.", "scheduler.type"
MUON = ((P + "ns_method", "standard"), (O, "Muon"), ("gradient_clipping", 0))
ONE_CYCLE = ((T, "OneCycle"), (S + "cycle_min_lr", 0.1), (S + "cycle_max_lr", 0.2))
COSINE = ((T, "WarmupCosineLR"), (S + "total_num_steps", 9))
MICRO = (("train_micro_batch_size_per_gpu", 2),)

# Key, value, the resulting fields of the run ("policy.x": of the policy, "optimizer.x": of the
# optimizer's arguments), and other needed keys.
CASES: list[tuple[str, Any, dict[str, Any], tuple[tuple[str, Any], ...]]] = [
    (Z + "stage", 3, {"policy.zero": 3}, ()),
    (Z + "offload_param.device", "cpu", {"policy.params": "cpu"}, ()),
    (Z + "offload_param.nvme_path", "/b", {"policy.nvme": ["/b"]}, NVME),
    (Z + "offload_param.max_in_cpu", 1e3, {"policy.resident": {"params": 2000}}, (*NVME, *BF16)),
    (
        Z + "offload_optimizer.device", "nvme", {"policy.optim": "nvme"},
        ((Z + "offload_optimizer.nvme_path", "/a"),),
    ),
    (
        Z + "offload_optimizer.nvme_path", "/b", {"policy.nvme": ["/a", "/b"]},
        (*NVME, (Z + "offload_optimizer.device", "nvme")),
    ),
    (Z + "zero_quantized_weights", True, {"policy.qwz": True}, ()),
    (Z + "zero_quantized_gradients", True, {"policy.qgz": True}, ()),
    (Z + "zero_hpz_partition_size", 8, {"policy.hpz": "device"}, ()),
    (Z + "cpu_offload", True, {"policy.optim": "cpu"}, ()),
    (Z + "cpu_offload_param", True, {"policy.params": "cpu"}, ()),
    ("bf16.enabled", True, {"dtype": "bfloat16", "policy.on_nonfinite": "skip"}, ()),
    ("bf16.check_grad_overflow", False, {"policy.on_nonfinite": "ignore"}, BF16),
    ("bf16.bf16_optimizer_states", True, {"policy.state": "bf16"}, BF16),
    (
        "fp16.enabled", True,
        {
            "dtype": "float16", "policy.on_nonfinite": "skip",
            "loss_scaling": LossScaling(None, 65536.0, 1000, 1.0, 2, False, True),
        },
        (),
    ),
    ("fp16.auto_cast", True, {"cast_inputs": True}, FP16),
    ("fp16.loss_scale", 128, {"loss_scaling.static": 128.0}, FP16),
    ("fp16.initial_scale_power", 4, {"loss_scaling.initial_scale": 16.0}, FP16),
    ("fp16.loss_scale_window", 7, {"loss_scaling.window": 7}, FP16),
    ("fp16.hysteresis", 3, {"loss_scaling.hysteresis": 3}, FP16),
    ("fp16.consecutive_hysteresis", True, {"loss_scaling.consecutive_hysteresis": True}, FP16),
    ("fp16.min_loss_scale", 4, {"loss_scaling.min_scale": 4.0}, FP16),
    ("torch_autocast.enabled", True, {"autocast": "float16"}, (("torch_autocast.dtype", "half"),)),
    ("torch_autocast.dtype", "bf16", {"autocast": "bfloat16"}, (("torch_autocast.enabled", True),)),
    (
        "data_types.grad_accum_dtype", "fp32",
        {"policy.grad_dtype": "float32", "policy.reduce_dtype": "bfloat16"}, BF16,
    ),
    ("data_types.param_dtype", "bf16", {"dtype": "bfloat16"}, BF16),
    ("data_types.buffer_dtype", "bfloat16", {"buffer_dtype": "bfloat16"}, BF16),
    ("data_types.keep_in_fp32_modules", ["router"], {"keep_in_fp32": ("router",)}, BF16),
    ("communication_data_type", "FP32", {"policy.reduce_dtype": "float32"}, BF16),
    ("train_batch_size", 8, {"train_batch_size": 8, "accumulation_steps": 4}, MICRO),
    (
        "train_micro_batch_size_per_gpu", 2, {"micro_batch_size": 2, "train_batch_size": 2}, (),
    ),
    (
        "gradient_accumulation_steps", 4, {"accumulation_steps": 4, "train_batch_size": 8}, MICRO,
    ),
    ("managed_gradient_accumulation", False, {"managed_accumulation": False}, ()),
    ("dataloader_drop_last", True, {"drop_last": True}, ()),
    ("gradient_clipping", 0.5, {"clip_norm": 0.5}, ()),
    ("aio.block_size", 1 << 20, {"policy.io": {"block_bytes": 1 << 20}}, ()),
    ("aio.queue_depth", 16, {"policy.io": {"depth": 16}}, ()),
    ("activation_checkpointing.cpu_checkpointing", True, {"policy.activations": "cpu"}, ()),
    (
        O, "Adam",
        {
            "optimizer": (
                "AdamW", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
            ),
        },
        (),
    ),
    (P + "lr", 0.5, {"optimizer.lr": 0.5}, OPTIMIZED),
    (P + "betas", [0.5, 0.6], {"optimizer.betas": (0.5, 0.6)}, OPTIMIZED),
    (P + "weight_decay", 1, {"optimizer.weight_decay": 1.0}, OPTIMIZED),
    (P + "adam_w_mode", False, {"optimizer.class": "Adam"}, ((O, "adam"),)),
    (P + "torch_adam", True, {"optimizer.weight_decay": 0.01}, OPTIMIZED),
    (P + "muon_lr", 0.5, {"optimizer.lr": 0.5, "optimizer.adam_lr": 3e-4}, MUON),
    (P + "adam_lr", 0.5, {"optimizer.lr": 0.02, "optimizer.adam_lr": 0.5}, MUON),
    (P + "ns_method", "standard", {"optimizer.class": "Muon"}, MUON[1:]),
    (P + "lr_decay", 0.1, {"optimizer.lr_decay": 0.1, "optimizer.lr": 0.01}, ((O, "Adagrad"),)),
    (P + "etas", [0.5, 1.2], {"optimizer.etas": (0.5, 1.2)}, ((O, "Rprop"),)),
    (P + "step_sizes", [1e-6, 50], {"optimizer.step_sizes": (1e-6, 50.0)}, ((O, "Rprop"),)),
    (T, "WarmupLR", {"scheduler": ("WarmupLR", {})}, ()),
    (S + "warmup_num_steps", 1e3, {"scheduler.warmup_num_steps": 1000}, ((T, "WarmupLR"),)),
    (S + "cycle_first_step_size", 5, {"scheduler.cycle_first_step_size": 5.0}, ONE_CYCLE),
    (S + "cycle_second_step_size", 0, {"scheduler.cycle_second_step_size": 0.0}, ONE_CYCLE),
    (S + "decay_step_size", 5, {"scheduler.decay_step_size": 5.0}, ONE_CYCLE),
    (
        S + "lr_range_test_step_rate", 3, {"scheduler.lr_range_test_step_rate": 3.0},
        ((T, "LRRangeTest"),),
    ),
]  # fmt: skip

# Arguments that an optimizer or a schedule gets unchanged.
AS_THEY_ARE: list[tuple[tuple[tuple[str, Any], ...], dict[str, Any]]] = [
    (OPTIMIZED, {"eps": 1e-6}),
    (((O, "SGD"),), {"momentum": 0.9, "dampening": 0.1, "nesterov": True}),
    (((O, "adagrad"),), {"initial_accumulator_value": 0.1}),
    (((O, "RMSprop"),), {"alpha": 0.9, "centered": True}),
    (((O, "Adadelta"),), {"rho": 0.9}),
    (((O, "ASGD"),), {"lambd": 1e-4, "t0": 1e6}),
    (((O, "NAdam"),), {"momentum_decay": 0.004}),
    (((O, "RAdam"),), {"decoupled_weight_decay": True}),
    (
        ((T, "WarmupLR"),),
        {
            "warmup_min_lr": [0.1, 0.2], "warmup_max_lr": 1e-3, "warmup_type": "linear",
            "last_batch_iteration": 4,
        },
    ),
    (((T, "WarmupDecayLR"),), {"total_num_steps": 9}),
    (COSINE, {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.1}),
    (
        ONE_CYCLE,
        {
            "cycle_min_lr": 0.3, "cycle_max_lr": 0.3, "decay_lr_rate": 0.3,
            "cycle_first_stair_count": 5, "cycle_second_stair_count": 5, "cycle_momentum": False,
            "cycle_min_mom": 0.8, "cycle_max_mom": [0.9], "decay_mom_rate": 0.1,
        },
    ),
    (
        ((T, "LRRangeTest"),),
        {
            "lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 3,
            "lr_range_test_staircase": True,
        },
    ),
]  # fmt: skip
for _type, _arguments in AS_THEY_ARE:
    _kind = "optimizer" if _type[0][0] == O else "scheduler"
    CASES += [
        (f"{_kind}.params.{name}", value, {f"{_kind}.{name}": value}, _type)
        for name, value in _arguments.items()
    ]


def field_of(run: inf.DeepSpeedRun, path: str) -> Any:
    head, _, last = path.partition(".")
    value = getattr(run, head)
    if not last:
        return value
    if head in ("optimizer", "scheduler"):
        return value[0] if last == "class" else value[1][last]
    return value[last] if isinstance(value, Mapping) else getattr(value, last)


@pytest.mark.parametrize(("name", "value", "fields", "beside"), CASES, ids=[c[0] for c in CASES])
def test_a_mapped_key_becomes(
    name: str, value: Any, fields: dict[str, Any], beside: tuple[tuple[str, Any], ...]
) -> None:
    world = 8 if name.endswith("partition_size") else 1
    run = read(*beside, (name, value), world_size=world)
    for path, expected in fields.items():
        found = field_of(run, path)
        assert found == expected, path
        assert type(found) is type(expected), path
    (meaning,) = [meaning for meaning in run.keys if meaning.key == name]
    assert meaning.fate == MAPPED
    assert isinstance(inf.Policy.from_deepspeed(run), inf.Policy)
    # A value of another type is refused, with key and value.
    if name not in (O, T):
        assert f"{name}=[[]]: give " in message(config(*beside, (name, [[]])))
    if name in (Z + "stage", "data_types.param_dtype", Z + "cpu_offload"):
        return  # in any case; repeats bf16; the engine's default
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        # Without the key the run differs: the case tests the key, not a default.
        without = read(*[pair for pair in beside if pair[0] != name], world_size=world)
        assert any(field_of(run, path) != field_of(without, path) for path in fields)


# -- Keys without meaning, and keys that are refused -----------------------------------------------

SAMPLES = (True, 7, 0.5, "WARN", "PYTHON", "SOCKET", "fp32", "text", ["name"], {"name": 1}, [0.5])


def sample(name: str) -> Any:
    """Return a valid value of a key."""
    for value in SAMPLES:
        try:
            KEYS[name].check.read(value)
        except (ValueError, TypeError):
            continue
        return value
    raise AssertionError(f"no sample for {name}")


TAKE_ANYTHING = {
    "log_level", "datastates_ckpt", "tensor_parallel.dtype", "tensor_parallel.preset_model",
    "tensor_parallel.vocab_parallel_ce_backend",
}  # fmt: skip


@pytest.mark.parametrize("name", [key.name for key in KEYS.values() if key.fate == NO_MEANING])
def test_a_key_without_meaning_is_noted_and_changes_nothing(name: str) -> None:
    key = KEYS[name]
    plain = read()
    for written in key.spellings:
        run = read((written, sample(name)))
        kept = dataclasses.replace(run, notes=plain.notes, keys=plain.keys)
        assert kept == plain, "it means something"
        (note,) = set(run.notes) - set(plain.notes)
        assert note.startswith(f"{written}=")
        assert note.endswith(f": {key.to}")
        (meaning,) = [meaning for meaning in run.keys if meaning.key == written]
        assert (meaning.fate, meaning.became) == (NO_MEANING, key.to)
        assert any("auto" in note for note in read((written, AUTO)).notes)
    if name not in TAKE_ANYTHING:
        text = key.check.text
        found = message(config((name, 3 if text == "a list" else [[1, {}]])))
        assert f"{name}=" in found
        assert f"give {text}" in found


REFUSED_CASES: dict[str, tuple[Any, list[Any], str]] = {
    Z + "offload_optimizer.ratio": (0.5, [1, 1.0], "leave it out"),
    Z + "offload_optimizer.super_offload": (True, [False], "set false"),
    Z + "zero_quantized_nontrainable_weights": (True, [False], "set false"),
    Z + "zenflow": ({"topk_ratio": 0.1}, [], 'Policy(update="delayed")'),
    Z + "mics_shard_size": (8, [-1], "removed it"),
    Z + "mics_hierarchical_params_gather": (True, [False], "removed it"),
    Z + "zeropp_loco_param": ({"err_beta": 0.8}, [], "error_feedback=True"),
    "bf16.bf16_master_weights_and_grads": (True, [False], "masters always have 32 bits"),
    "fp16.fp16_master_weights_and_grads": (True, [False], "masters always have 32 bits"),
    "gradient_allreduce_op": ("sum", ["mean", "MEAN"], 'set "mean"'),
    P + "bias_correction": (False, [True], "set true"),
    P + "per_head_muon": (True, [False], "leave it out"),
    P + "amsgrad": (True, [False], "leave it out"),
    P + "maximize": (True, [False], "negate the loss"),
    P + "differentiable": (True, [False], "leave it out"),
    P + "max_grad_norm": (1.0, [0], "gradient_clipping"),
    "checkpoint.load_universal": (True, [False], "inf.load_deepspeed"),
    "checkpoint.use_node_local_storage": (True, [False], "all ranks share"),
    "tensor_parallel.autotp_size": (2, [0, 1], "data-parallel ranks only"),
    "expert_parallel": ({"enabled": True}, [{"enabled": False}, {}], "data-parallel ranks only"),
    "pipeline": ({"stages": 2}, [{"stages": 1}, {"stages": "auto"}], "data-parallel ranks only"),
    "sequence_parallel_size": (2, [1], "data-parallel ranks only"),
    "compile.deepcompile": (True, [False], "torch.compile"),
    "autotuning": ({"enabled": True}, [{"enabled": False, "fast": True}], "infinity plan"),
    "hybrid_engine": ({"enabled": True}, [{"max_out_tokens": 512}], "model can generate"),
    "data_efficiency": ({"enabled": True}, [{"seed": 1}], "data loader"),
    "weight_quantization": ({"num_bits": 8}, [{"enabled": False}], "bitsandbytes"),
    "msamp": ({"enabled": True}, [{"enabled": False}], "accelerate"),
    "amp": ({"enabled": "auto"}, [{"enabled": False}], "bf16, fp16 or torch_autocast"),
    "elasticity": ({"enabled": True}, [{"enabled": False}], "any number of ranks"),
    "sparse_gradients": (True, [False], "removed it"),
    "sparse_attention": ({"mode": "fixed"}, [{}], "removed it"),
    "graph_harvesting": (True, [False], "removed it"),
    "quantize_training": ({"enabled": True}, [{"enabled": False}], "removed it"),
    "eigenvalue": ({"enabled": True}, [{"enabled": False}], "removed it"),
    "compression_training": ({"weight_quantization": {}}, [{}], "removed it"),
    "progressive_layer_drop": ({"enabled": True}, [{"enabled": False}], "removed it"),
    "curriculum_learning": ({"enabled": True}, [{"enabled": False}], "data loader"),
    "nebula": ({"enabled": True}, [{"enabled": False}], "inf.save"),
}


@pytest.mark.parametrize("name", REFUSED_CASES)
def test_a_refused_key_says_what_to_do(name: str) -> None:
    value, off, fix = REFUSED_CASES[name]
    beside = OPTIMIZED if name.startswith("optimizer") else ()
    found = message(config(*beside, (name, value)))
    assert f"{name}=" in found
    assert " is refused: " in found
    assert fix in found
    plain = read(*beside)
    # pydantic writes a missing value as null.
    for nothing in [*off, None]:
        run = read(*beside, (name, nothing))
        assert dataclasses.replace(run, notes=plain.notes, keys=plain.keys) == plain
        assert run.notes == plain.notes, "a key that requests nothing needs no line"


def test_every_key_has_one_of_three_fates_and_its_case() -> None:
    names = sorted(name for name, _, _, _ in CASES)
    assert names == sorted(key.name for key in KEYS.values() if key.fate == MAPPED)
    assert REFUSED_CASES.keys() == {key.name for key in KEYS.values() if key.fate == REFUSED}
    assert {key.fate for key in KEYS.values()} == {MAPPED, NO_MEANING, REFUSED}
    assert not KEYS.keys() & SECTIONS
    assert all(name.count(" ") == 0 for name in SPELLINGS)


# -- Stages and tiers ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{}, {"zero_optimization": {}}, {"zero_optimization": False}])
def test_stage_0_is_refused(value: dict[str, Any]) -> None:
    found = message(value)
    assert "zero_optimization.stage=0" in found
    assert "set zero_optimization.stage to 1, 2 or 3" in found


def test_a_stage_of_old_is_stage_1() -> None:
    assert inf.read_deepspeed({"zero_optimization": True}).policy["zero"] == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_keep_parameters_on_the_device(stage: int) -> None:
    run = read((Z + "offload_param.device", "cpu"), stage=stage)
    assert (run.policy["zero"], run.policy["params"]) == (stage, "device")
    assert any("offload_param.device" in note for note in run.notes)
    assert inf.Policy.from_deepspeed(run).zero == stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_offloaded_is_in_cpu_memory_and_says_so(stage: int) -> None:
    run = read(stage=stage)
    assert (run.policy["params"], run.policy["optim"]) == ("device", "cpu")
    (note,) = [note for note in run.notes if "offload_optimizer.device" in note]
    assert '"none" (left out)' in note
    assert run.keys[-1].fate == LEFT_OUT


def test_an_optimizer_on_nvme_is_there_in_stage_2() -> None:
    section = Z + "offload_optimizer."
    run = read((section + "device", "nvme"), (section + "nvme_path", "/a"), stage=2)
    assert (run.policy["optim"], run.policy["nvme"]) == ("nvme", ["/a"])
    assert any("DeepSpeed keeps optimizer states in CPU memory" in note for note in run.notes)


def test_two_paths_are_striped_and_say_so() -> None:
    section = Z + "offload_optimizer."
    run = read(*NVME, (section + "device", "nvme"), (section + "nvme_path", "/b"))
    assert run.policy["nvme"] == ["/a", "/b"]
    assert any("striped over both" in note for note in run.notes)


@pytest.mark.parametrize("path", ["none", None, ""])
def test_a_path_that_is_none_needs_one(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate writes null or "none" for no path."""
    monkeypatch.delenv("INFINITY_NVME_DIR", raising=False)
    value = config(*NVME, (Z + "offload_param.nvme_path", path))
    assert "nvme" not in inf.read_deepspeed(value).policy
    with pytest.raises(ValueError, match=r"offload_param\.device=\"nvme\" without nvme_path"):
        inf.Policy.from_deepspeed(value)
    assert inf.Policy.from_deepspeed(value, nvme="/c").directories == (Path("/c"),)
    monkeypatch.setenv("INFINITY_NVME_DIR", "/d")
    assert inf.Policy.from_deepspeed(value).directories == (Path("/d"),)


def test_elements_in_cpu_memory_are_bytes_of_the_dtype() -> None:
    kept = (Z + "offload_param.max_in_cpu", 10)
    assert read(*NVME, kept).policy["resident"] == {"params": 40}
    assert read(*NVME, kept, *FP16).policy["resident"] == {"params": 20}
    assert "resident" not in read(kept).policy


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("cpu_offload", "offload_optimizer", "optim"),
        ("cpu_offload_param", "offload_param", "params"),
    ],
)
def test_an_old_switch_beside_its_new_section_is_refused(old: str, new: str, field: str) -> None:
    assert read((Z + old, True)).policy[field] == "cpu"
    assert read((Z + old, False)).policy == read().policy
    found = message(config((Z + old, True), (Z + new + ".device", "cpu")))
    assert f"{Z}{old}=true" in found
    assert f"leave {Z}{old} out" in found


def test_zero_plus_plus_is_of_stage_3() -> None:
    run = read(
        (Z + "zero_quantized_weights", True), (Z + "zero_quantized_gradients", True), stage=2
    )
    assert not {"qwz", "qgz", "hpz"} & run.policy.keys()
    assert sum("no effect below stage 3" in note for note in run.notes) == 2


@pytest.mark.parametrize(
    ("size", "world", "node", "hpz"),
    [(4, 8, 4, "device"), (8, 8, 8, "device"), (8, 8, None, "device"), (1, 8, 4, None),
     (16, 8, 8, "device"), (0, 8, 8, None)],
)  # fmt: skip
def test_a_secondary_shard_is_of_a_node(
    size: int, world: int, node: int | None, hpz: str | None
) -> None:
    run = read((Z + "zero_hpz_partition_size", size), world_size=world, ranks_per_node=node)
    assert run.policy.get("hpz") == hpz


def test_a_secondary_shard_of_other_ranks_is_refused() -> None:
    value = config((Z + "zero_hpz_partition_size", 4))
    found = message(value, world_size=16, ranks_per_node=8)
    assert "zero_hpz_partition_size=4: " in found
    assert "a DeviceMesh of (4, 4)" in found
    assert "cannot form groups" in message(config((Z + "zero_hpz_partition_size", 3)), world_size=8)


def test_drives_take_their_own_bounds() -> None:
    assert "aio.block_size=1000: io.block_bytes" in message(config(("aio.block_size", 1000)))
    assert "aio.queue_depth=1: io.depth" in message(config(("aio.queue_depth", 1)))


def test_aio_where_hugging_face_has_it() -> None:
    run = read((Z + "aio.queue_depth", 16), (Z + "aio.thread_count", 1))
    assert run.policy["io"] == {"depth": 16}
    assert "keep aio, at the top" in message(
        config((Z + "aio.queue_depth", 16), ("aio.queue_depth", 16))
    )


# -- Precision -------------------------------------------------------------------------------------


def test_bf16_and_fp16_exclude_each_other() -> None:
    found = message(config(*BF16, *FP16))
    assert "bf16.enabled=true and fp16.enabled=true" in found
    assert "set one of them to false" in found


def test_the_old_name_of_bf16() -> None:
    assert inf.read_deepspeed({**config(), "bfloat16": {"enabled": True}}).dtype == "bfloat16"
    both = {**config(), "bfloat16": {"enabled": True}, "bf16": {"enabled": False}}
    assert inf.read_deepspeed(both).dtype is None, "DeepSpeed reads the new one"


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale", "hysteresis"])
def test_a_dynamic_scale_needs_sound_numbers(name: str) -> None:
    found = message(config(*FP16, (f"fp16.{name}", 0)))
    assert f"fp16.{name}=0: give a whole number, 1 or more" in found
    # Neither a static scale nor an fp32 model uses it.
    assert read(*FP16, (f"fp16.{name}", 0), ("fp16.loss_scale", 8)).loss_scaling
    assert read((f"fp16.{name}", 0)).loss_scaling is None


def test_gradients_of_bf16_that_are_not_finite() -> None:
    assert read().policy.get("on_nonfinite") is None, "the policy's own, in fp32"
    for stage, differs in ((2, False), (3, True)):
        notes = read(*BF16, stage=stage).notes
        assert any("check_grad_overflow" in note for note in notes) is differs


def test_a_dtype_that_says_another() -> None:
    found = message(config(*BF16, ("data_types.param_dtype", "fp16")))
    assert 'data_types.param_dtype="float16" contradicts' in found


@pytest.mark.parametrize(
    ("beside", "travels"), [((), None), (BF16, "bfloat16"), (FP16, "float16")]
)
def test_gradients_travel_in_the_dtype_of_parameters(beside: Any, travels: str | None) -> None:
    """DeepSpeed's default is the parameters' dtype; the engine's is the accumulation dtype."""
    run = read(*beside, ("data_types.grad_accum_dtype", "fp32"))
    assert run.policy.get("reduce_dtype") == travels
    assert "reduce_dtype" not in read(*beside).policy


def test_autocast_needs_its_dtype_and_exact_weights() -> None:
    on = ("torch_autocast.enabled", True)
    assert "without torch_autocast.dtype" in message(config(on))
    assert "torch_autocast.dtype=" in message(config(on, ("torch_autocast.dtype", "fp32")))
    pair = (on, ("torch_autocast.dtype", "bf16"), (Z + "zero_quantized_weights", True))
    assert "DeepSpeed refuses both together" in message(config(*pair))
    assert read(("torch_autocast.enabled", False)).autocast is None


# -- Batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "world", "found"),
    [
        (32, 16, 1, 2, (32, 16, 1)),
        (32, 8, 2, 2, (32, 8, 2)),
        (32, 8, None, 2, (32, 8, 2)),
        (32, None, 2, 2, (32, 8, 2)),
        (None, 8, 2, 2, (32, 8, 2)),
        (32, None, None, 2, (32, 16, 1)),
        (None, 8, None, 2, (16, 8, 1)),
        (None, None, 4, 2, (None, None, 4)),
        (None, None, None, 2, (None, None, 1)),
        (33, 17, 2, 2, "33"),
        (32, 18, 1, 2, "18 x 1 x 2"),
        (3, None, None, 2, "1 x 1 x 2"),
        (1, None, None, 2, "0 x 1 x 2"),
        (4, 8, None, 1, "8 x 0 x 1"),
    ],
)
def test_batches_are_a_product(
    whole: int | None, micro: int | None, steps: int | None, world: int, found: Any
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    pairs = [
        (name, value)
        for name, value in zip(names, (whole, micro, steps), strict=True)
        if value is not None
    ]
    if isinstance(found, str):
        text = message(config(*pairs), world_size=world)
        assert found in text
        assert f"train_batch_size={whole}" in text
        assert "correct one of them" in text
        return
    run = read(*pairs, world_size=world)
    assert (run.train_batch_size, run.micro_batch_size, run.accumulation_steps) == found


@pytest.mark.parametrize("world", [0, -1, True, 1.0, "2"])
def test_a_world_is_a_number_of_ranks(world: Any) -> None:
    assert f"world_size={world!r}" in message(config(), world_size=world)


# -- Optimizer and scheduler -----------------------------------------------------------------------


ELEMENTWISE = [kind for kind in OPTIMIZERS if kind != "muon"]


@pytest.mark.parametrize("kind", [*ELEMENTWISE, "ADAMW", "LION", "Adagrad"])
def test_an_optimizer_is_one_that_takes_its_arguments(kind: str) -> None:
    """Build it from the table: the class accepts every argument."""
    run = read((O, kind))
    assert run.optimizer is not None
    name, arguments = run.optimizer
    weight = torch.nn.Parameter(torch.ones(4))
    # Classes of inf accept only offloaded parameters, and have the signatures of torch's.
    torch_class = {"Lion": torch.optim.AdamW}.get(name) or getattr(torch.optim, name)
    torch_class([weight], **arguments)
    _, defaults, more = OPTIMIZERS.get(kind) or OPTIMIZERS[kind.lower()]
    own = inf.Lion if name == "Lion" else torch_class
    taken = own.__init__.__code__.co_varnames[: own.__init__.__code__.co_argcount]
    kept = own.__init__.__code__.co_varnames
    assert {*defaults, *more} - {"adam_w_mode", "torch_adam"} <= {*taken, *kept}


@pytest.mark.parametrize("kind", ["Lamb", "OneBitAdam", "sgd", "Frobnicate"])
def test_another_optimizer_is_refused(kind: str) -> None:
    found = message(config((O, kind)))
    assert f'optimizer.type="{kind}" is refused' in found
    assert "AdamW" in found


def test_adam_decays_as_deepspeed_does() -> None:
    decay = (P + "weight_decay", 0.1)
    off = (P + "adam_w_mode", False)

    def name(*pairs: tuple[str, Any]) -> str:
        run = read(*pairs)
        assert run.optimizer
        return run.optimizer[0]

    assert name((O, "Adam"), decay) == "AdamW"
    assert name((O, "Adam"), decay, off) == "Adam"
    assert name((O, "Adam"), off) == "Adam", "a parameter group may have a decay of its own"
    assert name((O, "AdamW"), decay, off) == "AdamW", "DeepSpeed reads its name"
    notes = read((O, "Adam"), decay, off).notes
    assert any("inf.Elementwise(torch.optim.Adam)" in note for note in notes)
    given = read((O, "AdamW"), (P + "torch_adam", True), decay).optimizer
    assert given
    assert given[1]["weight_decay"] == 0.1


def test_muon_is_that_of_deepspeed_or_refused() -> None:
    shared = read(*MUON, (P + "lr", 0.1), (P + "adam_lr", 0.2), (P + "eps", 1e-6)).optimizer
    assert shared == (
        "Muon",
        {
            "lr": 0.1, "adam_lr": 0.2, "momentum": 0.95, "weight_decay": 0.0,
            "betas": (0.9, 0.95), "adam_eps": 1e-6,
        },
    )  # fmt: skip
    assert 'set "ns_method": "standard"' in message(config(*MUON[1:]))
    assert 'set "ns_method": "standard"' in message(config(*MUON[1:], (P + "ns_method", "gram")))
    assert 'set "gradient_clipping": 0' in message(config(*MUON[:2]))
    assert "set true, or leave" in message(config(*MUON, (P + "adam_w_mode", False)))


def test_an_argument_of_another_optimizer_is_refused() -> None:
    found = message(config((O, "AdamW"), (P + "momentum", 0.9)))
    assert f"{P}momentum=0.9: AdamW takes betas, eps, lr, weight_decay" in found.replace(
        "adam_w_mode, ", ""
    ).replace("torch_adam, ", "")
    assert "without optimizer.type" in message(config((P + "lr", 0.1)))
    assert "give a list of two numbers" in message(config(*OPTIMIZED, (P + "betas", [0.9])))
    assert "give a list of two numbers" in message(config(*OPTIMIZED, (P + "betas", [0.9, 1])))


def test_a_schedule_of_torch_has_its_arguments_as_they_are() -> None:
    run = read((T, "StepLR"), (S + "step_size", 30), (S + "gamma", 0.1))
    assert run.scheduler == ("StepLR", {"step_size": 30, "gamma": 0.1})
    assert read((T, "StepLR")).scheduler == ("StepLR", {})
    assert "scheduler.params=3: give an object" in message(
        config((T, "StepLR"), ("scheduler.params", 3))
    )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_has_what_it_needs(kind: str) -> None:
    needed, more = SCHEDULES[kind]
    pairs = [(S + name, sample(S + name)) for name in needed]
    pairs = [(name, 7 if value is True else value) for name, value in pairs]
    assert read((T, kind), *pairs).scheduler
    for lacking in needed:
        rest = [pair for pair in pairs if pair[0] != S + lacking]
        assert f'scheduler.type="{kind}" without {S}{lacking}' in message(config((T, kind), *rest))
    other = next(iter({"cycle_momentum", "warmup_type"} - more))
    found = message(config((T, kind), *pairs, (S + other, sample_text(other))))
    assert f"{kind} takes " in found


def sample_text(name: str) -> Any:
    return "log" if name == "warmup_type" else True


def test_an_unknown_schedule_names_the_known() -> None:
    assert "WarmupLR" in message(config((T, "WarmLR")))
    assert "without scheduler.type" in message(config((S + "warmup_type", "log")))


# -- "auto" ----------------------------------------------------------------------------------------


def test_auto_is_filled_as_a_trainer_does() -> None:
    value = config(("bf16.enabled", AUTO), (O, "AdamW"), (P + "lr", AUTO))
    run = inf.read_deepspeed(value, auto={"bf16.enabled": True, P + "lr": 0.25, "fp16.enabled": 3})
    assert run.dtype == "bfloat16"
    assert run.optimizer
    assert run.optimizer[1]["lr"] == 0.25
    assert value["bf16"]["enabled"] == AUTO, "the caller's own mapping stays as it is"


def test_a_remaining_auto_names_its_key_and_fix() -> None:
    found = message(config(("bf16.enabled", AUTO), (O, "AdamW"), (P + "lr", AUTO)))
    assert f"bf16.enabled, {P}lr: " in found
    assert "auto={'bf16.enabled': ...}" in found
    assert "auto: " in message(config(), auto={"bf16.enable": True})
    # The trainer's value is checked like one in the file.
    assert f"{P}lr=" in message(config((O, "AdamW"), (P + "lr", AUTO)), auto={P + "lr": "fast"})


def test_auto_of_buckets_is_dropped() -> None:
    buckets = [
        Z + "reduce_bucket_size", Z + "stage3_prefetch_bucket_size",
        Z + "stage3_param_persistence_threshold",
    ]  # fmt: skip
    run = read(*((name, AUTO) for name in buckets))
    assert run.policy == read().policy
    assert all(any(note.startswith(f'{name}="auto"') for note in run.notes) for name in buckets)


def test_a_policy_needs_only_what_its_fields_depend_on() -> None:
    value = config((O, "AdamW"), (P + "lr", AUTO), ("train_batch_size", AUTO), *BF16)
    assert "train_batch_size" in message(value)
    assert inf.Policy.from_deepspeed(value).zero == 3
    run = inf.read_deepspeed(value, keep_auto=True)
    assert f'{P}lr="auto": as the trainer fills it' in run.notes
    with pytest.raises(ValueError, match=r"zero_optimization\.offload_param\.device: a trainer"):
        inf.Policy.from_deepspeed(config((Z + "offload_param.device", AUTO)))
    filled = inf.Policy.from_deepspeed(
        config((Z + "offload_param.device", AUTO)), auto={Z + "offload_param.device": "cpu"}
    )
    assert filled.params == "cpu"


def test_0_and_1_are_truth_values() -> None:
    assert read(("bf16.enabled", 1)) == read(("bf16.enabled", True))
    assert read(("bf16.enabled", 0), ("zero_allow_untested_optimizer", 1)).dtype is None
    for name in ("sparse_gradients", "amp.enabled", "compression_training.enabled"):
        read((name, 0))
        assert name.split(".")[0] in message(config((name, 1)))
    assert "bf16.enabled=2: give true or false" in message(config(("bf16.enabled", 2)))
    assert "mics_shard_size" in message(config((Z + "mics_shard_size", True)))


# -- Files, and invalid configurations -------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_a_mapping_and_base64_are_one(tmp_path: Path) -> None:
    value = config(*BF16, (Z + "sub_group_size", 1e9))
    text = json.dumps(value)
    plain = inf.read_deepspeed(value)
    assert inf.read_deepspeed(written(tmp_path, text)) == plain
    assert inf.read_deepspeed(str(tmp_path / "ds.json")) == plain
    assert inf.read_deepspeed(base64.urlsafe_b64encode(text.encode()).decode()) == plain


BAD_FILES = {
    "": "line 1, column 1",
    "[1, 2]": "write a JSON object",
    "3": "write a JSON object",
    '{"bf16": {"enabled": true,}}': "remove comments and trailing commas",
    '{// comment\n"bf16": {}}': "line 1, column 2",
    '{"bf16": {}, "bf16": {}}': '"bf16" twice in one object: keep one',
    '{"bf16": {"enabled": true, "enabled": false}}': '"enabled" twice in one object',
    '{"gradient_clipping": NaN}': "gradient_clipping=nan: give a finite number",
    '{"gradient_clipping": Infinity}': "gradient_clipping=inf: give a finite number",
    '{"gradient_clipping": 1e999}': "gradient_clipping=inf: give a finite number",
    '{"train_batch_size": ' + "9" * 5000 + "}": "integer string conversion",
    '{"train_batch_size": ' + "9" * 4000 + "}": "train_batch_size=an integer of 13288 bits",
    '{"train_batch_size": 1e300}': "train_batch_size=1e+300: give a whole number",
    "[" * 100_000: "nested deeper",
    '{"a":' * 900 + "1" + "}" * 900: "a={'a': {'a': {...}}}: there is no such key",
    '{"zero_optimization": 3}': "zero_optimization=3: give an object",
    '{"zero_optimization": "auto"}': 'zero_optimization="auto": give an object',
    '{"optimizer": []}': "optimizer=[]: give an object",
    '{"zero_optimization": {"stage": "3"}}': 'stage="3": give a whole number, from 0 to 3',
    '{"zero_optimization": {"stage": true}}': "stage=true: give a whole number, from 0 to 3",
    '{"zero_optimization": {"stage": 4}}': "stage=4: give a whole number, from 0 to 3",
    '{"zero_optimization": {"stage": 2.5}}': "stage=2.5: give a whole number, from 0 to 3",
    '{"zero_optimization": {"stage": [3]}}': "stage=[3]: give a whole number, from 0 to 3",
    '{"zero_optimization": {"offload_param": {"device": "gpu"}}}': (
        'offload_param.device="gpu": give "none" or "cpu" or "nvme"'
    ),
    '{"zero_optimization": {"offload_param": "cpu"}}': 'offload_param="cpu": give an object',
    '{"bf16": {"enabled": "true"}}': 'bf16.enabled="true": give true or false',
    '{"train_batch_size": 0}': "train_batch_size=0: give a whole number, 1 or more",
    '{"train_batch_size": -8}': "train_batch_size=-8: give a whole number, 1 or more",
    '{"gradient_clipping": -1}': "gradient_clipping=-1: give a finite number, 0 or more",
    '{"optimizer": {"type": ""}}': 'optimizer.type="": give a text that is not empty',
    '{"optimizer": {"type": 3}}': "optimizer.type=3: give a text that is not empty",
    '{"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}': (
        "are two names of one key"
    ),
    '{"steps_per_print": -1}': "steps_per_print=-1: give a whole number, 0 or more",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=lambda text: text[:40])
def test_a_bad_file_says_where_and_what(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    found = message(path)
    assert found.startswith(f"{path}: ")
    assert BAD_FILES[text] in found
    assert len(found) < 700, "a message stays a message"


@pytest.mark.parametrize("value", [None, 3, True, [config()], b"{}", object()])
def test_what_is_no_configuration(value: Any) -> None:
    assert "give a mapping or the path of a JSON file" in message(value)


@pytest.mark.parametrize("name", ["nothing.json", "", "\0", "a" * 5000, "e30=", "!!"])
def test_a_path_that_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # "e30=" is {} in base64.
    text = "stage" if name == "e30=" else "give a mapping or the path of a JSON file"
    assert text in message(name)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xff\xfe{}")
    assert "not UTF-8 text" in message(path)
    assert "Is a directory" in message(tmp_path)


UNKNOWN = {
    "zero_optimisation": "zero_optimization", "train_batchsize": "train_batch_size",
    "gradient_clip": "gradient_clipping",
    Z + "stage3_max_live_params": Z + "stage3_max_live_parameters",
    Z + "cpu_offload_params": Z + "cpu_offload_param",
    Z + "offload_param.pin_memori": Z + "offload_param.pin_memory",
    "offload_optimizer": Z + "offload_optimizer",
    "stage3_gather_16bit_weights_on_model_save": Z + "stage3_gather_16bit_weights_on_model_save",
    "aio.thread_counts": "aio.thread_count", "fp16.opt_level": None, "Z" * 3000: None,
    "optimizer.lr": P + "lr",
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN, ids=lambda name: name[:40])
def test_an_unknown_key_names_the_nearest(name: str) -> None:
    near = UNKNOWN[name]
    found = message(config((name, 1)))
    assert "there is no such key" in found
    assert name[:30] in found
    if near is not None:
        assert f'write "{near}"' in found
    assert len(found) < 400
    # An unknown name is a mistake with any value.
    assert "there is no such key" in message(config((name, None)))


@pytest.mark.parametrize("name", [3, None, ("a",), b"stage"])
def test_names_are_texts(name: Any) -> None:
    assert "a key must be a text" in message({name: 1})
    assert "a key must be a text" in message({"bf16": {name: 1}})


def test_a_mapping_in_itself() -> None:
    value = config()
    value["zero_optimization"]["offload_param"] = value
    assert "there is no such key" in message(value)


# -- Common examples -------------------------------------------------------------------------------

TRAINER = {
    "fp16": {
        "enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
        "hysteresis": 2, "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}  # fmt: skip
FILLED = {
    "fp16.enabled": True, P + "lr": 5e-5, P + "betas": [0.9, 0.999], P + "eps": 1e-8,
    P + "weight_decay": 0.0, S + "warmup_min_lr": 0, S + "warmup_max_lr": 5e-5,
    S + "warmup_num_steps": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
}  # fmt: skip
STAGE_3 = {
    "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO, "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
NVME_EXAMPLE: dict[str, Any] = {
    "stage": 3,
    "offload_optimizer": {
        "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4,
        "fast_init": False,
    },
    "offload_param": {
        "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5,
        "buffer_size": 1e8, "max_in_cpu": 1e9,
    },
    "aio": {
        "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
        "overlap_events": True,
    },
    **STAGE_3,
}  # fmt: skip
"""Section `zero_optimization` of the page on DeepSpeed in transformers' documentation."""


def test_hugging_face_s_example(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({**TRAINER, "zero_optimization": NVME_EXAMPLE}))
    run = inf.read_deepspeed(path, auto=FILLED, world_size=2)
    assert (run.dtype, run.clip_norm, run.accumulation_steps) == ("float16", 1.0, 2)
    assert (run.micro_batch_size, run.train_batch_size) == (4, 16)
    assert run.optimizer == (
        "AdamW", {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    )  # fmt: skip
    assert run.scheduler
    assert run.scheduler[0] == "WarmupLR"
    policy = inf.Policy.from_deepspeed(path, auto=FILLED, world_size=2)
    assert (policy.zero, policy.params, policy.optim) == (3, "nvme", "nvme")
    assert (policy.nvme, policy.on_nonfinite) == ((Path("/local_nvme"),), "skip")
    assert policy.resident == {"params": 2_000_000_000}
    assert policy.io_settings.block_bytes == 262144
    assert policy.io_settings.depth == 32
    # Of the values that the trainer fills in, the policy needs only the dtype.
    assert inf.Policy.from_deepspeed(path, auto={"fp16.enabled": True}) == policy


def test_what_accelerate_makes_of_its_own_arguments() -> None:
    value = {
        "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": None,
        },
        "gradient_clipping": 1.0, "steps_per_print": math.inf,
        "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    auto = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    run = inf.read_deepspeed(value, auto=auto, world_size=2)
    assert (run.policy["params"], run.policy["optim"]) == ("device", "cpu")
    assert (run.dtype, run.train_batch_size) == ("bfloat16", 8)


# -- The policy ------------------------------------------------------------------------------------


def test_overrides_replace_fields() -> None:
    value = config(*NVME, (Z + "offload_param.max_in_cpu", 8), *BF16)
    policy = inf.Policy.from_deepspeed(value, nvme=["/c"], ram="1GiB", update="deferred", seed=3)
    assert (policy.directories, policy.ram, policy.seed) == ((Path("/c"),), 1 << 30, 3)
    assert policy.resident == {"params": 16}
    # States of the tier NVMe that rest in RAM count for that tier.
    assert inf.Policy.from_deepspeed(value, params="cpu").resident is None
    assert inf.Policy.from_deepspeed(value).ram is None, "DeepSpeed has no budget"
    with pytest.raises(ValueError, match="verify='never' is not known"):
        inf.Policy.from_deepspeed(value, verify="never")


def test_dtypes_become_torch_s() -> None:
    value = config(*BF16, ("data_types.grad_accum_dtype", "fp32"))
    policy = inf.Policy.from_deepspeed(value)
    assert (policy.grad_dtype, policy.reduce_dtype) == (torch.float32, torch.bfloat16)
    assert inf.Policy.from_deepspeed(value, grad_dtype=torch.bfloat16).grad_dtype == torch.bfloat16


def test_activations_stay_where_the_cpu_computes() -> None:
    value = config(("activation_checkpointing.cpu_checkpointing", True))
    assert inf.Policy.from_deepspeed(value).activations == "cpu"
    for device in ("cpu", torch.device("cpu")):
        assert inf.Policy.from_deepspeed(value, device=device).activations == "device"
    assert inf.Policy.from_deepspeed(value, device="cuda:1").activations == "cpu"


def test_the_world_is_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [("train_batch_size", 8), ("train_micro_batch_size_per_gpu", 1)]
    batches += [("gradient_accumulation_steps", 1)]
    value = config(*batches, (Z + "zero_hpz_partition_size", 4))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert inf.Policy.from_deepspeed(value).hpz == "device"
    with pytest.raises(ValueError, match="with 4 ranks"):
        inf.Policy.from_deepspeed(value, world_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="a node has 2"):
        inf.Policy.from_deepspeed(value)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="with 1 rank"):
        inf.Policy.from_deepspeed(value)


def test_notes_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "_logged", set())
    value = config((Z + "overlap_comm", True))
    with caplog.at_level(logging.INFO, logger="infinity"):
        for _ in range(3):
            inf.Policy.from_deepspeed(value)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) == 2
    assert any("overlap_comm=true: communication always runs" in line for line in lines)
    assert {record.levelno for record in caplog.records} == {logging.INFO}


# -- Random configurations -------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([AUTO, "cpu", "nvme", "none", "AdamW", "OneCycle", "StepLR", 1, 2, 3, 10**400]),
)  # fmt: skip
WORDS = sorted({part for name in SPELLINGS for part in name.split(".")})
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=5)), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=5)), JUNK, max_size=5))
def test_junk_is_a_value_error(value: dict[str, Any]) -> None:
    found = read_or_say(value)
    if isinstance(found, str):
        assert found.startswith("DeepSpeed configuration: ")
        assert len(found) < 900
        return
    assert isinstance(inf.Policy.from_deepspeed(found, nvme="/a"), inf.Policy)


def read_or_say(value: dict[str, Any], **more: Any) -> inf.DeepSpeedRun | str:
    """Return the run, or the message of a ValueError; other exceptions fail the test."""
    try:
        return inf.read_deepspeed(value, **more)
    except ValueError as error:
        return str(error)


@functools.cache
def values_of(name: str) -> list[Any]:
    """Strategy of a key's values, valid and invalid."""
    pool: list[Any] = [
        *SAMPLES, False, 0, 1, 2, 3, 4, 8, 4096, 1e9, 0.9, 1.0, -1, "cpu", "nvme", "none", "bf16",
        "log", "FAIL", "AdamW", "adam", "SGD", "Lion", "WarmupLR", "StepLR", [0.9, 0.99], [1, 2],
        {}, math.inf,
    ]  # fmt: skip
    found = []
    for value in pool:
        try:
            KEYS[name].check.read(value)
        except (ValueError, TypeError):
            continue
        if KEYS[name].off is None or KEYS[name].off.tells(value):  # type: ignore[union-attr]
            found.append(value)
    return found or [None]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=25))
    return config(
        *((name, draw(st.sampled_from(values_of(name)))) for name in names),
        stage=draw(st.integers(1, 3)),
    )


@settings(max_examples=200)
@given(configurations(), st.integers(1, 8))
def test_every_subset_of_sound_keys_is_a_policy_or_says_why(
    value: dict[str, Any], world: int
) -> None:
    found = read_or_say(value, world_size=world)
    if isinstance(found, str):
        # Each is valid alone, so they exclude each other, or one needs another.
        assert re.search(r"[a-z_.0-9]+=", found), "it names no key"
        assert "there is no such key" not in found
        return
    assert isinstance(inf.Policy.from_deepspeed(found, nvme="/a"), inf.Policy)
    assert len(found.keys) >= sum(leaf is not None for leaf in leaves(value))


def leaves(value: Any, name: str = "") -> Iterator[Any]:
    if isinstance(value, dict) and name not in KEYS:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield value


# -- The page, and DeepSpeed's own models ----------------------------------------------------------


def test_the_page_is_the_table() -> None:
    page = (ROOT / "docs" / "deepspeed-config.md").read_text(encoding="utf-8")
    assert page == deepspeed_page.render(), "write it anew: python -m tests.deepspeed_page"
    for name in SPELLINGS:
        assert f"`{name}`" in page


def test_every_field_of_deepspeed_s_models_has_its_row() -> None:
    if SOURCE is None:
        pytest.skip("DEEPSPEED_SOURCE names no package deepspeed")
    found = dict(deepspeed_page.fields_of_models(Path(SOURCE)))
    assert len(found) > 120, "the models are elsewhere now"
    # An old name of bf16, which is read as bf16.
    assert {name for name in found if not has_row(name)} == {"bfloat16"}
    # Literal defaults in DeepSpeed's source equal those of the rows.
    wrong = {
        name: (default, KEYS[name].default)
        for name, default in found.items()
        if name in KEYS
        and KEYS[name].fate == MAPPED
        and default is not deepspeed_page.UNKNOWN
        and default != KEYS[name].default
    }
    assert not wrong


def has_row(name: str) -> bool:
    """Return whether a key has a row, is a section of rows, or is inside an object with a row."""
    parts = name.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return name in SECTIONS or any(one in SPELLINGS for one in above)
