"""Parameters: sharded on a tier, unsharded on the device."""
