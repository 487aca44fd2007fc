"""`python -m apex_jax`: the same as the command apex-jax."""

import sys

from apex_jax.main import main

sys.exit(main())
