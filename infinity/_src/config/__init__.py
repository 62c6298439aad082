"""Policy, and DeepSpeed configurations read as policies."""
