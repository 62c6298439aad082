"""Performance: the limits of a step, plans against them, and the report of a step."""
