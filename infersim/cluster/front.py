"""The front door of a cluster: requests arrive, a router sends each to a replica, clients learn what became of it."""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..config.cluster import Cluster
from ..engine.compiled.interface import FINISHED
from ..engine.compiled.state import (
    COMPLETED,
    LOST,
    OVER_MAX_MODEL_LEN,
    PENDING,
    PROMPT_TOO_LONG,
    QUEUE_FULL,
    REJECTED,
    TIMED_OUT,
)
from ..engine.fleet import Fleet
from ..workload.requests import Requests
from .clients import Clients, columns_beside
from .clock import Clock
from .door import Looker
from .encode import Encode
from .following import Following
from .link import Link
from .pool import Pool
from .pools import Pools
from .prefixes import PrefixTree
from .site import Site
from .store import Store


class Front:
    """One run of requests through replicas that a router chooses among, request by request.

    Row i of the fleet is request i, until it is tried again. What happens is written into public columns of n requests;
    `pools` are the replicas that answer, a pool for each model.
    """

    def __init__(
        self,
        spec: Cluster,
        fleet: Fleet,
        sites: list[Site],
        requests: Requests,
        clients: Clients,
        seed: int,
        adapters: list[str] | None = None,
    ):
        n = len(requests)
        self.spec, self.fleet, self.sites, self.clients = spec, fleet, sites, clients
        self.clock = Clock(fleet)
        self.requests, self.seed = requests, seed
        self.arrived = requests.arrival.copy()
        """f8[n]: when each came to be, which of a request that follows another shows only in the run"""
        self.sent = np.full(n, -1.0)
        """f8[n]: when its client sent it first"""
        self.outcome = np.zeros(n, "i1")
        """i1[n]: COMPLETED, REJECTED, TIMED_OUT or LOST, in the end"""
        self.attempts = np.zeros(n, "i4")
        self.entered = np.zeros(n)
        """f8[n]: when each came to the front door last"""
        self.held_back = np.zeros(n)
        """f8[n], s: how long each stood at the front door, in its last attempt"""
        self.row = list(range(n))
        """the fleet's row of each: of its last attempt, and of the replica that answers"""
        self.owner: dict[int, int] = {}
        """the request of each row that is not its number"""
        self.end = 0.0
        """when the last one ended"""
        self.left = n
        """requests that have not ended"""
        self.link_busy = 0.0
        """seconds in which the link had something to send, until a request ended last"""
        self.ended: list[int] = []
        """requests in the order of their ends"""
        self.token = [0] * n
        """what a process must still find when it comes back to a request: another attempt has another"""
        self.trying: set[int] = set()
        """requests whose attempt goes on: neither ended nor to be tried again"""
        self.refused: set[int] = set()
        """requests whose last attempt found the queue full"""
        columns = (requests.prompt_tokens, requests.output_tokens, clients.max_tokens, n)
        fleet.add(*columns, **columns_beside(requests, clients))

        self.following = Following(requests)
        self.priority = [0] * n if clients.priority is None else clients.priority.tolist()

        self.open = 0
        self.unsent: deque[int] = deque()
        """requests that wait for a place under max_concurrency"""
        self.order = 0
        self.made = Pools(spec, fleet, sites, requests, self.row, self.clock, seed, adapters)
        self.pools, self.home, self.slots = self.made.answering, self.made.home, self.made.slots
        self.adapters = self.made.adapters
        tree = self.made.tree or (PrefixTree(requests) if spec.kv_store else None)
        self.store = Store(spec.kv_store, fleet, sites, tree) if spec.kv_store and tree else None
        longest = np.array([fleet.knobs["max_model_len"][pool.members].min() for pool in self.pools])[self.made.which]
        prompt = requests.prompt_tokens
        too_long = np.where(prompt.astype("i8") + clients.max_tokens > longest, OVER_MAX_MODEL_LEN, 0)
        self.turned_away = np.where(prompt >= longest, PROMPT_TOO_LONG, too_long).tolist()
        """i1[n]: why a request cannot be served at all, or 0"""
        self.link = Link(self.clock, spec.transfer.bandwidth) if spec.transfer else None
        self.encode: Encode | None = None
        """the replicas that encode images, before the pools that answer"""
        if spec.encode and spec.transfer and self.link:
            self.encode = Encode(spec.encode, spec.transfer.latency, self.made, self.link, self)
        self.watched = bool(
            self.following or clients.max_concurrency or clients.timeout or spec.interacts or adapters is not None
        )
        """whether what becomes of requests changes what happens next"""

    def rows_of(self, pool: Pool) -> np.ndarray:
        """bool[n]: requests that come by this pool."""
        if self.encode and pool is self.encode.pool:
            return np.array(self.encode.images) > 0
        return np.array(self.made.which) == self.pools.index(pool)

    def ended_of(self, looker: Looker) -> tuple[np.ndarray, np.ndarray]:
        """state.REQUEST[m] of a looker's requests that have ended since it last asked, and when they were sent (s)."""
        ended = [i for i in self.ended[looker.ended_before :] if looker.mine[i]]
        looker.ended_before = len(self.ended)
        return self.fleet.requests[[self.row[i] for i in ended]], self.sent[ended]

    # --- clients ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Requests arrive from now on."""
        self.clock.process(self._arrivals())

    def play(self, look: Callable[[], None]) -> None:
        """To the end of the run. What can never be served is lost."""
        self.clock.play(FINISHED if self.watched else 0, self._finished, look)
        if self.watched:
            for i in np.flatnonzero(self.outcome == 0).tolist():
                self.withdraw(i, self.clock.now)
                self.outcome[i] = LOST

    def _arrivals(self):
        clock, now = self.clock, -1.0
        arrival = self.arrived.tolist()
        for count, i in enumerate(self.following.first):
            time = arrival[i]
            if time > now:
                if count & 1023 == 0 or not clock.pass_to(time):  # now and then somebody looks
                    yield clock.at(time)
                now = time
            self._arrive(i, time)

    def _arrive(self, i: int, time: float) -> None:
        if not self.watched:  # nothing can come between
            self.attempts[i] = 1
            self.sent[i] = time
            self.fleet.send(i, self.made.of(i).choose(i, None), time)
            return
        self.arrived[i] = time
        self.unsent.append(i)
        self._open(time)

    def _open(self, time: float) -> None:
        """Clients send what they may."""
        while self.unsent and not 0 < self.clients.max_concurrency <= self.open:
            i = self.unsent.popleft()
            self.open += 1
            self.sent[i] = sent = max(time, self.arrived[i])  # a step's end is told when the host comes to look
            self._try(i, sent)

    def _try(self, i: int, time: float) -> None:
        """One attempt of a client."""
        self.attempts[i] += 1
        self.trying.add(i)
        self.token[i] = token = self.token[i] + 1
        if self.attempts[i] > 1:
            self.row[i] = self.fleet.add_like(i)
            self.owner[self.row[i]] = i
        if self.clients.timeout:
            self.clock.call_at(time + self.clients.timeout, lambda: self._give_up(i, token))
        if self.turned_away[i]:
            self.fleet.requests["reason"][self.row[i]] = self.turned_away[i]
            self._end(i, REJECTED, time)
            return
        if self.encode and self.encode.images[i]:
            self.encode.begin(i, time)
        else:
            self.enter(i, time)

    def enter(self, i: int, time: float) -> None:
        """Request i stands at the front door."""
        self.order += 1
        self.entered[i] = time
        pool, admission = self.made.of(i), self.spec.admission
        pool.queue.push(i, self.priority[i], self.order)
        self.admit(pool, time)
        if admission and admission.max_queue is not None and len(pool.queue) > admission.max_queue:
            refused = pool.queue.last()
            pool.queue.remove(refused)
            self.token[refused] += 1
            self.refused.add(refused)
            self._fail(refused, REJECTED, time)

    def is_current(self, i: int, token: int) -> bool:
        """Whether the attempt that had this token still goes on."""
        return self.token[i] == token and not self.outcome[i]

    def _give_up(self, i: int, token: int) -> None:
        if self.is_current(i, token):
            self.withdraw(i, self.clock.now)
            self._fail(i, TIMED_OUT, self.clock.now)
            self.admit(self.made.of(i), self.clock.now)

    def lose(self, i: int, time: float) -> None:
        """Request i's attempt has been lost."""
        self.withdraw(i, time)
        self._fail(i, LOST, time)

    def _fail(self, i: int, outcome: int, time: float) -> None:
        """An attempt has failed: the client tries again, or that was its last."""
        self.trying.discard(i)
        if self.attempts[i] <= self.clients.retries:
            attempt = int(self.attempts[i])
            wait = math.ldexp(self.clients.backoff, attempt - 1)
            self.clock.call_at(time + wait, lambda: self._try(i, time + wait))
        else:
            self._end(i, outcome, time)

    def _end(self, i: int, outcome: int, time: float) -> None:
        """The client knows what became of request i; what follows it comes after its delay."""
        self.outcome[i] = outcome
        if self.store and outcome == COMPLETED:
            self.store.index.add(i, 0)
        self.ended.append(i)
        self.end = max(self.end, time)
        self.left -= 1
        self.open -= 1
        self.link_busy = self.link.busy if self.link else 0.0
        for follower, at in self.following.after(i, time):
            self.clock.call_at(at, partial(self._arrive, follower, at))
        if self.unsent:
            self.clock.call_at(time, lambda: self._open(time))

    # --- the front door -----------------------------------------------------------------------------------------------

    def admit(self, pool: Pool, time: float) -> None:
        """Send on what waits at the front door for a pool, as far as there are replicas for it."""
        while pool.queue:
            allowed = pool.allowed()
            if allowed is not None and not allowed.any():
                if not pool.ready().any():
                    any(wake() for wake in pool.wakers)
                return
            i = pool.queue.first()
            pool.queue.remove(i)
            at = max(time, self.entered[i])  # a step's end is told when the host comes to look
            self.held_back[i] = at - self.entered[i]
            self.dispatch(i, allowed, at)

    def dispatch(self, i: int, allowed: np.ndarray | None, time: float) -> None:
        """A replica gets request i, or refuses it."""
        pool = self.made.of(i)
        replica = pool.choose(i, allowed)
        if self.spec.admission and pool.refuses(replica, self.spec.admission, self.row):
            pool.take_back(replica)
            self.token[i] += 1
            self.refused.add(i)
            self._fail(i, REJECTED, time)
        else:
            self.deliver(i, self.row[i], replica, time)

    def deliver(self, i: int, row: int, replica: int, time: float) -> None:
        """A replica gets a row of request i, as soon as it has the adapter that it needs."""
        if self.store:
            self.store.look_up(i, row)
        if self.slots is not None and (adapter := self.adapters[i]):
            self.slots.deliver(row, adapter, replica, lambda: self.fleet.send(row, replica, self.clock.now))
        else:
            self.fleet.send(row, replica, time)

    def withdraw(self, i: int, time: float) -> None:
        """Request i's attempt ends here and now, wherever it is."""
        row = self.row[i]
        self.token[i] += 1
        self.made.of(i).queue.remove(i)
        if self.encode:
            self.encode.withdraw(i, time)
        if self.fleet.requests["replica"][row] >= 0:
            self.abort(row, time)

    def abort(self, row: int, time: float) -> None:
        """A row ends here and now, wherever it is."""
        self.fleet.abort(row, time)
        if self.slots is not None:
            self.slots.leave(row)

    def fail_replica(self, replica: int, time: float) -> None:
        """A replica dies: what it was doing is lost, and tried again by clients that do."""
        rows = self.fleet.fail(replica, time)
        owners = {self.owner.get(row, row) for row in rows if self.goes_on(row)}
        lost = sorted(i for i in owners if i in self.trying and not self.outcome[i])
        for i in lost:
            self.token[i] += 1  # nobody waits for them any more
        for i in lost:
            self.lose(i, time)
        for pool in self.pools:
            self.admit(pool, time)

    def goes_on(self, row: int) -> bool:
        """Whether a row is of its request's last attempt."""
        i = self.owner.get(row, row)
        return row == self.row[i] or bool(self.encode and row in self.encode.rows[i])

    def may_end(self, gone: set[int]) -> bool:
        """Whether there is a request left whose pools are not all among the replicas that are gone for ever."""
        left = self.outcome == 0
        for pool in self.all_pools:
            if gone.issuperset(pool.members) and self.needs(pool):
                left &= ~self.rows_of(pool)
        return bool(left.any())

    def needs(self, pool: Pool) -> bool:
        """Whether requests that come by this pool cannot do without."""
        return True

    def cut(self, is_cut: bool, for_ever: bool) -> None:
        """The link between the pools breaks, or is whole again."""
        if self.link and self.spec.transfer:
            self.link.set_bandwidth(0.0 if is_cut else self.spec.transfer.bandwidth)

    def _finished(self, _: float, row: int, kind: int) -> None:
        i = self.owner.get(row, row)
        given_up = self.fleet.requests["status"][row] == REJECTED
        # the clock may be later: the engine was busy
        time = self.clock.now if given_up else float(self.fleet.requests["last_token"][row])
        if self.slots is not None:
            self.slots.leave(row)
        if self.encode and row in self.encode.request_of:
            self.encode.finished(i, row)
        elif not self.handed_over(i, row, time):
            if time > self.clock.now:  # the API server has yet to send the last token, and may come too late
                token = self.token[i]
                self.clock.call_at(time, lambda: self._answered(i, token, time))
                return
            self._end(i, REJECTED if given_up else COMPLETED, time)
        self.drain()
        self.admit(self.made.of(i), time)

    def _answered(self, i: int, token: int, time: float) -> None:
        if self.is_current(i, token):
            self._end(i, COMPLETED, time)
        self.drain()
        self.admit(self.made.of(i), time)

    def handed_over(self, i: int, row: int, time: float) -> bool:
        """Whether the end of this row is not the end of the request."""
        return False

    def drain(self) -> None:
        """Replicas that were only to finish their requests go when they have."""
        for pool in self.all_pools:
            pool.drain(self.clock.now)

    @property
    def all_pools(self) -> list[Pool]:
        """Those too that do not answer."""
        return [*self.pools, self.encode.pool] if self.encode else self.pools

    # --- what is left of it -------------------------------------------------------------------------------------------

    def records(self) -> np.ndarray:
        """engine.state.REQUEST[n]: each request's last attempt, from when its client sent it first."""
        records = self.fleet.requests[self.row].copy()
        records["arrival"] = self.arrived
        if self.watched:
            records["sent"] = np.where(self.attempts > 0, self.sent, records["sent"])
            ended = self.outcome > 0
            records["status"][ended] = self.outcome[ended]
            records["status"][~ended] = PENDING
            for i in self.refused:
                if self.outcome[i] == REJECTED:
                    records["reason"][i] = QUEUE_FULL
        return records

    def columns(self) -> dict[str, np.ndarray]:
        """What requests.csv says of each request beside its record."""
        columns = {"attempts": self.attempts, "front_door_ms": self.held_back * 1e3}
        columns |= self.encode.columns() if self.encode else {}
        return columns | (self.slots.columns(self.row) if self.slots else {})

    def route(self, end: float) -> dict[str, Any]:
        """How requests found their replicas, JSON-ready."""
        figures: dict[str, Any] = {"policy": self.pools[0].router.spec.policy}
        if self.link:
            figures["link_busy_share"] = self.link_busy / end if end > 0 else None
        figures |= self.encode.figures() if self.encode else {}
        return figures | (self.slots.figures() if self.slots else {})
