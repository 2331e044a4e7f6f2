"""What breaks, and when it is whole again."""

from typing import TYPE_CHECKING

from ..spec.cluster import Failure
from .pool import DEAD, READY

if TYPE_CHECKING:
    from .front import Front


def break_down(front: "Front", failure: Failure):
    """A simpy process: one failure from its beginning to its end."""
    clock, replica = front.clock, failure.replica
    yield clock.at(failure.at)
    if not front.left:
        return
    if failure.kind == "crash":
        pool = front.pool_of(replica)
        pool.become(replica, DEAD, clock.now)
        front.fail_replica(replica, clock.now)
    elif failure.kind == "slow":
        front.fleet.slow_down(replica, failure.factor)
    else:
        front.cut(True)
    if failure.duration is None:
        return
    yield clock.at(failure.at + failure.duration)
    if not front.left:
        return
    if failure.kind == "crash":
        pool.become(replica, READY, clock.now)
        front.admit(clock.now)
    elif failure.kind == "slow":
        front.fleet.slow_down(replica, 1.0)
    else:
        front.cut(False)
