"""The public API is the short list in docs/guide.md, and nothing else.

The rule is that of PEP 8: a dotted path with a part that begins with an underscore is private.
`infinity.aio` and `infinity.compat.deepspeed` are one namespace each besides: of the modules in
them, only NAMED_INSIDE are public.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import infinity

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guide.md"
NAMESPACES = ("infinity.aio.", "infinity.compat.deepspeed.")
NAMED_INSIDE = {"infinity.aio.testing"}


def public_section() -> str:
    text = GUIDE.read_text(encoding="utf-8")
    return text.split("\n## What is public\n")[1].split("\n## ")[0]


def documented_names() -> set[str]:
    """The names that the guide's first bullet gives to `infinity` itself."""
    bullet = re.search(r"^- `infinity`: (.*?)^- ", public_section(), flags=re.DOTALL | re.MULTILINE)
    assert bullet
    return set(re.findall(r"`(\w+)`", bullet.group(1)))


def documented_modules() -> set[str]:
    """The modules of the guide's bullets, and those that are run as commands."""
    bullets = re.findall(r"^- `(infinity[\w.]*)`", public_section(), flags=re.MULTILINE)
    commands = re.findall(r"`python -m (infinity[\w.]*)`", public_section())
    return {*bullets, *commands}


def public_modules() -> set[str]:
    """Every module of the package that the two rules above leave public."""
    found = set()
    package = ROOT / "infinity"
    # os.walk, because infinity/aio is a symbolic link, which Path.rglob does not follow.
    for folder, _, files in os.walk(package, followlinks=True):
        inside = Path(folder).relative_to(package.parent)
        for file in files:
            if not file.endswith(".py"):
                continue
            parts = (
                inside.parts if file == "__init__.py" else (*inside.parts, file.removesuffix(".py"))
            )
            module = ".".join(parts)
            inside_one = module.startswith(NAMESPACES) and module not in NAMED_INSIDE
            if not inside_one and not any(part.startswith("_") for part in parts):
                found.add(module)
    return found


def test_the_names_of_infinity_are_those_of_the_guide() -> None:
    assert documented_names() == set(infinity.__all__)
    assert len(set(infinity.__all__) - {"__version__"}) == 31


def test_the_public_modules_are_those_of_the_guide() -> None:
    assert public_modules() == documented_modules()


def importable(module_names: set[str]) -> list[str]:
    """The modules, without integrations whose trainer is not installed."""
    trainers = {name: name.removeprefix("infinity.integrations.") for name in module_names}
    return sorted(
        name
        for name, trainer in trainers.items()
        if trainer == name or importlib.util.find_spec(trainer) is not None
    )


def test_every_public_name_resolves() -> None:
    for module_name in importable(documented_modules()):
        module = importlib.import_module(module_name)
        for public in getattr(module, "__all__", ()):
            assert getattr(module, public) is not None, f"{module_name}.{public}"


def test_public_names_of_submodules_are_declared() -> None:
    """`infinity.aio`, its testing tools, `infinity.ops` and integrations say in `__all__` what they
    offer."""
    without = {"infinity.bench", "infinity.compat", "infinity.errors", "infinity.integrations"}
    for module_name in importable(documented_modules() - without):
        assert importlib.import_module(module_name).__all__, module_name


def test_both_commands_answer() -> None:
    for command in (["-m", "infinity", "--help"], ["-m", "infinity.bench", "--help"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: infinity")
