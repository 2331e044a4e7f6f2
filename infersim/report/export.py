"""A deployment as what starts it: command lines of three engines, the matching benchmark, and a Kubernetes manifest.

The engine that was simulated is the preset's; the other two get the nearest of their own flags.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.files import replace_text

from .files import EXPORTS, to_json

PORT = 8000
IMAGES = {"nvidia": ("vllm/vllm-openai", "nvidia.com/gpu"), "amd": ("rocm/vllm", "amd.com/gpu")}


def check_kind(kind: str, folder: Path | None, scenario: Scenario) -> None:
    """InputError if there is no such export, nowhere to write it, or no way to write this scenario."""
    if kind not in EXPORTS:
        raise InputError(f"--export {kind[:40]}: must be one of {', '.join(EXPORTS)}")
    if folder is None:
        raise InputError("--export: needs --out DIR, where to write")
    if kind != "vllm-bench" and (len(scenario.cluster.groups) > 1 or scenario.cluster.kinds):
        raise InputError(
            f"--export {kind}: writes replicas that are all alike; this cluster has"
            f" {', '.join(scenario.cluster.group_names)}, whose roles and connectors it cannot express"
        )


def write_export(
    kind: str, folder: Path, engine: dict[str, Any], scenario: Scenario, bench: dict[str, Any]
) -> list[str]:
    """Writes what `kind` names into `folder`; returns the paths. engine: a ResolvedEngine; bench: of vllm_bench."""
    import yaml

    if kind == "vllm-bench":
        texts = [to_json(bench) + "\n"]
    elif kind == "deployment":
        commands = (vllm_serve(scenario, engine), sglang_serve(scenario, engine), trtllm_serve(scenario, engine))
        texts = [_script(words) for words in (*commands, vllm_bench_command(scenario))]
    else:
        texts = [yaml.safe_dump_all(manifest(scenario, engine), sort_keys=False)]
    for name, text in zip(EXPORTS[kind], texts, strict=True):
        replace_text(folder / name, text, "--out")
    return [str(folder / name) for name in EXPORTS[kind]]


def _script(words: list[str]) -> str:
    return "#!/bin/sh\nexec " + join(words) + "\n"


def join(words: list[str]) -> str:
    """A command line, an option with its value on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines)


def vllm_serve(scenario: Scenario, engine: dict[str, Any]) -> list[str]:
    """The words of `vllm serve` with every setting that was simulated. engine: a ResolvedEngine as a dict."""
    parallel, precision = scenario.parallelism, scenario.precision
    words = ["vllm", "serve", scenario.model, "--port", str(PORT)]
    for flag, value in (
        ("--tensor-parallel-size", parallel.tensor),
        ("--pipeline-parallel-size", parallel.pipeline),
        ("--data-parallel-size", parallel.attention_data),
        ("--decode-context-parallel-size", parallel.context),
    ):
        words += [flag, str(value)] if value > 1 else []
    words += ["--enable-expert-parallel"] if parallel.expert > 1 else []
    words += ["--dtype", _dtype(precision.activations)]
    words += ["--quantization", "fp8"] if precision.weights == "fp8" else []  # other formats are the checkpoint's
    kv_cache = precision.kv_cache  # auto is the server's own default
    words += ["--kv-cache-dtype", kv_cache if kv_cache == "fp8" else _dtype(kv_cache)] if kv_cache != "auto" else []
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "block_size"):
        words += [f"--{name.replace('_', '-')}", f"{engine[name]}"]
    if engine["num_gpu_blocks_override"] is not None:
        words += ["--num-gpu-blocks-override", str(engine["num_gpu_blocks_override"])]
    if engine["long_prefill_token_threshold"]:
        words += ["--long-prefill-token-threshold", str(engine["long_prefill_token_threshold"])]
    if (drafts := scenario.speculation) is not None:
        config = {"method": drafts.method, "num_speculative_tokens": drafts.num_speculative_tokens}
        words += ["--speculative-config", json.dumps(config)]
    if (lora := scenario.lora) is not None:
        words += ["--enable-lora", "--max-loras", str(lora.max_loras), "--max-lora-rank", str(lora.slot_rank)]
        words += ["--lora-modules", *(f"{name}=/adapters/{name}" for name in lora.adapters)]
    words.append(_switch("enable-chunked-prefill", engine["enable_chunked_prefill"]))
    words.append(_switch("enable-prefix-caching", engine["enable_prefix_caching"]))
    if engine["kv_offloading_size"]:  # loads as they are simulated; LMCache's disk is a matter of its own configuration
        words += ["--kv-offloading-size", f"{engine['kv_offloading_size'] / 2**30:g}"]
        words += ["--kv-offloading-backend", "lmcache"]
    words.append(_switch("async-scheduling", engine["async_scheduling"]))
    words += ["--enforce-eager"] if engine["enforce_eager"] else []
    return words


def _switch(name: str, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


def _dtype(name: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, "auto")


def sglang_serve(scenario: Scenario, engine: dict[str, Any]) -> list[str]:
    """The words of SGLang's server with the nearest of its flags."""
    parallel, precision = scenario.parallelism, scenario.precision
    words = ["python3", "-m", "sglang.launch_server", "--model-path", scenario.model, "--port", str(PORT)]
    words += ["--tp-size", str(parallel.tensor * parallel.attention_data)]
    words += ["--pp-size", str(parallel.pipeline)] if parallel.pipeline > 1 else []
    words += ["--dp-size", str(parallel.attention_data), "--enable-dp-attention"] if parallel.attention_data > 1 else []
    words += ["--ep-size", str(parallel.expert)] if parallel.expert > 1 else []
    words += ["--dtype", _dtype(precision.activations)]
    words += ["--kv-cache-dtype", "fp8_e4m3"] if precision.kv_cache == "fp8" else []
    words += ["--context-length", str(engine["max_model_len"])]
    words += ["--max-running-requests", str(engine["max_num_seqs"])]
    chunk = engine["max_num_batched_tokens"] if engine["enable_chunked_prefill"] else -1
    words += ["--chunked-prefill-size", str(chunk)]
    words += ["--mem-fraction-static", str(engine["gpu_memory_utilization"])]
    words += [] if engine["enable_prefix_caching"] else ["--disable-radix-cache"]
    words += ["--schedule-policy", "lpm"] if engine["scheduling_policy"] == "lpm" else []
    words += ["--disable-cuda-graph"] if engine["enforce_eager"] else []
    return words


def trtllm_serve(scenario: Scenario, engine: dict[str, Any]) -> list[str]:
    """The words of TensorRT-LLM's server with the nearest of its flags."""
    parallel = scenario.parallelism
    words = ["trtllm-serve", scenario.model, "--port", str(PORT), "--tp_size", str(parallel.tensor)]
    words += ["--pp_size", str(parallel.pipeline)] if parallel.pipeline > 1 else []
    words += ["--ep_size", str(parallel.expert)] if parallel.expert > 1 else []
    words += ["--max_batch_size", str(engine["max_num_seqs"])]
    words += ["--max_num_tokens", str(engine["max_num_batched_tokens"])]
    words += ["--max_seq_len", str(engine["max_model_len"])]
    words += ["--kv_cache_free_gpu_memory_fraction", str(engine["gpu_memory_utilization"])]
    return words


def vllm_bench_command(scenario: Scenario) -> list[str]:
    """The words of the `vllm bench serve` that would measure what was simulated, as nearly as its datasets allow."""
    load, slo = scenario.workload, scenario.slo
    words = ["vllm", "bench", "serve", "--model", scenario.model, "--port", str(PORT)]
    if load.trace is not None:
        words += ["--dataset-name", "timed_trace", "--dataset-path", load.trace]
    else:
        mean_in, range_in = _random(load.input_tokens)
        mean_out, range_out = _random(load.output_tokens)
        ratio = f"{range_in:g}" if range_in == range_out else f'{{"input": {range_in:g}, "output": {range_out:g}}}'
        words += ["--dataset-name", "random", "--random-input-len", str(mean_in), "--random-output-len", str(mean_out)]
        words += ["--random-range-ratio", ratio, "--ignore-eos"]
    words += ["--num-prompts", str(load.num_requests)] if load.num_requests is not None else []
    if load.ramp_up is not None:
        words += ["--ramp-up-strategy", load.ramp_up.strategy, "--ramp-up-start-rps", f"{load.ramp_up.start_rps:g}"]
        words += ["--ramp-up-end-rps", f"{load.ramp_up.end_rps:g}"]
    elif load.request_rate is not None:
        words += ["--request-rate", f"{load.request_rate:g}", "--burstiness", f"{load.burstiness:g}"]
    words += ["--max-concurrency", str(load.max_concurrency)] if load.max_concurrency is not None else []
    if limits := slo.request_limits:
        words += ["--goodput", *(f"{name}:{limit * 1e3:g}" for name, limit in limits.items())]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]
    return [*words, "--seed", str(scenario.simulation.seed), "--save-result"]


def _random(length: Any) -> tuple[int, float]:
    """Mean and range ratio of vLLM's random dataset that come nearest to a length distribution."""
    if isinstance(length, int):
        return length, 0.0
    if length.mean is not None:
        return length.mean, length.range_ratio
    if length.uniform is not None:
        low, high = length.uniform
        return (low + high) // 2, (high - low) / (high + low)
    if length.lognormal is not None:
        log = length.lognormal
        return round(log.mean or log.median), 0.0
    shares, tokens = length.quantile_points()
    areas = [(b - a) * (x + y) / 2 for a, b, x, y in zip(shares, shares[1:], tokens, tokens[1:], strict=False)]
    return round(sum(areas)), 0.0


def manifest(scenario: Scenario, engine: dict[str, Any]) -> list[dict[str, Any]]:
    """A Kubernetes Deployment of every replica, and the Service in front of it."""
    name = scenario.model.rstrip("/").rsplit("/", 1)[-1].lower().replace(".", "-").replace("_", "-")
    vendor = scenario.hardware.vendor.lower()
    image, resource = IMAGES.get(vendor, IMAGES["nvidia"])
    words = vllm_serve(scenario, engine)
    labels = {"app": name}
    gpus = scenario.parallelism.num_gpus
    container = {
        "name": "vllm",
        "image": f"{image}:v{engine['version']}" if vendor != "amd" else image,
        "command": words[:2],
        "args": words[2:],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {resource: gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 10, "failureThreshold": 60},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "metadata": {"labels": labels},
        "spec": {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {"replicas": scenario.cluster.replicas, "selector": {"matchLabels": labels}, "template": pod},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": PORT, "targetPort": PORT}]},
        },
    ]
