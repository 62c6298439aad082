"""inf.save and inf.restore: training continues bit for bit, whatever the tier, the format and the
optimizer."""

from __future__ import annotations

import dataclasses
import errno
import functools
from pathlib import Path
from typing import Any, final
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.checkpoint import writer
from infinity._src.checkpoint.directory import DirectoryLock, read_generation
from infinity._src.engine.handle import offload
from infinity.aio import Executor, Fault, Seam
from infinity.errors import AioError
from tests import harness, models
from tests.harness import Training, assert_same, one_thread
from tests.marks import alternating, every_second

STEPS, AT = 5, 2
PLAIN = Training(models.Small, steps=STEPS, accumulation=1)

TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {
        "params": "nvme",
        "optim": "nvme",
        "ram": "min",
        "resident": {"params": 0.0, "optim": 0.0},
    },
    "mixed": {"params": "nvme", "optim": "nvme", "resident": {"params": 0.5, "optim": 0.3}},
}


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    (tmp_path / "swap").mkdir(exist_ok=True)
    return inf.Policy(nvme=tmp_path / "swap", **values)


@final
class Run:
    """A training that can be saved and restored at any step: model, optimizer, scheduler."""

    def __init__(self, training: Training, chosen: inf.Policy) -> None:
        self.training = training
        self.model = training.model()
        offload(self.model, chosen)
        self.handle = inf.handle(self.model)
        self.optimizer: Any = training.make_optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.9**step
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.handle.close()

    def train(self, first: int, last: int) -> list[float]:
        """The losses of steps [first, last)."""
        losses = []
        with one_thread():
            for batch in self.training.batches[first:last]:
                clip = self.training.max_norm
                losses.append(harness.step(self.model, self.optimizer, batch, clip=clip))
                self.scheduler.step()
        return losses

    def save(self, directory: Path) -> inf.Save:
        return inf.save(
            self.model, self.optimizer, directory, extra={"sched": self.scheduler.state_dict()}
        )

    def restore(self, directory: Path) -> inf.Restored:
        restored = inf.restore(self.model, self.optimizer, directory)
        self.scheduler.load_state_dict(restored.extra["sched"])
        return restored

    def everything(self) -> dict[str, Any]:
        """All states, by name."""
        found: dict[str, Any] = dict(self.model.state_dict().items())
        for param in self.optimizer.param_groups[0]["params"]:
            link = param.infinity_link.param
            for key, value in self.handle.optimizer_state(param).items():
                found[f"{link.name}/{key}"] = value
        return found


def round_trip(
    training: Training, chosen: inf.Policy, directory: Path, later: inf.Policy | None = None
) -> inf.Restored:
    """Train, save, and train during the save; restore into a fresh model; the rest is equal to the
    last bit."""
    with Run(training, chosen) as run:
        run.train(0, AT)
        save = run.save(directory)
        losses = run.train(AT, STEPS)  # during the save
        save.wait()
        states = run.everything()
    with Run(training, later or chosen) as fresh:
        restored = fresh.restore(directory)
        assert restored.step == AT
        assert fresh.train(restored.step, STEPS) == losses
        assert_same(fresh.everything(), states)
    return restored


@pytest.mark.parametrize(("tier", "state"), alternating(TIERS, ["exact", "bf16", "compact"]))
def test_training_goes_on_bit_for_bit(tier: str, state: str, tmp_path: Path) -> None:
    restored = round_trip(PLAIN, policy(tmp_path, state=state, **TIERS[tier]), tmp_path / "ckpt")
    assert restored.rounded == ""
    assert restored.notes == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [("cpu", "nvme"), ("nvme", "cpu"), ("mixed", "nvme")],
)
def test_another_tier_and_other_units_change_nothing(
    before: str, after: str, tmp_path: Path
) -> None:
    later = policy(tmp_path, state="compact", unit_bytes_max=8192, **TIERS[after])
    round_trip(PLAIN, policy(tmp_path, state="compact", **TIERS[before]), tmp_path / "ckpt", later)


@pytest.mark.parametrize(
    "training",
    every_second(
        Training(models.gpt2, steps=STEPS, accumulation=1),  # tied
        Training(models.Small, steps=STEPS, accumulation=1, optimizer="Lion"),
        Training(models.lora, steps=STEPS, accumulation=1),  # frozen
        Training(
            models.Small, steps=STEPS, accumulation=1, optimizer="SGD", options=(("momentum", 0.9),)
        ),
        Training(models.ListMoe, steps=STEPS, accumulation=1),  # experts without a gradient
        Training(models.Small, steps=STEPS, accumulation=1, optimizer="Adagrad"),
        Training(models.Small, steps=STEPS, accumulation=1, optimizer="NAdam"),
        Training(models.Small, steps=STEPS, accumulation=1, dtype=torch.float32),
        Training(models.Small, steps=STEPS, accumulation=1, groups=True),
        Training(models.Small, steps=STEPS, accumulation=1, dtype=torch.float16),
    ),
    ids=["tied", "lion", "lora", "sgd", "moe", "adagrad", "nadam", "fp32", "groups", "fp16"],
)
def test_models_and_optimizers(training: Training, tmp_path: Path) -> None:
    round_trip(
        training,
        policy(tmp_path, **TIERS["nvme"]),
        tmp_path / "ckpt",
        policy(tmp_path, **TIERS["cpu"]),
    )


def test_many_small_chunks_are_read_and_written_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore into the same units, and into other ones: far fewer submissions than chunks."""
    submit, count = Executor.submit, 40
    submitted = 0

    def counted(self: Executor, *args: Any, **kwargs: Any) -> Any:
        nonlocal submitted
        submitted += 1
        return submit(self, *args, **kwargs)

    def made(units: list[str]) -> tuple[nn.Module, inf.AdamW]:
        model = nn.Sequential(*(nn.Linear(24, 24).bfloat16() for _ in range(count)))
        offload(model, policy(tmp_path, params="nvme", optim="nvme", ram="min", units=units))
        return model, inf.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made(["Linear"])
    model(torch.ones(2, 24).bfloat16()).sum().backward()
    optimizer.step()
    inf.save(model, optimizer, tmp_path / "ckpt").wait()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    inf.handle(model).close()
    for units in (["Linear"], []):
        model, optimizer = made(units)
        with monkeypatch.context() as patched:
            patched.setattr(Executor, "submit", counted)
            submitted = 0
            inf.restore(model, optimizer, tmp_path / "ckpt")
            assert submitted < count // 4
        assert_same(model.state_dict(), values)
        assert_same(optimizer.state_dict(), states)
        inf.handle(model).close()


def test_updates_in_backward(tmp_path: Path) -> None:
    training = Training(models.Small, steps=STEPS, accumulation=1, max_norm=None)
    chosen = policy(tmp_path, update="backward", **TIERS["nvme"])
    with Run(training, chosen) as run:
        run.train(0, 1)
        models.loss_of(run.model, training.batches[0]).backward()
        with pytest.raises(RuntimeError, match=r"save and restore after opt\.step"):
            run.save(tmp_path / "never")
        run.optimizer.step()
    round_trip(training, chosen, tmp_path / "ckpt")


def test_delayed_updates_begin_their_delay_anew_alike_here_and_elsewhere(tmp_path: Path) -> None:
    chosen = policy(tmp_path, update="delayed", delayed_warmup=1, **TIERS["nvme"])
    with Run(PLAIN, chosen) as run:
        run.train(0, 3)
        run.save(tmp_path / "ckpt").wait()
        run.train(3, 5)
        run.restore(tmp_path / "ckpt")  # into a run that computes with a second copy
        losses, states = run.train(3, 5), run.everything()
    with Run(PLAIN, chosen) as fresh:
        assert fresh.restore(tmp_path / "ckpt").step == 3
        assert fresh.train(3, 5) == losses
        assert_same(fresh.everything(), states)


MASTERS = "masters to 24 bits (about 1 parameter in 512 becomes the next bf16)"
MASTERS_AT_TIES = "their masters by one unit in the last place"
TIES = "parameters half-way between two bf16 to the even one (about 1 in 512)"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "exact",
            "compact",
            f"rounded to nearest: {MASTERS} and moments to 8 bits in groups of 64",
        ),
        ("exact", "bf16", "rounded to nearest: moments to bf16"),
        ("compact", "exact", f"rounded to nearest: {TIES}"),
        (
            "compact",
            "bf16",
            f"rounded to nearest: {TIES} and {MASTERS_AT_TIES} and moments to bf16",
        ),
    ],
)
def test_another_state_format_rounds_and_says_what(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    with Run(PLAIN, policy(tmp_path, state=before)) as run:
        run.train(0, 3)
        run.save(tmp_path / "ckpt").wait()
        states = run.everything()
    with Run(PLAIN, policy(tmp_path, state=after, seed=3)) as fresh:
        restored = fresh.restore(tmp_path / "ckpt")
        assert restored.rounded == said
        assert restored.notes == (
            f"state={before!r} in the run that saved, {after!r} in this one",
            "seed=0 in the run that saved, 3 in this one",
        )
        ours = fresh.everything()
        for name, value in states.items():
            if before == "compact" and f"{name}/master" in states:
                assert torch.equal(ours[name], states[f"{name}/master"].bfloat16()), name
            elif (before, after) == ("compact", "bf16") and name.endswith("/master"):
                torch.testing.assert_close(ours[name], value, rtol=2**-23, atol=0)
            elif (
                not isinstance(value, torch.Tensor)
                or after == "exact"
                or (after == "bf16" and "exp_avg" not in name)
            ):
                assert_same({name: ours[name]}, {name: value})
            else:
                assert (ours[name] - value).abs().max() <= value.abs().max() / 64, name
        fresh.train(3, 4)


def test_parameters_alone(tmp_path: Path) -> None:
    with Run(PLAIN, policy(tmp_path)) as run:
        run.train(0, 2)
        run.save(tmp_path / "ckpt").wait()
        params = dict(run.model.state_dict())
    model = PLAIN.model()
    offload(model, policy(tmp_path))
    assert inf.restore(model, None, tmp_path / "ckpt").step == 2
    assert_same(dict(model.state_dict()), params)
    optimizer = inf.AdamW(model.parameters())
    inf.restore(model, None, tmp_path / "ckpt")  # masters too, where there are some
    for param in model.parameters():
        master = inf.handle(model).optimizer_state(param)["master"]
        assert optimizer
        assert torch.equal(master, params[param.infinity_link.param.name].float())  # type: ignore[attr-defined]


def test_buffers_and_extra_come_back_and_the_handle_s_extra_stands_in(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    model = offload(make(), inf.Policy())
    opt = inf.AdamW(model.parameters())
    model(torch.randn(4, 8) * 7 + 3).sum().backward()
    opt.step()
    opt.zero_grad()
    state = torch.get_rng_state()
    inf.handle(model).extra = {"rng": state, "epoch": (3, 0.1)}
    inf.save(model, opt, tmp_path / "ckpt").wait()
    fresh = offload(make(), inf.Policy())
    restored = inf.restore(fresh, inf.AdamW(fresh.parameters()), tmp_path / "ckpt")
    assert restored.extra["epoch"] == (3, 0.1)
    assert torch.equal(restored.extra["rng"], state)
    assert torch.equal(fresh[1].running_mean, model[1].running_mean)  # type: ignore[index]
    assert fresh[1].num_batches_tracked == 1  # type: ignore[index]
    with pytest.raises(ValueError, match="extra= cannot be saved"):
        inf.save(model, opt, tmp_path / "other", extra=object())
    with pytest.raises(
        ValueError,
        match=r"cannot be saved: it names pathlib.*may be harmful.*numbers, text",
    ):
        inf.save(model, opt, tmp_path / "other", extra={"text": Path("book.txt")})


def test_writes_beside_a_save_come_after_it(tmp_path: Path) -> None:
    """A slow drive, so that the save is far from done when the writes come."""
    values = {**TIERS["nvme"], "nvme": tmp_path}
    slow = Seam(read_bytes_per_s=4e6)
    model = PLAIN.model()
    offload(model, inf.Policy(**values), _seam=slow)
    handle = inf.handle(model)
    optimizer = inf.AdamW(model.parameters())
    before = dict(model.state_dict())
    save = inf.save(model, optimizer, tmp_path / "ckpt")
    assert not save.done
    assert "running" in repr(save)
    first, *_, last = list(model.parameters())
    with handle.gather(last), torch.no_grad():
        last.fill_(2)
    handle.optimizer_state(first)["exp_avg"] = torch.ones(first.shape)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    save.wait()
    assert save.done
    inf.restore(model, optimizer, tmp_path / "ckpt")
    assert_same(dict(model.state_dict()), before)
    assert not handle.optimizer_state(first)["exp_avg"].any()


def test_a_save_does_not_wait_for_pending_updates(tmp_path: Path) -> None:
    """A slow drive, so that the updates of the step before the save end after the call."""
    reference = PLAIN.model()
    offload(reference, policy(tmp_path))
    harness.step(reference, inf.AdamW(reference.parameters()), PLAIN.batches[0])
    expected = dict(reference.state_dict())
    inf.handle(reference).close()
    model = PLAIN.model()
    offload(model, inf.Policy(**TIERS["nvme"], nvme=tmp_path), _seam=Seam(read_bytes_per_s=8e6))
    handle, optimizer = inf.handle(model), inf.AdamW(model.parameters())
    harness.step(model, optimizer, PLAIN.batches[0])
    handle.saving.executor.hold_gates(True)  # as until the next forward
    save = inf.save(model, optimizer, tmp_path / "ckpt")
    assert handle.pipeline.updates_pending
    harness.step(model, optimizer, PLAIN.batches[1])
    save.wait()
    inf.restore(model, optimizer, tmp_path / "ckpt")
    assert_same(dict(model.state_dict()), expected)
    handle.close()


def test_waiting_for_a_save_needs_no_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates of the step before the save wait at gates, which the next forward would open."""
    monkeypatch.setattr("infinity._src.checkpoint.save.PATIENCE_S", 0.01)
    model = PLAIN.model()
    offload(model, policy(tmp_path, **TIERS["nvme"]))
    handle, optimizer = inf.handle(model), inf.AdamW(model.parameters())
    harness.step(model, optimizer, PLAIN.batches[0])
    handle.saving.executor.hold_gates(True)
    save = inf.save(model, optimizer, tmp_path / "ckpt")
    with pytest.raises(TimeoutError):
        save.wait(0.005)
    save.wait(30)
    handle.close()


def test_training_goes_on_when_the_drive_of_a_running_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are read already, and others wait for buffers, when the first write fails."""
    fault = Fault("write", 1, "errno", errno=errno.EIO, persistent=True)
    seam = Seam(write_bytes_per_s=1e8, fault=fault)
    monkeypatch.setattr(writer, "open_executor", functools.partial(writer.open_executor, seam=seam))
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
    offload(model, inf.Policy())
    optimizer = inf.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    save = inf.save(model, optimizer, tmp_path / "ckpt")
    with pytest.raises(OSError, match="failed"):
        save.wait(30)
    for _ in range(2):
        step()
    inf.handle(model).close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_save_that_is_interrupted_in_its_call_leaves_no_save_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with Run(PLAIN, policy(tmp_path)) as run:
        run.train(0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "submit", Mock(side_effect=error))
            with pytest.raises(error):
                run.save(tmp_path / "ckpt")
        run.train(1, 2)
        run.save(tmp_path / "ckpt")


def test_saves_replace_each_other_and_a_closing_handle_waits(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with Run(PLAIN, policy(tmp_path)) as run:
        for step in range(3):
            run.train(step, step + 1)
            run.save(place)
        (place / "notes.txt").write_text("mine")
    assert sorted(path.name for path in place.iterdir()) == [
        "data-00000003.rank0", "extra-00000003.rank0", "manifest-00000003.rank0", "notes.txt",
    ]  # fmt: skip
    with Run(PLAIN, policy(tmp_path)) as run:
        assert run.restore(place).step == 3
        run.train(3, 4)
        run.save(place).wait()
    assert read_generation(place, 4)[0].step == 4


def test_two_saves_at_once_into_one_directory_do_not_clear_each_other_away(tmp_path: Path) -> None:
    with Run(PLAIN, policy(tmp_path)) as run:
        run.save(tmp_path / "ckpt").wait()
        other = DirectoryLock(tmp_path / "ckpt")  # as the save of another model holds it
        with pytest.raises(
            AioError, match="another save into this directory is running"
        ) as caught:
            run.save(tmp_path / "ckpt")
        assert caught.value.errno == errno.EWOULDBLOCK
        run.save(tmp_path / "elsewhere").wait()
        other.release()
        run.save(tmp_path / "ckpt").wait()
    assert read_generation(tmp_path / "ckpt", 2)[0].step == 0


# -- what does not fit -----------------------------------------------------------------------------


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with Run(PLAIN, policy(tmp_path)) as run:
        run.train(0, 1)
        run.save(place).wait()
        with pytest.raises(ValueError, match="belongs to an optimizer that was not given"):
            inf.save(run.model, None, place)
        with pytest.raises(ValueError, match="SGD is not an optimizer of infinity"):
            inf.save(run.model, torch.optim.SGD([torch.zeros(1)]), place)
        run.optimizer.param_groups[0]["note"] = object()
        with pytest.raises(ValueError, match="'note' of parameter group 0"):
            run.save(place)
        with pytest.raises(RuntimeError, match="in use"), run.handle.gather(run.model.parameters()):
            del run.optimizer.param_groups[0]["note"]
            run.save(place)
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(ValueError, match="is a file, and a checkpoint is a directory"):
            run.save(file)
    for training, message in (
        (
            Training(lambda: models.Small(layers=4)),
            r"blocks\.3\.\S+ \(\[\d+.*\], [\d,]+ bytes as bfloat16\), .* missing in it",
        ),
        (
            Training(lambda: models.Small(layers=2)),
            r"blocks\.2\.\S+ \(data-\S+, [\d,]+ bytes as bfloat16\), .* not in the model",
        ),
        (
            Training(lambda: models.Small(hidden=64)),
            r"\(96, 32\) in .* \(data-\S+, 6,144 bytes .* shape \(96, 64\), 12,288 bytes",
        ),
        (
            dataclasses.replace(PLAIN, dtype=torch.float32),
            r"cast the model \(model.to\(torch.bfloat16\)\)",
        ),
        (
            dataclasses.replace(PLAIN, optimizer="Lion"),
            r"has the states of AdamW, and the optimizer is Lion",
        ),
    ):
        with Run(training, policy(tmp_path)) as run:
            before = run.everything()
            with pytest.raises(ValueError, match=message):
                run.restore(place)
            assert_same(run.everything(), before)
    with (
        Run(PLAIN, policy(tmp_path)) as run,
        pytest.raises(AioError, match=r"there is no checkpoint: open of .*nowhere") as caught,
    ):
        run.restore(tmp_path / "nowhere")
    assert caught.value.errno == errno.ENOENT


# -- faults ----------------------------------------------------------------------------------------
