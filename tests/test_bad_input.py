"""Mistakes of the user and faults of the machine: an error names the cause and the fix, and nothing
is lost."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import operator
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import (
    AioError,
    BudgetError,
    EngineClosed,
    NonFiniteGradient,
    ParameterReleased,
    StateInvalid,
    SwapFullError,
)
from tests import crashes, harness, models
from tests.crashes import Rooted
from tests.harness import assert_same, policy, train, values_of
from tests.marks import alternating
from tests.unit.aio.rig import BACKENDS

BATCH = models.token_batches(1, seed=3)[0]


def llama() -> nn.Module:
    return models.make(models.llama)


# -- paths -----------------------------------------------------------------------------------------


def refused_paths(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    yield tmp_path / "missing", "create it"
    file = tmp_path / "file"
    file.write_text("")
    yield file, "not a directory|create it"


def test_a_path_that_is_not_a_directory_is_refused_and_the_model_is_as_it_was(
    tmp_path: Path,
) -> None:
    for path, message in refused_paths(tmp_path):
        model = llama()
        before = values_of(model)
        with pytest.raises(ValueError, match=message):
            inf.offload(model, policy(path))
        assert_same(values_of(model), before)
        models.loss_of(model, BATCH).backward()  # an ordinary model still
        inf.offload(llama(), inf.Policy(params="cpu", optim="cpu"))


def test_tmpfs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_ALLOW_TMPFS", raising=False)
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no writable /dev/shm")
    with pytest.raises(ValueError, match="is in memory and so saves none"):
        inf.offload(llama(), policy(shm))


@pytest.mark.privileged
def test_a_path_that_is_read_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    with mounted(tmp_path, "ro") as path, pytest.raises(OSError, match=str(path)):
        inf.offload(llama(), policy(path))


@pytest.mark.privileged
def test_a_drive_that_is_too_small_says_how_much_is_missing_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    with mounted(tmp_path, "size=64k") as path:
        model = llama()
        before = values_of(model)
        with pytest.raises(SwapFullError, match="are missing"):
            inf.offload(model, policy(path))
        assert_same(values_of(model), before)


@pytest.mark.privileged
def test_a_drive_that_holds_parameters_but_not_the_optimizer_leaves_the_model_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    with mounted(tmp_path, "size=400k") as path:
        model = llama()
        before = values_of(model)
        inf.offload(model, policy(path))
        assert re.search("lack space for training with this policy: .* are missing", caplog.text)
        with pytest.raises(SwapFullError, match="are missing"):
            inf.AdamW(model.parameters())
        assert_same(values_of(model), before)
        inf.SGD(model.parameters(), lr=1e-3)  # without moments there is room
        assert_same(values_of(model), before)
        assert math.isfinite(models.loss_of(model, BATCH).item())
        inf.handle(model).close()


class mounted:
    """A small tmpfs mounted for a test; skips where that is not allowed."""

    def __init__(self, parent: Path, options: str) -> None:
        self.path = parent / "mount"
        self.options = options

    def __enter__(self) -> Path:
        self.path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", self.options, "tmpfs", str(self.path)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
        return self.path

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"params": "gpu"}, "params='gpu' is not known; use 'device' or 'cpu' or 'nvme'"),
        ({"optim": "disk"}, "optim='disk' is not known"),
        ({"params": "nvme"}, r"set nvme=\[directories\]"),
        ({"ram": "lots"}, "ram='lots'"),
        ({"ram": "-3GiB"}, "ram='-3GiB'"),
        ({"state": 8}, "state=8 is not known; use 'exact' or 'bf16' or 'compact'"),
        ({"state": "exactly"}, "state='exactly' is not known"),
        (
            {"update": "eager"},
            "update='eager' is not known; use 'deferred' or 'backward' or 'delayed'",
        ),
        (
            {"update": "backward", "on_nonfinite": "skip"},
            "cannot honour on_nonfinite='skip'.*update='deferred'",
        ),
        ({"grads": "nvme"}, r"grads='nvme'.*set nvme=\[directories\]"),
        ({"activations": "nvme"}, r"activations='nvme'.*set nvme=\[directories\]"),
        ({"update": "delayed", "generations": 2}, "keeps one generation"),
        ({"damaged": "from-older"}, "generations=2"),
        ({"damaged": "from-older", "generations": 2, "verify": "sample"}, "verify='full'"),
        ({"damaged": "older"}, "damaged="),
        ({"grads": "device"}, "grads='device' is not known; use 'cpu' or 'nvme'"),
        (
            {"zero": 2},
            (
                "zero=2 keeps whole parameters on every rank's device, and params='cpu' does not: "
                "use params='device', or"
            ),
        ),
        ({"zero": 0}, "zero=0 is not known; use 1 or 2 or 3"),
        (
            {"zero": 1, "params": "device", "hpz": "cpu"},
            "hpz='cpu': with zero=1 every rank has all parameters",
        ),
        (
            {"zero": 1, "params": "device", "accumulate": "shard"},
            "accumulate='shard' reduces every micro-batch, which is zero=2",
        ),
        (
            {"find_unused_parameters": True},
            "find_unused_parameters=True with zero=3: ranks hold parts of each unit",
        ),
        (
            {
                "find_unused_parameters": True,
                "zero": 2,
                "params": "device",
                "update": "backward",
                "generations": 2,
            },
            "update='backward' updates units in the order of the rank's backward",
        ),
        ({"sync_module_states": 1}, "sync_module_states=1 is not known"),
        ({"broadcast_buffers": None}, "broadcast_buffers=None is not known"),
        (
            {"error_feedback": True},
            "error_feedback=True is for gradients that travel as int4 groups: set qgz=True",
        ),
        ({"rank_timeout_s": 0}, "rank_timeout_s=0: give a number of seconds, more than 0"),
        ({"mesh": 4}, "mesh=4: give a torch.distributed.device_mesh.DeviceMesh"),
        ({"zero": True}, "zero=True is not known"),
        ({"generations": 6}, "generations=6 is not known; use 1 or 2"),
        ({"generations": 3}, "generations=3 keeps 2 commits of a durable run: set durable=True"),
        (
            {"durable": True},
            "durable=True keeps all states on the drives: set params='nvme' instead of 'cpu'",
        ),
        ({"update_on": "gpu"}, "update_on='gpu' is not known"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"seed": -1}, "seed=-1: give a whole number, 0 or more"),
        ({"seed": True}, "seed=True"),
        ({"delayed_warmup": 1.5}, "delayed_warmup=1.5: give a whole number"),
        ({"grad_dtype": "bf16"}, "grad_dtype='bf16' is not supported"),
        ({"reduce_dtype": "fp32"}, "reduce_dtype='fp32' is not supported"),
        ({"resident": 0.5}, "resident=0.5: give a mapping such as"),
        ({"resident": {"grads": 0.5}}, "'grads' is not known; use 'params' and 'optim'"),
        (
            {"resident": {"params": 1.5}, "params": "nvme", "nvme": "a"},
            r"\['params'\]=1.5: a share is between 0.0 and 1.0",
        ),
        ({"resident": {"params": math.nan}, "params": "nvme", "nvme": "a"}, "a share is between"),
        (
            {"resident": {"params": 1}, "params": "nvme", "nvme": "a"},
            "=1 would be one byte; write 1.0 for all of it",
        ),
        (
            {"resident": {"optim": "much"}, "optim": "nvme", "nvme": "a"},
            r"resident\['optim'\]='much'",
        ),
        (
            {"resident": {"optim": 0.5}, "params": "nvme", "nvme": "a"},
            "since optim='cpu'; leave it out, or set optim='nvme'",
        ),
        ({"nvme": 5, "params": "nvme"}, "nvme=5: give a directory"),
        ({"nvme": [""], "params": "nvme"}, "none of them empty"),
        ({"units": 5}, "units=5: give a list of modules"),
        ({"on_nonfinite": "panic"}, "on_nonfinite='panic'"),
        ({"io_backend": "libaio"}, "io_backend='libaio'"),
        ({"nvme": ["a", "a"], "params": "nvme"}, "names a directory twice"),
        ({"verify": True}, "verify=True"),
        ({"verify": "some"}, "verify='some' is not known; use 'full' or 'sample' or 'off'"),
        ({"io": 32}, "io=32 is not known"),
        ({"io": "missing.json"}, "io: 'missing.json' cannot be read"),
        ({"io": {"depth": 0}}, "io: depth=0 must be 2 to 4096"),
        ({"io": {"qd": 8}}, "io: unknown field qd"),
        ({"ram": []}, r"ram=\[\].*is not a size"),
        ({"params": "nvme", "nvme": ["a", "b/../a"]}, "names a directory twice"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_field_and_value(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFINITY_NVME_DIR", raising=False)
    with pytest.raises(ValueError, match=message):
        inf.Policy(**values)


def test_a_budget_that_is_too_small_says_what_works(tmp_path: Path) -> None:
    model = llama()
    before = values_of(model)
    with pytest.raises(BudgetError, match="the smallest budget that works is") as caught:
        inf.offload(model, policy(tmp_path, ram="64KiB"))
        inf.AdamW(model.parameters())
    assert "ram" in str(caught.value)
    assert_same(values_of(model), before)


def test_the_least_budget_that_an_error_names_works(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        harness.offloaded(harness.Training(models.llama, steps=1), policy(tmp_path, ram=0))
    found = re.search(r"works is (\d+) bytes", str(caught.value))
    assert found is not None
    least = int(found[1])
    harness.offloaded(harness.Training(models.llama, steps=1), policy(tmp_path, ram=least))
    with pytest.raises(BudgetError):
        harness.offloaded(
            harness.Training(models.llama, steps=1), policy(tmp_path, ram=least - 4096)
        )


# -- models and optimizers -------------------------------------------------------------------------


def test_an_optimizer_of_torch_raises_at_its_step_and_changes_nothing() -> None:
    model = inf.offload(llama(), inf.Policy())
    before = values_of(model)
    for optimizer in (
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        models.loss_of(model, BATCH).backward()
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert_same(values_of(model), before)
    inf.handle(model).close()


def test_the_engines_optimizer_refuses_parameters_that_are_not_offloaded() -> None:
    with pytest.raises(ValueError, match="is not offloaded"):
        inf.AdamW(llama().parameters())


class Copied(nn.Module):
    """A model whose parameters are copied on access, as those of a GPU are later."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def parameters(self, recurse: bool = True) -> Any:
        return iter([parameter.clone() for parameter in super().parameters(recurse)])


def test_data_parallel_is_refused_by_name() -> None:
    model = inf.offload(llama(), inf.Policy())
    with pytest.raises(ParameterReleased, match=r"torch\.nn\.DataParallel copies .*torchrun"):
        torch.nn.parallel.replicate(Copied(model), [0, 1])
    with pytest.raises(ParameterReleased, match="clone wants its values") as raised:
        Copied(model).parameters()
    assert "DataParallel copies" not in str(raised.value)
    # Without a GPU it passes calls on.
    with torch.no_grad():
        assert math.isfinite(models.loss_of(nn.DataParallel(model), BATCH).item())
    inf.handle(model).close()


EMBED = r"infinity\.integrations\.transformers\.embed\(trainer"
ATTACH = r"infinity\.integrations\.accelerate\.attach\(accelerator\)"


def test_what_a_trainer_wants_of_parameters_names_the_integrations_call(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.lora), inf.Policy())
    optimizer = inf.AdamW([value for value in model.parameters() if value.requires_grad])
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ParameterReleased, match=f"DistributedDataParallel.*{EMBED}.*{ATTACH}"):
            nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
    with pytest.raises(ParameterReleased, match=r"infinity\.integrations\.peft\.merge\(model\)"):
        model.merge_and_unload()  # type: ignore[operator]
    for move in (lambda: model.to(torch.float64), lambda: model.to("meta")):
        with pytest.raises(ParameterReleased, match=f"before `inf.offload`.*{EMBED}.*{ATTACH}"):
            move()
    with pytest.raises(ParameterReleased, match=EMBED):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="after get_peft_model"):
        inf.AdamW([nn.Parameter(torch.zeros(4, 64))])
    models.loss_of(model, BATCH).backward()
    optimizer.step()
    manifest = optimizer.state_dict()
    inf.handle(model).close()
    fresh = inf.offload(models.make(models.lora), inf.Policy())
    again = inf.AdamW([value for value in fresh.parameters() if value.requires_grad])
    before = f"inf.restore\\(model, optimizer, directory\\) the manifest loads.*{EMBED}.*{ATTACH}"
    with pytest.raises(ValueError, match=before):
        again.load_state_dict(manifest)
    inf.handle(fresh).close()


def test_two_optimizers_cannot_hold_one_parameter() -> None:
    model = inf.offload(llama(), inf.Policy())
    first = inf.AdamW(model.parameters())
    with pytest.raises(ValueError, match="held by another optimizer"):
        inf.AdamW(model.parameters())
    assert first.param_groups
    inf.handle(model).close()


def test_a_dtype_without_a_state_format_is_refused_by_name() -> None:
    model = inf.offload(models.make(models.llama, dtype=torch.float64), inf.Policy())
    with pytest.raises(
        ValueError,
        match=r"model\.embed_tokens\.weight is torch\.float64.*bfloat16, float16 and float32",
    ):
        inf.AdamW(model.parameters())
    with torch.no_grad():
        assert math.isfinite(models.loss_of(model, BATCH).item())
    inf.handle(model).close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"update": "delayed"}, "update='delayed' needs an update that runs in native threads"),
        ({"update": "backward"}, "update='backward' needs an update that runs in native threads"),
        ({"state": "compact"}, "state='compact' keeps moments in 8 bits"),
    ],
)
def test_a_class_of_torch_refuses_policies_that_it_cannot_honour(
    values: dict[str, Any], message: str
) -> None:
    model = inf.offload(llama(), inf.Policy(**values))
    before = values_of(model)
    with pytest.raises(ValueError, match=message):
        inf.Elementwise(torch.optim.Adagrad, model.parameters(), lr=1e-3)
    assert inf.AdamW(model.parameters()).param_groups  # what was refused holds nothing
    assert_same(values_of(model), before)
    inf.handle(model).close()


def test_an_update_in_backward_refuses_what_comes_too_late() -> None:
    model = inf.offload(llama(), inf.Policy(update="backward"))
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    models.loss_of(model, BATCH).backward()
    with pytest.raises(RuntimeError, match=r"update='backward'.*update='deferred'"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="no_sync"):
        models.loss_of(model, BATCH).backward()
    assert optimizer.param_groups
    # the error of the aborted second backward may be raised once more
    with contextlib.suppress(StateInvalid):
        inf.handle(model).close()


def test_a_policy_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes an inf\.Policy, not a dict"):
        inf.offload(llama(), {"params": "cpu"})  # type: ignore[arg-type]


def test_states_and_gradients_that_do_not_fit_their_parameter_are_refused() -> None:
    model = inf.offload(llama(), inf.Policy())
    handle, weight = inf.handle(model), next(model.parameters())
    with pytest.raises(ValueError, match=r"no optimizer holds model\.embed_tokens\.weight"):
        handle.optimizer_state(weight)
    optimizer = inf.AdamW(model.parameters())
    state = handle.optimizer_state(weight)
    with pytest.raises(
        ValueError, match=r"exp_avg of model\.embed_tokens\.weight must be a floating tensor"
    ):
        state["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="step=-1"):
        state["step"] = -1
    with pytest.raises(KeyError, match="it has master, exp_avg, exp_avg_sq, step"):
        state["momentum_buffer"]
    with pytest.raises(ValueError, match="the gradient of"):
        handle.set_full_grad(weight, torch.zeros(3))
    with pytest.raises(ValueError, match="expected one parameter of the offloaded model"):
        handle.full_grad(torch.nn.Parameter(torch.zeros(3)))
    assert optimizer.param_groups
    handle.close()


@pytest.mark.parametrize(
    "values",
    [
        {"lr": -1.0},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9,)},
    ],
)
def test_hyper_parameters_out_of_range_are_refused(values: dict[str, Any]) -> None:
    model = inf.offload(llama(), inf.Policy())
    with pytest.raises(ValueError, match="out of range"):
        inf.AdamW(model.parameters(), **values)
    assert inf.AdamW(model.parameters()).param_groups  # a refused optimizer holds nothing
    inf.handle(model).close()


def test_offloading_twice_is_refused() -> None:
    model = inf.offload(llama(), inf.Policy())
    with pytest.raises(ValueError, match="offloaded already"):
        inf.offload(model, inf.Policy())
    inf.handle(model).close()
    with pytest.raises(EngineClosed):
        models.loss_of(model, BATCH)


def test_a_handle_of_a_plain_model_is_refused() -> None:
    with pytest.raises(ValueError, match="not offloaded"):
        inf.handle(llama())


# -- gradients that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("mode", ["raise", "skip", "ignore"])
def test_a_gradient_that_is_not_finite_is_met_before_any_state_is_touched(
    mode: str, poison: float, tmp_path: Path
) -> None:
    with harness.one_thread():
        model = inf.offload(llama(), policy(tmp_path, on_nonfinite=mode))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, [BATCH] * 2)
        before = values_of(model)
        steps = optimizer.state_dict()["state"]
        (models.loss_of(model, BATCH) * poison).backward()
        if mode == "raise":
            with pytest.raises(NonFiniteGradient, match="no state was changed"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        after = values_of(model)
        if mode == "ignore":
            assert any(value.isnan().any() for value in after.values())
        else:
            assert_same(after, before)
            assert optimizer.state_dict()["state"] == steps
            assert train(model, optimizer, [BATCH] * 2) == untouched_run(4)[2:]
        inf.handle(model).close()


def untouched_run(steps: int) -> list[float]:
    """The same steps with no accident in between."""
    model = inf.offload(llama(), inf.Policy())
    losses = train(model, inf.AdamW(model.parameters(), lr=1e-2), [BATCH] * steps)
    inf.handle(model).close()
    return losses


# -- drives that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "op", "backend"),
    alternating(["errno", "zero", "short", "bitflip"], ["read", "write"], BACKENDS),
)
def test_a_fault_of_the_drive_is_mended_or_raised_and_never_silent(
    kind: str, op: str, backend: str, tmp_path: Path
) -> None:
    """One transient fault: the training raises a typed error, or ends with the reference loop's
    bits."""
    training = harness.Training(models.Small, steps=2)
    for nth in (5, 60):
        seam = Seam(fault=Fault(op=op, nth=nth, kind=kind))
        try:
            result = harness.offloaded(training, policy(tmp_path, io_backend=backend), seam=seam)
        except StateInvalid:
            continue
        except AioError as error:
            if not error.path:
                raise  # a fault must name its place
            continue
        harness.assert_same(result, harness.reference(training))


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_keeps_failing_raises_at_every_call_and_close_returns(
    op: str, tmp_path: Path
) -> None:
    with harness.one_thread():
        seam = Seam(fault=Fault(op=op, nth=40, kind="errno", persistent=True))
        model = offload(llama(), policy(tmp_path), _seam=seam)
        handle = inf.handle(model)
        with pytest.raises((AioError, StateInvalid)):
            optimizer = inf.AdamW(model.parameters(), lr=1e-2)
            train(model, optimizer, [BATCH] * 20)
        with pytest.raises((AioError, StateInvalid)):
            for _ in range(3):
                models.loss_of(model, BATCH)
                values_of(model)
                handle.flush()
        try:
            handle.close()
        except (AioError, StateInvalid):
            pass  # close reports the fault once more, after everything was freed
        handle.close()
        with pytest.raises(EngineClosed):
            handle.flush()
        with pytest.raises(EngineClosed):
            handle.stats()


def held_in(directory: Path) -> list[str]:
    """Return the targets of this process's descriptors in a directory, also of files without a
    name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return [target for target in found if target.startswith(str(directory))]


def failing(text: str, *, after: int = 0) -> Callable[..., None]:
    """Raises AioError, at every call or at that number of it alone."""
    calls = itertools.count(1)

    def fails(*_: object, **__: object) -> None:
        if after in (0, next(calls)):
            raise AioError(text, path="/swap", op="write", length=4096)

    return fails


def rooted(place: Path, **values: Any) -> tuple[Any, inf.AdamW]:
    torch.manual_seed(0)
    model = inf.offload(Rooted().bfloat16(), policy(place, unit_bytes_max=4096, **values))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def break_backward(model: nn.Module, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the nth `unit_done` of a backward fail. `Rooted` has one for each block, from the last
    on, and one for itself; the last two end with the backward."""
    unsharder, fails = inf.handle(model).unsharder, failing("no such luck", after=nth)
    before = unsharder.unit_done
    monkeypatch.setattr(unsharder, "unit_done", lambda unit: (fails(), before(unit)))


@pytest.mark.parametrize("values", [{}, {"generations": 2, "update": "backward"}], ids=str)
@pytest.mark.parametrize("nth", [3, 4])
def test_training_goes_on_after_an_error_at_the_end_of_backward(
    nth: int, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    with harness.one_thread():
        for breaks in (False, True):
            model, optimizer = rooted(tmp_path, **values)
            if breaks:
                break_backward(model, nth, monkeypatch)
                buffers = {name: value.clone() for name, value in model.named_buffers()}
                with pytest.raises(AioError, match="no such luck"):
                    crashes.step(model, optimizer, 0, 0)
                optimizer.zero_grad()
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])
            for index in range(3):
                crashes.step(model, optimizer, index, 0)
            found.append(crashes.digest(model))
            inf.handle(model).close()
    assert found[0] == found[1]


def test_no_step_goes_past_an_update_in_backward_that_broke_off_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = rooted(tmp_path, update="backward", on_nonfinite="ignore")
    monkeypatch.setattr(inf.handle(model).gradients, "backward_end", failing("no such luck"))
    with pytest.raises(AioError, match="no such luck"):
        crashes.step(model, optimizer, 0, 0)
    with pytest.raises(StateInvalid, match="interrupted"):
        optimizer.step()
    with pytest.raises(StateInvalid, match="interrupted"):
        inf.handle(model).close()


@pytest.mark.parametrize("nth", [3, 4])
def test_close_frees_everything_after_an_error_at_the_end_of_backward(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = rooted(tmp_path)
    break_backward(model, nth, monkeypatch)
    with pytest.raises(AioError, match="no such luck"):
        crashes.step(model, optimizer, 0, 0)
    assert held_in(tmp_path)
    inf.handle(model).close()
    assert not held_in(tmp_path)


def test_every_step_of_closing_is_taken_and_the_first_error_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for also in (
        "pipeline.wait",
        "parts.lifecycle.detach",
        "parts.tiers.executor.wait_all",
        "parts.tiers.buffers.close",
    ):
        model = inf.offload(llama(), policy(tmp_path))
        optimizer, handle = inf.AdamW(model.parameters(), lr=1e-2), inf.handle(model)
        train(model, optimizer, [BATCH])
        part, _, name = also.rpartition(".")
        with monkeypatch.context() as patches:
            patches.setattr(operator.attrgetter(part)(handle), name, failing(also))
            patches.setattr(handle.unsharder, "close", failing("unsharder.close"))
            first, second = sorted((also, "unsharder.close"), key=ORDER.index)
            with pytest.raises(AioError, match=first):
                handle.close()
        assert handle.closed
        assert not held_in(tmp_path), also
        assert f"AioError: {second}" in caplog.text
        caplog.clear()
        handle.close()


ORDER = [
    "pipeline.wait",
    "parts.lifecycle.detach",
    "parts.tiers.executor.wait_all",
    "unsharder.close",
    "parts.tiers.buffers.close",
]
