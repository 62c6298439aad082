"""Plans for 8 GPUs of 24 GB, one of 80 GB and one of 141 GB, beside the same computed by hand.

Bytes per parameter are those of design §8 (exact, 12 B at rest): 14 + 4 (M - 1) read and 12 written
over the drives; 4 M + 2 (M - 1) to the GPUs and 2 M from them; 26 B through the CPU's memory by an
update on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import infinity as inf  # noqa: E402
from infinity._src.base.sizes import GIB, MIB  # noqa: E402
from infinity._src.cli.plan import read_shape  # noqa: E402
from infinity._src.engine.step_limits import StepTerms  # noqa: E402
from infinity._src.memory.roofline import Moved  # noqa: E402
from infinity._src.plan.changes import fewest_micro_batches, one_change, where_updates_run  # noqa: E402
from infinity._src.plan.machine import Machine, describe_machine  # noqa: E402
from infinity._src.plan.memory import gpu_need, least_need, ways_to_fit  # noqa: E402
from infinity._src.plan.predict import predict  # noqa: E402
from infinity._src.plan.workload import (  # noqa: E402
    Job,
    ModelShape,
    shape_of,
)
from tests import models  # noqa: E402
from tests.device import simulated  # noqa: E402
from tests.marks import alternating  # noqa: E402
from tests.plans import job_of, with_budget  # noqa: E402
from tests.turning import turning_bytes_max  # noqa: E402

CONFIGS: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "tie_word_embeddings": False,
    },
    "70b": {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "405b": {
        "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
        "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@functools.cache
def llama(name: str, nested: bool = True) -> ModelShape:
    """From a config.json, as the command reads it."""
    with tempfile.TemporaryDirectory() as directory:
        config = transformers.LlamaConfig(**CONFIGS[name], max_position_embeddings=131072)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(directory)
        return read_shape(Path(directory), torch.bfloat16, nested=nested)


def largest_bytes(shape: ModelShape, tiles: int, loss_tiles: int = 1) -> int:
    return max(unit.gathered for unit in shape.unit_bytes(tiles, loss_tiles))


def params_of(name: str) -> int:
    """Elements, by hand."""
    given = CONFIGS[name]
    width, mlp, words = given["hidden_size"], given["intermediate_size"], given["vocab_size"]
    keys = width // given["num_attention_heads"] * given["num_key_value_heads"]
    block = 2 * width * width + 2 * width * keys + 3 * width * mlp + 2 * width
    return (
        given["num_hidden_layers"] * block
        + width
        + words * width * (1 if given["tie_word_embeddings"] else 2)
    )


def machine(kind: str, gpus: int = 1, ram: float = 512 * GIB, drives: int = 4) -> Machine:
    """Drives of 6.8 and 5.0 GB/s each."""
    return describe_machine(gpus=gpus, gpu=kind, ram_bytes=ram, drives=drives)


NOTHING = {"params": 0.0, "optim": 0.0}


# -- one GPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1b", "7b", "70b", "405b"])
def test_the_shape_is_the_configuration_s(name: str) -> None:
    assert llama(name).params == params_of(name)
    stated = {"1b": 1.24e9, "7b": 6.74e9, "70b": 70.55e9, "405b": 405.85e9}[name]
    assert llama(name).params == pytest.approx(stated, rel=0.005)


def test_1b_with_few_tokens_waits_for_the_update_in_its_first_forward() -> None:
    params, tokens = params_of("1b"), 8192
    found = predict(
        llama("1b"), machine("h200", ram=128 * GIB), job_of(tokens=tokens, sequence=4096)
    )
    # Tied words compute. A forward of 56 ms is shorter than the update and one gather through the
    # CPU's memory.
    forward_s = tokens * (2 * params + 2 * 16 * 2048 * 4096) / 400e12
    window_s = 28 * params / 200e9
    assert forward_s < window_s
    assert found.limits.schedule_s == pytest.approx(window_s + 3 * forward_s, rel=1e-3)
    assert found.limits.floor_s == pytest.approx(4 * forward_s)
    cpu, device = where_updates_run(llama("1b"), found)
    # On the GPU, before that forward: 14 B up (the gradient among them) beside 12 down, at 50 GB/s
    # each.
    assert device.limits.schedule_s == pytest.approx(14 * params / 50e9 + 4 * forward_s, rel=1e-3)
    assert device.terms_s["update in GPU memory"] == pytest.approx(26 * params / 4800e9, rel=1e-3)
    assert (cpu.copied.h2d, cpu.copied.d2h) == (
        pytest.approx(4 * params),
        pytest.approx(2 * params),
    )
    assert (device.copied.h2d, device.copied.d2h) == (
        pytest.approx(18 * params, rel=1e-3),
        pytest.approx(14 * params, rel=1e-3),
    )
    assert cpu == found
    assert cpu.step_s < device.step_s


def test_70b_on_drives_of_a_machine_with_one_gpu_of_141_gb() -> None:
    params, tokens = params_of("70b"), 262_144
    job = fewest_micro_batches(
        llama("70b"), machine("h200"), job_of(tokens=tokens, sequence=4096, resident=NOTHING)
    )
    # 32,768 tokens: inputs of 80 blocks of 16 KiB each take 40 GiB, logits of 128,256 words at 10 B
    # 39.1 GiB; twice as many do not fit beside the units.
    assert (job.micro_batches, job.micro_batch_tokens(1)) == (8, 32_768)
    found = predict(llama("70b"), machine("h200"), job)
    assert found.fits
    assert found.gpu.parts["inputs of blocks"] == 40 * GIB
    assert found.gpu.parts["logits and loss (estimated)"] == 32_768 * 128_256 * 10
    # the head is the largest unit, with the last norm; 1 GiB of others beside it
    assert found.gpu.parts["gathered units"] == 128_256 * 8192 * 2 + 8192 * 2 + GIB
    read, written = (14 + 4 * 7) * params, 12 * params
    assert (found.moved.total.read, found.moved.total.written) == (
        pytest.approx(read, rel=1e-3),
        pytest.approx(written, rel=1e-3),
    )
    assert found.terms_s["drives"] == pytest.approx(read / 27.2e9 + written / 20e9, rel=1e-3)
    up, down = (4 * 8 + 2 * 7) * params, 2 * 8 * params
    assert (found.copied.h2d, found.copied.d2h) == (
        pytest.approx(up, rel=1e-3),
        pytest.approx(down, rel=1e-3),
    )
    assert found.terms_s["PCIe"] == pytest.approx(up / 50e9, rel=1e-3)  # both ways at once
    assert found.terms_s["CPU memory"] == pytest.approx(
        (read + written + up + down + 26 * params) / 200e9, rel=1e-3
    )
    # No update before backward has ended: its 12 B read and written have one forward of eight to
    # hide behind.
    active = params - 128_256 * 8192
    forward_s = tokens / 8 * (2 * active + 2 * 80 * 8192 * 4096) / 400e12
    states_s = 12 * params / 27.2e9 + 12 * params / 20e9
    assert states_s > forward_s
    assert found.limits.schedule_s == pytest.approx(states_s + 31 * forward_s, rel=1e-3)
    assert found.bottleneck == "compute"


# -- eight GPUs ------------------------------------------------------------------------------------


def test_gpus_without_links_of_their_own_exchange_through_the_cpu_s_memory() -> None:
    params = params_of("70b")
    job = job_of(tokens=262_144, sequence=4096, micro_batches=8)
    # buffers of exchanges take 4 GiB
    there = dataclasses.replace(machine("rtx4090", gpus=8), gpu_mem_bytes=28.0 * GIB)
    found = predict(llama("70b", False), there, job)
    assert found.fits
    # P is 2 B a parameter. Up: 16 gathers and 7 sums of gradients by shares; to each of 8 GPUs what
    # the 7 others gathered, and their gradients. 16 + 7 + 7 x 16 + 7 x 8 times; down without the
    # gathers and with 8 gradients.
    up, down = 2 * params * (16 + 7 + 112 + 56), 2 * params * (8 + 112 + 56)
    assert (found.copied.h2d, found.copied.d2h) == (
        pytest.approx(up, rel=1e-3),
        pytest.approx(down, rel=1e-3),
    )
    # Eight links of 25 GB/s share four to the CPU.
    assert found.terms_s["PCIe"] == pytest.approx(up / 100e9, rel=1e-3)
    assert found.bottleneck == "PCIe"
    alone = predict(
        llama("70b", False),
        dataclasses.replace(machine("rtx4090", gpus=8), peers_per_gpu=300e9),
        job,
    )
    assert alone.terms_s["PCIe"] == pytest.approx(2 * params * 23 / 100e9, rel=1e-3)
    # 7/8 of 16 gathers and 8 gradients into each GPU.
    assert alone.terms_s["links between GPUs"] == pytest.approx(
        2 * params * 24 * 7 / 8 / 300e9, rel=1e-3
    )
    assert alone.bottleneck == "compute"


def test_links_to_the_cpu_are_as_many_as_assumed_or_as_told() -> None:
    assert [machine("rtx4090", gpus=count).pcie_bytes_per_s for count in (1, 2, 3, 4, 8)] == [
        25e9, 50e9, 50e9, 50e9, 100e9,
    ]  # fmt: skip
    stated = describe_machine(gpus=8, gpu="rtx4090", pcie_host=60e9)
    assert stated.pcie_bytes_per_s == 60e9
    assert stated.sources["pcie_host"] == "given"
    assert "two GPUs share a link" in machine("rtx4090", gpus=8).sources["pcie_host"]


@pytest.mark.parametrize(("gpus", "cores"), [(0, 32), (1, 32), (3, 64)])
def test_cores_and_rates_of_updates_have_sources_where_the_cpu_computes_too(
    gpus: int, cores: int
) -> None:
    assumed = describe_machine(gpus=gpus).sources
    assert assumed["cores"].startswith(f"{cores}, assumed")
    assert assumed["adam"].endswith("assumed")
    told = describe_machine(
        gpus=gpus, cores=2, updates_per_core={"exact": 1e9}, updates_name="adam.json"
    ).sources
    assert (told["cores"], told["adam"]) == ("given", "measured (adam.json)")


def test_kinds_are_named_or_taken_from_the_memory_and_figures_that_are_given_hold() -> None:
    assert describe_machine(gpu="H100") == describe_machine(gpu="h100")
    # Tensor cores compute no fp32.
    plain = describe_machine(gpu="h100", float32=True)
    assert plain.flops_per_gpu < plain.flops_peak_per_gpu == 67e12
    assert plain.sources["flops"].startswith("46.9 TFLOP/s sustained in float32, of h100")
    assert describe_machine(gpu_mem_bytes=24 * GIB).pcie_per_gpu == 25e9
    assert describe_machine(gpu_mem_bytes=140 * GIB).hbm_per_gpu == 4800e9
    assert describe_machine(gpu_mem_bytes=80 * GIB).flops_peak_per_gpu == 989e12
    given_ = describe_machine(
        gpu="a100", flops_per_gpu=1e14, gpu_mem_bytes=40 * GIB, peers_per_gpu=1e10, gpus=2
    )
    assert (given_.flops_per_gpu, given_.gpu_mem_bytes, given_.peers_per_gpu) == (
        1e14,
        40 * GIB,
        1e10,
    )
    assert given_.flops_peak_per_gpu == 312e12
    with pytest.raises(ValueError, match="--gpu b300 is not known; use rtx3090"):
        describe_machine(gpu="b300")


# -- memory of a GPU -------------------------------------------------------------------------------


def test_parts_of_gpu_memory_are_bounds_and_estimates_of_this_size() -> None:
    job = job_of(tokens=16_384, sequence=4096)
    need = gpu_need(llama("7b"), machine("h100"), job)
    block = (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096) * 2
    assert need.parts == {
        "gathered units": 3 * block,
        # of the largest parameter, and of two units whose gradients leave
        "fresh gradients": 32_000 * 4096 * 2 + 2 * block,
        "inputs of blocks": 16_384 * 32 * 4096 * 2,
        "logits and loss (estimated)": 16_384 * 32_000 * 10,
        "CUDA and libraries (assumed)": 640 * MIB,
    }
    assert need.bytes == sum(need.parts.values())
    tiled = gpu_need(llama("7b"), machine("h100"), job.replace(loss_tiles=4))
    # 8,000 words at 10 B and the hidden states' gradient at 4 are 96,384 B a token; a block's
    # 49,152 + 44,032 elements 186,368.
    assert tiled.parts["one block at work (estimated)"] == 16_384 * 186_368
    away = gpu_need(llama("7b"), machine("h100"), job.replace(activations="cpu"))
    assert away.parts["inputs of blocks"] == 4 * 16_384 * 4096 * 2  # two stay, two are on their way
    several = gpu_need(llama("7b"), machine("h100", gpus=2), job.replace(tokens=32_768))
    # NCCL, and a block's gradients in reduction, while those of the next block are made. Gradients
    # wait for all others of their unit.
    assert several.parts["exchange buffers"] == 2 * block
    assert several.parts["fresh gradients"] == 3 * block
    assert several.bytes - need.bytes == 512 * MIB + 2 * block + block - 32_000 * 4096 * 2
    on_device = gpu_need(llama("7b"), machine("h100"), job.replace(update_on="device"))
    assert 0 < on_device.bytes - need.bytes < 256 * MIB


def test_tiles_of_linears_make_units_smaller_down_to_what_cannot_be_tiled() -> None:
    shape = llama("7b")
    sizes = [largest_bytes(shape, tiles) for tiles in (1, 2, 64)]
    embedding = 32_000 * 4096 * 2  # looked up, not multiplied with
    assert sizes == [shape.largest_unit_bytes, embedding, embedding]
    tied, words = llama("1b"), 128_256 * 2048 * 2
    assert tied.largest_unit_bytes == words
    assert largest_bytes(tied, 4) == words / 4  # an embedding that shares them is tiled, too
    # a block
    assert (
        largest_bytes(tied, 1, 8)
        == (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) * 2
    )
    torch.manual_seed(0)
    wide = shape_of(
        torch.nn.Sequential(torch.nn.Linear(64, 1001, bias=False), torch.nn.Linear(1001, 8))
    )
    assert largest_bytes(wide, 8) == 126 * 64 * 4  # seven tiles of 125 rows and one of 126


def test_what_does_not_fit_says_which_change_alone_would_do_and_with_how_much() -> None:
    job = job_of(tokens=262_144, sequence=4096, micro_batches=4)
    there = dataclasses.replace(machine("rtx4090", gpus=8), gpu_mem_bytes=22.1 * GIB)
    found = predict(llama("70b", False), there, job)
    assert not found.gpu.fits
    text = found.why_not[0]
    assert text.startswith(
        "GPU memory: 31.2 GiB is needed on each, 22.1 GiB is there; it fits with "
    )
    ways = {way.name: way for way in ways_to_fit(llama("70b", False), there, job)}
    assert set(ways) == {"activations on the CPU", "activations on the drives", "8 micro-batches"}
    assert ways["8 micro-batches"].how == "4,096 tokens in each, not 8,192"
    for way in ways.values():
        assert way.need.fits
        assert gpu_need(llama("70b", False), there, way.job) == way.need
        assert f"{way.name} ({way.how})" in text


def test_where_no_change_alone_is_enough_all_together_are_told() -> None:
    job = job_of(tokens=65_536, sequence=8192, micro_batches=1)
    there = machine("rtx4090")
    found = predict(llama("70b"), there, job)
    assert ways_to_fit(llama("70b"), there, job) == []
    assert (
        "no single change of the job is enough: all of them together need 13.3 GiB, enough"
        in found.why_not[0]
    )
    # An embedding gathered, its gradient and the sum of it, each with 1 GiB of others beside it;
    # four inputs of blocks, a block that works on one sequence, CUDA.
    embedding, one = 128_256 * 8192 * 2, 8192 * 8192 * 2
    least = 3 * (embedding + GIB) + 4 * one + 8192 * 2 * (12 * 8192 + 4 * 28672) + 640 * MIB
    assert least_need(llama("70b"), there, job).bytes == least
    assert least == pytest.approx(13.25 * GIB, rel=1e-3)
    tight = describe_machine(gpu="rtx4090", gpu_mem_bytes=8 * GIB, ram_bytes=512 * GIB)
    assert (
        predict(llama("70b"), tight, job)
        .why_not[0]
        .endswith("too much still; 8.9 GiB of it are units and gradients")
    )
    small = describe_machine(gpu="rtx4090", gpu_mem_bytes=2 * GIB, ram_bytes=512 * GIB)
    long = job_of(tokens=65_536, sequence=65_536)
    assert (
        predict(llama("7b"), small, long)
        .why_not[0]
        .endswith("too much still; shorter sequences need less")
    )


# -- where updates run -----------------------------------------------------------------------------


def test_an_update_on_the_gpu_is_told_and_never_chosen() -> None:
    slow = dataclasses.replace(machine("h200"), dram_bytes_per_s=10e9)
    found = predict(llama("1b"), slow, job_of(tokens=8192, sequence=4096))
    cpu, device = where_updates_run(llama("1b"), found)
    # However slow the CPU's memory is: 32 B of each parameter go through it either way.
    assert device.terms_s["CPU memory"] == pytest.approx(cpu.terms_s["CPU memory"], rel=1e-3)
    assert device.step_s >= cpu.step_s
    assert found.job.policy.update_on == "cpu"
    assert all(
        change.prediction.job.policy.update_on == "cpu" for change in one_change(llama("1b"), found)
    )
    here = describe_machine(gpus=0, ram_bytes=512 * GIB)
    assert (
        where_updates_run(
            llama("1b"), predict(llama("1b"), here, job_of(tokens=8192, sequence=4096))
        )
        == []
    )
    with pytest.raises(ValueError, match="update_on='device' is for GPUs"):
        predict(llama("1b"), here, job_of(tokens=8192, sequence=4096, update_on="device"))
    with pytest.raises(ValueError, match="or update_on='cpu'"):
        predict(
            llama("1b"),
            slow,
            job_of(tokens=8192, sequence=4096, update="backward", update_on="device"),
        )
    with pytest.raises(ValueError, match="tiles=0"):
        predict(llama("1b"), slow, job_of(tokens=8192, sequence=4096, tiles=0))


@pytest.mark.parametrize("generations", [1, 2])
def test_no_change_is_offered_that_a_policy_refuses(generations: int) -> None:
    job = job_of(tokens=8192, sequence=4096, update_on="device", generations=generations)
    changes = one_change(llama("1b"), predict(llama("1b"), machine("h200"), job))
    assert {change.prediction.job.policy.update for change in changes} >= {"deferred", "backward"}


def test_an_update_on_the_gpu_is_beside_no_forward_which_reads_what_it_wrote() -> None:
    params = params_of("7b")
    job = job_of(tokens=1 << 20, sequence=4096, resident=NOTHING)
    cpu, device = where_updates_run(llama("7b"), predict(llama("7b"), machine("h200"), job))
    # a forward is longer than the update
    assert cpu.limits.schedule_s == pytest.approx(cpu.limits.compute_s)
    states_s = machine("h200").bandwidths.io_s(Moved(12 * params, 12 * params))
    assert device.limits.schedule_s == pytest.approx(states_s + cpu.limits.compute_s, rel=1e-3)
    assert device.moved.total.read - cpu.moved.total.read == pytest.approx(2 * params, rel=1e-3)
    assert device.moved.total.written == cpu.moved.total.written


def test_gradients_that_wait_in_fp32_are_copied_in_fp32() -> None:
    params = params_of("1b")
    job = job_of(tokens=16_384, sequence=4096, micro_batches=2, grad_dtype=torch.float32)
    found = predict(llama("1b"), machine("h200"), job)
    assert (found.copied.h2d, found.copied.d2h) == ((8 + 4) * params, 8 * params)


# -- beside the engine, which computes on a simulated device ---------------------------------------


def on_device(
    monkeypatch: pytest.MonkeyPatch, directory: Path, job: Job, **policy: Any
) -> tuple[inf.Stats, ModelShape, int]:
    """Train four steps of `job` on a simulated device. Returns their stats, the shape of the model,
    and the bytes that may stay at turning points."""
    torch.manual_seed(0)
    model = models.llama(layers=6).bfloat16()
    shape = shape_of(model)
    with simulated(monkeypatch, delay_us=0):
        inf.offload(model, inf.Policy(**policy, nvme=[directory]))
        optimizer, handle = inf.AdamW(model.parameters()), inf.handle(model)
        for _ in range(4):
            for number, batch in enumerate(models.token_batches(job.micro_batches)):
                last = number == job.micro_batches - 1
                with contextlib.nullcontext() if last else handle.no_sync():
                    models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.flush()
        stats, kept = handle.stats(), handle.unsharder.gathered_bytes_max
        # What moved in a step is counted also where no limits are claimed for it.
        terms = StepTerms.collect(
            handle.parts.progress.clock,
            handle.parts.tiers.executor.stats(),
            update=job.policy.update,
            bandwidths={},
        )
        stats = dataclasses.replace(stats, terms=terms)
        handle.close()
    return stats, shape, kept


@pytest.mark.parametrize(
    ("micro_batches", "update"), alternating([1, 3], ["deferred", "backward", "delayed"])
)
def test_the_engine_copies_holds_and_keeps_what_the_plan_says(
    update: str, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tokens=64 * micro_batches, sequence=32, micro_batches=micro_batches, update=update)
    given_ = {
        "update": update, "params": "nvme", "optim": "nvme", "ram": 64 * MIB, "delayed_warmup": 0,
    }  # fmt: skip
    stats, shape, kept = on_device(monkeypatch, tmp_path, job, **given_)
    found = predict(shape, with_budget(describe_machine(), shape, job, 64 * MIB), job)
    assert stats.ram_bytes == found.ram.bytes - found.ram_beside.peak
    assert stats.gathered_bytes_peak <= found.gpu.parts["gathered units"]
    assert stats.fresh_grad_bytes_peak <= found.gpu.parts["fresh gradients"]
    assert stats.terms is not None
    copied, planned = stats.terms.copied.total, found.copied
    assert planned.d2h == 2 * shape.params * micro_batches
    assert copied.d2h == pytest.approx(planned.d2h, abs=4)  # the mean of each phase is rounded
    # whose passes take parameters from their copy in RAM by torch, which the executor does not
    # count
    if update != "delayed":
        # Units gathered ahead at the end of the first step, and of the last, may be counted or not.
        edge = kept / stats.terms.steps
        assert (
            planned.h2d - turning_bytes_max(kept, update, micro_batches) - edge
            <= copied.h2d
            <= planned.h2d + edge
        )


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_engine_copies_what_the_plan_says_of_an_update_on_the_device(
    micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(
        tokens=64 * micro_batches,
        sequence=32,
        micro_batches=micro_batches,
        update_on="device",
        resident=NOTHING,
    )
    given_ = {
        "update_on": "device", "params": "nvme", "optim": "nvme", "ram": 64 * MIB,
        "resident": NOTHING,
    }  # fmt: skip
    stats, shape, kept = on_device(monkeypatch, tmp_path, job, **given_)
    found = predict(shape, with_budget(describe_machine(), shape, job, 64 * MIB), job)
    assert stats.terms is not None
    copied, edge = stats.terms.copied.total, kept / stats.terms.steps
    # kernels read gradients where they wait, which the executor does not count
    up = copied.h2d + 2 * shape.params
    # updated where it is gathered
    turning = turning_bytes_max(kept, "deferred", micro_batches) + kept
    assert found.copied.h2d - turning - edge <= up <= found.copied.h2d + edge
    read = stats.terms.moved.total.read
    assert found.moved.total.read - turning - edge <= read <= found.moved.total.read + edge
