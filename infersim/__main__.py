"""`python -m infersim` and the installed `infersim`."""

import os
import signal
from types import FrameType


def main() -> None:
    """The command line."""
    signal.signal(signal.SIGINT, _interrupt)
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
