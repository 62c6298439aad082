"""Kernels: tensor operations, each with a torch reference implementation."""
