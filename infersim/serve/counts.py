"""What a replica has counted since it started, for /metrics."""

from itertools import chain

import numpy as np

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
           1920.0, 7680.0)  # fmt: skip
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUMBERS = (1, 2, 5, 10, 20)
TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES = tuple(2**e for e in range(11, 35, 2))
FOLD = 512  # steps that are counted at once, at most, and of sequences in them ...
MOST = 2**15  # ... so many: half a millisecond
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)


def lengths(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `most` tokens."""
    steps = chain.from_iterable((10**e, 2 * 10**e, 5 * 10**e) for e in range(12))
    return tuple(step for step in steps if step <= most)


class Histogram:
    """Counts by upper bounds, which are inclusive as Prometheus has them."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self._bounds = np.array(bounds, "f8")
        self.counts = np.zeros(len(bounds) + 1, "i8")
        self.sum = 0.0
        self.written: dict[tuple[str, str], str] = {}
        """its lines of /metrics, by name and labels, as long as nothing is added"""

    def add(self, values: np.ndarray) -> None:
        """Several values at once."""
        if not len(values):
            return
        self.written.clear()
        self.counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self.counts))
        self.sum += float(values.sum())

    def add_one(self, value: float) -> None:
        """One value."""
        self.written.clear()
        self.counts[np.searchsorted(self._bounds, value)] += 1
        self.sum += value


class Counts:
    """Of one replica. Times are simulated."""

    def __init__(self, max_model_len: int, drafts: int):
        self.accepted = np.zeros(drafts, "i8")
        """drafts that were accepted, by their position; drafts: the most of a step"""
        sizes = lengths(max_model_len)
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = self.queried_tokens = self.chunks = 0
        self.pulled_tokens = 0
        """of prompts whose KV came from another replica"""
        self.refused = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        self._scheduled = self._held = 0
        self._steps: list[tuple[np.ndarray, np.ndarray | None, int, np.ndarray]] = []
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        self.histograms = {
            "time_to_first_token_seconds": Histogram(TTFT),
            "inter_token_latency_seconds": Histogram(GAPS),
            "request_time_per_output_token_seconds": Histogram(GAPS),
            "e2e_request_latency_seconds": Histogram(LATENCY),
            "request_queue_time_seconds": Histogram(LATENCY),
            "request_inference_time_seconds": Histogram(LATENCY),
            "request_prefill_time_seconds": Histogram(LATENCY),
            "request_decode_time_seconds": Histogram(LATENCY),
            "request_prompt_tokens": Histogram(sizes),
            "request_generation_tokens": Histogram(sizes),
            "request_max_num_generation_tokens": Histogram(sizes),
            "request_params_n": Histogram(NUMBERS),
            "request_params_max_tokens": Histogram(sizes),
            "iteration_tokens_total": Histogram(ITERATION),
            "request_num_preemptions": Histogram(PREEMPTIONS),
            "request_prefill_kv_computed_tokens": Histogram(sizes),
            "nixl_xfer_time_seconds": Histogram(TRANSFER),
            "nixl_bytes_transferred": Histogram(BYTES),
        }

    def step(self, new: np.ndarray, begun: np.ndarray | None, scheduled: int, since: np.ndarray) -> None:
        """A step has ended. new: i4[n], output tokens of each sequence; begun: bool[n], which are its first, None if
        none is; scheduled: tokens in all steps so far; since: f8[n], s since the tokens before, or since it came."""
        self._steps.append((new, begun, scheduled, since))
        self._held += len(new)
        if len(self._steps) >= FOLD or self._held >= MOST:
            self.fold()

    def fold(self) -> None:
        """Count the steps since the last time: many at once take little longer than one."""
        if not self._steps:
            return
        news, beguns, scheduled, sinces = zip(*self._steps, strict=True)
        self._steps.clear()
        self._held = 0
        new, since = np.concatenate(news), np.concatenate(sinces)
        begun = np.concatenate([np.zeros(len(n), "?") if b is None else b for n, b in zip(news, beguns, strict=True)])
        self.generation_tokens += int(new.sum())
        if len(self.accepted):
            number = np.bincount(np.minimum(new[~begun] - 1, len(self.accepted)), minlength=len(self.accepted) + 1)
            self.accepted += number[::-1].cumsum()[::-1][1:]
        self.chunks += len(new)
        self.histograms["inter_token_latency_seconds"].add(since[~begun])
        self.histograms["time_to_first_token_seconds"].add(since[begun])
        self.histograms["iteration_tokens_total"].add(np.diff((self._scheduled, *scheduled)))
        self._scheduled = scheduled[-1]

    def moved(self, seconds: float, size: float, tokens: int) -> None:
        """The KV of a prompt has come from another replica."""
        self.histograms["nixl_xfer_time_seconds"].add_one(seconds)
        self.histograms["nixl_bytes_transferred"].add_one(size)
        self.pulled_tokens += tokens

    def end(self, request: np.void, finish: str, sent: float, pulled: bool = False) -> None:
        """A request has ended: a state.REQUEST that came at `sent` s; pulled: with its KV from elsewhere."""
        self.finished[finish] += 1
        outputs, prompt = int(request["num_output_tokens"]), int(request["prompt_tokens"])
        scheduled = float(request["scheduled"])
        first, last = float(request["first_token"]), float(request["last_token"])
        if scheduled >= 0:
            self.prompt_tokens += prompt
            self.queried_tokens += prompt
            self.cached_tokens += 0 if pulled else int(request["num_cached_tokens"])
        if finish not in ("stop", "length"):
            return
        h = self.histograms
        h["e2e_request_latency_seconds"].add_one(last - sent)
        h["request_queue_time_seconds"].add_one(scheduled - sent)
        h["request_inference_time_seconds"].add_one(last - scheduled)
        h["request_prefill_time_seconds"].add_one(first - scheduled)
        h["request_decode_time_seconds"].add_one(last - first)
        if outputs > 1:
            h["request_time_per_output_token_seconds"].add_one((last - first) / (outputs - 1))
        h["request_prompt_tokens"].add_one(prompt)
        h["request_generation_tokens"].add_one(outputs)
        h["request_max_num_generation_tokens"].add_one(outputs)
        h["request_params_n"].add_one(1)
        h["request_params_max_tokens"].add_one(int(request["max_tokens"]))
        h["request_num_preemptions"].add_one(int(request["num_preemptions"]))
        h["request_prefill_kv_computed_tokens"].add_one(prompt - int(request["num_cached_tokens"]))
