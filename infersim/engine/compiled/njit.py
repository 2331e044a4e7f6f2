"""How the engine's functions are compiled."""

import os

from numba import njit

# Nothing is allocated, so no reference is counted (_nrt). Python calls the entry of compiled.py and no function besides
# it, so none has a wrapper for Python. The few large functions with one caller are inlined.
BOUNDS_CHECKED = bool(os.environ.get("INFERSIM_BOUNDSCHECK"))
"""Whether an index out of bounds ends the process (arrays.Rows), for tests: see build.key."""
OPTIONS = {
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
compiled = njit(**OPTIONS)
inlined = njit(**OPTIONS, forceinline=True)
