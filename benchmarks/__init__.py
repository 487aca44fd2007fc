"""Every claim of the README about speed and size, measured: `python -m benchmarks.NAME`, see benchmarks/README.md."""
