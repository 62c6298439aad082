"""Refusals. DeepSpeed answers most of them by an assertion, so a script may catch either kind."""

from __future__ import annotations


class DeepSpeedRefusal(ValueError, AssertionError):
    """Raised for an argument or a call that cannot be honoured. Names the value and the fix."""
