"""LoRA adapters of `infinity train --lora R`, by PEFT: added to a model on the meta device,
initialized together with the base model's weights, and written as PEFT's files.

    model on meta -> add_adapters -> offload with AdaptedTensors -> training -> adapters_of

All linears of the blocks get adapters (PEFT's "all-linear", which leaves out the head), with alpha
twice the rank. The base is frozen: it has no optimizer states, and training never writes it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import infinity as inf
from infinity._src.cabi.installation import install_line, is_installed
from infinity._src.params.discover import find_parameters
from infinity._src.params.materialize import Faults, FileTensors, SourceFiles, find_buffers

_ADAPTER = re.compile(r"\.lora_(A|B)\.default\.weight$")
_BASE = "base_model.model."


def check_installed() -> None:
    """Raise ValueError if PEFT is missing."""
    if not is_installed("peft"):
        raise ValueError(f"--lora needs peft, which is not installed: {install_line('peft')}")


def add_adapters(model: Any, rank: int, directory: Path) -> Any:
    """Return the PeftModel of `model`, which is on the meta device. directory: the base model's,
    for the adapter's configuration.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    # PEFT writes this name into the adapter's configuration.
    model.name_or_path = str(directory)
    with warnings.catch_warnings():
        # PEFT asks the model for attributes that transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the adapters' tensors, by name. Collective."""
    adapters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with inf.handle(model).gather(list(adapters.values())):
        return {name: each.detach().cpu().clone() for name, each in adapters.items()}


class AdaptedTensors(FileTensors):
    """Tensors of a PeftModel on the meta device. Weights of the base model are read from `base`, by
    their names in `plain`, the model without adapters; adapters have PEFT's initial values.

    The factor A is drawn from a generator for `seed` and the tensor's name, so that all ranks draw
    the same values; the factor B is zero.
    """

    def __init__(self, model: Any, plain: torch.nn.Module, base: FileTensors, seed: int) -> None:
        self._base, self._seed, self.label = base, seed, base.label
        known = plain.state_dict(keep_vars=True).keys()
        self._shapes: dict[str, tuple[int, ...]] = {
            name: tuple(entry.parameter.shape)
            for entry in find_parameters(model)
            for name in entry.keys
        }
        self._shapes |= {
            name: tuple(buffer.value.shape)
            for buffer in find_buffers(model)
            for name in buffer.names
            if buffer.persistent
        }
        # Name in the PeftModel -> name in the base.
        self._plain: dict[str, str] = {
            name: found
            for name in self._shapes
            if (found := name.removeprefix(_BASE).replace(".base_layer", "")) in known
        }
        # The adapter that was read last, since `read_into` reads parts of it.
        self._drawn: tuple[str, torch.Tensor] | None = None
        wrong = [n for n in self._shapes if n not in self._plain and not _ADAPTER.search(n)]
        assert not wrong, wrong

    def names(self) -> Iterable[str]:
        wrapped = {plain: name for name, plain in self._plain.items()}
        adapters = [name for name in self._shapes if name not in self._plain]
        return [*(wrapped.get(name, name) for name in self._base.names()), *adapters]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._of(name)) if self._is_base(name) else self._shapes[name]

    def dtype(self, name: str) -> torch.dtype | None:
        return self._base.dtype(self._of(name)) if self._is_base(name) else torch.float32

    @property
    def files(self) -> SourceFiles:
        found = self._base.files
        adapters = [each for each in self._shapes.items() if each[0] not in self._plain]
        drawn = zlib.crc32(repr((self._seed, adapters)).encode())
        return dataclasses.replace(found, conversion=f"{found.conversion} adapters {drawn:08x}")

    @property
    def converting_bytes(self) -> int:
        return self._base.converting_bytes

    def read(self, name: str) -> torch.Tensor:
        return self._base.read(self._of(name)) if self._is_base(name) else self._initial(name)

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        if self._is_base(name):
            self._base.read_into(self._of(name), start, out)
        else:
            if self._drawn is None or self._drawn[0] != name:
                self._drawn = name, self._initial(name).flatten()
            out.copy_(self._drawn[1][start : start + out.numel()])

    def origin(self, name: str) -> str:
        return self._base.origin(self._of(name)) if self._is_base(name) else ""

    def explain(self, name: str) -> Faults:
        return self._base.explain(self._of(name)) if self._is_base(name) else Faults()

    def _is_base(self, name: str) -> bool:
        # The base's files have every name that the model lacks.
        return name in self._plain or name not in self._shapes

    def _of(self, name: str) -> str:
        return self._plain.get(name, name)

    def _initial(self, name: str) -> torch.Tensor:
        value = torch.zeros(self._shapes[name])
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
            torch.nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        return value
