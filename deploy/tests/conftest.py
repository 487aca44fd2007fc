"""The settings of tests/conftest.py for all tests: JAX on the CPU, and a cache of their own."""

import tests.conftest  # noqa: F401 - for what its import sets
