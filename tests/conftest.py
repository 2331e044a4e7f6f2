"""Puts this folder on the path, so that tests can import their helpers; random examples are the same in every run.

`make explore` does that: other examples in every run.
"""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False, database=None, print_blob=True, deadline=None)
settings.load_profile("fixed")
