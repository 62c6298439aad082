"""`python -m infinity.compat.deepspeed [torchrun options] train.py ...`: runs an unchanged
DeepSpeed script on the engine, with ranks as torchrun starts them. Each rank runs this module
again, which installs the stand-in and then runs the script.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch.distributed import run

from infinity.compat.deepspeed.installation import install, real_version

_RANK = "infinity.rank"
"""The first argument of a rank. No script has this name: it would end in `.py`."""


def main(arguments: list[str]) -> None:
    """Start the ranks. Blocks until they have ended. Raises: SystemExit as torchrun."""
    parsed = run.get_args_parser().parse_args(arguments)
    if parsed.no_python:
        raise SystemExit("--no-python: the stand-in is installed in Python; name a script")
    script = [parsed.training_script, *parsed.training_script_args]
    # The options precede the script. -m and --module are passed to the ranks as `kind`.
    options = [
        each for each in arguments[: len(arguments) - len(script)] if each not in ("-m", "--module")
    ]
    version = real_version()
    if version is not None:
        print(
            f"infinity: `import deepspeed` is infinity's here; DeepSpeed {version} is installed, "
            "and not used",
            file=sys.stderr,
        )
    kind = "module" if parsed.module else "script"
    run.main([*options, "-m", "infinity.compat.deepspeed", _RANK, kind, *script])


def run_script(kind: str, script: str, arguments: list[str]) -> None:
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
    if sys.argv[1:2] == [_RANK]:
        run_script(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main(sys.argv[1:])
