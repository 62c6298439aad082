"""Durable runs: swap files from which training continues after a crash."""
