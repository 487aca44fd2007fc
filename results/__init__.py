"""Published curves, and the programs that make them."""
