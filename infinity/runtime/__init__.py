"""Runtime: hooks and the life cycle of gathered parameters."""
