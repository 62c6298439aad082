"""The implementation. Nothing in here is public API: a dotted path with an underscore part is
private (PEP 8)."""
