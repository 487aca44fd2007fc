"""The operator's view of a run: status, progress, warnings, and the copy on object storage."""
