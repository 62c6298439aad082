"""The implementation that runs: the rule, the floor of Triton, and the trial of a kernel before its
first use."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from infinity._src.cabi.records import HYPER, SEG, Format, GradDtype
from infinity._src.kernels import choice
from infinity._src.kernels.comm_codec import (
    decode_sum,
    encode,
    encode_torch,
    sum_in_order,
)
from infinity._src.kernels.hyper import hyper_row_adamw
from infinity._src.kernels.quantize import dequantize, quantize, quantize_torch
from infinity._src.kernels.quantized import wire_bytes
from infinity._src.kernels.trial import CPU, Trial, difference, sample
from infinity._src.kernels.update import UpdatePlan
from infinity._src.kernels.usual_trials import trials_of_usual_forms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
ROOT = Path(__file__).resolve().parents[3]
BITWISE = [op.name for op in choice.OPS.values() if op.bitwise]
NUMEL = 192


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter on the CPU stands for the compiler on a GPU, and nothing was tried yet."""
    if not choice.interpreted():
        pytest.skip("Triton compiles here; its interpreter needs TRITON_INTERPRET=1")
    monkeypatch.setattr(choice, "compiles", lambda device: True)
    for known in (choice._passed, choice._failed, choice._warned):
        known.clear()
    yield
    for known in (choice._passed, choice._failed, choice._warned):
        known.clear()


def flipped(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8)[17] ^= 1


class Use(NamedTuple):
    """One operation: the function that users call, and the function that launches the kernel.
    spoil: flips one bit of what the launcher wrote, in its arguments and in its result."""

    run: Callable[[], torch.Tensor]
    caller: str
    spoil: Callable[..., None]


def uses() -> dict[str, Use]:
    values = sample(torch.bfloat16)[:NUMEL]
    q = quantize_torch(values, 8, 64, True, None, 0)
    sent = torch.empty(wire_bytes(NUMEL, 8, 64), dtype=torch.uint8)
    encode_torch(values, sent, 8, 64, None, 0, None)

    def encoded() -> torch.Tensor:
        wire = torch.empty(wire_bytes(NUMEL, 8, 64), dtype=torch.uint8)
        encode(values, wire, bits=8, group_numel=64)
        return wire

    def decoded() -> torch.Tensor:
        out = torch.empty(NUMEL)
        decode_sum([sent, sent], out, bits=8, group_numel=64, divisor=3)
        return out

    def summed() -> torch.Tensor:
        out = torch.empty(NUMEL)
        sum_in_order([values, values], out, divisor=3)
        return out

    def updated() -> torch.Tensor:
        sections = [
            torch.zeros(kind.size_bytes(NUMEL), dtype=torch.uint8) for kind in Format.SPLIT.sections
        ]
        segs = np.zeros(1, SEG)
        segs["numel"] = NUMEL
        row = hyper_row_adamw(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
        plan = UpdatePlan(
            Format.SPLIT, [segs], np.array([row], HYPER), device=CPU, grad_dtype=values.dtype
        )
        plan.run(0, sections, values)
        return torch.cat(sections)

    return {
        "group_quantize": Use(
            lambda: quantize(values, bits=8, group_numel=64).codes,
            "quantize.quantize_triton",
            lambda done, *_: flipped(done[0]),
        ),
        "group_dequantize": Use(
            lambda: dequantize(q), "quantize.dequantize_triton", lambda done, q, out: flipped(out)
        ),
        "wire_encode": Use(
            encoded, "comm_codec.encode_triton", lambda done, values, wire, *_: flipped(wire)
        ),
        "wire_decode": Use(
            decoded, "comm_codec.decode_sum_triton", lambda done, wires, out, *_: flipped(out)
        ),
        "ordered_sum": Use(
            summed, "comm_codec.sum_in_order_triton", lambda done, pieces, out, *_: flipped(out)
        ),
        "update": Use(
            updated,
            "update.Launches.run",
            lambda done, self, index, sections, base: flipped(sections[0]),
        ),
    }


def behind(monkeypatch: pytest.MonkeyPatch, use: Use, then: Callable[..., None]) -> list[str]:
    """Call `then` behind each call of the kernel's caller; returns a list of the calls."""
    path = f"infinity._src.kernels.triton.{use.caller}"
    run, calls = pkgutil.resolve_name(path), []

    def watched(*arguments: Any) -> Any:
        calls.append(use.caller)
        done = run(*arguments)
        then(done, *arguments)
        return done

    monkeypatch.setattr(path, watched)
    return calls


def reference(name: str, use: Use) -> torch.Tensor:
    with choice.forced(**{name: "torch"}):
        return use.run()


def test_every_bitwise_operation_has_a_trial_and_a_use() -> None:
    assert set(trials_of_usual_forms()) == set(BITWISE)
    assert set(uses()) == set(BITWISE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BITWISE)
def test_triton_passes_its_trial_on_a_gpu(name: str) -> None:
    device = torch.device("cuda", 0)
    if choice.interpreted() or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    assert difference(trials_of_usual_forms()[name], device) == ""


def test_a_trial_in_a_thread_that_flushes_denormals_passes() -> None:
    """Samples and references keep denormals there, as the kernels do."""
    outputs, form = trials_of_usual_forms()["ordered_sum"]
    kept = outputs("torch", CPU, *form)
    both: list[dict[str, torch.Tensor]] = []

    def noted(_which: str, *_: Any) -> dict[str, torch.Tensor]:
        both.append(dict(outputs("torch", CPU, *form)))
        return both[-1]

    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        found = difference(Trial(noted, ()), CPU)
        assert float(torch.full((1,), 2.0**-130).mul(1.0)) == 0.0, "the thread's mode was changed"
    finally:
        torch.set_flush_denormal(False)
    assert found == ""
    for made in both:
        assert all(
            torch.equal(made[key].view(torch.uint8), values.view(torch.uint8))
            for key, values in kept.items()
        )
    assert len(both) == 2


@pytest.mark.parametrize("name", sorted(set(BITWISE) - {"group_dequantize"}))
def test_the_sample_finds_an_arithmetic_that_flushes_denormals(name: str) -> None:
    """As Triton before 3.6 does. A dequantized value is a whole multiple of 2^-126: never
    denormal."""
    outputs, form = trials_of_usual_forms()[name]
    expected = outputs("torch", CPU, *form)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        found = outputs("torch", CPU, *form)
    finally:
        torch.set_flush_denormal(False)
    assert any(
        not torch.equal(found[key].view(torch.uint8), values.view(torch.uint8))
        for key, values in expected.items()
    )


@pytest.mark.parametrize("name", BITWISE)
def test_a_bitwise_operation_runs_on_triton_once_its_form_was_tried(
    name: str, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = uses()[name]
    expected = reference(name, use)
    forms = set(choice._passed)
    calls = behind(monkeypatch, use, lambda *_: None)
    for count in (2, 3):  # the trial and the use; then uses alone
        assert torch.equal(use.run().view(torch.uint8), expected.view(torch.uint8))
        assert len(calls) == count
    assert {key[:2] for key in choice._passed - forms} == {(name, CPU)}
    assert choice.why(name, CPU) == "the same bits as torch, in one pass"


@pytest.mark.parametrize("name", BITWISE)
def test_one_wrong_bit_leaves_the_operation_to_torch_with_one_warning(
    name: str, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = uses()[name]
    expected = reference(name, use)
    calls = behind(monkeypatch, use, use.spoil)
    with pytest.warns(UserWarning, match=f"^{name} on cpu runs on torch, which gives") as caught:
        assert torch.equal(use.run().view(torch.uint8), expected.view(torch.uint8))
    (said,) = [str(warning.message) for warning in caught]
    assert f"Triton {choice.triton_version()} failed the trial of the form (" in said
    assert re.search(
        r": 1 of \d+ [\w ]+ differ, the first is 0x\w+ where torch on the CPU has", said
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Nothing is tried again, in this form or in others.
        assert torch.equal(use.run().view(torch.uint8), expected.view(torch.uint8))
        assert choice.implementation(name, CPU, trials_of_usual_forms()[name]) == "torch"
    assert len(calls) == 1
    assert choice.why(name, CPU) in said
    with choice.forced(**{name: "triton"}), pytest.raises(ValueError, match=f"for {name}: Triton"):
        use.run()


def test_a_kernel_that_does_not_compile_leaves_the_operation_to_torch(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setattr("infinity._src.kernels.triton.quantize.quantize_triton", no_compiler)
    use = uses()["group_quantize"]
    with pytest.warns(
        UserWarning, match="does not run: RuntimeError: Failed to find C compiler. S"
    ):
        found = use.run()
    assert torch.equal(found, reference("group_quantize", use))


def test_forms_that_passed_keep_triton_when_another_fails(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "ordered_sum"
    monkeypatch.setattr(choice, "difference", lambda trial, device: "no" * (trial.form == ("bad",)))
    good, bad, late = (choice.Trial(dict, (form,)) for form in ("good", "bad", "late"))
    assert choice.implementation(name, CPU, good) == "triton"
    with pytest.warns(UserWarning, match=name):
        assert choice.implementation(name, CPU, bad) == "torch"
    found = [choice.implementation(name, CPU, trial) for trial in (good, bad, late)]
    assert found == ["triton", "torch", "torch"]


def test_a_plan_of_updates_runs_on_one_implementation(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first form passes, and its second fails."""
    tried: list[Any] = []

    def fails_fp32(trial: choice.Trial, device: torch.device) -> str:
        tried.append(trial.form[2])
        return "no" * (trial.form[2] == GradDtype.FP32)

    monkeypatch.setattr(choice, "difference", fails_fp32)
    row = hyper_row_adamw(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
    segs = np.zeros(2, SEG)
    segs["start"], segs["numel"] = (0, 64), 64
    segs["grad_dtype"] = (GradDtype.BF16, GradDtype.FP32)
    with pytest.warns(UserWarning, match="^update on cpu"):
        plan = UpdatePlan(Format.SPLIT, [segs], np.array([row], HYPER), device=CPU)
    assert tried == [GradDtype.BF16, GradDtype.FP32]
    assert plan._launches is None
    one = UpdatePlan(Format.SPLIT, [segs[:1]], np.array([row], HYPER), device=CPU)
    assert one._launches is not None


def test_threads_that_come_at_once_make_one_trial(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, tried = threading.Barrier(2), []

    def slow(trial: choice.Trial, device: torch.device) -> str:
        tried.append(trial.form)
        time.sleep(0.05)
        return ""

    monkeypatch.setattr(choice, "difference", slow)

    def run() -> None:
        both.wait()
        assert choice.implementation("update", CPU, choice.Trial(dict, ())) == "triton"

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run) for _ in range(2)]:
            done.result()
    assert tried == [()]


def test_a_trial_without_memory_is_made_again(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [1, 1]

    def quantize(*arguments: Any) -> Any:
        if fails and fails.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*arguments)

    module = importlib.import_module("infinity._src.kernels.triton.quantize")
    plain = module.quantize_triton
    monkeypatch.setattr(module, "quantize_triton", quantize)
    trial = trials_of_usual_forms()["group_quantize"]
    # Twice without memory: torch, for now. Then it passes.
    assert choice.implementation("group_quantize", CPU, trial) == "torch"
    assert choice.implementation("group_quantize", CPU, trial) == "triton"
    fails.append(1)
    choice._passed.clear()
    # Once without memory: torch's cache is emptied, and it passes.
    assert choice.implementation("group_quantize", CPU, trial) == "triton"


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("", "cannot be imported"),
        ("3.4.0", "Triton 3.4.0 flushes denormals"),
        ("3.5.1+git", "install 3.6 or newer, which torch 2.10"),
        ("3.6.0", ""),
        ("3.10.0", ""),
        ("4.0", ""),
    ],
)
def test_a_triton_below_the_floor_computes_nothing_bitwise(
    version: str, fault: str, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "triton_version", lambda: version)
    monkeypatch.setattr(choice, "difference", lambda trial, device: "")
    for name, op in choice.OPS.items():
        trial = trials_of_usual_forms().get(name)
        refused = bool(fault) and (op.bitwise or not version)
        with choice.forced(**{name: "triton"}):
            if refused:
                with pytest.raises(ValueError, match=f"Triton for {name}: .*{re.escape(fault)}"):
                    choice.implementation(name, CPU, trial)
            else:
                assert choice.implementation(name, CPU, trial) == "triton"
        expected = "triton" if op.bitwise and not refused else "torch"
        warns = pytest.warns(UserWarning, match=re.escape(fault)) if op.bitwise and refused else (
            contextlib.nullcontext()
        )  # fmt: skip
        with warns:
            assert choice.implementation(name, CPU, trial) == expected
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choice.implementation(name, CPU, trial) == expected  # said once
        if not op.bitwise:
            assert choice.why(name, CPU) == "not measured on such a device"
        elif refused:
            assert fault in choice.why(name, CPU)


def test_figures_decide_where_there_are_any(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {("update", (9, 0)): 0.8, ("tile_matmul", (9, 0)): 1.3, ("ordered_sum", (8, 0)): 0.5}
    monkeypatch.setattr(choice, "MEASURED", figures)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = {
        name: choice.implementation(name, CPU)
        for name in ("update", "tile_matmul", "ordered_sum", "linear_cross_entropy")
    }
    assert list(found.values()) == ["torch", "triton", "triton", "torch"]
    assert choice.why("update", CPU) == "measured: torch's time is 0.80 of Triton's"


def test_the_metadata_has_the_floor_of_the_choice() -> None:
    floor = ".".join(map(str, choice.TRITON_LEAST))
    assert f"'triton>={floor} ;" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntriton=={floor}." in pinned
