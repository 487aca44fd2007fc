"""A fleet in which something breaks again and again: python -m tests.chaos."""
