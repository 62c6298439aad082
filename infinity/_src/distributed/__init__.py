"""Collectives over torch.distributed."""
