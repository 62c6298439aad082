"""Policy, and conversion of DeepSpeed configurations to policies."""
