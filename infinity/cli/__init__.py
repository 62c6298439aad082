"""The command `infinity`: bench, train, doctor."""
