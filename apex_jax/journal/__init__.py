"""The replay on disk: segments in a log that is only appended to, and snapshots of what changes beside them."""
