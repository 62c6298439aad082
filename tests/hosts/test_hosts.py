"""Two nodes as two network namespaces with a shaped link, two ranks each, by torchrun; needs root.
`make hosts` runs these."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
JOB = str(Path(__file__).with_name("job.py"))
# Beats that stop are a failure after some seconds, a wait after job.RANK_TIMEOUT_S; a busy machine
# may take longer. What is tested is that survivors do not wait for ever.
WITHIN_S = 90.0
START_S = 180.0

pytestmark = pytest.mark.hosts


def scripts() -> Any:
    """bench/hosts.py, imported as scripts import each other."""
    if str(ROOT / "bench") not in sys.path:
        sys.path.insert(0, str(ROOT / "bench"))
    return importlib.import_module("hosts")


@pytest.fixture(autouse=True)
def _privileges() -> None:
    reason = scripts().missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def hosts() -> Iterator[Any]:
    with scripts().Hosts("1gbit") as two:
        yield two


def until(happened: Callable[[], bool], within_s: float, two: Any, processes: list[Any]) -> None:
    """Wait for something, while all of `processes` run."""
    deadline = time.monotonic() + within_s
    while not happened():
        goes_on = time.monotonic() < deadline and all(
            process.poll() is None for process in processes
        )
        assert goes_on, "\n".join(two.output(process)[-3000:] for process in processes)
        time.sleep(0.1)


def read(place: Path) -> list[dict[str, Any]]:
    return [torch.load(place / f"result{rank}") for rank in range(4)]


def test_training_over_two_nodes_has_the_bits_of_four_ranks_on_one(
    hosts: Any, tmp_path: Path
) -> None:
    for name in ("two", "one"):
        (tmp_path / name).mkdir()
    before = hosts.counted()
    hosts.wait(hosts.torchrun([JOB, "train", str(tmp_path / "two")]), timeout_s=START_S)
    over_link = scripts().sent(before, hosts.counted())
    hosts.wait([hosts.torchrun_on_one([JOB, "train", str(tmp_path / "one")])], timeout_s=START_S)
    two, one = read(tmp_path / "two"), read(tmp_path / "one")
    for rank in range(4):
        for name, found in one[rank].items():
            assert found["steps"] == two[rank][name]["steps"], (name, rank)
            assert found["params"].keys() == two[rank][name]["params"].keys()
            for key, value in found["params"].items():
                assert torch.equal(value, two[rank][name]["params"][key]), (name, rank, key)
    # The link was really between them: more than the parameters of one model has passed, each way.
    parameters = sum(
        value.numel() * value.element_size() for value in one[0]["plain"]["params"].values()
    )
    assert all(node["tx_bytes"] > parameters for node in over_link)


def survivors_learn(
    two: Any, place: Path, survivors: tuple[int, ...], break_it: Callable[[list[Any]], None]
) -> list[str]:
    """Call `break_it` in the midst of training, and return the text of RankFailed on each
    survivor."""
    processes = two.torchrun([JOB, "endless", str(place)])
    until(
        lambda: all((place / f"goes{rank}").exists() for rank in range(4)), START_S, two, processes
    )
    break_it(processes)
    going = [processes[node] for node in {rank // 2 for rank in survivors}]
    until(
        lambda: all((place / f"failed{rank}").exists() for rank in survivors), WITHIN_S, two, going
    )
    return [(place / f"failed{rank}").read_text().partition("\n")[2] for rank in survivors]


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_vanishes_ends_the_other_which_names_one_of_its_ranks(
    hosts: Any, tmp_path: Path, node: int
) -> None:
    """Node 0 has the store of the rendezvous; with it everything that ranks tell each other is
    gone."""
    gone, survivors = ((0, 1), (2, 3)) if node == 0 else ((2, 3), (0, 1))
    for message in survivors_learn(
        hosts, tmp_path, survivors, lambda processes: hosts.vanish(processes[node])
    ):
        assert any(f"rank {rank}" in message for rank in gone), message


def test_a_link_that_goes_down_ends_both_nodes(hosts: Any, tmp_path: Path) -> None:
    for message in survivors_learn(hosts, tmp_path, (0, 1, 2, 3), lambda _: hosts.cut()):
        assert "rank " in message
    told = [(tmp_path / f"failed{rank}").read_text() for rank in (0, 1, 2, 3)]
    assert all(
        any(f"rank {rank}" in told[mine] for rank in ((2, 3) if mine < 2 else (0, 1)))
        for mine in range(4)
    ), told


def test_one_rank_that_is_killed_is_named_on_both_nodes(hosts: Any, tmp_path: Path) -> None:
    """torchrun on the same node then ends its other rank; the ranks of the other node learn of it
    only by messages."""

    def kill_rank_3(processes: list[Any]) -> None:
        namespace = hosts.nodes[1]
        pids = map(
            int, subprocess.check_output(["ip", "netns", "pids", namespace], text=True).split()
        )
        found = [
            pid
            for pid in pids
            if b"\0RANK=3\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        ]
        assert len(found) == 1
        os.kill(found[0], signal.SIGKILL)

    for message in survivors_learn(hosts, tmp_path, (0, 1), kill_rank_3):
        assert "rank 2" in message or "rank 3" in message, message


SENDER = """
import socket, sys, time
if sys.argv[1] == "take":
    with socket.create_server((sys.argv[2], 5000)) as server:
        connection, _ = server.accept()
        while connection.recv(1 << 20): pass
else:
    for _ in range(100):
        try:
            connection = socket.create_connection((sys.argv[2], 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    for _ in range(32): connection.sendall(bytes(1 << 20))
"""


def test_what_is_counted_is_what_was_sent_over_the_link(hosts: Any) -> None:
    module, size = scripts(), 32 << 20
    counts = [hosts.counted()]
    for taker, giver in ((0, 1), (1, 1)):  # over the link, then within a node
        ends = [hosts.start(node, [sys.executable, "-c", SENDER, what, module.ADDRESSES[taker]])
                for node, what in ((taker, "take"), (giver, "give"))]  # fmt: skip
        hosts.wait(ends, timeout_s=60)
        counts.append(hosts.counted())
    across, within = (module.sent(before, after) for before, after in itertools.pairwise(counts))
    assert size <= across[1]["tx_bytes"] <= across[1]["wire_bytes"] <= 1.06 * size
    assert across[0]["wire_bytes"] < 0.03 * size  # acknowledgements
    # neighbours are looked for now and then
    assert all(node["wire_bytes"] < 4096 for node in within)


def test_a_run_that_was_killed_leaves_no_process_and_its_namespaces_go_with_the_next_run(
    tmp_path: Path,
) -> None:
    module, foreign = scripts(), f"infinity-hosts-{os.getpid()}-theirs"
    code = (
        "import sys, time, hosts\n"
        "with hosts.Hosts() as two:\n"
        "    process = two.start(1, ['sleep', '1000'])\n"
        "    while not hosts._ip('netns', 'pids', two.nodes[1]).strip(): time.sleep(0.01)\n"
        "    print(*two.nodes, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT / "bench", stdout=subprocess.PIPE, text=True
        ) as run:
            assert run.stdout is not None
            names = run.stdout.readline().split()
            assert len(names) == 2
            assert module.remove_leftovers() == []  # it lives
            run.kill()
        deadline = time.monotonic() + 30
        while subprocess.check_output(["ip", "netns", "pids", names[1]]).strip():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert set(module.remove_leftovers()) == set(names)
        listed = subprocess.check_output(["ip", "netns", "list"], text=True)
        assert foreign in listed
        assert not any(name in listed for name in names)
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import hosts, harness, sys, time\n"
        "def main():\n"
        "    with hosts.Hosts() as two:\n"
        "        two.start(0, ['sleep', '1000'])\n"
        "        print(*two.nodes, flush=True)\n"
        "        time.sleep(1000)\n"
        "sys.exit(harness.run_main(main))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT / "bench", stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        names = run.stdout.readline().split()
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
    listed = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert len(names) == 2
    assert not any(name in listed for name in names)


def test_the_engine_counts_what_the_link_carries(hosts: Any) -> None:
    module = scripts()
    workload = module.r1.Workload(hidden=256, layers=2, vocab=512, tokens=16, warmup=1, steps=2)
    record = module.run_arm(hosts, "all", workload)
    told = module.engine_across(record)
    assert told <= record["link_bytes_per_step"] <= 1.1 * told
    # Twice what quantized groups take would be a part that crosses twice, or one that is not
    # quantized.
    assert (
        told
        <= 1.05
        * sum(module.WITH_SCALES[term] for term in module.FORMULA["all"])
        * record["m_bytes"]
    )
