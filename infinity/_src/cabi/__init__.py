"""The C extension: its loader, the line that installs it, and the records that Python shares."""
