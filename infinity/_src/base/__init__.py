"""Helpers that know nothing of the engine: sizes, words, paths, files, progress, telemetry."""
