"""`infinity checkpoint` from the command line: what is listed, found damaged, exported and
resharded is what was saved."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity as inf
from infinity._src.checkpoint.directory import DirectoryLock, read_generation, read_manifest
from infinity._src.checkpoint.formats.safetensors_writer import INDEX
from infinity._src.checkpoint.reader import Checkpoint, ChunkReader
from infinity._src.checkpoint.reshard import ReshardJob, slice_of
from infinity._src.engine.handle import offload
from infinity._src.memory.flat_layout import plan_flat
from infinity.compat.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from infinity.errors import SwapFullError
from tests import models
from tests.harness import assert_same, one_thread, train

pytest.importorskip("transformers")


from infinity._src.cli.checkpoint import run_checkpoint
from infinity._src.cli.main import main as infinity_main
from tests.unit.cli.commands import run as shown_by


def tied() -> nn.Module:
    """A GPT-2, whose head is its embedding, with a frozen parameter and a persistent buffer."""
    model = models.make(models.gpt2)
    model.register_buffer("seen", torch.arange(3))
    next(
        parameter for name, parameter in model.named_parameters() if name.endswith("ln_f.bias")
    ).requires_grad_(False)
    return model


def trained(chosen: inf.Policy) -> tuple[nn.Module, Any]:
    model = tied()
    offload(model, chosen)
    optimizer = inf.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2
    )
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps, and the export_safetensors of the same model: values, and
    masters."""
    place = tmp_path_factory.mktemp("saved")
    model, optimizer = trained(inf.Policy())
    with one_thread():
        train(model, optimizer, 2)
    inf.save(model, optimizer, place / "ckpt", extra={"epoch": 7}).wait()
    # By the names of the modules, which are all that a checkpoint has.
    inf.export_safetensors(model, place / "values", names="modules")
    inf.export_safetensors(
        model, place / "masters", masters=True, shard_bytes_max="16KiB", names="modules"
    )
    inf.handle(model).close()
    return place


def run(*arguments: str | Path | int, terminal: bool = False) -> tuple[int, str]:
    return shown_by(run_checkpoint, "checkpoint", *arguments, width=400, force_terminal=terminal)


def states_in(directory: Path) -> dict[str, list[bytes]]:
    """The bytes of every section of every parameter."""
    found: dict[str, list[bytes]] = {}
    with Checkpoint.open(directory) as checkpoint:
        reader = ChunkReader(checkpoint)
        for name, saved in checkpoint.params.items():
            parts: list[list[bytes]] = [[] for _ in saved.flat.sections]
            for piece in checkpoint.pieces(saved, 0, saved.entry.numel):
                arrays = reader.get(piece.chunk)
                for s, section in enumerate(saved.flat.sections):
                    parts[s].append(
                        slice_of(section, arrays[s], piece.start, piece.numel).tobytes()
                    )
            found[name] = [b"".join(each) for each in parts]
    return found


def restored(directory: Path, **values: Any) -> tuple[dict[str, torch.Tensor], inf.Restored]:
    """All states of a model that was restored from there."""
    model, optimizer = trained(inf.Policy(**values))
    result = inf.restore(model, optimizer, directory)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in optimizer.param_groups[0]["params"]:
        for key, value in inf.handle(model).optimizer_state(parameter).items():
            found[f"{parameter.infinity_link.param.name}/{key}"] = torch.as_tensor(value).clone()
    inf.handle(model).close()
    return found, result


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "ckpt", tmp_path / "copy"))


def spoil(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0x40
    path.write_bytes(data)


# -- ls --------------------------------------------------------------------------------------------


def test_ls_tells_what_there_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run("ls", saved)
    assert status == 0
    for wanted in (
        "yes",
        "AdamW",
        "exact",
        "SPLIT 2 x FP32",
        "data-00000001.rank0",
        "extra-00000001.rank0",
        "manifest-00000001.rank0",
    ):
        assert wanted in shown, wanted
    assert infinity_main(["checkpoint", "ls", str(saved / "ckpt"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "infinity.checkpoint.ls/1"
    (listed,) = record["checkpoints"]
    (found,) = listed["generations"]
    assert (found["number"], found["step"], found["world"], found["why_not"]) == (1, 2, 1, "")
    assert found["params"] == sum(parameter.numel() for parameter in tied().parameters())
    assert found["disk_bytes"] >= sum(
        path.stat().st_size for path in (saved / "ckpt").glob("data-*")
    )
    assert {file["name"] for file in found["files"]} == {
        path.name for path in (saved / "ckpt").iterdir()
    }


def test_ls_says_why_a_generation_is_not_whole(saved: Path, tmp_path: Path) -> None:
    place = copied(saved, tmp_path)
    (place / "buffers-00000001.rank0").unlink()
    assert run("reshard", saved / "ckpt", tmp_path / "two", "--world", 2)[0] == 0
    (tmp_path / "two" / "manifest-00000001.rank1").unlink()
    status, shown = run("ls", tmp_path)
    assert status == 0
    assert "the manifest of rank 1 is missing" in shown
    assert "generation 1 is not whole: a file of a checkpoint is missing" in shown
    spoil(place / "manifest-00000001.rank0", 200)
    assert "the manifest of rank 0 is damaged" in run("ls", place)[1]


def test_a_directory_without_a_checkpoint_is_a_mistake(tmp_path: Path) -> None:
    for action in (["ls"], ["verify"], ["export"], ["reshard"]):
        rest = {"export": [tmp_path / "out"], "reshard": [tmp_path / "out", "--world", 2]}.get(
            action[0], []
        )
        status, shown = run(*action, tmp_path, *rest)
        assert status == 2, action
        assert "there is no" in shown
    assert list(tmp_path.iterdir()) == []


# -- verify ----------------------------------------------------------------------------------------


def test_verify_reads_everything(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run("verify", saved / "ckpt", terminal=True)
    assert status == 0, shown
    assert "No damage" in shown
    assert "/s" in shown
    assert infinity_main(["checkpoint", "verify", str(saved / "ckpt"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["damage"] == []
    assert record["size_bytes"] == (saved / "ckpt" / "data-00000001.rank0").stat().st_size


def test_verify_names_all_damage_and_what_it_is(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = copied(saved, tmp_path)
    (manifest,) = read_generation(place, 1)
    data = place / "data-00000001.rank0"
    row, other = manifest.rows[0], manifest.rows[-1]
    at = [
        int(row["file_offset"]),
        int(row["file_offset"] + row["section_at"][3]) + 8,
        int(other["file_offset"]) + 4,
    ]
    spoil(data, *at)
    spoil(place / "extra-00000001.rank0", 5)
    assert infinity_main(["checkpoint", "verify", str(place), "--json"]) == 1
    damage = json.loads(capsys.readouterr().out)["damage"]
    assert [each["path"] for each in damage] == [
        str(place / "extra-00000001.rank0"),
        *[str(data)] * 3,
    ]
    for each, offset in zip(damage[1:], at, strict=True):
        assert each["offset"] <= offset < each["offset"] + each["length"]
    assert damage[0]["what"] == "extra"
    first = manifest.layout.flats[0].params[0].name
    assert f"hi of {first}[0:" in damage[1]["what"]
    assert f"moment1 of {first}[" in damage[2]["what"]
    assert manifest.layout.flats[-1].params[0].name in damage[3]["what"]
    status, shown = run("verify", place)
    assert status == 1
    assert "4 places" in shown


def test_in_a_pipe_no_name_is_broken(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = copied(saved, tmp_path)
    spoil(place / "extra-00000001.rank0", 5)
    assert infinity_main(["checkpoint", "verify", str(place)]) == 1
    assert str(place / "extra-00000001.rank0") in capsys.readouterr().out
    assert infinity_main(["checkpoint", "ls", str(place)]) == 0
    shown = capsys.readouterr().out
    assert "generation" in shown
    assert "bfloat16 SPLIT 2 x FP32" in shown


@pytest.mark.parametrize("how", ["cut", "gone", "manifest"])
def test_verify_goes_on_past_what_is_missing(how: str, saved: Path, tmp_path: Path) -> None:
    assert run("reshard", saved / "ckpt", tmp_path / "two", "--world", 2)[0] == 0
    place = tmp_path / "two"
    broken = place / ("manifest-00000001.rank0" if how == "manifest" else "data-00000001.rank0")
    if how == "cut":
        with broken.open("r+b") as file:
            file.truncate(broken.stat().st_size // 2)
    else:
        broken.unlink()
    spoil(place / "data-00000001.rank1", 0)
    status, shown = run("verify", place)
    assert status == 1
    assert {"cut": "was cut short", "gone": "is missing", "manifest": "the manifest of rank 0"}[
        how
    ] in shown
    assert "data-00000001.rank1" in shown
    assert "2 places" in shown


def test_verify_a_durable_run(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    model, optimizer = trained(
        inf.Policy(params="nvme", optim="nvme", nvme=drives, ram="min", durable=True, generations=2)
    )
    with one_thread():
        train(model, optimizer, 2)
    inf.handle(model).close()
    assert run("verify", drives[0])[0] == 0
    assert "yes" in run("ls", drives[0])[1]
    assert run("reshard", drives[0], tmp_path / "out", "--world", 3)[0] == 0
    assert states_in(tmp_path / "out") == states_in(drives[0] / "infinity-run")
    status, shown = run("reshard", tmp_path / "out", drives[0], "--world", 2)
    assert (status, "holds a durable run" in shown) == (2, True)
    (manifest,) = read_generation(drives[0] / "infinity-run", max(
        read_manifest(path).generation for path in (drives[0] / "infinity-run").glob("manifest-*")
    ))  # fmt: skip
    assert run("export", drives[0], tmp_path / "whole")[0] == 0
    # Every reader takes what is damaged in one place from the copy on another drive; verify tells.
    path = drives[0] / "infinity-run" / manifest.name
    kept = path.read_bytes()
    spoil(path, len(kept) // 2)
    assert run("export", drives[0], tmp_path / "by_copy")[0] == 0
    assert files_of(tmp_path / "by_copy") == files_of(tmp_path / "whole")
    weights = get_fp32_state_dict_from_zero_checkpoint(drives[0], tag="infinity-run")
    assert len(weights) > len(load_file(tmp_path / "whole" / "model.safetensors"))  # tied names
    assert run("verify", drives[0])[0] == 1
    path.write_bytes(kept)
    row = manifest.rows[0]
    file = drives[0] / "infinity-run" / manifest.files[row["file"]].name
    spoil(file, int(row["file_offset"] + row["section_at"][1]))
    status, shown = run("verify", drives[0])
    assert status == 1
    assert f"lo of {manifest.layout.flats[0].params[0].name}[0:" in shown


def test_a_checkpoint_without_frozen_parameters_is_listed_verified_resharded_and_exported(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = "transformer.ln_f.bias"
    model, optimizer = trained(inf.Policy())
    inf.restore(model, optimizer, saved / "ckpt")
    inf.save(model, optimizer, tmp_path / "ckpt", frozen=False).wait()
    inf.handle(model).close()
    numel = sum(parameter.numel() for parameter in tied().parameters())
    assert infinity_main(["checkpoint", "ls", str(tmp_path / "ckpt"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"][0]["generations"]
    assert (found["params"], found["left_out"], found["why_not"]) == (numel - 32, 32, "")
    assert f"{numel - 32:,} (and 32 frozen, left out)" in run("ls", tmp_path / "ckpt")[1]
    assert run("verify", tmp_path / "ckpt")[0] == 0
    assert run("reshard", tmp_path / "ckpt", tmp_path / "two", "--world", 2)[0] == 0
    assert states_in(tmp_path / "two") == states_in(tmp_path / "ckpt")
    expected, _ = restored(saved / "ckpt")
    expected[frozen] = tied().state_dict()[frozen]  # that of the model
    for place in ("ckpt", "two"):
        ours, result = restored(tmp_path / place)
        assert any(frozen in note for note in result.notes)
        assert_same(ours, expected)
    status, shown = run("export", tmp_path / "two", tmp_path / "values")
    assert status == 0
    assert f"saved with frozen=False, so {tmp_path / 'values'} lacks {frozen}" in shown
    assert "lacks" not in run("export", saved / "ckpt", tmp_path / "whole")[1]
    values = load_file(saved / "values" / "model.safetensors")
    del values[frozen]
    assert_same(load_file(tmp_path / "values" / "model.safetensors"), values)


# -- export ----------------------------------------------------------------------------------------


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_export_is_what_the_model_exports(saved: Path, tmp_path: Path) -> None:
    assert run("export", saved / "ckpt", tmp_path / "values")[0] == 0
    assert_same(
        load_file(tmp_path / "values" / "model.safetensors"),
        load_file(saved / "values" / "model.safetensors"),
    )
    assert files_of(tmp_path / "values").keys() == files_of(saved / "values").keys()
    status, shown = run(
        "export",
        saved / "ckpt",
        tmp_path / "masters",
        "--masters",
        "--shard-bytes-max",
        "16KiB",
        terminal=True,
    )
    assert status == 0, shown
    names = sorted(files_of(saved / "masters"))
    assert len(names) > 2
    assert sorted(files_of(tmp_path / "masters")) == names
    assert (tmp_path / "masters" / INDEX).read_text() == (saved / "masters" / INDEX).read_text()
    for name in names:
        if name != INDEX:
            assert_same(load_file(tmp_path / "masters" / name), load_file(saved / "masters" / name))


def test_export_rounds_replaces_and_takes_any_ranks(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("reshard", saved / "ckpt", tmp_path / "three", "--world", 3)[0] == 0
    assert run("export", tmp_path / "three", out, "--masters", "--shard-bytes-max", "16KiB")[0] == 0
    assert run("export", tmp_path / "three", out, "--masters", "--dtype", "float16")[0] == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    masters: dict[str, torch.Tensor] = {}
    for path in (saved / "masters").glob("*.safetensors"):
        masters.update(load_file(path))
    wanted = {
        name: value.half() if value.is_floating_point() else value
        for name, value in masters.items()
    }
    assert_same(load_file(out / "model.safetensors"), wanted)
    status, shown = run("export", saved / "ckpt", out, "--shard-bytes-max", "much")
    assert status == 2
    assert "--shard-bytes-max much" in shown


def test_a_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    place = copied(saved, tmp_path)
    spoil(place / "data-00000001.rank0", 100)
    status, shown = run("export", place, tmp_path / "out")
    assert status == 2
    assert "data-00000001.rank0" in shown
    assert list((tmp_path / "out").iterdir()) == []


# -- reshard ---------------------------------------------------------------------------------------


def test_there_and_back_is_the_same(saved: Path, tmp_path: Path) -> None:
    before, place = states_in(saved / "ckpt"), saved / "ckpt"
    for world in (2, 3, 1):
        status, shown = run("reshard", place, tmp_path / f"of{world}", "--world", world)
        assert status == 0, shown
        assert "bit for bit" in shown
        place = tmp_path / f"of{world}"
        assert states_in(place) == before
        assert run("verify", place)[0] == 0
        for manifest in read_generation(place, 1):
            assert (manifest.world, manifest.step) == (world, 2)
            for flat in manifest.layout.flats:
                numels = tuple(entry.numel for entry in flat.params)
                layout = plan_flat(numels, getattr(torch, flat.dtype).itemsize, world)
                assert (flat.shard_numel, layout.offsets) == (
                    layout.shard_numel,
                    tuple(entry.offset for entry in flat.params),
                )
    ours, result = restored(place)
    theirs, original = restored(saved / "ckpt")
    assert_same(ours, theirs)
    assert result == original
    assert result.extra == {"epoch": 7}


@pytest.mark.parametrize("state", ["bf16", "compact"])
def test_another_state_is_what_restoring_makes_of_it(
    state: str, saved: Path, tmp_path: Path
) -> None:
    status, shown = run(
        "reshard", saved / "ckpt", tmp_path / "out", "--world", 2, "--state", state, terminal=True
    )
    assert status == 0, shown
    ours, result = restored(tmp_path / "out", state=state)
    theirs, original = restored(saved / "ckpt", state=state)
    assert_same(ours, theirs)
    assert result.rounded == ""
    assert original.rounded
    assert original.rounded in shown
    sizes = [
        sum(path.stat().st_size for path in place.glob("data-*"))
        for place in (tmp_path / "out", saved / "ckpt")
    ]
    assert sizes[0] < sizes[1]


def test_reshard_leaves_all_or_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = files_of(saved / "ckpt")
    for arguments, wanted in (
        ((saved / "ckpt", "--world", 2), "already has a checkpoint"),
        ((tmp_path / "out", "--world", 0), "--world 0"),
        ((tmp_path / "out", "--world", 2, "--generation", 9), "manifest-00000009"),
    ):
        status, shown = run("reshard", saved / "ckpt", *arguments)
        assert status == 2
        assert wanted in shown
    (tmp_path / "busy").mkdir()
    held = DirectoryLock(tmp_path / "busy")  # as a save into it holds it
    status, shown = run("reshard", saved / "ckpt", tmp_path / "busy", "--world", 2)
    assert (status, "is running" in shown, list((tmp_path / "busy").iterdir())) == (2, True, [])
    held.release()
    place = copied(saved, tmp_path)
    with Checkpoint.open(place) as checkpoint:
        spoil(place / "data-00000001.rank0", int(checkpoint.manifests[0].rows[-1]["file_offset"]))
    assert run("reshard", place, tmp_path / "out", "--world", 2)[0] == 2
    assert list((tmp_path / "out").iterdir()) == []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=4096))
    with (
        Checkpoint.open(saved / "ckpt") as checkpoint,
        pytest.raises(SwapFullError, match="4096 are free"),
    ):
        ReshardJob(checkpoint, world=2).write(tmp_path / "out")
    assert files_of(saved / "ckpt") == whole


def test_the_extra_of_ranks_that_are_no_more_is_told(saved: Path, tmp_path: Path) -> None:
    assert run("reshard", saved / "ckpt", tmp_path / "three", "--world", 3)[0] == 0
    shown = run("reshard", tmp_path / "three", tmp_path / "one", "--world", 1)[1]
    assert "the extra state of ranks 1, 2 is omitted" in shown
    names = [
        path.name
        for path in itertools.chain((tmp_path / "three").iterdir(), (tmp_path / "one").iterdir())
    ]
    assert sum(name.startswith("extra-") for name in names) == 4
