"""Drafters: EAGLE 1 to 3, Medusa, Spec-Bench, multi-token prediction. Tokens per step are input, speed is recomputed.

One deployment prices all of them: plain step, verification of the drafts, drafting.
"""

from functools import cache, partial

from infersim.config.engine import Engine
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.speculation import Acceptance, Speculation, Tree
from infersim.cost.drafting import batch_time, compile_draft_cost, draft_time, verification_engine
from infersim.cost.speculation import tokens_per_step_by_position
from infersim.cost.steptime import compile_step_cost
from infersim.deployment import deploy
from infersim.models.catalog import load_model

from .claims import SIMULATION, Claim

EAGLE1 = "Li et al. 2024, EAGLE (arXiv 2401.15077)"
EAGLE2 = "Li et al. 2024, EAGLE-2 (arXiv 2406.16858)"
EAGLE3 = "Li et al. 2025, EAGLE-3 (arXiv 2503.01840)"
MEDUSA = "Cai et al. 2024, Medusa (arXiv 2401.10774), table 1"
SPEC_BENCH = "Spec-Bench leaderboard, A100 80 GB, one sequence, greedy"
GLOECKLE = "Gloeckle et al. 2024, Multi-token Prediction (arXiv 2404.19737), table S2"
DEEPSEEK = "DeepSeek-V3 technical report (arXiv 2412.19437)"

CONTEXT = 600  # tokens; assumed: half of an MT-bench conversation
GPU = "a100-sxm-80gb"  # assumed where a paper names none

# drafts verified, depth and width of the trees (EAGLE-2 and 3: by model)
TREE_1, TREE_MEDUSA = (25, 5, 4), (63, 5, 4)


@cache
def overhead(
    model: str, method: str, drafts: int, depth: int = 0, width: int = 0, batch: int = 1, gpu: str = GPU,
    context: int = CONTEXT,
) -> tuple[float, float, float]:  # fmt: skip
    """(plain step in s, verification over it, drafting over it)."""
    engine = Engine(max_num_seqs=max(64, batch), max_num_batched_tokens=8192, max_model_len=2048)
    d = deploy(model, load_hardware(gpu), Precision(), Parallelism(), engine)
    speculation = Speculation(
        method=method,
        num_speculative_tokens=drafts,
        tree=Tree(depth=depth, width=width) if depth else None,
        acceptance=Acceptance(rate=0.5),
    )
    plain = batch_time(d.step_cost(), batch, context)
    verify = compile_step_cost(d.placement, verification_engine(d.engine, drafts))
    drafting = draft_time(compile_draft_cost(speculation, d.placement, d.engine), batch, context, drafts)
    return plain, batch_time(verify, batch, context, drafts) / plain, drafting / plain


def _speed(tokens: float, *args, **kwargs) -> float:
    _, verify, drafting = overhead(*args, **kwargs)
    return tokens / (verify + drafting)


# --- EAGLE ------------------------------------------------------------------------------------------------------------
VICUNA_7B, LLAMA_70B = (
    (0.79, 0.74, 0.72, 0.73, 0.73),
    (0.75, 0.69, 0.65, 0.64, 0.64),
)  # chain acceptance 0 to 3, then level
TAU_7B = 3.94


def _second_choice() -> float:
    """Chance that a tree's second branch is accepted where the first is not, such that Vicuna-7B emits 3.94 tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _tree_tokens(VICUNA_7B, middle) < TAU_7B else (low, middle)
    return (low + high) / 2


def _tree_tokens(chain: tuple[float, ...], second: float) -> float:
    return tokens_per_step_by_position([1 - (1 - alpha) * (1 - second) for alpha in chain])


EAGLE2_TABLE = (  # model, nodes, speed, tokens per step
    ("Vicuna-13B", 50, 4.26, 4.83),
    ("Vicuna-7B", 60, 3.62, 4.98),
    ("Llama-2-13B", 50, 4.21, 4.75),
    ("Llama-2-7B", 60, 3.43, 4.70),
)
EAGLE3_TABLE = (  # method, drafts, depth, width, speed, tokens: Vicuna-13B
    ("ngram", 10, 0, 0, 1.74, 1.80),
    ("medusa", *TREE_MEDUSA, 2.12, 2.51),
    ("eagle", *TREE_1, 3.05, 3.96),
    ("eagle", 50, 6, 10, 4.22, 4.83),
    ("eagle3", 60, 6, 10, 5.51, 6.62),
)
MEDUSA_TABLE = (
    ("Vicuna-7B", 2.83, 3.47),
    ("Mistral-7B", 2.66, 3.14),
    ("Vicuna-13B", 2.83, 3.51),
    ("Vicuna-33B", 2.35, 3.01),
)

# --- EAGLE under load: Llama-3.1-8B on an H100, SGLang 0.4.4, MT-bench, chains of 3 ----------------------------------
BATCHES = (2, 4, 8, 16, 24, 32, 48, 56, 64)
EAGLE3_BY_BATCH = (1.81, 1.82, 1.62, 1.48, 1.39, 1.32, 1.38, 1.34, 1.38)
EAGLE1_CHAIN, EAGLE3_CHAIN = (0.66, 0.55, 0.50), (0.80, 0.80, 0.80)  # assumed: the paper's figures of n-alpha
# s that its speculative worker makes the device wait: fitted on EAGLE-1, 1.40 1.38 1.23 1.02 0.93 0.94 0.88 0.99 0.99
SGLANG_STEP, SGLANG_SEQUENCE = 2.2e-3, 0.13e-3


def by_batch(method: str, chain: tuple[float, ...]) -> tuple[float, ...]:
    """Throughput with speculation over that without, by batch; the plain engine hides its host time."""
    ratios = []
    for batch in BATCHES:
        plain, verify, drafting = overhead("Llama-3.1-8B", method, 3, batch=batch, gpu="h100-sxm")
        host = (SGLANG_STEP + SGLANG_SEQUENCE * batch) / plain
        ratios.append(tokens_per_step_by_position(chain) / (verify + drafting + host))
    return tuple(ratios)


def _eagle1_crosses() -> bool:
    """A gain at 2 sequences, none (within 5 %) or a loss from 24 on."""
    ratios = dict(zip(BATCHES, by_batch("eagle", EAGLE1_CHAIN), strict=True))
    return ratios[2] > 1.1 and max(ratio for batch, ratio in ratios.items() if batch >= 24) < 1.05


# --- Spec-Bench: eager PyTorch, so that a method costs a fixed time per step, whatever the model ---------------------
EAGER_LAYER = 0.7e-3  # s of Python and launches per layer and step: assumed, a 7B model at 22 ms per token
SPEC_BENCH_TABLE = {  # method -> model -> speed, mean accepted tokens
    "EAGLE2": {"v7b": (2.36, 4.34), "v13b": (2.46, 4.43), "v33b": (2.59, 4.05)},
    "EAGLE": {"v7b": (2.10, 3.58), "v13b": (2.16, 3.64), "v33b": (2.43, 3.39)},
    "Hydra": {"v7b": (2.07, 3.26), "v13b": (2.20, 3.35), "v33b": (2.22, 3.24)},
    "Medusa": {"v7b": (1.71, 2.31), "v13b": (1.80, 2.39), "v33b": (1.76, 2.33)},
    "PLD": {"v7b": (1.66, 1.75), "v13b": (1.56, 1.67), "v33b": (1.40, 1.54)},
    "SpS": {"v7b": (1.52, 2.28), "v13b": (1.54, 2.19), "v33b": (1.57, 2.01)},
    "REST": {"v7b": (1.48, 1.82), "v13b": (1.38, 1.82)},
    "Lookahead": {"v7b": (1.34, 1.64), "v13b": (1.30, 1.63)},
}
SPEC_BENCH_MODELS = {"v7b": "Vicuna-7B", "v13b": "Vicuna-13B", "v33b": "Vicuna-33B"}


def _eager_step(name: str) -> float:
    model = SPEC_BENCH_MODELS[name]
    plain, _, _ = overhead(model, "ngram", 1)
    return max(plain, EAGER_LAYER * load_model(model).num_layers)


def _spec_bench(name: str) -> tuple[float, ...]:
    """Speed of each method on this model, its time per step taken from Vicuna-7B."""
    speeds = []
    for table in SPEC_BENCH_TABLE.values():
        if name in table:
            speed, tokens = table["v7b"]
            fixed = (tokens / speed - 1) * _eager_step("v7b")
            speeds.append(table[name][1] / (1 + fixed / _eager_step(name)))
    return tuple(speeds)


def _spec_bench_claim(name: str) -> Claim:
    expected = tuple(table[name][0] for table in SPEC_BENCH_TABLE.values() if name in table)
    return Claim(
        f"specbench.a100.{name}",
        SPEC_BENCH,
        expected,
        "x speed",
        SIMULATION,
        partial(_spec_bench, name),
        f"{', '.join(m for m, t in SPEC_BENCH_TABLE.items() if name in t)}; input: accepted tokens, and each method's"
        " time per step from Vicuna-7B; assumed: 0.7 ms per layer of an eager step",
    )


# --- multi-token prediction -------------------------------------------------------------------------------------------
GLOECKLE_TABLE = (  # heads, tokens per forward and speed on wiki, books, code
    (2, (1.88, 1.87, 1.94), (1.79, 1.77, 1.85)),
    (3, (2.57, 2.56, 2.78), (2.35, 2.32, 2.54)),
    (4, (3.12, 3.09, 3.50), (2.74, 2.67, 3.05)),
)


def _gloeckle() -> tuple[float, ...]:
    """A 7B model: each further head is one layer and one pass of the unembedding; bytes bind."""
    model = load_model("Llama-2-7B")
    extra = model.layers[0].num_params(model.hidden_size) + model.lm_head_params
    share = extra / (model.num_params - model.embedding_params)
    return tuple(tokens / (1 + (heads - 1) * share) for heads, row, _ in GLOECKLE_TABLE for tokens in row)


def _deepseek() -> float:
    """Tokens per step 1 + (0.85 to 0.9), over the active bytes of one more layer, its projection and the head."""
    model = load_model("DeepSeek-V3")
    h = model.hidden_size
    extra = model.layers[-1].num_active_params(h) + model.lm_head_params + 2 * h * h
    return (1 + 0.875) / (1 + extra / (model.num_active_params - model.embedding_params))


def claims() -> tuple[Claim, ...]:
    return (
        Claim(
            "eagle1.tau",
            EAGLE1,
            3.81,
            "tokens per step, Llama-2-70B",
            SIMULATION,
            lambda: _tree_tokens(LLAMA_70B, _second_choice()),
            "input: its chain acceptance; the tree's second branches fitted on Vicuna-7B's 3.94",
        ),
        Claim(
            "eagle2.main",
            EAGLE2,
            tuple(row[2] for row in EAGLE2_TABLE),
            "x speed",
            SIMULATION,
            lambda: tuple(_speed(t, model, "eagle", nodes, 6, 10) for model, nodes, _, t in EAGLE2_TABLE),
            "input: tokens per step; assumed: A100; Vicuna-13B, Vicuna-7B, Llama-2-13B, Llama-2-7B",
        ),
        Claim(
            "eagle3.tab1.v13b",
            EAGLE3,
            tuple(row[4] for row in EAGLE3_TABLE),
            "x speed",
            SIMULATION,
            lambda: tuple(_speed(t, "Vicuna-13B", m, k, depth, w) for m, k, depth, w, _, t in EAGLE3_TABLE),
            "PLD, Medusa, EAGLE, EAGLE-2, EAGLE-3; input: tokens per step; assumed: A100",
        ),
        Claim(
            "eagle3.sglang",
            EAGLE3,
            EAGLE3_BY_BATCH,
            "x throughput, EAGLE-3",
            SIMULATION,
            lambda: by_batch("eagle3", EAGLE3_CHAIN) if _eagle1_crosses() else (0.0,) * len(BATCHES),
            "batch 2 to 64; assumed: 0.8 accepted at each position, context 600; the worker's host time of 2.2 ms and"
            " 0.13 ms per sequence is fitted on EAGLE-1, which gains at 2 and not from 24 on",
        ),
        Claim(
            "eagle3.sglang.bs1",
            EAGLE3,
            158.34,
            "tokens/s without speculation",
            SIMULATION,
            lambda: 1 / overhead("Llama-3.1-8B", "eagle", 3, gpu="h100-sxm")[0],
            "the rates with EAGLE need tokens per step that are not printed",
        ),
        Claim(
            "medusa.tab1",
            MEDUSA,
            tuple(row[1] for row in MEDUSA_TABLE),
            "x speed",
            SIMULATION,
            lambda: tuple(_speed(t, model, "medusa", *TREE_MEDUSA) for model, _, t in MEDUSA_TABLE),
            "Vicuna-7B, Zephyr-7B, Vicuna-13B, Vicuna-33B; input: tokens per step; assumed: A100, 63 nodes of 5 heads",
        ),
        _spec_bench_claim("v13b"),
        _spec_bench_claim("v33b"),
        Claim(
            "mtp.gloeckle",
            GLOECKLE,
            tuple(s for _, _, row in GLOECKLE_TABLE for s in row),
            "x speed",
            SIMULATION,
            _gloeckle,
            "2, 3, 4 heads on wiki, books, code; input: tokens per forward",
        ),
        Claim("dsv3.mtp", DEEPSEEK, 1.8, "x tokens/s", SIMULATION, _deepseek, "input: acceptance 0.85 to 0.9"),
    )
