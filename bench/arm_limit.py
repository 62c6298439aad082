"""What a step of R1 cannot beat on this machine now: forward and backward alone, and what the drive gives; one JSON line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import meter
import r1
from arm_predict import plain

SIZE = "1G"


def drive(directory: Path) -> tuple[float, float]:
    """(read, write) bytes per second, by `python -m infinity.bench swap`, medians of three rounds."""
    report = directory / "swap.json"
    command = [sys.executable, "-m", "infinity.bench", "swap", "--dir", str(directory), "--size", SIZE, "--limit", "off",
               "--json", str(report)]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    phases = json.loads(report.read_text())["phases"]
    return phases["read"]["gbps"] * 1e9, phases["write"]["gbps"] * 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="swap directory")
    r1.add_arguments(parser)
    args = parser.parse_args()
    read, write = drive(args.dir)
    meter.report({"arm": "limit", "read_bytes_per_s": read, "write_bytes_per_s": write, **plain(r1.from_arguments(args))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
