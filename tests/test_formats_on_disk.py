"""Files that an older release wrote are restored to the last bit, and today's are laid out alike.

`tests/make_fixtures.py` says what the cases are and how their files were made. Only the public API
and the files themselves are used here: whatever moves inside the engine, these tests stay.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import infinity as inf
from infinity.errors import ChecksumError, StateInvalid
from tests import make_fixtures
from tests.distributed.ranks import on_ranks
from tests.forks import in_a_fork
from tests.make_fixtures import CASES, LATER, SAVED_AT, Came, Read, Run, States, assert_same

FIXTURES = make_fixtures.BEFORE
TWO_PARTS = FIXTURES.parent / "commits_in_two_parts"
RESTORED = [name for name, case in CASES.items() if case.kind != "export"]
ALONE = [name for name in RESTORED if CASES[name].world == 1]
DURABLE = [name for name, case in CASES.items() if case.kind == "durable"]
IN_RANKS = [name for name, case in CASES.items() if case.world > 1]

expected = functools.partial(make_fixtures.expected, FIXTURES)


def unpacked(name: str, place: Path) -> Path:
    """The files of a case as the older release left them."""
    return make_fixtures.unpack(FIXTURES / f"{name}.tar.xz", place / "written")


def mounted(written: Path) -> Path:
    """The same with a run's second drive where its link leads: other readers have no policy."""
    link = written / "drive0" / "infinity-run" / "drive1"
    if link.is_symlink():
        link.unlink()
        link.symlink_to(written / "drive1" / "infinity-run")
    return written


def _part(states: States, prefix: str) -> States:
    return {
        k.removeprefix(f"{prefix}/"): v for k, v in states.items() if k.startswith(f"{prefix}/")
    }


def assert_came(came: Came, states: States, *, rank: int = 0) -> None:
    assert came.restored.step == SAVED_AT
    assert came.restored.rounded == ""
    wanted = make_fixtures.extra_of(SAVED_AT, rank)
    assert torch.equal(came.restored.extra.pop("seen"), wanted.pop("seen"))
    assert came.restored.extra == wanted
    assert_same(came.states, states)


# -- restoring -------------------------------------------------------------------------------------


def test_the_fixtures_are_small_and_whole() -> None:
    archives = {path.name.removesuffix(".tar.xz") for path in FIXTURES.glob("*.tar.xz")}
    assert archives == set(CASES)
    assert sum(path.stat().st_size for path in FIXTURES.iterdir()) < 500_000
    for name in RESTORED:
        states = expected(name)
        before, after = _part(states, "restored"), _part(states, "later")
        still = {key for key in before if np.array_equal(before[key], after[key])}
        # Training after the restore changes all that it should, or equal bits would say little.
        frozen = {f"blocks.1.{key}" for key in ("weight", "bias", "gain")}
        assert still == (frozen if CASES[name].frozen else set()), name


@pytest.mark.parametrize("name", RESTORED)
def test_the_states_of_then_come_back_and_train_on(name: str, tmp_path: Path) -> None:
    came = make_fixtures.read(CASES[name], tmp_path, unpacked(name, tmp_path))
    assert_came(came, expected(name))
    assert bool(came.restored.notes) == (CASES[name].world > 1)


@pytest.mark.parametrize("name", [name for name in ALONE if name != "state_dicts"])
def test_they_come_back_on_another_tier(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tier = "nvme" if case.tier == "cpu" else "cpu"
    written = mounted(unpacked(name, tmp_path))
    came = make_fixtures.read(case, tmp_path, written, tier=tier)
    assert came.restored.notes == ()
    assert_came(came, expected(name))


@pytest.mark.parametrize("name", IN_RANKS)
def test_what_two_ranks_saved_comes_back_on_two(name: str, tmp_path: Path) -> None:
    read = Read(CASES[name], tmp_path, unpacked(name, tmp_path))
    for rank, came in enumerate(on_ranks(read, tmp_path / "ranks", 2)):
        assert_came(came, expected(name, 2, rank), rank=rank)
        assert came.restored.notes == ()


def test_what_one_rank_saved_comes_back_on_two(tmp_path: Path) -> None:
    read = Read(CASES["exact"], tmp_path, unpacked("exact", tmp_path))
    for came in on_ranks(read, tmp_path / "ranks", 2):
        # The batches of two ranks are others: only what was restored is the same.
        assert_same(_part(came.states, "restored"), _part(expected("exact"), "restored"))
        assert came.restored.extra["rank"] == 0


@pytest.mark.parametrize("name", DURABLE)
def test_commits_in_two_parts_come_back_and_train_on(name: str, tmp_path: Path) -> None:
    archive = TWO_PARTS / f"{name}.tar.xz"
    assert archive.stat().st_size < 25_000
    written = make_fixtures.unpack(archive, tmp_path / "written")
    assert {manifest[1] for _, manifest in _manifests(written)} == {_COMMIT_VERSION}
    assert_came(make_fixtures.read(CASES[name], tmp_path, written), expected(name))


@pytest.mark.parametrize("name", DURABLE)
def test_a_killed_run_goes_on_and_is_committed_where_it_lies(name: str, tmp_path: Path) -> None:
    case, written = CASES[name], unpacked(name, tmp_path)
    model = inf.offload(make_fixtures.Net(frozen=case.frozen), case.open_policy(written))
    optimizer = inf.AdamW([param for param in model.parameters() if param.requires_grad])
    with pytest.raises(ValueError, match=f"holds a durable run, committed up to step {SAVED_AT}"):
        model(torch.tensor(0.5)).backward()
        optimizer.step()
    optimizer.zero_grad()
    inf.handle(model).close()
    make_fixtures.read(case, tmp_path, written)
    run = Run(case, written)
    restored = inf.restore(run.model, run.optimizer, written / "drive0")
    assert restored.step == SAVED_AT + LATER
    assert restored.extra["next"] == SAVED_AT + LATER
    assert_same(_part(run.states("now"), "now"), _part(expected(name), "later"))
    run.handle.close()


def test_a_byte_that_changed_since_is_found(tmp_path: Path) -> None:
    written = unpacked("compact", tmp_path)
    (data,) = written.glob("data-*")
    damaged = bytearray(data.read_bytes())
    at = next(index for index, byte in enumerate(damaged) if byte)
    damaged[at] ^= 1
    data.write_bytes(damaged)
    run = Run(CASES["compact"], tmp_path / "swap")
    with pytest.raises(ChecksumError, match=re.escape(data.name)):
        inf.restore(run.model, run.optimizer, written)
    with pytest.raises(StateInvalid, match="was interrupted"):
        run.handle.close()


# -- formats of others -----------------------------------------------------------------------------


def test_state_dicts_that_torch_saved_load(tmp_path: Path) -> None:
    written = unpacked("state_dicts", tmp_path)
    states = torch.load(written / "states.pt", weights_only=True)
    run = Run(CASES["state_dicts"], tmp_path)
    run.model.load_state_dict(states["model"])
    values = run.model.state_dict()
    assert list(values) == list(states["model"])
    wanted = _part(expected("state_dicts"), "restored")
    ours = {name: make_fixtures.bits_of(value) for name, value in values.items()}
    assert_same(ours, {name: wanted[name] for name in ours})
    with pytest.raises(ValueError, match="moments are not in a manifest"):
        run.optimizer.load_state_dict(states["optimizer"])
    inf.restore(run.model, run.optimizer, written / "save")
    for group in run.optimizer.param_groups:
        group["lr"] = 7.0
    run.optimizer.load_state_dict(states["optimizer"])
    assert run.optimizer.state_dict() == states["optimizer"]
    assert_same(_part(run.states("now"), "now"), wanted)
    run.handle.close()


@pytest.mark.parametrize("kind", ["values", "masters"])
def test_safetensors_load_and_are_written_alike(kind: str, tmp_path: Path) -> None:
    written = unpacked("export", tmp_path) / kind
    run, wanted = Run(CASES["export"], tmp_path), _part(expected("export"), "restored")
    inf.load_safetensors(run.model, written)
    states = _part(run.states("now"), "now")
    names = list(run.model.state_dict())
    names += [key for key in states if key.endswith("/master")] if kind == "masters" else []
    assert_same({key: states[key] for key in names}, {key: wanted[key] for key in names})
    run.handle.close()
    today = make_fixtures.write(CASES["export"], tmp_path / "today") / kind
    assert {path.name for path in today.iterdir()} == {path.name for path in written.iterdir()}
    for path in today.iterdir():
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name


def test_checkpoints_of_torch_load(tmp_path: Path) -> None:
    run = Run(CASES["export"], tmp_path)
    inf.load_dcp(run.model, run.optimizer, unpacked("export", tmp_path) / "dcp")
    for group in run.optimizer.param_groups:  # hyper-parameters are not loaded
        group["lr"] = 2**-6 * (1 + (SAVED_AT - 1) % 3)
    states = run.states("restored")
    run.train(SAVED_AT, SAVED_AT + LATER)
    assert_same(states | run.states("later"), expected("export"))
    run.handle.close()


# -- commands --------------------------------------------------------------------------------------


def test_the_commands_read_them(tmp_path: Path) -> None:
    for name in ("exact", "two_ranks_compact", "durable_compact"):
        written = mounted(unpacked(name, tmp_path / name))
        place = make_fixtures.source_of(CASES[name], written)
        listed = in_a_fork("infinity", "checkpoint", "ls", place, COLUMNS="300")
        row = rf"│ yes +│ +{SAVED_AT} │ +{CASES[name].world} │"
        assert re.search(row, listed), listed
        assert "No damage" in in_a_fork("infinity", "checkpoint", "verify", place)
    source, out = tmp_path / "exact" / "written", tmp_path / "out"
    in_a_fork("infinity", "checkpoint", "export", source, out, "--masters")
    wanted = expected("exact")
    found = {k: v for path in out.glob("*.safetensors") for k, v in load_file(path).items()}
    ours = {f"{key}/master": make_fixtures.bits_of(value) for key, value in found.items()}
    masters = {k: v for k, v in _part(wanted, "restored").items() if k.endswith("/master")}
    assert_same({key: ours[key] for key in masters}, masters)


# -- writing ---------------------------------------------------------------------------------------


_HEAD = struct.Struct("<8sQQQQQ")
_VERSION = 1
_COMMIT_VERSION = 3
"""Version of a durable run's commits: rows are in two parts, one of which is in a table."""
_RANDOM = re.compile(r"(states|home)-[0-9a-f]{8}([0-9a-f]{8})?")
_TABLE_HEAD = struct.Struct("<8sQQQ")
_ROW_BYTES = 120
_PLACES_BYTES = 108
_MARK_BYTES = 9
_DIGEST_BYTES = 16
# Sizes that hold a process's number, a random one, or a format that torch decides about.
_SIZE_VARIES = re.compile(r".*(\.owner|manifest-\d+\.rank\d+|extra-\d+\.rank\d+|\.pt)|dcp/.*")


def _plain(name: str) -> str:
    return _RANDOM.sub(r"\1-#", name)


def _tree(written: Path) -> dict[str, object]:
    """Every name below a directory, and its kind or size as far as that is fixed."""
    found: dict[str, object] = {}
    for path in written.rglob("*"):
        name = _plain(path.relative_to(written).as_posix())
        if path.is_symlink() or path.is_dir():
            found[name] = "link" if path.is_symlink() else "directory"
        else:
            found[name] = None if _SIZE_VARIES.fullmatch(name) else path.stat().st_size
    return found


def _manifests(written: Path) -> Iterator[tuple[str, Any]]:
    """The parts of every manifest, freed of what is random, and of sizes that torch decides."""
    for path in sorted(written.rglob("manifest-*")):
        data = path.read_bytes()
        magic, version, layout_bytes, state_bytes, rows, sums = _HEAD.unpack_from(data)
        at = _HEAD.size + layout_bytes
        layout, state = data[_HEAD.size : at], json.loads(data[at : at + state_bytes])
        at += state_bytes
        row_bytes = _ROW_BYTES
        if version == _COMMIT_VERSION:
            layout, row_bytes = _table(path, state, rows), _MARK_BYTES
        whole = at + rows * row_bytes + sums * 4 + _DIGEST_BYTES
        assert len(data) == whole, path
        assert type(state.pop("save")) is int
        for file in [*state["files"], state["buffers"], state["extra"]]:
            file["name"] = _plain(file["name"])
        assert re.fullmatch("[0-9a-f]{32}", state["extra"]["digest"])
        state["extra"] |= {"size_bytes": 0, "digest": ""}
        yield path.name, (magic, version, json.loads(layout), state, rows, sums)


def _table(manifest: Path, state: Any, rows: int) -> bytes:
    """The layout in the table that a commit names."""
    data = (manifest.parent / state["table"]["name"]).read_bytes()
    magic, version, layout_bytes, count = _TABLE_HEAD.unpack_from(data)
    assert (magic, version, count) == (b"inf-tabl", _COMMIT_VERSION, rows)
    at = _TABLE_HEAD.size
    assert len(data) == at + layout_bytes + count * _PLACES_BYTES == state["table"]["size_bytes"]
    return data[at : at + layout_bytes]


def _write(name: str, place: Path) -> tuple[Path, list[Run]]:
    """Files that today's code writes for a case, and the runs that are still open."""
    case = CASES[name]
    if case.world == 1:
        written = make_fixtures.write(case, place)
        return written, [make_fixtures.OPEN.pop()] if case.kind == "durable" else []
    place.mkdir()
    on_ranks(make_fixtures.Write(case, place), place / "ranks", case.world)
    return place / "written", []


def _take_tables(tree: Any, manifests: Any) -> None:
    """Take out what commits have since rows are in two parts: versions, tables, and one checksum
    for each section where there was one for each of its pieces."""
    for name in [name for name in tree if "/table-" in name]:
        assert tree.pop(name) > 0
    for name, (magic, version, layout, state, rows, sums) in manifests.items():
        assert version == _COMMIT_VERSION
        assert state.pop("table")
        assert len(state.pop("numbers")) == len(state["files"])
        manifests[name] = (magic, _VERSION, layout, state, rows, sums)


def _take_copies(tree: Any) -> None:
    """Take out the copies of manifests that further drives have by now."""
    for name in [name for name in tree if "/copy-" in name]:
        del tree[name]


def _take_lengths(today: Any, then: Any, manifests_today: Any, manifests_then: Any) -> None:
    """Compare the lengths of a run's own files and take them out, and the list of those in use: no
    format says where a chunk lies, and since parameters no longer move when their states come,
    chunks lie elsewhere; files also have spare ranges."""
    shorter = [name for name, size in then.items() if size is not None and size != today[name]]
    assert shorter
    for name in shorter:
        assert today[name] > 0, name
        today[name] = then[name]
    for _, _, _, state, *_ in [*manifests_today.values(), *manifests_then.values()]:
        assert state.pop("files")


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_today_is_laid_out_alike(name: str, tmp_path: Path) -> None:
    then = unpacked(name, tmp_path)
    today, still_open = _write(name, tmp_path / "today")
    trees, manifests = [], []
    for written in (today, then):
        trees.append(_tree(written))
        manifests.append(dict(_manifests(written)))
    for run in still_open:
        run.handle.close()
    if CASES[name].kind == "durable":
        _take_copies(trees[0])
        _take_tables(trees[0], manifests[0])
    if CASES[name].kind in ("durable", "linked"):
        _take_lengths(*trees, *manifests)
    assert trees[0] == trees[1]
    assert manifests[0] == manifests[1]
    for magic, version, _, state, *_ in manifests[0].values():
        assert (magic, version) == (b"inf-ckpt", _VERSION)
        # The checksums of the native code, which every machine has now.
        assert state["algorithm"] == "crc32c"
    assert len(manifests[0]) == (0 if CASES[name].kind == "export" else CASES[name].world)


@pytest.mark.parametrize("name", ["exact", "bf16", "compact", *IN_RANKS])
def test_what_is_written_today_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    then = unpacked(name, tmp_path)
    today, _ = _write(name, tmp_path / "today")
    for path in sorted(then.glob("data-*")) + sorted(then.glob("buffers-*")):
        found = np.frombuffer((today / path.name).read_bytes(), np.uint8)
        assert np.array_equal(found, np.frombuffer(path.read_bytes(), np.uint8)), path.name
