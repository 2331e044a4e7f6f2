"""The replicas of one run: submit requests, advance time, read records."""

from collections.abc import Callable

import numpy as np

from .compiled import interface, state
from .compiled.build import load
from .compiled.draws import make_keys, uniforms
from .memory import empty, grown, size_memory, untouched
from .price import Acceptance
from .replica import ReplicaSpec
from .tables import lay_drafts, lay_prices


class NoProgress(RuntimeError):
    """A replica has requests, and nothing will ever let them run."""


FRESH = np.zeros((), state.REQUEST)
"""a request that no replica has yet"""
for _name in ("arrival", "sent", "scheduled", "first_token", "replica", "next", "prev", "last_step", "table",
              "first_block"):  # fmt: skip
    FRESH[_name] = -1
FRESH["last_token"] = -2.0  # unlike REPLICA.last_end at any time


class Fleet:
    """Replicas that are advanced together; the only holder of running state.

    replicas: one ReplicaSpec each; ranks: schedulers per replica that step in lock step (data-parallel attention), the
    most of any replica; of those with fewer (knobs.ranks) the rest stay empty;
    keep_gaps: keep every inter-token gap, not only the histogram (needs 4 bytes per output token); shares_text: prompts
    may begin with text of one another, so that prefix caching has to know every block from the start; acceptance: of
    drafts, where replicas have them; seed: of the draws; grow: makes room for records, as `grown` does. What replicas
    cannot be is in deployment/compatibility.py.
    """

    def __init__(
        self,
        replicas: list[ReplicaSpec],
        ranks: int = 1,
        keep_gaps: bool = False,
        shares_text: bool = False,
        acceptance: Acceptance | None = None,
        seed: int = 0,
        grow: Callable[[np.ndarray, int, int], np.ndarray] = grown,
    ):
        n, self._grow = len(replicas), grow
        self.knobs = np.array([replica.knobs for replica in replicas], state.KNOBS)
        max_num_seqs = int(self.knobs["max_num_seqs"].max())
        steps_in_flight = int(self.knobs["steps_in_flight"].max())
        self.call = np.zeros(1, interface.CALL)
        self.call["num_replicas"], self.call["ranks"] = n, ranks
        self.call["num_schedulers"] = n * ranks
        self.call["num_leaves"] = 1 << (n - 1).bit_length()
        self.call["num_nodes_due"] = 2 * self.call["num_leaves"]
        self.call["max_num_seqs"], self.call["steps_in_flight"] = max_num_seqs, steps_in_flight
        self.call["num_plans"] = max_num_seqs + 1
        self.replicas = np.zeros(n, state.REPLICA)
        for link in ("pending_head", "unsent_head", "pending_tail"):
            self.replicas[link] = -1
        self.replicas["last_end"] = -1.0
        self.schedulers = np.zeros(n * ranks, state.SCHEDULER)
        self.schedulers["free_cpu_blocks"] = np.repeat(self.knobs["num_cpu_blocks"], ranks)
        self.schedulers["waiting_head"] = self.schedulers["waiting_tail"] = -1
        self.knobs["ranks"][self.knobs["ranks"] == 0] = ranks
        there = np.arange(ranks) < self.knobs["ranks"][:, None]
        self.schedulers["free_blocks"] = ((self.knobs["num_gpu_blocks"] - 1)[:, None] * there).reshape(-1)
        self.shares_text, self.seed = shares_text, seed
        self.num_sequences = int(self.knobs["num_sequences"][0])
        if (self.knobs["num_sequences"] != self.num_sequences).any():
            raise ValueError("all replicas must have the same num_sequences")
        self.sequences = np.zeros((1, self.num_sequences), state.SEQUENCE)
        size_memory(self.knobs, self.schedulers, self.call, shares_text)
        self.blocks, self.nodes, self.tables = (
            untouched(self._shape(name), np.dtype(interface.ARRAYS[name][0])) for name in ("blocks", "nodes", "tables")
        )
        self.hashes = self._zeros("hashes")
        self.segments = np.zeros(1, state.SEGMENT)
        self.num_segments = 0
        self.prices, self.attention, self.table, self.busy_by_resource = lay_prices(replicas)
        self.steps_priced = np.zeros(len(self.table))
        self.plan, self.draft_attention = lay_drafts(replicas, max_num_seqs)
        self.acceptance = acceptance
        self.accepted = np.zeros(1) if acceptance is None else acceptance.accepted.reshape(-1).astype("f8")
        self.call["depth"] = 0 if acceptance is None else acceptance.accepted.shape[2]
        self.call["table_size"], self.call["num_accepted"] = len(self.table), len(self.accepted)
        self.call["max_events"] = 2 * max_num_seqs + 64
        self.sums, self.scratch, self.due, self.growth = map(self._zeros, ("sums", "scratch", "due", "growth"))
        self.fingers = self._zeros("fingers")
        self.running, self.steps, self.tokens = (self._zeros(name) for name in ("running", "steps", "tokens"))
        self.counts, self.step_end = (self._zeros(name) for name in ("counts", "step_end"))
        self.histogram, self.events = self._zeros("histogram"), self._zeros("events")
        self.held_up = np.zeros((n, 2))  # s: from when to when each waited last, see hold_up
        self._turn = np.zeros(n, "i8")  # requests that each replica has been given
        self.keep_gaps = keep_gaps
        self.gaps = self._gaps = np.zeros(0, "f4")
        self.gap_offset = self._gap_offset = np.zeros(0, "i8")
        self.num_requests = 0
        self.aborted_time = 0.0  # request-seconds of requests that were sent and aborted
        self._requests = np.zeros(0, state.REQUEST)
        self._moved()

    def _shape(self, name: str) -> tuple[int, ...]:
        """What interface.ARRAYS declares, of this fleet."""
        call = self.call[0]
        return tuple(size if isinstance(size, int) else int(call[size]) for size in interface.ARRAYS[name][1])

    def _zeros(self, name: str) -> np.ndarray:
        return np.zeros(self._shape(name), interface.ARRAYS[name][0])

    @property
    def requests(self) -> np.ndarray:
        """The records so far: state.REQUEST[n], in order of submission."""
        return self._requests[: self.num_requests]

    @property
    def time_by_resource(self) -> np.ndarray:
        """Busy seconds of all replicas by resource: f8[9], summing to their busy_time."""
        return self.steps_priced @ self.busy_by_resource + self.replicas["time_by_resource"].sum(axis=0)

    def time_of(self, replicas: slice | np.ndarray) -> np.ndarray:
        """The same of some of the replicas, and in the tables' part of all that share their costs."""
        starts = np.array(sorted({*self.prices["linear"].tolist(), len(self.table)}))
        first = sorted(set(self.prices["linear"][replicas].tolist()))
        parts = [slice(a, starts[np.searchsorted(starts, a) + 1]) for a in first]
        rows = parts[0] if len(parts) == 1 else np.r_[tuple(parts)]
        own = self.replicas["time_by_resource"][replicas].sum(axis=0)
        return self.steps_priced[rows] @ self.busy_by_resource[rows] + own

    def submit(self, replica, arrival, prompt_tokens, output_tokens, max_tokens, rank=None, **beside) -> None:
        """Requests for one replica, or i8[n] replicas: arrival times in s, nondecreasing and not in the past.

        rank: the data-parallel rank that serves them; None: a replica's ranks take turns. beside: as `add` takes.

        Raises ValueError if an arrival lies before one submitted earlier to the same replica.
        """
        arrival = np.atleast_1d(np.asarray(arrival, "f8"))
        if len(arrival) == 0:
            return
        if np.any(arrival[1:] < arrival[:-1]):
            raise ValueError("arrivals must not go back in time")
        parts: dict[int, slice | np.ndarray]
        if not isinstance(replica, np.ndarray):  # a view of everything: no sorting
            parts = {int(replica): slice(None)}
        else:
            order = np.argsort(replica, kind="stable")
            each, starts = np.unique(replica[order], return_index=True)
            parts = dict(zip(each.tolist(), np.split(order, starts[1:]), strict=True))
        for r, part in parts.items():
            tail = int(self.replicas["pending_tail"][r])
            if tail >= 0 and arrival[part][0] < self._requests["arrival"][tail]:
                raise ValueError("arrivals must not go back in time")
        n = len(arrival)
        first = self.add(prompt_tokens, output_tokens, max_tokens, n, **beside)
        new = self._requests[first : self.num_requests]
        new["arrival"], new["replica"] = arrival, replica
        if rank is not None:
            new["rank"] = rank
        rows = np.arange(first, self.num_requests, dtype="i4")
        for r, part in parts.items():
            chain = rows[part]
            mine: slice | np.ndarray = chain
            before: slice | np.ndarray = chain[:-1]
            if isinstance(part, slice):  # of millions, no copies
                mine, before = slice(first, self.num_requests), slice(first, self.num_requests - 1)
            if rank is None:
                self._requests["rank"][mine] = self._turns(r, len(chain))
            self._requests["next"][before] = chain[1:]
            self._link(r, int(chain[0]), int(chain[-1]))

    def add(
        self, prompt_tokens, output_tokens, max_tokens, n: int, names=None, segments=None, priority=0, stop_tokens=None
    ) -> int:
        """n requests that no replica has yet: arrays or scalars. Returns the row of the first; see `send`.

        segments: (begins i8[n], counts i8[n], names i8[m], lengths i4[m]): what prompts begin with (Requests.segments);
        names: i8[n] of each request's own text, which follows, prompt and output; default: names that nobody else has;
        stop_tokens: i4[n, k] where each is a group of k sequences: what each of these generates, at most the request's
        own; default: as much.
        """
        first, end = self.num_requests, self.num_requests + n
        before = self._requests, self.segments, self.sequences, self._gaps, self._gap_offset
        self._requests = self._grow(self._requests, first, end)
        new = self._requests[first:end]
        new[:] = FRESH
        new["prompt_tokens"], new["output_tokens"], new["max_tokens"] = prompt_tokens, output_tokens, max_tokens
        new["num_tokens"], new["priority"] = new["prompt_tokens"], priority
        new["max_num_tokens"] = new["prompt_tokens"] + new["max_tokens"]
        new["stop_tokens"] = np.minimum(new["output_tokens"], new["max_tokens"])
        new["name"] = -1 - np.arange(first, end) if names is None else names
        new["num_sequences"] = self.num_sequences
        if self.num_sequences > 1:
            self._add_sequences(new, first, stop_tokens)
        if self.acceptance is not None:
            new["key"] = make_keys(self.seed, "acceptance", new["name"])
            drawn = uniforms(make_keys(self.seed, "kind", new["name"]), 0)
            new["acceptance"] = self.acceptance.rows(-1 - new["name"], drawn)
        elif self.knobs["jump_tokens"].any():
            new["key"] = make_keys(self.seed, "jumps", new["name"])
        if segments is not None:
            if not self.shares_text:
                raise ValueError("segments need a fleet that shares text")
            begins, counts, segment_names, lengths = segments
            new["first_segment"] = self.num_segments + begins
            new["num_segments"] = counts
            start, self.num_segments = self.num_segments, self.num_segments + len(segment_names)
            self.segments = self._grow(self.segments, start, self.num_segments)
            more = self.segments[start : self.num_segments]
            more["name"], more["length"] = segment_names, lengths
        self.num_requests = end
        if self.keep_gaps:
            counts = np.maximum(new["stop_tokens"] - 1, 0).astype("i8")
            old, kept = len(self.gaps), len(self.gaps) + int(counts.sum())
            self._gap_offset = self._grow(self._gap_offset, first, end)
            self._gap_offset[first:end] = old + np.cumsum(counts) - counts
            self._gaps = self._grow(self._gaps, old, kept)
            self.gaps, self.gap_offset = self._gaps[:kept], self._gap_offset[:end]
        after = self._requests, self.segments, self.sequences, self._gaps, self._gap_offset
        if any(one is not other for one, other in zip(before, after, strict=True)):
            self._moved()
        call = self.call
        call["num_requests"], call["num_gaps"], call["num_gap_offsets"] = end, len(self.gaps), len(self.gap_offset)
        return first

    def _add_sequences(self, new: np.ndarray, first: int, stop_tokens: np.ndarray | None) -> None:
        """The sequences of the rows `new` from number `first` on."""
        self.sequences = self._grow(self.sequences, first, len(self._requests))
        own = self.sequences[first : first + len(new)]
        own["stop_tokens"] = new["stop_tokens"][:, None] if stop_tokens is None else stop_tokens
        own["last_token"] = -1.0
        new["key"] = make_keys(self.seed, "beams", new["name"])

    def sequences_of(self, rows: np.ndarray | int) -> np.ndarray:
        """state.SEQUENCE[m, k]: the sequences of the requests i8[m]."""
        return self.sequences[: self.num_requests][rows]

    def add_like(self, row: int) -> int:
        """Another request like one that was added, to be sent on its own; returns its row."""
        like = self._requests[row]
        new = self.add(like["prompt_tokens"], like["output_tokens"], like["max_tokens"], 1)
        for name in ("hold", "name", "first_segment", "num_segments", "priority"):
            self._requests[name][new] = self._requests[name][row]
        if self.num_sequences > 1:
            self._requests["key"][new] = self._requests["key"][row]
            self.sequences["stop_tokens"][new] = self.sequences_of(row)["stop_tokens"]
        return new

    def send(self, row: int, replica: int, arrival: float) -> None:
        """Send one added request to a replica; `arrival` (s) is not in the past, and not before one sent earlier."""
        self._arrival[row] = arrival
        self._replica[row] = replica
        has_blocks = self._requests["num_blocks"][row] > 0  # then it has its rank too
        if len(self.schedulers) > len(self.replicas) and not has_blocks:
            self._requests["rank"][row] = self._turns(replica, 1)[0]
        self._link(replica, row, row)

    def _turns(self, replica: int, n: int) -> np.ndarray:
        """i8[n]: the ranks of a replica's next n requests."""
        turns = (self._turn[replica] + np.arange(n)) % int(self.knobs["ranks"][replica])
        self._turn[replica] += n
        return turns

    def _link(self, replica: int, first: int, last: int) -> None:
        """Append a chain of requests to what the replica has still to see."""
        tail = self._pending_tail[replica]
        if tail >= 0:
            self._next[tail] = first
        else:
            self._pending_head[replica] = first
        if self._unsent_head[replica] < 0:
            self._unsent_head[replica] = first
        self._pending_tail[replica] = last

    def abort(self, row: int, time: float) -> bool:
        """End a request at `time`, to which the fleet has been advanced; False if it had ended before."""
        if self._command(interface.ABORT, row, time):
            if self._requests["sent"][row] >= 0:
                self.aborted_time += time - float(self._requests["sent"][row])
            return True
        return False

    def reserve(self, row: int, replica: int, time: float) -> int:
        """Take the KV blocks of an added request's prompt, whose KV comes from elsewhere; how many have to come: those
        that the replica's prefix cache has not; -1 without room."""
        self._replica[row] = replica
        self._requests["rank"][row] = self._turns(replica, 1)[0]
        return self._command(interface.RESERVE, row, time) - 1

    def release(self, row: int, time: float) -> None:
        """Free the blocks that a completed request kept because its `hold` was set."""
        self._command(interface.RELEASE, row, time)

    def match(self, row: int, below: float = 0.0) -> np.ndarray:
        """Of [R] replicas: tokens of an added request's prompt that each one's prefix cache has now; those that only
        its tiers have count `below` each."""
        self._command(interface.MATCH, row, 0.0)
        found = self.replicas["num_matched"]
        return found + below * np.maximum(self.replicas["num_matched_below"] - found, 0) if below else found

    def fail(self, replica: int, time: float) -> list[int]:
        """The replica dies and forgets everything: requests are aborted, held blocks released, steps in flight vanish,
        and so does what the API server has yet to do or to send. Returns the rows of those requests."""
        r = self.requests
        mine = r["replica"] == replica
        held = np.flatnonzero(mine & (r["status"] == state.COMPLETED) & (r["num_blocks"] > 0)).tolist()
        for row in held:
            self.release(row, time)
        alive = np.flatnonzero(mine & (r["status"] < state.COMPLETED)).tolist()
        unsent = np.flatnonzero(mine & (r["status"] == state.COMPLETED) & (r["last_token"] > time)).tolist()
        ended = held + unsent + [row for row in alive if self.abort(row, time)]
        self.clear(replica)
        mine = self.replicas[replica : replica + 1]
        free, (begin, end) = float(mine["device_free"][0]), self.held_up[replica]
        cut = free - time
        if end > time:  # but for what it waits for
            cut = max(free - end, 0.0) + max(begin - time, 0.0)
        if cut > 0:  # steps that were to go on no longer do
            split = self.time_of(self.prices["linear"] == self.prices["linear"][replica])  # those of its kind
            mine["busy_time"] -= cut
            mine["time_by_resource"] -= cut * split / split.sum()
        mine["in_flight"] = mine["num_empty"] = mine["blocked"] = 0
        mine["front_end"] = np.minimum(mine["front_end"], time)
        mine["now"] = mine["device_free"] = mine["latest_end"] = time  # what its scheduler was about to do too
        return ended

    def hold_up(self, replica: int, time: float, seconds: float) -> None:
        """The replica's device starts no further step until it has waited so long from `time` on, or from when it is
        free."""
        begin = max(float(self.replicas["device_free"][replica]), time)
        before, end = self.held_up[replica]
        self.held_up[replica] = (before if end == begin else begin, begin + seconds)
        self.replicas["device_free"][replica] = begin + seconds

    def clear(self, replica: int) -> None:
        """The replica's KV memory, of which nobody holds any, is empty: prefix cache, tiers, trees of groups."""
        ranks = int(self.call["ranks"][0])
        own = slice(replica * ranks, (replica + 1) * ranks)
        empty(self.knobs[replica], self.schedulers[own], self.blocks[own], self.nodes[own])

    def slow_down(self, replica: int, factor: float) -> None:
        """From now on the replica's steps take `factor` times the seconds of its ReplicaSpec: everything that the
        device does in a step, drafts and copies included, but not the scheduler's time on the host between steps."""
        self.prices["slow"][replica] = factor

    def _command(self, command: int, row: int, time: float) -> int:
        call = self.call[0]
        call["command"], call["subject"], call["until"], call["event_mask"] = command, row, time, 0
        self._entry(self._call_address)
        call["command"] = interface.ADVANCE
        return int(call["done"])

    def _moved(self) -> None:
        """Note where the arrays are: looking it up costs more than a step."""
        self._entry = load()
        self._arrival, self._replica, self._next = (self._requests[name] for name in ("arrival", "replica", "next"))
        self._pending_head, self._unsent_head, self._pending_tail = (
            self.replicas[name] for name in ("pending_head", "unsent_head", "pending_tail")
        )
        self.call["num_requests"], self.call["num_gaps"] = self.num_requests, len(self.gaps)
        self.call["num_segments"], self.call["num_groups"] = len(self.segments), len(self.sequences)
        self.call["num_gap_offsets"], self.call["num_sequences"] = len(self.gap_offset), self.num_sequences
        for i, (name, (element, _)) in enumerate(interface.ARRAYS.items()):
            array, shape = getattr(self, name), self._shape(name)
            if array.dtype != element or array.shape != shape or not array.flags.c_contiguous:
                raise AssertionError(f"{name} is {array.dtype}{array.shape}, not {element}{shape}")
            self.call["addresses"][0, i] = array.ctypes.data
        self._call_address = self.call.ctypes.data

    def next_time(self) -> float:
        """When the next of the replicas does something, as far as they know now (s): inf if never."""
        self._command(interface.LOOK_AHEAD, 0, 0.0)
        return float(self.due[1])

    def advance(self, until: float = np.inf, events: int = 0) -> np.ndarray:
        """Advance every replica to `until` (s), or to the first event of the mask `events`; returns the events.

        What is due exactly at `until` is left undone, so that requests submitted for that moment are seen by it.
        Raises NoProgress if a replica with work cannot make progress.
        """
        call = self.call[0]
        call["until"], call["event_mask"] = until, events
        self._entry(self._call_address)
        stuck = int(call["stuck_replica"])
        if stuck >= 0:
            raise NoProgress(f"replica {stuck} has requests and makes no progress at {self.replicas[stuck]['now']} s")
        found = self.events[: call["num_events"]]
        return found.copy() if len(found) else found
