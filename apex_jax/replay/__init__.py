"""Prioritized replay: a sum-tree over a ring of segments, a rate limiter, a ledger and a journal.

No socket and no clock.

    sum_tree            draws in proportion to a value
    replay              the modules below as one object
    buffer              ring of encoded segments, prioritized draws, priority updates
    importance_weights  of the draws
    rate_limiter        keeps the ratio of transitions drawn to transitions stored
    ledger              counters of transitions and steps, and the positions of actors
    journal             records every event, and restores the replay from these records
    header              the journal's format, configuration and run, in one file
    experience_log      the journal's log of events, in append-only files
    snapshots           the journal's snapshots of priorities and counters
"""
