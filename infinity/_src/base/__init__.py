"""Helpers that do not depend on the engine: sizes, wording, paths, files, progress, telemetry."""
