"""Puts this folder on the path, so that tests can import their helpers; random examples are the same in every run."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
