"""How the deployments of silicon_sample were started, as far as that is public.

InferenceX's are SemiAnalysisAI/InferenceX, benchmarks/*.sh and benchmarks/single_node/*.sh (2025-10 to 2026-04), one
script per model, precision, device and engine: `vllm serve`, `trtllm-serve` and `sglang.launch_server` with flags, then
10 prompts per client whose lengths are uniform between 0.8 and 1 of the nominal ones, prefix caching off. The others
are ai-dynamo/aiconfigurator's own (src/aiconfigurator): its generator's rules and templates start engines as workers of
Dynamo, and genai-perf or aiperf send 10 requests per client of equal lengths.
"""

from dataclasses import dataclass, field

import numpy as np

WAVES = 10
"""requests per client"""


@dataclass(frozen=True)
class Recipe:
    """What differs from the engine's defaults.

    engine: keys of the scenario's engine; kv_cache: format; prompts: different ones that clients send again and again,
    0 for as many as requests; quantised: as the row says, not as the checkpoint is; drafts: of MTP, 0 without; experts:
    the class whose kernel multiplies MXFP4 experts, where it is not the device's own choice; prefill, decode: keys of
    that pool's engine alone.
    """

    engine: dict = field(default_factory=dict)
    kv_cache: str = "bf16"
    varied: bool = True
    prompts: int = 0
    quantised: bool = True
    drafts: int = 0
    experts: str = ""
    prefill: dict = field(default_factory=dict)
    decode: dict = field(default_factory=dict)


def recipe(row, clients: int) -> Recipe:
    """The recipe of one row, which so many clients made."""
    if "aic-auto-gap" in row.silicon_data_source:
        return _aiconfigurator(row, clients)
    return {"trtllm": _trtllm, "sglang": _sglang, "vllm": _vllm}[row.backend](row)


def disaggregated(row) -> Recipe:
    """Of pools behind Dynamo's front end (NVIDIA/srt-slurm and InferenceX recipes of early 2026): both pools' budgets
    per rank, and of TensorRT-LLM the places of a decode rank, which its recipes are named by: a power of two."""
    longest, on_b200 = int(row.isl) + int(row.osl) + 256, row.system == "b200_sxm"
    engine = {"max_cudagraph_capture_size": 1024, "host_prompt_token_time": DYNAMO_TOKEN_TIME}
    if row.backend == "sglang":  # chunked-prefill-size, which ranks with attention by data divide
        prefill = {"max_num_batched_tokens": 32768 // int(row.prefill_attention_dp_size)}
        engine |= {"fuse_allreduce_rms": on_b200, "gpu_memory_utilization": 0.85, "max_num_batched_tokens": 32768}
        return Recipe(engine, "fp8" if on_b200 else "bf16", prefill=prefill)
    engine |= {"max_num_batched_tokens": max(16384, longest), "max_num_seqs": 16}
    decode = {"max_num_seqs": 2 ** int(np.log2(row.largest_batch))}
    decode |= {"stream_interval": 20 if row.precision == "fp8" else STREAM_INTERVAL}
    decode |= {"stream_first_token": row.fam != "DeepSeek-V3"}
    return Recipe(engine, "fp8", decode=decode)


def _aiconfigurator(row, clients: int) -> Recipe:
    fp8 = (row.precision in ("fp8", "fp4") and row.backend == "trtllm") or row.model_path.startswith("nvidia/")
    engine, prompts, quantised = {"host_prompt_token_time": DYNAMO_TOKEN_TIME}, 0, True
    if "aic-auto-gap" in row.silicon_data_source:
        # generator/rule_plugin: trtllm.rule and vllm.rule (max_num_tokens), sglang.rule (max_prefill_tokens)
        tokens = int(row.isl) + 1500
        engine["max_num_batched_tokens"] = min(8192, tokens) if row.backend == "sglang" else max(512, clients) + tokens
        if row.system == "h200_sxm":
            # sglang.rule asks for mixed chunks; the template for 0.5.1.post1 misspells the flag
            engine |= {"enable_mixed_chunk": True} if row.backend == "sglang" else {}
            prompts = AIPERF_PROMPTS if row.backend == "vllm" else 0
        # no template passes a quantisation: SGLang serves what the checkpoint holds
        quantised = row.backend != "sglang" or "FP8" in row.model_path
    if row.backend == "vllm":
        # no temperature is sent: vLLM then samples as generation_config.json says, top-k and top-p of sorted logits
        engine |= {"worker_sequence_time": SORT * VOCABULARY, "host_request_latency": DYNAMO_LATENCY}
    if row.backend == "trtllm" and row.fam == "Qwen3-32B":
        # _torch/models/modeling_qwen3.py: norms, quantisation and sums are kernels of their own
        engine |= {"fuse_norm_quant": False, "fuse_allreduce_rms": False}
    return Recipe(engine, "fp8" if fp8 else "bf16", varied=False, prompts=prompts, quantised=quantised)


DYNAMO_LATENCY, DYNAMO_TOKEN_TIME = 3e-3, 1.5e-6
"""Dynamo's front end is written in Rust (ai-dynamo/dynamo, lib/llm): it reads prompts in place of the engine's own API
server. Between 0, 3, 10 and 15 ms per request and 0, 1.5 and 5 us per prompt token, on vLLM's rows in view; the preset
of TensorRT-LLM has 3 ms, and SGLang keeps its 15, since something else of it waits as long"""
AIPERF_PROMPTS = 100
"""aiperf's default number of dataset entries, which generator/config/backend_templates/benchmark leaves as it is; vLLM
finds them in its prefix cache, which the templates leave on"""


def _trtllm(row) -> Recipe:
    clients, isl, osl = int(row.batch_size), int(row.isl), int(row.osl)
    longest = isl + osl + 256  # whole prompts: infersim wants a budget for the longest sequence
    # cuda_graph_config: padding, and sizes for all clients
    engine = {"stream_interval": STREAM_INTERVAL, "max_cudagraph_capture_size": 1024}
    if row.fam == "Llama-3.1-70B":
        engine["max_num_batched_tokens"] = 16384 if row.precision == "fp8" and row.system == "b200_sxm" else longest
        if isl == osl == 1024 and row.tp_size < 8:
            engine |= {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
        return Recipe(engine, "fp8")
    if row.fam == "gpt-oss-120b":
        engine["max_num_batched_tokens"] = 20000
        on_hopper = row.system != "b200_sxm"
        return Recipe(engine | {"stream_first_token": not on_hopper}, "bf16" if on_hopper else "fp8")
    engine["max_num_batched_tokens"] = max(-(-(clients + isl + 64) // 64) * 64, 8192, longest)
    engine["stream_first_token"] = False
    if row.attention_dp_size > 1:
        engine["attention_dp_timeout_iters"] = 60
    return Recipe(engine, "fp8", drafts=_mtp(row))


def _mtp(row) -> int:
    """Drafts of MTP. Rows do not say: dsr1_*_trt_mtp.sh ran with image 1.2.0rc6.post3, and on 2026-01-14 with
    1.1.0rc2.post2 (3 drafts, 1 with data-parallel attention)."""
    ran = row.backend_version == "1.2.0rc6.post3" or "measured=2026-01-14" in row.silicon_data_source
    return (1 if row.attention_dp_size > 1 else 3) if ran else 0


SORT, VOCABULARY = 2.4e-3 / 128 / 131072, 151_936
"""seconds per logit (vLLM pull request 40376, top-k and top-p of 128 sequences with PyTorch), and Qwen3's logits"""
STREAM_INTERVAL = 10
"""tokens that TensorRT-LLM's servers send at once; with overlapped schedules some of its versions pass over the first
iteration of a request (py_executor: py_decoding_iter <= 1), so that its first token comes with the tenth"""
ACCEPTANCE = [0.8, 0.7, 0.6]
"""of MTP's drafts, each given those before it"""


def _sglang(row) -> Recipe:
    clients, on_b200 = int(row.batch_size), row.system == "b200_sxm"
    kv_cache = "fp8" if on_b200 and row.precision != "bf16" else "bf16"
    # --enable-flashinfer-allreduce-fusion
    fused = {"fuse_allreduce_rms": on_b200 or row.fam == "Qwen3.5-397B-A17B"}
    if row.fam == "GLM-5":
        return Recipe(({"max_num_batched_tokens": 32768} if on_b200 else {}) | fused, kv_cache)
    if row.fam == "Qwen3.5-397B-A17B":
        kv_cache = "fp8" if row.precision == "fp8" else "bf16"
        tokens = 32768 if on_b200 else 16384
    else:
        tokens = 16384 if row.precision == "fp4" else 8192 if row.tp_size == 4 else 32768
    engine = {"max_num_batched_tokens": tokens, "gpu_memory_utilization": 0.82} | fused
    if on_b200:
        engine |= {"scheduler_recv_interval": 30 if clients >= 16 else 10, "max_cudagraph_capture_size": 256}
    return Recipe(engine, kv_cache)


def _vllm(row) -> Recipe:
    clients, on_b200 = int(row.batch_size), row.system == "b200_sxm"
    # --compilation-config pass_config.fuse_allreduce_rms
    fused = {"fuse_allreduce_rms": (on_b200 and row.precision != "fp8") or row.fam == "Kimi-K2.5"}
    if row.fam == "Llama-3.1-70B":
        return Recipe({"max_num_batched_tokens": 8192, "fuse_allreduce_rms": on_b200}, "fp8")
    if row.fam == "gpt-oss-120b":  # VLLM_MXFP4_USE_MARLIN on Hopper
        engine = {"max_num_batched_tokens": 8192, "max_cudagraph_capture_size": 2048} | fused
        return Recipe(engine, "fp8" if on_b200 else "bf16", experts="" if on_b200 else "moe.int4")
    if row.fam == "MiniMax-M2.5" and not on_b200:
        engine = {"max_num_batched_tokens": 16384 if clients <= 32 else 32768, "gpu_memory_utilization": 0.95}
        return Recipe(engine, "fp8")
    # nvidia's NVFP4 checkpoints have FP8 keys (hf_quant_config.json), which vLLM follows
    return Recipe(fused, "fp8" if row.precision == "fp4" else "bf16")
