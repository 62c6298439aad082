"""Another job on the machine: multiplies matrices on some threads, at the lowest priority, until
its parent kills it.

Started by beside_a_job.py. Prints a line when it has begun.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

SIZE = 1024
NICENESS = 19


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    os.nice(NICENESS)
    torch.set_num_threads(args.threads)
    left, right, product = (torch.ones(SIZE, SIZE) for _ in range(3))
    torch.mm(left, right, out=product)
    print("begun", flush=True)
    while True:
        torch.mm(left, right, out=product)


if __name__ == "__main__":
    sys.exit(main())
