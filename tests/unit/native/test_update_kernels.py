"""Every instruction set gives the bits of infinity/_src/kernels for every algorithm on every state
format, however it is cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.cabi.native import ffi, lib
from infinity._src.cabi.records import QUANT_GROUP, Format, Master, Moments
from infinity._src.kernels.hyper import (
    hyper_row_adamw,
    hyper_row_lion,
    hyper_row_muon,
    hyper_row_muon_momentum,
    hyper_row_sgd,
)
from infinity._src.kernels.random_bits import rounding_key
from tests.oracle import decode_sections, encode_sections, random_bits, update_sections
from tests.unit.native.states import Array, native_update
from tests.unit.native.states import random_bits as odd_bits

MASTERS = (Master.SPLIT, Master.SPLIT8, Master.FP32, Master.FP16)
ENCODINGS = (Moments.FP32, Moments.BF16, Moments.Q8)
LOG = (("div", 1024.0), ("clamp_min", -0.5), ("clamp_max", 0.25), ("mul", 0.7))

ROWS = {
    "adamw": (
        2,
        hyper_row_adamw(
            lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, step=7, key=0xDEADBEEF12345678
        ),
    ),
    "adamw logged": (
        2,
        hyper_row_adamw(
            lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0, step=1, key=3, log=LOG
        ),
    ),
    # Masters do not change, so that those half-way between two bf16 values (SPECIAL_BITS) stay
    # half-way.
    "adamw at rest": (
        2,
        hyper_row_adamw(lr=0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0, step=7, key=4),
    ),
    "sgd": (0, hyper_row_sgd(lr=0.1, first=False, weight_decay=0.01, key=11)),
    "sgd at rest": (0, hyper_row_sgd(lr=0, first=False, key=10)),
    "sgd plain": (0, hyper_row_sgd(lr=0.1, first=True, key=1, log=LOG)),
    "momentum": (
        1,
        hyper_row_sgd(lr=0.1, first=False, momentum=0.9, dampening=0.5, weight_decay=0.01, key=12),
    ),
    "momentum first": (1, hyper_row_sgd(lr=0.1, first=True, momentum=0.9, dampening=0.5, key=13)),
    "nesterov": (
        1,
        hyper_row_sgd(lr=0.1, first=False, momentum=0.9, nesterov=True, weight_decay=0.1, key=14),
    ),
    "lion": (1, hyper_row_lion(lr=1e-3, weight_decay=0.1, key=15)),
}
# No kernel of a device has these.
NATIVE_ROWS = {
    **ROWS,
    "muon momentum": (1, hyper_row_muon_momentum(momentum=0.95, nesterov=True, log=LOG, key=16)),
    "muon momentum plain": (2, hyper_row_muon_momentum(momentum=0.3, nesterov=False, key=17)),
    "muon": (1, hyper_row_muon(step_size=0.02, decay=0.99, key=18)),
    "muon beside adamw": (2, hyper_row_muon(step_size=1e-3, decay=1.0, key=19)),
}


def cases_of(rows: dict[str, Any]) -> list[tuple[str, Format]]:
    return [
        (name, Format(master, moments, count))
        for name, (count, _) in rows.items()
        for master in MASTERS
        for moments in (ENCODINGS if count else ENCODINGS[:1])
    ]


CASES, NATIVE_CASES = cases_of(ROWS), cases_of(NATIVE_ROWS)


def states(state_format: Format, numel: int, seed: int, *, odd: bool) -> tuple[list[Array], Array]:
    """Sections and an fp32 gradient; with `odd`, a share of special values in all of them."""
    rng = np.random.default_rng(seed)
    if odd:
        master, moment, second, grad = (
            odd_bits(rng, numel, spread).view(np.float32) for spread in (60, 60, 90, 60)
        )
        # half-way between two bf16, also after the last whole row of vectors
        master.view(np.uint32)[-1] = 0x3F808000
    else:
        scale = np.exp2(rng.uniform(-20, 0, numel)).astype(np.float32)
        master, moment, second, grad = (
            rng.standard_normal(numel).astype(np.float32) * scale for _ in range(4)
        )
    with np.errstate(all="ignore"):
        values = [moment, np.abs(second * second)][: state_format.count]
    return encode_sections(state_format, master, values), grad


def as_bf16(grad: Array) -> Array:
    return (grad.view(np.uint32) >> 16).astype(np.uint16)


def assert_same_sections(state_format: Format, ours: list[Array], theirs: list[Array]) -> None:
    """Equal bit for bit; in fp32 any NaN equals any NaN."""
    for kind, left, right in zip(state_format.sections, ours, theirs, strict=True):
        differs = left.view(f"u{left.itemsize}") != right.view(f"u{right.itemsize}")
        if left.dtype == np.float32:
            differs &= ~(np.isnan(left) & np.isnan(right))
        index = np.flatnonzero(differs)
        assert index.size == 0, (
            f"{kind.name}: {index.size} of {left.size}, at {index[0]}: {left[index[0]]} "
            f"{right[index[0]]}"
        )


@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
@pytest.mark.parametrize(
    ("name", "state_format"), NATIVE_CASES, ids=[f"{name} {fmt}" for name, fmt in NATIVE_CASES]
)
def test_kernels_give_the_bits_of_the_reference(
    isa: str, name: str, state_format: Format, odd: bool
) -> None:
    row = NATIVE_ROWS[name][1]
    for seed, numel in enumerate((1, 63, 64, 65, 224, 1000, 4096 + 17)):
        ours, grad = states(state_format, numel, seed, odd=odd)
        theirs = [section.copy() for section in ours]
        with np.errstate(all="ignore"):
            grads = (grad, grad.astype(np.float16), as_bf16(grad))
        element = 2**32 - 128 * seed  # the longer ones go on beyond 2^32, where the keys change
        for gradient in grads:
            # Muon's first update writes into the gradient.
            both = gradient.copy(), gradient.copy()
            native_update(state_format, ours, both[0], row, element)
            update_sections(state_format, theirs, both[1], row, element)
            bits = [each.view(f"u{each.itemsize}") for each in both]
            nan = np.isnan(both[0]) & np.isnan(both[1]) if gradient is grad else False
            assert ((bits[0] == bits[1]) | nan).all()
        assert_same_sections(state_format, ours, theirs)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_it_does_not_matter_where_a_parameter_is_cut(data: st.DataObject) -> None:
    """Any cut at a group's start, any instruction set for each part: the bits of the whole."""
    name, state_format = data.draw(st.sampled_from(NATIVE_CASES))
    numel = data.draw(st.integers(1, 2000))
    element = 64 * data.draw(st.sampled_from([0, 1, 5, 2**26 - 4, 2**26 - 1, 2**40]))
    cuts = sorted(
        {64 * c for c in data.draw(st.lists(st.integers(0, numel // 64), max_size=5))} | {0, numel}
    )
    whole, grad = states(
        state_format, numel, data.draw(st.integers(0, 2**31)), odd=data.draw(st.booleans())
    )
    parts = [section.copy() for section in whole]
    row = NATIVE_ROWS[name][1]
    # Muon's first update writes into the gradient.
    given = grad.copy()
    update_sections(state_format, whole, grad, row, element)
    before = native.isa()
    try:
        for low, high in itertools.pairwise(cuts):
            native.select_isa(data.draw(st.sampled_from(native.isas())))
            cut = [
                section.view(np.uint8)[kind.size_bytes(low) : kind.size_bytes(high)].view(
                    section.dtype
                )
                for kind, section in zip(state_format.sections, parts, strict=True)
            ]
            native_update(state_format, cut, given[low:high], row, element + low)
    finally:
        native.select_isa(before)
    assert_same_sections(state_format, parts, whole)
    assert np.array_equal(given, grad, equal_nan=True)


def test_every_second_is_rounded_with_bits_of_its_own() -> None:
    """Keys of neighbouring steps and names, and neighbouring elements, give bits that agree as
    often as chance has it."""
    first = random_bits(rounding_key(1, 5, "layers.0.weight"), 0, 1 << 16)
    for key, element in (
        (rounding_key(1, 6, "layers.0.weight"), 0),
        (rounding_key(2, 5, "layers.0.weight"), 0),
        (rounding_key(1, 5, "layers.1.weight"), 0),
        (rounding_key(1, 5, "layers.0.weight"), 1),
        (rounding_key(1, 5, "layers.0.weight"), 1 << 32),
    ):
        second = random_bits(key, element, 1 << 16)
        same = [(((first ^ second) >> np.uint32(bit)) & 1).mean() for bit in range(32)]
        assert np.allclose(same, 0.5, atol=0.01), (key, element)
        pairs = np.corrcoef(first.astype(np.float64), second.astype(np.float64))[0, 1]
        assert abs(pairs) < 0.02


def test_random_bits_are_even_in_every_position_and_uniform_in_every_field() -> None:
    bits = random_bits(rounding_key(0, 1, "w"), 12_345 * 64, 1 << 20)
    assert np.allclose([(bits >> np.uint32(bit) & 1).mean() for bit in range(32)], 0.5, atol=2e-3)
    for shift, width in ((24, 8), (12, 12), (0, 12), (16, 16), (0, 16)):
        counts = np.bincount(
            bits >> np.uint32(shift) & np.uint32((1 << width) - 1), minlength=1 << width
        )
        expected = bits.size / (1 << width)
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        cells = 1 << width
        assert abs(chi2 - cells) < 6 * np.sqrt(2 * cells), (shift, width, chi2)


@pytest.mark.parametrize(
    ("row", "state_format"),
    [
        ("adamw", Format(Master.SPLIT, Moments.FP32, 1)),
        ("lion", Format.SPLIT),
        ("momentum", Format(Master.SPLIT, Moments.FP32, 0)),
        ("momentum", Format.SPLIT),
        ("adamw", Format.RAW),
        ("adamw", Format.SPLIT.with_grad(1)),
    ],
)
def test_an_algorithm_with_the_wrong_number_of_moments_is_refused(
    row: str, state_format: Format
) -> None:
    record = ROWS[row][1]
    assert not lib.inf_update_valid(int(state_format), ffi.cast("inf_hyper *", record.ctypes.data))
    with pytest.raises(ValueError, match="Format"):
        update_sections(state_format, [], np.zeros(1, np.float32), record)


@pytest.mark.parametrize("algorithm", [5, -1])
def test_an_unknown_algorithm_is_refused(algorithm: int) -> None:
    record = ROWS["adamw"][1].copy()
    record["algorithm"] = algorithm
    assert not lib.inf_update_valid(int(Format.SPLIT), ffi.cast("inf_hyper *", record.ctypes.data))


@pytest.mark.parametrize(
    "state_format", [Format(Master.SPLIT8, Moments.Q8, 2), Format(Master.SPLIT, Moments.BF16, 2)]
)
def test_the_step_uses_the_moments_before_they_are_rounded(isa: str, state_format: Format) -> None:
    """One step from zero moments moves every parameter as fp32 states do, whatever its group's
    other gradients are."""
    grad = np.exp2(np.linspace(-30, 0, 256)).astype(np.float32)
    master = np.linspace(-1, 1, 256, dtype=np.float32)
    exact = Format(state_format.master, Moments.FP32, 2)
    row = hyper_row_adamw(lr=1e-2, betas=(0.9, 0.999), eps=1e-12, weight_decay=0, step=1, key=9)
    coarse, fine = (
        encode_sections(fmt, master, [np.zeros(256, np.float32)] * 2)
        for fmt in (state_format, exact)
    )
    native_update(state_format, coarse, grad, row)
    native_update(exact, fine, grad, row)
    np.testing.assert_array_equal(
        decode_sections(state_format, coarse)[0], decode_sections(exact, fine)[0]
    )


def test_the_rest_of_a_parameters_last_group_is_untouched(isa: str) -> None:
    state_format = Format(Master.SPLIT8, Moments.Q8, 2)
    sections, grad = states(state_format, 4 * QUANT_GROUP, 3, odd=False)
    before = [section.copy() for section in sections]
    numel = 2 * QUANT_GROUP + 5
    native_update(state_format, sections, grad[:numel], ROWS["adamw"][1])
    for kind, section, old in zip(state_format.sections, sections, before, strict=True):
        end = kind.size_bytes(numel)
        np.testing.assert_array_equal(section.view(np.uint8)[end:], old.view(np.uint8)[end:])


@pytest.mark.parametrize(
    ("moment", "grad_bits", "scale", "code"),
    [(0, 0x7F7FFFFF, 0x7F7F, 127), (1, 0x5F7FFFFF, 0x7F7F, 255), (1, 0x1C800000, 0x1080, 1)],
)
def test_numbers_beyond_the_limits_of_scales_get_the_last_codes(
    isa: str, moment: int, grad_bits: int, scale: int, code: int
) -> None:
    """The largest fp32 are above the largest bf16, and stochastic rounding would take a quarter of
    them to the next code."""
    state_format = Format(Master.SPLIT8, Moments.Q8, 2)
    zeros = np.zeros(256, np.float32)
    sections = encode_sections(state_format, zeros, [zeros, zeros])
    grad = np.full(256, grad_bits, np.uint32).view(np.float32)
    row = hyper_row_adamw(lr=0, betas=(0, 0), eps=1, weight_decay=0, step=1, key=5)
    native_update(state_format, sections, grad, row)
    assert (sections[2 + moment].view(np.uint8) == code).all()
    assert (sections[4].view(np.uint16).reshape(-1, 2)[:, moment] == scale).all()
