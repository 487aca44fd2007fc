"""Runs every test on the CPU, also where there is a GPU: results do not depend on the machine."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported, which is after this file
