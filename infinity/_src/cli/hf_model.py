"""Hugging Face causal language models for `infinity train`: find, build, offload, generate, export.

transformers builds the module on the meta device, and `inf.offload` fills it from safetensors or a
GGUF file, some tensors at a time. So memory never holds a whole model; files that cannot be
streamed are an error. Code that comes with a model never runs (`trust_remote_code` stays off).
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import infinity as inf
from infinity._src.base.sizes import MIB
from infinity._src.base.torch_compat import is_out_of_memory
from infinity._src.cabi.installation import EXTRA, install_line, is_installed, not_installed
from infinity._src.checkpoint.formats.hub_files import hub_checkpoint, open_weights
from infinity._src.checkpoint.hub_resolution import read_config
from infinity._src.cli import lora
from infinity._src.params.materialize import Faults, FileTensors, SourceFiles
from infinity.errors import SlicesError

_BEGINNING_BYTES = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model on disk, and its tokenizer. gguf: name of the GGUF file in `directory`; None for a
    Hugging Face directory.
    """

    directory: Path
    gguf: str | None
    tokenizer: Any

    def tokenize(self, lines: list[str]) -> list[list[int]]:
        """Return the token ids of each line, without special tokens."""
        # Windows cross the ends of lines, where the model would learn special tokens as text.
        found: list[list[int]] = self.tokenizer(lines, add_special_tokens=False)["input_ids"]
        return found

    def checksum(self) -> int:
        """Return a checksum of the sizes and the beginnings of the files of weights."""
        pattern = "*.safetensors" if self.gguf is None else glob.escape(self.gguf)
        found = 0
        for path in sorted(self.directory.glob(pattern)):
            with path.open("rb") as file:
                found = zlib.crc32(file.read(_BEGINNING_BYTES), found ^ path.stat().st_size)
        return found


def find_pretrained(path: Path) -> Pretrained:
    """Find the model at `path`, a directory or a GGUF file, and load its tokenizer.

    Raises: ValueError if `path` is not a model, if its tokenizer cannot be loaded, or if
    transformers or gguf is missing.
    """
    transformers = quiet_transformers()
    if path.is_dir():
        directory, gguf = path, None
        if not (path / "config.json").is_file():
            files = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; for a GGUF file name the file: {path / files[0]}" if files else ""
            raise ValueError(f"{path} has no config.json, so it is not a Hugging Face model{hint}")
        if not isinstance((read_config(path) or {}).get("model_type"), str):
            raise ValueError(
                f"{path / 'config.json'} has no model_type; add the model's "
                '("model_type": "llama"), or copy the file again'
            )
        if not any(path.glob("*.safetensors")):
            raise ValueError(
                f"{path} has no *.safetensors; download them, or convert other weights by "
                "from_pretrained, then save_pretrained"
            )
    elif path.is_file() and path.suffix == ".gguf":
        directory, gguf = path.parent, path.name
        if not is_installed("gguf"):
            raise ValueError(f"{path}: {not_installed('gguf')}")
    else:
        raise ValueError(
            f"{path} is neither a model directory nor a GGUF file; infinity reads models from disk "
            "only"
        )
    extra = {"gguf_file": gguf} if gguf else {}
    with read_by_transformers(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, **extra
        )
    return Pretrained(directory, gguf, tokenizer)


@contextlib.contextmanager
def read_by_transformers(path: Path) -> Iterator[None]:
    """Turn any error that transformers raises about the files at `path` into a ValueError of one
    line that names `path`. Errors of exhausted memory pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The first line often only announces the error; the second states it.
        raise ValueError(f"{path}: {' '.join(lines[:2]) or type(error).__name__}") from error


@contextlib.contextmanager
def written_by_transformers(directory: Path) -> Iterator[None]:
    """Turn errors of tokenizers and safetensors about files that they write into an OSError of one
    line that names `directory`; they raise other types than OSError.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        text = str(error).partition("\n")[0] or type(error).__name__
        raise OSError(f"{directory}: {text}") from error


def model_on_meta(
    source: Pretrained,
    dtype: torch.dtype,
    *,
    checkpointing: bool = False,
    tile_linears: int | None = None,
    tile_loss: int | None = None,
    tile_experts: int | None = None,
    slices: int = 1,
    adapters: int | None = None,
) -> torch.nn.Module:
    """Return the model of `source` in `dtype`, on the meta device, in training mode.

    tile_linears: number of tiles of every linear; None: whole linears. tile_loss: number of tiles
    of the head and its loss; None: whole logits. tile_experts: experts in a tile of a stack; None:
    whole stacks. slices: micro-batches of a batch, which all pass a block before the next block and
    imply checkpointing; 1: whole batches. adapters: rank of LoRA adapters, which freeze the model;
    None: no adapters.

    Raises: as `inf.tile_linears`, `inf.tile_loss`, `inf.tile_experts` and `inf.microbatched`;
    ValueError for a model that transformers cannot build; SlicesError for a model
    whose loss is not the mean of the losses of micro-batches.
    """
    model: Any = _on_meta(source, dtype)
    _prepare(model, checkpointing and slices == 1)
    if tile_experts is not None:
        # Tiles need the eager implementation. A model without experts does not change.
        model.set_experts_implementation("eager")
        inf.tile_experts(model, experts=tile_experts)
    if adapters is not None:
        model = lora.add_adapters(model, adapters, source.directory)
    if tile_loss is not None:
        # Before `tile_linears`, which leaves a tiled head unchanged.
        inf.tile_loss(model, tiles=tile_loss)
    if tile_linears is not None:
        inf.tile_linears(model, tiles=tile_linears)
    if slices > 1:
        inf.microbatched(model, slices)
        found = inf.slices_of(model)
        if found is None or found.loss_reduction is None:
            raise SlicesError(
                f"{type(model).__name__} computes its loss from the logits of all rows at once, "
                "which is not bitwise the mean of the micro-batches' losses"
            )
    made: torch.nn.Module = model
    return made


def check_tokens(model: Any, source: Pretrained, tokens: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if the model's embedding has no row for one of the tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max((int(each.max()) for each in tokens if each.numel()), default=-1)
    if highest >= rows:
        size = len(source.tokenizer)
        raise ValueError(
            f"the tokenizer of {source.directory} has {size} tokens and the model's embedding has "
            f"{rows} rows; this text has token {highest}: use the tokenizer of the model, or "
            f"enlarge the model first (resize_token_embeddings({size}), save_pretrained)"
        )


def check_length(model: Any, seq: int, what: str = "--seq") -> str:
    """Return a note if sequences of `seq` tokens are longer than the model's positions, else "".
    what: name of the sequences. Raises: ValueError if the model cannot compute such positions.
    """
    config = model.config
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if not most or seq <= most:
        return ""
    # Rotary positions are computed; other models read positions from a table of fixed length.
    if not getattr(config, "rope_parameters", None):
        raise ValueError(
            f"{what} has {seq} tokens and the model has {most} positions; give {most} or less"
        )
    return f"{what} {seq} is longer than the {most} positions of the model's training"


def check_packing(model: Any, device: torch.device) -> None:
    """Raise ValueError if a conversation changes the model's logits of a later conversation in the
    same window. Models with all values zero pass. Collective on several ranks.
    """
    count, vocabulary = 8, model.get_input_embeddings().weight.shape[0]
    rows = torch.arange(2 * count).repeat(3, 1)
    # Compared with row 0, row 1 has another first conversation, and row 2 another first token in
    # the second conversation.
    rows[1, :count] += count
    rows[2, count] += 1
    positions = torch.arange(count).repeat(3, 2)
    model.eval()
    with torch.no_grad():
        found = model(
            input_ids=(rows % vocabulary).to(device),
            position_ids=positions.to(device),
            use_cache=False,
        ).logits[:, count + 1 :].float()
    model.train()
    of_others, own = ((found[row] - found[0]).abs().max() for row in (1, 2))
    # Differences from rounding are allowed, since sums may round in another order.
    if of_others > own / 1000:
        raise ValueError(
            f"--packing: {type(model).__name__} would attend from one conversation of a window to "
            "another, since it does not separate them by positions; leave --packing out"
        )


def offload_pretrained(
    model: torch.nn.Module,
    source: Pretrained,
    policy: inf.Policy,
    *,
    read: bool = True,
    adapted: bool = False,
) -> torch.nn.Module:
    """Offload the model of `source`, which is on the meta device, and return it. Blocks until all
    states are at rest.

    read: False reads no values, since a restore follows; until then the values are zeros. adapted:
    the model has LoRA adapters, which the files lack.

    Raises: as `inf.offload`; ValueError for files that cannot be read tensor by tensor.
    """
    path = source.directory if source.gguf is None else source.directory / source.gguf
    if read and not adapted:
        return inf.offload(model, policy, load=path)
    # Tensors in the files have the names of the model without adapters.
    plain = _on_meta(source, dtype_of(model)) if adapted else model
    # The files are still opened: they decide the dtypes of parameters, as in `from_pretrained`.
    with hub_checkpoint(plain, path) as found:
        tensors = found if isinstance(found, FileTensors) else open_weights(plain, path)
        if adapted:
            tensors = lora.AdaptedTensors(model, plain, tensors, policy.seed)
        return inf.offload(model, policy, load=tensors if read else _Unread(tensors))


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype in which a model of transformers computes."""
    found: torch.dtype = model.get_input_embeddings().weight.dtype
    return found


class _Unread(FileTensors):
    """Tensors with the names, shapes and dtypes of files; all values are zeros."""

    def __init__(self, tensors: FileTensors) -> None:
        self._tensors = tensors
        self.label = tensors.label

    def names(self) -> Iterable[str]:
        return self._tensors.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._tensors.dtype(name)

    @property
    def files(self) -> SourceFiles:
        """The files, by which ranks check that they initialize from the same source."""
        # Marked, since a run must not resume an interrupted fill with zeros as a fill with values,
        # nor the reverse.
        return dataclasses.replace(self._tensors.files, conversion="unread")

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype(name)).expand(self.shape(name))

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:  # noqa: ARG002
        out.zero_()

    def origin(self, name: str) -> str:
        return self._tensors.origin(name)

    def explain(self, name: str) -> Faults:
        return self._tensors.explain(name)


def _prepare(model: Any, checkpointing: bool) -> None:
    model.train()
    # Only generation needs the cache of keys and values.
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _on_meta(source: Pretrained, dtype: torch.dtype) -> Any:
    transformers = quiet_transformers()
    extra = {"gguf_file": source.gguf} if source.gguf else {}
    with read_by_transformers(source.directory):
        config = transformers.AutoConfig.from_pretrained(
            source.directory, trust_remote_code=False, **extra
        )
        # On the meta device the module takes no memory; `inf.offload` fills it unit by unit.
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
        if (source.directory / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                source.directory
            )
    return model


def save_adapters(model: Any, tokenizer: Any, directory: Path, *, first: bool) -> None:
    """Write the adapter and the tokenizer, so that PEFT's `from_pretrained(directory)` loads them.
    Collective. first: this rank writes.
    """
    values = lora.adapters_of(model)
    if first:
        with written_by_transformers(directory):
            model.save_pretrained(directory, state_dict=values, save_embedding_layers=False)
            tokenizer.save_pretrained(directory)


def continue_text(
    model: Any, tokenizer: Any, prompt: str, tokens: int, device: torch.device
) -> str:
    """Return `prompt` and the model's greedy continuation by at most `tokens` tokens, computed on
    `device`. Collective on several ranks, since the model gathers its units.
    """
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
    model.eval()
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id,
        )
    model.train()
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def save_pretrained(model: Any, tokenizer: Any, directory: Path, *, first: bool = True) -> None:
    """Write weights (streamed), config and tokenizer, so that `from_pretrained(directory)` loads
    them. Collective. first: this rank writes config and tokenizer.
    """
    if first:
        with written_by_transformers(directory):
            _save_beside(model, tokenizer, directory)
    inf.export_safetensors(model, directory)


def _save_beside(model: Any, tokenizer: Any, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # Training has disabled the cache, which users of the exported model need for generation.
    use_cache = model.config.use_cache
    model.config.use_cache = True
    try:
        model.config.architectures = [type(model).__name__]
        model.config.dtype = next(model.parameters()).dtype
        model.config.save_pretrained(directory)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(directory)
    finally:
        model.config.use_cache = use_cache
    tokenizer.save_pretrained(directory)


def quiet_transformers() -> Any:
    """Import transformers without progress bars and warnings, and offline: infinity reads models
    from disk only. Raises: ValueError if transformers is not installed.
    """
    # Before the import, which reads these variables. The user's settings stay.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"Hugging Face models need transformers: {install_line(EXTRA)}"
        ) from error
    # transformers warns of names that only newer releases have replaced.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
