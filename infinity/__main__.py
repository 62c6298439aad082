"""`python -m infinity`: the command `infinity`, also for `torchrun -m infinity`."""

from __future__ import annotations

import sys

from infinity._src.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
