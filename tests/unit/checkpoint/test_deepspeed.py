"""Defects of DeepSpeed's checkpoints: each is named, and nothing in the files is run."""

from __future__ import annotations

import argparse
import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity._src.checkpoint.formats.deepspeed import (
    DeepSpeedCheckpoint,
    DeepSpeedStates,
    open_deepspeed,
)
from infinity._src.checkpoint.formats.safe_pickle import record_class
from tests.data.deepspeed import make

OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
OTHER_OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
WHOLE_MODEL = "mp_rank_00_model_states.pt"
UNIVERSAL = f"{make.TAG}_universal"

Change = Callable[[Any], object]


def opened(directory: Path) -> DeepSpeedCheckpoint:
    """Open and check, as a load does before it writes."""
    source = open_deepspeed(directory, None)
    try:
        DeepSpeedStates(source)
        source.verify({"exp_avg", "exp_avg_sq"}, 0, 1)
    finally:
        source.close()
    return source


def resaved(path: Path, change: Change) -> Path:
    """Change one file. Returns the directory of the checkpoint."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    stand_ins: list[Any] = [(record_class(name), name) for name in names]
    with torch.serialization.safe_globals(stand_ins):
        value = torch.load(path, weights_only=True)
    for states in (value, value.get("optimizer_state_dict", {})):
        # Replace the stand-ins of DeepSpeed's classes by plain values, which can be saved.
        if "zero_stage" in states:
            stage = states["zero_stage"].args[0]
            states.update(zero_stage=stage, loss_scaler=None, param_slice_mappings=None)
    change(value)
    torch.save(value, path)
    return path.parents[1]


def of_states(change: Change) -> Change:
    """Return a change of the part of an optimizer's file that DeepSpeed wrote."""
    return lambda value: change(value["optimizer_state_dict"])


def test_names_of_shared_weights_are_all_there(tmp_path: Path) -> None:
    source = opened(make.unpack("zero3_cpu", tmp_path))
    assert sorted(source.names()) == sorted(
        ["embed.weight", "head.weight", "frozen.weight", "norm.weight", "norm.bias", "scale"]
        + [f"blocks.{index}.{name}" for index in range(2) for name in ("weight", "bias")]
    )
    assert torch.equal(source.read("head.weight"), source.read("embed.weight"))
    assert source.shape("head.weight") == (10, 7)
    assert source.dtype("scale").is_floating_point
    source.close()


STAGE_3: list[tuple[str, Change, str]] = [
    (OPTIMIZER, of_states(lambda v: v["fp32_flat_groups"].pop()), "offloaded to NVMe"),
    (OPTIMIZER, of_states(lambda v: v.update(fp32_flat_groups=[torch.empty(0)])), "NVMe"),
    (OPTIMIZER, of_states(lambda v: v.pop("fp32_flat_groups")), "KeyError.*zero_to_fp32"),
    (OPTIMIZER, of_states(lambda v: v.update(fp32_flat_groups=["x"])), "not a str"),
    (
        OPTIMIZER,
        of_states(lambda v: v["optimizer_state_dict"]["state"][0].update(exp_avg=torch.ones(3))),
        r"holds 3 elements of exp_avg of sub-group 0.*moments are lost",
    ),
    (
        OTHER_OPTIMIZER,
        of_states(lambda v: v["optimizer_state_dict"]["state"][0].update(step=99)),
        "step of sub-group 0, unlike another rank's file",
    ),
    (
        OPTIMIZER,
        of_states(lambda v: v["optimizer_state_dict"].update(state={})),
        "has no optimizer states, as before the first update",
    ),
    (OPTIMIZER, of_states(lambda v: v.update(zero_stage=7)), "of ZeRO stage 3, 7|7, 3"),
    (
        OPTIMIZER,
        of_states(lambda v: v.update(partition_count=4)),
        "written by 4 ranks, but has files of 2",
    ),
    (OPTIMIZER, lambda v: v.clear(), "KeyError"),
    (
        OPTIMIZER,
        of_states(lambda v: v.update(ds_zero_partition_groups=[1])),
        "split its experts over the ranks",
    ),
    (OPTIMIZER, lambda v: v["ds_config"]["zero_optimization"].update(zenflow={"a": 1}), "ZenFlow"),
    (MODEL, lambda v: v.pop("param_shapes"), "KeyError"),
    (MODEL, lambda v: v["param_shapes"].append({"more": (2, "x")}), "expected a shape"),
    (MODEL, lambda v: v["shared_params"].update({"head.weight": "nowhere"}), "KeyError.*nowhere"),
    (MODEL, lambda v: v["module"].update(scale="x"), "not a str"),
    (MODEL, lambda v: v["param_shapes"].append({"more": torch.Size([4])}), "offloaded to NVMe"),
    (
        MODEL,
        lambda v: v["frozen_param_fragments"].update({"frozen.weight": torch.ones(1)}),
        "a part of frozen.weight",
    ),
    (
        MODEL,
        lambda v: v.update(args=argparse.Namespace(a=1)),
        r"names argparse\.Namespace, which such a file does not need.*zero_to_fp32",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), STAGE_3)
def test_what_is_wrong_in_stage_3_is_named(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    directory = make.unpack("zero3_cpu", tmp_path)
    with pytest.raises(ValueError, match=message):
        opened(resaved(directory / make.TAG / name, change))


STAGES_1_AND_2: list[tuple[str, Change, str]] = [
    (
        OTHER_OPTIMIZER,
        of_states(lambda v: v["single_partition_of_fp32_groups"].reverse()),
        "holds partitions of 84, 14 elements of group 0, which has 168",
    ),
    (
        OPTIMIZER,
        of_states(lambda v: v["base_optimizer_state"]["state"][1].update(exp_avg=torch.ones(2))),
        "holds partitions of 2, 14 elements of exp_avg, which has 28",
    ),
    (
        OPTIMIZER,
        of_states(lambda v: v["base_optimizer_state"]["state"][1].update(exp_avg=torch.ones(7, 2))),
        "not a vector",
    ),
    (
        OPTIMIZER,
        of_states(lambda v: v["param_alignment_paddings"][0].pop()),
        "as padding of 3 parameters",
    ),
    (OPTIMIZER, of_states(lambda v: v.update(partition_count=[2, 1])), "was written by 1 ranks"),
    (
        OPTIMIZER,
        of_states(lambda v: v["base_optimizer_state"]["state"][1].update(step="x")),
        "step of a group is a str",
    ),
    (WHOLE_MODEL, lambda v: v["param_shapes"][0].pop("embed.weight"), "padding of 2 parameters"),
    (WHOLE_MODEL, lambda v: v.update(param_shapes=None), "TypeError"),
    (WHOLE_MODEL, lambda v: v.update(global_steps=-1), "a count is a int"),
]


@pytest.mark.parametrize(("name", "change", "message"), STAGES_1_AND_2)
def test_what_is_wrong_in_stages_1_and_2_is_named(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    directory = make.unpack("zero2_cpu", tmp_path)
    with pytest.raises(ValueError, match=message):
        opened(resaved(directory / make.TAG / name, change))


def test_hyper_parameters_that_nothing_here_computes_with_are_refused(tmp_path: Path) -> None:
    from infinity._src.checkpoint.formats.deepspeed_run import match_groups
    from tests.test_load_deepspeed import Coming

    coming = Coming("zero2_one_rank", tmp_path)
    group_of = {"embed.weight": 0}
    for value, message in (
        ({"amsgrad": True}, "amsgrad=True, which AdamW does not"),
        ({"bias_correction": False}, "bias_correction=False"),
        ({"decoupled_weight_decay": False, "weight_decay": 0.1}, "decoupled_weight_decay=False"),
        ({"lr": -1.0}, r"lr=-1\.0 is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            match_groups(coming.opt, [value], group_of, "there")
    taken = match_groups(
        coming.opt,
        [{"decoupled_weight_decay": False, "weight_decay": 0.0, "initial_lr": 0.5, "name": "x"}],
        group_of,
        "there",
    )
    assert taken == [{"weight_decay": 0.0, "initial_lr": 0.5}, {}]
    coming.states()


UNIVERSAL_FILES: list[tuple[str, str, Change, str]] = [
    ("zero2", "zero/norm.bias/exp_avg.pt", lambda v: v.update(param="x"), "not a str"),
    ("zero2", "zero/optimizer_state.pt", lambda v: v.pop("param_groups"), "KeyError"),
    (
        "zero2",
        WHOLE_MODEL,
        lambda v: v["ds_config"]["zero_optimization"].update(round_robin_gradients=True),
        "round_robin_gradients.*Load the original checkpoint",
    ),
    (
        "zero2",
        WHOLE_MODEL,
        lambda v: v["param_shapes"].append({"../../x": torch.Size([1])}),
        "a path is refused",
    ),
    (
        "zero3",
        "zero/optimizer_state.pt",
        lambda v: v["optimizer_state_dict"]["state"][0].update(step=None),
        "is a NoneType",
    ),
]


@pytest.mark.parametrize(("stage", "name", "change", "message"), UNIVERSAL_FILES)
def test_what_is_wrong_in_a_universal_one_is_named(
    stage: str, name: str, change: Change, message: str, tmp_path: Path
) -> None:
    directory = make.unpack(f"universal_{stage}", tmp_path)
    resaved(directory / UNIVERSAL / name, change)
    with pytest.raises(ValueError, match=message):
        opened(directory)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file `latest`"):
        open_deepspeed(tmp_path, None)
    directory = make.unpack("zero3_cpu", tmp_path)
    saved = directory / make.TAG
    with pytest.raises(FileNotFoundError, match="has no folder global_step4"):
        open_deepspeed(directory, "global_step4")
    for tag in ("../saved", "/", "..", ""):
        with pytest.raises(ValueError, match="not a path"):
            open_deepspeed(directory, tag)
    (saved / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match="of 2 ranks and model states of 1"):
        opened(directory)
    (saved / OPTIMIZER).rename(saved / OPTIMIZER.replace("rank_0_", "rank_7_"))
    with pytest.raises(FileNotFoundError, match=r"of ranks \[1, 7\]"):
        opened(directory)
    (saved / OPTIMIZER.replace("rank_0_", "rank_7_")).rename(
        saved / OPTIMIZER.replace("mp_rank_00", "mp_rank_01")
    )
    with pytest.raises(ValueError, match="model-parallel"):
        opened(directory)
    (saved / OPTIMIZER.replace("mp_rank_00", "mp_rank_01")).unlink()
    (saved / "layer_03-model_states.pt").touch()
    with pytest.raises(ValueError, match="pipeline parallelism or DeepSpeed's experts"):
        opened(directory)
    universal = make.unpack("universal_zero2", tmp_path)
    (universal / UNIVERSAL / "zero" / "norm.bias" / "fp32.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"norm\.bias has no fp32\.pt"):
        opened(universal)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / WHOLE_MODEL).touch()
    with pytest.raises(ValueError, match="of a run with stage 0"):
        open_deepspeed(tmp_path / "plain", None)


def test_states_on_nvme_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"168 fp32 weights.*moments are lost\. Save from a run whose optimizer"
    ):
        opened(make.unpack("zero3_nvme", tmp_path))


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", [OPTIMIZER, MODEL])
def test_a_hostile_file_runs_nothing(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    directory = make.unpack("zero3_cpu", tmp_path)
    path = directory / make.TAG / name
    with pytest.raises(ValueError, match=rf"{name} is refused: .*(posix|os)\.system"):
        opened(resaved(path, lambda v: v.update(x=Bomb(f"touch {mark}"))))
    assert not mark.exists()
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=f"{name} is refused: it is no zip.*cut short"):
        opened(directory)


JUNK: list[Any] = [
    None, True, -1, 1 << 70, 0.5, float("nan"), "x", b"x", [], [1], {}, {"x": 1}, {0: "x"}, (),
    torch.ones(2), torch.tensor(3), torch.ones(2, 2, dtype=torch.int64), torch.Size([1 << 40]),
    "\0", ["abc"], {"": None}, {"../x": torch.Size([1])},
]  # fmt: skip


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container inside a value, once with each of its keys."""
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places_in(each)


@pytest.mark.parametrize("name", ["zero2_cpu", "zero3_cpu", "universal_zero2", "universal_zero3"])
def test_junk_anywhere_is_an_error_that_names_the_place_or_nothing(
    name: str, tmp_path: Path
) -> None:
    directory = make.unpack(name, tmp_path)
    (directory / "expected.safetensors").unlink()
    draw = random.Random(name)
    errors = 0
    for path in sorted(directory.rglob("*rank_0*.pt")) + sorted(directory.rglob("*state.pt")):
        whole = path.read_bytes()
        resaved(path, lambda _: None)
        plain = torch.load(path, weights_only=True)
        count = len(list(places_in(plain)))
        for index in draw.sample(range(count), min(count, 16)):
            spoiled = copy.deepcopy(plain)
            container, key = list(places_in(spoiled))[index]
            container[key] = draw.choice(JUNK)
            torch.save(spoiled, path)
            try:
                opened(directory)
            except (ValueError, OSError) as error:
                errors += 1
                text = str(error)
                if str(directory) not in text:
                    raise
        path.write_bytes(whole)
    opened(directory)
    assert errors > 3


def test_every_flipped_byte_of_the_states_is_found(tmp_path: Path) -> None:
    directory = make.unpack("zero2_one_rank", tmp_path)
    path = directory / make.TAG / OPTIMIZER
    source = open_deepspeed(directory, None)
    stored = list(source._stored({"exp_avg", "exp_avg_sq"}))
    source.close()
    data = path.read_bytes()
    places = {
        each.file._members[each.member].offset + 5 for each in stored if each.file.path == path
    }
    assert len(places) == 6
    for at in places:
        path.write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r"optim_states\.pt is damaged: .*CRC-32.*copy the"):
            opened(directory)
    path.write_bytes(data)
    opened(directory)
