"""Codec of the collectives: encodes values, quantized in groups, as flat bytes, and sums in the
order of ranks. infinity/_src/distributed/collectives.py has the quantized collectives.

    wire = torch.empty(wire_bytes(shard.numel(), 8, 256), dtype=torch.uint8)
    encode(shard, wire, bits=8, group_numel=256)                  # qwZ: then all_gather the bytes
    decode(wire, out, bits=8, group_numel=256)

    encode(grad, wire, bits=4, group_numel=128, key=key, error=residual)   # qgZ: then all_to_all
    decode_sum(received, out, bits=4, group_numel=128, divisor=world)
    sum_in_order(received, out, divisor=world)                    # pieces that are not quantized

A *wire* is a buffer with the codes and scales of symmetric groups
(infinity/_src/kernels/quantize.py), each padded to 64 bytes:

    codes     int8 [numel], or int4 packed two to a byte, even elements in the low half
    scales    bf16 [groups]

Padding is zero, so that equal values have equal bytes; consecutive wires start at multiples of 64
bytes.

**Sums** are fp32 additions in the given order, then one division by `divisor`, then one rounding to
nearest, ties to even. So all ranks that sum the same pieces get the same bits, and a single piece
is returned unchanged. Every NaN is written with the same bits.

**Error feedback**: x = values + error is encoded; the new error is x - decoded(x), rounded to the
error's dtype. So errors do not accumulate: over many rounds, the sum of the decoded values differs
from the sum of the values by the last error and the roundings of x and of the stored errors. The
error of a group with infinity or NaN is zero.

On the CPU native/kernels/comm_codec.c computes, in one pass in the caller's thread, without the
GIL; on a GPU torch or Triton computes (infinity/_src/kernels/choice.py). All three give the same
bits, which the torch code below defines.

All tensors are contiguous and 1-D. The CPU kernels do not allocate. GPU calls do not block, except
for the trial at the first use of a form.

Source: ZeRO++ (Wang et al. 2023), sections 3.1, 3.3; error feedback: 1-bit SGD (Seide et al. 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity._src.cabi import native
from infinity._src.kernels import choice
from infinity._src.kernels.quantize import dequantize_torch, quantize_torch
from infinity._src.kernels.quantized import DTYPES, Quantized, check_groups, codes_bytes, wire_bytes
from infinity._src.kernels.trial import Trial, sample
from infinity.aio import GradDtype

DIVISOR_MOST = 1 << 24
"""fp32 represents all integers up to this."""
# Not a power of two: a division by a power of two is exact except for denormals.
_SAMPLE_RANKS = 3
_ERROR_DTYPES = (torch.bfloat16, torch.float32)
_CODES = {
    torch.bfloat16: GradDtype.BF16,
    torch.float16: GradDtype.FP16,
    torch.float32: GradDtype.FP32,
}


def encode(
    values: torch.Tensor,
    wire: torch.Tensor,
    *,
    bits: int,
    group_numel: int,
    key: int | None = None,
    element: int = 0,
    error: torch.Tensor | None = None,
) -> None:
    """Encode `values` as codes and scales into `wire`.

    values: bf16, fp16 or fp32 [numel]. wire: uint8 [wire_bytes(numel)]. bits: 8 or 4. group_numel:
    a power of two, 64 to 1024. key: for stochastic rounding, with `element`, the parameter's index
    of the first value; None: to nearest, ties to even. error: bf16 or fp32 [numel], added to the
    values and replaced by the new rounding error.
    Raises: ValueError for other arguments.
    """
    check_groups(bits, group_numel)
    _check_values("values", values, DTYPES)
    _check_wire(wire, values, bits, group_numel)
    if error is not None:
        _check_values("error", error, _ERROR_DTYPES)
        if error.numel() != values.numel() or error.device != values.device:
            raise ValueError(f"error is {_of(error)}, values are {_of(values)}: they must agree")
    if element < 0:
        raise ValueError(f"element={element}: the index of the first value is not negative")
    if key is not None and not 0 <= key < 1 << 64:
        raise ValueError(f"key={key}: use what random_bits.rounding_key returns, 0 to 2^64 - 1")
    trial = encode_trial(
        values.dtype, bits, group_numel, key is not None, None if error is None else error.dtype
    )
    which = _implementation("wire_encode", values.device, trial)
    if which == "native":
        lib, cast = native.lib, native.ffi.cast
        lib.inf_wire_encode(
            cast("void *", values.data_ptr()), int(_CODES[values.dtype]),
            native.ffi.NULL if error is None else cast("void *", error.data_ptr()),
            0 if error is None else int(_CODES[error.dtype]),
            cast("uint8_t *", wire.data_ptr()), values.numel(), bits, group_numel,
            int(key is not None), key or 0, element,
        )  # fmt: skip
        return
    with torch.no_grad():
        _encode(which, values, wire, bits, group_numel, key, element, error)


def decode(wire: torch.Tensor, out: torch.Tensor, *, bits: int, group_numel: int) -> None:
    """Decode a wire into `out`, rounded once to its dtype: bf16, fp16 or fp32 [numel].

    Raises: ValueError for another dtype, or a wire of another size.
    """
    decode_sum((wire,), out, bits=bits, group_numel=group_numel)


def decode_sum(
    wires: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    bits: int,
    group_numel: int,
    divisor: int = 1,
) -> None:
    """Sum wires in their order, in fp32, divide, and round once to the dtype of `out`.

    wires: uint8 [wire_bytes(numel)] each, at least one. out: bf16, fp16 or fp32 [numel]. divisor: 1
    to 2^24. Raises: ValueError for other arguments.
    """
    check_groups(bits, group_numel)
    _check_values("out", out, DTYPES)
    _check_sum(wires, "wires", divisor)
    for wire in wires:
        _check_wire(wire, out, bits, group_numel)
    trial = decode_trial(out.dtype, bits, group_numel, divisor != 1)
    which = _implementation("wire_decode", out.device, trial)
    if which == "native":
        # Addresses, since the pieces are in separate receive buffers.
        addresses = native.ffi.new("uint64_t[]", [wire.data_ptr() for wire in wires])
        native.lib.inf_wire_decode_sum(
            addresses, len(wires), native.ffi.cast("void *", out.data_ptr()),
            int(_CODES[out.dtype]), out.numel(),
            bits, group_numel, float(divisor),
        )  # fmt: skip
        return
    with torch.no_grad():
        _decode_sum(which, wires, out, bits, group_numel, divisor)


def sum_in_order(pieces: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int = 1) -> None:
    """Sum tensors in their order, in fp32, divide, and round once to the dtype of `out`.

    pieces: [numel] each, all bf16, all fp16 or all fp32, at least one. out: bf16, fp16 or fp32
    [numel]; may be one of the pieces, but must not overlap one partly. divisor: 1 to 2^24. Raises:
    ValueError for other arguments.
    """
    _check_values("out", out, DTYPES)
    _check_sum(pieces, "pieces", divisor)
    for piece in pieces:
        _check_values("a piece", piece, DTYPES)
        if (
            piece.numel() != out.numel()
            or piece.device != out.device
            or piece.dtype is not pieces[0].dtype
        ):
            raise ValueError(
                f"a piece is {_of(piece)}, the first {_of(pieces[0])}, out {_of(out)}: "
                "use pieces of one dtype and the size of out"
            )
    trial = sum_trial(pieces[0].dtype, out.dtype, divisor != 1)
    which = _implementation("ordered_sum", out.device, trial)
    if which == "native":
        addresses = native.ffi.new("uint64_t[]", [piece.data_ptr() for piece in pieces])
        native.lib.inf_sum_in_order(
            addresses, len(pieces), int(_CODES[pieces[0].dtype]),
            native.ffi.cast("void *", out.data_ptr()),
            int(_CODES[out.dtype]), out.numel(), float(divisor),
        )  # fmt: skip
        return
    with torch.no_grad():
        _sum_in_order(which, pieces, out, divisor)


# -- torch or Triton, and trials of Triton's kernels -----------------------------------------------


def _encode(
    which: str,
    values: torch.Tensor,
    wire: torch.Tensor,
    bits: int,
    group_numel: int,
    key: int | None,
    element: int,
    error: torch.Tensor | None,
) -> None:
    if which == "torch":
        encode_torch(values, wire, bits, group_numel, key, element, error)
        return
    from infinity._src.kernels.triton.comm_codec import encode_triton

    encode_triton(values, wire, bits, group_numel, key, element, error)


def _decode_sum(
    which: str,
    wires: Sequence[torch.Tensor],
    out: torch.Tensor,
    bits: int,
    group_numel: int,
    divisor: int,
) -> None:
    if which == "torch":
        decode_sum_torch(wires, out, bits, group_numel, divisor)
        return
    from infinity._src.kernels.triton.comm_codec import decode_sum_triton

    decode_sum_triton(wires, out, bits, group_numel, divisor)


def _sum_in_order(
    which: str, pieces: Sequence[torch.Tensor], out: torch.Tensor, divisor: int
) -> None:
    if which == "torch":
        sum_in_order_torch(pieces, out, divisor)
        return
    from infinity._src.kernels.triton.comm_codec import sum_in_order_triton

    sum_in_order_triton(pieces, out, divisor)


def encode_trial(
    dtype: torch.dtype, bits: int, group_numel: int, random: bool, error: torch.dtype | None
) -> Trial:
    """Return the trial of `encode`. random: with a key; error: the dtype of its error feedback."""
    return Trial(_encoded_sample, (dtype, bits, group_numel, random, error))


def decode_trial(dtype: torch.dtype, bits: int, group_numel: int, divides: bool) -> Trial:
    """Return the trial of `decode_sum` into `dtype`."""
    return Trial(_decoded_sample, (dtype, bits, group_numel, divides))


def sum_trial(dtype: torch.dtype, out: torch.dtype, divides: bool) -> Trial:
    """Return the trial of `sum_in_order`, from pieces of `dtype` into `out`."""
    return Trial(_summed_sample, (dtype, out, divides))


def _encoded_sample(
    which: str,
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    group_numel: int,
    random: bool,
    error_dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    values = sample(dtype, finite=False).to(device)
    error = None if error_dtype is None else sample(error_dtype, 1).to(device)
    size_bytes = wire_bytes(values.numel(), bits, group_numel)
    wire = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    _encode(which, values, wire, bits, group_numel, 7 if random else None, 64, error)
    return {"bytes": wire, **({} if error is None else {"errors": error})}


def _decoded_sample(
    which: str,
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    group_numel: int,
    divides: bool,
) -> dict[str, torch.Tensor]:
    wires = []
    for seed in range(_SAMPLE_RANKS):
        values = sample(torch.float32, seed, finite=seed > 0)
        size_bytes = wire_bytes(values.numel(), bits, group_numel)
        wire = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        encode_torch(values, wire, bits, group_numel, None, 0, None)
        wires.append(wire.to(device))
    out = torch.empty(values.numel(), dtype=dtype, device=device)
    _decode_sum(which, wires, out, bits, group_numel, _SAMPLE_RANKS if divides else 1)
    return {"sums": out}


def _summed_sample(
    which: str, device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, divides: bool
) -> dict[str, torch.Tensor]:
    pieces = [
        sample(dtype, seed, finite=seed > 0).to(device) for seed in range(_SAMPLE_RANKS)
    ]
    out = torch.empty(pieces[0].numel(), dtype=out_dtype, device=device)
    _sum_in_order(which, pieces, out, _SAMPLE_RANKS if divides else 1)
    return {"sums": out}


# -- the reference, in torch; the functions above have checked the arguments -----------------------


def encode_torch(
    values: torch.Tensor,
    wire: torch.Tensor,
    bits: int,
    group_numel: int,
    key: int | None,
    element: int,
    error: torch.Tensor | None,
) -> None:
    """Reference of `encode`, with `quantize_torch`."""
    # Summed in fp32, since a sum of two bf16 numbers may not be a bf16 number.
    x = values.to(torch.float32)
    if error is not None:
        x = x + error.to(torch.float32)
    q = quantize_torch(x, bits, group_numel, True, key, element)
    # Padding is zero, so that equal values have equal bytes.
    wire.zero_()
    wire[: q.codes.numel()].copy_(q.codes.view(torch.uint8))
    scales = wire[codes_bytes(x.numel(), bits) :]
    scales[: 2 * q.scales.numel()].copy_(q.scales.view(torch.uint8))
    if error is not None:
        said = dequantize_torch(q)
        # A group with infinity or NaN decodes to NaN; its error is zero.
        error.copy_(torch.where(torch.isnan(said), torch.zeros_like(x), x - said))


def decode_sum_torch(
    wires: Sequence[torch.Tensor], out: torch.Tensor, bits: int, group_numel: int, divisor: int
) -> None:
    """Reference of `decode_sum`, with `dequantize_torch`."""
    numel = out.numel()
    pieces = []
    for wire in wires:
        codes = wire[: numel if bits == 8 else -(-numel // 2)]
        scales = wire[codes_bytes(numel, bits) :][: -(-numel // group_numel) * 2].view(
            torch.bfloat16
        )
        codes = codes.view(torch.int8) if bits == 8 else codes
        q = Quantized(codes, scales, None, out.shape, torch.float32, bits, group_numel)
        pieces.append(dequantize_torch(q))
    sum_in_order_torch(pieces, out, divisor)


def sum_in_order_torch(pieces: Sequence[torch.Tensor], out: torch.Tensor, divisor: int) -> None:
    """Reference of `sum_in_order`."""
    # Starting with the first piece, not zero, so that a single piece keeps -0.0.
    total = pieces[0].to(torch.float32)
    for piece in pieces[1:]:
        total = total + piece.to(torch.float32)
    # Divided once, since each division rounds.
    if divisor != 1:
        # By a tensor: on a GPU torch multiplies by a scalar's reciprocal, which rounds twice.
        total = total / torch.full((), divisor, dtype=torch.float32, device=total.device)
    # Every NaN is written with the same bits, whatever its payload.
    missing = torch.isnan(total)
    out.copy_(total)
    out.masked_fill_(missing, float("nan"))


# -- checks of arguments, and the choice of the implementation -------------------------------------


def _implementation(name: str, device: torch.device, trial: Trial) -> str:
    """Choose "native", "torch" or "triton". On the CPU "native" replaces "torch"."""
    which = choice.implementation(name, device, trial)
    return "native" if which == "torch" and device.type == "cpu" else which


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _check_values(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.dim() != 1 or not tensor.is_contiguous():
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} is {_of(tensor)}: use a contiguous tensor of one dimension, of {known}"
        )


def _check_wire(wire: torch.Tensor, values: torch.Tensor, bits: int, group_numel: int) -> None:
    _check_values("a wire", wire, (torch.uint8,))
    size_bytes = wire_bytes(values.numel(), bits, group_numel)
    if wire.numel() != size_bytes or wire.device != values.device:
        raise ValueError(
            f"a wire is {_of(wire)}, but {values.numel()} values on {values.device} take "
            f"{size_bytes} bytes there"
        )
    # Scales are 2-byte words in the same buffer.
    if wire.data_ptr() % 2:
        raise ValueError(
            "a wire starts at an odd address, and holds 2-byte scales: cut buffers at multiples of "
            "64 bytes"
        )


def _check_sum(parts: Sequence[torch.Tensor], name: str, divisor: int) -> None:
    if not parts:
        raise ValueError(f"{name} is empty: there is nothing to sum")
    if not 1 <= divisor <= DIVISOR_MOST or divisor != int(divisor):
        raise ValueError(f"divisor={divisor}: use a whole number from 1 to {DIVISOR_MOST}")
