"""Random scenarios over every key of the schema: small, so that thousands run in a minute, and mostly valid.

`scenario(seed, number, traces)` is the same mapping for ever. A key of the schema that is never drawn fails
tests/test_fuzz.py; an engine knob is drawn by its declaration alone, and by VALUES where that says too little.
"""

import json
import math
import random
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel

from infersim.config.base import Description
from infersim.config.cluster import Autoscaler, Failure
from infersim.config.precision import FORMATS
from infersim.config.presets import load_preset
from infersim.config.prices import Prices
from infersim.config.resources import load_yaml, names, packaged
from infersim.config.router import Policy, Scorers
from infersim.config.scenario import Scenario
from infersim.config.slo import METRICS, STATISTICS
from infersim.engine.knobs import KNOBS, Knob

MODELS = {  # bytes of its weights in 16 bits (GB), most tokens, tables of blocks
    "Pythia-70M": (0.1, 2048, 1), "GPT-2": (0.3, 1024, 1), "Qwen2.5-0.5B": (1, 32768, 1),
    "Llama-3.2-1B": (2.5, 131072, 1),
    "Gemma-3-1B": (2, 32768, 7), "Gemma-2-2B": (5, 8192, 2), "Phi-3-mini-4k": (8, 4096, 1), "Yi-6B": (12, 4096, 1),
    "Llama-3.1-8B": (16, 131072, 1), "Mistral-7B-v0.1": (15, 32768, 1), "gpt-oss-20b": (14, 131072, 2),
    "DeepSeek-V2-Lite": (31, 163840, 1), "Qwen3-30B-A3B": (61, 40960, 1), "Mixtral-8x7B-v0.1": (94, 32768, 1),
    "Qwen3.5-35B-A3B": (70, 262144, 4), "MiMo-V2-Flash": (312, 262144, 6), "Llama-4-Scout-17B-16E": (237, 6317648, 4),
    "DeepSeek-V3.2": (719, 163840, 1),
}  # fmt: skip
WINDOWED = ("Mistral-7B-v0.1", "Phi-3-mini-4k")
SMALLER = {"Llama-3.1-8B": "Llama-3.2-1B", "Qwen3-30B-A3B": "Qwen2.5-0.5B", "Yi-6B": "Yi-6B"}
"""a model of the same vocabulary, which may draft"""
SPARSE = ("DeepSeek-V2-Lite", "Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "Qwen3.5-35B-A3B", "MiMo-V2-Flash", "DeepSeek-V3.2",
          "Llama-4-Scout-17B-16E")  # fmt: skip
PROFILES = names("hardware_profiles")
VALUES: dict[str, list[Any]] = {
    "max_num_seqs": [1, 2, 5, 16, 64], "max_num_batched_tokens": [1, 7, 64, 200, 512, 2048, 4096],
    "block_size": [1, 8, 16, 32, 64], "prefill_schedule_interval": [1, 4], "gpu_memory_utilization": [0.8, 0.9, 0.95],
    "long_prefill_token_threshold": [0, 1, 40, 300],
    "watermark": [0.0, 0.01, 0.1, 0.5], "jump_forward_share": [0.1, 0.5, 0.7], "jump_forward_tokens": [1, 4, 10],
    "kv_cache_memory_bytes": ["4 GiB", "20 GB"],
    "swap_space": [0, "1 GB", "8 GiB"], "kv_offloading_size": [0, "2 GB"],
    "kv_offloading_disk_size": [0, "3 GB"], "kv_offloading_disk_bandwidth": ["3 GB/s", "7 GB/s"],
    "stream_interval": [1, 2, 7, 50], "max_cudagraph_capture_size": [1, 3, 64, 600],
    "scheduler_recv_interval": [0, 1, 5, 30], "batch_wait_timeout_iters": [0, 1, 4, 30],
    "batch_wait_max_tokens_ratio": [0.0, 0.1, 1.0], "attention_dp_timeout_iters": [0, 1, 4, 30],
    "host_prompt_token_time": [0, "5 us", "100 us"],
}  # fmt: skip
"""of engine knobs whose declaration allows much that no deployment has"""
MAX_TOKENS = ("output_length", "max_model_len")
TIMES = [0, "1 us", "20 us", "1 ms", "30 ms"]
LIMITED = {"max_model_len", "num_gpu_blocks_override"}
"""knobs that depend on the lengths of requests: drawn by `_sizes`"""


class Draw(random.Random):
    """A source of draws with the words that scenarios are written in."""

    def chance(self, share: float) -> bool:
        return self.random() < share

    def log(self, low: float, high: float) -> float:
        return float(f"{math.exp(self.uniform(math.log(low), math.log(high))):.3g}")

    def whole(self, low: int, high: int) -> int:
        """A whole number, small ones more often."""
        return min(max(round(self.log(low + 1, high + 1)) - 1, low), high)

    def some(self, section: dict[str, Any], share: float = 0.3) -> dict[str, Any]:
        """A part of the section: each key by chance, values that are functions called."""
        return {key: value() if callable(value) else value for key, value in section.items() if self.chance(share)}


def write_traces(folder: Path) -> dict[str, str]:
    """Path -> format of some small traces, written into the folder."""
    traces, draw = {}, Draw("traces")
    times = sorted(draw.log(0.01, 20) for _ in range(30))
    lengths = [(draw.whole(1, 800), draw.whole(1, 60)) for _ in times]
    plain = ["arrival_s,prompt_tokens,output_tokens,which"]
    plain += [f"{t},{p},{o},{'ab'[i % 2]}" for i, (t, (p, o)) in enumerate(zip(times, lengths, strict=True))]
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    azure += [f"2023-11-16 18:17:{t:09.6f},{p},{o}" for t, (p, o) in zip(times, lengths, strict=True)]
    mooncake = [
        json.dumps({"timestamp": round(t * 1e3), "input_length": p, "output_length": o,
                    "hash_ids": [draw.randrange(3) if j == 0 else 10 * i + j for j in range(-(-p // 512))]})
        for i, (t, (p, o)) in enumerate(zip(times, lengths, strict=True))
    ]  # fmt: skip
    for name, lines in (("plain.csv", plain), ("azure.csv", azure), ("mooncake.jsonl", mooncake)):
        (folder / name).write_text("\n".join(lines) + "\n")
        traces[str(folder / name)] = name.partition(".")[0]
    (folder / "acceptance.csv").write_text("0.8,0.6,0.4\n0.9,0.9,0.9\n0.1,0.1,0.0\n")
    return traces


def scenario(seed: int, number: int, traces: dict[str, str]) -> dict[str, Any]:
    """Scenario `number` of a seed."""
    draw = Draw(f"{seed}-{number}")
    found: dict[str, Any] = {"model": draw.choice(list(MODELS)[: draw.choice([9, 12, len(MODELS)])])}
    gigabytes, longest, tables = MODELS[found["model"]]
    found["hardware"], profile = _hardware(draw)
    found["workload"] = workload(draw, longest, traces)
    found |= draw.some({"precision": lambda: _precision(draw, profile)}, 0.2 if "bf16" in profile["flops"] else 1)
    found |= (
        {"parallelism": parallelism} if (parallelism := _parallelism(draw, found["model"], gigabytes, profile)) else {}
    )
    if draw.chance(0.8):
        found["engine"] = engine(draw, profile, found, tables, longest)
    load = found["workload"]
    if draw.chance(0.15) and _may_speculate(found):
        found["speculation"] = speculation(draw, found["model"], traces)
    if draw.chance(0.06) and "speculation" not in found:
        found["early_exit"] = early_exit(draw)
    lora = "pcie_bandwidth" in profile and found["model"] not in SPARSE and tables == 1
    if "models" in load and lora and draw.chance(0.8):
        found["lora"] = {"adapters": {name: draw.choice([8, 16, 64]) for name in load["models"]}} | draw.some(
            {"max_loras": lambda: draw.whole(1, 3), "max_lora_rank": 64,
             "overlap_loading": not found.get("engine", {}).get("preset", "vllm").startswith("vllm")}, 0.5
        )  # fmt: skip
    elif "models" in load:
        load["models"] = {found["model"]: 1}
    if draw.chance(0.5) or "images" in load or "which" in load.get("model_column", ""):
        found["cluster"] = cluster(draw, found, tables, longest)
    if draw.chance(0.2):
        found["slo"] = slo(draw)
    if draw.chance(0.1):
        name = found["hardware"]["name"] if isinstance(found["hardware"], dict) else found["hardware"]
        kinds = get_args(Prices.model_fields["kind"].annotation)
        found["prices"] = draw.some({"kind": draw.choice(kinds), "usd_per_hour": {name: 2}}, 0.6)
    found["simulation"] = {"seed": draw.randrange(100)} | draw.some(
        {"replications": 2 if "request_rate" in load and "trace" not in load else 1}, 0.1
    )
    if draw.chance(0.03) and load["num_requests"] > 1:
        found["simulation"]["warmup"] = draw.choice([1e-4, "0.1 s", *["auto"] * ("request_rate" in load)])
    return found


def _may_speculate(found: dict[str, Any]) -> bool:
    flags, split = found.get("engine", {}), found.get("parallelism", {})
    beside = {"allocator", "jump_forward_share", "preemption_mode", "reserve"} & flags.keys()
    alone = split.get("pipeline", 1) == found["workload"].get("beam_width", 1) == 1
    return alone and not beside and flags.get("preset") not in ("orca", "vllm-0")


# --- workload ---------------------------------------------------------------------------------------------------------
def _length(draw: Draw, most: int, least: int = 1) -> Any:
    """A number of tokens, or one of the distributions."""
    mean = draw.whole(least, most)
    other = draw.whole(least, most)
    return draw.choice([
        mean, mean,
        {"mean": mean, "range_ratio": draw.choice([0.0, 0.25, 0.9])},
        {"uniform": sorted((mean, other))},
        {"lognormal": {"median": mean, "max": 4 * most} | draw.choice(
            [{"sigma": draw.choice([0.1, 0.9])}, {"p90": 2 * mean}, {"mean": 1.5 * mean}])},
        {"lognormal": {"mean": mean, "sigma": 0.5, "max": most}},
        {"quantiles": {"p0": min(mean, other), "p50": max(mean, other), "p100": 2 * max(mean, other)}},
    ])  # fmt: skip


def workload(draw: Draw, longest: int, traces: dict[str, str]) -> dict[str, Any]:
    most = min(draw.choice([60, 300, 2000]), longest // 8)
    load: dict[str, Any] = {"num_requests": draw.whole(1, 60)}
    rate = draw.log(0.5, 2000)
    if draw.chance(0.12):
        path = draw.choice(list(traces))
        load |= {"trace": path} | draw.some({"format": traces[path], "time_scale": draw.log(0.01, 3)})
        load |= draw.some({"model_column": "which"}, 0.3) if "plain" in path else {}
        if draw.chance(0.3):
            load |= {"request_rate": rate}
            load.pop("time_scale", None)
    else:
        load |= {"input_tokens": _length(draw, most), "output_tokens": _length(draw, draw.choice([1, 10, 80]))}
        arrivals = draw.choice(["rate", "rate", "rate", "inf", "ramp", "users", "users"])
        if arrivals == "rate":
            load |= {"request_rate": rate} | draw.some({"burstiness": draw.choice([0.2, 3, "inf"])})
            load |= draw.some({"duration": 30 / rate}, 0.1)
            load |= draw.some({"spikes": [{"at": 0.01, "duration": "0.1 s", "factor": draw.choice([0.1, 30])}],
                               "curve": [[0, 1], [0.1, draw.choice([0.1, 5])], [0.3, 2]]}, 0.07)  # fmt: skip
        elif arrivals == "ramp":
            load["ramp_up"] = {
                "strategy": draw.choice(["linear", "exponential"]),
                "start_rps": rate,
                "end_rps": 3 * rate,
            }
        elif arrivals == "users":
            load |= {"users": draw.whole(1, 20)} | draw.some({"think_time": draw.log(1e-3, 3)})
        elif draw.chance(0.5):
            load["request_rate"] = "inf"
        if draw.chance(0.2):
            load |= {"turns": _length(draw, 6)} | draw.some({"think_time": draw.log(1e-3, 3)})
            if load["turns"] != 1 and draw.chance(0.3):
                agents = {
                    "count": _length(draw, 4),
                    "input_tokens": _length(draw, 200),
                    "output_tokens": _length(draw, 50),
                }
                more = {"turns": _length(draw, 3), "share": 0.5, "think_time": 0.01, "inherits": True}
                load["sub_agents"] = agents | draw.some(more, 0.5)
        _sharing(draw, load)
    if "users" not in load and draw.chance(0.15):
        load["max_concurrency"] = draw.whole(1, 10)
    if draw.chance(0.15):
        load["timeout"] = draw.log(1e-3, 3)
    load |= draw.some({"retries": draw.whole(0, 4), "backoff": draw.log(1e-3, 1)}, 0.12)
    load |= draw.some(
        {"max_tokens": draw.choice([draw.whole(1, 100), {"factor": 1.5}, "output_length", "max_model_len"])}, 0.2
    )
    load |= draw.some(
        {
            "tenants": {
                "nancy": {"share": 2, "priority": 1},
                "bob": draw.some({"share": 3, "priority": 2, "goodput": {"ttft_ms": 80}}),
            }
        },
        0.1,
    )
    if "tenants" in load and not {"users", "turns", "max_concurrency"} & load.keys():
        load |= draw.some({"deadline_order": True})
    if "model_column" not in load:
        load |= draw.some({"models": {"a": 1, "b": 2.5}}, 0.1)
    return load


def _sharing(draw: Draw, load: dict[str, Any]) -> None:
    """What single requests may have in common, or beside their text."""
    if "turns" in load or "users" in load:
        return
    if draw.chance(0.12):
        load["prefixes"] = {"tokens": _length(draw, 200)} | draw.some({"count": draw.whole(1, 4)})
    if draw.chance(0.07):
        load["n"] = draw.choice([2, 3])
    elif draw.chance(0.05):
        load |= {"beam_width": draw.choice([2, 4])} | draw.some({"beam_turnover": draw.choice([0.0, 0.5, 1.0])})
    elif draw.chance(0.06):
        load["images"] = {"tokens": draw.whole(1, 300)} | draw.some({"per_request": _length(draw, 3), "share": 0.5})


# --- one replica ------------------------------------------------------------------------------------------------------
def _hardware(draw: Draw) -> tuple[Any, dict[str, Any]]:
    """A packaged profile by name, or itself with some keys left out or changed; and the profile."""
    name = draw.choice(["h100-sxm", "a100-sxm-80gb", "h200-sxm", *PROFILES])
    profile = _profile(name)
    if draw.chance(0.85):
        return name, profile
    optional = [key for key, field in Scenario.model_fields["hardware"].annotation.model_fields.items()  # type: ignore[union-attr]
                if not field.is_required()]  # fmt: skip
    gone = {key for key in optional if draw.chance(0.2)} - {"also_called", "efficiencies_of"}
    changed = {key: value for key, value in profile.items() if key not in gone}
    changed |= draw.some({"efficiencies_of": "h100-sxm", "disagreements": "two datasheets", "tdp": "700 W",
                          "launch": {"graph": "1 us", "eager": "4 us", "source": "measured"},
                          "beside_prefill": {"least": 1.2, "growth": 1e-9, "head": 1e-7, "block": 1e-8,
                                             "source": "none"},
                          "calibration": {"device": "d", "driver": "1", "stack": "vllm", "version": "0.19",
                                          "date": "today",
                                          "command": "c", "repeat_spread": 0.01, "errors": {"gemm": "1 %"},
                                          "notes": []},
                          "memory_bandwidth": draw.log(1e11, 1e13)}, 0.3)  # fmt: skip
    return changed, changed


_PROFILES: dict[str, dict[str, Any]] = {}


def _profile(name: str) -> dict[str, Any]:
    if name not in _PROFILES:
        _PROFILES[name] = load_yaml(packaged("hardware_profiles") / f"{name}.yaml")
    return _PROFILES[name]


def _memory(profile: dict[str, Any]) -> float:
    """GB of a device."""
    words = str(profile["memory_usable"]).split()
    return float(words[0]) * {"B": 1e-9, "MiB": 2**20 / 1e9, "GiB": 2**30 / 1e9, "GB": 1.0}[[*words, "B"][1]]


def _precision(draw: Draw, profile: dict[str, Any]) -> dict[str, Any]:
    if "bf16" not in profile["flops"]:
        return {"weights": "fp16", "activations": "fp16"}
    weights = ["auto", "bf16", "fp16"] + ["fp8", "fp8_block"] * ("fp8" in profile["flops"])
    weights += [name for name in FORMATS if name.endswith("_wo") or name == "int4"]
    found = draw.some({"weights": draw.choice(weights), "kv_cache": draw.choice(["auto", "bf16", "fp8"])}, 0.6)
    return found | draw.some({"activations": "fp16"}, 0.1 if found.get("weights", "auto") != "bf16" else 0)


def _parallelism(draw: Draw, model: str, gigabytes: float, profile: dict[str, Any]) -> dict[str, Any]:
    """As many GPUs as the weights need, sometimes more."""
    needed = 1
    while needed < 32 and gigabytes > 0.6 * needed * _memory(profile):
        needed *= 2
    if needed == 1 and draw.chance(0.7):
        return {}
    gpus, found = needed * draw.choice([1, 1, 2]), {}
    gpus = 8 if model.startswith("Llama-4") else gpus
    if model in SPARSE:
        found = draw.choice(
            [{}, {"expert": gpus}, {"expert": gpus, "expert_skew": 0.7}, {"expert": 1, "moe_tensor": gpus}]
        )
        if found.get("expert_skew") and gpus > 1 and draw.chance(0.5):
            found["num_redundant_experts"] = gpus
        data = draw.choice([1, 1, gpus]) if gpus <= 8 else 1
        if data > 1 and found.get("expert", 1) > 1:
            found["all2all_backend"] = draw.choice(
                ["allgather_reducescatter", "flashinfer_nvlink_one_sided", "deepep_low_latency"]
            )
            found |= {"enable_dbo": True} if found["all2all_backend"].startswith("deepep") and draw.chance(0.5) else {}
        return {"tensor": gpus // data, "attention_data": data, **found}
    stages = 2 if gpus > 1 and draw.chance(0.3) else 1
    if stages == 1 and gpus % 2 == 0 and draw.chance(0.05):
        return {"tensor": gpus // 2, "prefill_context": 2}
    found = {"tensor": gpus // stages} | ({"pipeline": stages} if stages > 1 else {})
    return found | ({"context": 2} if found["tensor"] > 1 and draw.chance(0.05) else {})


def _of_knob(draw: Draw, knob: Knob) -> Any:
    """Any value that its declaration allows."""
    if knob.name in VALUES:
        return draw.choice(VALUES[knob.name])
    if knob.type is bool:
        return draw.chance(0.5)
    if knob.choices:
        return draw.choice(knob.choices)
    if knob.unit == "s":
        return draw.choice(TIMES)
    raise AssertionError(f"tests/fuzz/draw.py: VALUES needs values for the knob {knob.name}")


def engine(draw: Draw, profile: dict[str, Any], found: dict[str, Any], tables: int, longest: int) -> dict[str, Any]:
    """A preset and some of its knobs, kept clear of most of what does not go together."""
    beams = "beam_width" in found["workload"]
    presets = names("engine_presets")
    flags: dict[str, Any] = {"preset": "vllm-0" if beams else draw.choice(presets)} if beams or draw.chance(0.8) else {}
    preset = flags.get("preset", "vllm-0.33")
    whole, windows = not load_preset(preset).values["enable_chunked_prefill"], tables > 1 or found["model"] in WINDOWED
    share = draw.choice([0.0, 0.05, 0.15])
    keys = [knob for knob in KNOBS if knob.user and knob.name not in LIMITED and draw.chance(share)]
    for knob in keys:
        if not knob.engines or any(preset.startswith(name[:4]) for name in knob.engines):
            flags[knob.name] = _of_knob(draw, knob)
    if flags.get("batch_wait_max_tokens_ratio") is not None:
        flags["batch_wait_timeout_iters"] = flags.get("batch_wait_timeout_iters") or 4
    if beams or "n" in found["workload"]:
        flags.pop("stream_interval", None)
    if beams:
        for key in ("enable_prefix_caching", "allocator", "reserve", "jump_forward_share", "jump_forward_tokens",
                    "prefix_cache", "async_scheduling", "preemption_mode", "kv_offloading_size",
                    "scheduling_policy"):  # fmt: skip
            flags.pop(key, None)
    if str(flags.get("attention_kernel", "")).startswith("flash") and "h100" not in profile["name"].lower():
        flags["attention_kernel"] = "standard"
    interval = load_preset(preset).values["has_prefill_schedule_interval"]
    if found.get("parallelism", {}).get("attention_data", 1) == 1 or not interval:
        flags.pop("prefill_schedule_interval", None)
    if whole:
        flags["enable_chunked_prefill"] = flags.get("enable_chunked_prefill", False)
    if found["model"] == "Qwen3.5-35B-A3B":
        flags.pop("enable_prefix_caching", None)
        flags.pop("block_size", None)
    _sizes(draw, flags, tables, longest)
    pieces = flags.get("allocator", "paged") != "paged" or (preset == "orca" and "allocator" not in flags)
    if pieces:
        flags.pop("enable_prefix_caching", None)
        if flags.get("reserve") in ("first-chunk", "whole-prompt", "to-completion"):
            del flags["reserve"]
    if flags.get("jump_forward_share"):
        flags.pop("async_scheduling", None)
        flags["jump_forward_tokens"] = 4 if flags["jump_forward_share"] < 0.8 else 10
        flags["jump_forward_share"] = min(flags["jump_forward_share"], 0.7)
    elif "jump_forward_tokens" in flags:
        flags |= {"jump_forward_share": 0.4}
        flags.pop("async_scheduling", None)
    disk = {"kv_offloading_disk_size", "kv_offloading_disk_bandwidth", "kv_offloading_disk_latency"} & flags.keys()
    how = {"kv_offloading_latency", "kv_offloading_load", "kv_offloading_write_policy"} & flags.keys()
    if disk or how or flags.get("kv_offloading_size"):
        if (
            pieces
            or beams
            or "prefix_cache" in flags
            or windows
            or found["model"] == "Qwen3.5-35B-A3B"
            or preset.startswith("sglang")
            or "pcie_bandwidth" not in profile
        ):
            for key in [key for key in flags if key.startswith("kv_offloading")]:
                del flags[key]
        else:
            flags |= {"enable_prefix_caching": True, "kv_offloading_size": draw.choice(["200 MB", "4 GB"])}
            if disk:
                flags |= {
                    "kv_offloading_disk_size": draw.choice(["300 MB", "9 GB"]),
                    "kv_offloading_disk_bandwidth": "7 GB/s",
                }
    if flags.get("scheduling_policy") == "lpm":
        if pieces or windows:
            del flags["scheduling_policy"]
        else:
            flags |= {"prefix_cache": "radix", "enable_prefix_caching": True}
    if "prefix_cache" in flags:
        if pieces or windows:
            del flags["prefix_cache"]
        else:
            flags["enable_prefix_caching"] = True
    if flags.get("ignore_eos") and not flags.get("enable_prefix_caching", not pieces):
        del flags["ignore_eos"]
    tree = flags.get("prefix_cache", load_preset(preset).values["prefix_cache"]) == "radix"
    if flags.get("preemption_mode") == "swap" and (tree or "pcie_bandwidth" not in profile):
        del flags["preemption_mode"]
    return flags


def _sizes(draw: Draw, flags: dict[str, Any], tables: int, longest: int) -> None:
    """A max_model_len near what the requests need, and KV blocks for one to several of them."""
    whole = not flags.get("enable_chunked_prefill", True)
    if draw.chance(0.95 if whole else 0.5):  # a step may hold a whole prompt: its table is as long
        flags["max_model_len"] = min(longest, draw.choice([300, 1000, 3000, 20000]))
    length = flags.get("max_model_len")
    if draw.chance(0.7) and (not whole or length):  # most of the time goes into long tables
        flags.setdefault("max_num_batched_tokens", draw.choice([200, 512, 2048]))
    if whole and "max_num_batched_tokens" in flags:
        flags["max_num_batched_tokens"] = max(flags["max_num_batched_tokens"], length or longest)
    if flags.get("preset", "").startswith("sglang") and "max_num_batched_tokens" in flags:  # in whole pages
        size = flags.get("block_size", 1)
        flags["max_num_batched_tokens"] = -(-flags["max_num_batched_tokens"] // size) * size
    if "max_num_seqs" in flags and "max_num_batched_tokens" in flags:
        flags["max_num_seqs"] = min(flags["max_num_seqs"], flags["max_num_batched_tokens"])
    if length and tables != 4 and draw.chance(0.5):
        preset = load_preset(flags.get("preset", "vllm-0.33")).values
        allocator = flags.get("allocator", preset["allocator"])
        blocks = tables * -(-length // flags.get("block_size", preset["block_size"] if allocator == "paged" else 1))
        blocks = 1 << (blocks - 1).bit_length() if allocator == "buddy" else blocks
        flags["num_gpu_blocks_override"] = 2 + blocks + draw.choice([0, blocks // 3, 3 * blocks])


def speculation(draw: Draw, model: str, traces: dict[str, str]) -> dict[str, Any]:
    depth = draw.choice([1, 3, 5])
    method = draw.choice([*names("drafters"), "mine"])
    if (method == "draft_model") != (model in SMALLER) and draw.chance(0.5 if model in SMALLER else 1):
        method = "draft_model" if model in SMALLER else "eagle3" if method == "draft_model" else method
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": depth}
    chance = draw.random()
    acceptance = draw.choice([
        {"rate": chance}, {"conditional": [0.9, chance]}, {"synthetic_acceptance_rates": [0.9, 0.9 * chance]},
        {"synthetic_acceptance_length": 1 + depth * chance / 2}, {"match": {"enter": chance, "stay": 0.9}},
        {"trace": str(Path(next(iter(traces))).parent / "acceptance.csv")},
    ]) | draw.some({"request_spread": 1.0, "later_spread_share": 0.5}, 0.2)  # fmt: skip
    found |= draw.choice([{"acceptance": acceptance}] * 3 + [{"classes": {"chat": acceptance | {"share": 1},
                                                                         "code": {"rate": 0.9, "share": 2}}}]
                         * ("trace" not in acceptance or draw.chance(0.1)))  # fmt: skip
    if method == "mine":
        found["drafting"] = draw.choice([
            {"kind": "layer", "inputs": 2, "vocabulary": 1000, "trees": True}, {"kind": "heads", "trees": True},
            {"kind": "block", "inputs": 3, "layers": 2}, {"kind": "layer", "inputs": 2, "layers": 2, "parallel": True},
            {"kind": "look_up", "sequence_time": "10 us"}]) | {"source": "the user's"}  # fmt: skip
    if method == "draft_model":
        found["model"] = SMALLER[model]
        found |= draw.choice([{}, {"draft_tensor_parallel_size": 1},
                              {"drafter": {"latency": "50 us"} | draw.some({"hardware": "l4"}, 0.6)}])  # fmt: skip
    if method == "self":
        found["exit_layer"] = draw.choice([1, 3])
    trees = method in ("eagle", "eagle3", "medusa") or found.get("drafting", {}).get("trees")
    if trees and draw.chance(0.4):
        found["tree"] = {"depth": draw.whole(1, depth), "width": draw.choice([1, 2, 4])}
    elif draw.chance(0.3):
        sizes = draw.choice(["goodput", [[1, depth], [4, 0]], [[2, 1]]])
        found["num_speculative_tokens_per_batch_size"] = sizes
    return found


def early_exit(draw: Draw) -> dict[str, Any]:
    curve = {"threshold": draw.choice([0.1, 0.5, 2]), "curve": [[0.2, 0.1], [1, draw.choice([0.1, 0.8])]]}
    found = draw.choice([{"exit_layers": [2], "shares": [draw.random()]}, {"exit_layers": [2, 4], "shares": [0.3, 0.2]},
                         {"exit_layers": [1, 3], "confidence": [curve, curve]}])  # fmt: skip
    policy = draw.choice(
        ["leave_alone", "wait_for_all", *["leave_alone", "wait_for_all", "rebatch"] * draw.chance(0.5)]
    )
    more = {"per": draw.choice(["token", "request"]), "missing_kv": draw.choice(["copy", "recompute"])}
    more |= {"min_batch": draw.whole(1, 10), "max_wait": "5 ms"} if policy == "rebatch" else {}
    return {**found, "policy": policy, **draw.some(more, 0.5)}


# --- cluster ----------------------------------------------------------------------------------------------------------
def cluster(draw: Draw, found: dict[str, Any], tables: int, longest: int) -> dict[str, Any]:
    load = found["workload"]
    sessions = "turns" in load or "users" in load

    def router() -> Any:
        policy = draw.choice([p for p in get_args(Policy) if p != "session" or sessions])
        if policy == "kv-aware":
            found.setdefault("engine", {}).pop("allocator", None)
            if found["engine"].get("preset", "vllm-0.33") in ("orca", "static", "sarathi", "vllm-0"):
                policy = "least-kv"
            else:
                found["engine"]["enable_prefix_caching"] = True
        more: dict[str, Any] = {
            "overlap_weight": draw.choice([0.0, 1, 5]),
            "host_cache_hit_weight": draw.choice([0.0, 0.8]),
            "balance_abs_threshold": draw.whole(0, 20),
            "balance_rel_threshold": draw.choice([1, 1.1]),
            "cache_threshold": draw.choice([0.1, 0.9]),
        }
        if policy == "weighted":
            more["scorers"] = {**dict.fromkeys(Scorers.model_fields, 0.5), **draw.some({"prefix": 0.0, "queue": 3})}
        if policy not in ("round-robin", "random", "weighted-random", "session"):
            more["signal_age"] = draw.choice([0, "1 ms", "0.2 s"])
        return draw.choice([policy, {"policy": policy, **draw.some(more, 0.5)}])

    def scaler(count: int, least: int) -> dict[str, Any]:
        startup = draw.some(
            {"node": draw.log(1e-3, 2), "load_bandwidth": draw.log(1e9, 1e12), "warmup": "0.1 s", "sleep": True}
        )
        policies = get_args(Autoscaler.model_fields["policy"].annotation)
        most = count + draw.whole(0, 3)
        return {"target": draw.log(0.01, 20), "max": most} | draw.some(
            {"policy": draw.choice(policies), "min": draw.choice([least, min(1, most)]), "interval": draw.log(0.01, 3),
             "scale_down_delay": draw.log(0.01, 10), "startup": startup}, 0.6)  # fmt: skip

    def group(least: int = 1) -> dict[str, Any]:
        count = draw.choice([1, 1, 2, 3])
        part: dict[str, Any] = {"replicas": count}
        if draw.chance(0.15):
            part["autoscaler"] = scaler(count, least)
            part["autoscaler"]["min"] = min(part["autoscaler"].get("min", 1), count)
        return part

    def kind(alike: bool, least: int = 0) -> dict[str, Any]:
        """alike: pools hand KV over, so their memory must be divided alike."""
        part = group(least) | draw.some({"weight": draw.choice([0.5, 3])}, 0.1)
        if draw.chance(0.1):
            part["hardware"] = found["hardware"]
        if draw.chance(0.5) and "lora" in found:
            part["lora"] = found["lora"]
        for key in ("precision", "parallelism", "model"):
            if key in found and draw.chance(0.1):
                part[key] = found[key]
        part |= draw.some({"served_model_name": found["model"]}, 0.05)
        if draw.chance(0.2):
            part["engine"] = dict(found.get("engine", {}))
            if not alike:
                seqs = 4 if part["engine"].get("max_num_batched_tokens", 9) > 4 else 1
                part["engine"] |= draw.some({"max_num_seqs": seqs, "scheduling_policy": "priority"})
        return part

    spec: dict[str, Any] = {}
    grouped = load.get("beam_width", 1) > 1 or load.get("n", 1) > 1
    shape = draw.choice(["copies", "copies", "kinds", "pools"])
    if shape == "pools" and not grouped:
        for name in ("prefill", "decode"):
            spec[name] = kind(True, 1) | draw.some({"router": router}, 0.5)
    elif shape == "kinds":
        spec |= {"kinds": [kind(False) for _ in range(draw.choice([1, 2, 3]))]} | draw.some({"router": router}, 0.7)
    else:
        spec |= group(0) | draw.some({"router": router}, 0.7)
    if "images" in load:
        spec["encode"] = group(1) | {
            "encoder": {
                "hidden_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
            }
            | draw.some({"gated": True, "patches_per_token": 4})
        }
        spec["encode"] |= draw.some({"router": router, "hardware": found["hardware"], "weight": 2}, 0.2)  # fmt: skip
    linked = "prefill" in spec or "encode" in spec
    if linked:
        spec["transfer"] = {"bandwidth": draw.log(1e7, 1e12)} | draw.some(
            {"latency": draw.log(1e-6, 0.1), "request_time": draw.log(1e-6, 0.1),
             "overlap": draw.choice(["none", "layers"]),
             "hand_over": draw.choice(["always", "never", 0, 30])}, 0.5)  # fmt: skip
    alike = "prefill" in spec and not any("autoscaler" in spec[name] for name in ("prefill", "decode"))
    if alike and draw.chance(0.3):
        spec["decode"] = spec["prefill"] | {key: spec["decode"][key] for key in ("replicas",)}
        low, high = sorted(draw.log(1e-3, 1) for _ in range(2))
        spec["role_switch"] = draw.some(
            {"interval": draw.log(0.01, 3), "switch_time": draw.log(1e-3, 3),
             "prefill_queue_scale_up_threshold": draw.choice([0.2, 1]), "prefill_queue_scale_down_threshold": 0.2,
             "decode_kv_scale_up_threshold": max(high, 0.5), "decode_kv_scale_down_threshold": min(low, 0.5)}
        )  # fmt: skip
    flags = found.get("engine", {})
    caches = flags.get("enable_prefix_caching", True) and not {"allocator", "prefix_cache"} & flags.keys()
    if caches and tables == 1 and not grouped and flags.get("preset", "vllm-0.33").startswith("vllm-0."):
        spec |= draw.some({"kv_store": {"size": draw.choice(["1 GB", "1 TB"]), "bandwidth": draw.log(1e8, 1e11)}
                           | draw.some({"latency": "1 ms"})}, 0.1)  # fmt: skip
    if draw.chance(0.15):
        spec["admission"] = {"max_outstanding": draw.whole(1, 8)} | draw.some({"max_queue": draw.whole(0, 8)}, 0.5)
        if not linked:
            own = {"max_num_queued_reqs": draw.whole(1, 8), "max_num_queued_tokens": draw.whole(1, 2000)}
            spec["admission"] |= draw.some(own)
    if "role_switch" not in spec and draw.chance(0.2):
        first = spec.get("replicas", 1) if "kinds" not in spec and "prefill" not in spec else 1
        spec["failures"] = [_failure(draw, first, linked) for _ in range(draw.choice([1, 1, 2, 4]))]
    return spec


def _failure(draw: Draw, replicas: int, linked: bool) -> dict[str, Any]:
    kinds = [kind for kind in get_args(Failure.model_fields["kind"].annotation) if kind != "partition" or linked]
    found: dict[str, Any] = draw.choice([{"at": draw.log(1e-3, 3)}, {"mean_time_between": draw.log(0.01, 3)}])
    more = {"kind": draw.choice(kinds), "replica": draw.randrange(replicas), "factor": draw.choice([1, 3, 100])}
    return found | draw.some(more | {"duration": draw.log(1e-3, 2)}, 0.7)


def slo(draw: Draw) -> dict[str, Any]:
    limits = {f"{s}_{m}_ms": draw.log(0.1, 1e5) for s in STATISTICS for m in METRICS}
    good = {f"{m}_ms": draw.log(1, 1e4) for m in ("ttft", "tpot", "e2el")}
    return draw.some(limits, 0.1) | draw.some({"goodput": draw.some(good, 0.7)}, 0.3)


# --- which keys -------------------------------------------------------------------------------------------------------
def _inner(annotation: Any) -> list[type[BaseModel]]:
    """The descriptions that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) if part is not NoneType for model in _inner(part)]


def keys(model: type[BaseModel] = Scenario) -> set[tuple[str, str]]:
    """(description, key) of all that a scenario may say."""
    found: set[tuple[str, str]] = set()
    todo, seen = [model], {model}
    while todo:
        here = todo.pop()
        for name, field in here.model_fields.items():
            found.add((here.__name__, name))
            new = [inner for inner in _inner(field.annotation) if inner not in seen and issubclass(inner, Description)]
            seen |= set(new)
            todo += new
    return found


def used(data: Any, model: type[BaseModel] = Scenario) -> set[tuple[str, str]]:
    """(description, key) of all that these scenarios say."""
    found: set[tuple[str, str]] = set()
    for name, value in data.items():
        if name in model.model_fields and value is not None:
            found.add((model.__name__, name))
            for inner in _inner(model.model_fields[name].annotation):
                for section in _sections(value, inner):
                    found |= used(section, inner)
    return found


def _sections(value: Any, model: type[BaseModel]) -> list[dict[str, Any]]:
    """The mappings in a value that are of this description."""
    if isinstance(value, list | tuple):
        return [section for one in value for section in _sections(one, model)]
    if not isinstance(value, dict):
        return []
    if value.keys() <= model.model_fields.keys() and value:
        return [value]
    return [section for one in value.values() for section in _sections(one, model)]
