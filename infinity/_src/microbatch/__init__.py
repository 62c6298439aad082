"""Slices of a batch: one forward and one backward run all micro-batches through a module before the
next module."""
