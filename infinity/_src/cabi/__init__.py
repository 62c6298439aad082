"""The C extension: its loader, and the records that it shares with Python."""
