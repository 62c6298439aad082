"""GGUF files: a model on meta gets the bits of `from_pretrained(gguf_file=)`, or a refusal that
names type and tensor.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity._src.checkpoint.formats import gguf_files
from infinity._src.checkpoint.formats.gguf_files import UnpackedGguf, read_gguf_header
from infinity.errors import WeightsError
from tests import hub_models
from tests.hub_models import gguf_model, on_meta, write_gguf
from tests.marks import alternating

CPU = inf.Policy(params="cpu", optim="cpu")
MIXED = ("Q8_0", "F16", "Q5_0", "BF16", "F32")
TIED = ("falcon", "bloom", "t5")


def same_bits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Random blocks may be values that are not numbers."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, name
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]
        assert torch.equal(mine[name].view(whole), value.view(whole)), name


def check(file: Path, dtype: torch.dtype = torch.bfloat16, *, again: bool = False) -> None:
    kind, config = gguf_model(file)
    truth, info = kind.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"]
    model = inf.offload(on_meta(kind, config, dtype), CPU, load=file)
    try:
        same_bits(model.state_dict(), truth.state_dict())
        if again:
            with torch.no_grad(), inf.handle(model).gather(list(model.parameters())):
                for parameter in model.parameters():
                    parameter.zero_()
            assert inf.load_safetensors(model, file) == ((), ())
            same_bits(model.state_dict(), truth.state_dict())
    finally:
        inf.handle(model).close()


@pytest.mark.parametrize("architecture", alternating(hub_models.GGUF))
def test_an_architecture_gives_what_from_pretrained_gives(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some rows at a time.
    monkeypatch.setattr(gguf_files, "UNPACKED_BYTES", 5000)
    left_out = ["output.weight"] if architecture in TIED else []
    kinds = ("Q4_0", "F16", "Q8_0", "BF16", "F32") if architecture == "lfm2" else MIXED
    # A sum of 16 bits would round: norms in F16 are lessened by one in fp32.
    norms = "F16" if architecture in ("gemma2", "lfm2") else "F32"
    check(write_gguf(tmp_path / "a.gguf", architecture, kinds, norms=norms, left_out=left_out))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_type_that_is_unpacked_gives_the_bits_of_from_pretrained(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    from gguf import GGMLQuantizationType

    kinds = [
        kind.name
        for kind in GGMLQuantizationType
        if kind.name in ("F32", "F16") or gguf_files._unpacked_blocks(kind)
    ]
    assert {"Q5_0", "Q5_1", "Q4_K", "IQ4_XS", "TQ2_0", "MXFP4", "BF16", "F16"} <= set(kinds)
    blocks = -(-len(kinds) // 7)
    sizes = {"embedding_length": 256, "feed_forward_length": 512, "block_count": blocks}
    file = write_gguf(tmp_path / "a.gguf", "llama", kinds, **sizes)
    found = {info.kind for info in read_gguf_header(file).tensors}
    assert found == {GGMLQuantizationType[kind] for kind in kinds}
    check(file, dtype)


def test_rows_that_are_no_multiple_of_256_are_of_another_type(tmp_path: Path) -> None:
    """As llama.cpp writes Q4_K_M of a model with 64 columns."""
    check(
        write_gguf(tmp_path / "a.gguf", "llama", ["Q4_K"], left_out=["output.weight"]), again=True
    )


def test_metadata_that_decides_on_values_is_that_of_the_file(tmp_path: Path) -> None:
    """Without the number of heads transformers leaves the rows of q and k in their order."""
    check(
        write_gguf(tmp_path / "a.gguf", "llama", **{"attention.head_count_kv": None, "unknown": 3})
    )


def test_parts_of_a_weight_unpack_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    kind, config = gguf_model(file)
    tensors = UnpackedGguf(on_meta(kind, config), file, read_gguf_header(file), torch.bfloat16)
    by_rows, whole = "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"
    wanted = {name: tensors.read(name).reshape(-1) for name in (by_rows, whole)}
    unpacked: list[tuple[str, int, int]] = []
    rows = UnpackedGguf._rows

    def counted(self: UnpackedGguf, name: str, first: int, last: int) -> torch.Tensor:
        unpacked.append((name, first, last))
        return rows(self, name, first, last)

    monkeypatch.setattr(UnpackedGguf, "_rows", counted)
    for name, value in wanted.items():
        parts = [torch.empty_like(part) for part in value.split(100)]
        for index, part in enumerate(parts):
            tensors.read_into(name, index * 100, part)
        assert torch.equal(torch.cat(parts), value)
    # Rows do not depend on each other: each part unpacks those that the part before has not.
    assert unpacked[:3] == [(by_rows, 0, 2), (by_rows, 2, 4), (by_rows, 4, 5)]
    assert unpacked[-1:] == [(whole, 0, 32)] == [each for each in unpacked if each[0] == whole]
    # Not held after its end; an unfinished one is dropped for the next.
    assert tensors._last.held is None
    assert tensors.unpacking_bytes == 128 * 64 * 14


# -- refused ---------------------------------------------------------------------------------------


def of_type(kind: str) -> Callable[[Path], Path]:
    return lambda path: write_gguf(path, kinds=["Q8_0", kind])


def of_type_for_blocks(path: Path) -> Path:
    return write_gguf(path, "lfm2", ["Q4_0", "Q5_0"])


def of_unknown_type(path: Path) -> Path:
    file = write_gguf(path)
    at = file.read_bytes().index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    return patched(file, at, struct.pack("<I", 77))


def patched(file: Path, at: int, value: bytes) -> Path:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(value)
    return file


def split(path: Path) -> Path:
    return write_gguf(path, **{"split.count": 3, "split.no": 0})


def cut(size: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        file = write_gguf(path)
        os.truncate(file, size if size > 0 else file.stat().st_size + size)
        return file

    return write


def text(path: Path) -> Path:
    path.write_bytes(b"GGUF?")
    return path


def without_a_tensor(path: Path) -> Path:
    return write_gguf(path, left_out=["blk.1.ffn_up.weight"])


def tied_twice(path: Path) -> Path:
    return write_gguf(path, "falcon")


REFUSED: list[tuple[str, Callable[[Path], Path], str]] = [
    ("F64", of_type("F64"), r"does not unpack for the architecture llama \(F64: \S+\.weight and"),
    ("I8", of_type("I8"), r"\(I8: \S+\.weight and \d+ more\); take a file of other types"),
    ("I64", of_type("I64"), r"\(I64: "),
    ("first way", of_type_for_blocks, r"does not unpack for the architecture lfm2 \(Q5_0: \S+"),
    ("unknown", of_unknown_type, r"\(type 77: blk\.0\.attn_q\.weight\)"),
    ("big", lambda path: write_gguf(path, big_endian=True), r"big-endian.*gguf-convert-endian"),
    ("split", split, r"one of 3 parts of a model \(split\.count\).*llama-gguf-split --merge"),
    ("old", lambda path: patched(write_gguf(path), 4, b"\1"), r"of version 1, and transformers"),
    ("cut", cut(-100), r"not a whole GGUF file.*\S+\.weight lies at"),
    ("cut header", cut(300), r"its header ends or breaks at byte 300"),
    ("text", text, r"no readable GGUF file"),
    ("missing", without_a_tensor, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
    ("tied twice", tied_twice, r"with different values.*tie_word_embeddings=False"),
]


@pytest.mark.parametrize(
    ("write", "message"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_file_that_transformers_does_not_take_is_refused(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    good = write_gguf(
        tmp_path / "good.gguf",
        "lfm2" if write is of_type_for_blocks else "falcon" if write is tied_twice else "llama",
        kinds=["Q4_0"],
    )
    kind, config = gguf_model(good)
    with pytest.raises(WeightsError, match=message):
        inf.offload(on_meta(kind, config), CPU, load=write(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("architecture", "family", "message"),
    [
        ("gemma", "gemma", r"of the architecture gemma, into .* gemma is not supported yet"),
        ("llama", "mistral", r"into a model of the type mistral .*build the model from AutoConfig"),
    ],
)
def test_an_architecture_that_transformers_does_not_take_is_refused(
    architecture: str, family: str, message: str, tmp_path: Path
) -> None:
    """A Gemma's file stores its norms plus one, and transformers does not know it."""
    file = write_gguf(tmp_path / "a.gguf")
    if architecture != "llama":
        data = file.read_bytes()
        key = b"general.architecture" + struct.pack("<IQ", 8, 5)
        assert key + b"llama" in data
        file.write_bytes(data.replace(key + b"llama", key + b"gemma"))
    kind, config = hub_models.tiny(family, hidden_size=64, intermediate_size=128, head_dim=16)
    with pytest.raises(WeightsError, match=message):
        inf.offload(on_meta(kind, config), CPU, load=file)
