"""The results of a run: its curves, its table and its video.

curves        metrics of runs -> curves; groups of runs that differ only in the seed; packed runs; interquartile means
plot          curves -> pictures and a table
video         frames -> .mp4 and .gif
"""

import logging

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # otherwise it logs its search for fonts at the first import
