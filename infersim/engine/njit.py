"""How the engine's functions are compiled."""

from numba import njit

# Nothing is allocated, so no reference is counted (_nrt); the few large functions with one caller are inlined, since an
# array argument is seven words on the stack.
compiled = njit(error_model="numpy", nogil=True, _nrt=False)
inlined = njit(error_model="numpy", nogil=True, _nrt=False, inline="always")
