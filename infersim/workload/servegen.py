"""ServeGen: requests drawn from models of real clients (Xiang et al., "ServeGen", arXiv 2505.09999).

A client has one row per window of 600 s: rate, and the distribution of the gaps (gamma or Weibull); and histograms of
prompt and output lengths per 6 hours.
"""

import csv
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config.errors import InputError
from ..config.units import short
from ..config.workload import MAX_REQUESTS
from .draws import generator
from .requests import Requests
from .table import read_text

WINDOW = 600.0
FIELDS = ("input_tokens", "output_tokens")
SHAPE = "rows [t_s, rate_rps, cv, Gamma or Weibull, shape, scale] and {t_s: {input_tokens: {tokens: share}, ...}}"
NOTE = (
    "ServeGen: gaps scaled to fill each window of 600 s; as in the reference, prompt and output of a request come from"
    " the same random number, so long prompts have long outputs"
)


@dataclass(frozen=True)
class Client:
    """One client's windows {start: (rate, pattern, shape)} and its histograms {start: {field: {tokens: share}}}."""

    name: str
    where: str
    windows: dict[float, tuple[float, str, float]]
    dataset: dict[float, dict[str, Any]]
    _histograms: dict[float, list] = field(default_factory=dict)

    def gaps(self, time: float, seed: int) -> np.ndarray:
        """f8[n] seconds that add up to the window; n is the client's rate times the window, rounded up."""
        rate, pattern, shape = self.windows[time]
        random = generator(seed, "servegen", self.name, f"{time:g}", "arrivals")
        n = int(np.ceil(rate * WINDOW - 1e-6))  # a rate is a rounded count / 600
        gaps = random.standard_gamma(shape, n) if pattern == "Gamma" else random.weibull(shape, n)
        return gaps * (WINDOW / gaps.sum()) if gaps.sum() > 0 else np.full(n, WINDOW / max(n, 1))

    def lengths(self, time: float, n: int, seed: int) -> list[np.ndarray]:
        """Prompt and output tokens of n requests, each i4[n], by the inverse of the histograms' sums."""
        uniform = generator(seed, "servegen", self.name, f"{time:g}", "lengths").random(n)
        start = max((t for t in self.dataset if t <= time), default=min(self.dataset))
        if start not in self._histograms:
            self._histograms[start] = [_cumulative(self.dataset[start][name]) for name in FIELDS]
        return [tokens[np.searchsorted(shares, uniform, "right")] for tokens, shares in self._histograms[start]]


def draw_requests(clients: list[Client], num_requests: int | None, seed: int) -> Requests:
    """The requests of all clients, merged by time; the first `num_requests` of them, all if None.

    The reference drops the arrival on the end of each window; here it stays, so the counts are the clients' own.
    """
    by_time = defaultdict(list)
    for client in clients:
        for time, (rate, _, _) in client.windows.items():
            if rate > 0:
                by_time[time].append(client)
    if not by_time:
        raise InputError(f"{clients[0].where}: no client has a rate above 0")
    windows, total = [], 0
    for time in sorted(by_time):
        if total + sum(client.windows[time][0] for client in by_time[time]) * WINDOW > MAX_REQUESTS:
            raise InputError(f"{clients[0].where}: more than {MAX_REQUESTS:.0e} requests by {time + WINDOW:g} s")
        parts = []
        for client in by_time[time]:
            try:
                gaps = client.gaps(time, seed)
                prompt, output = client.lengths(time, len(gaps), seed)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise _wrong(client.where, f"client {client.name}", error) from None
            parts.append((np.minimum(time + np.cumsum(gaps), time + WINDOW), prompt, output))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        windows.append([column[order] for column in columns])
        total += len(order)
        if num_requests is not None and total >= num_requests:
            break
    arrival, prompt, output = (np.concatenate(column)[:num_requests] for column in zip(*windows, strict=True))
    return Requests(arrival - arrival[0], prompt, output, np.arange(len(arrival)), notes=(NOTE,))


def clients_of_json(text: str, where: str) -> list[Client]:
    """{"clients": {name: {"trace": [rows], "dataset": {...}}}}."""
    try:
        content = json.loads(text)
        clients = [_client(name, where, c["trace"], c["dataset"]) for name, c in content["clients"].items()]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise _wrong(where, "clients", error) from None
    if not clients:
        raise InputError(f"{where}: no clients; must have {SHAPE}")
    return clients


def clients_of_folder(folder: Path, where: str) -> list[Client]:
    """ServeGen's own layout: chunk-<i>-trace.csv without header, chunk-<i>-dataset.json with histograms as text."""
    clients = []
    for path in sorted(folder.glob("chunk-*-trace.csv")):
        name = path.name.split("-")[1]
        rows = csv.reader(read_text(path, str(path)).splitlines())
        dataset = path.with_name(f"chunk-{name}-dataset.json")
        text = read_text(dataset, str(dataset))
        try:
            clients.append(_client(name, str(path), [row for row in rows if row], json.loads(text)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, csv.Error) as error:
            raise _wrong(str(path), f"client {name}", error) from None
    if not clients:
        raise InputError(f"{where}: a folder without chunk-<i>-trace.csv; a trace is a file or a ServeGen folder")
    return clients


def _client(name: str, where: str, rows: list, dataset: dict) -> Client:
    windows = {}
    for time, rate, _, pattern, shape, _ in rows:  # idle windows have no rate and no pattern
        windows[float(time)] = (float(rate or 0), pattern, float(shape or 0))
        rate, pattern, shape = windows[float(time)]
        if rate and not (0 < rate < 1e6 and pattern in ("Gamma", "Weibull") and 1e-3 < shape < 1e6):
            raise ValueError(f"rate {rate}, pattern {pattern!r}, shape {shape} at {time} s")
    return Client(name, where, windows, {float(time): fields for time, fields in dataset.items()})


def _cumulative(given: dict[str, float] | str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, rising, and the share of requests below the next; a text is a Python dict with whole number keys."""
    histogram = json.loads(re.sub(r"(\d+):", r'"\1":', given)) if isinstance(given, str) else given
    tokens = np.array(list(histogram), float)
    shares = np.array(list(histogram.values()), float)
    order = np.argsort(tokens)
    sums = np.cumsum(shares[order])
    if not (shares.min() >= 0 and 0 < sums[-1] < np.inf and tokens.min() >= 0 and tokens.max() < 2**31):
        raise ValueError("a histogram with shares below 0 or tokens out of range")
    return np.maximum(tokens[order], 1).astype(np.int32), sums[:-1] / sums[-1]


def _wrong(where: str, what: str, error: Exception) -> InputError:
    return InputError(f"{where}: {what}: not a ServeGen client ({short(str(error))}); must have {SHAPE}")
