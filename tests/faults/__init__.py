"""The faults of docs/faults.md, injected."""
