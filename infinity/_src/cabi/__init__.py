"""The C extension: how it is loaded, and the records that it shares with Python."""
