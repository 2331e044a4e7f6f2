"""infersim: a discrete-event performance simulator of LLM inference serving."""

__version__ = "0.1.0"
