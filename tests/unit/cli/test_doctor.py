"""Doctor: each shortcoming has a line that says what to do."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity._src.base import cpu_features
from infinity._src.cabi import native
from infinity._src.cli import doctor
from infinity._src.kernels import choice
from infinity._src.kernels.usual_trials import trials_of_usual_forms
from infinity._src.memory.device import compute_device
from infinity.aio import _memory_limits as memory_limits
from infinity.aio._file_system import DriveLimits
from infinity.aio._probe import ExecutorProbe, probe_directory, probe_engine
from tests import forks
from tests.unit.aio.disks import overlay_without_direct
from tests.unit.aio.rig import BACKENDS

MIB = 1 << 20


def finding(subject: str, directories: list[str]) -> doctor.Finding:
    (found,) = [entry for entry in doctor.findings(directories) if entry.subject == subject]
    return found


def test_the_executor_of_training_is_tried(tmp_path: Path) -> None:
    found = finding("executor", [str(tmp_path)])
    assert found.value.startswith(f"{BACKENDS[0]}, pools of 48 MiB")
    assert not [
        entry for entry in doctor.findings([str(tmp_path / "gone")]) if entry.subject == "executor"
    ]


@pytest.mark.privileged
def test_a_container_s_layer_without_o_direct_is_warned_of_with_the_reason(tmp_path: Path) -> None:
    with overlay_without_direct(tmp_path / "overlay") as place:
        found = finding("swap directory", [str(place)])
    assert "buffered" in found.value
    assert "overlay" in found.warning
    assert "O_DIRECT" in found.warning
    assert "not a container's file system" in found.warning


def test_a_drive_with_a_short_queue_says_which_requests_fit_and_what_to_raise(
    tmp_path: Path,
) -> None:
    limits = DriveLimits("sda", 64, 128)
    block_bytes, depth = limits.fit(1 << 20, 32)
    probe = dataclasses.replace(
        probe_directory(tmp_path), limits=limits, block_bytes=block_bytes, depth=depth
    )
    found = doctor._directory(probe)
    assert "requests of 1 MiB, 8 in flight (sda takes 64 of 128 KiB)" in found.value
    assert "8 requests of 1 MiB fit instead of 32" in found.warning
    assert "/sys/block/sda/queue/nr_requests" in found.warning
    found = doctor._directory(dataclasses.replace(probe, limits=DriveLimits("dm-0"), depth=32))
    assert "dm-0 is virtual" in found.value
    found = doctor._directory(
        dataclasses.replace(probe, preallocates=False, limits=DriveLimits(), depth=32)
    )
    assert "limits unknown" in found.value
    assert "cannot preallocate" in found.warning


def test_a_cpu_that_emulates_bf16_is_told_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for text, value in (
        ("flags : fpu avx2 avx512_bf16 amx_bf16\n", "avx512_bf16, amx_bf16; --dtype auto"),
        ("Features : fp asimd bf16\n", "bf16; --dtype auto computes in bfloat16"),
        ("flags : fpu avx2 avx512f\n", "emulated: the CPU has none of avx512_bf16"),
        (None, "emulated"),
    ):
        place = tmp_path / "cpuinfo"
        if text is None:
            place.unlink()
        else:
            place.write_text(f"processor : 0\n{text}")
        monkeypatch.setattr(cpu_features, "CPUINFO", place)
        cpu_features.bf16_instructions.cache_clear()
        found = doctor._bf16()
        assert value in found.value
        assert ("many times slower" in found.warning) == ("emulated" in found.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not doctor._bf16().warning
    cpu_features.bf16_instructions.cache_clear()


def test_a_cgroup_that_leaves_little_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = memory_limits.CgroupLimit("/job", 512 * MIB, 100 * MIB)
    monkeypatch.setattr(memory_limits, "cgroup_limits", lambda: [limit])
    found = doctor._memory()
    assert "cgroup limit 512 MiB, 412 MiB available" in found.value
    assert "the cgroup's limit leaves less than 1 GiB" in found.warning


def test_memlock_is_compared_with_what_registration_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    engine = dataclasses.replace(probe_engine(), io_uring=True, memlock_bytes=8 * MIB)
    reason = "the kernel refuses: RLIMIT_MEMLOCK is too small"
    refused = ExecutorProbe(backend="io_uring", pool_bytes=48 * MIB, registered_reason=reason)
    for executor in (None, refused, ExecutorProbe(error="no directory")):
        found = doctor._memlock(engine, executor)
        assert "8 MiB; registering the pools takes 48 MiB" in found.value
        assert "`ulimit -l 49152`" in found.warning
    assert doctor._memlock(engine, ExecutorProbe(backend="io_uring", registered=True)).warning == ""
    assert doctor._memlock(dataclasses.replace(engine, memlock_bytes=None), None).warning == ""
    # Without io_uring nothing is registered, and the line on the backend says so.
    assert doctor._memlock(dataclasses.replace(engine, io_uring=False), None).warning == ""


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_without_the_wheel_doctor_says_what_takes_over_and_what_to_install(tmp_path: Path) -> None:
    done = forks.run_code(f"""
        import sys
        sys.modules["liburing"] = None
        from infinity._src.cli.main import main
        sys.exit(main(["doctor", "--dir", {str(tmp_path)!r}]))
    """)
    assert done.returncode == 0, done.stderr
    (warning,) = [
        line for line in done.stdout.splitlines() if line.startswith("warning: I/O backend")
    ]
    assert "liburing" in warning
    assert "pip install" in warning
    assert "threads replace" in warning


def test_pools_that_did_not_get_huge_pages_or_cannot_be_opened_are_warned_of() -> None:
    engine = dataclasses.replace(probe_engine(), huge_pages_work=True, io_uring=True)
    slow = ExecutorProbe(
        backend="io_uring", pool_bytes=100, huge_bytes=10, registered_reason="small pages"
    )
    found = doctor._pools(engine, slow)
    assert "10 % in huge pages, not registered (small pages)" in found.value
    assert "compact_memory" in found.warning
    assert "no room" in doctor._pools(engine, ExecutorProbe(error="no room")).warning
    found = doctor._pools(
        engine,
        ExecutorProbe(backend="threads", pool_bytes=8, huge_bytes=8, backend_reason="ENOMEM"),
    )
    assert found.warning == "ENOMEM"


def test_threads_that_wait_actively_are_warned_of_where_they_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.openmp, "active_here", lambda: "the default of libgomp")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = doctor._waiting()
    assert found.value == "active (the default of libgomp)"
    assert "export OMP_WAIT_POLICY=PASSIVE" in found.warning
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert doctor._waiting() == dataclasses.replace(found, warning="")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._waiting() == dataclasses.replace(found, warning="")
    monkeypatch.setattr(doctor.openmp, "active_here", lambda: "")
    assert doctor._waiting() == dataclasses.replace(found, value="asleep", warning="")


def test_a_model_is_told_with_its_room_and_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from infinity._src.cli import plan

    # Less than the model's states, so that some rest on the drives.
    monkeypatch.setattr(plan, "memory_left_bytes", lambda: 384 * MIB)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
        num_attention_heads=8, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "small")
    probe = dataclasses.replace(probe_directory(tmp_path), free_bytes=100 << 30)
    # Two directories of one file system have its room once.
    found = doctor._model(tmp_path / "small", [probe, probe])
    assert found.warning == ""
    assert found.value.startswith("small: 0.04 B parameters; ")
    assert "100 GiB are free" in found.value
    # Two processors of one core are one core.
    monkeypatch.setattr(plan.numa, "core_count", lambda cpus: 3)
    assert plan.machine_here([probe]).cores == 3
    assert "s/step of 512 tokens" in found.value
    with monkeypatch.context() as patch:
        searched = plan.search

        def slow(*given: Any, **how: Any) -> types.SimpleNamespace:
            ways = searched(*given, **how).ways
            return types.SimpleNamespace(ways=[dataclasses.replace(ways[0], step_s=1496.7)])

        patch.setattr(plan, "search", slow)
        assert "; 1,497 s/step of" in doctor._model(tmp_path / "small", [probe]).value
    full = doctor._model(tmp_path / "small", [dataclasses.replace(probe, free_bytes=1 << 20)])
    assert full.warning.startswith("NVMe: ")
    assert "give one: --dir" in doctor._model(tmp_path / "small", []).warning
    assert "is neither a directory" in doctor._model(tmp_path / "gone", [probe]).warning
    (asked,) = [
        entry
        for entry in doctor.findings([str(tmp_path)], model=tmp_path / "small")
        if entry.subject == "model"
    ]
    assert "small: 0.04 B parameters" in asked.value


def test_every_operation_is_shown_with_what_runs_it_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = finding("operations", [str(tmp_path)])
    assert found.warning == ""
    assert found.value.splitlines() == [f"{name}: torch (the CPU computes)" for name in choice.OPS]
    monkeypatch.setenv(choice.VARIABLE, "update=torch")
    assert "update: torch (forced)" in doctor._operations().value.splitlines()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(choice.VARIABLE, "update=triton,tile_matmul=triton")
    lines = doctor._operations().value.splitlines()
    assert "update: triton (forced)" in lines, "its bits are torch's"
    assert "tile_matmul: triton (forced), which rounds differently from torch" in lines


def test_operations_that_cannot_run_as_forced_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv(choice.VARIABLE, "update=triton")
    found = doctor._operations()
    assert "update: none" in found.value.splitlines()
    assert "tile_matmul: torch (the CPU computes)" in found.value.splitlines()
    assert "set TRITON_INTERPRET=1" in found.warning
    monkeypatch.setenv(choice.VARIABLE, "updates=torch")
    assert "there is no operation 'updates'" in doctor._operations().warning
    monkeypatch.setenv(choice.VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(choice, "triton_version", lambda: "")
    assert "Triton cannot be imported" in doctor._operations().warning


def test_a_kernel_that_fails_its_trial_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choice, "compiles", lambda device: True)
    monkeypatch.setattr(choice, "_passed", set())
    monkeypatch.setattr(choice, "_failed", {})
    monkeypatch.setattr(choice, "_warned", set())
    update = trials_of_usual_forms()["update"]
    monkeypatch.setattr(choice, "difference", lambda trial, device: "one bit" * (trial == update))
    found = doctor._operations()
    lines = found.value.splitlines()
    assert "group_quantize: triton (the same bits as torch, in one pass)" in lines
    assert "tile_matmul: torch (not measured on such a device)" in lines
    (fallen,) = [line for line in lines if line.startswith("update: torch (Triton ")]
    assert fallen.endswith(": one bit)")
    assert found.warning.startswith("update on cpu runs on torch")


def test_amds_gpus_are_named_as_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Instinct")
    room = types.SimpleNamespace(total_memory=64 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: room)
    assert "ROCm 7.1" in doctor._gpu().warning
    assert "models run on the CPU" in doctor._gpu().warning
    assert "update: torch (the CPU computes)" in doctor._operations().value.splitlines()
    with pytest.raises(ValueError, match=r"device='cuda': .*ROCm 7.1.*; use device='cpu'"):
        compute_device(torch.nn.Linear(2, 2), "cuda")
    assert compute_device(torch.nn.Linear(2, 2), "cpu") == torch.device("cpu")


def test_a_gpu_whose_driver_cannot_be_had_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._copies_fail(0) == ""
    if torch.cuda.is_available():
        assert doctor._copies_fail(1) == ""
    else:
        assert "cannot be offloaded: the device's driver cannot be used" in doctor._copies_fail(1)
    monkeypatch.setattr(native, "_reason", "infinity's C extension is missing")
    assert "cannot be offloaded: infinity's C extension is missing" in doctor._copies_fail(1)
