"""The jobs of an update: prepared once for each flat, filtered in each step by the parameters that
have a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.cabi.records import Algorithm, Moments
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import HYPER, JOB, LEAVES_SHIFT, SEG, Format, GradDtype, JobKind

_GRAD_DTYPES = {
    torch.bfloat16: GradDtype.BF16,
    torch.float32: GradDtype.FP32,
    torch.float16: GradDtype.FP16,
}


_GRAD = np.dtype([("address", "<u8"), ("itemsize", "<u8"), ("dtype", "<i4")])
"""Address, itemsize and dtype of a parameter's gradient; the address is 0 for a gradient in the
chunks' `grad` sections."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The update of one parameter in a step: its scalars as one HYPER record.

    first: for an optimizer of whole matrices, whose step has two updates of each parameter, the
    HYPER record of the first. The first update writes a matrix to the gradient's memory; the second
    update (`hyper`) reads the transformed matrix there.
    """

    param: Param
    hyper: npt.NDArray[Any]  # a HYPER record, shape ()
    first: npt.NDArray[Any] | None = None

    @property
    def rows(self) -> bytes:
        """The bytes of all scalars: equal for updates that do the same with equal gradients."""
        first = b"" if self.first is None else self.first.tobytes()
        return first + self.hyper.tobytes()

    @property
    def algorithm(self) -> Algorithm:
        return Algorithm(int(self.hyper["algorithm"]))


@dataclasses.dataclass(frozen=True)
class Submission:
    """Jobs, segments and hyper records of one unit, as an executor takes them. `base` of the jobs
    is the position of their flat in the unit.
    """

    jobs: npt.NDArray[Any]
    segs: npt.NDArray[Any]
    hypers: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class FlatJobs:
    """The jobs and segments of a flat in which every parameter has a gradient. A step filters them.

    Arrays over segments: owner: position of the segment's parameter in flat.params. chunk: position
    of its chunk. within: element at which it starts in this rank's part of the parameter.
    """

    flat: Flat
    format: Format
    jobs: npt.NDArray[Any]
    segs: npt.NDArray[Any]
    owner: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]


def jobs_of_flat(store: StateStore, flat: Flat, rank: int) -> FlatJobs:
    """Return the jobs of one flat in its present format and places. Call it again when these have
    changed."""
    at_rest = store[flat]
    spans = flat.layout.chunks
    jobs = np.zeros(len(spans), dtype=JOB)
    jobs["chunk"] = at_rest.ids
    # Section 0, the parameters, goes to the gathered unit. `ptr` is an offset, to which the gate
    # adds the address of the gathered flat.
    jobs["mask"] = 1
    jobs["ptr"][:, 0] = at_rest.starts.astype(np.uint64) * np.uint64(flat.layout.itemsize)
    # A RAW flat has parameters and nothing to update.
    found = flat.layout.segments(rank)
    if at_rest.format is Format.RAW:
        found = found.nothing()
    segs = np.zeros(len(found.owner), dtype=SEG)
    segs["start"], segs["numel"], segs["element"] = found.start, found.numel, found.element
    return FlatJobs(
        flat,
        at_rest.format,
        jobs,
        segs,
        owner=found.owner,
        chunk=found.chunk,
        within=found.within,
    )


def jobs_of_unit(
    unit: Unit,
    flat_jobs: Mapping[Flat, FlatJobs],
    work: Mapping[Param, Work],
    gradients: Mapping[Param, torch.Tensor],
) -> Submission:
    """Return the jobs that do `work` in one unit.

    gradients: this rank's part of each gradient, one-dimensional, contiguous. A parameter that is
    missing there has a spilled gradient, in the `grad` section of its chunks.

    A chunk in which no parameter has work gets a FETCH of its parameter section, so that the whole
    unit can be handed over.
    """
    jobs: list[npt.NDArray[Any]] = []
    segs: list[npt.NDArray[Any]] = []
    hypers: list[npt.NDArray[Any]] = []
    seg_count = 0
    for base, flat in enumerate(unit.flats):
        plan = flat_jobs[flat]
        # Rows and addresses by position, so that numpy fills all segments at once: a step over
        # thousands of parameters spends no Python time per segment.
        rows = np.full(len(flat.params), -1, dtype=np.int64)
        grads = np.zeros(len(flat.params), dtype=_GRAD)
        for param in flat.params:
            if param in work:
                rows[param.param_index] = len(hypers)
                hypers.append(work[param].hyper)
                grads[param.param_index] = _grad_of(gradients.get(param))
        job, seg = _filter(plan, rows, seg_count)
        job["base"] = base
        taken = rows[plan.owner] >= 0
        grad = grads[plan.owner[taken]]
        seg["grad"] = grad["address"] + plan.within[taken].astype(np.uint64) * grad["itemsize"]
        seg["grad_dtype"] = grad["dtype"]
        jobs.append(job)
        segs.append(seg)
        seg_count += len(seg)
    # np.stack compares the fields of each record in Python.
    stacked = np.zeros(len(hypers), HYPER)
    for row, hyper in enumerate(hypers):
        stacked[row] = hyper
    # Only Muon leaves sections out; the usual step spends no time on it.
    if (stacked["algorithm"] >= Algorithm.MUON_MOMENTUM).any():
        for job, flat in zip(jobs, unit.flats, strict=True):
            job["mask"] |= _left_out(flat_jobs[flat], work)
    return Submission(np.concatenate(jobs), np.concatenate(segs), stacked)


def memory_of_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """View a gradient's memory as the matrix that MUON_MOMENTUM writes there: bf16 if an element
    has two bytes, else fp32."""
    return gradient.view(torch.bfloat16) if gradient.dtype is torch.float16 else gradient


def sections_updated(form: Format, algorithm: Algorithm) -> int:
    """Return the sections that an update reads and writes, as a mask; `inf_update_sections` of
    native/kernels/optimizer_kernels.c."""
    states = (1 << form.written_count) - 1
    masters = (1 << form.master_count) - 1
    if algorithm is Algorithm.MUON:
        return masters
    if algorithm is not Algorithm.MUON_MOMENTUM:
        return states
    scales = 1 << form.master_count + form.count if form.moments is Moments.Q8 else 0
    return 1 << form.master_count | scales


def _left_out(plan: FlatJobs, work: Mapping[Param, Work]) -> npt.NDArray[np.uint32]:
    """Return for each chunk the mask of sections that no parameter's update needs."""
    form = plan.format
    states = (1 << form.written_count) - 1
    needed = np.zeros(len(plan.flat.params), dtype=np.uint32)
    for param in plan.flat.params:
        if param in work:
            needed[param.param_index] = sections_updated(form, work[param].algorithm)
    used = np.zeros(len(plan.jobs), dtype=np.uint32)
    np.bitwise_or.at(used, plan.chunk, needed[plan.owner])
    # A chunk without work gets a FETCH, whose mask has no such bits.
    left: npt.NDArray[np.uint32] = np.where(used == 0, 0, states & ~used).astype(np.uint32)
    left <<= np.uint32(LEAVES_SHIFT)
    return left


def _grad_of(gradient: torch.Tensor | None) -> tuple[int, int, int]:
    # The executor reads a spilled gradient from the chunk itself.
    if gradient is None:
        return (0, 0, GradDtype.SECTION)
    return (gradient.data_ptr(), gradient.element_size(), _GRAD_DTYPES[gradient.dtype])


def _filter(
    plan: FlatJobs, rows: npt.NDArray[np.int64], seg_first: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the jobs and segments of the parameters that have a row in the hyper array (-1: no
    gradient).
    """
    # A copy: the next step filters the same jobs.
    jobs = plan.jobs.copy()
    taken = rows[plan.owner] >= 0
    segs = plan.segs[taken]
    segs["hyper"] = rows[plan.owner[taken]]
    # A job without segments still fetches its chunk's parameters.
    counts = np.bincount(plan.chunk[taken], minlength=len(jobs))
    jobs["seg_count"] = counts
    jobs["seg_first"] = seg_first + np.cumsum(counts) - counts
    jobs["kind"] = np.where(counts > 0, int(JobKind.UPDATE), int(JobKind.FETCH))
    return jobs, segs
