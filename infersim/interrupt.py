"""When Ctrl-C may not interrupt."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C has no effect inside, nor ever on processes that are started inside: what was computed is put together or
    written, which takes a moment; workers are ended by who started them."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
