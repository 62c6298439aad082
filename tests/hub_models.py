"""Tiny models of transformers as the hub has them, for the tests of checkpoints.

`tiny` makes some families by hand; `every` shrinks the configurations of all model types that
transformers has a conversion for, but for those of `LEFT_OUT`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

QUICK = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "inkling2_text")
"""Families of the quick tests: experts in all ways, shared ones, fp32 buffers, interleaved rows."""

_LEFT_OUT: dict[str, str] = {
    # 12 million parameters is the most; sizes of their backbones have names of their own.
    "too large when it is shrunk by rules": """
        d_fine dinov3_convnext longcat_flash minimax_m3_vl pp_doclayout_v3 pp_doclayout_v4 rt_detr
        rt_detr_v2 vibevoice_asr
    """,
    "values are missing in its shrunk configuration": """
        deepseek_ocr2 dots1 emu3 esm hunyuan_v1_moe hunyuan_vl lfm2_moe t5gemma2_encoder
    """,
    "its shrunk configuration contradicts itself": """
        dinov3_vit ernie4_5_vl_moe gemma3n_text gemma4_unified glm5_next glm5_next_text
        gradium_phonon_tts granitemoehybrid lw_detr maskformer molmo2 nemo_speechlm olmo_hybrid
        pixio sapiens2 tipsv2
    """,
    "no class of a model or of a causal one is mapped to it": """
        colqwen2 dots3_note_audio_encoder dots3_note_vision_encoder jev pp_doclayout_v2
        qwen3_omni_moe qwen3_omni_moe_text step3p5_vision tipsv2_dpt
    """,
    "transformers does not load what it has written of it": """
        mistral_large4 mistral_large4_text step3p7
    """,
    "a package is not installed (timm, scipy)": "deformable_detr inkling_mm_model timm_wrapper",
    "its checkpoint is of another class": "shieldgemma2",
}
LEFT_OUT = {name: reason for reason, names in _LEFT_OUT.items() for name in names.split()}
"""Model types with a conversion that `every` and `round_trip` do not get through, each with the
reason. The test of every model type says what comes to them."""

WIDE = {
    "mixtral": {
        "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 16,
        "num_local_experts": 4,
    },
    "deepseek_v3": {
        "hidden_size": 512, "intermediate_size": 2048, "moe_intermediate_size": 512,
        "num_hidden_layers": 24, "n_routed_experts": 4,
    },
}  # fmt: skip
"""Models whose largest group has 4 MiB, and which have some 110 and 200 MB."""

_COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}  # fmt: skip


def tiny(family: str, **values: Any) -> tuple[Any, Any]:
    """The class for causal language models of a family, and a tiny configuration."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = CONFIG_MAPPING[family]
    if family in ("inkling2_text",):
        return MODEL_FOR_CAUSAL_LM_MAPPING[kind], shrunk(kind())
    config = kind(**{**_COMMON, **_OF_FAMILY.get(family, {}), **values})
    return MODEL_FOR_CAUSAL_LM_MAPPING[kind], config


def stored_names(directory: Path) -> list[str]:
    return sorted(
        name
        for file in directory.glob("*.safetensors")
        for name in safe_open(file, "pt").keys()  # noqa: SIM118 - not a dict
    )


def assert_alike(model: nn.Module, truth: nn.Module) -> None:
    """All values, dtypes and buffers, non-persistent ones too."""
    for mine, theirs in (
        (model.state_dict(), truth.state_dict()),
        (dict(model.named_buffers()), dict(truth.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(mine[name], value), name


def on_meta(kind: Any, config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


def write(kind: Any, config: Any, dtype: torch.dtype, place: Path) -> None:
    """Write a model with random values, buffers too, as the hub has it."""
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=dtype)
    stored = model.state_dict()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and name in stored:
                value.copy_(torch.randn(value.shape) * 0.1)
    model.save_pretrained(place, max_shard_size="500KB")


def round_trip(
    kind: Any, config: Any, dtype: torch.dtype, place: Path, left_out: Callable[[str], object]
) -> Any:
    """Write a model and load it by transformers alone; None where that cannot be done, with the
    reason to `left_out`."""
    try:
        write(kind, config, dtype, place)
        return kind.from_pretrained(place, dtype=dtype)
    # A configuration cut by rules may be one that transformers writes and refuses to read.
    except Exception as error:
        left_out(_reason(error))
        return None


def write_values(model: Any, place: Path) -> None:
    """Write a Mixtral on meta with its experts apart, one file for each layer; values are ones."""
    place.mkdir()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, like in model.state_dict().items():
        start, _, end = name.partition(".mlp.experts.")
        layer = start.split(".")[2] if ".layers." in name else "x"
        held = files.setdefault(f"model-{layer}.safetensors", {})
        if not end:
            held[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = torch.ones_like(
                like, device="cpu"
            )
            continue
        for expert in range(like.shape[0]):
            rows = like.shape[1] // (2 if end == "gate_up_proj" else 1)
            for part in ("w1", "w3") if end == "gate_up_proj" else ("w2",):
                key = f"{start}.block_sparse_moe.experts.{expert}.{part}.weight"
                held[key] = torch.ones(rows, like.shape[2], dtype=like.dtype)
    for file, tensors in files.items():
        save_file(tensors, place / file)


PARTIAL = {"q_lora_rank": 24, "moe_intermediate_size": 24, "qk_rope_head_dim": 8}
"""Sizes of a deepseek_v3 with matrices of 24 rows, of 24 columns, and experts of both."""


def quantize_fp8(place: Path, block: int = 16, *, partial: bool = False) -> None:
    """Turn the matrices of attention, MLPs and experts into fp8 with a scale for each block.
    partial: the one of attention whose last block is partial, too, as in the files of DeepSeek-V3.
    """
    ends = ("_proj.weight", "_proj_with_mqa.weight") if partial else ("_proj.weight",)
    for file in place.glob("*.safetensors"):
        tensors = {}
        for name, value in load_file(file).items():
            if not name.endswith(ends):
                tensors[name] = value
                continue
            rows, columns = value.shape
            grid = (-(-rows // block), -(-columns // block))
            whole = torch.zeros(grid[0] * block, grid[1] * block)
            whole[:rows, :columns] = value
            tiles = whole.reshape(grid[0], block, grid[1], block)
            scale = tiles.abs().amax(dim=(1, 3)) / 448
            whole = (tiles / scale[:, None, :, None]).reshape(whole.shape)
            tensors[name] = whole[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
            tensors[f"{name}_scale_inv"] = scale
        save_file(tensors, file)
    (index,) = [*place.glob("*.index.json")] or [None]
    if index is not None:
        index.unlink()
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
    }
    (place / "config.json").write_text(json.dumps(config))


def dequantized_fp8(place: Path, block: int = 16) -> dict[str, torch.Tensor]:
    """The plain tensors of `quantize_fp8`, each element times the scale of its block."""
    stored = {k: v for file in place.glob("*.safetensors") for k, v in load_file(file).items()}
    found = {}
    for name, value in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = (torch.arange(size) // block for size in value.shape)
            found[name] = (value.float() * scale[rows][:, columns]).bfloat16()
        elif not name.endswith("_scale_inv"):
            found[name] = value
    return found


_MOE = {"attention.key_length": 16, "expert_count": 4, "expert_used_count": 2}
GGUF: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "starcoder2": {}, "stablelm": {}, "nemotron": {},
    "falcon": {"attention.head_count_kv": 1}, "bloom": {}, "gpt2": {},
    "gemma2": {"attention.key_length": 16, "attention.sliding_window": 32},
    "gemma3": {"attention.key_length": 16, "attention.sliding_window": 32},
    "mamba": {
        "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
    },
    "t5": {"attention.key_length": 16, "attention.relative_buckets_count": 8},
    "qwen2moe": _MOE, "qwen3moe": _MOE,
    "minimax-m2": {**_MOE, "rope.dimension_count": 8, "expert_gating_func": 2},
    "lfm2": {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
}  # fmt: skip
"""Architectures of GGUF files that transformers reads, each with metadata beside the common."""


def gguf_model(path: Path, config: Any = None) -> tuple[Any, Any]:
    """The class of the model that transformers makes of a GGUF file, and its configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, T5ForConditionalGeneration

    config = config or AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if config.model_type == "t5":
        return T5ForConditionalGeneration, config
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config


def write_gguf(
    path: Path, architecture: str = "llama", kinds: Sequence[str] = ("Q8_0",),
    *, norms: str = "F32", left_out: Sequence[str] = (), big_endian: bool = False, **values: Any,
) -> Path:  # fmt: skip
    """Write a tiny model of random values, its matrices in the types `kinds` by turns, and return
    the path. left_out: tensors. values: metadata of the architecture, with _ for ., or None."""
    import numpy as np
    from gguf import GGUFEndian, GGUFWriter

    common = {
        "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 96,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 1e4,
    }  # fmt: skip
    numbers = np.random.default_rng(0)

    def write(tensors: Mapping[str, tuple[int, ...]]) -> None:
        endian = GGUFEndian.BIG if big_endian and tensors else GGUFEndian.LITTLE
        writer = GGUFWriter(str(path), architecture, endianess=endian)
        for key, value in {**common, **GGUF.get(architecture, {}), **values}.items():
            add = {
                int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                list: writer.add_array, type(None): lambda *_: None,
            }[type(value)]  # fmt: skip
            add(key if key in values and "." in key else f"{architecture}.{key}", value)
        writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(96)])
        turn = 0
        for name, shape in tensors.items():
            made = (numbers.standard_normal(shape) * 0.1).astype(np.float32)
            if "ssm_a" in name:
                made = -np.abs(made) - 1
            is_matrix = len(shape) > 1 and "ssm" not in name and "conv" not in name
            kind = kinds[turn % len(kinds)] if is_matrix else norms
            turn += is_matrix
            _add_gguf(writer, name, made, kind, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    # transformers makes the model from the metadata alone; its names say which tensors exist.
    write({})
    shapes = _gguf_shapes(path, architecture)
    write({name: shape for name, shape in shapes.items() if name not in left_out})
    return path


def _add_gguf(writer: Any, name: str, values: Any, kind: str, numbers: Any) -> None:
    """Add a tensor in a type; blocks of a type that the package gguf only unpacks are random."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

    of = GGMLQuantizationType[kind]
    each, size_bytes = GGML_QUANT_SIZES[of]
    if values.shape[-1] % each:
        of = GGMLQuantizationType["F16" if values.shape[-1] % 32 else "Q5_0"]
    plain = {"F64": "float64", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
    if kind in plain:
        writer.add_tensor(name, values.astype(plain[kind]))
        return
    try:
        blocks = quantize(values, of)
    except NotImplementedError:
        shape = (*values.shape[:-1], values.shape[-1] // each * size_bytes)
        blocks = numbers.integers(0, 256, shape, np.uint8)
    writer.add_tensor(name, blocks, raw_dtype=of)


def _gguf_shapes(path: Path, architecture: str) -> dict[str, tuple[int, ...]]:
    from transformers import modeling_gguf_pytorch_utils as legacy

    kind, config = gguf_model(path)
    model = on_meta(kind, config)
    processor = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)
    names = legacy.get_gguf_hf_weights_map(model, processor(config=config.to_dict()))
    state, found = model.state_dict(), {}
    for name, theirs in names.items():
        shape = tuple(state[theirs].shape)
        if "_exps" in name and len(shape) == 3:
            name = name if name.endswith(".weight") else f"{name}.weight"
            shape = shape if "down" in name else (shape[0], shape[1] // 2, shape[2])
        elif "conv" in name and len(shape) == 3:
            shape = (shape[0], shape[2])
        elif architecture == "gpt2" and len(shape) == 2 and "blk" in name:
            shape = shape[::-1]
        elif name.endswith("ffn_gate_inp_shexp.weight"):
            shape = shape[1:]
        found[name] = shape
    return found


# -- all model types -------------------------------------------------------------------------------

_LIMITS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("hidden_size", "d_model", "embed_dim", "n_embd", "hidden_dim", "dim", "projection_dim",
      "encoder_hidden_size", "decoder_hidden_size", "text_hidden_size", "out_hidden_size"), 32),
    (("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
      "decoder_layers", "depth", "num_global_layers"), 2),
    (("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads",
      "encoder_attention_heads", "decoder_attention_heads"), 4),
    (("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk", "moe_k"), 2),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    (("head_dim", "v_head_dim", "global_head_dim", "index_head_dim", "q_lora_rank",
      "kv_lora_rank"), 8),
    (("qk_nope_head_dim", "qk_rope_head_dim"), 4),
    (("n_group", "topk_group", "moe_num_groups", "first_k_dense_replace"), 1),
    (("max_position_embeddings", "n_positions", "image_size", "max_source_positions"), 64),
)  # fmt: skip


def shrunk(config: Any) -> Any:
    """Make a configuration tiny, in place, its parts too, by the names of its numbers."""
    from transformers import PreTrainedConfig

    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, _limit(name, value)))
        elif isinstance(value, dict) and "mrope_section" in value:
            value["mrope_section"] = [2, 1, 1]
    for name, value in list(vars(config).items()):
        # One entry for each layer.
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[: config.num_hidden_layers])
    return config


def _limit(name: str, value: int) -> int:
    if name.endswith("vocab_size"):
        return 200
    if name.endswith("_token_id"):
        return value if value < 200 else 3
    if "intermediate" in name or name.endswith("ffn_dim") or name in ("mlp_dim", "n_inner"):
        return 48
    return next((limit for names, limit in _LIMITS if name in names), value)


def every(left_out: Callable[[str, str], object]) -> Iterator[tuple[str, Any, Any]]:
    """Every model type with a conversion that the rules can shrink to 12 million parameters: its
    name, class and configuration. left_out: gets the name of each other one, and the reason."""
    from transformers import CONFIG_MAPPING, conversion_mapping
    from transformers.models.auto import modeling_auto as auto

    for model_type in CONFIG_MAPPING:
        if conversion_mapping.get_checkpoint_conversion_mapping(model_type) is None:
            continue
        try:
            config = shrunk(CONFIG_MAPPING[model_type]())
            mappings = (
                auto.MODEL_FOR_CAUSAL_LM_MAPPING,
                auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
                auto.MODEL_MAPPING,
            )
            kind = next(each[type(config)] for each in mappings if type(config) in each)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind._from_config(config).parameters())
            kind._from_config(config)
        # A model may refuse a shrunk configuration with any error: it is left out.
        except Exception as error:
            left_out(model_type, _reason(error))
            continue
        if size > _PARAMS_MAX:
            left_out(model_type, f"{size} parameters")
        elif model_type in _OTHER_CLASS:
            left_out(model_type, "its checkpoint is of another class")
        else:
            yield model_type, kind, config


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


_PARAMS_MAX = 12_000_000
"""Parameters of a model that is small enough for a test."""


_OTHER_CLASS = ("shieldgemma2",)
"""Model types whose checkpoint is of another class than their part that is found here."""
