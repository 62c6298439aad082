"""The optimizer: AdamW over states at rest, and the pipeline of a step."""
