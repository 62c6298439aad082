"""Two nodes on one machine, and the traffic of training over the link between them.

    make hosts                                                     # tests, then the measurement;
    needs root python bench/hosts.py --rate 1gbit --arms plain qwz hpz qgz all --rounds 3
    python bench/hosts.py --run my_script.py --steps 10            # any script under torchrun on
    both nodes

A node is a network namespace with its own process and host names: processes of two nodes see each
other only over the link, as on two machines. The link is a veth pair, shaped at both ends by tc's
token bucket (its rate counts the headers of every segment). `tx_bytes` are the sender's counts in
/sys/class/net/LINK/statistics, which count a large segmented packet once; `wire_bytes` are the
token bucket's, with the headers of each segment.

The nodes are removed at the end, also on Ctrl-C or SIGTERM. After SIGKILL the next run removes
their namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import harness
import r1

LINK = "link0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29400
RATE = "1gbit"
# The largest packet that a veth carries is 64 KiB; a bucket of four holds the rate where a timer is
# late by 2 ms.
BURST_BYTES = 256 << 10
QUEUE_MS = 20
# The owner's pid and its start time in clock ticks since boot: so a reused pid is not mistaken for
# the owner.
_NAME = re.compile(r"infinity-hosts-(\d+)-(\d+)-[01]")
_COUNTED = ("tx_bytes", "tx_packets", "tx_dropped")
RUN_TIMEOUT_S = 1800.0
_TAIL = 10_000  # characters; torchrun's own account comes after that of the rank that failed

ARMS = ("plain", "qwz", "hpz", "qgz", "all")
# What crosses between nodes in a step, in units of M, the bytes of the bf16 parameters: gather of
# the forward, gather of the backward, reduction of gradients (Wang et al. 2023, ZeRO++). Between
# two nodes each sends the half that the other lacks, so both directions together are M where every
# byte crosses once.
FORMULA = {
    "plain": (1.0, 1.0, 1.0),
    "qwz": (0.5, 0.5, 1.0),
    "hpz": (1.0, 0.0, 1.0),
    "qgz": (1.0, 1.0, 0.25),
    "all": (0.5, 0.0, 0.25),
}
# A group of 64 codes has a scale of 2 bytes: 66 bytes for 64 of int8, 34 for 64 of int4.
WITH_SCALES = {1.0: 1.0, 0.5: 66 / 128, 0.25: 34 / 128, 0.0: 0.0}
DEFAULT = r1.Workload(hidden=512, layers=6, vocab=4096, tokens=32, warmup=3, steps=5)


def missing() -> str:
    """Return the reason why two nodes cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root (sudo)"
    tools = [tool for tool in ("ip", "tc", "unshare", "setpriv") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not found: apt-get install iproute2 util-linux"
    return ""


def _started(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None when there is no such
    process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def _ip(*arguments: str) -> str:
    return _tool("ip", *arguments)


def _tool(*command: str) -> str:
    """Standard output of a command. Raises BenchError with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise harness.BenchError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _end_namespace(name: str) -> None:
    """Kill the processes in a namespace of this script, and remove it, with its end of the link."""
    for pid in map(int, _ip("netns", "pids", name).split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _ip("netns", "del", name)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of earlier runs that were killed; returns their names. Namespaces of
    live runs, and others' namespaces, stay."""
    removed = []
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        found = _NAME.fullmatch(name)
        if found and _started(int(found[1])) != int(found[2]):
            _end_namespace(name)
            removed.append(name)
    return removed


class Hosts:
    """A context with two nodes and a link of `rate` (in tc's notation) between them.

    Processes on the nodes log to files in a scratch directory. Raises: BenchError if the nodes
    cannot be created.
    """

    def __init__(self, rate: str = RATE) -> None:
        self.rate = rate
        self.nodes = tuple(
            f"infinity-hosts-{os.getpid()}-{_started(os.getpid())}-{node}" for node in (0, 1)
        )
        self._undo = contextlib.ExitStack()
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Hosts:  # noqa: PYI034 - Self is of Python 3.11
        reason = missing()
        if reason:
            raise harness.BenchError(reason)
        remove_leftovers()
        with contextlib.ExitStack() as undo:
            self._logs = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="infinity-hosts-"))
            )
            for name in self.nodes:
                _ip("netns", "add", name)
                undo.callback(_end_namespace, name)
            _ip(
                "link",
                "add",
                LINK,
                "netns",
                self.nodes[0],
                "type",
                "veth",
                "peer",
                "name",
                LINK,
                "netns",
                self.nodes[1],
            )
            for name, address in zip(self.nodes, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", LINK, "up")
                _tool(
                    "tc",
                    "-n",
                    name,
                    "qdisc",
                    "add",
                    "dev",
                    LINK,
                    "root",
                    "tbf",
                    "rate",
                    self.rate,
                    "burst",
                    str(BURST_BYTES),
                    "latency",
                    f"{QUEUE_MS}ms",
                )
            undo.callback(self.end)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    # -- what runs there ---------------------------------------------------------------------------

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node. It and its descendants end with this process, or with the
        returned process."""
        # Killing the first process of a process namespace kills all others in it: `unshare` does so
        # when it is killed.
        inside = ["sh", "-c", f'hostname node{node} && "$@"; exit $?', "sh", *command]
        outside = ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", self.nodes[node]]
        apart = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--uts"]
        path = self._logs / f"{len(self._running)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*outside, *apart, *inside],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((process, path))
        return process

    def torchrun(
        self, script: Sequence[str], *, ranks: int = 2, **environment: str
    ) -> list[subprocess.Popen[bytes]]:
        """Start a script under torchrun on both nodes, `ranks` on each; they meet over the link."""
        env = harness.environment(
            PYTHONPATH=str(harness.ROOT),
            GLOO_SOCKET_IFNAME=LINK,
            OMP_NUM_THREADS="1",
            **environment,
        )
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            f"--nproc-per-node={ranks}",
            f"--master-addr={ADDRESSES[0]}",
            f"--master-port={PORT}",
        ]
        return [self.start(node, [*launch, f"--node-rank={node}", *script], env) for node in (0, 1)]

    def torchrun_on_one(
        self, script: Sequence[str], *, ranks: int = 4, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a script under torchrun on node 0 alone, all ranks there."""
        env = harness.environment(
            PYTHONPATH=str(harness.ROOT),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            **environment,
        )
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={ranks}",
            "--master-addr=127.0.0.1",
            f"--master-port={PORT}",
        ]
        return self.start(0, [*launch, *script], env)

    def output(self, process: subprocess.Popen[bytes]) -> str:
        """Return the text that a process has written so far."""
        path = next(path for one, path in self._running if one is process)
        return path.read_text(errors="replace")

    def wait(
        self, processes: Sequence[subprocess.Popen[bytes]], *, timeout_s: float = RUN_TIMEOUT_S
    ) -> list[str]:
        """The outputs of processes, when all have ended. Blocks. Raises BenchError when one fails
        (then all are ended) or takes too long."""
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in processes):
                failed = next((process for process in processes if process.returncode), None)
                if failed is not None:
                    raise harness.BenchError(
                        f"a node ended with {failed.returncode}:\n{self.output(failed)[-_TAIL:]}"
                    )
                if time.monotonic() > deadline:
                    tails = "\n".join(self.output(process)[-_TAIL:] for process in processes)
                    raise harness.BenchError(
                        f"the nodes took more than {timeout_s:.0f} s:\n{tails}"
                    )
                time.sleep(0.05)
            for process in processes:
                if process.returncode:
                    raise harness.BenchError(
                        f"a node ended with {process.returncode}:\n{self.output(process)[-_TAIL:]}"
                    )
            return [self.output(process) for process in processes]
        finally:
            for process in processes:
                self.vanish(process)

    def vanish(self, process: subprocess.Popen[bytes]) -> None:
        """End what `start` returned, with SIGKILL and at once, and all that it has started."""
        if process.poll() is None:
            process.kill()
        process.wait()

    def end(self) -> None:
        """End all that runs on the nodes."""
        for process, _ in self._running:
            self.vanish(process)

    # -- the link ----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Take the link down: packets are lost silently."""
        _ip("-n", self.nodes[1], "link", "set", LINK, "down")

    def mend(self) -> None:
        """Bring it up again."""
        _ip("-n", self.nodes[1], "link", "set", LINK, "up")

    def counted(self) -> list[dict[str, int]]:
        """Return each node's counts of the link since it was made: bytes, packets and drops of
        the interface, and `wire_bytes` of the token bucket."""
        found = []
        for name in self.nodes:
            paths = [f"/sys/class/net/{LINK}/statistics/{each}" for each in _COUNTED]
            values = _ip("netns", "exec", name, "cat", *paths).split()
            bucket = json.loads(_tool("tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", LINK))
            found.append(
                {
                    **dict(zip(_COUNTED, map(int, values), strict=True)),
                    "wire_bytes": int(bucket[0]["bytes"]),
                }
            )
        return found


def sent(
    before: Sequence[Mapping[str, int]], after: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Return the bytes that each node sent between two counts."""
    return [{name: b[name] - a[name] for name in b} for a, b in zip(before, after, strict=True)]


# -- the measurement -------------------------------------------------------------------------------


def run_arm(hosts: Hosts, arm: str, workload: r1.Workload) -> dict[str, Any]:
    """One arm on both nodes, in fresh processes; its record, with the counts of the whole run.
    Blocks until it ends."""
    before = hosts.counted()
    script = [
        str(harness.BENCH / "arm_hosts.py"),
        f"--arm={arm}",
        f"--link={LINK}",
        f"--vocab={workload.vocab}",
    ]
    first, _ = hosts.wait(hosts.torchrun([*script, *workload.arguments()]))
    return {**harness.last_json_line(first), "arm": arm, "whole_run": sent(before, hosts.counted())}


def summarise(records: Sequence[dict[str, Any]], arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Medians per arm over the rounds. `link_m`: bytes of a step over the link, of both directions,
    in units of M."""
    summary: dict[str, dict[str, Any]] = {}
    for arm in arms:
        mine = [record for record in records if record["arm"] == arm]
        if mine:
            summary[arm] = {
                "s_per_step": vars(harness.Summary.of([record["s_per_step"] for record in mine])),
                "link_bytes": harness.Summary.of(
                    [record["link_bytes_per_step"] for record in mine]
                ).median,
                "link_m": harness.Summary.of(
                    [record["link_bytes_per_step"] / record["m_bytes"] for record in mine]
                ).median,
                "wire_share": harness.Summary.of([wire_share(record) for record in mine]).median,
                "formula_m": sum(FORMULA[arm]),
                "scales_m": sum(WITH_SCALES[term] for term in FORMULA[arm]),
                "engine_m": harness.Summary.of(
                    [engine_across(record) / record["m_bytes"] for record in mine]
                ).median,
                "engine_per_step": mine[-1]["engine_per_step"],
                "last_loss": mine[-1]["losses"][-1],
            }
    return summary


def engine_across(record: Mapping[str, Any]) -> float:
    """Bytes that the engine says all ranks have sent to other nodes, per step."""
    return sum(
        value for name, value in record["engine_per_step"].items() if name.endswith("_across_bytes")
    )


def wire_share(record: Mapping[str, Any]) -> float:
    """Bytes on the wire, with all headers, per byte that the interface counts, over a whole run."""
    whole = record["whole_run"]
    return sum(node["wire_bytes"] for node in whole) / sum(node["tx_bytes"] for node in whole)


def show(rate: str, m_bytes: int, summary: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the summary for people."""
    first = next(iter(summary.values()))
    rows = [
        [
            arm,
            harness.Summary(**values["s_per_step"]).text(3),
            f"{values['link_bytes'] / 1e6:.1f}",
            f"{values['link_m']:.3f}",
            f"{values['engine_m']:.3f}",
            f"{values['formula_m']:.2f}",
            f"{values['scales_m']:.3f}",
            f"{values['link_bytes'] / first['link_bytes']:.3f}",
            f"{values['wire_share']:.3f}",
            f"{values['last_loss']:.4f}",
        ]
        for arm, values in summary.items()
    ]
    columns = [
        "arm",
        "s/step (min–max)",
        "MB/step on the link",
        "in M",
        "engine counts, M",
        "formula, M",
        "with scales, M",
        "of the first arm's",
        "wire/tx",
        "last loss",
    ]
    title = (
        f"two nodes of two ranks, {rate} each way, both directions counted; M = "
        f"{m_bytes / 1e6:.1f} MB"
    )
    harness.print_table(title, columns, rows)
    for arm, values in summary.items():
        if values["engine_per_step"]:
            print(
                f"{arm}: the engine counted per step, all ranks: "
                + ", ".join(
                    f"{name} {value:,.0f}" for name, value in values["engine_per_step"].items()
                )
            )


def compare(args: argparse.Namespace) -> int:
    """Run the arms in alternating rounds and show what they sent."""
    workload = r1.Workload(
        **{
            name: getattr(args, name)
            for name in ("hidden", "layers", "vocab", "tokens", "micro_batches", "warmup", "steps")
        }
    )
    about = {
        "run": harness.now(),
        "commit": harness.commit(),
        "workload": workload.describe(),
        "rate": args.rate,
        "nodes": 2,
        "ranks": 4,
        "machine": harness.machine(),
    }
    records: list[dict[str, Any]] = []
    with Hosts(args.rate) as hosts:
        for number in range(args.rounds):
            for arm in args.arms:
                record = run_arm(hosts, arm, workload)
                records.append(record)
                if args.results is not None:
                    harness.append_line(args.results, {**about, "round": number, **record})
                harness.note(
                    f"round {number + 1}/{args.rounds} {arm}: {record['s_per_step']:.3f} s/step, "
                    f"{record['link_bytes_per_step'] / 1e6:.1f} MB/step on the link"
                )
    summary = summarise(records, args.arms)
    if args.json:
        print(json.dumps({**about, "arms": summary}))
    else:
        show(args.rate, records[0]["m_bytes"], summary)
    return 0


def run_script(args: argparse.Namespace) -> int:
    """Run any script on both nodes; return its output and the link's traffic."""
    with Hosts(args.rate) as hosts:
        before = hosts.counted()
        outputs = hosts.wait(hosts.torchrun(args.run))
        for node, (output, count) in enumerate(
            zip(outputs, sent(before, hosts.counted()), strict=True)
        ):
            print(f"-- node {node} --\n{output}-- node {node} sent {count} --")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check whether two nodes can be made here (exit status)",
    )
    parser.add_argument(
        "--rate", default=RATE, help="rate of the link, each way, as tc writes it (%(default)s)"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (%(default)s)")
    for name in ("hidden", "layers", "vocab", "tokens", "micro_batches", "warmup", "steps"):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(DEFAULT, name),
            help="(%(default)s)",
        )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--results", type=Path, help="JSON lines file to append to (none)")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        help="a script and its arguments, instead of the measurement",
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds, --steps: give at least 1")
    return args


def main() -> int:
    args = parse()
    if args.check:
        if missing():
            raise harness.BenchError(missing())
        return 0
    return run_script(args) if args.run else compare(args)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
