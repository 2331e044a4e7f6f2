"""infersim: a discrete-event performance simulator of LLM inference serving.

`run`, `compare`, `plan` and `sweep` are the verbs of the command line as functions; importing the package loads none
of what they need.
"""

import sys
import types
from typing import Any

__version__ = "0.1.0"
__all__ = ["InputError", "compare", "plan", "run", "sweep"]


class _Package(types.ModuleType):
    """The package. Importing its module `run` would put that in the place of the function."""

    @property
    def run(self) -> Any:
        from .api import run

        return run

    @run.setter
    def run(self, module: types.ModuleType) -> None:
        pass


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


def __getattr__(name: str) -> Any:
    if name == "InputError":
        from .config.errors import InputError

        return InputError
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module 'infersim' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
