"""How the engine's functions are compiled."""

from numba import njit

# Nothing is allocated, so no reference is counted (_nrt); the few large functions with one caller are inlined, since an
# array argument is seven words on the stack.
compiled = njit(error_model="numpy", nogil=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(error_model="numpy", nogil=True, _nrt=False, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
