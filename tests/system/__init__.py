"""The program as a whole: real processes, runs, documents and benchmarks."""
