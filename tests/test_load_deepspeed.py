"""Runs of DeepSpeed that infinity continues: states bit for bit, and the losses of DeepSpeed's own
later steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import infinity as inf
from infinity._src.checkpoint.formats.deepspeed import Pieces, ShardedCheckpoint
from infinity._src.checkpoint.formats.deepspeed_run import notes_on
from tests import forks
from tests.data.deepspeed import make
from tests.harness import assert_same, states_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = 2e-7
"""Relative difference of losses: two units in the last place of fp32. DeepSpeed adds up ranks in
another order."""
READ = [name for name, case in make.CASES.items() if case.offload != "nvme" and not case.muon]
MUON = [name for name, case in make.CASES.items() if case.muon]


class Coming:
    """A new model and its optimizer, to resume a case."""

    def __init__(self, name: str, place: Path, **values: Any) -> None:
        self.case = make.CASES[name]
        # Ranks find it unpacked.
        there = place / name
        self.directory = there if there.is_dir() else make.unpack(name, place)
        torch.manual_seed(5)
        self.model: nn.Module = make.Net().to(DTYPES[self.case.dtype])
        inf.offload(self.model, inf.Policy(**(values or {"params": "cpu", "optim": "cpu"})))
        # The betas of the cases: one checkpoint has no hyper-parameters, so these stay.
        self.opt: Any = (
            inf.Muon(halves_of(self.model), lr=1.0, eps=1e-5)
            if self.case.muon
            else inf.AdamW(make.groups_of(self.model), lr=1.0, betas=(0.8, 0.95))
        )
        self.expected = json.loads((self.directory / "expected.json").read_text())

    def states(self) -> dict[str, dict[str, Any]]:
        """Every state, and close."""
        try:
            return states_of(self.model)
        finally:
            inf.handle(self.model).close()

    def losses(self, scaler_state: dict[str, Any] | None) -> tuple[list[float], list[float]]:
        """Train on as the case did, all its ranks in one process. Returns losses and scales."""
        scaler = torch.amp.GradScaler("cpu", enabled=scaler_state is not None)
        if scaler_state is not None:
            scaler.load_state_dict(scaler_state)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        losses, scales = [], []
        for step, lr in enumerate(self.expected["lr"], start=make.SAVED_AT):
            scales.append(scaler.get_scale())
            for group in self.opt.param_groups:
                group["lr"] = lr
            ranks = range(self.case.ranks)
            loss = sum(self.model(make.tokens(step, rank)) for rank in ranks) / len(ranks)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.unscale_(self.opt)
            if not self.case.muon:
                nn.utils.clip_grad_norm_(trained, 1.0)
            scaler.step(self.opt)
            scaler.update()
            self.opt.zero_grad()
        inf.handle(self.model).close()
        return losses, scales


def halves_of(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of the cases, cut into matrices and others as DeepSpeed does."""
    decayed, others = make.groups_of(model)
    embed, *matrices = decayed["params"]
    return [{**decayed, "params": matrices}, {**decayed, "params": [embed]}, others]


def expected_states(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Read the states that DeepSpeed's own functions gave."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(directory / "expected.safetensors").items():
        state, _, name = key.partition(":")
        found.setdefault(name, {})["master" if state == "fp32" else state] = value
    return found


@pytest.mark.parametrize("name", READ)
def test_a_run_goes_on_with_the_states_and_the_losses_of_deepspeed(
    name: str, tmp_path: Path
) -> None:
    coming = Coming(name, tmp_path)
    run = inf.load_deepspeed(coming.model, coming.directory, opt=coming.opt)
    assert run == ((), ())
    skipped = 1 if coming.case.scale_power == 12 else 0
    assert (run.step, run.skipped_steps, run.world) == (3, skipped, coming.case.ranks)
    assert run.stage == coming.case.stage
    assert run.client_state == {"epoch": 7, "seen": [1.5, "text"]}
    assert run.lr_scheduler == {"last_batch_iteration": 2 - skipped}
    assert run.rounded == ""
    expected = expected_states(coming.directory)
    frozen = expected.pop("frozen.weight", None)
    states = states_of(coming.model)
    for parameter, wanted in expected.items():
        assert states[parameter].pop("step") == 3 - skipped
        assert_same(wanted, states[parameter])
    values = coming.model.state_dict()
    assert values["scale"] == 2
    assert torch.equal(values["head.weight"], values["embed.weight"])
    if frozen is not None:
        assert torch.equal(values["frozen.weight"].float(), frozen["master"])
    if coming.case.zero.get("elastic_checkpoint"):
        assert "elastic and has no hyper-parameters" in run.notes[0]
    else:
        assert run.notes == ()
        for group, decay in zip(coming.opt.param_groups, (0.1, 0.0), strict=True):
            given = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            lr = coming.expected["lr"][0]
            assert given == {"lr": lr, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": decay}
    scaler_state = run.grad_scaler_state()
    assert (scaler_state is not None) == (coming.case.dtype == "fp16")
    if coming.case.zero.get("elastic_checkpoint"):
        for group, decay in zip(coming.opt.param_groups, (0.1, 0.0), strict=True):
            group["weight_decay"] = decay
    losses, scales = coming.losses(scaler_state)
    assert losses == pytest.approx(coming.expected["losses"], rel=TOLERANCE)
    # After an overflow DeepSpeed waits one good step more than torch before the scale grows.
    assert scales[:3] == coming.expected["scale"][:3]


@pytest.mark.parametrize("name", MUON)
def test_a_run_of_muon_goes_on_with_its_momenta(name: str, tmp_path: Path) -> None:
    coming = Coming(name, tmp_path)
    run = inf.load_deepspeed(coming.model, coming.directory, opt=coming.opt)
    assert (run, run.rounded, run.notes) == (((), ()), "", ())
    states, expected = states_of(coming.model), expected_states(coming.directory)
    for parameter in expected.keys() - {"frozen.weight"}:
        assert states[parameter].pop("step") == 3
        assert_same(expected[parameter], states[parameter])
    matrices, embed, others = coming.opt.param_groups
    assert (matrices["momentum"], matrices["eps"]) == (0.9, 1e-5)
    for group, decay in ((embed, 0.1), (others, 0.0)):
        given = {key: group[key] for key in ("betas", "adam_eps", "weight_decay")}
        assert given == {"betas": (0.8, 0.95), "adam_eps": 1e-7, "weight_decay": decay}
    losses, _ = coming.losses(None)
    wanted = coming.expected["losses"]
    assert losses[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    # Newton-Schulz rounds to bf16 after other operations.
    assert losses == pytest.approx(wanted, rel=5e-3)


def test_another_iteration_of_newton_schulz_is_noted() -> None:
    methods = ("gram", "standard", "gram")
    (note,) = notes_on([{"ns_method": method} for method in methods] + [{}], "there")
    assert note.startswith("there was computed with ns_method='gram'")


def test_losses_tell_a_run_without_its_moments(tmp_path: Path) -> None:
    """The tolerance above is narrow enough: without the optimizer's states the losses differ by
    more."""
    coming = Coming("zero2_cpu", tmp_path)
    run = inf.load_deepspeed(coming.model, coming.directory)
    assert (run.stage, run.notes) == (2, ())
    losses, _ = coming.losses(None)
    assert losses[0] == pytest.approx(coming.expected["losses"][0], rel=TOLERANCE)
    assert losses[1] != pytest.approx(coming.expected["losses"][1], rel=1e-3)


@pytest.mark.parametrize(
    ("state", "says"), [("bf16", "moments to bf16"), ("compact", "moments to 8 bits")]
)
def test_other_state_formats_round_as_they_say(state: str, says: str, tmp_path: Path) -> None:
    coming = Coming("zero3_cpu", tmp_path, params="cpu", optim="cpu", state=state)
    run = inf.load_deepspeed(coming.model, coming.directory, opt=coming.opt)
    assert says in run.rounded
    losses, _ = coming.losses(None)
    assert losses == pytest.approx(coming.expected["losses"], rel=5e-3)


def test_on_nvme_it_is_the_same_bits(tmp_path: Path) -> None:
    found = []
    for values in ({}, {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": tmp_path}):
        coming = Coming("zero3_cpu", tmp_path, **values)
        inf.load_deepspeed(coming.model, coming.directory, opt=coming.opt)
        found.append(coming.states())
    assert_same(*found)


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path: Path) -> None:
    coming = Coming("zero2_cpu", tmp_path)
    handle = inf.handle(coming.model)
    before = states_of(coming.model)
    handle.close()
    one_group = Coming("zero2_cpu", tmp_path / "one")
    inf.handle(one_group.model).close()
    torch.manual_seed(5)
    model = inf.offload(make.Net().bfloat16(), inf.Policy(params="cpu", optim="cpu"))
    opt = inf.AdamW([param for param in model.parameters() if param.requires_grad])
    with pytest.raises(ValueError, match=r"embed\.weight and blocks\.0\.bias are in one parameter"):
        inf.load_deepspeed(model, coming.directory, opt=opt)
    assert_same(
        {name: state["master"] for name, state in before.items()},
        {name: state["master"] for name, state in states_of(model).items()},
    )
    inf.handle(model).close()
    torch.manual_seed(5)
    model = inf.offload(make.Net().bfloat16(), inf.Policy(params="cpu", optim="cpu"))
    lion = inf.Lion(make.groups_of(model))
    with pytest.raises(ValueError, match=r"unexpected: blocks\.0\.bias: exp_avg_sq"):
        inf.load_deepspeed(model, coming.directory, opt=lion)
    run = inf.load_deepspeed(model, coming.directory, opt=lion, strict=False)
    assert "norm.bias: exp_avg_sq" in run.unexpected
    inf.handle(model).close()


# -- splits over ranks -----------------------------------------------------------------------------

SHAPES = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(SHAPES, min_size=1, max_size=3),
    ranks=st.integers(1, 5),
    stage=st.sampled_from([1, 2, 3]),
    lean=st.booleans(),
    aligned=st.booleans(),
    momenta=st.sampled_from(["none", "cut", "whole"]),
)
def test_any_split_over_ranks_comes_together(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[tuple[int, ...]]],
    ranks: int,
    stage: int,
    lean: bool,
    aligned: bool,
    momenta: str,
) -> None:
    folder = tmp_path_factory.mktemp("split")
    values = {
        f"g{index}.p{at}": torch.randn(shape)
        for index, group in enumerate(groups)
        for at, shape in enumerate(group)
    }
    whole = momenta == "whole" and stage < 3
    split = Split(groups, ranks, lean=lean, aligned=aligned and stage < 3, whole=whole)
    split.write(folder, values, stage, muon=momenta != "none")
    source = ShardedCheckpoint(folder)
    try:
        for name, value in values.items():
            assert torch.equal(source.read(name), value)
            moments = {
                state: each for state, each in source.states[name].items() if state != "step"
            }
            of_muon = momenta != "none" and name.startswith("g0.")
            wanted = {"momentum_buffer": 4} if of_muon else {"exp_avg": 2, "exp_avg_sq": 3}
            assert moments.keys() == wanted.keys()
            for state, factor in wanted.items():
                pieces = moments[state]
                assert isinstance(pieces, Pieces)
                assert torch.equal(pieces.read(), value * factor)
            assert of_muon or source.states[name]["step"] == 10 + int(name[1])
            assert source.group_of[name] == int(name[1])
        source.verify({"exp_avg", "exp_avg_sq", "momentum_buffer"}, 0, 1)
    finally:
        source.close()


@dataclasses.dataclass(frozen=True)
class Split:
    """Parameters of groups on ranks, laid out as DeepSpeed does. whole: each rank has the whole
    momenta of the parameters of which it has a part."""

    groups: list[list[tuple[int, ...]]]
    ranks: int
    lean: bool
    aligned: bool
    whole: bool = False

    def write(
        self, folder: Path, values: dict[str, torch.Tensor], stage: int, *, muon: bool = False
    ) -> None:
        """Write the files of a checkpoint. muon: the first group's parameters have momenta."""
        shapes = [
            {f"g{index}.p{at}": torch.Size(shape) for at, shape in enumerate(group)}
            for index, group in enumerate(self.groups)
        ]
        hyper = [{"lr": 0.1, "params": [index]} for index in range(len(shapes))]
        model = {
            "module": {}, "buffer_names": [], "param_shapes": shapes, "shared_params": {},
            "global_steps": 20, "skipped_steps": 0, "dp_world_size": self.ranks,
        }  # fmt: skip
        parts = [
            self._stage_3(shape, values) if stage == 3 else self._flat(shape, values)
            for shape in shapes
        ]
        for rank in range(self.ranks):
            states = {
                index: {
                    "step": torch.tensor(10.0 + index),
                    "exp_avg": part[rank] * 2,
                    "exp_avg_sq": part[rank] * 3,
                }
                for index, (part, _) in enumerate(parts)
            }
            if muon:
                momentum = self._momenta(shapes[0], values, parts[0][0], rank)
                states[0] = {"momentum_buffer": momentum * 4} if momentum.numel() else {}
            held = [self._without(part[rank], rank, needed) for part, needed in parts]
            inner = {"state": states, "param_groups": hyper}
            root: dict[str, Any] = {"zero_stage": stage}
            if stage == 3:
                whole = [part[rank] for part, _ in parts]
                root |= {"optimizer_state_dict": inner, "fp32_flat_groups": whole}
                root["partition_count"] = self.ranks
                torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            else:
                root |= {"base_optimizer_state": inner, "single_partition_of_fp32_groups": held}
                root["partition_count"] = [self.ranks] * len(shapes)
                if self.aligned:
                    root["param_alignment_paddings"] = [self._gaps(shape) for shape in shapes]
                torch.save(model, folder / "mp_rank_00_model_states.pt")
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": root}, folder / name)

    def _gaps(self, shapes: dict[str, torch.Size]) -> list[int]:
        gaps, at = [], 0
        for index, shape in enumerate(shapes.values()):
            at += shape.numel()
            last = index == len(shapes) - 1
            gaps.append(-at % 8 if self.aligned and not last else 0)
            at += gaps[-1]
        return gaps

    def _flat(
        self, shapes: dict[str, torch.Size], values: dict[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], int]:
        """The partitions of a group, and the elements that are no padding."""
        pieces = []
        for name, gap in zip(shapes, self._gaps(shapes), strict=True):
            pieces += [values[name].reshape(-1), torch.zeros(gap)]
        flat = torch.cat(pieces)
        padding = torch.zeros(-flat.numel() % (2 * self.ranks))
        return list(torch.cat([flat, padding]).chunk(self.ranks)), flat.numel()

    def _momenta(
        self,
        shapes: dict[str, torch.Size],
        values: dict[str, torch.Tensor],
        partitions: list[torch.Tensor],
        rank: int,
    ) -> torch.Tensor:
        if not self.whole:
            return partitions[rank]
        size, start, found = partitions[0].numel(), 0, [torch.empty(0)]
        for name, gap in zip(shapes, self._gaps(shapes), strict=True):
            elements = range(start, start + values[name].numel())
            if any(element // size == rank for element in elements):
                found.append(values[name].reshape(-1))
            start += len(elements) + gap
        return torch.cat(found)

    def _stage_3(
        self, shapes: dict[str, torch.Size], values: dict[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], int]:
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        for name in shapes:
            flat = values[name].reshape(-1)
            padded = torch.cat([flat, torch.zeros(-flat.numel() % self.ranks)])
            for mine, part in zip(parts, padded.chunk(self.ranks), strict=True):
                mine.append(part)
        return [torch.cat(mine) for mine in parts], 0

    def _without(self, part: torch.Tensor, rank: int, needed: int) -> torch.Tensor:
        """A partition of masters without its padding, if that is left out."""
        return part[: max(0, needed - rank * part.numel())].clone() if self.lean else part


# -- memory ----------------------------------------------------------------------------------------

PEAK = """
import re, sys
from pathlib import Path
import torch
import infinity as inf
from tests.test_load_deepspeed import Split

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p = torch.nn.ParameterList(torch.zeros(1 << 20) for _ in range(12))

folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = inf.offload(Wide().bfloat16(), inf.Policy(params="cpu", optim="cpu"))
opt = inf.AdamW(model.parameters())
def resident(name):
    text = Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+) kB", text)[1]) << 10
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
assert inf.load_deepspeed(model, folder, opt=opt) == ((), ())
print(resident("VmHWM") - before)
"""


def test_a_few_tensors_are_in_memory_and_not_the_checkpoint(tmp_path: Path) -> None:
    group = [(1 << 20,)] * 12
    shapes = {f"g0.p{at}": torch.full(shape, float(at)) for at, shape in enumerate(group)}
    Split([group], 2, lean=True, aligned=False).write(tmp_path, shapes, 2)
    # The names of a ParameterList.
    path = tmp_path / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    model["param_shapes"] = [{f"p.{at}": torch.Size(shape) for at, shape in enumerate(group)}]
    torch.save(model, path)
    size_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    done = forks.run_code(PEAK, tmp_path)
    assert done.returncode == 0, done.stderr
    largest = 4 << 20
    assert size_bytes > 30 * largest
    # The tensor, its fp32 copy, a chunk with its sections, and what Python takes.
    assert int(done.stdout) < 8 * largest
