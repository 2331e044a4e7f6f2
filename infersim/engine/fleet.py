"""The replicas of one run: submit requests, advance time, read records."""

from dataclasses import dataclass

import numpy as np

from . import state
from .compiled import load
from .price import StepCost


@dataclass(frozen=True)
class ReplicaSpec:
    """What the engine needs to know of one replica.

    knobs: a state.KNOBS record (np.void); cost: its StepCost.
    """

    knobs: np.void
    cost: StepCost


def make_knobs(**values) -> np.void:
    """A state.KNOBS record; what is not given is zero, but one full-attention KV group and one step in flight."""
    knobs = np.zeros((), state.KNOBS)
    knobs["num_kv_groups"] = knobs["steps_in_flight"] = knobs["chunked_prefill"] = 1
    knobs["kv_multiplicity"][0] = 1
    for name, value in values.items():
        if name in ("kv_window", "kv_multiplicity"):  # one per KV group
            knobs[name][: len(value)] = value
            knobs["num_kv_groups"] = len(value)
        else:
            knobs[name] = value
    return knobs[()]


class Fleet:
    """Replicas that are advanced together; the only holder of running state.

    replicas: one ReplicaSpec each; ranks: schedulers per replica that step in lock step (data-parallel attention);
    keep_gaps: keep every inter-token gap, not only the histogram (needs 4 bytes per output token); shares_text: prompts
    may begin with text of one another, so that prefix caching has to know every block from the start.
    Raises ValueError if a replica's KV pool cannot hold one sequence of max_model_len.
    """

    def __init__(self, replicas: list[ReplicaSpec], ranks: int = 1, keep_gaps: bool = False, shares_text: bool = False):
        n = len(replicas)
        self.knobs = np.array([replica.knobs for replica in replicas], state.KNOBS)
        for knobs in self.knobs:
            self._check(knobs)
        max_num_seqs = int(self.knobs["max_num_seqs"].max())
        steps_in_flight = int(self.knobs["steps_in_flight"].max())
        self.call = np.zeros(1, state.CALL)
        self.call["num_replicas"], self.call["ranks"] = n, ranks
        self.call["max_num_seqs"], self.call["steps_in_flight"] = max_num_seqs, steps_in_flight
        self.replicas = np.zeros(n, state.REPLICA)
        for link in ("pending_head", "unsent_head", "pending_tail"):
            self.replicas[link] = -1
        self.replicas["last_end"] = -1.0
        self.schedulers = np.zeros(n * ranks, state.SCHEDULER)
        self.schedulers["waiting_head"] = self.schedulers["waiting_tail"] = -1
        self.schedulers["free_blocks"] = np.repeat(self.knobs["num_gpu_blocks"] - 1, ranks)
        self.shares_text = shares_text
        self._make_blocks(ranks)
        self._load_prices([replica.cost for replica in replicas])
        self.sums = np.zeros((n * ranks, state.MAX_ATTENTION_KINDS), state.SUMS)
        self.scratch = np.zeros((ranks, len(state.RESOURCES)))
        self.running = np.zeros((n * ranks, max_num_seqs), "i4")
        self.steps = np.zeros((n * ranks, steps_in_flight, max_num_seqs), "i4")
        self.counts = np.zeros((n * ranks, steps_in_flight), "i4")
        self.step_end = np.zeros((n, steps_in_flight))
        self.histogram = np.zeros(state.HISTOGRAM_BINS, "i8")
        self.events = np.zeros(2 * max_num_seqs + 64, state.EVENT)
        self.call["max_events"] = len(self.events)
        self.keep_gaps = keep_gaps
        self.gaps = np.zeros(0, "f4")
        self.gap_offset = np.zeros(0, "i8")
        self._requests = np.zeros(0, state.REQUEST)
        self.num_requests = 0

    @staticmethod
    def _check(knobs) -> None:
        tables = int((knobs["kv_multiplicity"][: knobs["num_kv_groups"]]).sum())
        blocks = tables * -(-int(knobs["max_model_len"]) // int(knobs["block_size"]))
        if blocks > knobs["num_gpu_blocks"] - 1:
            raise ValueError(
                f"a sequence of max_model_len needs {blocks} blocks; {knobs['num_gpu_blocks'] - 1} are usable"
            )
        if not knobs["chunked_prefill"] and knobs["max_num_batched_tokens"] < knobs["max_model_len"]:
            raise ValueError("without chunked prefill max_num_batched_tokens must be at least max_model_len")

    def _make_blocks(self, ranks: int) -> None:
        """Blocks, all in the free queue, and block tables, as far as prefix caching needs them."""
        caching = self.knobs[self.knobs["enable_prefix_caching"] != 0]
        num_blocks = 1 << (int(caching["num_gpu_blocks"].max(initial=1)) - 1).bit_length()
        rows = int(caching["max_num_seqs"].max(initial=1))
        num_tables = [int(k["kv_multiplicity"][: k["num_kv_groups"]].sum()) for k in self.knobs]
        stride = [-(-int(k["max_model_len"]) // int(k["block_size"])) for k in self.knobs]
        entries = np.array(num_tables) * stride * (self.knobs["enable_prefix_caching"] != 0)
        columns = 1 + int(entries.max())
        self.blocks = np.zeros((len(self.schedulers), num_blocks), state.BLOCK)
        self.tables = np.zeros((len(self.schedulers), rows, columns), "i4")
        self.tables[:, :, -1] = np.arange(1, rows + 1)
        self.segments = np.zeros(1, state.SEGMENT)
        self.call["num_blocks"], self.call["num_table_rows"], self.call["num_table_columns"] = num_blocks, rows, columns
        for i, scheduler in enumerate(self.schedulers):
            knobs = self.knobs[i // ranks]
            scheduler["num_tables"], scheduler["table_stride"] = num_tables[i // ranks], stride[i // ranks]
            scheduler["blocked_request"] = -1
            if knobs["enable_prefix_caching"]:
                windows = knobs["kv_window"][: knobs["num_kv_groups"]].any() or scheduler["num_tables"] > 1
                scheduler["identified"] = self.shares_text or windows
                ring = self.blocks[i, : knobs["num_gpu_blocks"]]
                ring["next"], ring["prev"] = np.roll(np.arange(len(ring)), -1), np.roll(np.arange(len(ring)), 1)

    def _load_prices(self, costs: list[StepCost]) -> None:
        """Lay each distinct cost's tables into one flat array."""
        n = len(costs)
        self.prices = np.zeros(n, state.PRICE)
        self.attention = np.zeros((n, state.MAX_ATTENTION_KINDS), state.ATTENTION_PRICE)
        parts, shares, offsets, end = [], [], {}, 0
        for r, cost in enumerate(costs):
            knobs = self.knobs[r]
            if len(cost.linear) <= knobs["max_num_batched_tokens"] or len(cost.head) <= knobs["max_num_seqs"]:
                raise ValueError("the cost tables end before max_num_batched_tokens or max_num_seqs")
            if id(cost) not in offsets:
                offsets[id(cost)] = (end, end + len(cost.linear))
                parts += [cost.linear, cost.head]
                shares += [np.full(len(cost.linear) + len(cost.head), cost.issue_share)]
                end += len(cost.linear) + len(cost.head)
            self.prices[r]["linear"], self.prices[r]["head"] = offsets[id(cost)]
            self.prices[r]["issue_share"] = cost.issue_share
            self.prices[r]["num_kinds"] = len(cost.attention)
            self.attention[r, : len(cost.attention)] = cost.attention
        by_resource = np.concatenate(parts)
        self.table = by_resource.sum(axis=1)
        self.busy_by_resource = by_resource * np.concatenate(shares)[:, None]
        self.steps_priced = np.zeros(len(self.table), "i8")
        self.call["table_size"] = len(self.table)

    @property
    def requests(self) -> np.ndarray:
        """The records so far: state.REQUEST[n], in order of submission."""
        return self._requests[: self.num_requests]

    @property
    def time_by_resource(self) -> np.ndarray:
        """Busy seconds of all replicas by resource: f8[8], summing to their busy_time."""
        return self.steps_priced @ self.busy_by_resource + self.replicas["time_by_resource"].sum(axis=0)

    def submit(
        self, replica: int, arrival, prompt_tokens, output_tokens, max_tokens, rank=0, names=None, segments=None
    ) -> None:
        """Requests for one replica: arrays (or scalars) of arrival times in s, nondecreasing and not in the past.

        segments: (offsets i8[n + 1], names i8[m], lengths i4[m]): what prompts begin with, as in workload Requests;
        names: i8[n] of each request's own text, which follows, prompt and output; default: names that nobody else has.
        Raises ValueError if an arrival lies before one submitted earlier to the same replica.
        """
        arrival = np.atleast_1d(np.asarray(arrival, "f8"))
        n = len(arrival)
        if n == 0:
            return
        row = self.replicas[replica]
        tail = int(row["pending_tail"])
        if np.any(arrival[1:] < arrival[:-1]) or (tail >= 0 and arrival[0] < self._requests[tail]["arrival"]):
            raise ValueError("arrivals must not go back in time")
        first, end = self.num_requests, self.num_requests + n
        if end > len(self._requests):
            grown = np.zeros(max(end, 2 * len(self._requests)), state.REQUEST)
            grown[:first] = self._requests[:first]
            self._requests = grown
        new = self._requests[first:end]
        new["arrival"] = arrival
        new["sent"] = new["scheduled"] = new["first_token"] = -1.0
        new["last_token"] = -2.0  # unlike REPLICA.last_end at any time
        new["prompt_tokens"], new["output_tokens"], new["max_tokens"] = prompt_tokens, output_tokens, max_tokens
        new["num_tokens"] = new["prompt_tokens"]
        new["max_num_tokens"] = new["prompt_tokens"] + new["max_tokens"]
        new["stop_tokens"] = np.minimum(new["output_tokens"], new["max_tokens"])
        new["replica"], new["rank"] = replica, rank
        new["next"] = np.arange(first + 1, end + 1)
        new["next"][-1] = new["prev"] = new["last_step"] = -1
        new["table"] = -1
        new["name"] = -1 - np.arange(first, end) if names is None else names
        if segments is not None:
            if not self.shares_text:
                raise ValueError("segments need a fleet that shares text")
            offsets, segment_names, lengths = segments
            new["first_segment"] = len(self.segments) + offsets[:-1]
            new["num_segments"] = np.diff(offsets)
            more = np.zeros(len(segment_names), state.SEGMENT)
            more["name"], more["length"] = segment_names, lengths
            self.segments = np.concatenate([self.segments, more])
        if tail >= 0:
            self._requests[tail]["next"] = first
        else:
            row["pending_head"] = first
        if row["unsent_head"] < 0:
            row["unsent_head"] = first
        row["pending_tail"] = end - 1
        self.num_requests = end
        if self.keep_gaps:
            counts = np.maximum(new["stop_tokens"] - 1, 0).astype("i8")
            self.gap_offset = np.concatenate([self.gap_offset, len(self.gaps) + np.cumsum(counts) - counts])
            self.gaps = np.concatenate([self.gaps, np.zeros(int(counts.sum()), "f4")])

    def next_time(self) -> float:
        """When the next of the replicas does something, as far as they know now (s): inf if never."""
        head = self.replicas["pending_head"]
        idle = (self.replicas["in_flight"] == 0) & ~(
            (self.schedulers["num_running"] + self.schedulers["num_waiting"])
            .reshape(len(self.replicas), -1)
            .any(axis=1)
        )
        waking = (
            np.where(head >= 0, self._requests["arrival"][np.maximum(head, 0)], np.inf)
            if len(self._requests)
            else np.inf
        )
        return float(np.min(np.where(idle, np.maximum(waking, self.replicas["now"]), self.replicas["now"])))

    def advance(self, until: float = np.inf, events: int = 0) -> np.ndarray:
        """Advance every replica to `until` (s), or to the first event of the mask `events`; returns the events.

        What is due exactly at `until` is left undone, so that requests submitted for that moment are seen by it.
        Raises RuntimeError if a replica with work cannot make progress.
        """
        self.call["until"], self.call["event_mask"] = until, events
        self.call["num_requests"] = self.num_requests
        self.call["num_gaps"] = len(self.gaps)
        self.call["num_segments"] = len(self.segments)
        arrays = state.Arrays(
            **{name: getattr(self, name) for name in state.Arrays._fields if name != "requests"},
            requests=self._requests,
        )
        load()(*[array.ctypes.data for array in arrays])
        stuck = int(self.call["stuck_replica"][0])
        if stuck >= 0:
            raise RuntimeError(f"replica {stuck} has requests and makes no progress at {self.replicas[stuck]['now']} s")
        return self.events[: int(self.call["num_events"][0])].copy()
