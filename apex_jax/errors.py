"""The two errors a user sees: one line each, never a traceback."""


class UsageError(ValueError):
    """What the user asked for cannot be done: the value, the range and the fix. Exit code 2."""


class RunError(RuntimeError):
    """What ended the run: what happened, where, and what to do. Exit code 1."""
