"""`from_pretrained` under ZeRO-3 over the stand-in, in a process of its own: each function is a
test, and raises where it fails.

    python -m tests.integrations.deepspeed_loads FUNCTION DIRECTORY
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# First: transformers asks for DeepSpeed when it is imported.
from infinity.compat import deepspeed

deepspeed.install()

import transformers  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

from bench.integrations.memory import MIB, Meter, write_checkpoint  # noqa: E402
from tests.hub_models import assert_alike, tiny, write  # noqa: E402
from tests.integrations.deepspeed_hf import nvme, without  # noqa: E402

Auto = transformers.AutoModelForCausalLM
Classifier = transformers.AutoModelForSequenceClassification


def configuration(place: Path, **more: Any) -> dict[str, Any]:
    """The NVMe example, with the values that trainers fill in."""
    filled = without(
        nvme(place / "drive"), "optimizer", "scheduler", "fp16", "bf16", "train_batch_size",
        "gradient_accumulation_steps", "gradient_clipping",
    )  # fmt: skip
    for name in list(filled["zero_optimization"]):
        if filled["zero_optimization"][name] == "auto":
            del filled["zero_optimization"][name]
    # Parameters of this tiny model, too, must rest on the drive.
    filled["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    return {**filled, "train_micro_batch_size_per_gpu": 1, **more}


@contextlib.contextmanager
def zero_3(config: dict[str, Any]) -> Iterator[None]:
    """Inside the block transformers knows that ZeRO-3 is in use."""
    kept = HfDeepSpeedConfig(config)
    yield
    del kept


def both(place: Path, kind: Any, path: Path, config: dict[str, Any], **settings: Any) -> Any:
    """Load plainly and by mapping, with the same random numbers, and compare."""
    torch.manual_seed(3)
    truth = kind.from_pretrained(path, **settings)
    torch.manual_seed(3)
    with zero_3(config):
        mapped = kind.from_pretrained(path, **settings)
    assert_alike(mapped, truth)
    for (name, mine), theirs in zip(mapped.named_parameters(), truth.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad, name
        assert tuple(mine.ds_shape) == tuple(theirs.shape), name
    return mapped


def alike(place: Path) -> None:
    """Values, dtypes and buffers are those of transformers' own loading."""
    config = configuration(place)
    for family in ("llama", "gpt2", "mixtral", "deepseek_v3"):
        kind, shape = tiny(family)
        write(kind, shape, torch.float32, place / family)
        both(place, Auto, place / family, config)
        # A cast is made tensor by tensor.
        both(place, Auto, place / family, config, dtype=torch.bfloat16)
    kind, shape = tiny("llama", tie_word_embeddings=True)
    write(kind, shape, torch.bfloat16, place / "tied")
    tied = both(place, Auto, place / "tied", config)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    # Without the head of the files, and with one that they lack.
    both(place, transformers.AutoModel, place / "llama", config)
    both(place, Classifier, place / "llama", config, num_labels=5)
    sharded = place / "sharded"
    Auto.from_pretrained(place / "mixtral").save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    both(place, Auto, sharded, config)


def other_ways(place: Path) -> None:
    """Weights that cannot be mapped are loaded by transformers' own way, or refused by it."""
    config = configuration(place)
    deepspeed.init_distributed()
    kind, shape = tiny("llama")
    write(kind, shape, torch.float32, place / "llama")
    model = Auto.from_pretrained(place / "llama")
    pickled = place / "pickled"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    both(place, Auto, pickled, config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with zero_3(config):
        given = type(model).from_pretrained(None, config=model.config, state_dict=state)
    assert_alike(given, model)
    classes = {"num_labels": 3, "ignore_mismatched_sizes": True}
    Classifier.from_pretrained(place / "llama", num_labels=5).save_pretrained(place / "five")
    both(place, Classifier, place / "five", config, **classes)
    with zero_3(config):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            Classifier.from_pretrained(place / "five", num_labels=3)
        # Built anew: initialised by the model's own rules, module by module.
        fresh = Auto.from_config(shape)
    assert torch.equal(fresh.model.norm.weight, torch.ones(32))
    assert 0.015 < fresh.model.embed_tokens.weight.std() < 0.025


def changed(place: Path) -> None:
    """A mapped model is changed as any other before it is offloaded, and no file is."""
    kind, shape = tiny("llama", vocab_size=96)
    write(kind, shape, torch.float32, place / "llama")
    files = {file: file.read_bytes() for file in (place / "llama").iterdir()}
    truth = Auto.from_pretrained(place / "llama")
    config = configuration(place)
    with zero_3(config):
        mapped = Auto.from_pretrained(place / "llama")
        for model in (truth, mapped):
            torch.manual_seed(7)
            model.resize_token_embeddings(103)
            model.resize_token_embeddings(101, mean_resizing=False)
            norm = model.model.norm.weight
            with deepspeed.zero.GatheredParameters(norm, modifier_rank=0), torch.no_grad():
                norm.mul_(2)
        assert_alike(mapped, truth)
        ids = torch.arange(8)[None]
        engine, *_ = deepspeed.initialize(model=mapped, config=config)
        assert torch.equal(engine(ids).logits, truth(ids).logits)
        with pytest.raises(RuntimeError, match=r"change the module before `inf\.offload`"):
            mapped.resize_token_embeddings(120)
    engine.destroy()
    assert files == {file: file.read_bytes() for file in (place / "llama").iterdir()}


def order(place: Path) -> None:
    """`initialize` warns of a model that was loaded before the configuration was there."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infinity").addHandler(handler)
    kind, shape = tiny("llama")
    write(kind, shape, torch.float32, place / "llama")
    config = configuration(place)
    for early in (True, False):
        before = Auto.from_pretrained(place / "llama") if early else None
        with zero_3(config):
            model = before if early else Auto.from_pretrained(place / "llama")
            engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(config))
        engine.destroy()
        warned = [text for text in said if "before there was a configuration" in text]
        assert len(warned) == 1, said
    assert warned[0].startswith("LlamaForCausalLM")


def memory(place: Path) -> None:
    """Loading a model of 470 MiB takes no more RAM than the engine's budget and some tensors."""
    write_checkpoint(place / "weights", 1024, 10)
    largest = 32000 * 1024 * 2
    total = sum(file.stat().st_size for file in (place / "weights").glob("*.safetensors"))
    config = configuration(place, bf16={"enabled": True})
    meter = Meter()
    with zero_3(config):
        with meter.phase("from_pretrained"):
            model = Auto.from_pretrained(place / "weights")
        with meter.phase("initialize"):
            engine, *_ = deepspeed.initialize(model=model, config=config)
    print({name: f"{peak / MIB:.0f} MiB" for name, peak in meter.peaks.items()}, total // MIB)
    assert meter.peaks["from_pretrained"] < largest, meter.peaks
    budget = deepspeed_budget(engine)
    assert meter.peaks["initialize"] < budget + 3 * largest < total, (meter.peaks, budget)
    engine.destroy()


def deepspeed_budget(engine: Any) -> int:
    """Return the bytes that the engine plans to use."""
    import infinity as inf

    return int(inf.handle(engine.module).stats().ram_bytes)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
