"""LoRA by PEFT over a frozen base model on NVMe: adapters train, are saved, and are merged.

    python docs/examples/peft_lora.py --nvme /mnt/nvme0 --out out
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import infinity as inf
from infinity.integrations.peft import export_merged, merge, save_adapters

STEPS, VOCABULARY, LENGTH = 40, 64, 16
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def base_model() -> Any:
    """Build the base; with a model of the hub: `AutoModelForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return sequences in which each token follows from the one before."""
    token = torch.randint(0, VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    sequence = [token]
    for _ in range(LENGTH):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    ids = torch.cat(sequence, dim=1)
    return {"input_ids": ids, "labels": ids}


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Train the steps from `first` to before `last`; return their losses."""
    model.train()
    losses = []
    for step in range(first, last):
        loss = model(**batch_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=batch_of(0)["input_ids"]).logits
    return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", required=True, nargs="+", help="directories on NVMe drives")
    parser.add_argument("--out", required=True, help="directory for adapters and merged weights")
    options = parser.parse_args()
    policy = inf.Policy(params="nvme", optim="nvme", nvme=options.nvme, ram="min")

    model = inf.offload(get_peft_model(base_model(), LORA), policy)  # after get_peft_model
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)  # frozen parameters get no states
    losses = train(model, optimizer, 0, STEPS // 2)
    # Adapters and their states alone; the base comes from its own files.
    inf.save(model, optimizer, f"{options.out}/states", frozen=False).wait()
    losses += train(model, optimizer, STEPS // 2, STEPS)
    save_adapters(model, f"{options.out}/adapter")  # the files of PeftModel.save_pretrained
    found = logits_of(model)
    export_merged(merge(model), f"{options.out}/merged")  # a layer at a time
    inf.handle(model).close()

    again = inf.offload(get_peft_model(base_model(), LORA), policy)
    optimizer = inf.AdamW(again.parameters(), lr=1e-2)
    inf.restore(again, optimizer, f"{options.out}/states")
    resumed = train(again, optimizer, STEPS // 2, STEPS)
    assert resumed == losses[STEPS // 2 :], "a resumed run has the bits of the uninterrupted one"
    inf.handle(again).close()

    # The files load without infinity.
    adapted: Any = PeftModel.from_pretrained(base_model(), f"{options.out}/adapter")
    assert torch.equal(logits_of(adapted), found)
    merged = AutoModelForCausalLM.from_pretrained(f"{options.out}/merged")
    assert torch.equal(logits_of(merged), logits_of(adapted.merge_and_unload()))
    assert losses[-1] < losses[0] - 1
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
