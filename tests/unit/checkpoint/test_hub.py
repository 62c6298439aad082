"""Checkpoints of the hub: a model on meta gets what `from_pretrained` gives, tensor group by tensor
group, and its export has the names of the checkpoint.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import infinity as inf
from infinity._src.checkpoint.formats import hub_files, safetensors_reader, safetensors_writer
from infinity._src.checkpoint.formats.hub_files import HubTensors
from infinity._src.memory import ledger
from infinity.aio._memory_limits import CgroupLimit
from infinity.errors import AioError, MemoryLimitError, WeightsError
from tests import forks, hub_models, models, reading
from tests.hub_models import assert_alike, on_meta, stored_names
from tests.marks import alternating, mostly_slow

CPU = inf.Policy(params="cpu", optim="cpu")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral as the hub has it, in several files that cut through its experts."""
    place = tmp_path_factory.mktemp("mixtral")
    models.make(models.mixtral).save_pretrained(place, max_shard_size="10KB")
    return place


@pytest.fixture
def meta_mixtral(mixtral: Path) -> Iterator[Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = on_meta(MixtralForCausalLM, MixtralConfig.from_pretrained(mixtral))
    yield model
    handle = model.__dict__.get("_infinity_handle")
    if handle is not None:
        handle.close()


def _fill_with_zeros(model: Any) -> None:
    with torch.no_grad(), inf.handle(model).gather(list(model.parameters())):
        for parameter in model.parameters():
            parameter.zero_()


@pytest.mark.parametrize(
    ("dtype", "family"), alternating([torch.bfloat16, torch.float32], hub_models.QUICK), ids=str
)
def test_a_checkpoint_gives_what_from_pretrained_gives_and_is_written_back(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kind, config = hub_models.tiny(family)
    hub_models.write(kind, config, dtype, tmp_path / "hub")
    truth = kind.from_pretrained(tmp_path / "hub", dtype=dtype)
    model = on_meta(kind, truth.config, dtype)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    inf.offload(model, policy, load=tmp_path / "hub")
    try:
        assert_alike(model, truth)
        inf.export_safetensors(model, tmp_path / "out", shard_bytes_max="100KiB")
        assert stored_names(tmp_path / "out") == stored_names(tmp_path / "hub")
        truth.config.save_pretrained(tmp_path / "out")
        assert_alike(kind.from_pretrained(tmp_path / "out", dtype=dtype), truth)
        # The modules' names load as well, and so does either into the offloaded model.
        inf.export_safetensors(model, tmp_path / "plain", names="modules")
        _fill_with_zeros(model)
        for place in ("plain", "out"):
            assert inf.load_safetensors(model, tmp_path / place) == ((), ())
            assert_alike(model, truth)
    finally:
        inf.handle(model).close()


@pytest.mark.slow
def test_every_model_type_with_a_conversion_loads_alike(tmp_path: Path) -> None:
    left_out: dict[str, str] = {}
    loaded: set[str] = set()
    for number, found in enumerate(hub_models.every(left_out.__setitem__)):
        model_type, kind, config = found
        place = tmp_path / str(number)
        truth = hub_models.round_trip(
            kind, config, torch.bfloat16, place, functools.partial(left_out.__setitem__, model_type)
        )
        if truth is None:
            continue
        model = on_meta(kind, truth.config)
        inf.offload(model, CPU, load=place)
        try:
            assert_alike(model, truth)
            inf.export_safetensors(model, place / "out")
            assert stored_names(place / "out") == stored_names(place), model_type
        finally:
            inf.handle(model).close()
            shutil.rmtree(place)
        loaded.add(model_type)
    # A release of transformers may know fewer of them, and load more.
    print("hub_models.LEFT_OUT may lose", *sorted(hub_models.LEFT_OUT.keys() & loaded))
    more = {name: why for name, why in left_out.items() if name not in hub_models.LEFT_OUT}
    assert not more, "\n".join(
        ["write rules for these, or add them to hub_models.LEFT_OUT:"]
        + [f"    {name}    {why}" for name, why in sorted(more.items())]
    )
    assert loaded, "no model type was loaded"


def test_it_trains_as_the_model_that_from_pretrained_loaded(
    mixtral: Path, meta_mixtral: Any, tmp_path: Path
) -> None:
    from transformers import MixtralForCausalLM

    losses = []
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    whole = MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16)
    for model, settled, load in ((meta_mixtral, policy, mixtral), (whole, CPU, None)):
        inf.offload(model.train(), settled, load=load)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for batch in models.token_batches(3):
            loss = models.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert_alike(meta_mixtral, whole)
    inf.export_safetensors(meta_mixtral, tmp_path / "out", masters=True)
    inf.handle(whole).close()
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in files.values()} == {torch.float32}
    assert sorted(files) == stored_names(mixtral)


def test_weights_in_fp8_with_scales_become_bf16(tmp_path: Path) -> None:
    kind, config = hub_models.tiny("deepseek_v3")
    hub_models.write(kind, config, torch.bfloat16, tmp_path)
    plain = stored_names(tmp_path)
    hub_models.quantize_fp8(tmp_path)
    assert stored_names(tmp_path) != plain
    truth = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = type(config).from_pretrained(tmp_path)
    assert loaded.quantization_config["quant_method"] == "fp8"
    model = on_meta(kind, loaded)
    inf.offload(model, CPU, load=tmp_path)
    try:
        assert_alike(model, truth)
        assert not hasattr(model.config, "quantization_config")
        inf.export_safetensors(model, tmp_path / "out")
        # Plain weights under the hub's names: nothing of the quantization is left.
        assert stored_names(tmp_path / "out") == plain
    finally:
        inf.handle(model).close()


def test_other_quantized_weights_are_refused_with_the_reason(
    mixtral: Path, meta_mixtral: Any
) -> None:
    meta_mixtral.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(WeightsError, match=r"quantized \(gptq\).*use the unquantized model"):
        inf.offload(meta_mixtral, CPU, load=mixtral)


# -- bad input -------------------------------------------------------------------------------------


def changed(source: Path, place: Path, name: str, value: torch.Tensor | None) -> Path:
    """The checkpoint in one file, with one tensor replaced, added, or (None) left out."""
    tensors = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), place / "model.safetensors")
    return place


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
FOUND = r"3,072 bytes as bfloat16 \(found: model.safetensors, 3,008 bytes\)"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (EXPERT, None, rf"{EXPERT} is missing \(\[48, 32\], 3,072 bytes as bfloat16\)"),
        (EXPERT, (47, 32), rf"{EXPERT} of shape \(47, 32\); the model wants \(48, 32\), {FOUND}"),
        ("model.norm.weight", None, r"model\.norm\.weight is missing \(\[32\], 64 bytes"),
        ("extra", (3,), r"extra is unexpected \(model\.safetensors, 6 bytes\)"),
    ],
    ids=["an expert missing", "an expert misshaped", "missing", "surplus"],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_is_filled(
    name: str, value: tuple[int, ...] | None, message: str, mixtral: Path, meta_mixtral: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    tensor = None if value is None else torch.zeros(value, dtype=torch.bfloat16)
    bad = changed(mixtral, tmp_path, name, tensor)
    before = dict(meta_mixtral.named_parameters())
    swap = tmp_path / "swap"
    swap.mkdir()
    policy = inf.Policy(params="nvme", optim="nvme", nvme=swap, ram="min")
    with pytest.raises(WeightsError, match=message) as raised:
        inf.offload(meta_mixtral, policy, load=bad)
    # One expert that does not fit may spoil the shape of all.
    assert name in str(raised.value)
    assert "Build the model from the configuration of this checkpoint" in str(raised.value)
    assert all(before[key] is value for key, value in meta_mixtral.named_parameters())
    inf.offload(meta_mixtral, policy, load=mixtral)


def test_the_way_back_is_planned_once_for_all_tensors_that_do_not_fit(
    mixtral: Path, meta_mixtral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, plan = [], hub_files.plan_reverse

    def counted(model: Any, tensors: Any, conversions: Any) -> Any:
        planned.append(len(tensors))
        return plan(model, tensors, conversions)

    monkeypatch.setattr(hub_files, "plan_reverse", counted)
    tensors = {k: v for file in mixtral.glob("*.safetensors") for k, v in load_file(file).items()}
    tensors = {name: value for name, value in tensors.items() if "proj" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"q_proj\.weight.* and \d+ more are missing") as raised:
        inf.offload(meta_mixtral, CPU, load=tmp_path)
    assert len(raised.value.tensors) >= 8
    assert len(planned) == 1


def test_a_file_that_is_cut_short_is_named_with_its_bytes(
    mixtral: Path, meta_mixtral: Any, tmp_path: Path
) -> None:
    place = changed(mixtral, tmp_path, "extra", None)
    file = place / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 10)
    with pytest.raises(
        WeightsError, match=rf"ends at byte {size - 10:,}, and (\S+) lies"
    ) as raised:
        inf.offload(meta_mixtral, CPU, load=place)
    assert raised.value.path == str(file)
    assert raised.value.tensors
    assert "10 B are missing: copy or download it again" in str(raised.value)
    os.truncate(file, 4)
    with pytest.raises(WeightsError, match="has 4 bytes and no header"):
        inf.offload(meta_mixtral, CPU, load=place)


def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(WeightsError, match=r"a of shape \(2,\), F32, takes 8 bytes, not 4"):
        inf.offload(nn.Linear(1, 1), CPU, load=tmp_path)


@pytest.mark.parametrize("fault", ["EIO", "short"])
def test_a_drive_that_fails_while_a_tensor_is_read_is_an_error_with_the_place(
    fault: str, mixtral: Path, meta_mixtral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = os.preadv, []

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) < 5:
            return read(fd, buffers, offset)
        if fault == "EIO":
            raise OSError(errno.EIO, "Input/output error")
        return 0

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(AioError, match="cannot be read") as raised:
        inf.offload(meta_mixtral, CPU, load=mixtral)
    assert raised.value.path.endswith(".safetensors")
    assert raised.value.offset == calls[-1]
    assert raised.value.length > 0
    assert all(parameter.is_meta for parameter in meta_mixtral.parameters())
    monkeypatch.undo()
    inf.offload(meta_mixtral, CPU, load=mixtral)


# -- parts -----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_some_elements_are_those_of_the_whole(data: st.DataObject, mixtral: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = on_meta(MixtralForCausalLM, MixtralConfig.from_pretrained(mixtral))
    tensors = HubTensors(model, mixtral)
    name = data.draw(st.sampled_from(sorted(tensors.names())))
    whole = tensors.read(name).reshape(-1)
    first = data.draw(st.integers(0, whole.numel() - 1))
    out = torch.empty(data.draw(st.integers(0, whole.numel() - first)), dtype=whole.dtype)
    piece = data.draw(st.sampled_from([1000, 10_000, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader, "PIECE_BYTES", piece)
        patch.setattr(hub_files, "CONVERTED_BYTES", piece)
        tensors.read_into(name, first, out)
    assert torch.equal(out, whole[first : first + out.numel()])


@pytest.mark.parametrize("together", [1000, 1 << 20])  # one expert, all experts
def test_experts_are_converted_once_for_all_parts_in_sequence(
    mixtral: Path, meta_mixtral: Any, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(hub_files, "CONVERTED_BYTES", together)
    tensors = HubTensors(meta_mixtral, mixtral)
    name = next(name for name in sorted(tensors.names()) if "gate_up_proj" in name)
    whole = tensors.read(name).reshape(-1)
    parts = torch.empty_like(whole)
    with reading.Counted() as counted:
        for start in range(0, whole.numel(), 100):
            tensors.read_into(name, start, parts[start : start + 100])
    assert torch.equal(parts, whole)
    assert counted.bytes == whole.nbytes
    assert tensors._rows.held is None


def test_a_large_tensor_is_read_in_pieces_and_experts_some_at_a_time(
    mixtral: Path, meta_mixtral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MixtralForCausalLM

    monkeypatch.setattr(safetensors_reader, "PIECE_BYTES", 1000)
    monkeypatch.setattr(hub_files, "CONVERTED_BYTES", 1000)
    longest = 0

    def watched(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal longest
        longest = max(longest, len(buffers[0]))
        return read(fd, buffers, offset)

    read = os.preadv
    monkeypatch.setattr(os, "preadv", watched)
    inf.offload(meta_mixtral, CPU, load=mixtral)
    # One expert's matrix: 48 x 32 of bf16.
    assert longest == 3072
    assert_alike(meta_mixtral, MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16))


def test_tiles_of_experts_are_filled_with_their_part(
    mixtral: Path, meta_mixtral: Any, tmp_path: Path
) -> None:
    from transformers import MixtralForCausalLM

    truth = MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16)
    meta_mixtral.set_experts_implementation("eager")
    inf.tile_experts(meta_mixtral, experts=3)
    inf.tile_linears(meta_mixtral, tiles=(2, 2), names=["lm_head", "q_proj"])
    inf.offload(meta_mixtral, CPU, load=mixtral)
    assert_alike(meta_mixtral, truth)
    inf.export_safetensors(meta_mixtral, tmp_path)
    assert stored_names(tmp_path) == stored_names(mixtral)
    inf.load_safetensors(meta_mixtral, mixtral)
    assert_alike(meta_mixtral, truth)


# -- memory ----------------------------------------------------------------------------------------


def test_what_a_conversion_holds_is_checked_before_anything_is_taken(
    mixtral: Path, meta_mixtral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = CgroupLimit("/job", 1 << 40, (1 << 40) - 4096)
    monkeypatch.setattr(ledger, "cgroup_limits", lambda: [limit])
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    stacks = [p.numel() * 2 for name, p in meta_mixtral.named_parameters() if "experts" in name]
    # Tensors that are not the parameters': offload would search the process for their holders.
    whole = {name: torch.empty_like(p) for name, p in meta_mixtral.state_dict().items()}
    for together, copies in ((1 << 20, 1), (1000, meta_mixtral.config.num_local_experts)):
        monkeypatch.setattr(hub_files, "CONVERTED_BYTES", together)
        needed = []
        for load in (mixtral, whole):
            with pytest.raises(MemoryLimitError) as caught:
                inf.offload(meta_mixtral, policy, load=load)
            needed.append(caught.value.needed_bytes)
        # The tensors of the files, their stack, and the model's stack.
        assert needed[0] - needed[1] == 3 * max(stacks) // copies


def test_an_export_that_memory_cannot_hold_is_refused_before_anything_is_read(
    mixtral: Path, meta_mixtral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(parameter.numel() * 2 for parameter in meta_mixtral.parameters())
    stack = max(p.numel() * 2 for name, p in meta_mixtral.named_parameters() if "experts" in name)
    inf.offload(meta_mixtral, CPU, load=mixtral)
    # A stack is there twice where its experts are written apart.
    for names, need in (("modules", whole), ("hub", whole + stack)):
        left = iter((need - 1, need))
        monkeypatch.setattr(safetensors_writer, "memory_left_bytes", lambda left=left: next(left))
        with pytest.raises(MemoryError, match="give a smaller shard_bytes_max"):
            inf.export_safetensors(meta_mixtral, tmp_path / names, names=names)
        assert not (tmp_path / names).exists()
        inf.export_safetensors(meta_mixtral, tmp_path / names, names=names)
        assert (tmp_path / names / "model.safetensors").exists()


MEMORY = """
import json, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
import infinity as inf
from infinity._src.engine import build
from infinity._src.checkpoint.formats import hub_files, safetensors_writer
from infinity._src.checkpoint.formats.hub_files import HubTensors
from infinity._src.memory import heap
from tests import hub_models

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) << 10 for l in lines if l.startswith("RssAnon"))

def most(action):
    start, stop = anonymous(), threading.Event()
    highest = [start]
    def watch():
        while not stop.wait(0.0005):
            highest.append(anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    action()
    stop.set()
    thread.join()
    return max(highest) - start

def watched(*arguments, **options):
    # Pools are reserved by now: what comes is memory of the fill.
    peaks.append(most(lambda: fill(*arguments, **options)))

fill, build.initialize_tiers, peaks = build.initialize_tiers, watched, []
policy = inf.Policy(params="nvme", optim="nvme", nvme=sys.argv[2], ram="min")
kind, config = hub_models.tiny(sys.argv[3], **json.loads(sys.argv[4]))
with torch.device("meta"):
    model = kind._from_config(config, dtype=torch.bfloat16)
largest = max(parameter.numel() for parameter in model.parameters()) * 2
converting = HubTensors(model, Path(sys.argv[1])).converting_bytes
inf.offload(model, policy, load=Path(sys.argv[1]))
unit = max(unit.size_bytes for unit in inf.handle(model).units)
print(peaks[0], 2 * unit + heap.STREAM_SPARE_BYTES, largest, converting)
for size in map(int, sys.argv[5:]):
    parts = hub_files.hub_parts(model, inf.handle(model), masters=False)
    groups = safetensors_writer.group_units([part.size_bytes for part in parts], size)
    out = Path(sys.argv[2]) / "out"
    print(
        most(lambda: inf.export_safetensors(model, out, shard_bytes_max=size)),
        safetensors_writer.held_bytes([parts[index] for index in group] for group in groups),
    )
"""


OTHERS_BYTES = 8 << 20
"""More that the interpreter and torch take meanwhile."""


def watched_fill(family: str, place: Path, *exports: int) -> list[list[int]]:
    """Fill a wide model in a process of its own, and export it in files of such sizes; return what
    that prints."""
    sizes = hub_models.WIDE[family]
    kind, config = hub_models.tiny(family, **sizes)
    if family == "mixtral":
        hub_models.write_values(on_meta(kind, config), place / "hub")
    else:
        hub_models.write(kind, config, torch.bfloat16, place / "hub")
        hub_models.quantize_fp8(place / "hub")
    ran = forks.run_code(MEMORY, place / "hub", place, family, json.dumps(sizes), *exports)
    assert ran.returncode == 0, ran.stderr
    return [list(map(int, line.split())) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("family", mostly_slow(hub_models.WIDE, "mixtral"))
def test_memory_stays_below_the_engines_own_and_three_of_the_largest_group(
    family: str, tmp_path: Path
) -> None:
    """Experts of a Mixtral; and each matrix of a DeepSeek in fp8, with its scales."""
    ((peak, own, largest, converting),) = watched_fill(family, tmp_path)
    # The engine's own: a flat being filled, one being written, and what malloc may keep.
    assert peak <= own + 3 * largest
    # As `inf.offload` has counted it.
    assert peak <= own + converting + OTHERS_BYTES
    kind, config = hub_models.tiny(family, **hub_models.WIDE[family])
    total = sum(parameter.numel() * 2 for parameter in on_meta(kind, config).parameters())
    assert total > 3 * (own + 3 * largest), "the model is too small to say anything"


@pytest.mark.slow
def test_an_export_holds_the_tensors_of_one_file(tmp_path: Path) -> None:
    (_, own, *_), *exports = watched_fill("mixtral", tmp_path, 1 << 20, 32 << 20)
    for peak, held in exports:
        # The engine's own: units that are gathered.
        assert peak <= own + held + OTHERS_BYTES
    assert exports[1][1] > 3 * exports[0][1]


# -- sources of the user ---------------------------------------------------------------------------


class Counted:
    """A source that counts its reads."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.reads: dict[str, int] = {}

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        self.reads[name] = self.reads.get(name, 0) + 1
        return self.tensors[name]


class Typed(Counted):
    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype


@pytest.mark.parametrize("kind", [Counted, Typed])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])
def test_a_source_is_read_once_for_each_tensor(kind: type[Counted], tiled: bool) -> None:
    model = models.make(models.llama)
    source = kind(dict(model.state_dict()))
    assert isinstance(source, inf.TensorSource)
    with torch.device("meta"):
        meta = models.make(models.llama)
    if tiled:
        inf.tile_linears(meta, tiles=4, names=["lm_head", "up_proj"])
    inf.offload(meta, CPU, load=source)
    try:
        assert source.reads == dict.fromkeys(source.tensors, 1)
        assert_alike(meta, model)
    finally:
        inf.handle(meta).close()


def test_a_source_that_is_wrong_is_caught() -> None:
    state = dict(models.make(models.llama).state_dict())
    norm = "model.norm.weight"
    with torch.device("meta"):
        meta = models.make(models.llama)
    for kind in (Counted, Typed):
        source = kind(state | {norm: torch.zeros(32, dtype=torch.int64)})
        with pytest.raises(WeightsError, match=norm) as raised:
            inf.offload(meta, CPU, load=source)
        if kind is Counted:
            fix = "has model.norm.weight as torch.int64; the model wants torch.bfloat16. Convert it"
            assert fix in str(raised.value)
        # With a dtype it is found before anything is read.
        assert (source.reads == {}) is (kind is Typed)
    source = Counted(state)
    source.read = lambda name: state[name][:1]  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match=r"had stated .*; make shape\(\) and read\(\) agree"):
        inf.offload(meta, CPU, load=source)
