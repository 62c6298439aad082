"""Blocks that refuse every write: training continues in other places, with the bits of a run on
good drives. Also reads that fail once."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.checkpoint.durable.files import (
    bad_ranges,
    list_of_bad,
    remember_bad,
    retire_states,
)
from infinity._src.engine.handle import offload
from infinity._src.hooks import activation_offload
from infinity.aio import Fault, Seam
from infinity.errors import AioError
from tests import harness, models
from tests.crashes import digest, step
from tests.durable_runs import close, die, made, run_files, undisturbed
from tests.harness import Training
from tests.marks import mostly_slow

NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
LLAMA = Training(models.llama, steps=4, accumulation=1, max_norm=1.0)
RUNS = {
    "one generation": {},
    "two generations": {"generations": 2},
    "in backward": {"generations": 2, "update": "backward"},
    "threads": {"io_backend": "threads"},
    "part of it resident": {"resident": {"params": 0.5, "optim": 0.5}},
    "activations": {"activations": "nvme"},
}


def bad_block(offset: int, *, nth: int = 0, drive: int | None = None) -> Seam:
    """A block that refuses every write, from the nth on."""
    return Seam(
        fault=Fault("write", nth, persistent=True, drive=drive, start=offset, stop=offset + 4096)
    )


@pytest.mark.parametrize(
    "name", mostly_slow(RUNS, "one generation", "two generations", "activations")
)
def test_a_bad_block_changes_no_bit(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 256)
    training = dataclasses.replace(LLAMA, checkpointing=name == "activations")
    policy = inf.Policy(nvme=tmp_path, **{**NVME, **RUNS[name]})
    with caplog.at_level(logging.WARNING, logger="infinity"):
        # Good at first: it holds states when it goes bad.
        ours = harness.offloaded(training, policy, seam=bad_block(200_000, nth=1))
    harness.assert_same(ours, harness.reference(training))
    assert (ours.stats.moved_writes, ours.stats.kept_chunks) == (1, 0)
    (told,) = [text for text in caplog.messages if "refused a write" in text]
    assert str(tmp_path) in told
    assert "4 reserved ranges remain" in told


def test_a_place_that_refuses_the_first_states_is_counted_once_and_stays_reserved(
    tmp_path: Path,
) -> None:
    # Its space is reserved with the parameters, which rest in memory; masters are the first write.
    layers = [torch.nn.Linear(64, 64, bias=False, dtype=torch.float16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    policy = inf.Policy(nvme=tmp_path, resident={"params": 1.0}, unit_bytes_max=8192, **NVME)
    offload(model, policy, _seam=bad_block(0))
    before = inf.handle(model).stats().nvme_bytes
    inf.AdamW(model.parameters(), lr=1e-2)
    assert inf.handle(model).parts.tiers.executor.stats().moved_writes == 1
    assert inf.handle(model).stats().nvme_bytes == before
    (place,) = inf.handle(model).parts.tiers.storage.space.reserve([4096])
    assert place.offset > 0
    close(model)


def trained_with_a_gather(
    policy: inf.Policy, *, bad: bool = False
) -> tuple[dict[str, torch.Tensor], inf.Stats]:
    """Four steps, and a write through `gather` after the second; the block of its first write is
    bad from then on, or not."""
    with harness.one_thread():
        model = offload(models.make(models.llama), policy)
        handle, optimizer = inf.handle(model), inf.AdamW(model.parameters(), lr=1e-2)
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        for index, batch in enumerate(models.token_batches(4)):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if index == 1:
                handle.flush()
                if bad:
                    param = weight.infinity_link.param  # type: ignore[attr-defined]
                    (chunk, *_), *_ = param.flat.layout.spans(param.param_index, 0)
                    place = handle.parts.tiers.store[param.flat].records[chunk]
                    seam = bad_block(int(place["file_offset"]))
                    handle.parts.tiers.executor.set_seam(seam)
                with handle.gather(weight), torch.no_grad():
                    weight.add_(1.0)
                # before an update writes the whole chunk
                assert handle.parts.tiers.executor.stats().moved_writes == bad
        values = harness.values_of(model)
        handle.flush()
        stats = handle.stats()
        close(model)
    return values, stats


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_bad_block_in_a_write_of_gather_changes_no_bit(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters and masters are written. The moments are read, and moved together with them."""
    wanted, _ = trained_with_a_gather(inf.Policy())
    ours, stats = trained_with_a_gather(
        inf.Policy(nvme=tmp_path, io_backend=backend, **NVME), bad=True
    )
    assert all(torch.equal(wanted[name], value) for name, value in ours.items())
    assert (stats.moved_writes, stats.kept_chunks) == (1, 0)
    assert len([text for text in caplog.messages if "refused a write" in text]) == 1


@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(block=st.integers(0, 250), nth=st.integers(0, 4), drive=st.integers(0, 1))
def test_any_block_of_any_drive(block: int, nth: int, drive: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        drives = [Path(directory) / name for name in ("a", "b")]
        for each in drives:
            each.mkdir()
        policy = inf.Policy(nvme=drives, generations=2, **NVME)
        ours = harness.offloaded(LLAMA, policy, seam=bad_block(4096 * block, nth=nth, drive=drive))
    harness.assert_same(ours, harness.reference(LLAMA))
    assert ours.stats.moved_writes <= 1


def test_a_read_that_fails_once_is_repeated(tmp_path: Path) -> None:
    policy = inf.Policy(nvme=tmp_path, **NVME)
    for nth in (10, 60, 120):
        ours = harness.offloaded(LLAMA, policy, seam=Seam(fault=Fault("read", nth)))
        harness.assert_same(ours, harness.reference(LLAMA))
        assert ours.stats.checksum_failures == 0


@pytest.mark.parametrize("update", mostly_slow(["deferred", "backward"], "deferred"))
def test_a_durable_run_continues_and_records_the_block(tmp_path: Path, update: str) -> None:
    wanted = undisturbed()
    model, optimizer = made(tmp_path, update=update, seam=bad_block(50_000, nth=1))
    for index in range(3):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert inf.handle(model).stats().moved_writes >= 1
    assert digest(model) == wanted[3]
    die(model)
    listed = [
        path.with_name(path.name[1:].removesuffix(".bad"))
        for path in (tmp_path / "infinity-run").glob(".*.bad")
    ]
    ranges = {path.name: bad_ranges(path) for path in listed}
    assert ranges
    assert all(start <= 50_000 + 4096 and stop > 50_000 for ((start, stop),) in ranges.values())
    # The next process has new files; the file with the bad block keeps only that block.
    model, optimizer = made(tmp_path, update=update)
    assert inf.restore(model, optimizer, tmp_path).step == 3
    assert digest(model) == wanted[3]
    for index in range(3, 5):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert digest(model) == wanted[5]
    for name, ((start, stop),) in ranges.items():
        kept = tmp_path / "infinity-run" / f"bad-{name.removeprefix('states-')}"
        assert kept.stat().st_blocks * 512 <= stop - start + 4096
    close(model)
    assert not [name for name in run_files(tmp_path) if name.endswith(".bad")]


def test_a_checkpoint_with_links_to_a_file_that_has_a_bad_range_stays_whole(
    tmp_path: Path,
) -> None:
    place, wanted = tmp_path / "run", undisturbed()
    model, optimizer = made(place, seam=bad_block(50_000, nth=1))
    for index in range(3):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert inf.handle(model).stats().moved_writes >= 1
    inf.save(model, optimizer, tmp_path / "save")
    bad = list((place / "infinity-run").glob(".*.bad"))
    states = {path.with_name(path.name[1:].removesuffix(".bad")) for path in bad}
    assert any(path.stat().st_nlink > 1 for path in states)
    die(model)
    # The next process leaves the files of this one.
    model, optimizer = made(place)
    assert inf.restore(model, optimizer, place).step == 3
    step(model, optimizer, 3, 0)
    inf.handle(model).flush()
    assert not any(path.exists() for path in states)
    assert inf.restore(model, optimizer, tmp_path / "save").step == 3
    assert digest(model) == wanted[3]
    close(model)


def test_a_list_of_bad_ranges_that_is_cut_short_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    states = tmp_path / "states-0123456789abcdef-1.rank0"
    states.write_bytes(b"\1" * 65536)
    for offset in (8192, 4096, 40960):
        remember_bad(states, offset, 4096)
    with list_of_bad(states).open("ab") as file:
        file.write(b'{"offset": 0, "size')
    remember_bad(states, 57344, 4096)
    assert bad_ranges(states) == [(4096, 12288), (40960, 45056), (57344, 61440)]
    assert retire_states(states)
    assert not states.exists()
    data = (tmp_path / "bad-0123456789abcdef-1.rank0").read_bytes()
    assert [at for at in range(0, 65536, 4096) if data[at]] == [4096, 8192, 40960, 57344]


def test_a_list_in_the_way_of_a_link_is_refused(tmp_path: Path) -> None:
    states, other = tmp_path / "states-0123456789abcdef-1.rank0", tmp_path / "other"
    other.write_bytes(b"")
    list_of_bad(states).symlink_to(other)
    with pytest.raises(AioError) as caught:
        remember_bad(states, 8192, 4096)
    line = b'\n{"offset": 8192, "size_bytes": 4096}\n'
    assert (caught.value.op, caught.value.length) == ("write", len(line))
    assert other.read_bytes() == b""


def test_a_file_that_is_left_to_a_checkpoint_leaves_no_list_and_no_owner(tmp_path: Path) -> None:
    """Its layer of files is removed, and its bad range no longer counts."""
    place, wanted = tmp_path / "run", undisturbed()
    model, optimizer = made(place, seam=bad_block(50_000, nth=1))
    for index in range(2):
        step(model, optimizer, index, 0)
    inf.handle(model).flush()
    assert inf.handle(model).stats().moved_writes >= 1
    spares = inf.handle(model).parts.tiers.store._spares
    assert spares is not None
    assert spares.bad_bytes > 0
    for index in range(2, 5):
        if index == 2:
            inf.save(model, optimizer, tmp_path / "save").wait()
            before = set(run_files(place))
        step(model, optimizer, index, 0)
        inf.handle(model).flush()
    gone = before - set(run_files(place))
    assert any(name.startswith("states-") for name in gone)
    there = [name for name in run_files(place) if name.startswith("states-")]
    for name in run_files(place):
        if name.startswith(".states-"):
            assert any(name.startswith(f".{each}.") for each in there), name
    lost = [name for name in before if name.endswith(".bad") and name not in run_files(place)]
    assert lost
    # The files that there are, of which each new one has the same bad block here.
    known = [bad_ranges(place / "infinity-run" / name) for name in there]
    assert spares.bad_bytes == sum(stop - start for each in known for start, stop in each)
    assert digest(model) == wanted[5]
    close(model)
    model, optimizer = made(tmp_path / "other")
    assert inf.restore(model, optimizer, tmp_path / "save").step == 2
    assert digest(model) == wanted[2]
    close(model)
