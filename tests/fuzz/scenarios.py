"""Random scenarios on all cores for a stated time: `make fuzz MINUTES=30`.

Each is run in-process by an engine that is compiled with bounds checks. What breaks a law of laws.py, dies or does not
end is made smaller as long as it breaks the same law, and printed with the line that shows it again.
"""

import argparse
import json
import multiprocessing as mp
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("INFERSIM_BOUNDSCHECK", "1")  # the engine aborts where an index is out of bounds

from draw import scenario, write_traces
from laws import OK, REFUSED, examine

from infersim.engine.compiled.build import load

LONGEST = 120.0  # wall seconds of one scenario, on a machine that has other things to do
AGAIN = 100  # of every so many scenarios all is written that can be
MOST_REFUSED = 0.15


class Worker:
    """A process that runs scenarios first, first + step, ... of a seed, and says what it is about."""

    def __init__(self, context: Any, seed: int, first: int, step: int, traces: dict[str, str], end: float):
        self.now, self.since = context.Value("q", first), context.Value("d", time.time())
        self.receive, send = context.Pipe(False)
        self.process = context.Process(target=self._run, args=(send, seed, first, step, traces, end), daemon=True)
        self.process.start()
        send.close()

    def _run(self, send: Any, seed: int, first: int, step: int, traces: dict[str, str], end: float) -> None:
        number = first
        while time.time() < end:
            self.now.value, self.since.value = number, time.time()
            kind, how = examine(scenario(seed, number, traces), number % AGAIN == 0)
            send.send((number, kind, how, time.time() - self.since.value))
            number += step
        send.close()


def search(
    seed: int, minutes: float, cores: int, first: int = 0
) -> tuple[Counter, Counter, list[tuple[int, str, str]]]:
    """How many scenarios came to what, why those were refused that were, and (number, kind, how) of what is wrong."""
    load()  # compiled once, not by every process
    context, folder = mp.get_context("fork"), Path(tempfile.mkdtemp(prefix="infersim-fuzz-"))
    traces, end = write_traces(folder), time.time() + 60 * minutes
    workers = [Worker(context, seed, first + i, cores, traces, end) for i in range(cores)]
    counts, refusals, wrong = Counter[str](), Counter[str](), []
    while workers:
        for place, worker in enumerate(workers):
            alive = worker.process.is_alive()
            try:
                while worker.receive.poll(0.05 if alive else 0):
                    number, kind, how, seconds = worker.receive.recv()
                    counts[kind if kind in (OK, REFUSED) else "wrong"] += 1
                    if kind == REFUSED:
                        refusals[re.sub(r"[\d.,e+-]*\d[\d.,e+-]*", "#", how)[:90]] += 1
                    elif kind != OK:
                        wrong.append((number, kind, how))
                        print(f"{number}: {kind}: {how[:300]}", flush=True)
                    if seconds > LONGEST / 2:
                        print(f"{number} took {seconds:.0f} s", flush=True)
            except EOFError:
                pass
            hangs = alive and time.time() - worker.since.value > LONGEST
            if hangs:
                worker.process.kill()
                worker.process.join()
            if hangs or (not alive and worker.process.exitcode):
                number = worker.now.value
                kind = "hang" if hangs else f"died of {signal.Signals(-(worker.process.exitcode or 0)).name}"
                wrong.append((number, kind, ""))
                counts["wrong"] += 1
                print(f"{number}: {kind}", flush=True)
                workers[place] = Worker(context, seed, number + cores, cores, traces, end)
            elif not alive:
                workers.pop(place)
                break
    return counts, refusals, wrong


# --- making smaller ---------------------------------------------------------------------------------------------------
def outcome(data: dict[str, Any], limit: float) -> str:
    """What kind of law the scenario breaks, found in a process of its own."""
    context = mp.get_context("fork")
    receive, send = context.Pipe(False)
    process = context.Process(target=lambda: send.send(examine(data)[0]), daemon=True)
    process.start()
    send.close()
    found = "hang"
    if receive.poll(limit):
        try:
            found = receive.recv()
        except EOFError:  # it has died
            process.join()
            found = f"died of {signal.Signals(-(process.exitcode or 0)).name}" if (process.exitcode or 0) < 0 else ""
    process.kill()
    process.join()
    return found


def _smaller(value: Any) -> list[Any]:
    """Values to try instead, simplest first."""
    if isinstance(value, dict):
        cut = [{k: v for k, v in value.items() if k != key} for key in value]
        return cut + [{**value, key: new} for key in value for new in _smaller(value[key])]
    if isinstance(value, list):
        cut = [value[:i] + value[i + 1 :] for i in range(len(value))]
        return cut + [[*value[:i], new, *value[i + 1 :]] for i in range(len(value)) for new in _smaller(value[i])]
    if isinstance(value, int) and not isinstance(value, bool):
        return [new for new in (0, 1, value // 2, value - 1) if 0 <= new < value]
    return []


def shrink(data: dict[str, Any], kind: str, seconds: float = 60.0) -> dict[str, Any]:
    """A smaller scenario that breaks the same law."""
    end, limit = time.time() + seconds, 30.0 if kind == "hang" else 20.0
    smaller = True
    while smaller and time.time() < end:
        smaller = False
        for candidate in _smaller(data):
            if time.time() > end:
                break
            if outcome(deepcopy(candidate), limit) == kind:
                data, smaller = candidate, True
                break
    return data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--number", type=int, help="only this scenario")
    parser.add_argument("--file", type=Path, help="only the scenario in this JSON file")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=int, default=0, help="scenario to begin with")
    parser.add_argument("--refusals", action="store_true", help="list why scenarios were refused")
    options = parser.parse_args()
    if options.number is not None or options.file is not None:
        traces = write_traces(Path(tempfile.mkdtemp(prefix="infersim-fuzz-")))
        data = json.loads(options.file.read_text()) if options.file else scenario(options.seed, options.number, traces)
        print(json.dumps(data, indent=1))
        kind, how = examine(data, again=True)
        print(f"{kind}: {how}")
        return kind not in (OK, REFUSED)
    print(f"seed {options.seed}", flush=True)
    counts, refusals, wrong = search(options.seed, options.minutes, options.cores, options.first)
    total = sum(counts.values())
    share = counts[REFUSED] / max(total, 1)
    print(f"{total} scenarios of seed {options.seed} in {options.minutes:g} minutes: {counts['wrong']} break a law,"
          f" {counts[REFUSED]} refused ({share:.1%})")  # fmt: skip
    if options.refusals or share > MOST_REFUSED:
        print(*(f"{count:6} {why}" for why, count in refusals.most_common(40)), sep="\n")
    traces = write_traces(Path(tempfile.mkdtemp(prefix="infersim-fuzz-")))
    seen = set()
    for number, kind, how in wrong:
        print(f"\nagain: python tests/fuzz/scenarios.py --seed {options.seed} --number {number}\n{kind}: {how[:500]}")
        if kind not in seen and len(seen) < 5:
            print(json.dumps(shrink(scenario(options.seed, number, traces), kind)))
        seen.add(kind)
    if share > MOST_REFUSED:
        print(f"more than {MOST_REFUSED:.0%} are refused: draw.py draws what does not go together")
    return bool(wrong) or share > MOST_REFUSED


if __name__ == "__main__":
    sys.exit(main())
