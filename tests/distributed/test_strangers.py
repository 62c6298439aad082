"""Connections from programs that are no ranks: garbage at every port that two ranks listen on, and
in the store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from infinity._src.distributed.heartbeat import Heartbeat, RankRecord
from tests import harness
from tests.distributed.ranks import Train, assert_ranks_agree, on_ranks
from tests.distributed.test_two_ranks import LLAMA, PLACEMENTS

_LISTEN = "0A"


def listening() -> list[tuple[str, int]]:
    """Addresses on which this process listens."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
            inodes.update([found[1]] if found else [])
    addresses = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                host, port = fields[1].split(":")
                packed = b"".join(
                    bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)
                )
                kind = socket.AF_INET if family == "tcp" else socket.AF_INET6
                addresses.append((socket.inet_ntop(kind, packed), int(port, 16)))
    return addresses


def of_shared_memory() -> list[str]:
    """Objects of /dev/shm that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"/dev/shm/\S+", maps)))


GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x80\x04cposix\nsystem\n(S'false'\ntR.",
    b"\xff" * 4096,
    struct.pack("<q", 1 << 62),
    struct.pack("<qq", -1, 1 << 40),
    bytes(1 << 16),
)


@dataclasses.dataclass(frozen=True)
class Attacked:
    """Train while garbage comes to all ports. Returns the results, the addresses, shared memory,
    and how often somebody was connected."""

    train: Train

    def __call__(self, rank: int, directory: Path) -> Any:
        stop, reached = threading.Event(), [0]
        seen: set[tuple[str, int]] = set()

        def attack() -> None:
            rng = random.Random(rank)
            while not stop.wait(0.01):
                for address in listening():
                    seen.add(address)
                    with contextlib.suppress(OSError), socket.socket() as other:
                        other.settimeout(0.5)
                        other.connect(("127.0.0.1", address[1]))
                        other.sendall(rng.choice((*GARBAGE, rng.randbytes(200))))
                        reached[0] += 1
                        # Some connections stay open, and send nothing more.
                        stop.wait(rng.choice((0, 0, 0.05)))

        with _beside(attack, stop):
            results = self.train(rank, directory)
        return results, sorted(seen), of_shared_memory(), reached[0]


@contextlib.contextmanager
def _beside(work: Any, stop: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_garbage_at_every_port_changes_no_bit_of_a_training(tmp_path: Path) -> None:
    runs = ((LLAMA, PLACEMENTS["nvme"]),)
    quiet = on_ranks(Train(runs), tmp_path / "quiet", 2)
    found = on_ranks(Attacked(Train(runs)), tmp_path / "attacked", 2)
    results = [each[0][0] for each in found]
    assert_ranks_agree(results)
    for rank in range(2):
        harness.assert_equal(results[rank], quiet[rank][0])
    # Ports of gloo on both ranks, and of the store on one.
    assert sum(len(each[1]) for each in found) >= 3
    assert all(each[3] >= 5 for each in found)


def test_the_engine_has_no_shared_memory_and_gloo_listens_where_the_host_resolves(
    tmp_path: Path,
) -> None:
    """The ports are those of torch: gloo listens at the address of the host's name, or of the
    interface that GLOO_SOCKET_IFNAME names."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        found = on_ranks(Attacked(Train(((LLAMA, PLACEMENTS["cpu"]),))), tmp_path / "run", 2)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    for _, addresses, shared, _ in found:
        assert shared == []
        assert addresses
    # The second rank has no store: all of its ports are gloo's.
    assert {host for host, _ in found[1][1]} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


RECORDS = (
    b"", b"[]", b"null", b"7", b"{", b'"x"', b"{}", b"[" * 100_000, b"\xff\xfe",
    b"\x80\x04cposix\nsystem\n(S'false'\ntR.",
)  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=[str(each[:12]) for each in RECORDS])
def test_a_record_that_no_rank_wrote_is_reported(record: bytes) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("1", record)
    exchanged = threading.Event()
    beat = Heartbeat(0, 2, store, interval_s=0.01, quiet_s=0.01, on_exchange=exchanged.set)
    beat.start()
    end_s = time.monotonic() + 20
    while not beat.lost and time.monotonic() < end_s:
        time.sleep(0.01)
    beat.stop(5)
    assert "no record of a rank" in beat.lost


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RankRecord)])
@pytest.mark.parametrize("value", [None, "x", -1.5, [[1]], {"a": 1}, True])
def test_each_field_of_a_record_has_its_type_or_is_refused(field: str, value: Any) -> None:
    said = {**json.loads(RankRecord(host=("h", "b", 1, 2), pid=3).json()), field: value}
    try:
        record = RankRecord.parse(json.dumps(said).encode())
    except ValueError:
        return
    default = next(each.default for each in dataclasses.fields(RankRecord) if each.name == field)
    assert default is None or type(getattr(record, field)) is type(default)
    # And the parsed record can be written again.
    assert RankRecord.parse(record.json().encode()) == record
