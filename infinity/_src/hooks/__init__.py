"""Hooks: where torch calls the engine."""
