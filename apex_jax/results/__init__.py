"""What a run leaves for a person to look at: where it came from, its curves, its video."""
