"""Measuring what a drive gives as swap: `python -m infinity.bench`."""
