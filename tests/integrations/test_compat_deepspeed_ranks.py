"""infinity.compat.deepspeed on two ranks: losses of the native loop, the first rank's values,
overflow on one rank, checkpoints, written parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.compat import deepspeed
from infinity.compat.deepspeed import DeepSpeedRefusal, zero
from infinity.compat.deepspeed.zero import access, leaf_modules
from tests.distributed.ranks import on_ranks
from tests.integrations.deepspeed_runs import (
    WIDTH,
    batches,
    built,
    config,
    native,
    net,
    train,
    values_of,
)


def ready(rank: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def same_on_all(value: Any) -> bool:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return all(each == told[0] for each in told)


def _trains(rank: int, place: Path) -> list[Any]:
    ready(rank)
    found = []
    for stage, steps in ((1, 2), (3, 2)):
        directory = place / f"nvme{stage}"
        directory.mkdir(exist_ok=True)
        settings = config(
            stage, directory if stage == 3 else None, gradient_accumulation_steps=steps,
            gradient_clipping=0.2, bf16={"enabled": True},
        )  # fmt: skip
        data = batches(6, torch.bfloat16, rank)
        plain = native(settings, data, dtype=torch.bfloat16, steps=steps, clip=0.2)
        engine = built(net(), settings)
        losses = train(engine, data)
        same = equal(values_of(engine.module), plain.values)
        found.append((losses == plain.losses, same, engine.train_batch_size()))
        engine.destroy()
    return found


def test_losses_and_values_are_those_of_the_native_loop(tmp_path: Path) -> None:
    for told in on_ranks(_trains, tmp_path / "ranks", 2):
        assert told == [(True, True, 2 * 2 * 4)] * 2


def _coalesces(rank: int, _place: Path) -> Any:
    """Two backwards and a step, with and without the context. Rank 0 alone reads parameters."""
    ready(rank)
    found = []
    for stage in (1, 2, 3):
        values, steps = [], batches(4, rank=rank)
        for coalesced in (True, False):
            engine = built(net(), config(stage, gradient_accumulation_steps=1))
            for first in (0, 2):
                context = engine.coalesce_grad_reduction if coalesced else contextlib.nullcontext
                with context():
                    for x, y in steps[first : first + 2]:
                        engine.backward(engine(x, y), scale_wrt_gas=False)
                norm_alone = rank == 0 and stage < 3
                shown = [float(p.norm()) for p in engine.parameters()] if norm_alone else []
                engine.step()
            assert all(map(math.isfinite, shown))
            values.append(values_of(engine.module))
            engine.destroy()
        found.append(equal(*values))
    return found


def test_coalesced_backwards_are_one_step(tmp_path: Path) -> None:
    assert on_ranks(_coalesces, tmp_path / "ranks", 2) == [[True] * 3] * 2


def _reads_after_a_load(rank: int, place: Path) -> Any:
    ready(rank)
    engine = built(net(), config(2))
    engine.save_checkpoint(place / "ckpt")
    saved = values_of(engine.module)
    x, y = batches(1, rank=rank)[0]
    engine.backward(engine(x, y))
    engine.step()
    engine.load_checkpoint(place / "ckpt")
    read = rank == 0 and {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    same = not read or all(torch.equal(value, saved[name]) for name, value in read.items())
    engine.destroy()
    return same


def test_a_rank_alone_reads_what_was_loaded(tmp_path: Path) -> None:
    assert on_ranks(_reads_after_a_load, tmp_path / "ranks", 2) == [True, True]


def _first_rank_counts(rank: int, _place: Path) -> Any:
    ready(rank)
    engine = built(net(seed=rank), config(3))
    same = equal(values_of(engine.module), values_of(net(seed=0)))
    weight = engine.module.layers[1].weight
    # Only the second rank writes, and all have it then.
    with zero.GatheredParameters(weight, modifier_rank=1):
        if rank == 1:
            weight.data.fill_(5.0)
    written = bool((values_of(engine.module)["layers.1.weight"] == 5).all())
    part = access.safe_get_local_fp32_param(weight)
    access.safe_set_local_fp32_param(weight, torch.full_like(part, float(rank)))
    whole = access.safe_get_full_fp32_param(weight).reshape(-1)
    half = WIDTH * WIDTH // 2
    parts = bool((whole[:half] == 0).all() and (whole[half:] == 1).all())
    engine.backward(engine(*batches(1, rank=rank)[0]))
    grad = access.safe_get_full_grad(engine.module.layers[0].bias)
    engine.destroy()
    # Before it is offloaded, too.
    with zero.Init():
        plain = torch.nn.Linear(2, 2)
    with zero.GatheredParameters(list(plain.parameters()), modifier_rank=1):
        plain.weight.data.fill_(float(rank))
    return same, written, part.numel() == half, parts, grad.tolist(), plain.weight[0, 0].item()


def test_the_first_ranks_values_and_those_that_a_rank_writes(tmp_path: Path) -> None:
    first, second = on_ranks(_first_rank_counts, tmp_path / "ranks", 2)
    assert first == second
    assert first[:4] == (True, True, True, True)
    assert first[5] == 1.0


def _run_different_children(rank: int, _place: Path) -> Any:
    ready(rank)
    model = net()
    layers = model.layers
    leaf_modules.set_z3_leaf_modules(model, [type(model)])

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(layers[1 + rank](x), y)

    model.forward = forward  # type: ignore[method-assign]
    engine = built(model, config(3))
    losses = train(engine, batches(2))
    values = values_of(engine.module)
    moved = [
        not torch.equal(values[f"layers.{index}.weight"], layer.weight)
        for index, layer in enumerate(net().layers)
    ]
    engine.destroy()
    return losses[1] < losses[0] + 1, moved


def test_ranks_run_different_children_of_a_leaf(tmp_path: Path) -> None:
    assert on_ranks(_run_different_children, tmp_path / "ranks", 2) == [(True, [True] * 3)] * 2


def _overflows(rank: int, _place: Path) -> Any:
    ready(rank)
    fp16 = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}
    engine = built(net(), config(2, fp16=fp16))
    (x, y), told = batches(1, torch.float16, rank)[0], []
    bad = x.clone()
    bad[0, 0] = math.inf
    # On one rank alone.
    for kind in (x, bad if rank == 1 else x, x):
        train(engine, [(kind, y)])
        told.append((engine.skipped_steps, engine.cur_scale, engine.get_global_grad_norm()))
    told.append(same_on_all({n: v.tolist() for n, v in values_of(engine.module).items()}))
    engine.destroy()
    return told


def test_an_overflow_of_one_rank_skips_the_step_of_all(tmp_path: Path) -> None:
    first, second = on_ranks(_overflows, tmp_path / "ranks", 2)
    assert first == second
    assert [skipped for skipped, _, _ in first[:3]] == [0, 1, 1]
    assert [scale for _, scale, _ in first[:3]] == [64.0, 32.0, 32.0]
    assert first[3]


@dataclasses.dataclass(frozen=True)
class Saved:
    """Train and save, or resume from that save and train."""

    goes_on: bool
    place: Path

    def __call__(self, rank: int, _place: Path) -> Any:
        ready(rank)
        engine = built(net(seed=3 if self.goes_on else 0), config(3, self.place / "nvme"))
        data = batches(6, rank=rank)
        if self.goes_on:
            path, client = engine.load_checkpoint(self.place / "ckpt")
            assert path is not None
            assert client == {"epoch": 2}
        else:
            train(engine, data[:3])
            engine.save_checkpoint(self.place / "ckpt", client_state={"epoch": 2})
            with pytest.raises(DeepSpeedRefusal, match="not consistent across all ranks"):
                engine.save_checkpoint(self.place / "ckpt", tag=f"rank{rank}")
        losses = train(engine, data[3:])
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (rank == 1)
        engine.destroy()
        return losses


def test_a_run_of_two_ranks_goes_on(tmp_path: Path) -> None:
    wanted = on_ranks(Saved(False, tmp_path), tmp_path / "saves", 2)
    assert on_ranks(Saved(True, tmp_path), tmp_path / "goes on", 2) == wanted
    assert (tmp_path / "ckpt" / "latest").read_text() == "global_step3"


def _samples(rank: int, _place: Path) -> Any:
    ready(rank)
    data = torch.utils.data.TensorDataset(torch.arange(16))
    engine, _, loader, _ = deepspeed.initialize(
        model=net(), config=config(1), training_data=data
    )
    seen = [row.item() for (rows,) in loader for row in rows]
    engine.destroy()
    return seen


def test_each_rank_has_its_part_of_the_samples(tmp_path: Path) -> None:
    first, second = on_ranks(_samples, tmp_path / "ranks", 2)
    assert sorted([*first, *second]) == list(range(16))
