"""Prioritized replay in NumPy and numba: the sum-tree, the ring of segments above it, the rate limiter beside it."""
