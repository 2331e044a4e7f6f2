"""Random scenarios for the referee, one JSON object a line: every feature that a preset claims, tight memory, ties.

python tests/conformance/scenarios.py ENGINE SEED NUMBER [FEATURE ...]      vllm or sglang; NUMBER of each; default: all
"""

import json
import sys
from random import Random

FEATURES = (
    "plain", "tight", "early", "threshold", "unchunked", "abort", "priority", "watermark", "caching", "turns",
    "samples", "ngram", "ngram+turns", "ngram+bybatch", "eagle", "eagle+turns", "draftmodel", "window", "window+turns",
    "hybrid", "hybrid+turns", "eagle+hybrid+turns", "mamba", "pp2", "pp4", "pp4+tight", "mix",
    "wild", "interval", "interval+tight+turns", "states+caching", "states+turns", "states+threshold+priority+turns",
)  # fmt: skip
SYNCHRONOUS = ("ngram", "pp")
"""features that begin so do not run under asynchronous scheduling"""

WILD = (
    "early", "threshold", "unchunked", "tight", "abort", "priority", "watermark", "caching", "turns", "samples",
    "eagle", "draftmodel", "window", "hybrid", "mamba",
)  # fmt: skip
"""of which `wild` draws six at once"""


def scenario(random: Random, feature: str, number: int) -> dict:
    """One scenario; a feature is parts joined by +, `async` among them."""
    parts = feature.split("+")
    has = set(parts)
    if "mix" in has:
        has |= set(random.sample(["early", "threshold", "turns", "tight", "abort", "priority", "eagle"], 3))
    if "wild" in has:
        has |= set(random.sample(WILD, 6))
    length = random.choice([128, 256, 512])
    groups = [[0, 1]]
    if has & {"window"}:
        groups = [[random.choice([16, 33, 48, 64, 100]), 1]]
    elif has & {"hybrid"}:
        groups = [[0, random.choice([1, 1, 2])], [random.choice([16, 33, 48, 64, 100]), random.choice([1, 2, 3])]]
    elif has & {"mamba", "states"}:
        groups = [[0, 1], [1, random.choice([1, 2, 3])]]
    size = random.choice([16, 16, 32])
    tables = sum(count for _, count in groups)
    blocks = 1 + -(-length // size) * tables
    blocks += random.choice([0, 1, 2, blocks // 2] if has & {"tight", "priority", "turns"} else [0, blocks, 4 * blocks])
    seqs = random.choice([1, 2, 3, 4, 6, 8, 12, 16])
    k, method = random.choice([1, 2, 3, 5]), next((m for m in ("ngram", "eagle", "draftmodel") if m in has), None)
    budget = max(random.choice([16, 32, 48, 64, 100, 128, 256]), seqs * (k + 2 if method else 1))
    if "unchunked" in has:
        budget += length
    spec = {"method": method.replace("draftm", "draft_m"), "k": k} if method else None
    if "bybatch" in has:
        spec["by_batch"] = [0] + [random.randint(0, k) for _ in range(seqs)]
    config = {
        "block_size": size,
        "num_gpu_blocks": blocks,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": length,
        "enable_chunked_prefill": "unchunked" not in has,
        "long_prefill_token_threshold": random.choice([7, 16, 24, 40]) if "threshold" in has else 0,
        "enable_prefix_caching": bool(has & {"caching", "turns", "samples"})
        and ([w for w, _ in groups[1:]] != [1] or "states" in has),
        "policy": "priority" if "priority" in has else "fcfs",
        "async_scheduling": "async" in has,
        "scheduler_reserve_full_isl": random.random() < 0.8,
        "watermark": random.choice([0.01, 0.05, 0.2]) if "watermark" in has else 0.0,
        "kv_groups": groups,
        "speculative": spec,
        "pipeline": 4 if "pp4" in has else 2 if "pp2" in has else 1,
        "prefix_cache_retention_interval": 0,
        "prefill_schedule_interval": random.choice([2, 3, 8]) if "interval" in has else 1,
    }
    rows = requests(random, has, length)
    accept = chance = None
    if spec:
        chance = random.choice([0.0, 0.3, 0.7, 0.9, 1.0])
        accept = [[accepted(random, chance, k) for _ in range(row["output"] + 1)] for row in rows]
    return {"id": f"{feature}/{number}", "feature": feature, "config": config, "requests": rows, "accept": accept}


SGLANG = (
    "plain", "tight", "early", "unchunked", "caching", "turns", "tight+turns", "lpm", "lpm+turns", "page", "page+turns",
    "mixed", "mixed+turns", "ignoreeos", "ignoreeos+tight+turns", "wild",
)  # fmt: skip
"""features of SGLang; again under asynchronous scheduling (its overlap schedule)"""


def of_sglang(random: Random, feature: str, number: int) -> dict:
    """One scenario for SGLang: memory is counted in pages, of one token but with `page`."""
    parts = set(feature.split("+"))
    if "wild" in parts:
        parts |= set(random.sample(["tight", "early", "caching", "turns", "lpm", "page", "mixed"], 4))
    has = parts | ({"caching"} if parts & {"lpm", "ignoreeos"} else set())
    each = scenario(random, "+".join(sorted(has - {"wild"})), number)
    config, size = each["config"], random.choice([2, 16, 64]) if "page" in has else 1
    tokens = config["num_gpu_blocks"] * config["block_size"]
    most = max(row["prompt"] + row["max_tokens"] for row in each["requests"])
    tokens = max(tokens if "tight" not in has else random.randint(most, 3 * most), most) + 2 * size + 1
    budget = config["max_num_batched_tokens"]
    config |= {
        "block_size": size,
        "num_gpu_blocks": -(-tokens // size),
        "max_num_batched_tokens": -(-(budget + (config["max_num_seqs"] if "mixed" in has else 0)) // size) * size,
        "policy": "lpm" if "lpm" in has else "fcfs",
        "mixed": "mixed" in has,
        "max_prefill_tokens": 0 if "unchunked" in has else 16384,
        "ignore_eos": "ignoreeos" in has,
    }
    return each | {"id": f"{feature}/{number}", "feature": feature}


def accepted(random: Random, chance: float, k: int) -> int:
    n = 0
    while n < k and random.random() < chance:
        n += 1
    return n


def requests(random: Random, has: set, length: int) -> list[dict]:
    rows: list[dict] = []
    arrival, shared = 1 / 128, [[1001 + i, random.choice([5, 16, 33, 62])] for i in range(3)]
    for i in range(random.randint(2, 24)):
        arrival += random.choice([0, 0, 0, 1, 7, 60, 130, 600]) / 64
        prompt = random.choice([random.randint(1, length // 2), random.randint(1, 16), random.randint(1, length - 1)])
        segments = []
        if "turns" in has and rows and random.random() < 0.6:
            before = random.choice(rows)
            used = sum(n for _, n in before["segments"])
            segments = [*before["segments"], [before["name"], before["prompt"] + before["output"] - used]]
            prompt = max(prompt, min(sum(n for _, n in segments) + random.randint(1, 20), length - 1))
        elif "samples" in has and rows and random.random() < 0.6:
            segments, prompt, arrival = rows[-1]["segments"], rows[-1]["prompt"], rows[-1]["arrival"]
            segments = segments if sum(n for _, n in segments) >= prompt else [[2000 + i, prompt]]
            rows[-1]["segments"] = segments
        elif has & {"caching", "turns"}:
            segments = random.sample(shared, random.randint(0, 2))
        kept, left = [], prompt
        for name, n in segments:
            if left > 0:
                kept.append([name, min(n, left)])
                left -= n
        most = random.randint(1, min(length - prompt, 60))
        output = random.randint(1, most) if "early" in has else most
        abort = arrival + random.randint(0, 1500) / 64 + 1 / 256 if "abort" in has and random.random() < 0.4 else None
        rows.append(
            {
                "arrival": arrival,
                "prompt": prompt,
                "output": output,
                "max_tokens": most,
                "abort": abort,
                "priority": random.randint(0, 2) if "priority" in has else 0,
                "name": i + 1,
                "segments": kept,
            }
        )
    return rows


def scenarios(seed: int, number: int, features: tuple[str, ...] = (), engine: str = "vllm") -> list[dict]:
    """`number` of each feature, and again under asynchronous scheduling where it runs so."""
    known, draw = (SGLANG, of_sglang) if engine == "sglang" else (FEATURES, scenario)
    every = [*known, *(f"async+{name}" for name in known if not name.startswith(SYNCHRONOUS))]
    return [draw(Random(f"{seed} {name} {i}"), name, i) for name in features or every for i in range(number)]


if __name__ == "__main__":
    for each in scenarios(int(sys.argv[2]), int(sys.argv[3]), tuple(sys.argv[4:]), sys.argv[1]):
        print(json.dumps(each))
