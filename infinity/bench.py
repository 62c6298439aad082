"""`python -m infinity.bench [swap ...]`: `infinity bench`."""

from __future__ import annotations

import sys

from infinity._src.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
