"""A whole fleet in one process under a virtual clock, with faults: python -m tests.simulation."""
