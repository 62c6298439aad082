"""Checkpoints: saving, restoring and checking a run, durable runs, and the formats of others."""
