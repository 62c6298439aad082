"""The engine, put together: set-up, the handle, saves and restores, figures."""
