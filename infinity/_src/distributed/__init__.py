"""Collectives over torch.distributed, and the watchdog that ends them when a rank has failed."""
