"""Formats of other projects: safetensors, GGUF, torch.save, DCP, DeepSpeed's checkpoints."""
