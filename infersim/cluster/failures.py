"""What breaks, and when it is whole again."""

from ..config.cluster import Failure
from ..workload.draws import generator
from .door import Door
from .pool import DEAD, OFF, READY, STARTING


class Failures:
    """What is broken now. Something that is broken twice is whole when both are mended."""

    def __init__(self, front: Door):
        self.front = front
        self.crashes: dict[int, int] = {}
        """how often each replica is dead"""
        self.after: dict[int, int] = {}
        """the state in which each dead replica comes back"""
        self.slow: dict[int, list[float]] = {}
        """factors of each replica"""
        self.cuts = 0
        self.gone: set[int] = set()
        """replicas that have died for ever"""
        self.repairs = 0
        """replicas and links that will be whole again, but for what breaks meanwhile"""
        front.clock.hope = self._hope

    def begin(self, failures: tuple[Failure, ...]) -> None:
        """Start a process for each failure, and for each replica of one that strikes by chance."""
        for number, failure in enumerate(failures):
            if failure.at is not None:
                self.front.clock.process(self._stated(failure, failure.at, failure.replica or 0))
                continue
            assert failure.mean_time_between is not None
            one = failure.kind == "partition" or failure.replica is not None
            for replica in [failure.replica or 0] if one else range(len(self.front.sites)):
                self.front.clock.process(self._by_chance(failure, failure.mean_time_between, number, replica))

    def _stated(self, failure: Failure, at: float, replica: int):
        yield self.front.clock.at(at)
        yield from self.break_down(failure, replica, failure.duration)

    def _by_chance(self, failure: Failure, mean_gap: float, number: int, replica: int):
        random, clock = generator(self.front.seed, "failures", number, replica), self.front.clock
        while self.front.left:
            yield clock.watch(clock.now + random.exponential(mean_gap))
            duration = failure.duration and random.exponential(failure.duration)
            yield from self.break_down(failure, replica, duration)
            if duration is None:
                return

    def break_down(self, failure: Failure, replica: int, duration: float | None):
        """One failure from its beginning to its end, if it has one."""
        front = self.front
        if not front.left:
            return
        self._change(failure, replica, True, duration is None)
        if duration is not None:
            self.repairs += failure.kind != "slow"
            yield front.clock.watch(front.clock.now + duration)
            self.repairs -= failure.kind != "slow"
            if front.left:
                self._change(failure, replica, False)

    def _hope(self) -> bool:
        """Whether a repair to come may let a request end: one that has not lost for ever all replicas that it needs."""
        return self.repairs > 0 and self.front.may_end(self.gone)

    def _change(self, failure: Failure, replica: int, breaks: bool, for_ever: bool = False) -> None:
        front, now = self.front, self.front.clock.now
        if failure.kind == "slow":
            factors = self.slow.setdefault(replica, [])
            before = max(factors, default=1.0)
            factors.append(failure.factor) if breaks else factors.remove(failure.factor)
            if (factor := max(factors, default=1.0)) != before:
                front.fleet.slow_down(replica, factor)
        elif failure.kind == "partition":
            self.cuts += 1 if breaks else -1
            front.cut(self.cuts > 0, for_ever)
        else:
            before = self.crashes.get(replica, 0)
            self.crashes[replica] = before + (1 if breaks else -1)
            self.gone |= {replica} if for_ever else set()
            if before == 0:
                pool = front.home[replica]
                self.after[replica] = READY if pool.state[pool.place[replica]] in (READY, STARTING) else OFF
                pool.become(replica, DEAD, now)
                front.fail_replica(replica, now)
            elif not self.crashes[replica]:
                pool = front.home[replica]
                pool.become(replica, self.after[replica], now)
                for answering in front.pools:
                    front.admit(answering, now)
