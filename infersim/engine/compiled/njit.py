"""How the engine's functions are compiled."""

import os

from numba import njit
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.types import unliteral
from numba.core.untyped_passes import InlineClosureLikes

BOUNDS_CHECKED = bool(os.environ.get("INFERSIM_BOUNDSCHECK"))
"""Whether an index out of bounds ends the process (arrays.Rows), for tests: see build.key."""


class Compiler(CompilerBase):
    """Numba's, without its search for closures and comprehensions: there are none."""

    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [one for one in passes.passes if one[0] is not InlineClosureLikes]
        passes.finalize()
        return [passes]


# Nothing is allocated, so no reference is counted (_nrt). Python calls the entry of build.py and no function besides
# it, so none has a wrapper for Python. What Numba would rewrite (constant indices, raise) LLVM does as well, or is not
# there.
OPTIONS = {
    "pipeline_class": Compiler,
    "error_model": "numpy",
    "nogil": True,
    "no_rewrites": True,
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


APART: list[str] = []
"""functions that are nobody's part"""


def compiled(function, forceinline=False):
    """A function of the engine, compiled once for each set of types; Numba would compile it for each constant too.

    Whether it becomes part of who calls it LLVM decides. Said here too if it shall not be forced: Numba forces what an
    `inlined` function calls, if that is the first to call it.
    """
    dispatcher = njit(**OPTIONS, forceinline=forceinline)(function)
    resolve = dispatcher.get_call_template
    dispatcher.get_call_template = lambda args, kws: resolve([unliteral(a) for a in args], kws)
    return dispatcher


def inlined(function):
    """`compiled` for a large function with one caller, or a small one in a loop."""
    return compiled(function, forceinline=True)


def apart(function):
    """`compiled` for what a loop seldom calls: the loop has more registers without it."""
    APART.append(function.__name__)
    return compiled(function)
