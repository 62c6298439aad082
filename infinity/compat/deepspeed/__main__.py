"""`python -m infinity.compat.deepspeed [torchrun options] train.py ...`: runs an unchanged
DeepSpeed script on infinity's engine. torchrun starts the ranks.
"""

from __future__ import annotations

import sys

from torch.distributed import run

from infinity.compat.deepspeed.installation import real_version

_WORKER = "infinity.compat.deepspeed.worker"


def main(arguments: list[str]) -> None:
    """Start the ranks. Blocks until they have ended. Raises: SystemExit as torchrun."""
    parsed = run.get_args_parser().parse_args(arguments)
    if parsed.no_python:
        raise SystemExit("--no-python: the stand-in is installed in Python; name a script")
    script = [parsed.training_script, *parsed.training_script_args]
    # All before the script are torchrun's options, but -m and --module: the worker gets the kind.
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
    run.main([*options, "-m", _WORKER, kind, *script])


if __name__ == "__main__":
    main(sys.argv[1:])
