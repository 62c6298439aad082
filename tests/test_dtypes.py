"""Every dtype of torch, as buffers and as frozen parameters, in every format of a checkpoint: the
same bits come back, or a ValueError names tensor, dtype and remedy before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save, save_file
from torch import nn

import infinity as inf
from infinity._src.base import dtypes
from infinity._src.checkpoint.formats.safetensors_reader import decode_tensors, encode_tensors
from infinity._src.cli.main import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*dimensions are in another order in memory"),
]

EVERY = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
KEPT = [each for each in EVERY if dtypes.kind_of(each) != "quantized"]
EXPORTED = [each for each in KEPT if each in dtypes.SAFETENSORS]
SAVED_BY_TORCH = [each for each in KEPT if dtypes.torch_saves(each)]
NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}


def values_of(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several shapes, of any bits that the dtype has."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype is torch.bool else 256
    size = (3, 12 * dtype.itemsize)
    whole, turned, scalar = (
        each.view(dtype).view(4, 3)
        for each in torch.randint(0, most, size, dtype=torch.uint8, generator=generator)
    )
    return {"whole": whole, "turned": turned.t(), "scalar": scalar[1, 1], "none": whole[:0]}


class Holder(nn.Module):
    """A linear that learns, and further tensors of these dtypes."""

    def __init__(self, kinds: list[torch.dtype], seed: int, *, as_params: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        for kind in kinds:
            for shape, value in values_of(kind, seed).items():
                name = f"{dtypes.dtype_name(kind)}_{shape}"
                if as_params:
                    self.register_parameter(name, nn.Parameter(value, requires_grad=False))
                else:
                    self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (value.dtype, tuple(value.shape), bytes(dtypes.bytes_of(value).numpy()))
        for name, value in tensors.items()
    }


def made(
    kinds: list[torch.dtype], seed: int, place: Path, *, as_params: bool = False, **values: Any
) -> tuple[nn.Module, inf.AdamW]:
    place.mkdir(exist_ok=True)
    model = Holder(kinds, seed, as_params=as_params)
    inf.offload(model, inf.Policy(**{**NVME, "nvme": [place], **values}))
    return model, inf.AdamW(model.linear.parameters(), lr=1e-2)


def stepped(model: Any, optimizer: inf.AdamW) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("as_params", [False, True], ids=["buffers", "frozen parameters"])
def test_every_dtype_comes_back_bit_for_bit(as_params: bool, tmp_path: Path) -> None:
    make = {"as_params": as_params}
    model, optimizer = made(KEPT, 0, tmp_path / "swap", **make)
    stepped(model, optimizer)
    want = bits(model.state_dict())
    inf.save(model, optimizer, tmp_path / "saved").wait()
    inf.handle(model).close()
    for command in (["ls"], ["verify"], ["reshard", "--world=2"]):
        out = [str(tmp_path / "two")] if command[0] == "reshard" else []
        assert main(["checkpoint", command[0], str(tmp_path / "saved"), *out, *command[1:]]) == 0
    for source, damaged in (("saved", "raise"), ("saved", "report"), ("two", "raise")):
        model, optimizer = made(KEPT, 1, tmp_path / "swap", **make)
        assert bits(model.state_dict()) != want
        inf.restore(model, optimizer, tmp_path / source, damaged=damaged)
        assert bits(model.state_dict()) == want
        inf.handle(model).close()
    model, optimizer = made(KEPT, 0, tmp_path / "run", durable=True, **make)
    stepped(model, optimizer)
    inf.handle(model).close()
    model, optimizer = made(KEPT, 1, tmp_path / "run", durable=True, **make)
    assert inf.restore(model, optimizer, tmp_path / "run").step == 1
    assert bits(model.state_dict()) == want
    inf.handle(model).close()


@pytest.mark.parametrize("as_params", [False, True], ids=["buffers", "frozen parameters"])
def test_safetensors_have_every_dtype_of_the_format(as_params: bool, tmp_path: Path) -> None:
    """Their own library reads and writes the same."""
    plain, first, second = (Holder(EXPORTED, seed, as_params=as_params) for seed in range(3))
    for module in (plain, first, second):
        # Two numbers in an item, which safetensors counts along the last dimension: there is none.
        del module.float4_e2m1fn_x2_scalar
    want = bits(plain.state_dict())
    file = tmp_path / "a.safetensors"
    save_file({name: dtypes.copied(value) for name, value in plain.state_dict().items()}, file)
    inf.offload(first, inf.Policy())
    inf.load_safetensors(first, file)
    inf.offload(second, inf.Policy(), load=file)
    for at, model in enumerate((first, second)):
        assert bits(model.state_dict()) == want
        inf.export_safetensors(model, tmp_path / f"out{at}")
        inf.save(model, None, tmp_path / f"saved{at}").wait()
        run_command("checkpoint", "export", tmp_path / f"saved{at}", tmp_path / f"again{at}")
        for out in (tmp_path / f"out{at}", tmp_path / f"again{at}"):
            assert bits(load_file(out / "model.safetensors")) == want


@pytest.mark.parametrize("as_params", [False, True], ids=["buffers", "frozen parameters"])
def test_torch_s_formats_have_every_dtype_that_torch_saves(as_params: bool, tmp_path: Path) -> None:
    model, optimizer = made(SAVED_BY_TORCH, 0, tmp_path / "swap", as_params=as_params)
    want = bits(model.state_dict())
    inf.export_dcp(model, None, tmp_path / "dcp")
    plain = Holder(SAVED_BY_TORCH, 1, as_params=as_params).state_dict()
    into = {name: dtypes.copied(value) for name, value in plain.items()}
    dcp.load({"model": into}, checkpoint_id=tmp_path / "dcp")
    assert bits(into) == want
    other, _ = made(SAVED_BY_TORCH, 1, tmp_path / "swap", as_params=as_params)
    inf.load_dcp(other, None, tmp_path / "dcp")
    assert bits(other.state_dict()) == want
    if not as_params:
        stepped(model, optimizer)
        inf.save(model, optimizer, tmp_path / "saved").wait()
        to = ["--to=deepspeed-universal"]
        run_command("checkpoint", "export", tmp_path / "saved", tmp_path / "universal", *to)
        inf.load_deepspeed(other, tmp_path / "universal")
        assert bits(other.state_dict()) == bits(model.state_dict())


@pytest.mark.parametrize("way", ["mapping", "callable"])
def test_every_dtype_is_loaded_from_tensors(way: str) -> None:
    values = Holder(KEPT, 0).state_dict()

    def fill(name: str, tensor: torch.Tensor) -> None:
        dtypes.copy_(tensor, values[name])

    with torch.device("meta"):
        model = Holder([], 0)
    for name, value in values.items():
        if "." not in name:
            model.register_buffer(name, torch.empty_like(value, device="meta"))
    inf.offload(model, inf.Policy(), load=values if way == "mapping" else fill)
    assert bits(model.state_dict()) == bits(values)


def doors(model: nn.Module, optimizer: inf.AdamW, place: Path) -> dict[str, Callable[[], Any]]:
    return {
        "safetensors": lambda: inf.export_safetensors(model, place),
        "dcp": lambda: inf.export_dcp(model, None, place),
        "save": lambda: inf.save(model, optimizer, place),
    }


@pytest.mark.parametrize("as_params", [False, True], ids=["buffers", "frozen parameters"])
def test_what_a_format_lacks_is_refused_by_name(
    as_params: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (kind for kind in KEPT if kind not in dtypes.SAFETENSORS):
        model, optimizer = made([kind], 0, tmp_path / "swap", as_params=as_params)
        calls = doors(model, optimizer, tmp_path / "new")
        named = rf"{dtypes.dtype_name(kind)}_\w+.*{kind}.*inf.save keeps"
        for door in ["safetensors", *([] if kind in SAVED_BY_TORCH else ["dcp"])]:
            with pytest.raises(ValueError, match=named):
                calls[door]()
        inf.save(model, optimizer, tmp_path / "saved").wait()
        inf.handle(model).close()
        assert main(["checkpoint", "export", str(tmp_path / "saved"), str(tmp_path / "new")]) == 2
        assert f"{kind}, which safetensors does not have" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


BEYOND_BITS = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 1, torch.qint8),
    "quantized, packed": lambda: torch._empty_affine_quantized(
        (2, 2), scale=0.5, zero_point=0, dtype=torch.quint4x2
    ),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
@pytest.mark.parametrize("what", BEYOND_BITS)
def test_what_is_more_than_its_bits_is_refused_by_name(what: str, tmp_path: Path) -> None:
    value = BEYOND_BITS[what]()
    model = Holder([], 0)
    model.register_buffer("held", value)
    policy = inf.Policy(**NVME, nvme=[tmp_path], durable=True)
    with pytest.raises(ValueError, match=rf"cannot keep the buffer held, a {value.dtype}"):
        inf.offload(model, policy)
    assert not list(tmp_path.iterdir())
    inf.offload(model, inf.Policy())
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer)
    for call in doors(model, optimizer, tmp_path / "new").values():
        with pytest.raises(ValueError, match=rf"cannot keep the buffer held, a {value.dtype}"):
            call()
    assert not (tmp_path / "new").exists()
    other = Holder([], 0)
    other.register_parameter("held", nn.Parameter(value, requires_grad=False))
    with pytest.raises(ValueError, match=r"Holder\.held is a Parameter of"):
        inf.offload(other, inf.Policy())


PAIRS = [
    (torch.complex64, torch.int64), (torch.complex64, torch.float32), (torch.bool, torch.float32),
    (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu), (torch.float32, torch.float4_e2m1fn_x2),
    (torch.uint8, torch.bits8), (torch.int8, torch.int4), (torch.bits8, torch.bits2x4),
]  # fmt: skip


@pytest.mark.parametrize(("there", "here"), PAIRS, ids=str)
def test_no_dtype_is_taken_for_one_of_another_kind(
    there: torch.dtype, here: torch.dtype, tmp_path: Path
) -> None:
    """Torch drops the imaginary part with a warning, and has no copy of packed ones."""

    def holding(kind: torch.dtype) -> nn.Module:
        model = Holder([], 0)
        model.register_buffer("held", values_of(kind, 0)["whole"])
        return model

    source, target = (
        inf.offload(holding(there), inf.Policy()),
        inf.offload(holding(here), inf.Policy()),
    )
    inf.save(source, None, tmp_path / "saved").wait()
    before = bits(target.state_dict())
    with pytest.raises(ValueError, match=rf"held is {there}.*{here} in the model"):
        inf.restore(target, None, tmp_path / "saved")
    with pytest.raises(ValueError, match=rf"held as {there}; the model wants {here}"):
        inf.offload(holding(here), inf.Policy(), load=dict(source.state_dict()))
    inf.export_dcp(source, None, tmp_path / "dcp") if dtypes.torch_saves(there) else None
    if dtypes.torch_saves(there):
        with pytest.raises(ValueError, match=rf"held is {there} in the source, {here} in"):
            inf.load_dcp(target, None, tmp_path / "dcp")
    assert bits(target.state_dict()) == before


def test_buffers_are_a_file_of_safetensors_and_views_are_read_through() -> None:
    kinds = {dtypes.dtype_name(kind): values_of(kind, 0)["whole"] for kind in EXPORTED}
    assert encode_tensors(kinds) == save(kinds)
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for value in (turned, turned.imag, turned[:0]):
        assert bits(decode_tensors(encode_tensors({"a": value}))) == bits({"a": value.clone()})


def run_command(*arguments: object) -> None:
    assert main([str(each) for each in arguments]) == 0
