"""Recorded decisions of vLLM's and SGLang's own schedulers, replayed: the engine must decide alike, step by step.

A line of a record is {"scenario", "decisions"}. In both every step with tokens lasts a second on the device (of a
pipeline each stage its share of it) and a schedule() takes SCHEDULE on the engine core's clock.

    python tests/conformance/replay.py FILE.jsonl.gz ...      a table of how many agree, by feature
"""

import gzip
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infersim.config.presets import load_preset
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.knobs import lowered
from infersim.engine.price import DraftCost, StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs

SCHEDULE = 2.0**-20
"""s of the engine core's clock that one schedule() takes"""
MOST_STEPS = 10_000
"""of a record; one that has so many is of requests that take memory from each other for ever"""
WRITES_KEYS = ("eagle", "draft_model")
"""methods whose drafter writes keys behind a step's own tokens"""


def read(path: Path) -> list[dict]:
    """The records of a file but those of which the release says that it does not have what they ask for."""
    with gzip.open(path, "rt") as lines:
        return [record for record in map(json.loads, lines) if record["decisions"]]


def preset_of(version: str) -> str:
    """The preset of a release, "0.19.1" or "sglang-0.5.23" for example."""
    engine, _, number = version.rpartition("-")
    return f"{engine or 'vllm'}-" + ".".join(number.split(".")[:2])


def knobs_of(config: dict, preset: str) -> dict:
    """The preset's knobs, and what the scenario says: by the names of make_knobs and the oracle."""
    spec, groups = config["speculative"], config["kv_groups"]
    values = load_preset(preset).values
    knobs = {name: values[knob.name] for name, knob in lowered().items() if values[knob.name] is not None}
    slots = values["drafting_slots"] if spec and spec["method"] == "draft_model" else "none"
    beforehand = config["max_num_seqs"] if slots == "max-num-seqs" else 0
    knobs |= {name: 0.0 for name in knobs if name.startswith("host_")}
    if config.get("ignore_eos"):
        knobs |= {"new_token_ratio": 1.0, "min_new_token_ratio": 1.0}
    if "scheduler_reserve_full_isl" in config and knobs["reserve_full_isl"]:  # else the release has no such gate
        knobs["reserve_full_isl"] = config["scheduler_reserve_full_isl"]
    return knobs | {
        "block_size": config["block_size"],
        "num_gpu_blocks": config["num_gpu_blocks"] + ("mixed" in config),  # vLLM's first is its null block
        "max_num_seqs": config["max_num_seqs"],
        "max_num_batched_tokens": config["max_num_batched_tokens"] - beforehand,
        "max_model_len": config["max_model_len"],
        "chunked_prefill": config["enable_chunked_prefill"],
        "long_prefill_token_threshold": config["long_prefill_token_threshold"],
        "prefill_schedule_interval": config.get("prefill_schedule_interval", 1),
        "enable_prefix_caching": config["enable_prefix_caching"] and values["prefix_cache"] == "blocks",
        "policy": config["policy"],
        "radix": values["prefix_cache"] == "radix" and config["enable_prefix_caching"],
        "order": "prefills-first" if config.get("mixed") else values["order"],
        "async_scheduling": config["async_scheduling"],
        "steps_in_flight": 2 if config["async_scheduling"] else config["pipeline"],
        "watermark_blocks": int(config["watermark"] * config["num_gpu_blocks"]),
        "kv_window": [window for window, _ in groups],
        "kv_multiplicity": [count for _, count in groups],
        "sparse_windows": values["sparse_windows"] and config["prefix_cache_retention_interval"] == 0,
        "lookahead": spec["k"] if spec and spec["method"] in WRITES_KEYS else 0,
        "draft_slots": int(slots == "in-step"),
        "padded_drafts": spec["k"] if spec and values["pads_drafts"] != "never" and not spec.get("by_batch") else 0,
        "drop_last_hit": int(bool(spec and spec["method"] == "eagle")),
        "host_step_time": SCHEDULE,
    }


def drafts_of(config: dict) -> list[int]:
    """Drafts of a sequence, by running sequences; empty without speculation."""
    spec = config["speculative"]
    if not spec:
        return []
    by_batch = spec.get("by_batch") or [spec["k"]]
    return [by_batch[min(i, len(by_batch) - 1)] for i in range(config["max_num_seqs"] + 1)]


def one_second(config: dict) -> StepCost:
    """Every step lasts a second, on the device of one stage its share of it."""
    tokens, head = config["max_num_batched_tokens"] + 1, config["max_num_seqs"] + 1
    linear = np.zeros((tokens, len(state.RESOURCES)))
    linear[1:, state.WEIGHTS] = 1.0
    k = config["speculative"]["k"] if config["speculative"] else 0
    attention = np.zeros(1, state.ATTENTION_PRICE)
    no_head = np.zeros((head * (1 + k) + tokens, len(state.RESOURCES)))
    return StepCost(linear, no_head, attention, issue_share=1 / config["pipeline"])


@dataclass(frozen=True)
class Scripted:
    """A row of acceptance for each request, written before every step."""

    rows_of: int
    depth: int

    @property
    def accepted(self) -> np.ndarray:
        return np.zeros((self.rows_of, 2, self.depth))

    def rows(self, request_ids, uniform):
        return np.arange(len(request_ids), dtype="i4")


class Replay:
    """One scenario in the engine. `steps` and `requests` are as in a record's decisions."""

    def __init__(self, scenario: dict, preset: str):
        self.scenario, self.config = scenario, scenario["config"]
        self.rows = scenario["requests"]
        drafts, draft = drafts_of(self.config), None
        if drafts:
            tokens, seqs, k = self.config["max_num_batched_tokens"] + 1, len(drafts), self.config["speculative"]["k"]
            no_attention = np.zeros(0, state.ATTENTION_PRICE)
            passes = np.zeros(k + 1, "i4")
            draft = DraftCost(np.zeros(tokens), np.zeros(seqs), np.zeros(seqs), no_attention, passes)
        knobs = make_knobs(**knobs_of(self.config, preset))
        spec = ReplicaSpec(knobs, one_second(self.config), draft, np.array(drafts, "i4"))
        self.depth = self.config["speculative"]["k"] if drafts else 0
        acceptance = Scripted(len(self.rows), self.depth) if drafts else None
        self.fleet = Fleet([spec], shares_text=True, acceptance=acceptance)
        self.submit()
        self.aborts = sorted((r["abort"], i) for i, r in enumerate(self.rows) if r["abort"] is not None)
        self.steps: list[list] = []
        self.preemptions = np.zeros(len(self.rows), "i4")
        self.stuck = False

    def submit(self) -> None:
        rows = self.rows
        pieces = [piece for r in rows for piece in r["segments"]]
        counts = np.array([len(r["segments"]) for r in rows])
        segments = (np.cumsum(counts) - counts, counts, [name for name, _ in pieces], [length for _, length in pieces])
        columns = [[r[name] for r in rows] for name in ("arrival", "prompt", "output", "max_tokens")]
        self.fleet.submit(
            0, *columns, names=[r["name"] for r in rows], segments=segments, priority=[r["priority"] for r in rows]
        )

    def next_time(self) -> float:
        """When the engine does something next, inf if never."""
        replica, scheduler = self.fleet.replicas[0], self.fleet.schedulers[0]
        in_flight, now = int(replica["in_flight"]), float(replica["now"])
        if in_flight and (in_flight == self.fleet.knobs[0]["steps_in_flight"] or replica["blocked"]):
            return max(now, float(self.fleet.step_end[0, replica["oldest_step"]]))
        if in_flight or not (replica["blocked"] or scheduler["num_running"] + scheduler["num_waiting"] == 0):
            return now
        head = int(replica["pending_head"])
        return math.inf if head < 0 else max(now, float(self.fleet.requests["arrival"][head]))

    def abort(self, now: float) -> None:
        """What is aborted by now; tokens of a step that ends now are lost."""
        while self.aborts and self.aborts[0][0] <= now:
            self.fleet.abort(self.aborts.pop(0)[1], now)

    def script(self) -> None:
        """What the target accepts next of each request's drafts."""
        if self.depth:
            outputs = self.fleet.requests["num_output_tokens"]
            accept = [row[min(n, len(row) - 1)] for row, n in zip(self.scenario["accept"], outputs, strict=True)]
            table = np.arange(self.depth) < np.array(accept)[:, None]
            self.fleet.accepted[:] = np.repeat(table[:, None, :], 2, axis=1).reshape(-1)

    def run(self) -> "Replay":
        while (time := self.next_time()) < math.inf and len(self.steps) < MOST_STEPS:
            self.abort(time)
            if self.next_time() != time:  # it had nothing else to do
                continue
            self.script()
            count = int(self.fleet.replicas["num_steps"][0])
            try:
                self.fleet.advance(float(np.nextafter(time, math.inf)))
            except RuntimeError:
                self.stuck = True
                break
            assert self.fleet.replicas["num_steps"][0] <= count + 1
            if self.fleet.replicas["num_steps"][0] > count:
                self.note_step(time)
        return self

    def note_step(self, time: float) -> None:
        """Append what the schedule() at `time` decided, and who was preempted since the one before."""
        fleet, after = self.fleet, self.fleet.requests
        replica, scheduler, knobs = fleet.replicas[0], fleet.schedulers[0], fleet.knobs[0]
        slot = (int(replica["oldest_step"]) + int(replica["in_flight"]) - 1) % int(knobs["steps_in_flight"])
        entries = []
        for entry in range(fleet.counts[0, slot]):
            q = int(fleet.steps[0, slot, entry])
            q, drafts = (~q if q < 0 else q), int(fleet.tokens[0, slot, entry]) & 0xFFFF
            entries.append([q, int(after["num_computed_tokens"][q])] + ([drafts] if drafts else []))
        preempted = np.flatnonzero(after["num_preemptions"] > self.preemptions).tolist()
        self.preemptions = after["num_preemptions"].copy()
        counts = [int(scheduler[name]) for name in ("num_tokens", "free_blocks", "num_running", "num_waiting")]
        self.steps.append([time, sorted(entries), preempted, *counts])


def recorded_steps(decisions: dict) -> list[list]:
    """As Replay.steps has them: of a request [number, tokens computed after it, drafts if any]; tokens in all."""
    steps = []
    for time, entries, preempted, free, running, waiting in decisions["steps"]:
        tokens = sum(entry[1] for entry in entries)
        entries = sorted([entry[0], *entry[2:]] for entry in entries)
        steps.append([time, entries, sorted(preempted), tokens, free, running, waiting])
    return steps


def first_difference(record: dict, preset: str) -> str | None:
    """None if the engine decides as the record has it, else where and how it is different."""
    theirs, ours = recorded_steps(record["decisions"]), Replay(record["scenario"], preset).run()
    for i, (want, got) in enumerate(zip(theirs, ours.steps, strict=False)):
        if want != got:
            return f"step {i}: theirs {want}\n        ours   {got}"
    if len(theirs) != len(ours.steps):
        return f"they make {len(theirs)} steps, we {len(ours.steps)}; stuck: {ours.stuck}"
    for q, want in enumerate(record["decisions"]["requests"] if len(theirs) < MOST_STEPS else ()):
        row = ours.fleet.requests[q]
        got = {
            "cached": int(row["num_cached_tokens"]),
            "preemptions": int(row["num_preemptions"]),
            "outputs": int(row["num_output_tokens"]),
            "scheduled": float(row["scheduled"]),
            "first": float(row["first_token"]),
            "last": float(row["last_token"]),
        }
        if any(want[name] != value for name, value in got.items() if want[name] not in (None, -1)):
            return f"request {q}: theirs {want}, ours {got}"
    return None


def main(paths: list[str]) -> None:
    for path in paths:
        table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for record in read(Path(path)):
            different = first_difference(record, preset_of(record["decisions"]["version"]))
            row = table[record["scenario"]["feature"]]
            row[0] += different is None
            row[1] += 1
            if different and "-v" in sys.argv:
                print(record["scenario"]["id"], different)
        for feature, (agree, all_of_it) in sorted(table.items()):
            print(f"{feature:24} {agree:5} of {all_of_it}")
        print(f"{Path(path).name}: {sum(row[0] for row in table.values())} of {sum(row[1] for row in table.values())}")


if __name__ == "__main__":
    main([path for path in sys.argv[1:] if path != "-v"])
