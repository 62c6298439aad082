"""`python -m infinity.bench [swap ...]`."""

from __future__ import annotations

import sys

from infinity._src.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
