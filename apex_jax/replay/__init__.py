"""Prioritized replay: a sum-tree over a ring of segments, a rate limiter, a ledger and a journal."""
