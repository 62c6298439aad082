"""Triton kernels; `infinity._src.kernels` has the torch references, and `choice` chooses between
them.
"""
