"""The build backend of pyproject.toml: setuptools', which also gets a C compiler where there is
none.

A front end such as pip asks it which packages a build needs. On a machine without a C compiler
`ziglang` is one of them; elsewhere its 100 MB are not downloaded.
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
    """Return what setuptools asks for, and cffi and perhaps a compiler."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *requires()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return the same for an editable install."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *requires()]
