"""Ranks that die under torchrun: the job restarts by itself from the last committed step, with as
many ranks as before or as remain. Parameters are those of a run that was restored by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

STEPS = 8

SCRIPT = """
import hashlib, json, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
import infinity as inf

place, last, dies = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
(place / "nvme").mkdir(exist_ok=True)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
policy = inf.Policy(params="nvme", optim="nvme", nvme=place / "nvme", durable=True, ram="min",
                    rank_timeout_s=30.0)
model = inf.offload(model, policy)
opt = inf.AdamW(model.parameters(), lr=1e-2)
begun = inf.restore(model, opt, place / "nvme").step
for index in range(begun, last):
    # The rows of a step are the same, however many ranks share them.
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(index)).chunk(world)[rank]
    model(rows).square().mean().backward()
    opt.step()
    opt.zero_grad()
    with (place / f"steps.{os.getpid()}").open("a") as log:
        log.write(json.dumps({"rank": rank, "world": world, "step": index, "pid": os.getpid()}))
        log.write("\\n")
    if index == dies and rank == world - 1 and begun == 0:
        os.kill(os.getpid(), signal.SIGKILL)
inf.handle(model).flush()
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
if rank == 0:
    found = {"begun": begun, "world": world, "digest": digest.hexdigest()}
    (place / "ended.json").write_text(json.dumps(found))
inf.handle(model).close()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agent(
    place: Path, port: int, *, nodes: str, ranks: int, last: int = STEPS, dies: int = -1
) -> subprocess.Popen[str]:
    """Start torchrun for the ranks of a node."""
    place.mkdir(exist_ok=True)
    script = place / "train.py"
    if not script.exists():
        script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes,
        "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "test",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=1,timeout=60",
        "--max-restarts", "3", "--monitor-interval", "0.1",
        str(script), str(place), str(last), str(dies),
    ]  # fmt: skip
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        command,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": root,
            # Else the store keeps the addresses of the attempt before, and none connects.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], place: Path) -> dict[str, Any]:
    """Wait for a node. Returns what its first rank said."""
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    found: dict[str, Any] = json.loads((place / "ended.json").read_text())
    return found


def by_hand(place: Path, parts: list[tuple[int, int]]) -> str:
    """Run to these steps on so many ranks each. Returns the digest of the end."""
    for ranks, last in parts:
        found = ended(agent(place, free_port(), nodes="1", ranks=ranks, last=last), place)
    return str(found["digest"])


@pytest.mark.ranks
def test_a_killed_rank_restarts_and_the_job_resumes(tmp_path: Path) -> None:
    place = tmp_path / "job"
    found = ended(agent(place, free_port(), nodes="1", ranks=2, dies=3), place)
    assert found["begun"] in (3, 4)
    assert found["world"] == 2
    assert found["digest"] == by_hand(tmp_path / "undisturbed", [(2, STEPS)])


@pytest.mark.ranks
def test_a_job_resumes_with_the_remaining_ranks(tmp_path: Path) -> None:
    place, port = tmp_path / "job", free_port()
    nodes = [agent(place, port, nodes="1:2", ranks=1, last=400)]
    # The first node hosts the rendezvous: without it torchrun cannot restart the others.
    while not _listens(port):
        time.sleep(0.05)
    nodes.append(agent(place, port, nodes="1:2", ranks=1, last=400))
    try:
        # Both nodes have started, and have taken some steps.
        deadline = time.monotonic() + 90
        pids: dict[int, int] = {}
        while len(pids) < 2:
            assert time.monotonic() < deadline, [node.poll() for node in nodes]
            for file in place.glob("steps.*"):
                rows = [json.loads(line) for line in file.read_text().splitlines() if line]
                for row in rows:
                    if row["world"] == 2 and row["step"] >= 3:
                        pids[row["rank"]] = row["pid"]
            time.sleep(0.05)
        # One node is lost, with all of its processes.
        (worker,) = [pid for pid in pids.values() if _descends(pid, nodes[1].pid)]
        for pid in (nodes[1].pid, worker):
            os.kill(pid, signal.SIGKILL)
        found = ended(nodes[0], place)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
            if node.stdout is not None:
                node.stdout.close()
    assert found["world"] == 1
    assert found["begun"] > 3
    wanted = by_hand(tmp_path / "by_hand", [(2, found["begun"]), (1, 400)])
    assert found["digest"] == wanted


def _listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def _descends(pid: int, ancestor: int) -> bool:
    """Tell whether a process is a descendant of another."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False
