"""Checkpoints of infinity.compat.deepspeed: tags, the script's own state, and a run that resumes
bit for bit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infinity.compat.deepspeed import DeepSpeedEngine, DeepSpeedRefusal, zero_to_fp32
from infinity.errors import AioError, ChecksumError
from tests.integrations.deepspeed_runs import (
    WIDTH,
    alone,
    assert_same,
    batches,
    built,
    config,
    net,
    train,
    values_of,
)

SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}}
FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with alone():
        yield


def run_of(tmp_path: Path, *, stage: int = 3, on_nvme: bool = True, **settings: Any) -> Any:
    """A function that builds the engine of a seed."""
    place = tmp_path / "nvme" if on_nvme else None
    values = config(stage, place, gradient_accumulation_steps=2, scheduler=SCHEDULE, **settings)
    return lambda seed=0: built(net(seed), values)


@pytest.mark.parametrize(
    ("stage", "on_nvme", "settings"),
    [(3, True, {"fp16": FP16}), (3, False, {"bf16": {"enabled": True}}), (1, False, {})],
)
def test_a_run_goes_on_bit_for_bit(
    stage: int, on_nvme: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of(tmp_path, stage=stage, on_nvme=on_nvme, **settings)
    dtype = torch.float16 if "fp16" in settings else torch.bfloat16 if settings else torch.float32
    data = batches(16, dtype)
    if dtype is torch.float16:
        # Overflows before the checkpoint: hysteresis and scale are part of it.
        for index in (1, 2, 4):
            data[index][0][0, 0] = torch.inf
    engine = run()
    train(engine, data[:8])
    assert engine.save_checkpoint(tmp_path / "ckpt", client_state={"epoch": 3, "mean": data[0][0]})
    losses = train(engine, data[8:])
    wanted, counts = values_of(engine.module), counts_of(engine)
    engine.destroy()
    engine = run(seed=1)
    path, client = engine.load_checkpoint(tmp_path / "ckpt")
    assert path == str(tmp_path / "ckpt" / "global_step4")
    assert client is not None
    assert client["epoch"] == 3
    assert torch.equal(client["mean"], data[0][0])
    assert train(engine, data[8:]) == losses
    assert_same(values_of(engine.module), wanted)
    assert counts_of(engine) == counts
    engine.destroy()


def counts_of(engine: DeepSpeedEngine) -> tuple[Any, ...]:
    optimizer = engine.optimizer
    assert optimizer is not None
    return (
        engine.global_steps, engine.skipped_steps, engine.global_samples, engine.get_lr(),
        optimizer.loss_scaler.state_dict(),
    )  # fmt: skip


def test_tags_and_the_newest_one(tmp_path: Path) -> None:
    engine = run_of(tmp_path)()
    place = tmp_path / "ckpt"
    engine.save_checkpoint(place, tag="begin")
    begin = values_of(engine.module)
    train(engine, batches(2))
    engine.save_checkpoint(place, tag=7, save_latest=False)
    assert (place / "latest").read_text() == "begin"
    train(engine, batches(2))
    engine.save_checkpoint(place)
    assert (place / "latest").read_text() == "global_step2"
    assert sorted(each.name for each in place.iterdir()) == ["7", "begin", "global_step2", "latest"]
    newest = values_of(engine.module)
    engine.load_checkpoint(place, tag="begin")
    assert_same(values_of(engine.module), begin)
    assert engine.global_steps == 0
    engine.load_checkpoint(place, tag=7)
    assert engine.global_steps == 1
    engine.load_checkpoint(place)
    assert_same(values_of(engine.module), newest)
    # A tag that is written again has the newest states.
    train(engine, batches(2))
    engine.save_checkpoint(place, tag="begin")
    newest = values_of(engine.module)
    train(engine, batches(2))
    engine.load_checkpoint(place, tag="begin")
    assert_same(values_of(engine.module), newest)
    engine.destroy()


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    engine = run()
    train(engine, batches(6))
    engine.save_checkpoint(tmp_path / "ckpt")
    saved, rates = values_of(engine.module), engine.get_lr()
    engine.destroy()

    engine = run(seed=1)
    _, client = engine.load_checkpoint(tmp_path / "ckpt", load_module_only=True)
    assert client == {}
    assert_same(values_of(engine.module), saved)
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (0, -1)
    weight = engine.module.layers[0].weight
    from infinity.compat.deepspeed.zero.access import safe_get_full_optimizer_state as moment

    assert moment(weight, "exp_avg").count_nonzero() == 0

    engine.load_checkpoint(tmp_path / "ckpt", load_optimizer_states=False)
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
    assert moment(weight, "exp_avg").count_nonzero() == 0

    engine.load_checkpoint(tmp_path / "ckpt", load_lr_scheduler_states=False)
    assert moment(weight, "exp_avg").count_nonzero() > 0
    assert engine.get_lr() == rates
    engine.destroy()


def test_a_function_of_the_script_loads_what_it_wants(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    engine = run()
    train(engine, batches(2))
    engine.save_checkpoint(tmp_path / "ckpt")
    saved = values_of(engine.module)
    engine.destroy()
    engine = run(seed=1)
    before = values_of(engine.module)

    def first_layer(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        with torch.no_grad():
            dst.layers[1].weight.copy_(src["layers.1.weight"])

    engine.load_checkpoint(tmp_path / "ckpt", custom_load_fn=first_layer)
    assert_same(values_of(engine.module), {**before, "layers.1.weight": saved["layers.1.weight"]})
    engine.destroy()


def test_without_a_newest_one_nothing_is_loaded(tmp_path: Path) -> None:
    engine = run_of(tmp_path)()
    before = values_of(engine.module)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    assert_same(values_of(engine.module), before)
    with pytest.raises(AioError, match="nowhere"):
        engine.load_checkpoint(tmp_path, tag="nowhere")
    engine.destroy()


def test_a_checkpoint_of_deepspeed_itself_names_the_call_that_reads_it(tmp_path: Path) -> None:
    engine = built(net(), config())
    before = values_of(engine.module)
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "latest").write_text("global_step3")
    torch.save({}, tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    with pytest.raises(DeepSpeedRefusal, match=r"inf\.load_deepspeed"):
        engine.load_checkpoint(tmp_path)
    assert_same(values_of(engine.module), before)
    engine.destroy()


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    engine = run_of(tmp_path)()
    with pytest.raises(ValueError, match="cannot be saved"):
        engine.save_checkpoint(tmp_path / "ckpt", client_state={"file": Path})
    args = argparse.Namespace(epochs=3)
    with pytest.raises(DeepSpeedRefusal, match=r"client_state \['args'\].*vars\(args\)"):
        engine.save_checkpoint(tmp_path / "ckpt", client_state={"args": args})
    assert not (tmp_path / "ckpt" / "latest").exists()
    with pytest.raises(ValueError, match="save_dir"):
        engine.save_checkpoint("")
    engine.destroy()


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    def run(seed: int) -> DeepSpeedEngine:
        model = net(seed)
        model.layers[1].requires_grad_(False)
        return built(model, config(3, tmp_path / "nvme"))

    engine = run(0)
    train(engine, batches(1))
    engine.save_checkpoint(tmp_path / "ckpt", exclude_frozen_parameters=True)
    saved = values_of(engine.module)
    assert "layers.1.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
    engine.destroy()
    engine = run(1)
    frozen = {name: value for name, value in values_of(engine.module).items() if ".1." in name}
    engine.load_checkpoint(tmp_path / "ckpt", load_module_strict=False)
    assert_same(values_of(engine.module), {**saved, **frozen})
    engine.destroy()


def test_weights_in_one_file(tmp_path: Path) -> None:
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    values = config(3, tmp_path / "nvme", bf16={"enabled": True})
    engine = built(net(), values)
    assert not engine.save_16bit_model(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    engine.destroy()
    values["zero_optimization"] |= gathers
    engine = built(net(), values)
    train(engine, batches(1, torch.bfloat16))
    assert engine.save_16bit_model(tmp_path / "out", "weights.bin")
    found = torch.load(tmp_path / "out" / "weights.bin")
    assert_same(found, values_of(engine.module))
    # Tied weights are one tensor in the file, too.
    assert found["tied.weight"].data_ptr() == found["layers.0.weight"].data_ptr()
    assert found["layers.0.weight"].shape == (WIDTH, WIDTH)
    assert_same(engine._zero3_consolidated_16bit_state_dict(), found)
    engine.destroy()


def test_a_module_without_an_optimizer(tmp_path: Path) -> None:
    settings = config(3, tmp_path / "nvme")
    del settings["optimizer"]
    engine = built(net(), settings)
    engine.save_checkpoint(tmp_path / "ckpt")
    saved = values_of(engine.module)
    engine.destroy()
    engine = built(net(1), settings)
    engine.load_checkpoint(tmp_path / "ckpt")
    assert_same(values_of(engine.module), saved)
    engine.destroy()


def test_a_load_amid_a_step_begins_the_step_anew(tmp_path: Path) -> None:
    engine = run_of(tmp_path)()
    data = batches(7)
    train(engine, data[:2])
    engine.save_checkpoint(tmp_path / "ckpt")
    wanted = train(engine, data[2:6])
    values = values_of(engine.module)
    # One of two micro-batches, whose gradients wait.
    train(engine, data[6:])
    engine.load_checkpoint(tmp_path / "ckpt")
    assert all(param.grad is None for param in engine.module.parameters())
    assert train(engine, data[2:6]) == wanted
    assert_same(values_of(engine.module), values)
    engine.destroy()


def test_what_fits_is_loaded_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = built(net(layers=2), config(3, tmp_path / "nvme"))
    train(engine, batches(2))
    engine.save_checkpoint(tmp_path / "ckpt")
    saved = values_of(engine.module)
    engine.destroy()
    engine = built(net(1), config(3, tmp_path / "nvme"))
    fresh = values_of(engine.module)
    with pytest.raises(ValueError, match=r"layers\.2\.weight.*missing in it.*strict=False"):
        engine.load_checkpoint(tmp_path / "ckpt")
    assert_same(values_of(engine.module), fresh)
    with caplog.at_level("INFO", "infinity"):
        engine.load_checkpoint(
            tmp_path / "ckpt", load_module_strict=False, load_optimizer_states=False
        )
    assert "layers.2.weight" in caplog.text
    assert_same(values_of(engine.module), {**fresh, **saved})
    train(engine, batches(1))
    engine.destroy()
    # The other way round: the checkpoint has more.
    engine = built(net(1, layers=1), config(3, tmp_path / "nvme"))
    with pytest.raises(ValueError, match=r"layers\.1\.weight.*not in the model"):
        engine.load_checkpoint(tmp_path / "ckpt")
    engine.load_checkpoint(tmp_path / "ckpt", load_module_strict=False)
    found = values_of(engine.module)
    assert_same(found, {name: saved[name] for name in found})
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_fp32_weights_of_a_checkpoint(tmp_path: Path, stage: int) -> None:
    model = net()
    model.layers[1].requires_grad_(False)
    place = tmp_path / "nvme" if stage == 3 else None
    engine = built(model, config(stage, place, bf16={"enabled": True}))
    train(engine, batches(2, torch.bfloat16))
    engine.save_checkpoint(tmp_path / "ckpt")
    values = values_of(engine.module)
    from infinity.compat.deepspeed.zero.access import safe_get_full_fp32_param as master

    masters = {
        name: values[name].float() if (found := master(param)) is None else found
        for name, param in engine.module.named_parameters(remove_duplicate=False)
    }
    engine.destroy()
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    assert found.keys() == values.keys()
    for name, value in found.items():
        if name != "scale":
            assert value.dtype is torch.float32
            assert torch.equal(value, masters[name].view(value.shape)), name
    assert found["tied.weight"].data_ptr() == found["layers.0.weight"].data_ptr()
    learning = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "ckpt", "global_step2", exclude_frozen_parameters=True
    )
    assert found.keys() - learning.keys() == {"layers.1.weight", "layers.1.bias"}
    fresh = zero_to_fp32.load_state_dict_from_zero_checkpoint(net(9), tmp_path / "ckpt")
    assert_same(values_of(fresh), found)


@pytest.mark.parametrize("safe", [False, True])
def test_fp32_weights_in_files(tmp_path: Path, safe: bool) -> None:
    engine = built(net(), config(2))
    train(engine, batches(1))
    engine.save_checkpoint(tmp_path / "ckpt")
    values = values_of(engine.module)
    engine.destroy()
    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(tmp_path / "ckpt", tmp_path / "whole", safe_serialization=safe)
    name = "model.safetensors" if safe else "pytorch_model.bin"
    assert [each.name for each in (tmp_path / "whole").iterdir()] == [name]
    load = load_file if safe else torch.load
    whole = load(tmp_path / "whole" / name)
    # A tied tensor has one name in safetensors.
    wanted = {key: values[key] for key in values if not (safe and key.startswith("tied"))}
    assert_same(whole, wanted)
    convert(tmp_path / "ckpt", tmp_path / "parts", WIDTH * WIDTH * 4, safe_serialization=safe)
    places = json.loads((tmp_path / "parts" / f"{name}.index.json").read_text())["weight_map"]
    assert len(set(places.values())) >= 3
    parts = {key: load(tmp_path / "parts" / file)[key] for key, file in places.items()}
    assert_same(dict(sorted(parts.items())), dict(sorted(wanted.items())))


def test_fp32_weights_of_what_is_damaged_or_not_there(tmp_path: Path) -> None:
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(ValueError, match="latest is not there"):
        read(tmp_path)
    engine = built(net(), config(2))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    data = max((tmp_path / "global_step0").glob("data-*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[5] ^= 1
    data.write_bytes(content)
    with pytest.raises(ChecksumError, match="data-"):
        read(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    torch.save({}, theirs / "mp_rank_00_model_states.pt")
    with pytest.raises(DeepSpeedRefusal, match=r"inf\.load_deepspeed"):
        read(tmp_path, "theirs")


def test_without_an_optimizer_nothing_says_which_parameters_are_frozen(tmp_path: Path) -> None:
    settings = config(2)
    del settings["optimizer"]
    engine = built(net(), settings)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    assert "layers.0.weight" in read(tmp_path)
    with pytest.raises(DeepSpeedRefusal, match="has no optimizer, which alone says which"):
        read(tmp_path, exclude_frozen_parameters=True)
