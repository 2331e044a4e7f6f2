"""A progress bar: one line on a terminal's stderr that overwrites itself, and nothing elsewhere."""

import sys
import time

WIDTH = 30


class Bar:
    """Call it with (done, total, found): `found` of the done were there at the start and took no time."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def __call__(self, done: int, total: int, found: int = 0) -> None:
        if not sys.stderr.isatty():
            return
        if done == total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            return
        elapsed, computed = time.perf_counter() - self.started, done - found
        left = f"{_clock(elapsed / computed * (total - done))} left" if computed else "starting"
        filled = WIDTH * done // total
        bar = "#" * filled + "." * (WIDTH - filled)
        print(f"\r\x1b[K[{bar}] {done:,} of {total:,}, {left}", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
