"""Accelerate on a machine without GPUs: ranks that know of each other."""

from __future__ import annotations

import functools
import os
from typing import Any

from infinity._embedding import check_methods
from infinity.compat.deepspeed.accelerator import get_accelerator

_TESTED = "1.15.0"


def adapt(state: Any) -> None:
    """Let `PartialState` name the backend of the CPU's ranks where DeepSpeed was asked for.

    Without a GPU accelerate names none, and takes each rank for the only one: all of them would
    train on the same rows. state: the module accelerate.state. Raises: ImportError for a
    release without the method.
    """
    check_methods(state.PartialState, ("_prepare_backend",), "accelerate", _TESTED)
    own = state.PartialState._prepare_backend
    if hasattr(own, "infinity_names"):
        return

    @functools.wraps(own)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = own(self, *args, **kwargs)
        asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if backend is None and asked and "LOCAL_RANK" in os.environ:
            backend = get_accelerator().communication_backend_name()
        return backend, kind

    prepare_backend.infinity_names = True  # type: ignore[attr-defined]
    state.PartialState._prepare_backend = prepare_backend
