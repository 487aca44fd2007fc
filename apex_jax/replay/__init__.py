"""Prioritized replay in pure NumPy: the sum-tree, the ring of segments above it, and the rate limiter beside it."""
