"""LoRA: frozen weights are needed in backward although no hook of theirs fires. In a process of its
own: the failure is a segmentation fault. Rows of test_matrix.py have adapters from before."""

from __future__ import annotations

import faulthandler
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from infinity._src.params.sharded_param import ShardedParameter
from tests import forks
from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig

config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)


def with_adapters(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, config)


def check(eager: bool, reentrant: str) -> None:
    rig = Rig(models.llama(), models.llama_groups, eager=eager)
    rig.plain, rig.model = with_adapters(rig.plain), with_adapters(rig.model)
    adapters = [p for p in rig.model.parameters() if p.requires_grad]
    assert adapters
    assert not any(isinstance(p, ShardedParameter) for p in adapters)
    assert any(isinstance(p, ShardedParameter) for p in rig.model.parameters())
    for each in (rig.plain, rig.model):
        if reentrant != "none":
            each.config.use_cache = False
            each.enable_input_require_grads()
            each.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant == "True"}
            )
        each.train()

    for step in range(3):
        losses = []
        for each in (rig.plain, rig.model):
            torch.manual_seed(step)
            loss = models.lm_loss(each, step)
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses), losses
        trained = 0
        for (name, p), (_, q) in zip(
            rig.plain.named_parameters(), rig.model.named_parameters(), strict=True
        ):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert torch.equal(p.grad, q.grad), name
                trained += 1
                with torch.no_grad():
                    p -= 0.5 * p.grad
                    q -= 0.5 * q.grad
        assert trained == 4 * 4
        rig.plain.zero_grad()
        rig.model.zero_grad()
        for unit in rig.units:
            assert unit.refs == 0
    if eager:
        assert rig.unsharder.peak_numel <= rig.largest_unit, (
            rig.unsharder.peak_numel,
            rig.largest_unit,
        )
    state = rig.model.state_dict()
    for name, value in rig.plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_lora_made_after_offload_trains_bit_equal() -> None:
    assert forks.in_a_fork("tests.unit.hooks.test_lora").count("bit-equal") == 4


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    for eager, reentrant in ((True, "none"), (False, "none"), (True, "False"), (True, "True")):
        check(eager, reentrant)
        print("bit-equal", eager, reentrant, flush=True)
