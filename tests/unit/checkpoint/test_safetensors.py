"""Files of weights: the bytes are those of the format's own library, and a write that fails says
where.
"""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from infinity._src.base.dtypes import SAFETENSORS, in_safetensors
from infinity._src.checkpoint.formats.safetensors_reader import FileTensor, check_dtypes, file_order
from infinity._src.checkpoint.formats.safetensors_writer import write_file


def described(tensors: dict[str, torch.Tensor]) -> list[FileTensor]:
    found = [FileTensor(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    return sorted(found, key=file_order)


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.text(min_size=1, max_size=6),
            st.sampled_from(list(SAFETENSORS)),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda each: each[0],
    ),
    cut=st.integers(1, 4),
)
def test_a_file_is_byte_by_byte_that_of_the_library(
    shapes: list[tuple[str, torch.dtype, list[int]]],
    cut: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = {
        name: (torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int32) % 2)
        .to(torch.uint8)
        .view(dtype)
        .view(shape)
        for name, dtype, shape in shapes
        if name != "__metadata__" and in_safetensors(dtype, tuple(shape))
    }
    path = tmp_path_factory.getbasetemp() / "one.safetensors"
    ordered = described(tensors)
    parts = (part for each in ordered for part in tensors[each.name].reshape(-1).split(cut))
    write_file(path, ordered, parts)
    assert path.read_bytes() == save(tensors, metadata={"format": "pt"})
    for name, value in load_file(path).items():
        assert (value.dtype, value.shape) == (tensors[name].dtype, tensors[name].shape)


def test_a_full_drive_and_other_errors_name_the_path(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1 << 18)}
    full = Path("/dev/full")
    if full.exists():
        with pytest.raises(OSError, match="no space for 1 MiB") as raised:
            write_file(full, described(tensors), tensors.values())
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(full)
    with pytest.raises(IsADirectoryError) as raised:
        write_file(tmp_path, described(tensors), tensors.values())
    assert raised.value.filename == str(tmp_path)


def test_a_dtype_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"x is a torch\.complex128, which safetensors does not have; cast it"
    ):
        check_dtypes(described_unsorted(), way_out="cast it")


def described_unsorted() -> list[FileTensor]:
    return [FileTensor("x", torch.complex128, (2,))]
