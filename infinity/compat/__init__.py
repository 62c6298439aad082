"""Adapters for scripts that were written for other libraries. This module imports nothing."""
