"""Optimizers over states at rest, the pipeline of a step, and access to single states."""
