"""New random examples for every property test, for a stated time: `make explore MINUTES=30`.

`make test` draws the same examples in every run. Here each round runs all property tests, in a new order with a new
seed; the last one ends with the test in which the time is up. A failure is shrunk and printed as Hypothesis prints it:
the arguments, and a line @reproduce_failure(...) that makes the test fail again wherever it is added. What was found
becomes an @example, or a test of its own.

Property tests that need many examples, such as those of random scenarios, stand in this folder.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest

os.environ.setdefault("INFERSIM_BOUNDSCHECK", "1")  # the engine aborts where it would write out of bounds
TESTS = Path(__file__).parents[1]


class Round:
    """A pytest plugin: the tests in another order, until the time is up."""

    def __init__(self, seed: int, end: float):
        self.seed, self.end = seed, end
        self.failed: list[str] = []
        self.tested = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        random.Random(self.seed).shuffle(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tested += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is up"


def explore(minutes: float, paths: list[str]) -> int:
    """The number of tests that failed."""
    end, tested, failed = time.monotonic() + minutes * 60, 0, []
    while time.monotonic() < end:
        one = Round(random.SystemRandom().getrandbits(32), end)
        print(f"\nseed {one.seed}", flush=True)
        options = ["-m", "hypothesis", "-p", "no:cacheprovider", "--tb=short", "--disable-warnings"]
        code = pytest.main([*options, "--hypothesis-profile=explore", f"--hypothesis-seed={one.seed}", *paths], [one])
        if not one.tested:
            print("no property test was run")
            return 1
        tested += one.tested
        again = "python -m pytest --hypothesis-profile=explore --hypothesis-seed"
        failed += [f"{again}={one.seed} '{name}'" for name in one.failed]
        if code == pytest.ExitCode.INTERRUPTED:
            break
    print(f"\n{tested} property tests run in {minutes:g} minutes, {len(failed)} failed", *failed, sep="\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(bool(explore(float(sys.argv[1]), sys.argv[2:] or [str(TESTS)])))
