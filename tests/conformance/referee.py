"""The referee: random scenarios through an engine's own scheduler and through ours; what differs, made small.

    python tests/conformance/referee.py .conformance/0.32 NUMBER [SEED [FEATURE ...]]      or .conformance/sglang-0.5.23

Prints a table of how many of NUMBER scenarios agree by feature, and of each feature the first that does not: with as
few requests as still differ, and both sides of the step. Exit status 1 if any differs.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from replay import first_difference, preset_of

from scenarios import scenarios


class Scheduler:
    """vLLM's or SGLang's, in a process of its own, as install.sh left it in `folder`."""

    def __init__(self, folder: str):
        python = str(Path(folder).parent / "python/bin/python")
        self.engine = "sglang" if Path(folder).name.startswith("sglang") else "vllm"
        script = str(Path(__file__).with_name(f"{self.engine}_scheduler.py"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen([python, script], env=os.environ | {"PYTHONPATH": folder}, **pipes)

    def decide(self, scenario: dict) -> dict:
        self.process.stdin.write(json.dumps(scenario) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            script = f"{self.engine}_scheduler.py"
            raise SystemExit(f"it stopped at {scenario['id']}; run {script} by hand to see why")
        return json.loads(answer)


def difference(theirs: Scheduler, scenario: dict) -> str | None:
    """Where they differ, None if they agree, "" if the release does not have what the scenario asks for."""
    decisions = theirs.decide(scenario)["decisions"]
    if decisions is None:
        return ""
    return first_difference({"scenario": scenario, "decisions": decisions}, preset_of(decisions["version"]))


def shrink(theirs: Scheduler, scenario: dict) -> dict:
    """The scenario without every request that it differs without."""
    for i in reversed(range(len(scenario["requests"]))):
        fewer = dict(scenario)
        for name in ("requests", "accept"):
            fewer[name] = scenario[name] and scenario[name][:i] + scenario[name][i + 1 :]
        if fewer["requests"] and difference(theirs, fewer):
            scenario = fewer
    return scenario


def main(folder: str, number: str, seed: str = "0", *features: str) -> None:
    theirs, table = Scheduler(folder), defaultdict(lambda: [0, 0])
    for scenario in scenarios(int(seed), int(number), features, theirs.engine):
        row = table[scenario["feature"]]
        differs = difference(theirs, scenario)
        row[1] += differs != ""
        row[0] += differs is None
        if differs and row[0] == row[1] - 1:
            small = shrink(theirs, scenario)
            print(json.dumps(small), difference(theirs, small), sep="\n")
    for feature, (agree, every) in table.items():
        print(f"{feature:24} {agree:5} of {every}")
    sys.exit(any(agree < every for agree, every in table.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
