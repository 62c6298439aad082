"""What outlives a run: exports, checkpoints, durable runs, and the formats of others."""
