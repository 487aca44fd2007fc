"""What an operator sees and asks for: status, progress, warnings, a copy of the run elsewhere."""
