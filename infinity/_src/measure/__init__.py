"""Benchmarks of drives as swap, of the update kernels and of device copies: `infinity bench`."""
