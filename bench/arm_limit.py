"""Measures the lower bound of a step of R1 (r1.py) on this machine now: forward and backward alone,
and the memory's bandwidth; prints one JSON line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import meter
import r1
from arm_predict import plain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="swap directory")
    r1.add_arguments(parser)
    args = parser.parse_args()
    meter.report({"arm": "limit", **plain(r1.from_arguments(args))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
