"""Collectives over gloo: point-to-point messages compared with torch.distributed's collectives.

    python bench/collectives.py                                # 2 and 3 ranks on this machine
    python bench/collectives.py --results bench/results/collectives.jsonl
    python bench/collectives.py --rounds 2 --sizes 65536       # short

    gather      a unit of one flat: every rank has a part, and receives the other parts
    gather 3    a unit of three flats, of a third each
    reduce      a unit of one flat: every rank receives the mean of its part
    names       128 B to every rank, as for the comparison of collectives' names
    flags       16 B, as for the union of flags of parameters with a gradient

The arms of an operation alternate in each round, in random order, the same on all ranks. Figures
are rank 0's for one call: its time, and the CPU time of all threads of the process, which is more
reliable on a shared machine. Ratios are of one round. The record also says whether the bits equal
those of the messages, and how much temporary memory a call needs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

from infinity._src.base.torch_compat import all_gather_single
from infinity._src.distributed.collectives import Collectives
from infinity._src.distributed.order_agreement import NAME_BYTES, OrderAgreement
from infinity._src.distributed.topology import Topology
from infinity._src.distributed.transport import GlooTransport, NcclTransport
from infinity._src.kernels import comm_codec

SIZES = [64 << 10, 1 << 20, 16 << 20]
FLAGS = 16
MESSAGES = "messages"
TIMEOUT_S = 600
MEASURE_S = 0.02

Record = dict[str, Any]
Arms = dict[str, Callable[[], None]]


class Cases:
    """Operations on tensors of one size, each in several arms that write to the same memory."""

    def __init__(self, size_bytes: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.group.WORLD
        cpu = torch.device("cpu")
        gloo = GlooTransport(self.group, cpu)
        topology = Topology.of(self.rank, self.world, self.world)
        self.collectives = Collectives(topology, gloo, cpu)
        self.names = OrderAgreement(topology, self.group)
        # The same calls as over NCCL.
        self.whole_calls = NcclTransport(self.group, cpu)
        numel = size_bytes // 2 // self.world // 3 * 3
        self.numel = numel
        chance = torch.Generator().manual_seed(self.rank)
        self.values = torch.randn(self.world, numel, generator=chance).bfloat16()
        self.whole = torch.zeros(self.world, numel, dtype=torch.bfloat16)
        self.flats = list(torch.zeros(3, self.world, numel // 3, dtype=torch.bfloat16))
        self.mean = torch.zeros(numel, dtype=torch.bfloat16)
        self.came = torch.zeros(self.world, numel, dtype=torch.bfloat16)
        self.header = torch.full((NAME_BYTES,), 7, dtype=torch.uint8)
        self.headers = torch.zeros(self.world * NAME_BYTES, dtype=torch.uint8)
        self.flags = torch.zeros(FLAGS, dtype=torch.uint8)

    def prepare(self) -> None:
        """Set the inputs, which some arms overwrite, and clear the results."""
        self.whole.zero_()[self.rank] = self.values[self.rank]
        for flat, values in zip(self.flats, self.values[self.rank].view(3, -1), strict=True):
            flat.zero_()[self.rank] = values
        self.mean.zero_()
        self.headers.zero_()
        self.flags.zero_()[self.rank] = 1

    def result(self) -> torch.Tensor:
        """Return all buffers that an arm may write, as bytes."""
        written = [self.whole, *self.flats, self.mean, self.flags]
        return torch.cat([each.reshape(-1).view(torch.uint8) for each in written])

    def large(self) -> dict[str, Arms]:
        """Operations whose time follows the size."""
        collectives, group = self.collectives, self.group
        return {
            "gather": {
                MESSAGES: lambda: collectives.all_gather([self.whole]),
                "all_gather_single": lambda: self.whole_calls.all_gather([self.whole], self.rank),
            },
            "gather 3": {
                MESSAGES: lambda: collectives.all_gather(self.flats),
                "all_gather_single": lambda: self.whole_calls.all_gather(self.flats, self.rank),
                "coalesced": self._coalesced,
            },
            "reduce": {
                MESSAGES: lambda: collectives.reduce_scatter_mean([self.values], [self.mean]),
                "all_to_all_single": self._all_to_all,
                "reduce_scatter": lambda: _reduce_scatter(self.mean, self.values, group),
            },
        }

    def small(self) -> dict[str, Arms]:
        """Operations of a few bytes."""
        return {
            "names": {
                MESSAGES: lambda: self.names.check("a name"),
                "all_gather_single": self._gather_names,
            },
            "flags": {
                MESSAGES: lambda: self.collectives.all_reduce_or(self.flags),
                "all_reduce": lambda: dist.all_reduce(self.flags, dist.ReduceOp.MAX, self.group),
            },
        }

    def _coalesced(self) -> None:
        # One call for a unit: what NCCL would launch as one group.
        with dist._coalescing_manager(self.group, async_ops=True) as manager:
            for flat in self.flats:
                all_gather_single(flat.view(-1), flat[self.rank], group=self.group)
        manager.wait()

    def _all_to_all(self) -> None:
        dist.all_to_all_single(self.came, self.values, group=self.group)
        comm_codec.sum_in_order(list(self.came), self.mean, divisor=self.world)

    def _gather_names(self) -> None:
        all_gather_single(self.headers, self.header, group=self.group)
        if not torch.equal(self.headers.view(self.world, -1), self.header.expand(self.world, -1)):
            raise SystemExit("names differ")


def _reduce_scatter(mean: torch.Tensor, values: torch.Tensor, group: Any) -> None:
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(mean, values.view(-1), group=group)
    mean.div_(len(values))


def peak_bytes(run: Callable[[], None]) -> int:
    """Return the peak of memory that one call allocates."""
    # Memory that malloc retains from earlier calls would be reused unnoticed.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise harness.BenchError(f"/proc/self/status has no {field}")


def seconds(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Time of one call, the ranks having begun together, and CPU time of the process."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        run()
    spent, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return spent / repeats, cpu / repeats


def measure_operation(cases: Cases, arms: Arms, rounds: int, chance: random.Random) -> Record:
    """Every arm once per round. The first arm's bits are compared with the others'."""
    found: Record = {"bits": {}, "peak_bytes": {}}
    found |= {what: {name: [] for name in arms} for what in ("seconds", "cpu_seconds")}
    expected = None
    for name, run in arms.items():
        cases.prepare()
        run()
        result = cases.result()
        expected = result if expected is None else expected
        found["bits"][name] = torch.equal(result, expected)
        found["peak_bytes"][name] = peak_bytes(run)
    # As many calls as fill some time: rank 0 decides, for all.
    first = next(iter(arms.values()))
    repeats = torch.tensor([max(1, int(MEASURE_S / seconds(first, 3)[0]))])
    dist.broadcast(repeats, 0)
    for _ in range(rounds):
        for name in chance.sample(list(arms), len(arms)):
            cases.prepare()
            spent, cpu = seconds(arms[name], int(repeats))
            found["seconds"][name].append(spent)
            found["cpu_seconds"][name].append(cpu)
    return found


def run_rank(args: argparse.Namespace) -> None:
    """One rank of a measurement, as torchrun starts it. Rank 0 prints a JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chance = random.Random(args.seed)
    rows = []
    for size in args.sizes:
        cases = Cases(size)
        every = cases.large() if size != args.sizes[0] else {**cases.large(), **cases.small()}
        for name, arms in every.items():
            found = measure_operation(cases, arms, args.rounds, chance)
            small = {"names": NAME_BYTES, "flags": FLAGS}
            rows.append({"operation": name, "size_bytes": small.get(name, size), **found})
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"ranks": dist.get_world_size(), "rows": rows}) + "\n")
    dist.destroy_process_group()


def run_ranks(args: argparse.Namespace, ranks: int) -> Record:
    """Measure on this number of ranks; record the machine's load before."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(Path(__file__).resolve()),
        "--a-rank",
        f"--rounds={args.rounds}",
        f"--seed={args.seed}",
        f"--sizes={','.join(map(str, args.sizes))}",
    ]
    env = harness.environment(PYTHONPATH=str(harness.ROOT), OMP_NUM_THREADS="1")
    load = os.getloadavg()[0]
    record = harness.last_json_line(harness.run_command(command, env, timeout_s=TIMEOUT_S))
    about = {"run": harness.now(), "commit": harness.commit(), "machine": harness.machine()}
    return {**about, "torch": torch.__version__, "load_before": load, **record}


def rows_of(record: Record) -> list[list[str]]:
    """A row for each operation, size and arm: the time of a call, and ratios of one round."""
    return [
        [
            str(record["ranks"]),
            row["operation"],
            _size(row["size_bytes"]),
            name,
            *_beside_messages(row["seconds"], name),
            *_beside_messages(row["cpu_seconds"], name),
            "same" if same else "other",
            _size(row["peak_bytes"][name]),
        ]
        for row in record["rows"]
        for name, same in row["bits"].items()
    ]


def _beside_messages(times: dict[str, list[float]], name: str) -> list[str]:
    """The median of an arm in microseconds, and of its ratios to the messages of a round."""
    median = f"{1e6 * harness.Summary.of(times[name]).median:,.0f}"
    if name == MESSAGES:
        return [median, ""]
    pairs = zip(times[name], times[MESSAGES], strict=True)
    return [median, harness.Interval.of([mine / theirs for mine, theirs in pairs]).text(2)]


def _size(size_bytes: int) -> str:
    for unit, bytes_of in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= bytes_of:
            return f"{size_bytes / bytes_of:.3g} {unit}"
    return f"{size_bytes} B"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=harness.counts, default=[2, 3], help="numbers of ranks (2,3)"
    )
    parser.add_argument(
        "--sizes",
        type=harness.counts,
        default=SIZES,
        help="bytes of a unit (64 KiB, 1 MiB, 16 MiB)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="every arm once per round (15)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order within rounds (0)")
    parser.add_argument("--results", type=Path, help="JSON lines file to append to")
    parser.add_argument("--a-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.a_rank:
        run_rank(args)
        return 0
    columns = [
        "ranks", "operation", "size", "arm", "us", "to messages", "CPU us", "to messages", "bits",
        "takes",
    ]  # fmt: skip
    for ranks in args.ranks:
        record = run_ranks(args, ranks)
        if args.results is not None:
            harness.append_line(args.results, record)
        title = f"{ranks} ranks, gloo, load before {record['load_before']:.1f}"
        harness.print_table(title, columns, rows_of(record))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
