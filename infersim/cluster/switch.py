"""Replicas change their pool while the run goes on, as the load asks: who computed prompts generates, and back.

A switch is SGLang's (0.5.23, --enable-pd-role-switch): a replica is sent nothing more, finishes what it has, gives its
prefix cache up and goes on in the other pool with the same weights and the same memory. When to switch is what Dynamo's
load-based planner says of a fixed number of GPUs: one pool is above its upper threshold and the other below its lower.
"""

import numpy as np

from ..config.cluster import RoleSwitch as Spec
from .front import Front
from .pool import DRAINING, OFF, READY, STARTING, Pool


class RoleSwitch:
    """Looks at both pools every `interval`; one replica at a time is on its way, and none leaves its pool empty.

    Both pools have all replicas as members; each is there in one of them.
    """

    def __init__(self, spec: Spec, front: Front, decode: Pool, prefill: Pool, ranges: list[range]):
        self.spec, self.front, self.decode, self.prefill = spec, front, decode, prefill
        for pool, others in ((decode, ranges[1]), (prefill, ranges[0])):
            for replica in others:
                pool.become(replica, OFF, 0.0)
        self.giver, self.taker = decode, prefill
        """whom it leaves, and where it goes"""
        self.replica = -1
        """who is on its way, -1: nobody"""
        self.began = 0.0
        self.drains: list[float] = []
        """s from each decision until the replica had finished its requests"""
        self.roles: list[tuple[float, int, int]] = [(0.0, len(ranges[0]), len(ranges[1]))]
        """(s, replicas that decode and that prefill from then on)"""
        self.to_decode = self.to_prefill = 0

    def run(self):
        """A simpy process."""
        clock, k = self.front.clock, 0
        while self.front.left:
            k += 1
            yield clock.watch(k * self.spec.interval)
            if self.front.left and self.replica < 0:
                self._look()

    def _look(self) -> None:
        spec, decode, prefill = self.spec, self.decode, self.prefill
        usage = float(decode.router.signals.kv_usage[decode.ready()].mean())
        queue = float(prefill.router.signals.waiting[prefill.ready()].mean())
        if queue > spec.prefill_queue_scale_up_threshold and usage < spec.decode_kv_scale_down_threshold:
            self.giver, self.taker = decode, prefill
        elif usage > spec.decode_kv_scale_up_threshold and queue < spec.prefill_queue_scale_down_threshold:
            self.giver, self.taker = prefill, decode
        else:
            return
        ready = np.flatnonzero(self.giver.ready())
        if len(ready) > 1:
            held = self.front.fleet.replicas["num_reserved"][self.giver.members]  # prompts that wait for room there
            idlest = ready[(self.giver.router.signals.in_flight + held)[ready].argmin()]
            self.replica, self.began = self.giver.members[idlest], self.front.clock.now
            self.giver.become(self.replica, DRAINING, self.began)
            self._note()
            self.front.drain()

    def go_on(self) -> None:
        """The replica that is on its way may have finished its requests."""
        if self.replica < 0 or self.giver.state[place := self.giver.place[self.replica]] != OFF:
            return
        if self.taker.state[place] == OFF:
            now = self.front.clock.now
            self.drains.append(now - self.began)
            self.taker.become(self.replica, STARTING, now)
            self.taker.router.signals.join(place)
            self.front.clock.call_at(now + self.spec.switch_time, self._ready)

    def _ready(self) -> None:
        now = self.front.clock.now
        self.taker.become(self.replica, READY, now)
        self.to_decode += self.taker is self.decode
        self.to_prefill += self.taker is self.prefill
        self.replica = -1
        self._note()
        self.front.admit(self.decode, now)

    def _note(self) -> None:
        decode, prefill = int(self.decode.ready().sum()), int(self.prefill.ready().sum())
        self.roles.append((self.front.clock.now, decode, prefill))

    def figures(self) -> dict:
        """JSON-ready."""
        return {
            "to_decode": self.to_decode,
            "to_prefill": self.to_prefill,
            "mean_drain_s": float(np.mean(self.drains)) if self.drains else None,
            "roles": self.roles,
        }
