"""Parameters: units, at-rest and gathered forms, gradient stand-ins, trace and schedule."""
