"""PEFT over an offloaded base: adapters train, are saved and loaded, and are merged to the bits of
PEFT's own merge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import infinity as inf
from infinity._src.kernels.newton_schulz import product_dtype
from infinity.integrations.accelerate import attach
from infinity.integrations.peft import (
    adapter_state_dict,
    export_merged,
    load_adapter,
    merge,
    save_adapters,
    tile_experts,
)
from tests import models
from tests.integrations.accelerate_script import accelerator, assert_same, policy

LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "init_lora_weights": False,
}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
CONFIGS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {**LORA, "use_dora": True},
    "modules to save": {**LORA, "modules_to_save": ["lm_head", "norm"]},
    "embedding": {**LORA, "target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {**LORA, "trainable_token_indices": [3, 5]},
    "experts": {
        **LORA,
        "target_modules": ["q_proj"],
        "target_parameters": [f"mlp.{name}" for name in EXPERTS],
    },
    # transformers 5 has experts and routers as parameters: PEFT finds them.
    "all-linear": {**LORA, "target_modules": "all-linear", "use_rslora": True},
}
FUSED = ("experts", "all-linear")
BATCHES = models.token_batches(4)
slow = pytest.mark.integrations


def base_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny Llama, or a Mixtral for adapters of experts."""
    return models.make(models.mixtral if kind in FUSED else models.llama, dtype=dtype)


def adapted(
    kind: str, *, dtype: torch.dtype = torch.float32, second: bool = False, base: Any = None
) -> PeftModel:
    """A tiny model with adapters, in memory."""
    base = base_of(kind, dtype) if base is None else base
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(**CONFIGS[kind]))
    if second:
        model.add_adapter("second", LoraConfig(**{**CONFIGS[kind], "r": 2}))
    return model.train()


def offloaded(model: Any, place: Path, **values: Any) -> Any:
    """A copy of the model, everything at rest on the drive."""
    return inf.offload(copy.deepcopy(model), policy(place / "nvme", **values))


def trained(model: Any, optimizer: Any, batches: list[models.Batch]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=BATCHES[0]["input_ids"]).logits


@slow
@pytest.mark.parametrize("kind", ["lora", "dora", "modules to save", *FUSED])
def test_losses_are_those_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    plain = adapted(kind)
    model = offloaded(plain, tmp_path)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    losses = trained(model, inf.AdamW(model.parameters(), lr=1e-2), BATCHES)
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), BATCHES)
    assert losses == pytest.approx(expected, rel=1e-6)
    after = model.state_dict()
    for name, param in plain.named_parameters():
        assert torch.equal(after[name], before[name]) == (not param.requires_grad), name


def test_muon_updates_adapters_as_torchs_muon(tmp_path: Path) -> None:
    plain = adapted("lora")
    model = offloaded(plain, tmp_path)
    adapters = [param for param in plain.parameters() if param.requires_grad]
    ours = inf.Muon(model.parameters(), lr=0.02)
    assert all(map(ours.updates_matrix, ours.params_with_states))
    losses = trained(model, ours, BATCHES)
    expected = trained(plain, torch.optim.Muon(adapters, lr=0.02), BATCHES)
    if product_dtype(torch.device("cpu")) is torch.bfloat16:
        assert losses == expected
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    else:
        # The engine's products are in fp32 there.
        assert losses == pytest.approx(expected, rel=0.05)
    inf.handle(model).close()


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": models.mixtral,
    "qwen3": lambda: models.qwen3_moe(4, 2),
    "gpt-oss": models.gpt_oss,
    "deepseek": models.deepseek_v3,
}
NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
BITS: list[tuple[str, str, dict[str, Any], str | None, int | None]] = [
    ("mixtral", "experts", NVME, "reentrant", None),
    ("mixtral", "experts", {"unit_bytes_max": 4096, "update": "backward"}, None, 3),
    ("mixtral", "all-linear", {"update": "backward"}, "checkpoint", None),
    ("qwen3", "experts", {"unit_bytes_max": 4096}, "checkpoint", None),
    ("qwen3", "all-linear", NVME, "reentrant", 1),
    ("gpt-oss", "all-linear", {}, "checkpoint", None),
    ("gpt-oss", "experts", NVME, "checkpoint", 3),
    ("deepseek", "all-linear", {"update": "backward"}, None, None),
]


def in_eager(model: Any) -> Any:
    """The model with the implementation of experts that tiles have."""
    model.base_model.model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("family", "kind", "values", "way", "tile"),
    # Two of them in the quick run.
    [pytest.param(*each, marks=slow if index > 1 else ()) for index, each in enumerate(BITS)],
)
def test_adapters_of_experts_and_routers_have_the_bits_of_the_loop(
    family: str,
    kind: str,
    values: dict[str, Any],
    way: str | None,
    tile: int | None,
    tmp_path: Path,
) -> None:
    """Two adapters at once; then one, none, and both again."""

    def losses(model: Any, optimizer: Any) -> list[float]:
        found = trained(model, optimizer, BATCHES[:2])
        model.base_model.set_adapter("second")
        found += trained(model, optimizer, BATCHES[2:3])
        with model.disable_adapter():
            found.append(model(**BATCHES[0]).loss.item())
        model.base_model.set_adapter(["default", "second"])
        return found + trained(model, optimizer, BATCHES[3:])

    base = models.make(FAMILIES[family], dtype=torch.float32)
    plain: Any = in_eager(adapted(kind, second=True, base=base))
    plain.base_model.set_adapter(["default", "second"])
    if way is not None:
        plain.enable_input_require_grads()
        plain.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    model = copy.deepcopy(plain)
    if tile is not None:
        tile_experts(model, experts=tile)
    inf.offload(model, inf.Policy(nvme=tmp_path, **values))
    optimizer = inf.SGD([p for p in model.parameters() if p.requires_grad], lr=0.125)
    ours = losses(model, optimizer)
    # A power of two: torch's fused multiplication rounds as two operations do.
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.125)
    assert ours == losses(plain, theirs)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    if tile is None:
        assert list(model.state_dict()) == list(plain.state_dict())
    # Merged and parted again, through PEFT's own calls.
    handle = inf.handle(model)
    for call in ("merge_adapter", "unmerge_adapter"):
        with torch.no_grad(), handle.gather(model):
            getattr(model, call)()
        getattr(plain, call)()
        assert torch.equal(logits(model), logits(plain))
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    handle.close()


class Largest(TorchDispatchMode):
    """Notes the largest memory that an operation returns."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_adapted_experts_form_no_stack(dtype: torch.dtype) -> None:
    """PEFT's adapters are in fp32 on a base in bf16."""
    plain: Any = in_eager(adapted("experts", dtype=dtype, second=True))
    plain.base_model.set_adapter(["default", "second"])
    tiled = tile_experts(copy.deepcopy(plain), experts=2)
    stack = 4 * 96 * 32 * dtype.itemsize
    grads: list[dict[str, Any]] = []
    for model in (plain, tiled):
        with Largest() as largest:
            model(**BATCHES[0]).loss.backward()
        assert (largest.size >= stack) == (model is plain)
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert_same(*grads)


def test_tiles_and_adapters_in_another_order_are_refused() -> None:
    model: Any = in_eager(adapted("experts"))
    with pytest.raises(ValueError, match=r"_proj has an adapter .*integrations\.peft\.tile_exp"):
        inf.tile_experts(model, experts=2)
    base = in_eager(adapted("lora", base=base_of("experts"))).unload()
    inf.tile_experts(base, experts=2)
    late = get_peft_model(base, LoraConfig(r=2, target_parameters=["gate_up_proj"]))
    with pytest.raises(ValueError, match=r"tile_0_0 .*replaced by a ParamWrapper: adapt the model"):
        late(**BATCHES[0])


def test_steps_write_the_states_of_adapters_and_nothing_of_the_base(tmp_path: Path) -> None:
    plain = adapted("lora")
    model = offloaded(plain, tmp_path)
    handle = inf.handle(model)
    optimizer = inf.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    trained(model, optimizer, BATCHES[:1])
    handle.flush()
    before, files = handle.stats(), sorted((tmp_path / "nvme").rglob("*"))
    trained(model, optimizer, BATCHES)
    handle.flush()
    after = handle.stats()
    written = after.bytes_written - before.bytes_written
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    # Value, master and two moments; chunks are whole blocks of 4 KiB, of each unit.
    blocks = 4096 * 4 * after.units
    assert 0 < written / len(BATCHES) <= 16 * adapters + blocks
    assert after.bytes_read - before.bytes_read > written
    print(f"{adapters} of {whole} parameters: {written / len(BATCHES):.0f} bytes a step")
    assert files == sorted((tmp_path / "nvme").rglob("*"))
    handle.close()


MERGES = [
    ("lora", torch.float32, None),
    ("lora", torch.bfloat16, ["default", "second"]),
    ("dora", torch.bfloat16, None),
    ("modules to save", torch.bfloat16, None),
    ("embedding", torch.float32, None),
    ("tokens", torch.float32, None),
    ("experts", torch.bfloat16, ["default", "second"]),
    ("all-linear", torch.float32, None),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        # One of them in the quick run.
        pytest.param(*each, id=f"{each[0]}, {each[1]}, {each[2]}", marks=slow if index else ())
        for index, each in enumerate(MERGES)
    ],
)
@pytest.mark.parametrize("safe", [False, pytest.param(True, marks=slow)])
def test_a_merged_model_has_the_bits_of_merge_and_unload(
    kind: str, dtype: torch.dtype, names: list[str] | None, safe: bool, tmp_path: Path
) -> None:
    plain: Any = adapted(kind, dtype=dtype, second=names is not None)
    model = offloaded(plain, tmp_path)
    with pytest.raises(ValueError, match=r"call merge\(model\) first"):
        export_merged(model, tmp_path / "early")
    assert merge(model, adapters=names, safe_merge=safe) is model
    expected = plain.merge_and_unload(adapter_names=names, safe_merge=safe)
    assert torch.equal(logits(model), logits(expected))
    export_merged(model, tmp_path / "out", shard_bytes_max="20KiB")
    found = weights(tmp_path / "out")
    assert_same(found, dict(expected.state_dict()))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = type(expected).from_pretrained(
        tmp_path / "out", dtype=dtype, attn_implementation="eager"
    )
    assert_same(dict(loaded.state_dict()), found)
    inf.handle(model).close()


@slow
def test_a_merge_holds_a_layer_at_a_time(tmp_path: Path) -> None:
    base: Any = models.make(lambda: models.llama(12, 64))
    plain = get_peft_model(base, LoraConfig(**LORA))
    model = offloaded(plain, tmp_path)
    handle = inf.handle(model)
    merge(model)
    export_merged(model, tmp_path / "out", shard_bytes_max="100KiB")
    whole = sum(p.numel() * p.element_size() for p in plain.parameters())
    assert handle.stats().gathered_bytes_peak < whole / 3
    assert_same(weights(tmp_path / "out"), dict(plain.merge_and_unload().state_dict()))
    handle.close()


@slow
def test_a_tied_head_that_was_trained_apart_is_exported_apart(tmp_path: Path) -> None:
    base: Any = models.make(models.gpt2, dtype=torch.float32)
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"]
    )
    plain: Any = get_peft_model(base, config)
    with torch.no_grad():
        plain.base_model.model.lm_head.modules_to_save["default"].weight.add_(0.1)
    model = offloaded(plain, tmp_path)
    export_merged(merge(model), tmp_path / "out")
    expected = plain.merge_and_unload()
    loaded = type(expected).from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(logits(loaded), logits(expected))
    inf.handle(model).close()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "dora" else slow) for kind in CONFIGS]
)
def test_adapter_files_are_those_of_peft_and_load_there_and_here(kind: str, tmp_path: Path) -> None:
    plain: Any = adapted(kind, second=kind == "lora")
    model = offloaded(plain, tmp_path)
    for name in plain.peft_config:
        assert_same(
            adapter_state_dict(model, name), get_peft_model_state_dict(plain, adapter_name=name)
        )
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    plain.save_pretrained(theirs)
    save_adapters(model, ours)
    files = sorted(path.relative_to(theirs) for path in theirs.rglob("*"))
    assert files == sorted(path.relative_to(ours) for path in ours.rglob("*"))
    for file in files:
        if file.suffix == ".safetensors":
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), ours)), logits(plain))
    # Into a model whose adapters have other values.
    base = base_of(kind)
    torch.manual_seed(9)
    other = offloaded(get_peft_model(base, LoraConfig(**CONFIGS[kind])), tmp_path)
    assert not torch.equal(logits(other), logits(plain))
    load_adapter(other, theirs)
    assert torch.equal(logits(other), logits(plain))
    for each in (model, other):
        inf.handle(each).close()


@slow
def test_loaded_adapters_are_the_masters_too(tmp_path: Path) -> None:
    plain = adapted("lora", dtype=torch.bfloat16)
    model = offloaded(plain, tmp_path)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    save_adapters(model, tmp_path / "out")
    before = states_of_adapters(model)
    trained(model, optimizer, BATCHES)
    load_adapter(model, tmp_path / "out")
    after = states_of_adapters(model)
    stays = ("avg", "avg_sq", "step")
    for name, value in before.items():
        assert torch.equal(after[name], value) or name.endswith(stays), name
    assert any(value.any() for name, value in after.items() if name.endswith("exp_avg"))
    inf.handle(model).close()


@slow
def test_a_resumed_run_of_adapters_is_the_uninterrupted_one_and_kilobytes(tmp_path: Path) -> None:
    """Through accelerate: the base is not in the checkpoint."""

    def prepared(own: Any) -> tuple[Any, Any]:
        model = offloaded(adapted("lora", dtype=torch.bfloat16), tmp_path)
        return attach(own).prepare(model, inf.AdamW(model.parameters(), lr=1e-2))

    with accelerator() as own:
        model, optimizer = prepared(own)
        trained(model, optimizer, BATCHES[:2])
        own.save_state(tmp_path / "ckpt")
        inf.save(model, optimizer.optimizer, tmp_path / "whole").wait()
        losses, ended = trained(model, optimizer, BATCHES[2:]), states_of_adapters(model)
        own.free_memory()
    with accelerator() as own:
        model, optimizer = prepared(own)
        own.load_state(tmp_path / "ckpt")
        assert trained(model, optimizer, BATCHES[2:]) == losses
        assert_same(states_of_adapters(model), ended)
        own.free_memory()
    whole, kept = (
        sum(path.stat().st_size for path in (tmp_path / each).iterdir())
        for each in ("whole", "ckpt/infinity")
    )
    frozen = sum(2 * p.numel() for p in model.parameters() if not p.requires_grad)
    assert whole - kept > frozen


def states_of_adapters(model: Any) -> dict[str, torch.Tensor]:
    handle = inf.handle(model)
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            for key, value in handle.optimizer_state(param).items():
                found[f"{name}/{key}"] = torch.as_tensor(value).clone()
            with handle.gather(param):
                found[name] = param.detach().clone()
    return found


def test_adapters_that_came_after_offload_are_refused_with_the_order(tmp_path: Path) -> None:
    base: Any = inf.offload(models.make(models.llama), policy(tmp_path / "nvme"))
    model: Any = get_peft_model(base, LoraConfig(**LORA))
    for call in (adapter_state_dict, merge, lambda late: save_adapters(late, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"not offloaded; call .* after get_peft_model"):
            call(model)
    with accelerator() as own, pytest.raises(ValueError, match="after get_peft_model"):
        attach(own).prepare(model)
    with pytest.raises(ValueError, match="not offloaded"):
        inf.AdamW([p for p in model.parameters() if p.requires_grad])
    inf.handle(base).close()


@slow
def test_wrong_adapters_are_refused_before_anything_is_set(tmp_path: Path) -> None:
    model = offloaded(adapted("lora"), tmp_path)
    before = adapter_state_dict(model)
    with pytest.raises(ValueError, match=r"before inf\.offload"):
        load_adapter(model, tmp_path / "out", "third")
    others = get_peft_model(
        models.make(models.llama, dtype=torch.float32),
        LoraConfig(**{**LORA, "target_modules": ["k_proj"]}),
    )
    others.save_pretrained(tmp_path / "others")
    with pytest.raises(ValueError, match=r"missing .*q_proj.* unexpected .*k_proj"):
        load_adapter(model, tmp_path / "others")
    wider = get_peft_model(
        models.make(models.llama, dtype=torch.float32), LoraConfig(**{**LORA, "r": 8})
    )
    wider.save_pretrained(tmp_path / "wider")
    with pytest.raises(RuntimeError, match=r"\(8, 64\) in .*\(4, 64\) in the model"):
        load_adapter(model, tmp_path / "wider")
    assert_same(adapter_state_dict(model), before)
    with pytest.raises(ValueError, match="needs a PeftModel, not a Linear"):
        merge(nn.Linear(2, 2))
    inf.handle(model).close()
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    learner = offloaded(get_peft_model(models.make(models.llama), prompt), tmp_path)
    with pytest.raises(ValueError, match="PROMPT_TUNING, which learns a prompt"):
        save_adapters(learner, tmp_path / "prompt")
    inf.handle(learner).close()
