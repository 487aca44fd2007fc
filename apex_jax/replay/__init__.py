"""Prioritized replay: a sum-tree over a ring of segments, the rate limiter beside it, the journal below it."""
