"""The fleet of a scenario in real time: requests come when they come, tokens leave when their steps end."""

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import numpy as np

from infersim.cluster.clock import Clock as Processes
from infersim.cluster.pool import READY
from infersim.cluster.routers import Router
from infersim.config.cluster import Kind
from infersim.config.scenario import Scenario
from infersim.deployment import deployments_of, served_name
from infersim.engine.compiled.interface import FINISHED, PREFILL_DONE, TURNED_AWAY
from infersim.engine.compiled.state import ABORTED, COMPLETED, REJECTED
from infersim.engine.fleet import Fleet
from infersim.run import sites_of
from infersim.workload.acceptance import acceptance_table

from .ask import NOTE, UNSEEN, Ask, Ids, Push, Row, Watcher
from .clock import Clock
from .counts import Counts
from .door import Door
from .hand_over import HandOver
from .on_disk import OnDisk
from .refused import refuse
from .roster import Roster

EVENTS = PREFILL_DONE | FINISHED | TURNED_AWAY
MANY = 10**9
PATIENCE = 0.005  # wall s of catching up before sockets have their turn


class Live:
    """A scenario's replicas, advanced with the wall's clock. InputError for what cannot be served.

    speed: simulated seconds in one of the wall's; loop: whose timers it uses, and in whose thread everything happens.
    """

    def __init__(self, scenario: Scenario, speed: float, loop: asyncio.AbstractEventLoop):
        self.scenario, self.loop = scenario, loop
        refuse(scenario)
        grow = OnDisk()
        self.kinds = deployments_of(scenario)
        sites = sites_of(scenario, self.kinds)
        self.specs, places = [spec for spec, _ in sites], [site for _, site in sites]
        self.fleet = Fleet(
            self.specs,
            ranks=max(deployment.parallelism.attention_data for deployment, _ in self.kinds),
            shares_text=True,
            acceptance=acceptance_table(scenario.speculation) if scenario.speculation else None,
            seed=scenario.simulation.seed,
            grow=grow,
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
        self._grow, self.notes = grow, np.zeros(0, NOTE)
        """NOTE[n] of the fleet's rows"""
        self._ends = self.fleet.replicas["last_end"].copy()
        self._outbox: list[tuple[float, int, list[tuple[Row, int, str | None]]]] = []
        self._posted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        drafts = scenario.speculation.depth if scenario.speculation else 0
        self.counts = [Counts(deployment.engine.max_model_len, drafts) for deployment in self.deployments]
        self.adapters: dict[str, str] = {}
        """LoRA adapters that were loaded: name -> path; they cost no time and no memory here"""
        self.asleep = 0
        """sleep level of all replicas"""
        self.events: Watcher | None = None
        """who tells what caches hold"""
        self.freed: Callable[[], None] = lambda: None
        """is told when requests have ended"""
        self.aborted = self.finished = 0
        self.processes = Processes(self.fleet)
        """what happens between replicas"""
        self.door = Door(scenario, self.processes, self.models, places, self.rows, self._add)
        cluster = scenario.cluster
        transfer = cluster.transfer if self.door.prefill else None
        self.hand_over: HandOver | None = None
        if transfer:
            self.hand_over = HandOver(self.fleet, self.processes, transfer, places, self.counts)
        self.roster = Roster(self, places)
        if cluster.failures or self.roster.scalers:
            self._wake()

    # --- what clients do ----------------------------------------------------------------------------------------------

    def ready(self, replica: int) -> bool:
        """Whether a replica takes requests now."""
        return self.roster.state(replica) == READY

    def submit(self, ask: Ask, replica: int, push: Push, ids: Ids) -> Row:
        """A request comes to a replica at `until`. What becomes of it is told to `push`, never before this returns."""
        finish = "stop" if ask.output_tokens < ask.max_tokens else "length"
        entry = Row(-1, replica, push, finish, ids, ask.model, ask.salt, self.until)
        self._begin(entry, ask, replica)
        return entry

    def relay(self, ask: Ask, replica: int, push: Push, ids: Ids) -> Row:
        """The same, of which this replica only computes the prompt; another, which the router chooses then, answers."""
        kept = self.hand_over
        assert kept is not None

        def computed(n: int, due: float, finish: str | None) -> None:
            if finish not in ("stop", "length"):
                push(n, due, finish)
                return
            kept.keep(f"#{entry.row}", entry.row)
            there = self.choose(ask)
            if there is None:
                kept.drop(f"#{entry.row}")
                push(0, due, "abort")
                return
            entry.push, entry.at_once, entry.last = push, False, last
            self._begin(entry, replace(ask, pull=f"#{entry.row}", came=ask.came or entry.asked), there)

        only = replace(ask, output_tokens=1, max_tokens=1, hold=True, came=None, row=-1)
        entry = self.submit(only, replica, computed, ids)
        last = "stop" if ask.output_tokens < ask.max_tokens else "length"
        entry.at_once = True
        return entry

    def _begin(self, entry: Row, ask: Ask, replica: int) -> None:
        """A row of the fleet for it, sent there; or when its prompt has come, if that is pulled."""
        fleet, row = self.fleet, self._add(ask) if ask.row < 0 else ask.row
        fleet.requests["hold"][row] = ask.hold
        self.notes["asked"][row] = self.until
        if ask.pull is not None and self.hand_over is not None:
            self.notes["came"][row] = self.until
            self.notes["source"][row] = self.hand_over.pull(ask.pull, row, replica)
            self.processes.reach(self.until)
        else:
            self.door.look_up(ask, row)
            fleet.send(row, replica, self.until)
            if ask.rank is not None:
                fleet.requests["rank"][row] = ask.rank
        entry.text = (ask.names, ask.lengths) if self.door.store and not ask.hold else None
        if ask.came is not None:
            self.notes["came"][row] = ask.came
        entry.row, entry.replica = row, replica
        self.rows[replica][row] = entry
        self.door.wake()
        self._arrays[replica] = None
        self._wake()

    def choose(self, ask: Ask, prefill: bool = False) -> int | None:
        """The replica that infersim's own router chooses, to answer or to compute the prompt; None if none is there."""
        router = self.door.prefill if prefill else self.door.pools[ask.base]
        assert router is not None
        members, allowed = self.door.members[router], self._allowed(router)
        if allowed is not None and not allowed.any():
            self.roster.wake(int(members[0]))
            return None
        return int(members[self.door.choose(router, ask, allowed)])

    def hands_over(self, ask: Ask) -> bool:
        """Whether a prefill replica is to compute its prompt."""
        return self.door.hands_over(ask, self._allowed(self.door.pools[ask.base]))

    def _allowed(self, router: Router) -> np.ndarray | None:
        """bool[k]: to which of its replicas a router may send a request; None: to all."""
        limit = self.scenario.cluster.admission
        if not limit and self.roster.complete:
            return None
        full = (limit.max_outstanding if limit and router is not self.door.prefill else None) or MANY
        allowed = np.array([self.ready(r) and len(self.rows[r]) < full for r in self.door.members[router].tolist()])
        return None if allowed.all() else allowed

    def _add(self, ask: Ask) -> int:
        row = self.fleet.add(
            ask.prompt_tokens,
            ask.output_tokens,
            ask.max_tokens,
            1,
            segments=(0, len(ask.names), ask.names, ask.lengths),
            priority=ask.priority,
        )
        self.notes = self._grow(self.notes, row, row + 1)
        self.notes[row] = UNSEEN
        return row

    def abort(self, entry: Row) -> None:
        """Its client has gone: it ends here and now, and its blocks are free."""
        if self.rows[entry.replica].pop(entry.row, None) is None:
            return
        self._arrays[entry.replica] = None
        time, record = self.now(), self.fleet.requests[entry.row]
        if self.hand_over is not None and self.hand_over.leave(entry.row):
            record["replica"], record["status"] = entry.replica, ABORTED
            self.aborted += 1
        elif self.fleet.abort(entry.row, time):
            self.aborted += 1
            self.counts[entry.replica].end(record, "abort", self.asked(entry.row))
        self._freed()
        self._wake()

    def _freed(self) -> None:
        """Requests have ended: others may begin."""
        if self.hand_over is not None:
            self.hand_over.freed()
            self.processes.reach(self.until)
        self.roster.settle()
        self.freed()

    def _happen(self) -> None:
        """What is due between replicas by `until`."""
        self.processes.reach(self.until)
        if self.roster.changed:
            self.roster.changed = False
            self._freed()

    def asked(self, row: int) -> float:
        """When a request came to its replica (simulated s)."""
        return float(self.notes["asked"][row])

    # --- what happens to it -------------------------------------------------------------------------------------------

    def crash(self, replica: int, duration: float) -> int:
        """A replica forgets everything, and is back after `duration` (simulated s). Returns how many it lost."""
        self.now()
        number = len(self.rows[replica])
        self.roster.crash(replica, duration)
        self._happen()
        self._wake()
        return number

    def drop(self, entry: Row) -> None:
        """A row is no more."""
        del self.rows[entry.replica][entry.row]
        self._arrays[entry.replica] = None

    def empty(self, replica: int) -> None:
        """A replica has no rows any more."""
        self.rows[replica].clear()
        self._arrays[replica] = None

    def cleared(self, replica: int) -> None:
        """A replica has forgotten everything: what it was doing did not end."""
        self._ends[replica] = self.fleet.replicas["last_end"][replica]
        if self.events is not None:
            self.events.cleared(replica)

    def change_speed(self, speed: float) -> None:
        """From now on."""
        self.now()
        self.clock.change(speed)
        self._wake()

    # --- time ---------------------------------------------------------------------------------------------------------

    def now(self, time: float | None = None) -> float:
        """The simulated time, or one that was it, to which the fleet has been advanced; later if it was already."""
        time = max(self.clock.now() if time is None else time, self.until)
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
        due = min(self._due, self.processes.peek(), self._outbox[0][0] if self._outbox else math.inf)
        if due < math.inf:
            self._timer = self.loop.call_later(self.clock.delay(due), self._tick)

    def _advance(self, time: float, deadline: float) -> None:
        """Let the fleet do, moment by moment, what is due before `time`; stop at `deadline` on the wall's clock."""
        fleet, processes = self.fleet, self.processes
        ended = fleet.advance(self.until, EVENTS)
        while True:
            self._due = float(fleet.due[1])
            if not len(ended) and self._due >= time and processes.peek() > time:
                break
            until = self.until
            if not len(ended):
                until = max(until, min(time, math.nextafter(self._due, math.inf), processes.peek()))
            while True:
                found = fleet.advance(until, EVENTS)
                if self.events is not None:
                    self.events.look()
                if not len(found):
                    break
                ended = np.concatenate([ended, found])
            self.until = until
            self._happen()
            self._collect(ended)
            ended = fleet.advance(until, EVENTS) if self.hand_over else ended[:0]  # what was sent meanwhile is due
            if not len(ended) and monotonic() > deadline:
                return
        self.until = max(self.until, time)
        self._happen()

    def _collect(self, ended: np.ndarray) -> None:
        """Post the tokens of the steps that have ended, and what has become of requests."""
        fleet = self.fleet
        requests, ends = fleet.requests, fleet.replicas["last_end"]
        gone = set(ended["request"][ended["kind"] != PREFILL_DONE].tolist()) if len(ended) else set[int]()
        for r in np.flatnonzero(ends != self._ends).tolist():
            self._ends[r] = ends[r]
            self._post(r, float(ends[r]), gone)
        for row in gone:  # turned away, or given up
            replica = int(requests["replica"][row])
            entry = self.rows[replica].pop(row, None)
            if entry is not None:
                self._arrays[replica] = None
                self.counts[replica].end(requests[row], "error", self.asked(row))
                self._push(self.until, [(entry, 0, "rejected")])
        if len(ended):
            self._freed()

    def array(self, r: int) -> np.ndarray:
        """i8[n]: `rows` of a replica."""
        rows = self._arrays[r]
        if rows is None:
            rows = self._arrays[r] = np.fromiter(self.rows[r], "i8", len(self.rows[r]))
        return rows

    def _post(self, r: int, end: float, gone: set[int]) -> None:
        rows, requests, notes = self.array(r), self.fleet.requests, self.notes
        total = requests["num_output_tokens"][rows]
        new = total - notes["seen"][rows]
        if not new.all():
            here = np.flatnonzero(new)
            rows, new, total = rows[here], new[here], total[here]
        if not len(rows):
            return
        notes["seen"][rows] = total
        before, notes["last"][rows] = notes["last"][rows], end
        begun = new == total
        first = begun if begun.any() else None
        if first is not None:
            before[first] = notes["asked"][rows[first]]
        self.counts[r].step(new, first, int(self.fleet.replicas["num_scheduled_tokens"][r]), end - before)
        mine, posts = self.rows[r], list[tuple[Row, int, str | None]]()
        for row, n in zip(rows.tolist(), new.tolist(), strict=True):
            if gone and row in gone and requests["status"][row] == COMPLETED:
                gone.discard(row)
                entry = mine.pop(row)
                self._arrays[r] = None
                self.finished += 1
                self.roster.ended(row, r)
                self.door.keep(entry.text, float(requests["last_token"][row]))
                self.counts[r].end(requests[row], entry.last, self.asked(row), bool(notes["source"][row] >= 0))
                posts.append((entry, n, entry.last))
            else:
                posts.append((mine[row], n, None))
        self._push(end, [post for post in posts if not post[0].at_once] if self.hand_over else posts)
        for entry, n, finish in posts if self.hand_over else ():
            if entry.at_once:
                entry.push(n, end, finish)

    def _push(self, due: float, posts: list[tuple[Row, int, str | None]]) -> None:
        self._posted += 1
        heapq.heappush(self._outbox, (due, self._posted, posts))

    # --- how it is ----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return sum(map(len, self.rows))

    def reason(self, row: int) -> int:
        """Why a request was rejected (engine.compiled.state.REJECTION_REASONS), 0 if it was not."""
        rejected = self.fleet.requests["status"][row] == REJECTED
        return int(self.fleet.requests["reason"][row]) if rejected else 0
