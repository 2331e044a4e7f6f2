"""Job completion time: of conversations and agents whose requests follow one another, tools and thinking included."""

from typing import Any

import numpy as np

from .result import Result


def job_times(result: Result) -> dict[str, Any] | None:
    """Seconds from a session's first request to its last token, of those of which every request completed; None where
    no session has several."""
    if result.session is None or not len(result.session):
        return None
    names, which, counts = np.unique(result.session, return_inverse=True, return_counts=True)
    if counts.max() == 1:
        return None
    begin, end = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(begin, which, result.requests["sent"])
    np.maximum.at(end, which, result.requests["last_token"])
    whole = np.bincount(which, result.completed) == counts
    seconds = (end - begin)[whole]
    found: dict[str, Any] = {"sessions": len(names), "completed": len(seconds)}
    found |= dict.fromkeys(("mean_s", "median_s", "p99_s"))
    if len(seconds):
        median, p99 = np.percentile(seconds, (50, 99)).tolist()
        found |= {"mean_s": float(seconds.mean()), "median_s": median, "p99_s": p99}
    return found
