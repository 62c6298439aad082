"""Writes docs/deepspeed-config.md from the table of keys, and finds the keys in DeepSpeed's source,
for comparison.

    python -m tests.deepspeed_page      writes docs/deepspeed-config.md
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity._src.config.deepspeed import OPTIMIZERS, SCHEDULES
from infinity._src.config.deepspeed_keys import GROUPS, MAPPED, REFUSED, TORCH_SCHEDULES, ConfigKey

PAGE = Path(__file__).resolve().parent.parent / "docs" / "deepspeed-config.md"
HEAD = '''# DeepSpeed configurations

`inf.Policy.from_deepspeed` reads the JSON configuration of DeepSpeed 0.19.8 and earlier:

```python
policy = inf.Policy.from_deepspeed("ds_config.json", ram="64GiB")
model = inf.offload(model, policy)
```

Fields after the path replace the file's. DeepSpeed has no memory budget, so `ram` has the policy's
default, half of the available memory, unless you give it. `inf.read_deepspeed(config)` returns an
`inf.DeepSpeedRun`, which also has dtype, loss scaling, clipping, batch sizes, optimizer and
scheduler. `infinity plan MODEL --ds-config FILE` shows the meaning of each key and the predicted
cost of a step.

Each key is **mapped** to a setting of the same meaning, accepted with **no meaning** here and one
line in the log (INFO), or **refused** with what to do instead. If a mapped setting differs from
DeepSpeed's, a note says how. No key is ignored silently:

- A key that is not in these tables is an error, which names the nearest key.
- Values have the type that DeepSpeed demands. `5e8` is a whole number; `"3"` and `true` are not.
- `null` counts as left out, everywhere. Names at the top that begin with `_` are comments.
- A trainer replaces `"auto"` before it passes the configuration on. Without a trainer,
  `auto={"optimizer.params.lr": 1e-4}` does. Any `"auto"` left is dropped where the key has no
  meaning, and an error elsewhere; `from_deepspeed` allows it where no field of the policy depends
  on it.
- A file is plain JSON. Comments and trailing commas, which DeepSpeed accepts (Hjson), are errors,
  and so is a name that occurs twice in one object.
- Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` any may
  be left out; the first is the product of the others and the number of ranks.
- `aio` inside of `zero_optimization`, as on Hugging Face's page, is read like `aio` at the top;
  `bfloat16` is an old name of `bf16`, and `zero_optimization: true` means stage 1.

Stage 0, with `"stage": 0` or without `zero_optimization`, shards and offloads nothing in DeepSpeed.
`inf.Policy.from_deepspeed` and `infinity train` refuse it, and name stages 1 to 3. `initialize` of
`infinity.compat.deepspeed` takes it as stage 1, with the same numbers, and logs that; optimizer
states are then in CPU memory.

The tables are written from the table in the code (`infinity/_src/config/deepspeed_keys.py`).
'''


def render() -> str:
    """Write the page."""
    parts = [HEAD]
    for title, keys in GROUPS.items():
        parts.append(f"\n## {title}\n\n| key | takes | fate | here |\n|---|---|---|---|\n")
        parts += [_row(list(alike)) for _, alike in itertools.groupby(keys, _cells)]
        if title == "Optimizer and scheduler":
            parts.append(_optimizers())
    return "".join(parts)


def _cells(key: ConfigKey) -> tuple[str, str, str]:
    """Return the cells that neighbours may share."""
    takes = f"{key.off.text} only" if key.fate == REFUSED and key.off else key.check.text
    default = f"; {_json(key.default)} without it" if key.default is not None else ""
    return takes + (default if key.fate == MAPPED else ""), key.fate, key.to


def _row(keys: list[ConfigKey]) -> str:
    takes, fate, here = _cells(keys[0])
    names = []
    for key in keys:
        also = "".join(f" (or `{name}`)" for name in key.spellings[1:])
        names.append(f"`{key.name}`{also}")
    return f"| {', '.join(names)} | {takes} | {fate} | {here} |\n"


def _json(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, f"{value}") if isinstance(value, bool) else (
        f'"{value}"' if isinstance(value, str) else f"{value:g}"
    )


def _optimizers() -> str:
    rows = [
        f"| `{kind}` | {_class(name)} | {', '.join(sorted({*defaults, *more}))} |\n"
        for kind, (name, defaults, more) in OPTIMIZERS.items()
    ]
    schedules = [
        f"| `{kind}` | {', '.join(sorted(needed)) or '-'} | {', '.join(sorted(more))} |\n"
        for kind, (needed, more) in SCHEDULES.items()
    ]
    torch = ", ".join(f"`{name}`" for name in sorted(TORCH_SCHEDULES))
    return (
        "\n### Types of optimizers\n\n"
        "DeepSpeed's names may have any case; torch's must be exact. Defaults are "
        "DeepSpeed's. All\nothers are refused.\n\n"
        "Muon updates parameters of two dimensions or more whose name has neither `embed` nor "
        "`lm_head`,\nas `initialize` of DeepSpeed marks them by `use_muon`, and all others by "
        "AdamW. Momentum, Nesterov\nand the factor are those of DeepSpeed. Products round in "
        "another order, and norms are 1e-7 or more,\nwhere DeepSpeed adds 1e-7. Set "
        "`\"ns_method\": \"standard\"`: the default, `gram`, iterates in fp16. Set\n"
        "`\"gradient_clipping\": 0`: DeepSpeed clips by the norm of the orthogonalized "
        "matrices.\n\n"
        "| `optimizer.type` | here | `optimizer.params` |\n|---|---|---|\n" + "".join(rows) +
        "\n### Types of schedules\n\n"
        "| `scheduler.type` | `scheduler.params` that it needs | and may have |\n|---|---|---|\n"
        + "".join(schedules) + "\n" + _wrapped(
            f"Schedules of torch have the arguments of torch: {torch}."
        )
    )  # fmt: skip


def _class(name: str) -> str:
    kernel = name in ("AdamW", "Lion", "SGD", "Muon")
    return f"`inf.{name}`" if kernel else f"`inf.Elementwise(torch.optim.{name}, ...)`"


def _wrapped(text: str, columns: int = 100) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > columns:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return "\n".join(lines) + "\n"


# -- DeepSpeed's own keys --------------------------------------------------------------------------

UNKNOWN = object()
"""The default of a field whose source is no literal."""
ZERO = "zero_optimization"
MODELS = {
    ZERO: ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    f"{ZERO}.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    f"{ZERO}.offload_optimizer": (
        "runtime/zero/offload_config.py",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    f"{ZERO}.zenflow": ("runtime/zenflow/zenflow_config.py", "ZenFlowConfig"),
    f"{ZERO}.leaf_module": ("runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "": ("monitor/config.py", "DeepSpeedMonitorConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "weight_quantization": ("inference/config.py", "WeightQuantConfig"),
    "timers.throughput": ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
}
"""Sections, and the files and classes of their pydantic models."""
READERS = {
    "runtime/config.py": {
        "param_dict": "", "_param_dict": "", "checkpoint_params": "checkpoint",
        "par_write_params": "checkpoint.parallel_write", "data_types_params": "data_types",
    },
    "runtime/zero/config.py": {"param_dict": ""},
    "runtime/precision_config.py": {"param_dict": ""},
    "runtime/swap_tensor/aio_config.py": {"param_dict": "", "aio_dict": "aio"},
    "runtime/activation_checkpointing/config.py": {
        "act_chkpt_config_dict": "activation_checkpointing",
    },
    "profiling/config.py": {"flops_profiler_dict": "flops_profiler"},
    "runtime/model_checkpointing/config.py": {
        "checkpoint_dict": "checkpoint", "writer_dict": "checkpoint.writer",
    },
    "datastates/config.py": {"param_dict": ""},
    "autotuning/config.py": {"autotuning_dict": "autotuning"},
}  # fmt: skip
"""Files that read keys one by one: the names of their mappings, and what sections those are."""


def fields_of_models(package: Path) -> Iterator[tuple[str, Any]]:
    """The dotted names of all keys that the source of DeepSpeed reads, with their defaults. Nothing
    is imported."""
    for section, (file, name) in MODELS.items():
        tree = _parse(package / file)
        (model,) = [
            node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
        ]
        for node in model.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                alias, default = _field(node.value)
                yield ".".join(filter(None, (section, alias or node.target.id))), default
    constants = _constants(package)
    for file, mappings in READERS.items():
        for node in ast.walk(_parse(package / file)):
            for mapping, key in _read_keys(node):
                above = mappings.get(mapping) if isinstance(mapping, str) else None
                last = constants.get(key.id) if isinstance(key, ast.Name) else _literal(key)
                if above is not None and isinstance(last, str):
                    yield ".".join(filter(None, (above, last))), UNKNOWN
    for node in ast.walk(_parse(package / "runtime/config.py")):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            name = getattr(node.targets[0], "id", "")
            section = {"_REMOVED_TOP_LEVEL_CONFIG_KEYS": "", "_REMOVED_ZERO_CONFIG_KEYS": ZERO}
            if name in section:
                for key in node.value.keys:
                    yield ".".join(filter(None, (section[name], _literal(key)))), UNKNOWN


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _literal(node: Any) -> Any:
    return node.value if isinstance(node, ast.Constant) else UNKNOWN


def _field(value: ast.expr | None) -> tuple[str | None, Any]:
    """Return the alias and the default of a field."""
    if not isinstance(value, ast.Call):
        return None, _literal(value)
    keywords = {keyword.arg: _literal(keyword.value) for keyword in value.keywords}
    default = _literal(value.args[0]) if value.args else keywords.get("default", UNKNOWN)
    alias = keywords.get("alias")
    return (alias if isinstance(alias, str) else None), default


def _constants(package: Path) -> dict[str, str]:
    """Constants that hold names of keys."""
    files = (
        "runtime/constants.py", "runtime/swap_tensor/constants.py", "profiling/constants.py",
        "runtime/model_checkpointing/constants.py", "autotuning/constants.py",
        "runtime/activation_checkpointing/config.py", "runtime/zero/config.py",
        "runtime/precision_config.py", "datastates/config.py",
    )  # fmt: skip
    return {
        node.targets[0].id: node.value.value
        for file in files
        for node in _parse(package / file).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _read_keys(node: ast.AST) -> Iterator[tuple[Any, ast.expr]]:
    """The mapping and the key of `get_scalar_param(mapping, KEY)` and of `mapping.get(KEY)`."""
    if not isinstance(node, ast.Call) or not node.args:
        return
    if isinstance(node.func, ast.Name) and node.func.id.startswith("get_") and len(node.args) > 1:
        yield _name(node.args[0]), node.args[1]
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield _name(node.func.value), node.args[0]


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
