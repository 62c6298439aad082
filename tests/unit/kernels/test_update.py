"""A chunk that lies on a device is updated, by torch and by Triton, to the bits of the
reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity._src.cabi.records import HYPER, SEG, Format, GradDtype, GradSection, Master, Moments
from infinity._src.kernels import choice
from infinity._src.kernels.update import UpdatePlan
from tests.marks import alternating
from tests.oracle import update_sections
from tests.unit.native.test_update_kernels import CASES, ROWS, as_bf16, assert_same_sections, states

# infinities and NaN are meant; the interpreter is numpy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
Array = Any
COMPACT = Format(Master.SPLIT8, Moments.Q8, 2)
quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def on_device(array: Array, device: torch.device) -> torch.Tensor:
    """The bytes of an array."""
    return torch.from_numpy(array.view(np.uint8).reshape(-1).copy()).to(device)


def gradient_on(grad: Array, device: torch.device) -> torch.Tensor:
    """uint16 holds the bits of bf16."""
    if grad.dtype == np.uint16:
        return torch.from_numpy(grad.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(grad.copy()).to(device)


def grads_of(grad: Array) -> list[Array]:
    with np.errstate(all="ignore"):
        return [as_bf16(grad), grad.astype(np.float16), grad]


def segs_of(*rows: tuple[int, int, int, int]) -> Array:
    """(start, numel, element, hyper) each."""
    segs = np.zeros(len(rows), SEG)
    for seg, (start, numel, element, hyper) in zip(segs, rows, strict=True):
        seg["start"], seg["numel"], seg["element"], seg["hyper"] = start, numel, element, hyper
    return segs


def reference(
    state_format: Format, sections: list[Array], grad: Array, segs: Array, hypers: Array
) -> None:
    """Segment by segment, in place."""
    for seg in segs:
        start, numel = int(seg["start"]), int(seg["numel"])
        if not numel:
            continue
        parts = []
        for section, kind in zip(sections, state_format.sections, strict=True):
            low = start // kind.group_numel * kind.itemsize
            parts.append(
                section.view(np.uint8)[low : low + kind.size_bytes(numel)].view(section.dtype)
            )
        update_sections(
            state_format,
            parts,
            grad[start : start + numel],
            hypers[int(seg["hyper"])],
            int(seg["element"]),
        )


def update_chunk(
    state_format: Format,
    sections: list[torch.Tensor],
    segs: Array,
    hypers: Array,
    grad: torch.Tensor | None = None,
) -> None:
    """One chunk alone: a plan for it, made and run."""
    grad_dtype = None if grad is None else grad.dtype
    UpdatePlan(state_format, [segs], hypers, device=sections[0].device, grad_dtype=grad_dtype).run(
        0, sections, grad
    )


def ours(
    which: str,
    device: torch.device,
    state_format: Format,
    sections: list[Array],
    grad: Array,
    segs: Array,
    hypers: Array,
) -> list[Array]:
    """The sections after `update_chunk`."""
    placed = [on_device(section, device) for section in sections]
    with choice.forced(update=which):
        update_chunk(state_format, placed, segs, hypers, grad=gradient_on(grad, device))
    return [
        tensor.cpu().numpy().view(section.dtype)
        for tensor, section in zip(placed, sections, strict=True)
    ]


@pytest.mark.parametrize(
    ("which", "case"),
    alternating(choice.IMPLEMENTATIONS, CASES),
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} {value[1]}",
)
def test_every_algorithm_on_every_format_gives_the_bits_of_the_reference(
    device: torch.device, which: str, case: tuple[str, Format]
) -> None:
    name, state_format = case
    hypers = np.array([ROWS[name][1]], HYPER)
    for seed, (numel, odd) in enumerate(
        [(1000, True), (1, False), (2048 + 17, False)]
    ):
        sections, grad = states(state_format, numel, seed, odd=odd)
        segs = segs_of((0, numel, 64 * seed, 0))
        gradient = grads_of(grad)[CASES.index(case) % 3]
        expected = [section.copy() for section in sections]
        reference(state_format, expected, gradient, segs, hypers)
        assert_same_sections(
            state_format,
            ours(which, device, state_format, sections, gradient, segs, hypers),
            expected,
        )


@st.composite
def chunks(draw: Any) -> tuple[Format, Array, Array, int, int]:
    """A format, several parameters with gaps between them, hypers of their own; the numel and a
    seed."""
    count = draw(st.sampled_from([2, 2, 1, 0]))
    names = [name for name, (moments, _) in ROWS.items() if moments == count]
    state_format = draw(st.sampled_from([fmt for name, fmt in CASES if ROWS[name][0] == count]))
    rows, start = [], 0
    step = 64 if state_format.moments is Moments.Q8 else 1
    for _ in range(draw(st.integers(0, 6))):
        start += step * draw(st.integers(0, 3))
        numel = draw(st.sampled_from([0, 1, 63, 64, 100, 1024, 1500]))
        element = 64 * draw(st.sampled_from([0, 3, 2**26 - 1, 2**40]))
        rows.append((start, numel, element, draw(st.integers(0, 3))))
        start += -(-numel // step) * step
    hypers = np.array([ROWS[draw(st.sampled_from(names))][1] for _ in range(4)], HYPER)
    return state_format, segs_of(*rows), hypers, start + 64, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
@quick
@given(chunk=chunks(), odd=st.booleans(), kind=st.integers(0, 2))
def test_segments_update_their_elements_alone_each_by_its_own_hyper(
    device: torch.device,
    which: str,
    chunk: tuple[Format, Array, Array, int, int],
    odd: bool,
    kind: int,
) -> None:
    state_format, segs, hypers, numel, seed = chunk
    sections, grad = states(state_format, numel, seed, odd=odd)
    gradient = grads_of(grad)[kind]
    expected = [section.copy() for section in sections]
    reference(state_format, expected, gradient, segs, hypers)
    assert_same_sections(
        state_format, ours(which, device, state_format, sections, gradient, segs, hypers), expected
    )


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_gradients_may_lie_anywhere_in_several_dtypes(device: torch.device, which: str) -> None:
    """At addresses of their own, as SEG records say, and in the chunk's own section of spilled
    gradients."""
    bare = Format(Master.SPLIT, Moments.FP32, 2)
    spilled = bare.with_grad(GradSection.BF16)
    sections, grad = states(bare, 4096, 5, odd=False)
    hypers = np.array([ROWS["adamw"][1], ROWS["adamw logged"][1]], HYPER)
    segs = segs_of((0, 1000, 0, 0), (1000, 1200, 64, 1), (2304, 1500, 0, 0), (3900, 100, 0, 1))
    kinds = (GradDtype.FP32, GradDtype.FP16, GradDtype.SECTION, GradDtype.BF16)
    by_kind = {
        GradDtype.BF16: as_bf16(grad),
        GradDtype.FP16: grad.astype(np.float16),
        GradDtype.FP32: grad,
    }
    expected = [section.copy() for section in sections]
    alive = []
    for seg, kind in zip(segs, kinds, strict=True):
        gradient = by_kind[GradDtype.BF16 if kind is GradDtype.SECTION else kind]
        reference(bare, expected, gradient, np.array([seg]), hypers)
        seg["grad_dtype"] = int(kind)
        if kind is not GradDtype.SECTION:
            start = int(seg["start"])
            alive.append(gradient_on(gradient[start : start + int(seg["numel"])], device))
            seg["grad"] = alive[-1].data_ptr()
    placed = [on_device(section, device) for section in (*sections, by_kind[GradDtype.BF16])]
    with choice.forced(update=which):
        update_chunk(spilled, placed, segs, hypers)
    after = [
        tensor.cpu().numpy().view(section.dtype)
        for tensor, section in zip(placed, sections, strict=False)
    ]
    assert_same_sections(bare, after, expected)


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_one_plan_serves_all_chunks_of_a_step_through_the_same_buffers(
    device: torch.device, which: str
) -> None:
    hypers = np.array([ROWS["adamw"][1], ROWS["adamw logged"][1]], HYPER)
    chunks = [
        segs_of((0, 1500, 0, 0), (1536, 500, 0, 1)),
        segs_of(),
        segs_of((0, 700, 512, 1)),
        segs_of((64, 2000, 0, 0)),
    ]
    buffers = [
        torch.zeros(kind.size_bytes(2064), dtype=torch.uint8, device=device)
        for kind in COMPACT.sections
    ]
    staging = torch.zeros(2064 + 1, dtype=torch.float16, device=device)
    with choice.forced(update=which):
        plan = UpdatePlan(COMPACT, chunks, hypers, device=device, grad_dtype=torch.float16)
    for seed, segs in enumerate(chunks):
        sections, grad = states(COMPACT, 2064, seed, odd=False)
        gradient = grad.astype(np.float16)
        for buffer, section in zip(buffers, sections, strict=True):
            buffer.copy_(on_device(section, device))
        # an address that is a multiple of 16, and one that is not
        into = staging[seed % 2 :][:2064]
        into.copy_(torch.from_numpy(gradient))
        plan.run(seed, buffers, into)
        expected = [section.copy() for section in sections]
        reference(COMPACT, expected, gradient, segs, hypers)
        after = [
            buffer.cpu().numpy().view(section.dtype)
            for buffer, section in zip(buffers, sections, strict=True)
        ]
        assert_same_sections(COMPACT, after, expected)


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_ten_steps_of_the_compact_state_stay_equal(device: torch.device, which: str) -> None:
    sections, _ = states(COMPACT, 1500, 3, odd=False)
    expected = [section.copy() for section in sections]
    segs, rng = segs_of((0, 1500, 128, 0)), np.random.default_rng(0)
    for step in range(10):
        hypers = np.array([ROWS["adamw"][1]], HYPER)
        hypers["key"] = step * 0x9E3779B97F4A7C15 % 2**64
        gradient = as_bf16(rng.standard_normal(1500).astype(np.float32))
        reference(COMPACT, expected, gradient, segs, hypers)
        sections = ours(which, device, COMPACT, sections, gradient, segs, hypers)
        assert_same_sections(COMPACT, sections, expected)


def test_what_the_kernels_do_not_know_is_refused() -> None:
    sections, grad = states(COMPACT, 128, 0, odd=False)
    placed = [on_device(section, torch.device("cpu")) for section in sections]
    hypers, gradient = np.array([ROWS["adamw"][1]], HYPER), torch.from_numpy(grad)
    for segs, changed, message in [
        (segs_of((0, 128, 0, 1)), {}, "hyper index 1; there are 1"),
        (segs_of((5, 10, 0, 0)), {}, "must be multiples of 64"),
        (segs_of((0, 10, -64, 0)), {}, "before its chunk"),
        (segs_of((64, 128, 0, 0)), {}, "section hi has 256 bytes"),
        (segs_of((0, 128, 0, 0)), {"grad": gradient[:64]}, "segments go to 128"),
        (segs_of((0, 128, 0, 0)), {"grad": gradient.double()}, "bfloat16, float16 or float32"),
        (segs_of((0, 128, 0, 0)), {"sections": placed[:-1]}, "has 5 sections, 4 were given"),
        (
            segs_of((0, 128, 0, 0)),
            {"sections": [tensor.view(torch.int8) for tensor in placed]},
            "uint8",
        ),
        (
            segs_of((0, 128, 0, 0)),
            {"hypers": np.array([ROWS["lion"][1]], HYPER)},
            "another number of moments",
        ),
    ]:
        given_ = {"sections": placed, "hypers": hypers, "grad": gradient, **changed}
        with pytest.raises(ValueError, match=message):
            update_chunk(COMPACT, given_["sections"], segs, given_["hypers"], grad=given_["grad"])
    segs = segs_of((0, 128, 0, 0))
    segs["grad_dtype"] = int(GradDtype.SECTION)
    with pytest.raises(ValueError, match="has none"):
        update_chunk(COMPACT, placed, segs, hypers)
    plan = UpdatePlan(
        COMPACT,
        [segs_of((0, 128, 0, 0))],
        hypers,
        device=torch.device("cpu"),
        grad_dtype=torch.float32,
    )
    with pytest.raises(ValueError, match=r"pass run\(\) a gradient"):
        plan.run(0, placed)
