"""The serving engine written slowly and plainly, as the specification the compiled engine is checked against.

One replica, one scheduler, one pool of KV blocks. The rules are those of vLLM V1's scheduler
(vllm/v1/core/sched/scheduler.py of 0.11, with knobs for what 0.33 changed) and of its engine core's loop: lists
`running` and `waiting`, a token budget, blocks, recompute preemption from the tail, prefix caching by block hashes.
Times are seconds.

`simulate(requests, knobs, price)` runs requests (dicts of arrival, prompt_tokens, output_tokens, max_tokens and, if
they share text, name and segments; sorted by arrival) to the end. What must hold in every run (blocks, tokens,
requests) is asserted on the way.

Speculation: a decoding sequence brings drafts to its next step; `accept` says how many of them would be accepted.

Groups (num_sequences above 1): when its prompt is computed a request becomes as many sequences with a table of blocks
each, which hold the blocks that they share once more each; `parent` says from which sequence each one goes on. Rules of
vLLM 0.6.2 (core/scheduler.py, core/block_manager_v1.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf, isclose
from typing import NamedTuple

from oracle_memory import STORE, Block, Pool, RadixPool, Tiers, TreeNode
from oracle_price import Price, Sums

COMPLETED, REJECTED = "completed", "rejected"
PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN = "prompt_too_long", "over_max_model_len"
GROUP_TOO_LARGE, SWAP_SPACE_FULL = "group_too_large", "swap_space_full"


@dataclass(frozen=True)
class Knobs:
    """The scheduler's settings; a run's `knobs` dict overrides these defaults by name."""

    block_size: int = 16
    num_gpu_blocks: int = 1001  # block 0 is vLLM's null block, never given out
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    chunked_prefill: bool = True
    skip_unfit_prefill: bool = False  # chunked prefill off, n over the budget: try the next (0.11) or stop (0.33)
    long_prefill_token_threshold: int = 0  # 0: no limit
    long_prefill_needs_contention: bool = False  # 0.33: no limit for a request that is alone
    reserve_full_isl: bool = False  # 0.33: admit only what fits as a whole (scheduler_reserve_full_isl)
    watermark_blocks: int = 0
    steps_in_flight: int = 1  # 1: synchronous; 2: async scheduling; or the number of pipeline stages
    async_scheduling: bool = False  # schedule a token's successor before the token is known
    batch_queue: str = "steps"  # of a pipeline: vLLM's also takes empty steps, until one has ended or until it is full
    gate_caps_windows: bool = True  # reserve_full_isl counts of a window what is held at once (0.24)
    windows_by_processed: bool = False  # 0.28: a block leaves a window when no step in flight sees it
    sparse_windows: bool = False  # 0.32: of a window only blocks are cached from which a prompt can go on
    evict_unhashed_first: bool = False  # 0.24: freed blocks without a hash are given out next
    admission_lookahead: bool = False  # 0.24: blocks for drafts at admission
    resumes_in_flight: bool = False  # until 0.24: preempted, with a step of a pipeline that has not come back
    pads_drafts: str = "beside-or-cached"  # or beside-running (0.28)
    padded_drafts: int = 0  # 0.28: drafts that fill up a request that is admitted and lacks one token
    drafts_within_max_tokens: bool = False  # 0.11
    draft_slots: int = 0  # 0.28: tokens of the budget that a draft model takes for each sequence
    skips_behind_victim: bool = False  # until 0.24: see go_on
    keeps_skipped_first: bool = False  # 0.28: who was passed over in flight stays before who is preempted later
    drop_last_hit: bool = False  # EAGLE: the last block found is computed again
    drafter_drop: str = "one-or-last"  # or one (0.24), or one of each kind of window besides (before)
    order: str = "running-first"  # what a step is made of, and what first
    reserve: str = "first-chunk"  # what a request gets at admission
    policy: str = "fcfs"  # or priority, shortest-first, lpm (needs radix)
    allocator: str = "paged"  # or one piece of the address space: contiguous, buddy
    admit_when_idle: bool = False  # static batching
    retracts: bool = False  # SGLang's victims
    late_hits: str = "hit"  # text that is being computed in this step: found, missed, or waited for
    clip_max_new_tokens: int = 0  # SGLang's admission by expected tokens, 0: off
    new_token_ratio: float = 0.0
    min_new_token_ratio: float = 0.0
    new_token_ratio_decay: float = 0.0
    num_cpu_blocks: int = 0  # preempted requests go there as long as there is room, and come back before new ones
    swap_block_time: float = 0.0
    num_sequences: int = 1  # of each request
    beam_turnover: float = 0.0  # chance that one goes on from another
    copy_block_time: float = 0.0
    tier_blocks: tuple[int, int] = (0, 0)  # of the CPU and the disk, for text that leaves the GPU; no disk without CPU
    tier_latency: tuple[float, float] = (0.0, 0.0)
    tier_block_time: tuple[float, float] = (0.0, 0.0)  # a block on the disk passes through the CPU's memory
    write_through: str = "write_back"  # text goes to the tiers when it leaves the GPU, or when it is computed
    kv_offloading_load: str = "blocking"  # a load is part of the step; beside it by layers; or only its request waits
    num_layers: int = 1
    store_latency: float = 0.0  # of a store that other replicas fill
    store_block_time: float = 0.0
    prefill_schedule_interval: int = 1  # prompts are taken in every so many steps, while others decode
    enable_prefix_caching: bool = False  # by blocks
    state_cuts: str = (
        "never"  # prompts end steps at blocks, where a state (kv_window 1) is kept: last-block, last-token
    )
    radix: bool = False  # or in SGLang's tree
    kv_window: tuple[int, ...] = (0,)  # of each kind of KV group, 0: full attention
    kv_multiplicity: tuple[int, ...] = (1,)  # groups, hence block tables, of each kind
    max_concurrency: int = 0  # requests a client has open at most; 0: no limit
    drafts: tuple[int, ...] = ()  # of a sequence, by the number of running ones when it samples; (): no speculation
    jump_tokens: int = 0  # that come with a sampled one if the grammar leaves no choice
    jump_chance: float = 0.0  # after a sampled token
    depth: int = 0  # of drafts, how many can be accepted at most
    draft_passes: tuple[int, ...] = ()  # of the drafter after its first, by the number of drafts
    lookahead: int = 0  # tokens behind a step's own for which running requests take blocks as well
    host_step_time: float = 0.0
    host_sequence_time: float = 0.0
    host_request_time: float = 0.0
    host_prompt_token_time: float = 0.0
    host_request_latency: float = 0.0
    host_token_time: float = 0.0
    scheduler_recv_interval: int = 0  # decode steps between two looks for new requests
    batch_wait_timeout_iters: int = 0  # steps that a new prompt waits for others ...
    batch_wait_max_tokens_ratio: float = 0.0  # ... unless there are tokens for this share of the budget


@dataclass(eq=False)
class Request:
    """A request's state and, when the run is over, its record. -inf is a time that has not come."""

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int  # what the model would generate: the scheduler must not look at it
    max_tokens: int
    priority: int = 0
    segments: tuple[tuple[object, int], ...] = ()  # (name, tokens) that the prompt begins with
    name: object = None  # of its own text
    stop_tokens: tuple[int, ...] = ()  # of each sequence of a group; default: all tokens
    status: str = ""
    reason: str = ""
    sent: float = -inf
    visible: float = -inf
    scheduled: float = -inf  # start of the first schedule() that gave it tokens
    first_token: float = -inf
    last_token: float = -inf
    token_times: list[float] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)  # of the steps that gave it tokens
    num_computed_tokens: int = 0
    num_placeholders: int = 0  # tokens sampled in steps in flight, under async scheduling
    num_steps_in_flight: int = 0  # steps in flight that hold a chunk of it
    skipped: bool = False  # passed over since it was preempted, for such a step
    num_in_flight_tokens: int = 0  # and so many tokens
    shared_boundary: int = 0  # tokens that groups without a window have cached, if a window has not
    tables: list[list[Block | None]] = field(default_factory=list)  # None: freed, outside the window
    prefill_end: int = 0  # tokens it had when it was admitted last
    num_hashed: int = 0  # blocks of each table that have been given their hash
    last_state: int = 0  # place of the state before the newest
    node: TreeNode | None = None  # with which its text in the radix tree ends
    tree_tokens: int = 0  # so much text
    entered: bool = False  # its last prefill is in the tree
    num_cached_tokens: int = -1  # found in the cache when it was first scheduled
    num_tier_tokens: tuple[int, int] = (0, 0)  # and of those in the CPU's memory, and on the disk
    stored_tokens: int = 0  # of its prompt that the store has
    num_stored_tokens: int = 0  # and that came from there
    loaded: float = -inf  # when what was loaded for it alone has come
    num_preemptions: int = 0
    num_swapped: int = 0  # blocks in the CPU's memory
    sequences: dict[int, list] = field(default_factory=dict)  # of a group: blocks of each that goes on
    ends: dict[int, float] = field(default_factory=dict)  # and when the others ended
    num_drafts: int = 0  # that it brings to its next step
    all_accepted: bool = False  # of the drafts of its last step
    num_accepted: int = 0  # output tokens that were drafts

    @property
    def outputs(self) -> int:
        return len(self.token_times)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.outputs

    def text(self, num_tokens: int) -> tuple:
        """The first tokens, spelled out: equal tokens are equal, and no others."""
        tokens = [(name, i) for name, length in self.segments for i in range(length)]
        own = self.index if self.name is None else self.name
        tokens += [(own, i) for i in range(max(num_tokens - len(tokens), 0))]
        return tuple(tokens[:num_tokens])


def lanes(request: Request) -> int:
    """Sequences of the request that a step takes along."""
    return len(request.sequences) or 1


class Entry(NamedTuple):
    """A sequence's part of a step: n tokens, the last `verified` of them drafts, and whether it yields new tokens;
    `proposed` drafts are then made for its next step."""

    request: Request
    n: int
    samples: bool
    verified: int
    proposed: int


@dataclass
class Outcome:
    """records: the requests, in order. steps: per step the time of its schedule() and its (request index, n)."""

    records: list[Request]
    steps: list[tuple[float, list[tuple[int, int]]]]
    num_steps: int
    num_preemptions: int
    tree: list[int]  # blocks of the radix tree's nodes in the order in which they would be evicted
    in_system_time: float  # integral over time of the number of requests sent and not finished
    load_time: float  # of all that came back from the tiers
    tiers: list[int]  # texts that each holds at the end
    block_time: float  # and of the blocks held by groups, ...
    saved_time: float  # ... and of those that their sequences hold once more
    block_copies: int  # since another sequence wrote to the block too


Accept = Callable[[int, int, bool], int]
"""(index of the request, its outputs so far, whether all drafts of its last step were accepted) -> drafts accepted"""


Jumps = Callable[[int, int], bool]
"""(index of the request, its outputs so far) -> whether the grammar decides what follows the next one"""


Parent = Callable[[int, int, int], int]
"""(index of the request, outputs so far with this one, sequence) -> the sequence from which this one goes on"""


def simulate(
    requests: list[dict],
    knobs: dict,
    price: Price,
    accept: Accept = lambda *_: 0,
    jumps: Jumps = lambda *_: False,
    parent: Parent = lambda _index, _outputs, sequence: sequence,
) -> Outcome:
    return Simulation(requests, Knobs(**knobs), price, accept, jumps, parent).run()


class Simulation:
    def __init__(self, requests: list[dict], knobs: Knobs, price: Price, accept: Accept, jumps: Jumps, parent: Parent):
        self.knobs, self.price, self.accept, self.jumps, self.parent = knobs, price, accept, jumps, parent
        self.requests = [Request(i, **r) for i, r in enumerate(requests)]
        assert all(a.arrival <= b.arrival for a, b in pairwise(self.requests))
        self.windows = [w for w, m in zip(knobs.kv_window, knobs.kv_multiplicity, strict=True) for _ in range(m)]
        self.cuts = knobs.state_cuts if knobs.enable_prefix_caching and 1 in self.windows else "never"
        blocks = knobs.num_gpu_blocks - 1
        self.tiers = Tiers(knobs.tier_blocks)
        self.pool = RadixPool(blocks, knobs.block_size) if knobs.radix else None
        through = knobs.write_through == "write_through"
        self.pool = self.pool or Pool(blocks, self.tiers, knobs.evict_unhashed_first, through)
        assert len(self.windows) * ceil(knobs.max_model_len / knobs.block_size) < knobs.num_gpu_blocks
        self.pending = list(self.requests)  # with the client
        self.places = [-inf] * knobs.max_concurrency  # free places of the client: since when
        self.incoming: list[Request] = []  # sent, on their way to the scheduler
        self.waiting, self.running = [], []  # running: in order of admission
        self.in_flight: list[tuple[list[Entry], float]] = []  # steps issued, with their ends
        self.now = self.gpu_free = self.last_end = 0.0  # now: the scheduler's clock
        self.ratio = knobs.new_token_ratio
        self.full, self.num_refreshes = False, 0  # full: somebody did not fit, and nobody has left since
        self.num_block_copies = self.block_copies = 0
        self.given_up: list[Request] = []
        self.looked = self.block_time = self.saved_time = self.given_up_time = 0.0
        self.copy_time = self.load_time = self.step_loads = self.load_end = 0.0
        self.wave, self.capacity_bound = 0, False
        self.preempted = self.waits = False  # waits: until the oldest step has ended
        self.begun = False  # a load apart, in this schedule
        self.front_end = 0.0
        self.num_steps = self.looked_at = 0
        self.prefilled = False
        self.steps: list[tuple[float, list[tuple[int, int]]]] = []

    def run(self) -> Outcome:
        """The engine core's loop: keep `steps_in_flight` steps queued, otherwise wait for the oldest."""
        while True:
            self.check()
            if len(self.in_flight) < self.knobs.steps_in_flight and not self.waits:
                self.send(self.now)
                if not (self.in_flight or self.running or self.waiting):
                    self.wave = self.num_steps
                seen = [request for request in self.incoming if request.visible <= self.now]
                if self.looks(seen):
                    self.looked_at, self.prefilled = self.num_steps, False
                    self.incoming = self.incoming[len(seen) :]
                    self.waiting += seen
                    self.waiting.sort(key=self.place)
                self.look()
                entries = self.schedule()
                turned_away = self.turn_away()
                until_done = self.knobs.batch_queue == "until-done"
                if entries:
                    self.issue(entries)
                    self.waits = until_done and self.in_flight[0][1] <= self.now
                    continue
                if self.knobs.batch_queue != "steps" and self.knobs.steps_in_flight > 2 and any(self.in_flight_entries):
                    self.in_flight.append(([], self.now))
                    self.waits = until_done
                    continue
                if turned_away:
                    continue
            if self.in_flight:
                self.waits = False
                self.complete(*self.in_flight.pop(0))
            elif self.begun:
                continue  # a load may have taken no time
            elif self.preempted:
                continue  # the one that lacked memory was the least urgent: now the others may go on
            elif loads := [r.loaded for r in self.waiting if r.loaded > self.now]:
                self.now = max(self.now, min(loads + self.coming()))
            elif self.running or self.waiting:
                raise RuntimeError(f"zero progress at {self.now} s")
            elif soonest := self.coming():
                if self.now < min(soonest):
                    self.ratio = self.knobs.new_token_ratio  # it rests for a while
                self.now = max(self.now, *soonest)
            else:
                break
        return self.outcome()

    def coming(self) -> list[float]:
        """When the next request comes, if there is one."""
        if self.incoming:
            return [self.incoming[0].visible]
        if not self.pending or (self.knobs.max_concurrency and not self.places):  # or none that may be sent
            return []
        soonest = max(self.pending[0].arrival, self.front_end) + self.knobs.host_request_time
        return [soonest + self.knobs.host_request_latency]  # if it is not turned away

    @property
    def in_flight_entries(self) -> list[list["Entry"]]:
        return [entries for entries, _ in self.in_flight]

    def front_end_time(self, request: Request) -> float:
        return self.knobs.host_request_time + self.knobs.host_prompt_token_time * request.prompt_tokens

    def looks(self, seen: list[Request]) -> bool:
        """Whether the scheduler takes the requests that it could see."""
        knobs, since = self.knobs, self.num_steps - self.looked_at
        if not self.running:
            return True
        if knobs.scheduler_recv_interval:
            return since >= knobs.scheduler_recv_interval or self.prefilled
        if knobs.batch_wait_timeout_iters and seen and not self.waiting:
            tokens = len(self.running) + sum(request.prompt_tokens for request in seen)
            enough = knobs.batch_wait_max_tokens_ratio * knobs.max_num_batched_tokens
            return since >= knobs.batch_wait_timeout_iters or 0 < enough <= tokens
        return True

    def send(self, now: float) -> None:
        """Send every request that has come by now and has a place, in order of arrival. A rejected one gives its place
        back at once."""
        limited = self.knobs.max_concurrency > 0
        while self.pending and self.pending[0].arrival <= now and (self.places or not limited):
            request = self.pending.pop(0)
            request.sent = max(request.arrival, self.places[0]) if limited else request.arrival
            too_long = request.prompt_tokens >= self.knobs.max_model_len
            if too_long or request.prompt_tokens + request.max_tokens > self.knobs.max_model_len:
                request.status = REJECTED
                request.reason = PROMPT_TOO_LONG if too_long else OVER_MAX_MODEL_LEN
                continue
            del self.places[:1]
            self.front_end = max(self.front_end, request.sent) + self.front_end_time(request)
            request.visible = self.front_end + self.knobs.host_request_latency
            self.incoming.append(request)

    def schedule(self) -> list[Entry]:
        """Choose the tokens of one step and count them as computed. Empty: nothing can be scheduled now."""
        knobs = self.knobs
        for request in self.running if knobs.radix else []:
            if request.num_computed_tokens < request.prefill_end:
                self.pool.insert(request, request.num_computed_tokens)
        decoding = [r for r in self.running if r.num_computed_tokens >= r.prefill_end]
        self.num_decoding, expects = len(decoding), knobs.clip_max_new_tokens > 0
        if expects and (len(decoding) < len(self.running) or not decoding):
            self.full = False
        elif expects and self.waiting and len(self.running) >= knobs.max_num_seqs:
            self.full = True
        if knobs.radix and self.waiting and (not self.full if expects else len(self.running) < knobs.max_num_seqs):
            self.look_at_waiting()
        self.budget = knobs.max_num_batched_tokens - knobs.draft_slots
        if knobs.order == "prefills-first":
            self.budget -= self.num_decoding
        self.threshold = knobs.long_prefill_token_threshold or inf
        if knobs.long_prefill_needs_contention and len(self.running) + len(self.waiting) <= 1:
            self.threshold = inf
        self.chosen: list[tuple[Request, int]] = []
        self.preempted = self.begun = False
        idle = not self.running
        prefills = lambda r: r.num_computed_tokens < r.prefill_end  # noqa: E731
        decodes = lambda r: r.num_computed_tokens >= r.prefill_end  # noqa: E731

        aligned = (self.num_steps - self.wave) % max(knobs.prefill_schedule_interval, 1) == 0
        self.defers = not aligned and not self.capacity_bound and any(map(decodes, self.running))

        def admit():
            if (idle or not knobs.admit_when_idle) and not (expects and self.full):
                self.admit()
                if not self.preempted and not self.defers:
                    self.capacity_bound = bool(self.waiting)

        def decode():
            if not knobs.retracts or self.retract():
                self.go_on(decodes)

        if knobs.order == "running-first":
            self.go_on(lambda r: True)
            admit()
        elif knobs.order == "decodes-first":
            decode()
            self.go_on(prefills)
            admit()
        elif knobs.order == "prefills-first":
            self.go_on(prefills)
            admit()
            self.budget = self.num_decoding
            if not knobs.retracts or self.retract():
                prompts = [r for r, _ in self.chosen]
                self.running = prompts + [r for r in self.running if r not in prompts]
                self.go_on(decodes)
        else:
            self.go_on(prefills)
            admit()
            if not [r for r, _ in self.chosen if not r.num_swapped]:
                decode()
        chosen = self.chosen
        for request, _ in chosen:
            request.num_swapped = 0
        if knobs.radix:
            self.pool.settle()
            self.pool.make_room(self.spare_blocks())
        proposed = knobs.drafts[len(chosen)] if knobs.drafts else 0

        entries = []
        for request, n in chosen:
            assert request in self.running  # nobody is preempted after he was chosen
            request.scheduled = self.now if request.scheduled == -inf else request.scheduled
            request.num_computed_tokens += n
            request.num_steps_in_flight += 1
            request.num_in_flight_tokens += n
            verified = max(request.num_computed_tokens - request.num_tokens - request.num_placeholders, 0)
            samples = request.num_computed_tokens >= request.num_tokens + request.num_placeholders
            if samples:
                request.num_drafts = 0
            if samples and knobs.async_scheduling:
                request.num_placeholders += 1 + verified
                request.num_drafts = proposed
            entries.append(Entry(request, n, samples, verified, proposed))
        return entries

    def go_on(self, which) -> None:
        """The running requests of one kind, in order, as long as there is memory for them."""
        position = 0
        while position < len(self.running) and self.budget > 0:
            request = self.running[position]
            position += 1
            if not which(request) or request in [r for r, _ in self.chosen]:
                continue
            after = request.num_computed_tokens + 2 - request.num_placeholders
            if request.num_placeholders > 0 and after >= request.prompt_tokens + request.max_tokens:
                continue  # its last token is in flight
            n = request.num_tokens + request.num_placeholders + request.num_drafts - request.num_computed_tokens
            within = self.knobs.drafts_within_max_tokens
            end = min(request.prompt_tokens + request.max_tokens if within else inf, self.knobs.max_model_len)
            n = min(n, self.threshold, self.budget, end - 1 - request.num_computed_tokens)
            n = self.cut(request, request.num_computed_tokens, n)
            if self.knobs.clip_max_new_tokens and self.is_piece(request):
                n = min(n, max(int(self.room()), 0) or n)
            if n <= 0:
                continue  # its next token is not known yet
            if self.defers and request.num_computed_tokens < request.prefill_end:
                continue
            computed = request.num_computed_tokens
            if n * lanes(request) > self.budget:
                continue
            passed_over = 0
            while request in self.running and not (
                self.append(request)
                if request.sequences
                else self.allocate(request, computed, computed + n, self.knobs.lookahead)
            ):
                passed_over += self.preempt_one(request)
            if request not in self.running:
                break
            position = self.running.index(request) + 1
            if self.knobs.skips_behind_victim:  # vLLM looked at the same place again only if the victim was in the step
                position += passed_over
            self.chosen.append((request, n))
            self.budget -= n * lanes(request) + self.knobs.draft_slots
            if self.knobs.clip_max_new_tokens and self.is_piece(request):
                self.budget -= self.whole_blocks(n) - n

    def preempt_one(self, request: Request) -> bool:
        """The last that is not in the step; where some are more urgent, the last of the least urgent, in it or not.
        True if that one was before this request and not in the step."""
        ordered = self.knobs.policy in ("priority", "shortest-first")
        in_step = [r for r, _ in self.chosen]
        if ordered and self.knobs.num_sequences == 1:
            victim = max(self.running, key=lambda r: self.turn(r)[:2])  # of equals the first
        else:
            victim = [r for r in self.running if r not in in_step][-1]
        before = self.running.index(victim) < self.running.index(request)
        self.running.remove(victim)
        for chosen, n in self.chosen:
            if chosen is victim:
                self.budget += n + self.knobs.draft_slots
        self.chosen = [(r, n) for r, n in self.chosen if r is not victim]
        self.preempt(victim)
        first = lambda r: r.tables or (self.turn(r) < self.turn(victim) if ordered else r.skipped)  # noqa: E731
        place = next((i for i, r in enumerate(self.waiting) if not first(r)), len(self.waiting))
        self.waiting.insert(place, victim)
        return before and victim not in in_step

    def seats(self, requests: list[Request]) -> int:
        """Sequences that the requests have, or will have when their prompts are computed."""
        return sum(len(r.sequences) or self.knobs.num_sequences for r in requests)

    def admit(self) -> None:
        """Waiting requests, if there was memory for all that run, until the first that does not fit."""
        knobs = self.knobs
        self.returned = False
        position, ran = 0, [r for r, _ in self.chosen]
        prompts = any(r.num_computed_tokens < r.prefill_end for r in ran)
        blind = not self.preempted and self.waiting and self.budget <= 0
        if knobs.clip_max_new_tokens and blind and self.room() <= 0:  # it still looks for the first one's text
            if knobs.radix and not self.waiting[0].tables and len(self.running) < knobs.max_num_seqs:
                self.look_up(self.waiting[0])
            self.full = self.num_decoding > 0
        while (
            not self.preempted
            and position < len(self.waiting)
            and self.budget > 0
            and self.seats(self.running) < knobs.max_num_seqs
        ):
            request = self.waiting[position]
            arrived = bool(request.tables)
            if arrived and request.loaded > self.now:
                position += 1
                continue
            if self.seats([*self.running, request]) > knobs.max_num_seqs:
                break
            resumes = knobs.resumes_in_flight and not knobs.async_scheduling
            if request.num_steps_in_flight > 0 and not resumes:  # preempted, and steps with it are still to come back
                request.skipped = knobs.keeps_skipped_first
                position += 1
                continue
            if self.returned and not request.num_swapped:
                break
            hits = request.tables if arrived else self.look_up(request)
            if hits is None:
                position += 1
                continue
            if self.cuts != "never" and not arrived and self.is_late(hits):
                break
            below = [] if request.num_swapped or arrived else self.look_below(request, len(hits[0]))
            cached = (len(hits[0]) + len(below)) * knobs.block_size
            if request.num_swapped or arrived:
                cached = request.num_computed_tokens
            idle = sum(1 for table in hits for block in table if block and block.references == 0)
            watermark = knobs.watermark_blocks if self.running else 0
            if below and knobs.kv_offloading_load == "background":
                if not self.load_apart(request, hits, below, idle + watermark):
                    break
                self.begun = True
                position += 1
                continue
            n = request.num_tokens - cached
            if self.defers and n > 1:
                break
            asked = n + self.left(request) + knobs.block_size
            if knobs.clip_max_new_tokens and self.running and asked >= self.room(idle):
                self.full = self.num_decoding > 0
                break
            padded = 0
            filled = cached + 1 + knobs.padded_drafts
            always = knobs.pads_drafts == "beside-or-cached"
            fits = (filled < knobs.max_model_len or not always) and knobs.padded_drafts < self.threshold
            if n == 1 and (ran or (always and cached)) and not prompts and fits:
                padded = knobs.padded_drafts
                if 1 + padded > self.budget or filled > knobs.max_model_len:
                    break
            n = min(n + padded, self.threshold)
            if n > self.budget and not knobs.chunked_prefill:
                if knobs.skip_unfit_prefill:
                    if knobs.policy in ("fcfs", "lpm"):  # vLLM turns the order of those it skips
                        self.waiting.remove(request)
                        fixed = [bool(r.tables or r.skipped) for r in self.waiting]
                        front = fixed.index(False) if False in fixed else len(fixed)
                        self.waiting.insert(front, request)
                    position += 1
                    continue
                break
            if knobs.clip_max_new_tokens and self.whole_blocks(n) > self.budget and knobs.chunked_prefill:
                pieces = self.budget // knobs.block_size * knobs.block_size
                if pieces == 0 and (self.chosen or self.num_decoding):
                    break
                n = min(n, pieces or self.budget)
            n = min(n, self.budget)
            if self.cut(request, cached, n) < n:
                n, padded = self.cut(request, cached, n) if not padded else 1, 0
                if n == 0:
                    break
            if request.sequences:
                needed = request.num_swapped + len(request.sequences)
                if len(request.sequences) > self.budget:
                    break
                if needed > len(self.pool.blocks):
                    self.give_up(request, GROUP_TOO_LARGE)
                if request.reason or needed + watermark > len(self.pool.free):
                    break
                self.running.append(self.waiting.pop(position))
                self.swap_in(request)
                assert self.append(request)
                request.prefill_end = request.num_tokens
                self.copy_time += request.num_swapped * knobs.swap_block_time
                self.returned = True
                self.chosen.append((request, n))
                self.budget -= len(request.sequences)
                continue
            if knobs.reserve == "to-completion":
                promised = sum(max(self.full_blocks(r) - sum(map(len, r.tables)), 0) for r in self.running)
                need = self.whole(request.prompt_tokens + request.max_tokens, [[]] if arrived else hits) + promised
            else:
                need = self.whole(request.num_tokens, [[]] if arrived else hits) if knobs.reserve_full_isl else 0
            if arrived and need:
                need -= len(request.tables[0])
            if need + watermark > len(self.pool.free):
                break
            ahead = knobs.lookahead if knobs.admission_lookahead else 0
            positions = max(self.positions(request, cached + n + ahead), len(hits[0]))
            firsts = [self.first_new(hit, w, cached + n) for hit, w in zip(hits, self.windows, strict=True)]
            if sum(max(positions - first, 0) for first in firsts) + idle + watermark > len(self.pool.free):
                break
            if knobs.allocator != "paged":
                piece = self.pool.take_piece(positions, knobs.allocator == "buddy")
                if piece is None:
                    break
                hits = [piece]
            self.running.append(self.waiting.pop(position))
            if knobs.radix:
                self.pool.lock(self.found)
                request.node, request.tree_tokens, request.entered = self.found, cached, False
            elif knobs.allocator == "paged" and not arrived:
                for block in (block for table in hits for block in table if block):
                    self.pool.touch(block)
            if not arrived:
                request.tables, request.num_hashed = hits, len(hits[0])
            seconds = self.load(request, len(hits[0]), below)
            self.copy_time += seconds
            self.step_loads += seconds
            if cached > len(hits[0]) * knobs.block_size:
                room = positions * knobs.block_size
                assert self.allocate(request, 0, cached, room=room, step=-1)  # it is there before the step
            assert self.allocate(request, 0, cached + n, room=positions * knobs.block_size)
            request.num_computed_tokens = cached
            request.prefill_end = request.num_tokens
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = cached
            self.copy_time += request.num_swapped * knobs.swap_block_time
            self.returned = self.returned or request.num_swapped > 0
            self.chosen.append((request, n))
            self.budget -= n + knobs.draft_slots
            if knobs.clip_max_new_tokens:
                self.budget -= self.whole_blocks(n) - n
                if self.room() <= 0:
                    self.full = self.num_decoding > 0
                    break
        waits = not self.preempted and self.num_decoding and self.budget > 0 and position < len(self.waiting)
        if knobs.clip_max_new_tokens and waits and len(self.running) >= knobs.max_num_seqs:
            self.full = True

    def is_piece(self, request: Request) -> bool:
        """Some of its prompt, or of what it computes again, is still to be computed."""
        return request.num_computed_tokens < request.prefill_end

    def whole_blocks(self, tokens: int) -> int:
        return ceil(tokens / self.knobs.block_size) * self.knobs.block_size

    def room(self, idle: int = 0) -> float:
        """Tokens for which SGLang has memory beside what it expects: each who decodes of its share, each prompt of the
        step a block more than it takes and, with its last piece, all that it may generate."""
        knobs, chosen = self.knobs, [r for r, _ in self.chosen]
        pieces = [(r, n) for r, n in self.chosen if self.is_piece(r)]
        expected = sum(self.left(r) * self.ratio for r in self.running if r not in chosen and not self.is_piece(r))
        expected += self.num_decoding if knobs.order == "prefills-first" else 0
        for r, n in pieces:
            ends = r.num_computed_tokens + n >= r.prefill_end
            new = min(r.max_tokens, knobs.clip_max_new_tokens) if ends else 0
            expected += self.whole_blocks(n) + knobs.block_size + new
        free = (len(self.pool.free) - idle) // len(self.windows) * knobs.block_size
        return free + sum(self.whole_blocks(n) for _, n in pieces) - expected

    def spare_blocks(self) -> int:
        """Blocks that SGLang leaves empty behind a step: it evicts for one more of each request, if they are of several
        tokens."""
        size, prompts, others = self.knobs.block_size, [], []
        if size == 1:
            return 0
        for request, n in self.chosen:
            end = request.num_computed_tokens + n
            taken = ceil(end / size) - ceil(request.num_computed_tokens / size)
            (prompts if end <= request.prefill_end else others).append((n, taken))
        grown = sum(taken for _, taken in others)
        asked = ceil(sum(n for n, _ in prompts) / size) + len(prompts) - sum(taken for _, taken in prompts)
        return max(asked - grown, len(others) - grown, 0)

    def positions(self, request: Request, tokens: int) -> int:
        """Blocks of each table that a request is given at admission, for so many tokens at least."""
        outputs = min(request.output_tokens, request.max_tokens)
        reserved = {
            "whole-prompt": request.num_tokens,
            "max-model-len": self.knobs.max_model_len,
            "output-length": request.prompt_tokens + outputs,
            "power-of-two": request.prompt_tokens + 2 ** (outputs - 1).bit_length(),
        }.get(self.knobs.reserve, 0)
        return ceil(min(max(reserved, tokens), self.knobs.max_model_len) / self.knobs.block_size)

    def load_apart(self, request: Request, hits: list[list[Block]], below: list[int], kept: int) -> bool:
        """The request takes blocks for all its tokens and waits for its load, before all that hold none."""
        knobs, size = self.knobs, self.knobs.block_size
        tokens = request.num_tokens
        if knobs.reserve == "to-completion":
            tokens = request.prompt_tokens + request.max_tokens
        positions = self.positions(request, tokens + knobs.lookahead)
        apart = sum(1 for r in self.waiting if r.tables)  # at most as many as may run: the engine's own rule
        if apart >= knobs.max_num_seqs or positions - len(hits[0]) + kept > len(self.pool.free):
            return False
        for block in hits[0]:
            self.pool.touch(block)
        self.waiting.remove(request)
        self.waiting.insert(sum(1 for r in self.waiting if r.tables), request)
        request.tables, request.num_hashed = hits, len(hits[0])
        first_time, cached = request.num_cached_tokens < 0, (len(hits[0]) + len(below)) * size
        self.load_end = max(self.load_end, self.now) + self.load(request, len(hits[0]), below)
        request.loaded = self.load_end
        if first_time:
            request.num_cached_tokens = cached
        assert self.allocate(request, 0, cached, room=positions * size, step=-1)
        request.num_computed_tokens = cached
        return True

    def place(self, request: Request) -> tuple:
        return (0, 0) if request.tables else (1, self.urgency(request))

    def urgency(self, request: Request) -> int:
        orders = {"fcfs": 0, "lpm": 0, "priority": request.priority, "shortest-first": request.prompt_tokens}
        return orders[self.knobs.policy]

    def turn(self, request: Request) -> tuple:
        return self.urgency(request), request.sent, request.index

    def look_at_waiting(self) -> None:
        """SGLang sorts those that wait by what the tree has of them, unless too many do, or now and then touches it."""
        if self.knobs.policy == "lpm" and len(self.waiting) <= 128:
            self.sort_by_prefix()
            return
        if self.num_refreshes % 32 == 0:
            for r in reversed([r for r in self.waiting[:128] if not r.tables]):
                self.pool.match(r.text(r.num_tokens // self.knobs.block_size * self.knobs.block_size))
        self.num_refreshes += 1

    def sort_by_prefix(self) -> None:
        """SGLang's longest-prefix order; of those that begin alike one goes first."""
        keys, leaders = {}, []
        for r in self.waiting:
            text = r.text(r.num_tokens)
            _, known = self.pool.match(text[: len(text) // self.knobs.block_size * self.knobs.block_size])
            keys[r.index] = -min(known, r.num_tokens - 1)
            if known <= 32:
                if any(len(text) >= 32 and text[:32] == other[:32] for other in leaders):
                    keys[r.index] = inf
                else:
                    leaders.append(text)
        self.waiting.sort(key=lambda r: keys[r.index])

    def left(self, request: Request) -> int:
        """Tokens that SGLang thinks a request may still generate."""
        return min(request.max_tokens - request.outputs, self.knobs.clip_max_new_tokens)

    def full_blocks(self, request: Request) -> int:
        return len(self.windows) * ceil((request.prompt_tokens + request.max_tokens) / self.knobs.block_size)

    def retract(self) -> bool:
        """Before a decode step: requests with few outputs and long prompts leave until the others have memory. False if
        nobody decodes now: beside prompts nobody is retracted, nor while somebody's last token is in flight."""
        size, before = self.knobs.block_size, len(self.running)
        chosen = [r for r, _ in self.chosen]
        rest = [r for r in self.running if r not in chosen and not self.is_piece(r)]
        ending = [r for r in rest if r.num_placeholders and r.num_tokens + 1 >= r.prompt_tokens + r.max_tokens]
        rest = [r for r in rest if r not in ending]
        while True:
            grows = [r for r in rest if r.num_computed_tokens < r.num_tokens + r.num_placeholders]
            missing = [max(ceil((r.num_computed_tokens + 1) / size) - len(r.tables[0]), 0) for r in grows]
            fits = sum(missing) * len(self.windows) <= len(self.pool.free)
            if self.knobs.radix and not fits:
                self.pool.make_room(sum(missing))  # nothing stays
            if chosen:
                self.full = self.full and not fits
                return fits
            if not fits and ending:
                return False
            if fits or len(rest) <= 1:
                break
            victim = sorted(rest, key=lambda r: (r.outputs, -r.prompt_tokens), reverse=True)[-1]
            self.running.remove(victim)
            rest.remove(victim)
            self.preempt(victim)
            self.waiting.append(victim)
            self.waiting.sort(key=self.place)
            if self.knobs.radix:
                self.pool.make_room(ceil(20 * len(rest) / size))
        if len(self.running) < before:
            self.full = False
            decoded, wished = sum(r.outputs for r in rest), sum(r.max_tokens for r in rest)
            if self.knobs.min_new_token_ratio < 1:
                self.ratio = min(1, (decoded + 20 * len(rest)) / (wished + 1))
        elif rest:
            self.ratio = max(self.ratio - self.knobs.new_token_ratio_decay, self.knobs.min_new_token_ratio)
        return True

    def allocate(self, request: Request, computed: int, num_tokens: int, ahead: int = 0, room: int = 0, step=None):
        """Free what left its window, take blocks up to num_tokens and `ahead` behind them, or room, hash those full of
        known tokens; or not.

        step: in which that text is computed, by default the one being made.
        """
        size = self.knobs.block_size
        num_computed_tokens = computed
        if self.knobs.windows_by_processed:
            num_computed_tokens -= request.num_in_flight_tokens
        for window, table in zip(self.windows, request.tables, strict=True):
            if window == 1:
                self.retire(request, table, (num_computed_tokens - 1) // size)
                continue
            skipped = max(num_computed_tokens - window + 1, 0) // size if window else 0
            freed = [i for i in reversed(range(min(skipped, len(table)))) if table[i] is not None]
            if freed:
                self.pool.put_back_all([table[i] for i in freed])
                table[: freed[0] + 1] = [None] * (freed[0] + 1)
        ahead = min(num_tokens + ahead, self.knobs.max_model_len)
        length = ceil(max(ahead, room) / size)
        firsts = [self.first_new(t, window, num_tokens) for t, window in zip(request.tables, self.windows, strict=True)]
        if sum(max(length - first, 0) for first in firsts) > len(self.pool.free):
            return False
        if length > len(request.tables[0]):
            request.last_state = max(len(request.tables[0]) - 1, 0)
        for table, first in zip(request.tables, firsts, strict=True):
            if length > len(table):
                table += [None] * (first - len(table))
                table += [self.pool.take() for _ in range(length - first)]
        self.cache(request, min(num_tokens, request.num_tokens), len(self.steps) if step is None else step)
        full = min(num_tokens, request.num_tokens) // size
        if self.cuts == "last-token" and 0 < full == (request.prompt_tokens - 1) // size:
            for table, window in zip(request.tables, self.windows, strict=True):
                if window == 1 and table[full - 1]:
                    table[full - 1].step = len(self.steps)  # 0.32 enters it anew as long as it is held
        return True

    def first_new(self, table: list, window: int, num_tokens: int) -> int:
        """The first place of a table that a step of so many tokens takes a block for: a state is the last of them."""
        own = ceil(num_tokens / self.knobs.block_size)
        return max(len(table), own - 1) if window == 1 else len(table)

    def retire(self, request: Request, table: list[Block | None], newest: int) -> None:
        """States before the newest go, until 0.32 up to a gap, and the one of the step before."""
        before = list(reversed(range(min(newest, len(table)))))
        if self.cuts == "last-block" and None in (states := [table[i] for i in before]):
            before = before[: states.index(None)]
        for places in (before, [request.last_state] if request.last_state < newest else []):
            self.pool.put_back_all([table[i] for i in places if table[i] is not None])
            for i in places:
                table[i] = None

    def cut(self, request: Request, start: int, n: int) -> int:
        """Of n tokens from `start` on, those before the first place where the request's state is to be kept."""
        size, drop = self.knobs.block_size, int(self.knobs.drop_last_hit)
        end, prefill_end = start + n, max(request.prompt_tokens, request.num_tokens - 1)
        if self.cuts == "never" or n <= 0 or start >= prefill_end:
            return n
        if end < prefill_end:
            most = min(self.knobs.max_num_batched_tokens, self.knobs.long_prefill_token_threshold or inf)
            if end // size * size > start or size <= most:
                end = end // size * size
        last = request.num_tokens - (self.cuts == "last-token" and not drop)
        places = [(last // size - drop) * size]
        if start % size:
            places.append((start // size + 1) * size)
        if request.shared_boundary < end:
            places.append(start + (request.shared_boundary - start) // size * size)
        return max(min([place for place in places if start < place < end], default=end) - start, 0)

    def is_late(self, hits: list[list[Block | None]]) -> bool:
        """Whether the state at the end of a hit is computed in this very step."""
        ends = [table[-1] for table, window in zip(hits, self.windows, strict=True) if window == 1 and table]
        return any(block.step == len(self.steps) for end in ends for block in self.pool.cached[end.key])

    def cache(self, request: Request, num_tokens: int, step: int) -> None:
        """Hash the blocks that so many tokens fill, where somebody may look for them."""
        size, full = self.knobs.block_size, num_tokens // self.knobs.block_size
        for group, table in enumerate(request.tables if self.knobs.enable_prefix_caching else []):
            for i in range(request.num_hashed, full):
                if table[i] is not None and self.is_reachable(request, self.windows[group], i):
                    self.pool.enter(table[i], (group, request.text((i + 1) * size)))
                    table[i].step = step
            for i in reversed(range(request.num_hashed, full)) if self.pool.through else ():
                self.tiers.keep((group, request.text((i + 1) * size)))
        request.num_hashed = max(request.num_hashed, full)

    def is_reachable(self, request: Request, window: int, i: int) -> bool:
        """Whether a prompt that goes on where this one ends, or where it parted from another, needs block i."""
        if not self.knobs.sparse_windows or window == 0:
            return True
        size, drop = self.knobs.block_size, int(self.knobs.drop_last_hit)
        if window == 1:
            ends = [(request.prompt_tokens - 1) // size - drop, request.shared_boundary // size]
            return i + 1 in ([*ends, request.prompt_tokens // size - 1] if drop else ends)
        ends = [max(end // size - drop, 0) + drop for end in (request.prompt_tokens - 1, request.prompt_tokens)]
        ends = ends if drop else ends[:1]
        if request.shared_boundary:
            ends.append(request.shared_boundary // size + drop)
        return any(end - max(1, ceil((window - 1) / size)) - drop <= i < end for end in ends)

    def look(self) -> None:
        """What groups hold, and hold once more, since it was looked at last."""
        held = [block for r in self.requests for table in r.tables for block in table]
        different = len(set(map(id, held)))
        self.block_time += (self.now - self.looked) * different
        self.saved_time += (self.now - self.looked) * (len(held) - different)
        self.looked = self.now

    def append(self, request: Request) -> bool:
        """Each sequence of a group gets a place for its next token, if there is a free block for each."""
        if len(request.sequences) > len(self.pool.free):
            return False
        for table in request.sequences.values():
            if request.num_computed_tokens == len(table) * self.knobs.block_size:
                table.append(self.pool.take())
            elif table[-1].references > 1:
                self.pool.put_back(table[-1])
                table[-1] = self.pool.take()
                self.num_block_copies += 1
        return True

    def advance_group(self, request: Request, end: float) -> None:
        """A group has one more token, in each of its sequences."""
        if not request.sequences:
            (table,) = request.tables
            for block in table:
                block.references += self.knobs.num_sequences - 1
            request.sequences = {s: list(table) for s in range(self.knobs.num_sequences)}
        elif request.outputs < min(request.output_tokens, request.max_tokens):
            parents = {s: self.parent(request.index, request.outputs, s) for s in request.sequences}
            children = {s: list(request.sequences[parent]) for s, parent in parents.items()}
            for block in (block for table in children.values() for block in table):
                self.pool.touch(block)
            for block in (block for table in request.sequences.values() for block in table):
                self.pool.put_back(block)
            request.sequences = children
        most = min(request.output_tokens, request.max_tokens)
        for s in list(request.sequences):
            if request.outputs >= (request.stop_tokens[s] if request.stop_tokens else most):
                request.ends[s] = end
                for block in request.sequences.pop(s):
                    self.pool.put_back(block)
        request.tables = list(request.sequences.values())

    def swap_out(self, request: Request) -> None:
        """The group's blocks go to the CPU's memory, if that has room."""
        blocks = {id(block): block for table in request.tables for block in table}
        for block in blocks.values():
            block.references = 1
            self.pool.put_back(block)
        request.sequences = {s: [id(block) for block in table] for s, table in request.sequences.items()}
        request.tables = []
        if len(blocks) <= self.knobs.num_cpu_blocks - sum(r.num_swapped for r in self.waiting):
            self.copy_time += len(blocks) * self.knobs.swap_block_time
            request.num_swapped = len(blocks)
        else:
            self.give_up(request, SWAP_SPACE_FULL)

    def swap_in(self, request: Request) -> None:
        """Other blocks, shared as they were."""
        blocks = {}
        for table in request.sequences.values():
            for name in table:
                if name in blocks:
                    self.pool.touch(blocks[name])
                else:
                    blocks[name] = self.pool.take()
        request.sequences = {s: [blocks[name] for name in table] for s, table in request.sequences.items()}
        request.tables = list(request.sequences.values())

    def give_up(self, request: Request, reason: str) -> None:
        request.reason = reason
        self.given_up.append(request)

    def turn_away(self) -> bool:
        """Reject the groups that the schedule gave up."""
        for request in self.given_up:
            self.waiting.remove(request)
            request.status, request.num_swapped, request.sequences = REJECTED, 0, {}
            self.given_up_time += self.now - request.sent
            if self.knobs.max_concurrency:
                self.places.append(self.now)
        found, self.given_up = bool(self.given_up), []
        if found and self.knobs.max_concurrency:
            self.send(self.now)
        return found

    def look_up(self, request: Request) -> list[list[Block | None]] | None:
        """The cached blocks of a request's beginning, per block table, for the longest hit that all agree on.

        None: the first that is missing is being computed, and the engine waits for it.
        """
        size = self.knobs.block_size
        if self.knobs.radix:
            tokens = request.text((request.num_tokens - 1) // size * size)
            self.found, _ = self.pool.match(tokens)
            return [[block for node in self.pool.path(self.found) for block in node.blocks]]
        longest = (request.num_tokens - 1) // size
        if request.num_swapped:
            longest = request.num_computed_tokens // size  # the rest it computes as it would have done
        drop, full = int(self.knobs.drop_last_hit), 0 in self.windows
        beyond = self.knobs.drafter_drop == "one-or-last"
        if drop and beyond and full and any(self.windows) and not request.num_swapped:
            longest = request.num_tokens // size
        longest = longest if self.knobs.enable_prefix_caching else 0
        kinds, first = [], 0  # of groups: window, and the tables of the kind
        for window, count in zip(self.knobs.kv_window, self.knobs.kv_multiplicity, strict=True):
            kinds.append((window, range(first, first + count)))
            first += count

        def find(group, i):
            block = self.pool.find((group, request.text((i + 1) * size)))
            late = block and block.step == len(self.steps) and self.knobs.late_hits != "hit"
            return None if late else block

        for i in range(longest if self.knobs.late_hits == "wait" else 0):
            keys = [(group, request.text((i + 1) * size)) for group in range(len(self.windows))]
            found = [self.pool.find(key) for key in keys]
            if any(block and block.step == len(self.steps) for block in found):
                return None
            if any(block is None and window == 0 for block, window in zip(found, self.windows, strict=True)):
                break

        def cached(tables, i):
            return all(find(group, i) for group in tables)

        def hit(window, tables, limit):
            hits = [cached(tables, i) for i in range(limit)]
            leading = hits.index(False) if False in hits else limit
            if window == 0:
                return leading
            more = drop if window > 1 else 0  # drafters have no states
            wanted = max(1, ceil((window - 1) / size)) + more
            for end in range(limit, wanted - 1, -1):
                if all(hits[end - wanted : end]):
                    return max(end - more, 0)
            return max(leading - more, 0)

        def reach(window):
            return min(longest + (drop if window > 1 else 0), found)

        found = min((hit(0, tables, longest) for window, tables in kinds if window == 0), default=longest)
        longest = max(found - drop, 0) if full else found
        whole = longest
        windowed = [(window, tables) for window, tables in kinds if window]
        if drop and self.knobs.drafter_drop == "each" and windowed and (full or len(windowed) > 1):
            longest = hit(*windowed[0], longest) if len(windowed) == 1 else 0  # several take a block in turns
        else:
            while any((shorter := hit(*kind, reach(kind[0]))) < longest for kind in windowed):
                longest = shorter
        request.shared_boundary = whole * size if full and windowed and longest < whole else 0
        result = []
        for window, tables in kinds:
            for group in tables:
                table = [find(group, i) for i in range(longest)]
                if window:
                    outside = max(longest - max(1, ceil((window - 1) / size)), 0)
                    table[:outside] = [None] * outside
                result.append(table)
        return result

    def look_below(self, request: Request, first: int) -> list[int]:
        """In which tier each block is that follows the `first` on the GPU, up to the first that is in none."""
        size, found = self.knobs.block_size, []
        for i in range(first, (request.num_tokens - 1) // size):
            tier = self.tiers.find((0, request.text((i + 1) * size)))
            if tier is None:
                break
            found.append(tier)
        stored = min(request.stored_tokens, request.num_tokens - 1) // size - first - len(found)
        return found + [STORE] * max(stored, 0)

    def load(self, request: Request, first: int, below: list[int]) -> float:
        """Blocks come back, from the disk by way of the CPU, or from the store. Copies in tiers are used, the last one
        first. Returns the seconds."""
        knobs, counts = self.knobs, [below.count(tier) * self.knobs.block_size for tier in (0, 1, STORE)]
        if request.scheduled == -inf and below:
            request.num_tier_tokens, request.num_stored_tokens = tuple(counts[:2]), counts[2]
        own, total = [tier for tier in below if tier != STORE], 0.0
        for i in reversed(range(len(own))):
            self.tiers.use(self.tiers.held[below[i]], (0, request.text((first + i + 1) * knobs.block_size)))
        for tier, blocks in enumerate((len(own), own.count(1))):
            if blocks:
                total += knobs.tier_latency[tier] + blocks * knobs.tier_block_time[tier]
        if STORE in below:
            total += knobs.store_latency + below.count(STORE) * knobs.store_block_time
        self.load_time += total
        return total

    def whole(self, num_tokens: int, hits: list[list[Block | None]]) -> int:
        """Blocks that the admission gate asks for: all tokens, or what a window holds at once, less what is shared."""
        size = self.knobs.block_size
        blocks, knobs = 0, self.knobs
        steps = knobs.steps_in_flight if knobs.windows_by_processed else 1
        for window, table in zip(self.windows, hits, strict=True):
            need = ceil(num_tokens / size) if window != 1 else len(table) + 1
            if window > 1 and knobs.gate_caps_windows:
                need = min(need, ceil((window - 1 + steps * knobs.max_num_batched_tokens) / size) + 1)
            blocks += max(need - len(table), 0) + sum(1 for block in table if block and block.references == 0)
        return blocks

    def release(self, request: Request) -> None:
        """Free its blocks, last ones first."""
        if self.knobs.radix:
            self.pool.release(request)
            request.tables = []
            return
        for table in request.tables:
            self.pool.put_back_all([block for block in reversed(table) if block is not None])
        request.tables, request.num_hashed, request.last_state = [], 0, 0

    def preempt(self, victim: Request) -> None:
        """To be recomputed from its first token, or swapped. What is in flight still arrives."""
        victim.skipped = False
        if victim.sequences:
            self.swap_out(victim)
            victim.num_preemptions += 1
            self.preempted = True
            return
        held = sum(map(len, victim.tables))
        self.release(victim)
        if held <= self.knobs.num_cpu_blocks - sum(r.num_swapped for r in self.waiting):
            self.copy_time += held * self.knobs.swap_block_time
            victim.num_swapped = held
        else:
            victim.num_computed_tokens = 0
        victim.num_drafts = 0
        victim.num_preemptions += 1
        self.preempted = True

    def issue(self, entries: list[Entry]) -> None:
        scheduled = [(e.request.num_computed_tokens - e.n, e.n) for e in entries for _ in range(lanes(e.request))]
        contexts = [e.request.num_computed_tokens - e.verified for e in entries if e.samples and e.proposed]
        passes = self.knobs.draft_passes[entries[0].proposed] if self.knobs.drafts else 0
        sums = Sums(scheduled, [e.verified for e in entries] if self.knobs.drafts else None, contexts, passes)
        knobs = self.knobs
        self.num_steps += 1
        self.prefilled = sum(n for _, n in scheduled) > len(scheduled) + sum(e.verified for e in entries)
        issue, latency = self.price(sums)
        assert 0 <= issue <= latency
        self.copy_time += self.num_block_copies * self.knobs.copy_block_time
        self.block_copies += self.num_block_copies
        self.num_block_copies = 0
        copies, self.copy_time = self.copy_time, 0.0
        loads, self.step_loads = self.step_loads, 0.0
        if knobs.kv_offloading_load == "layers":
            copies -= min(latency, loads) - min(latency, loads) / knobs.num_layers
        issue, latency = issue * (latency + copies) / latency, latency + copies
        self.steps.append((self.now, [(e.request.index, e.n * lanes(e.request)) for e in entries]))
        self.now += self.knobs.host_step_time + self.knobs.host_sequence_time * len(scheduled)
        start = max(self.now, self.gpu_free)
        self.gpu_free = start + issue
        self.last_end = max(start + latency, self.last_end)  # a pipeline does not overtake itself
        self.in_flight.append((entries, self.last_end))

    def complete(self, entries: list[Entry], end: float) -> None:
        """A step's tokens are known at `end`; the scheduler may come to look at them later."""
        self.now = max(self.now, end)
        if not entries:
            return
        if self.knobs.num_sequences > 1:
            self.look()
        if self.knobs.max_concurrency or self.knobs.host_token_time:
            self.send(end)
        tokens = sum(entry.samples and entry.request.status != COMPLETED for entry in entries)
        if self.knobs.host_token_time and tokens:
            begin = max(self.front_end, end)
            self.front_end = begin + tokens * self.knobs.host_token_time
            end = (begin + self.front_end + self.knobs.host_token_time) / 2  # of all tokens, on the mean
            if self.knobs.max_concurrency:
                self.send(end)
        for request in (e.request for e in entries if self.knobs.radix and e.samples):
            computed = request.num_computed_tokens >= request.prefill_end  # else a step of before its preemption
            if request in self.running and computed and not request.entered:
                self.pool.insert(request, request.prefill_end)
                request.entered = True
        for entry in entries:
            request = entry.request
            request.num_steps_in_flight -= 1
            request.num_in_flight_tokens -= entry.n
            if request.status == COMPLETED or not entry.samples:
                continue  # COMPLETED: async scheduling's wasted step
            retracted = self.knobs.retracts and self.knobs.async_scheduling and request not in self.running
            if retracted and not request.num_swapped:
                request.num_placeholders -= 1 + entry.verified  # SGLang computes it again
                continue
            accepted = 0
            if entry.verified:
                most = min(entry.verified, self.knobs.depth)
                accepted = min(self.accept(request.index, request.outputs, request.all_accepted), most)
                request.all_accepted = accepted == most
            elif self.jumps(request.index, request.outputs):
                accepted = self.knobs.jump_tokens
            if request in self.running:
                request.num_computed_tokens -= entry.verified - accepted if entry.verified else 0
                if not self.knobs.async_scheduling:
                    request.num_drafts = entry.proposed
            room = min(request.output_tokens, request.max_tokens) - request.outputs
            request.token_times += [end] * min(1 + accepted, room)
            request.chunk_times.append(end)
            request.num_accepted += min(1 + accepted, room) - 1
            request.first_token, request.last_token = request.token_times[0], end
            request.num_placeholders -= 1 + entry.verified if self.knobs.async_scheduling else 0
            if self.knobs.async_scheduling and request in self.running and not self.knobs.radix:
                self.cache(request, request.num_tokens - 1, len(self.steps) - 1)
            if self.knobs.num_sequences > 1:
                self.advance_group(request, end)
            if request.outputs >= min(request.output_tokens, request.max_tokens):
                request.status = COMPLETED
                if self.knobs.radix and request in self.running and request.num_computed_tokens > request.prefill_end:
                    self.pool.insert(request, min(request.num_computed_tokens, request.num_tokens))
                self.full = self.full and request not in self.running
                (self.running if request in self.running else self.waiting).remove(request)
                self.release(request)
                if self.knobs.max_concurrency:
                    self.places.append(end)
                    self.send(end)

    def check(self) -> None:
        knobs = self.knobs
        held = [block for r in self.requests for table in r.tables for block in table if block]
        assert len(set(map(id, held))) + len(self.pool.free) == len(self.pool.blocks)
        assert len(held) == sum(block.references for block in self.pool.blocks)
        assert all(block.references == 0 for block in self.pool.free)
        if knobs.radix:
            self.pool.check(self.requests)
        else:
            assert all(block.key == key for key, blocks in self.pool.cached.items() for block in blocks)
        assert all(len(table) * knobs.block_size >= r.num_computed_tokens for r in self.running for table in r.tables)
        apart = [r for r in self.waiting if r.loaded == -inf or not r.tables]
        assert all((r.num_swapped or r.num_computed_tokens == 0) and not r.tables for r in apart)
        assert sum(r.num_swapped for r in self.waiting) <= knobs.num_cpu_blocks
        assert not any(r.num_swapped for r in self.running)
        assert all(r.num_placeholders >= 0 and r.num_steps_in_flight >= 0 for r in self.requests)
        assert self.seats(self.running) <= knobs.max_num_seqs
        for held, size in zip(self.tiers.held, knobs.tier_blocks, strict=True):
            assert len(set(held)) == len(held) <= size
        alive = self.pending + self.incoming + self.waiting + self.running
        assert sorted(r.index for r in alive) == [r.index for r in self.requests if not r.status]
        busy = len(self.incoming) + len(self.waiting) + len(self.running)
        assert knobs.max_concurrency in (0, busy + len(self.places))

    def outcome(self) -> Outcome:
        assert all(r.status in (COMPLETED, REJECTED) for r in self.requests)
        for r in self.requests:
            given_up = r.reason in (GROUP_TOO_LARGE, SWAP_SPACE_FULL)
            assert given_up or r.outputs == (min(r.output_tokens, r.max_tokens) if r.status == COMPLETED else 0)
            assert r.status == REJECTED or r.arrival <= r.sent <= r.scheduled <= r.first_token <= r.last_token
            assert r.token_times == sorted(r.token_times)
        assert all(sum(n for _, n in step) <= self.knobs.max_num_batched_tokens for _, step in self.steps)
        completed = [r for r in self.requests if r.status == COMPLETED]
        changes = sorted([(r.sent, 1) for r in completed] + [(r.last_token, -1) for r in completed])
        in_system_time = population = 0
        for (time, change), (until, _) in pairwise(changes):
            population += change
            in_system_time += population * (until - time)
        assert isclose(in_system_time, sum(r.last_token - r.sent for r in completed), rel_tol=1e-9, abs_tol=1e-12)
        in_system_time += self.given_up_time
        num_preemptions = sum(r.num_preemptions for r in self.requests)
        tiers = [len(held) for held in self.tiers.held]
        steps = self.steps
        tree = []
        while self.knobs.radix and (leaf := self.pool.evict()):
            tree.append(len(leaf.blocks))
        sums = (in_system_time, self.load_time, tiers, self.block_time, self.saved_time, self.block_copies)
        return Outcome(self.requests, steps, len(steps), num_preemptions, tree, *sums)
