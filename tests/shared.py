"""Where the measured data and facts lie that tests read but the project does not contain."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("INFERSIM_SHARED", Path(__file__).parents[2] / "shared"))
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"no measured data: neither INFERSIM_SHARED nor {SHARED} is a folder"
)
