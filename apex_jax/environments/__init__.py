"""Environments, their observations and scores, and the simulators that film them."""
