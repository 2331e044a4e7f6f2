"""Drafters: EAGLE 1 to 3, Medusa, Spec-Bench, multi-token prediction. Tokens per step are input; the engine's own steps
give the speed: verification of the drafts, and drafting."""

from functools import partial
from typing import Any

from .claims import ARITHMETIC, SIMULATED, Claim, claim, expected
from .rejection import tokens_per_step_by_position
from .simulation import CHAT, decoding, speed_up, token_time

GPU = "a100-sxm-80gb"  # assumed where a paper names none

# drafts verified, depth and width of the trees
TREE_1, TREE_MEDUSA = (25, 5, 4), (63, 5, 4)


def _speed(model: str, method: str, tokens: float, drafts: int, depth: int = 0, width: int = 0) -> float:
    """Of one sequence after 600 tokens (assumed: half of an MT-bench conversation), `tokens` a step."""
    speculation = {"method": method, "num_speculative_tokens": drafts,
                   "acceptance": {"synthetic_acceptance_length": tokens}}  # fmt: skip
    if depth:
        speculation["tree"] = {"depth": depth, "width": width}
    return speed_up(model, GPU, speculation)


# --- EAGLE ------------------------------------------------------------------------------------------------------------
VICUNA_7B, LLAMA_70B = (
    (0.79, 0.74, 0.72, 0.73, 0.73),
    (0.75, 0.69, 0.65, 0.64, 0.64),
)  # chain acceptance 0 to 3, then level


def _second_choice() -> float:
    """Chance that a tree's second branch is accepted where the first is not, such that Vicuna-7B emits what it does."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        below = _tree_tokens(VICUNA_7B, middle) < expected("eagle1.tau.vicuna7b")[0]
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _tree_tokens(chain: tuple[float, ...], second: float) -> float:
    return tokens_per_step_by_position([1 - (1 - alpha) * (1 - second) for alpha in chain])


EAGLE2_TABLE = (("Vicuna-13B", 50, 4.83), ("Vicuna-7B", 60, 4.98), ("Llama-2-13B", 50, 4.75), ("Llama-2-7B", 60, 4.70))
EAGLE3_TABLE = (  # method, tokens, drafts, depth, width: Vicuna-13B
    ("ngram", 1.80, 10), ("medusa", 2.51, *TREE_MEDUSA), ("eagle", 3.96, *TREE_1), ("eagle", 4.83, 50, 6, 10),
    ("eagle3", 6.62, 60, 6, 10),
)  # fmt: skip
MEDUSA_TABLE = (("Vicuna-7B", 3.47), ("Mistral-7B", 3.14), ("Vicuna-13B", 3.51), ("Vicuna-33B", 3.01))

# --- EAGLE under load: Llama-3.1-8B on an H100, SGLang 0.4.4, MT-bench, chains of 3 ----------------------------------
BATCHES = (2, 4, 8, 16, 24, 32, 48, 56, 64)
CHAINS = {"eagle": (0.66, 0.55, 0.50), "eagle3": (0.80, 0.80, 0.80)}  # assumed: the paper's figures of n-alpha
# s that its speculative worker makes the device wait, per step and per draft or token that a sequence verifies
WAITS: dict[str, Any] = {"worker_step_time": 2.2e-3, "worker_sequence_time": 0.13e-3 / 4}


def by_batch(method: str) -> tuple[float, ...]:
    """Throughput with speculation over that without, by batch; the plain engine hides its host time."""
    alike = {"conditional": list(CHAINS[method]), "request_spread": 0}
    speculation = {"method": method, "num_speculative_tokens": 3, "acceptance": alike}
    return tuple(speed_up(CHAT["model"], CHAT["hardware"], speculation, batch, **WAITS) for batch in BATCHES)


# --- Spec-Bench: eager PyTorch, so that a method costs a fixed time per step, whatever the model ---------------------
EAGER: dict[str, Any] = {
    "enforce_eager": True,
    "eager_launch_time": 60e-6,
}  # s per kernel: assumed, a 7B model at some 22 ms per token
SPEC_BENCH = {  # method -> speed on Vicuna-7B, mean accepted tokens by model
    "EAGLE2": (2.36, {"v7b": 4.34, "v13b": 4.43, "v33b": 4.05}),
    "EAGLE": (2.10, {"v7b": 3.58, "v13b": 3.64, "v33b": 3.39}),
    "Hydra": (2.07, {"v7b": 3.26, "v13b": 3.35, "v33b": 3.24}),
    "Medusa": (1.71, {"v7b": 2.31, "v13b": 2.39, "v33b": 2.33}),
    "PLD": (1.66, {"v7b": 1.75, "v13b": 1.67, "v33b": 1.54}),
    "SpS": (1.52, {"v7b": 2.28, "v13b": 2.19, "v33b": 2.01}),
    "REST": (1.48, {"v7b": 1.82, "v13b": 1.82}),
    "Lookahead": (1.34, {"v7b": 1.64, "v13b": 1.63}),
}
SPEC_BENCH_MODELS = {"v7b": "Vicuna-7B", "v13b": "Vicuna-13B", "v33b": "Vicuna-33B"}


def _spec_bench(name: str) -> tuple[float, ...]:
    """Speed of each method on this model, its time per step being what Vicuna-7B's speed leaves for it."""
    plain = {n: decoding(model=SPEC_BENCH_MODELS[n], hardware=GPU, engine=EAGER)[0] for n in ("v7b", name)}
    speeds = []
    for speed, tokens in SPEC_BENCH.values():
        if name in tokens:
            wait = (tokens["v7b"] / speed - 1) * plain["v7b"]
            drafts = {"method": "ngram", "num_speculative_tokens": 8,
                      "acceptance": {"synthetic_acceptance_length": tokens[name]}}  # fmt: skip
            engine = EAGER | {"worker_step_time": wait}
            drafted = decoding(model=SPEC_BENCH_MODELS[name], hardware=GPU, engine=engine, speculation=drafts)
            speeds.append(plain[name] / drafted[0])
    return tuple(speeds)


def _spec_bench_claim(name: str) -> Claim:
    methods = ", ".join(method for method, (_, tokens) in SPEC_BENCH.items() if name in tokens)
    note = f"{methods}; input: accepted tokens; assumed: 60 us per kernel of an eager step"
    fitted: dict[str, Any] = {"time of each method per step": ("specbench.a100.v7b",)}
    return claim(f"specbench.a100.{name}", SIMULATED, partial(_spec_bench, name), note, **fitted)


# --- multi-token prediction -------------------------------------------------------------------------------------------
GLOECKLE_TABLE = (  # heads, tokens per forward on wiki, books, code
    (2, (1.88, 1.87, 1.94)), (3, (2.57, 2.56, 2.78)), (4, (3.12, 3.09, 3.50)),
)  # fmt: skip
DEEPSEEK_GPUS = 8  # H200, assumed; one sequence


def _gloeckle() -> tuple[float, ...]:
    return tuple(_speed("Llama-2-7B", "mtp", tokens, heads - 1) for heads, row in GLOECKLE_TABLE for tokens in row)


def _deepseek() -> float:
    alike = {"rate": 0.875, "request_spread": 0}
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "acceptance": alike}
    return speed_up("DeepSeek-V3", "h200-sxm", speculation, tensor=DEEPSEEK_GPUS)


def claims() -> tuple[Claim, ...]:
    branch: dict[str, Any] = {"second branches of a tree": ("eagle1.tau.vicuna7b",)}
    worker: dict[str, Any] = {"time of SGLang's speculative worker": ("eagle3.sglang.eagle1",)}
    load = "batch 2 to 64, chains of 3; assumed: acceptance by position, context 600"
    return (
        claim("eagle1.tau", ARITHMETIC, lambda: _tree_tokens(LLAMA_70B, _second_choice()),
              "input: its chain acceptance", why="second branches help the 70B more than the 7B",
              **branch),
        claim("eagle1.tau.vicuna7b", ARITHMETIC, lambda: _tree_tokens(VICUNA_7B, _second_choice()),
              "input: its chain acceptance", **branch),
        claim("eagle2.main", SIMULATED, lambda: tuple(_speed(model, "eagle", t, k, 6, 10) for model, k, t in
              EAGLE2_TABLE), "input: tokens per step; assumed: A100; Vicuna-13B, Vicuna-7B, Llama-2-13B, Llama-2-7B"),
        claim("eagle3.tab1.v13b", SIMULATED, lambda: tuple(_speed("Vicuna-13B", *row) for row in EAGLE3_TABLE),
              "PLD, Medusa, EAGLE, EAGLE-2, EAGLE-3; input: tokens per step; assumed: A100"),
        claim("eagle3.sglang", SIMULATED, partial(by_batch, "eagle3"), f"EAGLE-3, {load}",
              why="within 7 % up to batch 32, then up to 18 % low: the worker's time per sequence is too much there",
              **worker),
        claim("eagle3.sglang.eagle1", SIMULATED, partial(by_batch, "eagle"), f"EAGLE, {load}", **worker),
        claim("eagle3.sglang.bs1", SIMULATED, lambda: 1 / token_time(*CHAT.values()),
              "the rates with EAGLE need tokens per step that are not printed"),
        claim("medusa.tab1", SIMULATED,
              lambda: tuple(_speed(model, "medusa", t, *TREE_MEDUSA) for model, t in MEDUSA_TABLE),
              "Vicuna-7B, Zephyr-7B, Vicuna-13B, Vicuna-33B; input: tokens per step; assumed: A100, 63 nodes"),
        _spec_bench_claim("v13b"),
        _spec_bench_claim("v33b"),
        claim("mtp.gloeckle", SIMULATED, _gloeckle, "2, 3, 4 heads on wiki, books, code; input: tokens per forward;"
              " assumed: A100, heads one after another"),
        claim("dsv3.mtp", SIMULATED, _deepseek, "input: acceptance 0.85 to 0.9; assumed: 8 H200, one sequence"),
    )  # fmt: skip
