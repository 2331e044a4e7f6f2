"""Requests that vLLM served one by one: their arrivals replayed, each request's times against its own."""

import json
from pathlib import Path

import numpy as np
from common import percent, preset_of, read_table

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.run import simulate
from infersim.workload.requests import Requests

FILE, META = "e2e/vllm_requests.csv", "e2e/vllm_meta.json"
COLUMNS = (
    "config req input_toks output_toks queued_s first_token_s last_token_s peer_sim_ttft_ms peer_sim_tpot_ms"
    " peer_sim_latency_ms"
)
HARDWARE = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000"}


def scenario_of(meta: dict):
    """The server of one configuration; its KV blocks are the logged ones where the log has them."""
    flags = meta["engine_kwargs"]
    engine = {
        "preset": preset_of("vllm", meta["vllm_version"]),
        "max_num_seqs": flags["max_num_seqs"],
        "max_num_batched_tokens": flags["max_num_batched_tokens"],
        "host_request_time": 0,
        "host_request_latency": 0,
        "host_prompt_token_time": 0,  # the log's times run from when the scheduler has the request
    }
    if flags["max_model_len"]:
        engine["max_model_len"] = flags["max_model_len"]
    if meta["kv_cache"]:
        engine["num_gpu_blocks_override"] = meta["kv_cache"]["num_gpu_blocks"]
    workload = {"request_rate": 1, "num_requests": 1, "input_tokens": 1, "output_tokens": 1}  # replaced by the log
    return build_scenario(
        {
            "model": meta["model"].split("/")[-1],
            "hardware": HARDWARE[meta["hardware"]],
            "workload": workload,
            "parallelism": {
                "tensor": meta["tp"],
                "attention_data": meta["dp"],
                "expert": meta["tp"] * meta["dp"] if meta["ep"] > 1 else 1,
            },
            "engine": engine,
        },
        meta["config"],
    )


def _configurations(path: Path) -> list[dict]:
    needed = ("config", "model", "hardware", "tp", "dp", "ep", "vllm_version", "engine_kwargs", "kv_cache")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, list) or any(key not in meta for meta in found for key in needed):
        raise InputError(f"{path}: must be a list of configurations with {', '.join(needed)}")
    return found


def evaluate(data: Path) -> list[dict]:
    """One entry per configuration that the log has, and under "requests" the arrays behind it."""
    log = read_table(data / FILE, COLUMNS)
    entries = []
    for meta in _configurations(data / META):
        rows = log[log.config == meta["config"]].sort_values("queued_s", kind="stable")
        if rows.empty:
            continue
        requests = Requests(
            arrival=rows.queued_s.to_numpy(float),
            prompt_tokens=rows.input_toks.to_numpy("i4"),
            output_tokens=rows.output_toks.to_numpy("i4"),
            request_id=rows.req.to_numpy("i8"),
        )
        result = simulate(scenario_of(meta), requests)
        done, gaps = result.requests, rows.output_toks.to_numpy() - 1
        ours = {
            "ttft": done["first_token"] - done["arrival"],
            "tpot": (done["last_token"] - done["first_token"]) / gaps,
            "e2e": done["last_token"] - done["arrival"],
        }
        log_of = {
            "ttft": (rows.first_token_s - rows.queued_s).to_numpy(),
            "tpot": ((rows.last_token_s - rows.first_token_s) / gaps).to_numpy(),
            "e2e": (rows.last_token_s - rows.queued_s).to_numpy(),
        }
        peer = {"ttft": rows.peer_sim_ttft_ms, "tpot": rows.peer_sim_tpot_ms, "e2e": rows.peer_sim_latency_ms}

        def mean_error(name: str, ours=ours, log_of=log_of) -> float:
            return round(float(percent(ours[name].mean(), log_of[name].mean())), 2)

        ninety_nine = (np.percentile(times["ttft"], 99) for times in (ours, log_of))
        entries.append(
            {
                "config": meta["config"],
                "n": len(rows),
                "ttft_mean_err_pct": mean_error("ttft"),
                "ttft_p99_err_pct": round(float(percent(*ninety_nine)), 2),
                "tpot_mean_err_pct": mean_error("tpot"),
                "e2e_mean_err_pct": mean_error("e2e"),
                "preemptions": int(done["num_preemptions"].sum()),
                "peer_sim": {
                    name: round(float(percent(peer[name].mean(), 1e3 * log_of[name].mean())), 2) for name in peer
                },
                "requests": {"ours": ours, "log": log_of},
            }
        )
    return entries
