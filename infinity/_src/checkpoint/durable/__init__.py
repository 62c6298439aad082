"""Durable runs: swap files from which training goes on after a crash."""
