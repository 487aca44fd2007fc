"""The results of a run: its curves, its table and its video."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # otherwise it logs its search for fonts at the first import
