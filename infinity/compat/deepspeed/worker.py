"""One rank of `python -m infinity.compat.deepspeed`: calls `install()` and runs the script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from infinity.compat.deepspeed.installation import install


def main(kind: str, script: str, arguments: list[str]) -> None:
    """Run a script as `python script` would, or a module as `python -m` would. Blocks."""
    install()
    sys.argv = [script, *arguments]
    if kind == "module":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).absolute().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
