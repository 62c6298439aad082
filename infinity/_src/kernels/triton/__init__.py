"""Kernels in Triton, beside their torch references in `infinity._src.kernels`; `choice` says which
one runs.
"""
