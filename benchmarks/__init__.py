"""Measures the README's claims about speed and size: `python -m benchmarks.NAME`, see benchmarks/README.md."""
