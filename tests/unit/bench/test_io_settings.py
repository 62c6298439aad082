"""IoSettings: what a policy reads of a measurement, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity._src.config.policy import Policy
from infinity.aio import IoSettings, PoolSpec, SwapFile, open_executor


def test_settings_come_back_from_a_record_a_file_and_a_mapping(tmp_path: Path) -> None:
    settings = IoSettings(2 << 20, 16, {"/mnt/nvme0": (3e9, 2e9)})
    assert IoSettings.load(settings.as_dict()) == settings
    assert (
        IoSettings.load({"schema": "infinity.bench.swap/1", "settings": settings.as_dict()})
        == settings
    )
    file = tmp_path / "io.json"
    file.write_text(json.dumps({"settings": settings.as_dict(), "read_gbps": 3.0}))
    assert IoSettings.load(file) == IoSettings.load(str(file)) == settings
    assert IoSettings.load({}) == IoSettings()
    assert hash(settings) == hash(IoSettings(2 << 20, 16))
    without = IoSettings(depth=16, backend="threads")
    assert without.block_bytes is None
    assert IoSettings.load(json.loads(json.dumps(without.as_dict()))) == without
    assert IoSettings.load({"block_bytes": None}) == IoSettings()


def test_a_policy_takes_every_form(tmp_path: Path) -> None:
    settings = IoSettings(bandwidths={"/mnt/nvme0": (3e9, 2e9)})
    file = tmp_path / "io.json"
    file.write_text(json.dumps(settings.as_dict()))
    for given in (settings, settings.as_dict(), file, str(file)):
        policy = Policy(io=given)
        assert policy.io == policy.io_settings == settings
    assert Policy().io is None
    assert Policy().io_settings == IoSettings()
    assert hash(Policy(io=settings)) is not None


def test_a_block_is_used_with_the_backend_that_it_was_measured_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring = IoSettings(1 << 20, 16, {"/mnt/nvme0": (3e9, 2e9)}, backend="io_uring")
    assert ring.for_backend("io_uring") is ring
    assert Policy(io=ring, io_backend="io_uring").io_settings == ring
    used = Policy(io=ring, io_backend="threads").io_settings
    assert (used.block_bytes, used.depth, used.bandwidths) == (None, 16, ring.bandwidths)
    assert "measured with io_uring and is not used with threads" in caplog.text
    # Without a backend it is for any; without a block there is nothing to leave out.
    assert IoSettings(1 << 20).for_backend("threads").block_bytes == 1 << 20
    assert IoSettings(backend="io_uring").for_backend("threads").block_bytes is None


def test_auto_is_the_backend_that_opens_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")

    def opens() -> str:
        with SwapFile.create(tmp_path) as file:
            executor = open_executor([file], small=PoolSpec(1, 4096), large=PoolSpec(1, 8192))
            executor.close()
            return executor.backend

    for backend in ("io_uring", "threads"):
        kept = IoSettings(1 << 20, backend=backend).for_backend("auto").block_bytes
        assert kept == (1 << 20 if backend == opens() else None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_bytes": 1000}, "block_bytes=1000 must be a multiple of 4096"),
        ({"block_bytes": 2 << 30}, "at most 1 GiB"),
        ({"block_bytes": "1M"}, "block_bytes='1M' must be an integer"),
        ({"backend": "auto"}, "backend='auto' must be None or one of io_uring, threads"),
        ({"backend": 3}, "backend=3"),
        ({"depth": True}, "depth=True must be an integer"),
        ({"depth": 1}, "depth=1 must be 2 to 4096"),
        ({"depth": 5000}, "depth=5000"),
        ({"bandwidths": [1, 2]}, "bandwidths"),
        ({"bandwidths": {"relative": [1.0, 1.0]}}, "absolute"),
        ({"bandwidths": {"/a": [1.0]}}, "two numbers"),
        ({"bandwidths": {"/a": [0.0, 1.0]}}, "above 0"),
        ({"bandwidths": {"/a": [float("nan"), 1.0]}}, "above 0"),
        ({"blocks": 1}, "unknown field blocks"),
        ({"settings": 5}, "a mapping"),
        ({"schema": "infinity.bench.adam/1"}, "infinity.bench.adam/1"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IoSettings.load(given)
    with pytest.raises(ValueError, match=f"^io: .*{message}"):
        Policy(io=given)


def test_a_file_that_cannot_be_read_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--sweep --json"):
        Policy(io=tmp_path / "missing.json")
    (tmp_path / "text").write_text("not json")
    with pytest.raises(ValueError, match="is not JSON"):
        Policy(io=tmp_path / "text")
