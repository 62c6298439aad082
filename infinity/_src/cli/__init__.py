"""The command `infinity`: bench, train, plan, checkpoint, doctor."""
