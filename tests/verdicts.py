"""Are verdicts right? Random scenarios around their capacity, judged, and checked against a long run of the same.

`python tests/verdicts.py FIRST COUNT` runs scenarios FIRST ... FIRST + COUNT - 1 and prints a table. Scenario numbers
are the same for ever, so a proof is run in pieces: `--save FILE` appends a line each, `--table FILE` prints what is
there, `--again FILE` judges those runs anew and leaves what is true of them as it was found.

The load is a random multiple of what the deployment completes when far more arrives. Whether it is kept up with is
read off a run of 20,000 requests with another seed, by a rule that has nothing of the verdict's: the line through the
number in the system, from the first fifth to the end of arrivals. Saturated: it rises by more than 2 % of what arrives.
Stable: by less than 0.4 %. Between: four times the requests, twice, and then the scenario counts as neither.
"""

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.draw import Draw

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario, build_scenario
from infersim.engine.compiled.state import COMPLETED
from infersim.metrics.result import Result
from infersim.metrics.verdict import SATURATED, STABLE, judge
from infersim.run import run

KINDS = ("open", "closed", "sessions", "prefixes", "speculation", "pools", "autoscaled", "replicas", "engines",
         "little memory")  # fmt: skip
DEPLOYMENTS = (("Qwen2.5-0.5B", "l40s"), ("Llama-3.1-8B", "h100-sxm"), ("Llama-3.1-8B", "a100-sxm-80gb"),
               ("Llama-3.2-1B", "l4"))  # fmt: skip
LONG, TIMES = 20_000, 3
RISES, FLAT = 0.02, 0.004
REFUSED = 0.01


def _length(draw: Draw, most: int) -> Any:
    mean = draw.whole(max(most // 8, 1), most)
    skewed = {"lognormal": {"median": mean, "sigma": 1.0, "max": 8 * most}}
    return draw.choice([mean, {"mean": mean, "range_ratio": 0.5}, skewed])


def draw_scenario(number: int) -> tuple[str, dict[str, Any]]:
    """Its kind, and the scenario without a rate."""
    draw = Draw(f"verdict-{number}")
    kind = KINDS[number % len(KINDS)]
    model, device = draw.choice(DEPLOYMENTS)
    load: dict[str, Any] = {"input_tokens": _length(draw, 800), "output_tokens": _length(draw, 120)}
    load["burstiness"] = draw.choice([0.2, 1, 1, 4])
    engine: dict[str, Any] = draw.some({"max_num_seqs": draw.whole(4, 64)}, 0.5)
    found: dict[str, Any] = {"model": model, "hardware": device, "workload": load, "engine": engine}
    if kind == "closed":
        load["max_concurrency"] = draw.whole(2, 64)
    elif kind == "sessions":
        load |= {"turns": draw.choice([2, 4, {"uniform": [1, 6]}]), "think_time": draw.choice([0, 0.5, 3])}
        engine["enable_prefix_caching"] = draw.chance(0.7)
    elif kind == "prefixes":
        load["prefixes"] = {"count": draw.whole(1, 60), "tokens": draw.whole(200, 2000)}
        engine["enable_prefix_caching"] = True
    elif kind == "speculation":
        found["speculation"] = {"method": draw.choice(["ngram", "eagle3"]), "num_speculative_tokens": draw.whole(1, 5),
                                "acceptance": {"rate": draw.choice([0.4, 0.7])}}  # fmt: skip
        found |= {"model": "Llama-3.1-8B", "hardware": "h100-sxm"}
    elif kind == "pools":
        pools = {name: {"replicas": draw.whole(1, 3)} for name in ("prefill", "decode")}
        found["cluster"] = pools | {"transfer": {"bandwidth": draw.choice(["2 GB/s", "25 GB/s"])}}
    elif kind == "autoscaled":
        scaler = {"policy": draw.choice(["outstanding", "queue", "utilization"]), "min": 1, "max": draw.whole(2, 5)}
        scaler |= {"target": 0.7 if scaler["policy"] == "utilization" else draw.whole(2, 20)}
        scaler |= {"interval": draw.choice([2, 15]), "scale_down_delay": draw.choice([20, 300])}
        found["cluster"] = {"autoscaler": scaler | {"startup": {"node": draw.choice([0, 10, 60])}}}
    elif kind == "replicas":
        policy = draw.choice(["round-robin", "random", "least-outstanding", "power-of-two", "least-kv"])
        found["cluster"] = {"replicas": draw.whole(2, 6), "router": policy}
    elif kind == "engines":
        engine["preset"] = draw.choice(["sglang-0.5", "trtllm-1.0-no-evict", "trtllm-1.0-max-utilization", "vllm-0.11",
                                        "static", "orca", "sarathi"])  # fmt: skip
    elif kind == "little memory":
        engine["num_gpu_blocks_override"] = draw.whole(700, 3000)
        engine["max_model_len"] = 8192
    return kind, found


def with_load(found: dict[str, Any], rate: float, requests: int, seed: int) -> Scenario:
    load = found["workload"] | {"request_rate": rate, "num_requests": requests}
    return build_scenario(found | {"workload": load, "simulation": {"seed": seed}}, "verdict")


def most_completed(found: dict[str, Any], turns: float) -> float:
    """Arrivals per second that are completed when everything arrives within moments: in the middle half of that. With
    an autoscaler, by all its replicas."""
    if scaler := found.get("cluster", {}).get("autoscaler"):
        found = found | {"cluster": {"replicas": scaler["max"]}}
    result = run(with_load(found, 1e5, 3000, 7))[0]
    ended = np.sort(result.requests["last_token"][result.completed])
    low, high = len(ended) // 4, 3 * len(ended) // 4
    return (high - low) / (ended[high] - ended[low]) / turns


def rise(result: Result) -> tuple[float, float]:
    """How fast the number in the system rises while requests arrive, as a share of what arrives (of conversations, if
    they are); and the share of requests that get no answer."""
    r = result.requests
    sent = r["arrival"]
    until = min(float(result.opened_until), float(sent.max()))
    times = np.linspace(0.2 * until, until, 200)
    ended = np.where(r["last_token"] >= 0, r["last_token"], np.inf)
    inside = np.searchsorted(np.sort(sent), times, "right") - np.searchsorted(np.sort(ended), times, "right")
    slope = np.polyfit(times, inside, 1)[0]
    arrivals = len(r) if result.session is None else result.session.max() + 1
    return float(slope * until / arrivals), float((r["status"] != COMPLETED).mean())


def truth(found: dict[str, Any], rate: float) -> str | None:
    n = LONG
    for _ in range(TIMES):
        rises, refused = rise(run(with_load(found, rate, n, 1000))[0])
        if refused > REFUSED or rises > RISES:
            return SATURATED
        if rises < FLAT:
            return STABLE
        n *= 4
    return None


def verdict_of(number: int) -> dict[str, Any]:
    """What one scenario is, and what is said of it."""
    kind, found = draw_scenario(number)
    draw = Draw(f"verdict-load-{number}")
    row: dict[str, Any] = {"number": number, "kind": kind}
    try:
        turns = found["workload"].get("turns", 1)
        turns = float(np.mean(turns["uniform"])) if isinstance(turns, dict) else turns
        capacity = most_completed(found, turns)
        over = draw.choice([draw.uniform(0.4, 0.9), draw.uniform(0.85, 1.0), draw.uniform(1.0, 1.15), draw.log(1.1, 3)])
        n, seed = round(draw.log(100, 10_000)), draw.randrange(1000)
        verdict = judge(run(with_load(found, over * capacity, n, seed))[0])
        known = truth(found, over * capacity)
    except InputError as error:
        return row | {"refused": error.problems[0]}
    row |= {"over": over, "rate": over * capacity, "n": n, "seed": seed}
    return row | {"truth": known, "said": verdict.state, "reason": verdict.reason}


def again(row: dict[str, Any]) -> dict[str, Any]:
    """A row that was saved, with what is said of it now."""
    if "refused" in row:
        return row
    verdict = judge(run(with_load(draw_scenario(row["number"])[1], row["rate"], row["n"], row["seed"]))[0])
    return row | {"said": verdict.state, "reason": verdict.reason}


def table(rows: list[dict[str, Any]]) -> str:
    """By kind: scenarios, of which known, wrong STABLE, wrong SATURATED, undecided. Lines that are wrong follow."""
    columns = ("known", "neither", "refused", "wrong stable", "wrong saturated", "undecided")
    lines = ["".join(f"{column:>17}" for column in ("kind", *columns))]
    for kind in (*KINDS, "all"):
        mine = [row for row in rows if kind in (row["kind"], "all")]
        known = [row for row in mine if row.get("truth")]
        counts = Counter((row["truth"], row["said"]) for row in known)
        stable, saturated = counts[SATURATED, STABLE], counts[STABLE, SATURATED]
        undecided = sum(row["said"] not in (STABLE, SATURATED) for row in known)
        neither = sum(row.get("truth", "") is None for row in mine)
        refused = sum("refused" in row for row in mine)
        row = (kind, len(known), neither, refused, stable, saturated, undecided)
        lines.append("".join(f"{cell:>17}" for cell in row))
    wrong = [row for row in rows if row.get("truth") and {row["truth"], row["said"]} == {STABLE, SATURATED}]
    n = max(sum(bool(row.get("truth")) for row in rows), 1)
    for name in (STABLE, SATURATED):
        mine = sum(row["said"] == name for row in wrong)
        lines.append(f"wrong {name}: {mine} of {n}, {mine / n:.2%} (95 % below {upper(mine, n):.2%})")
    return "\n".join([*lines, *(json.dumps(row) for row in wrong)])


def upper(count: int, n: int) -> float:
    """Upper end of Wilson's 95 % interval."""
    z, share = 1.96, count / n
    return (share + z * z / 2 / n + z * math.sqrt(share * (1 - share) / n + z * z / 4 / n / n)) / (1 + z * z / n)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no scenario after so many")
    given = parser.parse_args()
    end, rows = time.monotonic() + given.seconds, []
    known = [json.loads(line) for line in given.again.read_text().splitlines()] if given.again else None
    for task in known or range(given.first, given.first + given.count):
        if time.monotonic() > end:
            break
        rows.append(verdict_of(task) if isinstance(task, int) else again(task))
        if given.save:
            with given.save.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if given.table:
        rows = [json.loads(line) for line in given.table.read_text().splitlines()]
    print(table(rows))


if __name__ == "__main__":
    main()
