"""What a run leaves for a person to look at: where it came from, its curves, its video."""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it tells of its first import, when it looks for fonts
