"""Simulated time as a multiple of the wall's, and how late tokens are against it."""

from time import monotonic

import numpy as np

BIN = 1e-4  # s of lateness
NUM_BINS = 100_000  # the last one holds all that is later than 10 s
SHARE_LATE = 0.01  # of tokens that may be later than LATE before the clock is said to fall behind
LATE = 0.05  # s


HALF_TICK = 5e-4
"""s: timers of event loops fire to the millisecond, so what is due in half of one is due now"""


class Clock:
    """Simulated seconds = wall seconds x speed, from 0 on. The wall's is not the event loop's, which counts in ms."""

    def __init__(self, speed: float):
        self.speed = speed
        self._origin, self._base = monotonic(), 0.0
        self._due, self._wall = -1.0, 0.0
        self._late = np.zeros(NUM_BINS, "i8").tolist()  # a list counts in a tenth of the time of an array

    def now(self) -> float:
        """The simulated time (s)."""
        return self._base + (monotonic() - self._origin) * self.speed

    def near(self) -> float:
        """Up to which simulated time things happen now (s)."""
        return self.now() + HALF_TICK * self.speed

    def delay(self, time: float) -> float:
        """Seconds on the wall's clock until a simulated time, at least 0."""
        return max(self.wall_of(time) - monotonic(), 0.0)

    def wall_of(self, time: float) -> float:
        """When the wall's clock shows a simulated time (s)."""
        return self._origin + (time - self._base) / self.speed

    def change(self, speed: float) -> None:
        """From now on time goes at this speed."""
        self._base, self._origin = self.now(), monotonic()
        self.speed, self._due = speed, -1.0

    def sent(self, due: float) -> None:
        """Tokens that were due at a simulated time have just been given to the socket."""
        if due != self._due:  # of a whole step they are due at once
            self._due, self._wall = due, self.wall_of(due)
        late = int((monotonic() - self._wall) / BIN)
        self._late[0 if late < 0 else late if late < NUM_BINS else NUM_BINS - 1] += 1

    def lateness(self) -> dict[str, float | int | bool | None]:
        """How late chunks were on the wall's clock: p50 and p99 (ms, to 0.1), their number, and whether it keeps up."""
        counts = np.array(self._late)
        total = int(counts.sum())
        if not total:
            return {"chunks": 0, "p50_ms": None, "p99_ms": None, "keeps_up": True}
        p50, p99 = np.searchsorted(counts.cumsum(), (0.5 * total, 0.99 * total))
        late = int(counts[int(LATE / BIN) :].sum())
        return {
            "chunks": total,
            "p50_ms": round((int(p50) + 1) * BIN * 1e3, 1),
            "p99_ms": round((int(p99) + 1) * BIN * 1e3, 1),
            "keeps_up": late <= SHARE_LATE * total,
        }
