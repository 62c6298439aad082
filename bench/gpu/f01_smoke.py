"""1. Smoke test (three minutes): the driver, `infinity doctor`, and the probe of the engine's
assumptions about CUDA. If it fails, the other commands are useless."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import stage

BESIDE_THE_DRIVER = "/usr/local/nvidia/bin"
QUERY = (
    "name,driver_version,vbios_version,pcie.link.gen.max,pcie.link.width.max,"
    "pcie.link.gen.current,memory.total,compute_mode,persistence_mode,clocks.max.sm"
)
OF_THE_MACHINE = "(I/O backend|memlock limit|memory|swap directory|GPU|machine)  "


def steps(run: stage.Run) -> Iterator[stage.Step]:
    smi = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{BESIDE_THE_DRIVER}")
    why_not = "" if smi else "there is no nvidia-smi here"
    if not run.on_cuda:
        why_not = f"nvidia-smi is of a real GPU, and this is {run.device}"
    yield stage.Step("nvidia-smi", [smi or "nvidia-smi"], 20, why_not=why_not)
    query = [smi or "nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    yield stage.Step("query", query, 20, why_not=why_not, find=".")
    doctor = [sys.executable, "-m", "infinity._src.cli.main", "doctor", "--dir", str(run.swap)]
    yield stage.Step("doctor", doctor, 60, find=OF_THE_MACHINE)
    probe = run.script("probe.py", "--device", run.device, "--results", run.results)
    yield stage.Step("probe", probe, 100)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 180, steps))
