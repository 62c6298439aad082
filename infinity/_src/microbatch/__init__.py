"""Slices of a batch, the micro-batches: one forward and one backward run all of them through a
module before the next module."""
