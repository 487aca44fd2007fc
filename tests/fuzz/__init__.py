"""Hostile messages: python -m tests.fuzz."""
