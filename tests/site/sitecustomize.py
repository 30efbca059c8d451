"""On PYTHONPATH of every rank that a test starts: whole lines as they are printed, also from a rank that is killed.

PYTHONUNBUFFERED would not do: it writes a line and its end apart, and lines of several ranks mix.
"""

import sys

sys.stdout.reconfigure(line_buffering=True, write_through=False)
