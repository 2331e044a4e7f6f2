"""Tables that vendors and users published: throughput of full queues, static batches, single streams."""

import re
from functools import partial
from pathlib import Path

import numpy as np
from common import attempt, percent, preset_of, read_table, spread
from static import Batch, serve

from infersim.config.errors import InputError

FILE = "e2e/published.csv"
COLUMNS = (
    "group model gpu n_gpu tp pp engine engine_version dtype_w dtype_kv isl osl concurrency_or_rate metric value unit"
    " notes"
)
HARDWARE = {
    "A100 SXM 80GB": "a100-sxm-80gb", "H100 SXM 80GB": "h100-sxm", "H100 (SXM?)": "h100-sxm",
    "H100 PCIe 80GB": "h100-pcie", "B200 180GB": "b200-sxm", "RTX PRO 6000 Blackwell SE": "rtx-pro-6000",
    "MI300X": "mi300x", "TPU v6e": "tpu-v6e", "4090 24GB": "rtx-4090", "3090 24GB": "rtx-3090", "L40S 48GB": "l40s",
    "A10G": "a10", "H200 SXM 141GB": "h200-sxm", "L40S": "l40s", "A100 PCIe 80GB": "a100-pcie-80gb",
    "GB200 192GB": "gb200", "A40 48GB": "a40",
    "RTX A6000 48GB": "rtx-a6000", "RTX 6000 Ada 48GB": "rtx-6000-ada",
    "A100 SXM 80GB (330W limit)": "a100-sxm-80gb",
}  # fmt: skip
MODELS = {
    "LLaMA 7B": "Llama-7B", "LLaMA 70B": "Llama-2-70B", "Llama-3-70B": "Llama-3-70B", "Llama-3-8B": "Llama-3-8B",
    "Mistral 7B": "Mistral-7B-v0.1", "Llama-2-7B-chat": "Llama-2-7B", "DeepSeek-R1-0528": "DeepSeek-R1",
    "Llama-3.1-405B-FP8": "Llama-3.1-405B", "Llama-3.1-405B-FP8-KV (quark)": "Llama-3.1-405B",
    "Llama-3.3-70B-Instruct": "Llama-3.3-70B",
}  # fmt: skip
WEIGHTS = {"fp8": "fp8", "fp16": "fp16", "f16": "fp16", "bf16": "bf16", "nvfp4": "nvfp4", "fp4": "nvfp4",
           "mxfp4": "auto", "mxfp4(col says FP8)": "auto", "int8": "int8_wo",
           "int4 g32": "int4", "int4": "int4"}  # fmt: skip
ENGINES = {"TensorRT-LLM": "trtllm", "vLLM": "vllm", "vLLM (TPU)": "vllm"}
STATIC = re.compile(r"(?:static_)?batch=(\d+)")
QUEUED, LONG = 3000, 1500
"""requests of a full queue, and of one of 4,096 tokens and more each, where a row names no number: TensorRT-LLM's
documentation of its tables (perf-overview), whose 30,000 of 128 + 128 tokens 3,000 stand for"""
BENCH = {"max_cudagraph_capture_size": 2048, "gpu_memory_utilization": 0.95}
"""of trtllm-bench in that documentation: CUDA graphs for as many sequences as the preset has places for (up to 8,192
there), kv_cache_free_gpu_mem_fraction"""
NATIVE = {"enforce_eager": True, "eager_launch_time": 0, "worker_step_time": 0, "host_sequence_time": 0}
"""of TensorRT-LLM before 1.0: a runtime in C++, no CUDA graphs, and nothing is launched from Python"""


def batch_of(row) -> Batch:
    """KeyError names what has no counterpart here."""
    weights = WEIGHTS[str(row.dtype_w)]
    # "auto/fp8?": nvidia's FP8 checkpoints have FP8 keys (hf_quant_config.json)
    kv = "fp8" if str(row.dtype_kv).startswith("fp8") or ("fp8" in str(row.dtype_kv) and weights == "fp8") else "bf16"
    static = STATIC.search(str(row.concurrency_or_rate))
    concurrency = re.search(r"concurrency=(\d+)", str(row.concurrency_or_rate))
    if static or concurrency:
        requests = int(static.group(1)) if static else 10 * int(concurrency.group(1))
    else:
        noted = re.search(r"num_requests=(\d+)|(\d+) prompts", f"{row.notes} {row.concurrency_or_rate}")
        requests = LONG if int(row.isl) + int(row.osl) >= 4096 else QUEUED
        requests = int(noted.group(1) or noted.group(2)) if noted else requests
    native = row.engine == "TensorRT-LLM" and str(row.engine_version).startswith("0.")
    engine = (BENCH if row.engine == "TensorRT-LLM" and not static else {}) | (NATIVE if native else {})
    expert_ranks = "DEP" in str(row.notes)
    return Batch(
        MODELS.get(row.model, row.model),
        HARDWARE[row.gpu],
        max(int(row.isl), 1),
        max(int(row.osl), 1),
        requests,
        concurrency=int(concurrency.group(1)) if concurrency else 0,
        tensor=1 if expert_ranks else int(row.tp),
        pipeline=int(row.pp) if row.pp == row.pp else 1,
        attention_data=int(row.tp) if expert_ranks else 1,
        weights=weights,
        kv_cache=kv if weights != "fp16" else "fp16" if kv == "bf16" else kv,
        preset=preset_of(ENGINES.get(row.engine, "vllm"), row.engine_version),
        one_prefill=bool(static),
        engine=engine,
    )


def predict(row) -> float:
    """The row's metric in its unit. InputError, KeyError for what is not modelled."""
    if row.metric.startswith("itl_"):
        return _line(row)
    times, gpus = serve(batch_of(row)), int(row.n_gpu)
    seconds = 1e3 if row.unit == "ms" else 1.0
    values = {
        "output_throughput_total": times.throughput,
        "output_throughput_per_gpu": times.throughput / gpus,
        "request_throughput": times.request_throughput,
        "e2e_latency_batch": times.e2e * seconds,
        "first_token_latency": times.ttft * seconds,
        "ttft_mean": times.ttft * seconds,
        "tpot_mean": times.tpot * seconds,
        "decode_speed": 1.0 / times.tpot if times.tpot else np.nan,
    }
    if row.metric not in values:
        raise InputError(f"metric {row.metric}")
    return values[row.metric]


def _line(row) -> float:
    """Inter-token latency of one stream over its context: ms at none, or ms per token."""
    kv_cache = "fp8" if "fp8" in str(row.dtype_kv) else "bf16"
    preset = preset_of("vllm", row.engine_version)
    near, far = (
        1e3
        * serve(
            Batch(row.model, HARDWARE[row.gpu], n, 128, 1, kv_cache=kv_cache, preset=preset, one_prefill=False)
        ).tpot
        for n in (1000, 100_000)
    )
    slope = (far - near) / 99_000
    return slope if row.metric == "itl_slope_vs_context" else near - slope * 1064


def evaluate(data: Path):
    """The rows but those of `splitwise`, which are step_times' (pandas), with predictions."""
    rows = read_table(data / FILE, COLUMNS)
    rows = rows[rows.group != "splitwise"].reset_index(drop=True)
    predictions = [attempt(partial(predict, row)) for row in rows.itertuples()]
    rows["predicted"], rows["why"] = [np.nan if p is None else p for p, _ in predictions], [w for _, w in predictions]
    rows["error"] = percent(rows.predicted, rows.value)
    return rows


def summarize(rows) -> list[dict]:
    entries = []
    for name, group in [("all", rows), *rows.groupby("group")]:
        errors = spread(group.error.dropna())
        entries.append({"group": name, "n": len(group), "unpredicted": int((group.why != "").sum())} | errors)
    return entries
