"""The error of compat. DeepSpeed mostly raises AssertionError, so a script may catch either."""

from __future__ import annotations


class DeepSpeedRefusal(ValueError, AssertionError):
    """Raised for an unsupported argument or call. The message names the value and the fix."""
