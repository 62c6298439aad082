"""Version of this package; setuptools reads it here."""

from __future__ import annotations

__version__ = "0.1.0"
