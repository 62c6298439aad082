"""1. Whether anything works at all (three minutes): the driver, `infinity doctor`, and the probe of
what the engine takes for granted of CUDA. Without a good end here nothing else needs to be run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import stage

QUERY = (
    "name,driver_version,vbios_version,pcie.link.gen.max,pcie.link.width.max,"
    "pcie.link.gen.current,memory.total,compute_mode,persistence_mode,clocks.max.sm"
)


def steps(run: stage.Run) -> Iterator[stage.Step]:
    why_not = "" if run.on_cuda else f"nvidia-smi is of a real GPU, and this is {run.device}"
    yield stage.Step("nvidia-smi", ["nvidia-smi"], 20, why_not=why_not)
    query = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    yield stage.Step("query", query, 20, why_not=why_not, find=".")
    doctor = [sys.executable, "-m", "infinity._src.cli.main", "doctor"]
    yield stage.Step("doctor", doctor, 60)
    probe = run.script("probe.py", "--device", run.device, "--results", run.results)
    yield stage.Step("probe", probe, 100)


if __name__ == "__main__":
    sys.exit(stage.main(__file__, __doc__, 180, steps))
