"""torchtitan's own Trainer with an offloaded Llama 3, on the CPU: against itself with FSDP.

torchtitan wants packages that other trainers' versions exclude, so it has an environment of its
own: `pip install --no-deps torchtitan torchdata torch_checkpointing tyro spmd_types ...`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity as inf
from infinity._src.kernels.newton_schulz import product_dtype
from tests.distributed.ranks import on_ranks

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.integrations

from tests.integrations import titan  # noqa: E402


def policy(place: Path) -> inf.Policy:
    return inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min")


def own_losses(found: Any) -> list[float]:
    with titan.built(found) as trainer:
        return titan.losses_of(trainer)


def losses(place: Path, found: Any) -> list[float]:
    with titan.built(titan.offloaded(found, policy(place))) as trainer:
        assert inf.offloaded_modules(trainer.model_parts[0]) == trainer.model_parts
        return titan.losses_of(trainer)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "clipping": {"max_norm": 0.1},
    "chunked loss": {"chunked": True},
    "tied": {"tied": True, "chunked": True},
    "full checkpointing": {"activations": titan.FullAC.Config()},
    "selective checkpointing": {"activations": titan.SelectiveAC.Config()},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_torchtitan(case: str, tmp_path: Path) -> None:
    """Up to the rounding of torch's AdamW and of the norm."""
    expected = own_losses(titan.config(tmp_path, **CASES[case]))
    assert len(expected) == titan.STEPS
    assert losses(tmp_path, titan.config(tmp_path, **CASES[case])) == pytest.approx(
        expected, rel=2e-6
    )


@pytest.mark.parametrize("case", ["clipping", "accumulation"])
def test_updates_that_run_beside_backward(case: str, tmp_path: Path) -> None:
    """With two generations: torchtitan marks no micro-batches, and always takes a norm."""
    beside = inf.Policy(
        params="nvme", optim="nvme", nvme=tmp_path, ram="min", update="backward", generations=2
    )
    with titan.built(titan.offloaded(titan.config(tmp_path, **CASES[case]), beside)) as trainer:
        found = titan.losses_of(trainer)
    assert found == losses(tmp_path, titan.config(tmp_path, **CASES[case]))


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = losses(tmp_path, titan.config(tmp_path / "whole"))
    first = losses(tmp_path, titan.config(tmp_path / "cut", save_every=1, steps=3))
    assert first == whole[:3]
    second = titan.config(tmp_path / "cut", save_every=1)
    second.checkpoint.keep_latest_k = 2
    assert losses(tmp_path, second) == whole[3:]
    kept = {path.name for path in (tmp_path / "cut" / "checkpoint").iterdir()}
    assert kept == {"step-5", "step-6"}


def test_a_save_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    whole = losses(tmp_path, titan.config(tmp_path / "whole"))
    losses(tmp_path, titan.config(tmp_path / "cut", save_every=1, steps=3))
    (tmp_path / "cut" / "checkpoint" / "step-4" / "infinity").mkdir(parents=True)
    assert losses(tmp_path, titan.config(tmp_path / "cut", save_every=10)) == whole[3:]


@dataclasses.dataclass(frozen=True)
class TwoRanks:
    """Offloaded and saved at step 3, then by FSDP."""

    case: str

    def __call__(self, rank: int, place: Path) -> tuple[list[float], list[float]]:
        values = {"world": dist.get_world_size(), **CASES[self.case]}
        found = titan.config(place / "offloaded", save_every=3, **values)
        with titan.built(titan.offloaded(found, policy(place))) as trainer:
            begun = titan.values_of(trainer)
            offloaded = titan.losses_of(trainer)
        with titan.built(titan.summed_by_gloo(titan.config(place / "fsdp", **values))) as trainer:
            titan.begin_with(trainer, begun)
            return titan.losses_of(trainer), offloaded


@pytest.mark.parametrize("case", ["plain", "clipping", "accumulation", "chunked loss"])
def test_two_ranks_train_as_fsdp_and_one_goes_on(case: str, tmp_path: Path) -> None:
    found = on_ranks(TwoRanks(case), tmp_path / "run", 2)
    for expected, offloaded in found:
        assert offloaded == pytest.approx(expected, rel=2e-6)
    (tmp_path / "run" / "offloaded" / "checkpoint" / "step-6").rename(tmp_path / "away")
    one = titan.config(tmp_path / "run" / "offloaded", save_every=10, **CASES[case])
    assert losses(tmp_path, one) == pytest.approx(found[0][1][3:], rel=1e-5)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "tensor": ("parallelism.tensor_parallel_degree", 2, "tensor_parallel_degree=2"),
    "context": ("parallelism.context_parallel_degree", 2, "context_parallel_degree=2"),
    "expert": ("parallelism.expert_parallel_degree", 2, "expert_parallel_degree=2"),
    "pipeline": ("parallelism.pipeline_parallel_degree", 2, "pipeline_parallel_degree=2"),
    "full_dtensor": ("parallelism.spmd_backend", "full_dtensor", "full_dtensor"),
    "cpu offload": ("training.enable_cpu_offload", True, "enable_cpu_offload"),
    "graphs": ("training.disable_cuda_graphs", False, "disable_cuda_graphs"),
    "compile": ("compile.enable", True, "'model'"),
    "mixed": ("training.mixed_precision_param", "bfloat16", "keeps masters in fp32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_with_it_is_refused_by_name(case: str, tmp_path: Path) -> None:
    from types import SimpleNamespace

    path, value, message = REFUSED[case]
    found = titan.config(tmp_path)
    part, _, name = path.partition(".")
    setattr(getattr(found, part), name, value)
    of = found.parallelism
    dims = SimpleNamespace(
        tp=of.tensor_parallel_degree,
        pp=of.pipeline_parallel_degree,
        cp=of.context_parallel_degree,
        ep=of.expert_parallel_degree,
    )
    with pytest.raises(ValueError, match=message):
        titan.parallelize()(
            torch.nn.Linear(1, 1),
            parallel_dims=dims,
            training=found.training,
            parallelism=of,
            compile_config=found.compile,
            ac_config=None,
            dump_folder="",
        )


def test_muon_of_the_configuration_is_torchs(tmp_path: Path) -> None:
    """Matrices of Muon, the rest of AdamW; and all of Muon, whose rest gets AdamW, too."""
    plain = titan.with_muon(titan.config(tmp_path))
    plain.optimizer = titan.derive(plain.optimizer, titan.TorchOptimizers.Config)
    expected = own_losses(plain)
    ours = titan.with_muon(titan.config(tmp_path))
    ours.optimizer.param_groups[0].optimizer_kwargs["matrixwise"] = True
    close = 1e-5 if product_dtype(torch.device("cpu")) is torch.bfloat16 else 0.05
    assert losses(tmp_path, ours) == pytest.approx(expected, rel=close)
    alone = titan.with_muon(titan.config(tmp_path), alone=True)
    assert losses(tmp_path, alone) == pytest.approx(expected, rel=close)


def test_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    found = titan.offloaded(titan.config(tmp_path), policy(tmp_path))
    for change, message in (
        ({"optimizer_name": "DistMuon"}, "DistMuon.*AdamW, SGD, Lion, Muon"),
        ({"optimizer_kwargs": {"lr": 1e-3, "amsgrad": True}}, "amsgrad, which inf.AdamW"),
    ):
        other = titan.offloaded(titan.config(tmp_path), policy(tmp_path))
        for name, value in change.items():
            setattr(other.optimizer.param_groups[0], name, value)
        with pytest.raises(ValueError, match=message), titan.built(other):
            pass
    found.model_spec.parallelize_fn = titan.llama().parallelize_fn
    with pytest.raises(ValueError, match="InfinityOptimizers wants one offloaded module"):
        with titan.built(found):
            pass


def test_checkpoint_fields_without_a_counterpart_are_refused(tmp_path: Path) -> None:
    for name, value in (("last_save_model_only", True), ("initial_load_path", "/weights")):
        found = titan.offloaded(titan.config(tmp_path, save_every=1), policy(tmp_path))
        setattr(found.checkpoint, name, value)
        with pytest.raises(ValueError, match=name), titan.built(found):
            pass


def test_a_checkpoint_resumes_with_other_wrappers(tmp_path: Path) -> None:
    whole = losses(tmp_path, titan.config(tmp_path / "whole"))
    losses(tmp_path, titan.config(tmp_path / "cut", save_every=3, steps=3))
    changed = titan.config(tmp_path / "cut", save_every=9, activations=titan.FullAC.Config())
    assert losses(tmp_path, changed) == whole[3:]


def test_a_checkpoint_of_dcp_says_what_to_take(tmp_path: Path) -> None:
    found = titan.config(tmp_path, save_every=1)
    found.model_spec.parallelize_fn = titan.parallelize(policy(tmp_path))
    found.optimizer = titan.derive(found.optimizer, titan.InfinityOptimizers.Config)
    with titan.built(found) as trainer:
        with pytest.raises(RuntimeError, match=r"InfinityCheckpoints\.Config"):
            trainer.train()
