"""Command lines of three engines for one kind of replica: what was simulated, under each engine's own names.

The engine that was simulated is the preset's; the other two get the nearest of their own flags. What a line cannot
say is named by `left_out`.
"""

import json
import shlex
from typing import Any

from infersim.config.hub import repository
from infersim.config.scenario import Scenario

PORT = 8000
SIDE_CHANNEL = 5600  # NIXL's
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
FLAGS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "long_prefill_token_threshold", "prefill_schedule_interval",
    "stream_interval", "enable_chunked_prefill", "enable_prefix_caching", "kv_offloading_size",
    "async_scheduling", "enforce_eager", "scheduling_policy",
)  # fmt: skip
"""settings of an engine that are options of `vllm serve`"""
SGLANG_DRAFTERS = {"draft_model": "STANDALONE", "mtp": "NEXTN"}
WEIGHTS = {"fp8": "fp8", "fp8_wo": "fp8"}
"""formats of weights that vLLM makes itself of a 16-bit checkpoint: --quantization"""


def name_of(scenario: Scenario) -> str:
    """The model as a server is asked for it: its Hugging Face repository or path."""
    return repository(scenario.model) or scenario.model


def left_out(scenario: Scenario, engine: dict[str, Any]) -> list[str]:
    """What was simulated of one kind of replica and no option of `vllm serve` says, a sentence each."""
    found = []
    own = [key for key, origin in engine["origin"].items() if origin == "user" and key not in FLAGS and key != "preset"]
    if own:
        found.append(f"engine.{', engine.'.join(own)}: no option of the server")
    if repository(scenario.model) is None:
        found.append(f"model {scenario.model}: a name of infersim's catalogue; put the checkpoint's own")
    if (weights := scenario.precision.weights) not in (*WEIGHTS, "auto", "bf16", "fp16", "fp32"):
        found.append(f"precision.weights {weights}: the checkpoint must be quantised so")
    if scenario.parallelism.expert_skew:
        found.append("parallelism.expert_skew: a property of the traffic")
    if scenario.parallelism.expert > 1 and scenario.parallelism.moe_tensor != 1:
        found.append("parallelism.expert: vLLM divides experts among all ranks of a replica")
    if scenario.early_exit is not None:
        found.append("early_exit: no option of the server")
    if (drafts := scenario.speculation) is not None:
        found.append("speculation.acceptance: what the drafts are worth, which only the text decides")
        if drafts.how.kind in ("layer", "block", "heads") and drafts.method != "mtp":
            found.append(f"speculation.model: the repository of the {drafts.method} head; put yours")
        found += [f"speculation.{key}: no option of the server" for key in ("drafter", "tree", "exit_layer")
                  if getattr(drafts, key) is not None]  # fmt: skip
    return found


def join(words: list[str]) -> str:
    """A command line, an option with its value on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines)


def script(words: list[str], notes: list[str]) -> str:
    """A command line as a shell script, with notes at its top."""
    comments = "".join(f"# {note}\n" for note in notes)
    return f"#!/bin/sh\n{comments}exec {join(words)}\n"


def serve_words(scenario: Scenario, engine: dict[str, Any], role: str = "serve") -> list[str]:
    """The words that start the engine which was simulated."""
    return {"sglang": sglang_serve, "trtllm": trtllm_serve}.get(engine["engine"], vllm_serve)(scenario, engine, role)


def vllm_serve(scenario: Scenario, engine: dict[str, Any], role: str = "serve") -> list[str]:
    """The words of `vllm serve` for one kind of replica.

    scenario: its own settings; engine: a ResolvedEngine as a dict; role: serve, prefill or decode, the last two with
    the connector that hands over the KV cache.
    """
    parallel, precision = scenario.parallelism, scenario.precision
    words = ["vllm", "serve", name_of(scenario), "--port", str(PORT)]
    for flag, value in (
        ("--tensor-parallel-size", parallel.tensor),
        ("--pipeline-parallel-size", parallel.pipeline),
        ("--data-parallel-size", parallel.attention_data),
        ("--decode-context-parallel-size", parallel.context),
        ("--prefill-context-parallel-size", parallel.prefill_context),
    ):
        words += [flag, str(value)] if value > 1 else []
    words += ["--enable-expert-parallel"] if parallel.expert > 1 else []
    if parallel.expert > 1 and parallel.token_ranks > 1:
        words += ["--all2all-backend", parallel.all2all_backend]
    words += ["--enable-dbo"] * parallel.enable_dbo
    if parallel.num_redundant_experts:
        words += ["--enable-eplb", "--eplb-config.num_redundant_experts", str(parallel.num_redundant_experts)]
    words += ["--dtype", _dtype(precision.activations)]
    words += ["--quantization", WEIGHTS[precision.weights]] if precision.weights in WEIGHTS else []
    kv_cache = precision.kv_cache  # auto is the server's own default
    words += ["--kv-cache-dtype", kv_cache if kv_cache == "fp8" else _dtype(kv_cache)] if kv_cache != "auto" else []
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "block_size"):
        words += [f"--{name.replace('_', '-')}", f"{engine[name]}"]
    defaults = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "long_prefill_token_threshold": 0,
        "prefill_schedule_interval": 1,
        "stream_interval": 1,
    }
    for name, default in defaults.items():
        words += [] if engine[name] == default else [f"--{name.replace('_', '-')}", f"{engine[name]:.0f}"]
    if (drafts := scenario.speculation) is not None:
        config: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.num_speculative_tokens}
        config |= {"method": "eagle3", "parallel_drafting": True} if drafts.how.parallel else {}
        if drafts.model is not None:
            config["model"] = repository(drafts.model) or drafts.model
        if drafts.draft_tensor_parallel_size is not None:
            config["draft_tensor_parallel_size"] = drafts.draft_tensor_parallel_size
        if isinstance(sizes := drafts.num_speculative_tokens_per_batch_size, list):
            config["num_speculative_tokens_per_batch_size"] = [list(pair) for pair in sizes]
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
    words += ["--scheduling-policy", "priority"] if engine["scheduling_policy"] == "priority" else []
    words += ["--kv-transfer-config", json.dumps(CONNECTOR)] if role in ("prefill", "decode") else []
    return words


def _switch(name: str, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


def _dtype(name: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, "auto")


def sglang_serve(scenario: Scenario, engine: dict[str, Any], role: str = "serve") -> list[str]:
    """The words of SGLang's server with the nearest of its flags."""
    parallel, precision = scenario.parallelism, scenario.precision
    words = ["python3", "-m", "sglang.launch_server", "--model-path", name_of(scenario), "--port", str(PORT)]
    words += ["--tp-size", str(parallel.tensor * parallel.attention_data)]
    words += ["--pp-size", str(parallel.pipeline)] if parallel.pipeline > 1 else []
    words += ["--dp-size", str(parallel.attention_data), "--enable-dp-attention"] if parallel.attention_data > 1 else []
    words += ["--ep-size", str(parallel.expert)] if parallel.expert > 1 else []
    if parallel.all2all_backend.startswith("deepep"):
        mode = "normal" if parallel.all2all_backend == "deepep_high_throughput" else "low_latency"
        words += ["--moe-a2a-backend", "deepep", "--deepep-mode", mode]
    words += ["--enable-two-batch-overlap"] * parallel.enable_dbo
    if copies := parallel.num_redundant_experts:
        words += ["--enable-eplb", "--ep-num-redundant-experts", str(copies)]
    words += ["--dtype", _dtype(precision.activations)]
    words += ["--kv-cache-dtype", "fp8_e4m3"] if precision.kv_cache == "fp8" else []
    words += ["--context-length", str(engine["max_model_len"])]
    words += ["--max-running-requests", str(engine["max_num_seqs"])]
    chunk = engine["max_num_batched_tokens"] if engine["enable_chunked_prefill"] else -1
    words += ["--chunked-prefill-size", str(chunk)]
    words += ["--mem-fraction-static", str(engine["gpu_memory_utilization"])]
    words += [] if engine["enable_prefix_caching"] else ["--disable-radix-cache"]
    words += ["--stream-interval", str(engine["stream_interval"])] if engine["stream_interval"] > 1 else []
    words += ["--schedule-policy", "lpm"] if engine["scheduling_policy"] == "lpm" else []
    words += ["--disable-cuda-graph"] if engine["enforce_eager"] else []
    if role in ("prefill", "decode"):
        words += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
    if (drafts := scenario.speculation) is not None:
        words += ["--speculative-algorithm", SGLANG_DRAFTERS.get(drafts.method, drafts.method.upper())]
        words += ["--speculative-num-draft-tokens", str(drafts.num_speculative_tokens)]
        words += ["--speculative-draft-model-path", repository(drafts.model) or drafts.model] if drafts.model else []
    return words


def trtllm_serve(scenario: Scenario, engine: dict[str, Any], role: str = "serve") -> list[str]:
    """The words of TensorRT-LLM's server with the nearest of its flags."""
    parallel = scenario.parallelism
    words = ["trtllm-serve", name_of(scenario), "--port", str(PORT), "--tp_size", str(parallel.tensor)]
    words += ["--pp_size", str(parallel.pipeline)] if parallel.pipeline > 1 else []
    words += ["--ep_size", str(parallel.expert)] if parallel.expert > 1 else []
    words += ["--max_batch_size", str(engine["max_num_seqs"])]
    words += ["--max_num_tokens", str(engine["max_num_batched_tokens"])]
    words += ["--max_seq_len", str(engine["max_model_len"])]
    words += ["--kv_cache_free_gpu_memory_fraction", str(engine["gpu_memory_utilization"])]
    return words
