"""Kernels: tensor operations with a torch reference each."""
