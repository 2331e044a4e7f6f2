"""The notes' relations and behaviours: what must hold for all inputs, and what a simulation must show."""

from functools import cache
from itertools import pairwise

import numpy as np

from infersim.config.engine import Engine
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import BYTES, Precision
from infersim.config.scenario import build_scenario
from infersim.cost.attention_io import forward_elements, sram_elements
from infersim.cost.early_exit import expected_cost, gain
from infersim.cost.floors import decode_sums, floor_itl, prefill_sums, reference_70b, step_bytes, step_floor
from infersim.cost.operator import evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.speculation import best_k, speedup, tokens_per_step
from infersim.cost.weight_only import KERNELS as INT4_KERNELS
from infersim.cost.weight_only import crossover_rows
from infersim.cost.weight_only import gain as int4_gain
from infersim.deployment import deploy
from infersim.engine.compiled.state import COLLECTIVES, WEIGHTS
from infersim.explain.techniques import technique_of
from infersim.models.catalog import load_model
from infersim.run import run
from infersim.workload.rejection import speculate

from .claims import SIMULATION, Claim, relation, share_holding
from .drafters import overhead
from .leviathan import TABLE_4, sampled_tokens

SPEED = "Inference speed isn't just a model-size problem (notes)"
PAPERS = "The Papers Behind Modern Inference Optimisation (notes)"
TWO_WAYS = "Two Ways to Go Faster (notes)"

MODELS, DEVICES = ("Llama-3.1-8B", "Llama-2-13B", "Qwen3-32B"), ("h100-sxm", "a100-sxm-80gb", "l40s")
FP16 = Precision(weights="fp16", kv_cache="fp16")


def _work(model: str, device: str, sums) -> tuple[float, float]:
    """Bytes and FLOPs of a step."""
    operators = forward_pass(Placement(load_model(model), load_hardware(device), FP16))
    flops = sum(op.count * evaluate(op.flops, sums(op.window)) for op in operators if op.flops)
    return step_bytes(operators, sums), flops


# --- the law ----------------------------------------------------------------------------------------------------------
def _law() -> float:
    """Floors are max(bytes / bandwidth, FLOPs / peak), and the run of one sequence is its steps, one after another."""
    cases = []
    for name in MODELS:
        for device in DEVICES:
            hardware = load_hardware(device)
            for sums in (decode_sums(0), decode_sums(8192), prefill_sums(64), prefill_sums(4096)):
                moved, flops = _work(name, device, sums)
                law = max(moved / hardware.memory_bandwidth, flops / hardware.flops["fp16"])
                operators = forward_pass(Placement(load_model(name), hardware, FP16))
                cases.append(abs(step_floor(operators, hardware, sums) / law - 1) < 0.01)
    alone = one_load(1, concurrency=1)
    cases.append(alone.num_steps == alone.requests[0]["num_output_tokens"])  # prefill makes the first token
    return share_holding(cases)


def _phases() -> float:
    cases = []
    for name in MODELS:
        for device in DEVICES:
            ridge = load_hardware(device).flops["fp16"] / load_hardware(device).memory_bandwidth
            for sums, compute_bound in ((prefill_sums(8192), True), (decode_sums(1024), False)):
                moved, flops = _work(name, device, sums)
                cases.append((flops / moved > ridge) == compute_bound)
    return share_holding(cases)


def _taxonomy() -> float:
    """Bytes per token or steps per token, before and after: each technique lowers its own and not the other."""
    model, h100 = reference_70b(), load_hardware("h100-sxm")
    placed = Placement(model, h100, FP16)
    step = floor_itl(placed, 8192)
    over_8 = Placement(model, h100, FP16, Parallelism.validate({"tensor": 8}, "reproduce"))
    kv = model.kv_bytes_per_token(2)
    n, d, sram = 8192, 128, sram_elements(h100)
    fewer_bytes = {
        "weight quantisation": floor_itl(placed, 8192, weight_bits=4) / step,
        "KV quantisation": BYTES["fp8"] / BYTES["fp16"],
        "tensor parallel": floor_itl(over_8, 8192) / step,
        "MQA/GQA": model.layers[0].attention.num_kv_heads / model.layers[0].attention.num_heads,
        "FlashAttention": forward_elements("flash2", n, d, sram) / forward_elements("standard", n, d, sram),
        "PagedAttention": (-(-50 // 16) * 16 * kv) / (2000 * kv),
        "prefix reuse": (4096 - 2048) / 4096,
        "early exit": expected_cost([0.5, 0.5], [0.5, 0.5], [0.01]),
    }
    fewer_steps = {name: 1 / tokens_per_step(alpha, 4) for name, alpha in
                   (("speculative decoding", 0.7), ("Medusa", 0.6), ("EAGLE", 0.75))}  # fmt: skip
    return share_holding(ratio < 1 for ratio in (fewer_bytes | fewer_steps).values())


@cache
def one_load(num_requests: int, concurrency: int, **engine):
    """Llama-3.1-8B on an H100, 512 in and 128 out, all sent at once up to a concurrency."""
    scenario = build_scenario(
        {
            "model": "Llama-3.1-8B",
            "hardware": "h100-sxm",
            "workload": {
                "num_requests": num_requests,
                "input_tokens": 512,
                "output_tokens": 128,
                "max_concurrency": concurrency,
            },
            "engine": engine,
        },
        "reproduce",
    )
    return run(scenario)[0]


def _labels() -> float:
    """What the report says of each technique: exact, or approximate."""
    exact = (
        "engine.attention",
        "engine.block_size",
        "speculation",
        "engine.enable_prefix_caching",
        "parallelism.tensor",
    )
    approximate = ("precision.weights", "precision.kv_cache", "early_exit")
    return share_holding([*(technique_of(s).exact for s in exact), *(not technique_of(s).exact for s in approximate)])


def _throughput_and_latency() -> float:
    """From 1 to 32 sequences at once: many times the tokens per second, and no token of a single request sooner."""
    one, many = one_load(32, 1), one_load(32, 32)
    rate = [r.requests["num_output_tokens"].sum() / r.end_time for r in (one, many)]
    gap = [((r.requests["last_token"] - r.requests["first_token"]) / 127).mean() for r in (one, many)]
    return share_holding([rate[1] > 5 * rate[0], gap[1] >= gap[0]])


# --- bandwidth -------------------------------------------------------------------------------------------------------
def _mlp_flops() -> float:
    """Half the MLP's FLOPs, or half the weights' bytes, at 1 and at 4,096 sequences."""
    h100, model = load_hardware("h100-sxm"), reference_70b()
    mlp = sum(layer.mlp.num_params(model.hidden_size) for layer in model.layers)
    total = model.num_params

    def step(batch: int, fewer_flops: float = 0.0, fewer_bytes: float = 0.0) -> float:
        moved = 2 * total * (1 - fewer_bytes) / h100.memory_bandwidth
        return max(moved, 2 * batch * (total - fewer_flops) / h100.flops["fp16"])

    return share_holding(
        [
            step(1, fewer_flops=mlp / 2) == step(1),
            step(1, fewer_bytes=0.5) < 0.51 * step(1),
            step(4096, fewer_flops=mlp / 2) < 0.7 * step(4096),
            step(4096, fewer_bytes=0.5) == step(4096),
        ]
    )


def _int4_stops() -> float:
    """Near 4x at one row (the kernels' own A10; marlin on others too), and nothing left at 8,192."""
    pairs = [("a10", kernel) for kernel in INT4_KERNELS.values()]
    pairs += [(device, INT4_KERNELS["marlin"]) for device in ("h100-sxm", "rtx-4090", "a100-sxm-80gb")]
    cases = []
    for device, kernel in pairs:
        hardware = load_hardware(device)
        cases.append(3 <= int4_gain(kernel, hardware, 1) <= 4 and int4_gain(kernel, hardware, 8192) < 1)
    return share_holding(cases)


def int4_crossovers(device: str = "a10") -> dict[str, int | None]:
    """Batch from which each kernel no longer gains."""
    return {name: crossover_rows(kernel, load_hardware(device)) for name, kernel in INT4_KERNELS.items()}


def _tensor_parallel_communication() -> float:
    """Share of the linear layers' time at 64 sequences in collectives and in reading weights, 1 to 8 L40S over PCIe."""
    shares = []
    for tensor in (1, 2, 4, 8):
        parallelism = Parallelism.validate({"tensor": tensor}, "reproduce")
        d = deploy("Llama-3.1-8B", load_hardware("l40s"), Precision(), parallelism, Engine(max_model_len=4096))
        split = d.step_cost().linear[64]
        shares.append((split[COLLECTIVES] / split.sum(), split[WEIGHTS] / split.sum()))
    rising = [a[0] < b[0] for a, b in pairwise(shares)]
    return share_holding([*rising, shares[0][0] == 0, shares[-1][0] > shares[-1][1]])


# --- KV ---------------------------------------------------------------------------------------------------------------
def kv_crossover(model: str = "Llama-3.1-8B") -> float:
    """Tokens in the cache from which keys and values outweigh the model."""
    loaded = load_model(model)
    return 2 * loaded.num_params / loaded.kv_bytes_per_token(2)


def _kv_outweighs() -> float:
    cases = []
    for name in MODELS:
        tokens = kv_crossover(name)
        kv, weights = load_model(name).kv_bytes_per_token(2), 2 * load_model(name).num_params
        cases += [tokens * 1.01 * kv > weights, tokens * 0.99 * kv < weights, tokens < 256 * 8192]
    return share_holding(cases)


def _internal_waste() -> float:
    random = np.random.default_rng(0)
    blocks, lengths = random.integers(1, 257, 2000), random.integers(1, 100_000, 2000)
    return share_holding(-(-lengths // blocks) * blocks - lengths < blocks)


# --- fewer steps -----------------------------------------------------------------------------------------------------
def _verify_cheap() -> float:
    cheap = overhead("Llama-3.1-8B", "ngram", 4, gpu="h100-sxm")[1]
    dear = overhead("Llama-3.1-8B", "ngram", 63, batch=64, gpu="h100-sxm")[1]
    return share_holding([cheap < 1.05, dear > 3])


def _steps() -> float:
    """m tokens in m / a target steps, of the sampled rule."""
    return share_holding(
        abs(sampled_tokens(alpha, k) / tokens_per_step(alpha, k) - 1) < 0.02
        for alpha in (0.3, 0.6, 0.9)
        for k in (2, 5)
    )


CHI_SQUARE_5 = 35.9  # of five degrees of freedom, exceeded once in a million


def _exact() -> float:
    random, cases = np.random.default_rng(7), []
    for _ in range(10):
        target = random.dirichlet(np.ones(6), 4) * 0.99 + 0.01 / 6
        draft = random.dirichlet(np.ones(6), 3) * 0.99 + 0.01 / 6
        _, tokens = speculate(target, draft, 30_000, random)
        for i in range(4):
            drawn = tokens[tokens[:, i] >= 0, i]
            expected = target[i] * len(drawn)
            if expected.min() > 5:
                cases.append(((np.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum() < CHI_SQUARE_5)
    return share_holding(cases)


def _traffic_dependent() -> float:
    """Four drafts of a 1B model for an 8B: gain on predictable text, loss where drafts rarely match."""
    _, verify, drafting = overhead("Llama-3.1-8B", "eagle", 4, gpu="h100-sxm")
    draft_model = speed_of_draft_model(4)
    gains = [tokens_per_step(alpha, 4) / cost for alpha in (0.9, 0.1) for cost in (verify + drafting, draft_model)]
    return share_holding([gains[0] > 2, gains[1] > 1.5, gains[2] < 1, gains[3] < 1])


def speed_of_draft_model(k: int) -> float:
    """Time of a step with k drafts of Llama-3.2-1B for Llama-3.1-8B, over a plain step: bytes bind."""
    sizes = [load_model(name) for name in ("Llama-3.2-1B", "Llama-3.1-8B")]
    read = [m.num_params - (0 if m.tie_word_embeddings else m.embedding_params) for m in sizes]
    return 1 + k * read[0] / read[1]


def _t5_speedup() -> float:
    """Mean over tasks and temperatures of T5-small drafting for T5-XXL, gamma and alpha as in Leviathan's table 4."""
    return float(np.mean([speedup(alpha, k, c) for _, draft, _, k, alpha, c, _, _ in TABLE_4 if draft == "small"]))


def _gains_do_not_multiply() -> float:
    """A 4-bit target of 10.4 ms makes the same draft dearer relative to it, and may accept less."""
    step16, step4, draft = 41.8, 10.45, 4 * 4.2
    cases = []
    for tokens in (2.0, 3.0, 4.0):
        alone, quantised = tokens * step16 / (step16 + draft), step16 / step4
        both = tokens * step16 / (step4 + draft)
        cases += [both < alone * quantised, 0.9 * both < both]
    return share_holding(cases)


def _only_through_a_or_cost() -> float:
    grid = [(a, c) for a in np.linspace(0.2, 0.9, 8) for c in np.linspace(0.01, 0.3, 8)]
    cases = [speedup(a + 0.05, 4, c) > speedup(a, 4, c) > speedup(a, 4, c + 0.05) for a, c in grid]
    return share_holding([*cases, best_k(0.3, 0.5) == 0])


# --- depth ------------------------------------------------------------------------------------------------------------
def _mixture() -> float:
    random, cases = np.random.default_rng(3), []
    for exits in (2, 3, 5):
        segments, heads = random.random(exits), random.random(exits - 1) * 0.1
        shares = random.dirichlet(np.ones(exits))
        leaves = random.choice(exits, 50_000, p=shares)
        walked = [segments[: i + 1].sum() + heads[: i + 1].sum() for i in range(exits)]
        cases.append(abs(np.array(walked)[leaves].mean() / expected_cost(shares, segments, heads) - 1) < 0.02)
    return share_holding(cases)


def _easy_majority() -> float:
    gains = [gain([s, 1 - s], [0.4, 0.6], [0.0]) for s in np.linspace(0, 1, 11)]
    return share_holding([gains[0] == 1, *(a < b for a, b in pairwise(gains))])


# --- systems ----------------------------------------------------------------------------------------------------------
def _vllm() -> float:
    """Blocks of 16 taken as needed; requests join while others run, up to what is asked for."""
    result = one_load(32, 8)
    order = np.sort(result.requests["scheduled"])
    joined = order[8] < result.requests["last_token"].max() and result.peak_running == 8
    peak = result.peak_blocks <= 8 * -(-(512 + 128) // 16)
    return share_holding([result.engine.block_size == 16, joined, peak])


def claims() -> tuple[Claim, ...]:
    behaviour = "behaviour"
    return (
        relation("law.decode", TWO_WAYS, _law, "floors of 3 models on 3 devices; a run of one sequence is its steps"),
        relation("law.phases", TWO_WAYS, _phases, "prefill of 8,192 tokens above the ridge, decode below", behaviour),
        relation("law.taxonomy", TWO_WAYS, _taxonomy, "8 techniques lower bytes per token, 3 steps per token"),
        relation("law.exact", PAPERS, _labels, "5 techniques exact, 3 approximate; that speculation is: sd.exact"),
        relation(
            "law.throughput_latency", PAPERS, _throughput_and_latency, "1 against 32 sequences at once", behaviour
        ),
        relation("bw.mlp_flops", TWO_WAYS, _mlp_flops, "70B on an H100, 1 and 4,096 sequences", behaviour),
        relation(
            "bw.int4_stops",
            TWO_WAYS,
            _int4_stops,
            "4 kernels; on an A10 the gain ends at batch "
            + ", ".join(f"{n} ({name})" for name, n in int4_crossovers().items()),
            behaviour,
        ),
        relation(
            "bw.tp_comm",
            TWO_WAYS,
            _tensor_parallel_communication,
            "Llama-3.1-8B, 64 sequences, 1 to 8 L40S over PCIe",
            behaviour,
        ),
        relation(
            "kv.larger_than_weights",
            SPEED,
            _kv_outweighs,
            f"3 models; Llama-3.1-8B: from {kv_crossover():,.0f} tokens in the cache",
            behaviour,
        ),
        relation("kv.internal_waste", PAPERS, _internal_waste, "2,000 lengths and block sizes"),
        relation(
            "sd.verify_cheap", PAPERS, _verify_cheap, "5 positions of one sequence; 64 of 64 sequences", behaviour
        ),
        relation("sd.steps", TWO_WAYS, _steps, "of the sampled rejection rule"),
        relation("sd.exact", PAPERS, _exact, "chi-square of sampled tokens at each position, 1 in a million"),
        relation("sd.traffic_dependent", PAPERS, _traffic_dependent, "acceptance 0.9 against 0.1", behaviour),
        Claim(
            "sd.speedup",
            SPEED,
            (2, 3),
            "x",
            SIMULATION,
            _t5_speedup,
            "T5-small for T5-XXL; input: acceptance and draft time of Leviathan's table 4",
            "range",
        ),
        relation("sd.quant_acceptance", TWO_WAYS, _gains_do_not_multiply, "70B in 4 bits, 7B drafter in 16", behaviour),
        relation("sd.eagle", TWO_WAYS, _only_through_a_or_cost, "64 pairs of acceptance and draft cost"),
        relation("ee.mixture", SPEED, _mixture, "50,000 inputs walked through each network"),
        relation("ee.easy_majority", SPEED, _easy_majority, "0 to 100 % of inputs leave early", behaviour),
        relation("sys.vllm", TWO_WAYS, _vllm, "a run with 8 of 32 requests at once", behaviour),
    )
