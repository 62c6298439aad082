"""Tiny models of transformers as the hub has them, for the tests of checkpoints.

`tiny` makes some families by hand; `every` shrinks the configurations of all model types that
transformers has a conversion for, but for those of `LEFT_OUT`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


def write_gguf(path: Path) -> Path:
    """Write a tiny Llama of random values in blocks of 8 bits, and return the path."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    heads, hidden, kv, inner, vocab = 4, 64, 32, 128, 96
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocab)
    block = {
        "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner), "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in block.items()}
    numbers = np.random.default_rng(0)
    for name, shape in {**shapes, "output": (vocab, hidden)}.items():
        values = numbers.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
        # Whatever a model says of a configuration that was cut by rules: it is left out.
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
