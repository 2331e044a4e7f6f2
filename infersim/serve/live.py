"""The fleet of a scenario in real time: requests come when they come, tokens leave when their steps end."""

import asyncio
import heapq
import math
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from infersim.cluster.prefixes import PrefixTree
from infersim.cluster.routers import Router
from infersim.cluster.signals import Signals
from infersim.config.cluster import Kind
from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.deployment import deployments_of, served_name
from infersim.engine.compiled.interface import FINISHED, PREFILL_DONE, TURNED_AWAY
from infersim.engine.compiled.state import COMPLETED, REJECTED
from infersim.engine.fleet import Fleet
from infersim.run import sites_of
from infersim.workload.acceptance import acceptance_table
from infersim.workload.draws import generator
from infersim.workload.lengths import draw_lengths
from infersim.workload.requests import Requests

from .ask import Ask, Row
from .clock import Clock
from .counts import Counts

if TYPE_CHECKING:
    from .kv_events import KvEvents

EVENTS = PREFILL_DONE | FINISHED | TURNED_AWAY
CHUNK = 4096  # draws made at a time
MANY = 10**9
PATIENCE = 0.005  # wall s of catching up before sockets have their turn


class Live:
    """A scenario's replicas, advanced with the wall's clock. InputError for what cannot be served.

    speed: simulated seconds in one of the wall's; loop: whose timers it uses, and in whose thread everything happens.
    """

    def __init__(self, scenario: Scenario, speed: float, loop: asyncio.AbstractEventLoop):
        self.scenario, self.loop = scenario, loop
        _refuse(scenario)
        self.kinds = deployments_of(scenario)
        sites = sites_of(scenario, self.kinds)
        self.specs = [spec for spec, _ in sites]
        self.fleet = Fleet(
            self.specs,
            ranks=max(deployment.parallelism.attention_data for deployment, _ in self.kinds),
            shares_text=True,
            acceptance=acceptance_table(scenario.speculation) if scenario.speculation else None,
            seed=scenario.simulation.seed,
        )
        k = len(sites)
        self.deployments = [deployment for deployment, kind in self.kinds for _ in range(kind.most)]
        self.models = [
            served_name(deployment, kind)
            for deployment, kind in self.kinds
            if isinstance(kind, Kind)
            for _ in range(kind.most)
        ]
        """what requests call the model of each replica"""
        self.fleet.advance(0.0, EVENTS)
        self.clock = Clock(speed)
        self.until = 0.0
        """to which the fleet has been advanced"""
        self.rows: list[dict[int, Row]] = [{} for _ in range(k)]
        """of each replica, by their number, what has not ended"""
        self._arrays: list[np.ndarray | None] = [None] * k
        self._seen = np.zeros(1024, "i4")
        self._last = np.zeros(1024)
        self._ends = self.fleet.replicas["last_end"].copy()
        self._outbox: list[tuple[float, int, list[tuple[Row, int, str | None]]]] = []
        self._posted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        drafts = scenario.speculation.depth if scenario.speculation else 0
        self.counts = [Counts(deployment.engine.max_model_len, drafts) for deployment in self.deployments]
        self.adapters: dict[str, str] = {}
        """LoRA adapters that were loaded: name -> path; they cost no time and no memory here"""
        self.asleep = self.refused = 0
        """sleep level of all replicas; requests that were refused because the queue was full"""
        self.down: dict[int, float] = {}
        """replicas that are not there, and when they will be (simulated s)"""
        self._outputs: list[int] = []
        self._probe = -1
        self._probe_for: Ask | None = None
        self._matched: Ask | None = None
        self._random = generator(scenario.simulation.seed, "output_tokens")
        self._sessions: dict[str, int] = {}
        self.lost_rows: list[int] = []
        self.came: dict[int, float] = {}
        """of rows that the front door held back: when their request came (simulated s)"""
        self.events: KvEvents | None = None
        """who tells what caches hold"""
        self.freed: Callable[[], None] = lambda: None
        """is told when requests have ended"""
        self.aborted = self.finished = 0
        self.pools = {name: self._router(name, sites) for name in dict.fromkeys(self.models)}

    def _router(self, model: str, sites: list) -> Router:
        members = np.array([r for r, name in enumerate(self.models) if name == model])
        spec, empty = self.scenario.cluster.router, Requests(*(np.zeros(0),) * 4)
        tree = PrefixTree(empty) if spec.policy in ("prefix-aware", "weighted") else None
        signals = Signals(self.fleet, members, False, None)
        router = Router(
            spec,
            signals,
            np.array([sites[r][1].weight for r in members]),
            0,
            self.scenario.simulation.seed,
            tree,
            None,
            [],
            self.fleet.knobs["block_size"][members],
            lambda i: self.fleet.match(self._row_of(i))[members],
            [],
        )
        router.members = members  # type: ignore[attr-defined]
        return router

    # --- what clients do ----------------------------------------------------------------------------------------------

    def output_tokens(self, most: int, least: int, exact: bool) -> int:
        """Tokens that the model generates: `most`, or as many as the scenario's workload draws, at least `least`."""
        load = self.scenario.workload
        if exact or load.output_tokens is None:
            return most
        if not self._outputs:
            self._outputs = draw_lengths(load.output_tokens, CHUNK, self._random).tolist()[::-1]
        return min(max(self._outputs.pop(), least, 1), most)

    def ready(self, replica: int) -> bool:
        """Whether a replica takes requests now."""
        if replica in self.down and self.down[replica] <= self.clock.now():
            del self.down[replica]
        return replica not in self.down

    def submit(
        self,
        ask: Ask,
        replica: int,
        push: Callable[[int, float, str | None], None],
        ids: Callable[[int, int], list[int]],
    ) -> Row:
        """A request comes to a replica now. What becomes of it is told to `push`, never before this returns."""
        fleet, time = self.fleet, self.now()
        first = fleet.num_requests
        row = self._add(ask)
        fleet.send(row, replica, time)
        assert row == first
        if ask.came is not None:
            self.came[row] = ask.came
        finish = "stop" if ask.output_tokens < ask.max_tokens else "length"
        entry = self.rows[replica][row] = Row(row, replica, push, finish, ids, ask.model, ask.salt)
        self._arrays[replica] = None
        self._wake()
        return entry

    def choose(self, ask: Ask, model: str) -> int | None:
        """The replica that infersim's own router chooses, None if none is there."""
        router = self.pools[model]
        members: np.ndarray = router.members  # type: ignore[attr-defined]
        allowed = None
        limit = self.scenario.cluster.admission
        if self.down or limit:
            full = (limit.max_outstanding if limit else None) or MANY
            allowed = np.array([self.ready(r) and len(self.rows[r]) < full for r in members.tolist()])
            if not allowed.any():
                return None
            allowed = None if allowed.all() else allowed
        self.now()
        i = len(router.prompt_tokens)
        if i >= len(router.draws):
            more = CHUNK * (1 + len(router.draws) // CHUNK)
            seed = self.scenario.simulation.seed
            router.draws = generator(seed, "router").random(more).tolist()
            router.second_draws = generator(seed, "router", "second").random(more).tolist()
        router.prompt_tokens.append(ask.prompt_tokens)
        router.sessions.append(self._session(ask.session))
        if router.index is not None:
            router.index._tree.add(list(ask.names), list(ask.lengths))
        if router.spec.policy == "kv-aware":
            self._matched = ask
        return int(members[router.choose(i, allowed)])

    def _session(self, name: str) -> int:
        if not name:
            self._sessions[""] = self._sessions.get("", 0) - 1
            return self._sessions[""]
        return self._sessions.setdefault(name, len(self._sessions))

    def _row_of(self, i: int) -> int:
        """A row like the request that the router asks about, never sent."""
        assert self._matched is not None
        if self._probe_for is not self._matched:
            self._probe, self._probe_for = self._add(self._matched), self._matched
        return self._probe

    def _add(self, ask: Ask) -> int:
        offsets = np.array([0, len(ask.names)])
        row = self.fleet.add(
            ask.prompt_tokens,
            ask.output_tokens,
            ask.max_tokens,
            1,
            segments=(offsets, ask.names, ask.lengths),
            priority=ask.priority,
        )
        if row >= len(self._seen):
            self._seen = np.concatenate([self._seen, np.zeros(len(self._seen), "i4")])
            self._last = np.concatenate([self._last, np.zeros(len(self._last))])
        return row

    def abort(self, entry: Row) -> None:
        """Its client has gone: it ends here and now, and its blocks are free."""
        if self.rows[entry.replica].pop(entry.row, None) is None:
            return
        self._arrays[entry.replica] = None
        if self.fleet.abort(entry.row, self.now()):
            self.aborted += 1
            self.counts[entry.replica].end(self.fleet.requests[entry.row], "abort")
        self.freed()
        self._wake()

    # --- faults -------------------------------------------------------------------------------------------------------

    def crash(self, replica: int, duration: float) -> int:
        """A replica forgets everything, and is back after `duration` (simulated s). Returns how many it lost."""
        time = self.now()
        self._fail(replica, time)
        lost = list(self.rows[replica].values())
        self.rows[replica].clear()
        self._arrays[replica] = None
        self.down[replica] = time + duration
        self.lost_rows += [entry.row for entry in lost]
        for entry in lost:
            self.counts[replica].end(self.fleet.requests[entry.row], "error")
            entry.push(0, time, "abort")
        self.freed()
        router = self.pools[self.models[replica]]
        router.forget(int(np.flatnonzero(router.members == replica)[0]))  # type: ignore[attr-defined]
        self._wake()
        return len(lost)

    def forget(self) -> None:
        """Prefix caches of replicas without requests are empty from now on."""
        time = self.now()
        for replica, rows in enumerate(self.rows):
            if not rows:
                self._fail(replica, time)

    def _fail(self, replica: int, time: float) -> None:
        self.fleet.fail(replica, time)
        self._ends[replica] = self.fleet.replicas["last_end"][replica]
        if self.events is not None:
            self.events.cleared(replica)

    def slow(self, replica: int, factor: float) -> None:
        """Its steps take so many times as long from the next one on."""
        self.now()
        self.fleet.slow_down(replica, factor)

    def change_speed(self, speed: float) -> None:
        """From now on."""
        self.now()
        self.clock.change(speed)
        self._wake()

    # --- time ---------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The simulated time, to which the fleet has been advanced."""
        time = max(self.clock.now(), self.until)
        self._advance(time, math.inf)
        return time

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(0, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance(self.clock.near(), monotonic() + PATIENCE)
        now = self.clock.near()
        while self._outbox and self._outbox[0][0] <= now:
            due, _, posts = heapq.heappop(self._outbox)
            for entry, n, finish in posts:
                entry.push(n, due, finish)
        due = min(self._due, self._outbox[0][0] if self._outbox else math.inf)
        if due < math.inf:
            self._timer = self.loop.call_later(self.clock.delay(due), self._tick)

    def _advance(self, time: float, deadline: float) -> None:
        """Let the fleet do, moment by moment, what is due before `time`; stop at `deadline` on the wall's clock."""
        fleet = self.fleet
        ended = fleet.advance(self.until, EVENTS)
        self._due = float(fleet.due[1])
        while len(ended) or self._due < time:
            until = min(time, math.nextafter(self._due, math.inf)) if not len(ended) else self.until
            while True:
                found = fleet.advance(until, EVENTS)
                if self.events is not None:
                    self.events.look()
                if not len(found):
                    break
                ended = np.concatenate([ended, found])
            self.until = max(until, self.until)
            self._due = float(fleet.due[1])
            self._collect(ended)
            ended = ended[:0]
            if monotonic() > deadline:
                return
        self.until = max(self.until, time)

    def _collect(self, ended: np.ndarray) -> None:
        """Post the tokens of the steps that have ended, and what has become of requests."""
        fleet = self.fleet
        requests, ends = fleet.requests, fleet.replicas["last_end"]
        changed = np.flatnonzero(ends != self._ends).tolist()
        gone = {int(row) for row in ended["request"][ended["kind"] != PREFILL_DONE]}
        for r in changed:
            self._ends[r] = ends[r]
            self._post(r, float(ends[r]), gone)
        for row in gone:  # turned away, or given up
            replica = int(requests["replica"][row])
            entry = self.rows[replica].pop(row, None)
            if entry is not None:
                self._arrays[replica] = None
                self.counts[replica].end(requests[row], "error")
                self._push(self.until, [(entry, 0, "rejected")])
        if len(ended):
            self.freed()

    def array(self, r: int) -> np.ndarray:
        """i8[n]: `rows` of a replica."""
        rows = self._arrays[r]
        if rows is None:
            rows = self._arrays[r] = np.fromiter(self.rows[r], "i8", len(self.rows[r]))
        return rows

    def _post(self, r: int, end: float, gone: set[int]) -> None:
        rows, requests = self.array(r), self.fleet.requests
        total = requests["num_output_tokens"][rows]
        new = total - self._seen[rows]
        here = np.flatnonzero(new)
        if not len(here):
            return
        rows, new = rows[here], new[here]
        self._seen[rows] = total[here]
        begun = new == total[here]
        last, self._last[rows] = self._last[rows], end
        arrival = requests["sent"][rows]
        scheduled = int(self.fleet.replicas["num_scheduled_tokens"][r])
        self.counts[r].step(new, begun, scheduled, (end - last)[~begun], (end - arrival)[begun])
        mine, posts = self.rows[r], list[tuple[Row, int, str | None]]()
        for row, n in zip(rows.tolist(), new.tolist(), strict=True):
            if row in gone and requests["status"][row] == COMPLETED:
                gone.discard(row)
                entry = mine.pop(row)
                self._arrays[r] = None
                self.finished += 1
                self.counts[r].end(requests[row], entry.last)
                posts.append((entry, n, entry.last))
            else:
                posts.append((mine[row], n, None))
        self._push(end, posts)

    def _push(self, due: float, posts: list[tuple[Row, int, str | None]]) -> None:
        self._posted += 1
        heapq.heappush(self._outbox, (due, self._posted, posts))

    # --- how it is ----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(map(len, self.rows))

    def kv_usage(self, replica: int) -> float:
        """Share of a replica's KV blocks that are held."""
        ranks = int(self.fleet.call["ranks"][0])
        free = self.fleet.schedulers["free_blocks"][replica * ranks : (replica + 1) * ranks].sum()
        return 1.0 - float(free) / (
            int(self.fleet.knobs["ranks"][replica]) * (int(self.fleet.knobs["num_gpu_blocks"][replica]) - 1)
        )

    def queues(self, replica: int) -> tuple[int, int]:
        """Requests that run and requests that wait."""
        ranks = int(self.fleet.call["ranks"][0])
        mine = self.fleet.schedulers[replica * ranks : (replica + 1) * ranks]
        return int(mine["num_running"].sum()), int(mine["num_waiting"].sum())

    def reason(self, row: int) -> int:
        """Why a request was rejected (engine.compiled.state.REJECTION_REASONS), 0 if it was not."""
        rejected = self.fleet.requests["status"][row] == REJECTED
        return int(self.fleet.requests["reason"][row]) if rejected else 0


def _refuse(scenario: Scenario) -> None:
    """InputError for what only a run can have."""
    cluster, problems = scenario.cluster, []
    for name in ("prefill", "encode", "autoscaler"):
        if getattr(cluster, name) is not None:
            problems.append(f"cluster.{name}: is not served; must be left out, or use `infersim run`")
    if cluster.admission and cluster.admission.refuses:
        problems.append(
            "cluster.admission: max_num_queued_reqs and max_num_queued_tokens are not served; leave them out"
        )
    if cluster.failures:
        problems.append("cluster.failures: are not served; must be left out: POST /simulate/crash and /simulate/slow")
    if any(kind.autoscaler for kind in cluster.kinds or ()):
        problems.append("cluster.kinds: autoscaler is not served; must be left out")
    if scenario.workload.n > 1 or scenario.workload.beam_width > 1:
        problems.append("workload.n, beam_width: are not served; must be 1: clients ask for n")
    if cluster.router.signal_age:
        problems.append("cluster.router.signal_age: is not served; must be 0")
    if scenario.engine.stream_interval or scenario.engine.stream_first_token is False:
        problems.append("engine.stream_interval, stream_first_token: are not served; must be left out")
    if problems:
        raise InputError(problems)
