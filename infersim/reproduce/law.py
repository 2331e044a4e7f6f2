"""The notes' law, T_decode = N_steps * T_step, and on which side of it techniques are."""

from typing import Any

from infersim.config.hardware import load_hardware
from infersim.explain.techniques import FEWER_BYTES, FEWER_STEPS, Technique, technique_of
from infersim.metrics.result import Result
from infersim.models.catalog import load_model

from .bandwidth import step, without_grouping
from .claims import CLOSED_FORM, SIMULATED, Claim, claim, share_holding
from .kwon import served
from .simulation import seconds, simulated, tpot

MODELS, DEVICES = ("Llama-3.1-8B", "Llama-2-13B", "Qwen3-32B"), ("h100-sxm", "a100-sxm-80gb", "h200-sxm")
ALONE: dict[str, Any] = {"num_requests": 1, "input_tokens": 512, "output_tokens": 128}
OFTEN: dict[str, Any] = {"num_requests": 32, "input_tokens": 512, "output_tokens": 128}


def _law() -> float:
    """A sequence alone is its steps, one after another: as many as its tokens; none is shorter than its bytes at peak
    bandwidth, nor twice as long."""
    cases = []
    for name in MODELS:
        model = load_model(name)
        moved = 2 * (model.num_params - model.embedding_params) + 512 * model.kv_bytes_per_token(2)
        for device in DEVICES:
            alone = simulated(ALONE, model=name, hardware=device)
            cases.append(alone.num_steps == 128)  # the prompt makes the first token
            cases.append(1 <= tpot(alone) / (moved / load_hardware(device).memory_bandwidth) <= 2)
    return share_holding(cases)


def _phases() -> float:
    """A prompt of 8,192 tokens is bound by arithmetic, the decoding of one sequence by bytes."""
    cases = []
    for name in MODELS[:2]:
        for device in DEVICES:
            for tokens, outputs, compute_bound in ((4000, 1, True), (16, 512, False)):
                load = {"num_requests": 1, "input_tokens": tokens, "output_tokens": outputs}
                result = simulated(load, model=name, hardware=device)
                bytes_bound = seconds(result, "weights", "kv") > seconds(result, "compute")
                cases.append(bytes_bound != compute_bound)
    return share_holding(cases)


def _time(result: Result) -> float:
    """Busy seconds per output token."""
    return result.busy_time / result.requests["num_output_tokens"].sum()


def _steps(result: Result) -> float:
    return result.num_steps / result.requests["num_output_tokens"].sum()


def _drafts(method: str, alpha: float) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": 4, "acceptance": {"rate": alpha}}


def _technique(setting: str) -> Technique:
    found = technique_of(setting)
    assert found is not None
    return found


def _taxonomy() -> float:
    """Each technique simulated beside the same without: it lowers what the product says that it lowers."""
    long = {"num_requests": 1, "input_tokens": 32_000, "output_tokens": 1024}
    again = {**OFTEN, "output_tokens": 1, "max_concurrency": 1, "prefixes": {"count": 1, "tokens": 256}}
    exits = {"exit_layers": [16], "shares": [0.5]}
    pairs: Any = (  # setting, load, without, with
        ("precision.weights", ALONE, {}, {"precision": {"weights": "int4"}}),
        ("precision.kv_cache", long, {}, {"precision": {"kv_cache": "fp8"}}),
        ("parallelism.tensor", ALONE, {}, {"parallelism": {"tensor": 8}}),
        (
            "engine.attention",
            long | {"output_tokens": 1},
            {"engine": {"attention_kernel": "standard"}},
            {"engine": {"attention_kernel": "flash2"}},
        ),
        ("engine.enable_prefix_caching", again, {"engine": {"enable_prefix_caching": False}}, {}),
        ("early_exit", ALONE, {}, {"early_exit": exits}),
        ("speculation", ALONE, {}, {"speculation": _drafts("ngram", 0.7)}),
        ("speculation", ALONE, {}, {"speculation": _drafts("medusa", 0.6)}),
        ("speculation", ALONE, {}, {"speculation": _drafts("eagle", 0.75)}),
    )
    runs: list[tuple[str, Any, Any]] = [
        (key, *(simulated(load, **keys) for keys in both)) for key, load, *both in pairs
    ]
    runs.append(("engine.reserve", served("orca_max"), served("vllm")))
    cases = [step(context=8192) < step(without_grouping(), context=8192)]  # grouped-query attention
    for setting, before, after in runs:
        fewer = {FEWER_STEPS: _steps(after) < 0.7 * _steps(before)}
        fewer[FEWER_BYTES] = _time(after) < 0.97 * _time(before)
        cases.append(fewer[_technique(setting).side])
    return share_holding(cases)


def _labels() -> float:
    """What the report says of each technique: exact, or approximate."""
    exact = ("engine.attention", "engine.block_size", "speculation", "engine.enable_prefix_caching",
             "parallelism.tensor")  # fmt: skip
    approximate = ("precision.weights", "precision.kv_cache", "early_exit")
    labels = [bool(_technique(s).exact) for s in exact] + [not _technique(s).exact for s in approximate]
    return share_holding(labels)


def _throughput_and_latency() -> float:
    """From 1 to 32 sequences at once: many times the tokens per second, and no token of a single request sooner."""
    one, many = (simulated({**OFTEN, "max_concurrency": n}) for n in (1, 32))
    rate = [result.requests["num_output_tokens"].sum() / result.end_time for result in (one, many)]
    return share_holding([rate[1] > 5 * rate[0], tpot(many) >= tpot(one)])


def claims() -> tuple[Claim, ...]:
    return (
        claim("law.decode", SIMULATED, _law, "3 models on 3 devices, one sequence"),
        claim("law.phases", SIMULATED, _phases, "a prompt of 4,000 tokens, 512 tokens one by one"),
        claim("law.taxonomy", SIMULATED, _taxonomy, "8 techniques lower bytes per token, 3 steps per token"),
        claim("law.exact", CLOSED_FORM, _labels, "5 techniques exact, 3 approximate; that speculation is: sd.exact"),
        claim("law.throughput_latency", SIMULATED, _throughput_and_latency, "1 against 32 sequences at once"),
    )
