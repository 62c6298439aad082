"""Common parts of the Triton matmuls: values rounded alike everywhere, sums in a fixed order, block
sizes tuned on the device.

    product = Tuned(kernel, partial(configs, torch.bfloat16), restore=("out_ptr",))
    product(grid, device, *arguments, BLOCK_K=block_k(torch.bfloat16))

**Tuning may not change rounding.** Measurements choose between configurations of BLOCK_M, BLOCK_N,
warps and stages only. The order of a sum is fixed: BLOCK_K by the dtype (`block_k`), sums over
columns by `row_sums`, and no kernel splits K between programs. Every configuration has 4 or 8 warps
and at least 64 rows of the first operand, so that all of them compile to the same matrix
instruction of a device, with the same rows and depth. tcgen05.mma, of GPUs of capability 10 and 11
(B200), has a mode of 64 rows and a mode of 128, and no document says that both add in one order:
there every configuration has 128 rows. A test compiles every configuration for every `MatrixUnit`
and compares the instructions, the rows in tcgen05's descriptors among them. Tests run every
configuration on the same operands and compare bits.

If 16 divides sizes and strides, no configuration spills more than 128 bytes per thread: `configs`
leaves out configurations that would on a unit. For other sizes elements are loaded one by one, each
by an address, and large blocks spill more.

A kernel is measured once per kind of device, dtypes, transposes and shape (dimensions rounded up to
powers of two). Triton keeps the result on disk, in its cache directory (`TRITON_CACHE_DIR`), if
this version can (`cache_results`, looked up in its signature), else for the life of the process. A
measurement runs the kernel several times: it restores the output that the kernel adds to
(`restore`) from a copy, and Triton's benchmark allocates 256 MiB (a plan counts both). If the
device lacks the memory, the first configuration runs, with a warning, so that a measurement never
fails a step. Triton cannot measure while a CUDA graph is captured: run such a step once before.

In the interpreter the first configuration runs. The interpreter's bf16 casts truncate, and its dot
takes bf16 for integers; so there `widened` and `rounded` compute on bits what the hardware does.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from infinity._src.base.torch_device import on_device
from infinity._src.kernels import choice

Grid = Callable[[dict[str, Any]], tuple[int, ...]]
"""Number of programs that run a kernel, as a function of its arguments."""

CONFIGS_MAX = 8
"""Configurations of a kernel, at most: each is compiled and measured once."""

_using: list[int] = []
"""The index of the configuration that `using` forces; the innermost last."""

# Triton's tuner stores the arguments of a call, and backward runs in other threads.
_lock = threading.RLock()


class MatrixUnit(enum.Enum):
    """Matrix unit of a device; the value is its instruction."""

    WARP = "mma.sync"
    """16 rows, by a warp, from registers: Ampere, Ada, Blackwell of workstations (capability 12).
    Also the interpreter.
    """
    WARPGROUP = "wgmma.mma_async"
    """64 rows, by four warps, from shared memory to registers: Hopper."""
    TENSOR_MEMORY = "tcgen05.mma"
    """64 or 128 rows, from shared memory to tensor memory: Blackwell of data centres."""

    @classmethod
    def current(cls) -> MatrixUnit:
        return {9: cls.WARPGROUP, 10: cls.TENSOR_MEMORY, 11: cls.TENSOR_MEMORY}.get(
            architecture() // 10, cls.WARP
        )


def architecture() -> int:
    """Return ten times the capability of the thread's current device; 0 in the interpreter."""
    if choice.interpreted():
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)


@triton.jit
def widened(values: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Values of any float dtype as fp32, exactly."""
    # The interpreter's casts of bf16 truncate: widen by bits there.
    if INTERPRETED and values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def rounded(values: tl.tensor, dtype: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """fp32 values in `dtype`, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        # NaN first: adding to its bits could carry into the sign.
        bits = tl.where(values != values, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def operand(values: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Operand of `tl.dot`: the values as they are; bf16 as fp32 in the interpreter, where a product
    is exact as well.
    """
    if INTERPRETED and values.dtype == tl.bfloat16:
        return widened(values, INTERPRETED)
    return values


@triton.jit
def loop_end(count: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Convert an integer to the end of a `range`.

    The interpreter's integers are arrays of one element, which recent numpy refuses as an index.
    """
    if INTERPRETED:
        return count.handle.data.item()
    return count


@triton.jit
def row_sums(values: tl.tensor, ROWS: tl.constexpr, LOG2_COLUMNS: tl.constexpr) -> tl.tensor:
    """[ROWS, 2 ** LOG2_COLUMNS] fp32 -> [ROWS], neighbours first, then neighbouring pairs, and so
    on.

    `tl.sum` over a whole row adds in an order that depends on how the row lies over lanes and
    warps; two numbers have one sum only.
    """
    for step in tl.static_range(LOG2_COLUMNS):
        values = tl.sum(tl.reshape(values, [ROWS, 1 << (LOG2_COLUMNS - 1 - step), 2]), axis=2)
    return tl.reshape(values, [ROWS])


@triton.jit
def block_of(
    pid: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> tl.tensor:
    """(row block, column block) of a program. GROUP_M adjacent row blocks run close in time, so
    that they share reads of the columns in L2.
    """
    row_blocks = tl.cdiv(rows, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first = pid // in_group * GROUP_M
    # The last group may have fewer row blocks.
    height = tl.minimum(row_blocks - first, GROUP_M)
    return first + pid % in_group % height, pid % in_group // height


def block_k(dtype: torch.dtype) -> int:
    """Elements of the summed dimension per step of a kernel: part of the numerics, since it orders
    the sum.
    """
    # Never tuned: other steps would add in another order.
    return 32 if dtype == torch.float32 else 64


def precision(dtype: torch.dtype) -> str:
    """Precision of products of fp32 operands, as `torch.set_float32_matmul_precision` selects it;
    without effect on 16-bit operands.
    """
    return (
        "tf32"
        # The user's setting for torch's matmuls applies here, too.
        if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        else "ieee"
    )


def configs(dtype: torch.dtype, unit: MatrixUnit) -> list[Any]:
    """`triton.Config`s of a product with operands of this dtype on this unit; the first takes no
    more than 48 KiB of shared memory.

    fp32 has only small blocks: exact fp32 products run without matrix units, and large blocks would
    spill.
    """
    if unit is MatrixUnit.TENSOR_MEMORY:
        # 128 rows in all: blocks of 64 take another mode, which may add in another order.
        sizes = [(128, 64, 4, 1), (128, 64, 4, 3)]
    else:
        sizes = [(64, 64, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3)]
    if dtype != torch.float32:
        sizes += [(128, 128, 8, 3), (128, 128, 8, 4)]
        # Larger blocks spill more than 128 bytes: on Hopper and in tensor memory 136 to 308,
        # with 256 rows 196 on capability 12.
        if unit is MatrixUnit.WARP:
            sizes.append((128, 256, 8, 3))
    return [
        triton.Config({"BLOCK_M": rows, "BLOCK_N": columns}, num_warps=warps, num_stages=stages)
        for rows, columns, warps, stages in sizes
    ]


def shape_key(*dims: int, form: tuple[bool, ...] = ()) -> int:
    """Encode, as one integer, the key under which a measured configuration is stored.

    dims: rounded up to powers of two. form: flags of further properties that change a kernel's
    speed, such as transposes. Dtypes are part of the key, too, but not of the integer. Three
    dimensions and some flags fit 31 bits.
    """
    key = 0
    for dim in dims:
        # Rounded up: shapes that differ little share one measurement.
        key = key << 6 | max(dim - 1, 0).bit_length()
    for flag in form:
        key = key << 1 | flag
    return key


@contextlib.contextmanager
def using(index: int) -> Iterator[None]:
    """Force the configuration of this index (modulo their number) on every tuned kernel inside.

    Nothing is measured. For tests.
    """
    _using.append(index)
    try:
        yield
    finally:
        _using.pop()


def _constants(config: Any) -> dict[str, Any]:
    if choice.interpreted():
        return dict(config.kwargs)
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


class Tuned:
    """Kernel with its configurations.

    configurations: returns the list for a unit; the first fits any device that has the unit. The
    kernel takes an int argument `shape_key` (marked do_not_specialize), which it does not use.
    restore: names of arguments that the kernel reads and writes.
    """

    def __init__(
        self,
        kernel: Any,
        configurations: Callable[[MatrixUnit], Sequence[Any]],
        *,
        restore: Sequence[str] = (),
    ) -> None:
        self._of_unit = {unit: list(configurations(unit)) for unit in MatrixUnit}
        assert all(0 < len(found) <= CONFIGS_MAX for found in self._of_unit.values()), kernel
        self._kernel = kernel
        self._restore = list(restore)
        self._autotuners: dict[int, Any] = {}
        """Tuners by architecture, since devices of one process may differ."""
        self._key_index = list(kernel.arg_names).index("shape_key")
        self._no_room: set[tuple[torch.device, int]] = set()
        """Devices and shapes that could not be measured for want of memory."""

    @property
    def configurations(self) -> list[Any]:
        """The configurations for the thread's current device."""
        return self._of_unit[MatrixUnit.current()]

    def __call__(self, grid: Grid, device: torch.device, *args: Any, **kwargs: Any) -> None:
        """Run the kernel. grid: returns the number of programs for the kernel's arguments, block
        sizes among them.
        """
        with on_device(device):
            if _using or choice.interpreted():
                configurations = self.configurations
                index = (_using[-1] if _using else 0) % len(configurations)
                self._kernel[grid](*args, **kwargs, **_constants(configurations[index]))
                return
            # Triton's tuner stores the arguments of a call, and backward runs in other threads.
            with _lock:
                # Do not try again in this process: each attempt empties torch's cache and blocks.
                place = device, args[self._key_index]
                if place not in self._no_room:
                    tuner = self._tuner()
                    try:
                        tuner[grid](*args, **kwargs)
                        return
                    except RuntimeError as error:
                        self._without_room(error, device)
                    # Triton restores `out` after each run, so no run has added to it.
                    tuner.nargs = None
                    self._no_room.add(place)
                self._kernel[grid](*args, **kwargs, **_constants(self.configurations[0]))

    def _without_room(self, error: RuntimeError, device: torch.device) -> None:
        """Warn that there is no memory for a measurement. Raises: `error`, if it has another cause.
        """
        # torch.OutOfMemoryError, or Triton's own error when the driver cannot load a kernel.
        if "out of memory" not in str(error):
            raise error
        warnings.warn(
            f"{self._kernel.__name__} on {device}: there is no memory to measure its "
            "configurations (256 MiB and a copy of the output), so the first one runs, with the "
            f"same bits, perhaps slower: {str(error).splitlines()[0]}",
            stacklevel=3,
        )

    def _tuner(self) -> Any:
        kind = architecture()
        if kind not in self._autotuners:
            cached = (
                {"cache_results": True}
                # On disk if this Triton can, so that a new process does not measure again.
                if "cache_results" in inspect.signature(triton.autotune).parameters
                else {}
            )
            make = triton.autotune(
                self.configurations,
                key=["shape_key"],
                restore_value=self._restore or None,
                **cached,
            )
            self._autotuners[kind] = make(self._kernel)
        return self._autotuners[kind]


__all__ = [
    "CONFIGS_MAX",
    "MatrixUnit",
    "Tuned",
    "block_k",
    "block_of",
    "configs",
    "loop_end",
    "operand",
    "precision",
    "rounded",
    "row_sums",
    "shape_key",
    "using",
    "widened",
]
