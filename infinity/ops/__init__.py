"""Tensor operations with a torch reference each."""
