"""The build backend of pyproject.toml: setuptools' backend, plus a C compiler if the machine has
none.

A front end such as pip queries the packages that a build needs. On a machine without a C compiler
these include `ziglang`; other machines do not download its 100 MB.
"""

from __future__ import annotations

from typing import Any

from build_native import requires  # this folder is the backend-path
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return setuptools' requirements, cffi, and a compiler if there is none."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *requires()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return the requirements of an editable install, which are the same."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *requires()]
