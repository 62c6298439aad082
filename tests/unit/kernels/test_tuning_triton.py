"""Common parts of the Triton matmuls: exact widening, rounding as torch's, sums in one order,
configurations kept between runs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.unit.kernels.operands import generators

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from infinity._src.kernels import choice  # noqa: E402
from infinity._src.kernels.triton import tuning  # noqa: E402
from infinity._src.kernels.triton.tuning import precision, rounded, row_sums, shape_key, widened  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@triton.jit
def _cast(
    source_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = widened(tl.load(source_ptr + place, mask=place < count, other=0.0), INTERPRETED)
    tl.store(
        out_ptr + place, rounded(values, out_ptr.dtype.element_ty, INTERPRETED), mask=place < count
    )


@triton.jit
def _sum(
    source_ptr: tl.tensor, out_ptr: tl.tensor, ROWS: tl.constexpr, LOG2_COLUMNS: tl.constexpr
) -> None:
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, 1 << LOG2_COLUMNS)
    values = tl.load(source_ptr + rows[:, None] * (1 << LOG2_COLUMNS) + columns[None, :])
    tl.store(out_ptr + rows, row_sums(values, ROWS, LOG2_COLUMNS))


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Through `widened` and `rounded`."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    grid = (triton.cdiv(values.numel(), 1024),)
    _cast[grid](values, out, values.numel(), INTERPRETED=choice.interpreted(), BLOCK=1024)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_widens_exactly(device: torch.device, dtype: torch.dtype) -> None:
    values = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    )
    expected = values.float()
    found = cast(values, torch.float32)
    assert torch.equal(
        found[~expected.isnan()].view(torch.int32), expected[~expected.isnan()].view(torch.int32)
    )
    assert bool(found[expected.isnan()].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_is_rounded_as_torch_rounds(device: torch.device, dtype: torch.dtype) -> None:
    """Random bits, and ties: numbers half-way between two of the dtype, above and below even
    ones."""
    bits = torch.randint(
        -(1 << 31), 1 << 31, (1 << 14,), generator=generators(0), dtype=torch.int64
    ).to(torch.int32)
    # the last bit of 17 is a bf16's half
    halves = (torch.arange(1 << 12) * 1664525 % (1 << 17)).to(torch.int32) << 15
    values = torch.cat([bits, halves, bits & ~0xFFF]).view(torch.float32).to(device)
    found, expected = cast(values, dtype), values.to(dtype)
    assert torch.equal(
        found[~expected.isnan()].view(torch.int16), expected[~expected.isnan()].view(torch.int16)
    )
    assert bool(found[expected.isnan()].isnan().all())
    assert bool(expected.isnan().any())


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_columns_are_summed_pair_by_pair_however_they_lie_over_threads(
    device: torch.device, warps: int
) -> None:
    values = torch.randn((64, 128), generator=generators(1)).to(device)
    expected = values
    while expected.shape[1] > 1:
        expected = expected[:, 0::2] + expected[:, 1::2]
    out = torch.empty(64, device=device)
    options = {} if choice.interpreted() else {"num_warps": warps}
    _sum[(1,)](values, out, ROWS=64, LOG2_COLUMNS=7, **options)
    assert torch.equal(out, expected[:, 0])


def test_shapes_share_a_configuration_up_to_the_next_power_of_two() -> None:
    assert shape_key(1000, 4096, 64) == shape_key(1024, 2049, 33)
    keys = [
        shape_key(1025, 64, 64),
        shape_key(1024, 64, 64),
        shape_key(64, 1024, 64),
        shape_key(64, 1024, 64, form=(True,)),
    ]
    assert len(set(keys)) == 4
    assert shape_key(1 << 31, 1 << 31, 1 << 31, form=(True, True, True)) < 1 << 31


def test_fp32_products_are_exact_unless_the_user_allows_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert precision(torch.float32) == "ieee"
        torch.set_float32_matmul_precision("high")
        assert precision(torch.float32) == "tf32"
        assert precision(torch.bfloat16) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


CHILD = """
import json
import torch, triton
from infinity._src.kernels.triton.tile_matmul import tile_matmul
from tests.unit.kernels.compiled import Absent, compile_instead_of_launching

class Timed(Absent):
    def get_benchmarker(self):
        def benchmark(call, quantiles):
            call()
            # the later, the faster: the last configuration is chosen
            return [100.0 - len(launches)] * 3
        return benchmark

def launched(launch):
    launches.append(launch)
    part.add_(1)

launches, counts = [], []
triton.runtime.driver.set_active(Timed("cuda:90"))
compile_instead_of_launching(launched)
x, w = torch.ones(256, 512, dtype=torch.bfloat16), torch.ones(1024, 512, dtype=torch.bfloat16)
total = torch.full((256, 1024), 3.0)
for rows in (256, 200, 100):
    part = total[:rows]
    tile_matmul(x[:rows], w.t(), part, accumulator=part)
    counts.append(len(launches))
sums = [total[row].unique().tolist() for row in (0, 99, 100, 199, 200, 255)]
print(json.dumps({"counts": counts, "shared_bytes": launches[-1].shared_bytes, "sums": sums}))
"""


@pytest.mark.slow
def test_a_configuration_is_measured_once_and_kept_on_disk(tmp_path: Path) -> None:
    """On a GPU that is not there: a launch compiles, adds 1 instead of a product, and takes a
    made-up time. Only the call itself adds to the sum for good, not the measurements before it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("TRITON_INTERPRET", None)
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(done.stdout))
    first, second = found
    # Five configurations and the call itself; 200 rows share what was found for 256, and 100 do
    # not.
    assert first["counts"] == [6, 7, 13]
    assert second["counts"] == [1, 2, 3]
    assert first["shared_bytes"] == second["shared_bytes"] > 64 << 10
    assert first["sums"] == second["sums"] == [[6], [6], [5], [5], [4], [4]]


@triton.jit(do_not_specialize=["shape_key"])
def _add(
    source_ptr: tl.tensor, out_ptr: tl.tensor, shape_key: tl.tensor, BLOCK_M: tl.constexpr
) -> None:
    at = tl.arange(0, BLOCK_M)
    tl.store(out_ptr + at, tl.load(out_ptr + at) + tl.load(source_ptr + at))


OUT_OF_MEMORY: dict[str, Callable[[int], Exception]] = {
    "torch": lambda runs: torch.OutOfMemoryError(f"CUDA out of memory after {runs}.\nMore."),
    "the driver": lambda runs: RuntimeError(f"Triton Error [CUDA]: out of memory, {runs}"),
}


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("runs", [0, 1, 4])
def test_without_memory_to_measure_the_first_configuration_runs_once(
    kind: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement fails before its first run, or after some of two configurations."""
    if not choice.interpreted():
        pytest.skip("a launch of the interpreter stands for one on a GPU")
    done: list[int] = []

    def benchmark(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        for _ in range(3):
            if len(done) == runs:
                raise OUT_OF_MEMORY[kind](runs)
            call()
            done.append(1)
        return [float(len(done))] * 3

    monkeypatch.setattr(triton, "autotune", functools.partial(triton.autotune, do_bench=benchmark))
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    monkeypatch.setattr(tuning, "architecture", lambda: 0)
    sizes = [triton.Config({"BLOCK_M": 16}), triton.Config({"BLOCK_M": 8})]
    add = tuning.Tuned(_add, lambda _unit: sizes, restore=("out_ptr",))
    source, out = torch.ones(16), torch.zeros(16)

    def run(key: int) -> None:
        add(lambda meta: (1,), torch.device("cpu"), source, out, key)

    with pytest.warns(UserWarning, match=rf"^_add on cpu: .* out of memory.*{runs}\.?$"):
        run(1)
    assert out.tolist() == [1.0] * 16
    assert len(done) == runs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(1)  # neither measured again nor warned of
    assert out.tolist() == [2.0] * 16
    tuner = add._tuner()
    assert not tuner.cache
    assert tuner.nargs is None
    # Another shape is measured as usual: the smaller block takes 8 of 16.
    runs = -1
    run(2)
    assert out.tolist() == [3.0] * 16
    assert len(tuner.cache) == 1


def test_other_errors_of_a_measurement_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    if not choice.interpreted():
        pytest.skip("a launch of the interpreter stands for one on a GPU")

    def benchmark(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        raise RuntimeError("Triton Error [CUDA]: misaligned address")

    monkeypatch.setattr(triton, "autotune", functools.partial(triton.autotune, do_bench=benchmark))
    monkeypatch.setattr(choice, "interpreted", lambda: False)
    monkeypatch.setattr(tuning, "architecture", lambda: 0)
    sizes = [triton.Config({"BLOCK_M": 16}), triton.Config({"BLOCK_M": 8})]
    add = tuning.Tuned(_add, lambda _unit: sizes)
    with pytest.raises(RuntimeError, match="misaligned"):
        add(lambda meta: (1,), torch.device("cpu"), torch.ones(16), torch.zeros(16), 1)
