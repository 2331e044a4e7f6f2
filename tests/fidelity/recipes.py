"""How the deployments of silicon_sample were started, as far as that is public.

InferenceX's are SemiAnalysisAI/InferenceX, benchmarks/*.sh and benchmarks/single_node/*.sh (2025-10 to 2026-04), one
script per model, precision, device and engine: `vllm serve`, `trtllm-serve` and `sglang.launch_server` with flags, then
10 prompts per client whose lengths are uniform between 0.8 and 1 of the nominal ones, prefix caching off. The others
are ai-dynamo/aiconfigurator's, src/aiconfigurator/eval: genai-perf, 10 requests per client of equal lengths.
"""

from dataclasses import dataclass, field

WAVES = 10
"""requests per client"""


@dataclass(frozen=True)
class Recipe:
    """What differs from the engine's defaults.

    engine: keys of the scenario's engine; kv_cache: format; held: decode steps that a new request's first token waits
    for, on the mean, before the scheduler lets it in or the server sends it, and why.
    """

    engine: dict = field(default_factory=dict)
    kv_cache: str = "bf16"
    varied: bool = True
    held: float = 0.0


def recipe(row) -> Recipe:
    """The recipe of one row."""
    if "aic-auto-gap" in row.silicon_data_source or "gap-analysis" in row.silicon_data_source:
        fp8 = (row.precision in ("fp8", "fp4") and row.backend == "trtllm") or row.model_path.startswith("nvidia/")
        # no temperature is sent: vLLM then samples as generation_config.json says, top-k and top-p of sorted logits
        sampled = {"worker_sequence_time": SORT * VOCABULARY} if row.backend == "vllm" else {}
        # _torch/models/modeling_qwen3.py: norms, quantisation and sums of TensorRT-LLM's Qwen3 are kernels of their own
        plain = {"fuse_norm_quant": False, "fuse_allreduce_rms": False}
        engine = plain if row.backend == "trtllm" and row.fam == "Qwen3-32B" else sampled
        return Recipe(engine, kv_cache="fp8" if fp8 else "bf16", varied=False)
    return {"trtllm": _trtllm, "sglang": _sglang, "vllm": _vllm}[row.backend](row)


def _trtllm(row) -> Recipe:
    clients, isl, osl = int(row.batch_size), int(row.isl), int(row.osl)
    longest = isl + osl + 256  # whole prompts: infersim wants a budget for the longest sequence
    if row.fam == "Llama-3.1-70B":
        tokens = 16384 if row.precision == "fp8" and row.system == "b200_sxm" else longest
        # batch_wait_timeout_iters: prompts wait for others, at most so many iterations
        waits = 20.0 if isl == osl == 1024 and row.tp_size < 8 else 0.0
        return Recipe({"max_num_batched_tokens": tokens}, "fp8", held=waits)
    if row.fam == "gpt-oss-120b":
        on_hopper = row.system != "b200_sxm"
        return Recipe({"max_num_batched_tokens": 20000}, "bf16" if on_hopper else "fp8", held=9.0 * on_hopper)
    tokens = max(-(-(clients + isl + 64) // 64) * 64, 8192, longest)
    # attention_dp_config.timeout_iters 60: a prompt waits until every rank has one, at most so many iterations
    held = 30.0 if row.attention_dp_size > 1 else STREAM_INTERVAL - 1
    return Recipe({"max_num_batched_tokens": tokens}, "fp8", held=held)


SORT, VOCABULARY = 2.4e-3 / 128 / 131072, 151_936
"""seconds per logit (vLLM pull request 40376, top-k and top-p of 128 sequences with PyTorch), and Qwen3's logits"""
STREAM_INTERVAL = 10
"""tokens that TensorRT-LLM's servers of DeepSeek-R1 send at once"""


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
    # --scheduler-recv-interval: the scheduler looks for new requests every so many decode steps
    interval = (30 if clients >= 16 else 10) if on_b200 else 1
    return Recipe({"max_num_batched_tokens": tokens} | fused, kv_cache, held=(interval - 1) / 2)


def _vllm(row) -> Recipe:
    clients, on_b200 = int(row.batch_size), row.system == "b200_sxm"
    # --compilation-config pass_config.fuse_allreduce_rms
    fused = {"fuse_allreduce_rms": (on_b200 and row.precision != "fp8") or row.fam == "Kimi-K2.5"}
    if row.fam == "Llama-3.1-70B":
        return Recipe({"max_num_batched_tokens": 8192, "fuse_allreduce_rms": on_b200}, "fp8")
    if row.fam == "gpt-oss-120b":
        return Recipe({"max_num_batched_tokens": 8192} | fused, "fp8" if on_b200 else "bf16")
    if row.fam == "MiniMax-M2.5" and not on_b200:
        return Recipe({"max_num_batched_tokens": 16384 if clients <= 32 else 32768}, "fp8")
    return Recipe(fused, "bf16")
