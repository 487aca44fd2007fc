"""What a run keeps: its identity, checkpoints, metrics, the record of its starts, a copy on object storage."""
