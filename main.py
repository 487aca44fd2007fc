"""Trains, or runs one role of a fleet, from a checkout: `python main.py --help`. Installed, it is called apex-jax."""

import sys

from apex_jax.main import main

if __name__ == "__main__":
    sys.exit(main())
