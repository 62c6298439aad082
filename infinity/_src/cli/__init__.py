"""The command `infinity`: bench, train, report, plan, checkpoint, doctor."""
