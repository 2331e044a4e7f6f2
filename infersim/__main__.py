"""`python -m infersim` and the installed `infersim`."""

import atexit
import gc
import os
import signal
from types import FrameType


def main() -> None:
    """The command line."""
    signal.signal(signal.SIGINT, _interrupt)
    gc.set_threshold(200_000)  # loading makes many objects and little garbage: looking for it takes a fifth of a start
    atexit.register(gc.freeze)  # nor is there any to be looked for at the end
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # descriptions have none to be looked for
    from infersim.cli.app import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A verb ends in its own way (guard.py). While it is still being loaded there is nothing to save, and a module
    that is interrupted half-way fails in its own words: the end is at once."""
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    if any(file.endswith("guard.py") for file in files) and not any("importlib" in file for file in files):
        raise KeyboardInterrupt
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
