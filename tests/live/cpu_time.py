"""A benchmark's result without what other processes did meanwhile."""

import numpy as np


def in_cpu_time(document: dict, clock: np.ndarray, cpu: np.ndarray) -> dict:
    """A closed loop's result by the server's CPU time instead of the clock: between two of its requests nothing but the
    server runs, and what else took the core made it later by as much. clock and cpu f8[n], s: what was seen of both."""
    firsts, ends, gaps = [], [], []
    for sent, ttft, itls in zip(document["start_times"], document["ttfts"], document["itls"], strict=True):
        times = np.interp(sent + np.cumsum([0.0, ttft, *itls]), clock, cpu)
        firsts.append(float(times[1] - times[0]))
        gaps.append(np.diff(times[1:]).tolist())
        ends.append(float(times[-1]))
    sent = np.interp(document["start_times"], clock, cpu)
    duration = max(ends) - float(sent.min())
    rates = {
        name: document[name] * document["duration"] / duration for name in document if name.endswith("_throughput")
    }
    rest = {name: value for name, value in document.items() if not name.endswith("_ms")}
    return rest | rates | {"duration": duration, "ttfts": firsts, "itls": gaps, "start_times": sent.tolist()}
