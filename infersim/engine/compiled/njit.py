"""How the engine's functions are compiled."""

import os

from numba import njit

# Nothing is allocated, so no reference is counted (_nrt). Python calls the entry of compiled.py and no function besides
# it, so none has a wrapper for Python. The few large functions with one caller are inlined, since an array argument is
# seven words on the stack.
OPTIONS = {
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "boundscheck": bool(os.environ.get("INFERSIM_BOUNDSCHECK")),  # an index out of bounds then aborts the process
}
compiled = njit(**OPTIONS)
inlined = njit(**OPTIONS, forceinline=True)
