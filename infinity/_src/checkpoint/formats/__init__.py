"""Formats of others: safetensors, GGUF, torch's files, DCP, DeepSpeed's checkpoints."""
