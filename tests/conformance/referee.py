"""The referee: random scenarios through vLLM's own Scheduler and through the engine; what differs, made small.

    python tests/conformance/referee.py .conformance/0.32 NUMBER [SEED [FEATURE ...]]

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


class Vllm:
    """vLLM's Scheduler in a process of its own, as install.sh left it in `folder`."""

    def __init__(self, folder: str):
        python = str(Path(folder).parent / "python/bin/python")
        script = str(Path(__file__).with_name("vllm_scheduler.py"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen([python, script], env=os.environ | {"PYTHONPATH": folder}, **pipes)

    def decide(self, scenario: dict) -> dict:
        self.process.stdin.write(json.dumps(scenario) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"vLLM's Scheduler stopped at {scenario['id']}; run vllm_scheduler.py by hand to see why")
        return json.loads(answer)


def difference(vllm: Vllm, scenario: dict) -> str | None:
    """Where they differ, None if they agree, "" if the release does not have what the scenario asks for."""
    decisions = vllm.decide(scenario)["decisions"]
    if decisions is None:
        return ""
    return first_difference({"scenario": scenario, "decisions": decisions}, preset_of(decisions["version"]))


def shrink(vllm: Vllm, scenario: dict) -> dict:
    """The scenario without every request that it differs without."""
    for i in reversed(range(len(scenario["requests"]))):
        fewer = dict(scenario)
        for name in ("requests", "accept"):
            fewer[name] = scenario[name] and scenario[name][:i] + scenario[name][i + 1 :]
        if fewer["requests"] and difference(vllm, fewer):
            scenario = fewer
    return scenario


def main(folder: str, number: str, seed: str = "0", *features: str) -> None:
    vllm, table = Vllm(folder), defaultdict(lambda: [0, 0])
    for scenario in scenarios(int(seed), int(number), features):
        row = table[scenario["feature"]]
        differs = difference(vllm, scenario)
        row[1] += differs != ""
        row[0] += differs is None
        if differs and row[0] == row[1] - 1:
            small = shrink(vllm, scenario)
            print(json.dumps(small), difference(vllm, small), sep="\n")
    for feature, (agree, every) in table.items():
        print(f"{feature:24} {agree:5} of {every}")
    sys.exit(any(agree < every for agree, every in table.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
