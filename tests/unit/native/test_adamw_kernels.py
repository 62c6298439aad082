"""Every instruction set gives the bits of the torch reference, and the reference those of
torch.optim.AdamW's maths."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.cabi.records import HYPER, LOG_MAX, Format
from infinity._src.kernels.hyper import hyper_row_adamw
from tests.oracle import Hyper, adamw_
from tests.unit.native.states import (
    HYPER_PLAIN,
    HYPERS,
    assert_same_bits,
    native_update,
    random_states,
    torch_update,
)

FORMATS = [Format.SPLIT, Format.FP32]


@pytest.mark.parametrize("bf16_grad", [True, False], ids=["grad_bf16", "grad_fp32"])
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=list(HYPERS))
@pytest.mark.parametrize("state_format", FORMATS)
def test_kernels_give_the_bits_of_torch(
    isa: str, state_format: Format, hyper: Hyper, bf16_grad: bool
) -> None:
    for seed, numel in enumerate((1, 255, 256, 257, 4096, 100_003)):
        ours, grad = random_states(state_format, numel, seed, bf16_grad=bf16_grad)
        theirs = [section.copy() for section in ours]
        for _ in range(3):
            native_update(state_format, ours, grad, hyper.row())
            torch_update(state_format, theirs, grad, hyper.row())
        assert_same_bits(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 1200),
    st.integers(0, 17),
    st.integers(0, 2**31),
    st.booleans(),
    st.floats(1e-8, 1.0),
    st.integers(1, 100_000),
    st.floats(0.0, 1.0),
    st.lists(
        st.tuples(st.sampled_from(["mul", "div", "clamp_min", "clamp_max"]), st.floats(1e-6, 1e6)),
        max_size=LOG_MAX,
    ),
)
def test_all_instruction_sets_agree_with_torch_on_any_length_start_and_scalars(
    state_format: Format,
    numel: int,
    offset: int,
    seed: int,
    bf16_grad: bool,
    lr: float,
    step: int,
    weight_decay: float,
    log: list[tuple[str, float]],
) -> None:
    row = hyper_row_adamw(
        lr=lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=weight_decay, step=step, log=log
    )
    sections, grad = random_states(state_format, numel, seed, offset=offset, bf16_grad=bf16_grad)
    expected = [section.copy() for section in sections]
    torch_update(state_format, expected, grad, row)
    before = native.isa()
    try:
        for name in native.isas():
            native.select_isa(name)
            # A copy would be aligned again: update a view at the same offset.
            bases = [np.empty(numel + offset, section.dtype) for section in sections]
            ours = [base[offset:] for base in bases]
            for target, section in zip(ours, sections, strict=True):
                target[:] = section
            native_update(state_format, ours, grad, row)
            assert_same_bits(ours, expected)
    finally:
        native.select_isa(before)


def test_a_kernel_touches_nothing_outside_its_range(isa: str) -> None:
    sections, grad = random_states(Format.SPLIT, 700, seed=3)
    before = [section.copy() for section in sections]
    native_update(
        Format.SPLIT, [section[101:600] for section in sections], grad[101:600], HYPER_PLAIN.row()
    )
    for section, old in zip(sections, before, strict=True):
        as_bits = f"u{section.itemsize}"
        np.testing.assert_array_equal(section[:101].view(as_bits), old[:101].view(as_bits))
        np.testing.assert_array_equal(section[600:].view(as_bits), old[600:].view(as_bits))


def test_a_nan_gradient_leaves_canonical_nan_masters(isa: str) -> None:
    for payload in (0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):
        sections, _ = random_states(Format.SPLIT, 64, seed=1)
        for section in sections:
            section[:] = 0
        grad = np.full(64, payload, np.uint32).view(np.float32)
        native_update(Format.SPLIT, sections, grad, HYPER_PLAIN.row())
        assert (sections[0] == 0x7FC0).all()
        assert (sections[1] == 0).all()


def test_denormals_survive_a_thread_that_flushes_them(isa: str) -> None:
    """A thread inherits the floating-point mode of the one that made it; the kernels do not."""
    sections, grad = random_states(Format.FP32, 512, seed=5, bf16_grad=False)
    grad[:] = 1e-20  # its square is a denormal
    sections[0][:], sections[1][:], sections[2][:] = 1.0, 0.0, 1e-40
    plain = [section.copy() for section in sections]
    native_update(Format.FP32, plain, grad, HYPER_PLAIN.row())
    assert (plain[2] > 0).all()
    assert (plain[2] < np.finfo(np.float32).tiny).all()
    kept: list[bool] = []

    def flushing() -> None:
        torch.set_flush_denormal(True)
        try:
            native_update(Format.FP32, sections, grad, HYPER_PLAIN.row())
            # The mode that the caller had is back afterwards.
            kept.append(bool(np.float32(1e-40) * np.float32(1.0) == 0))
        finally:
            torch.set_flush_denormal(False)

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert_same_bits(sections, plain)
    assert kept == [True]


def test_the_update_follows_torch_optim_adamw_within_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(5000, generator=generator)
    plain = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([plain], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    for step in range(1, 21):
        grad = torch.randn(5000, generator=generator)
        plain.grad = grad.clone()
        optimizer.step()
        hyper = Hyper(lr=1e-3, step=step, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        adamw_(param.numpy(), [exp_avg.numpy(), exp_avg_sq.numpy()], grad.numpy(), hyper.row())
    # torch's square root is an ulp off on some values, on other ones with other alignments of its
    # tensors: 20 steps of 1e-3 add up to a few 1e-7. A wrong bias correction or decay is a hundred
    # times that.
    torch.testing.assert_close(param, plain.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(exp_avg, optimizer.state[plain]["exp_avg"], rtol=1e-5, atol=1e-7)


def test_scalars_are_rounded_once_as_torch_rounds_a_python_float() -> None:
    row = hyper_row_adamw(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=3)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for name, scalar in (
        ("decay", 1 - 1e-4 * 0.01),
        ("one_minus_beta1", 1 - 0.9),
        ("one_minus_beta2", 1 - 0.999),
        ("step_size", 1e-4 / (1 - 0.9**3)),
    ):
        assert torch.equal(
            values * scalar, values * torch.tensor(float(row[name]), dtype=torch.float32)
        )
        assert torch.equal(
            values / scalar, values / torch.tensor(float(row[name]), dtype=torch.float32)
        )


def test_scalars_that_cannot_be_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="first update is step 1"):
        Hyper(lr=1e-3, step=0).row()
    with pytest.raises(ValueError, match="replays at most 8: multiply the factors"):
        Hyper(lr=1e-3, step=1, log=(("mul", 2.0),) * (LOG_MAX + 1)).row()
    with pytest.raises(ValueError, match="has no optimizer states"):
        torch_update(Format.RAW, [np.zeros(1)], np.zeros(1, np.float32), np.zeros((), HYPER))


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="one of portable, avx2, avx512"):
        native.select_isa("sse9")
