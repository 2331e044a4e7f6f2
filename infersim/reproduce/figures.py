"""What the figures of the reproduction report show, as numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from infersim.config.early_exit import EarlyExit
from infersim.config.engine import Engine
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.depth import compile_depths
from infersim.cost.speculation import speedup
from infersim.cost.weight_only import KERNELS as INT4_KERNELS
from infersim.cost.weight_only import gain as int4_gain
from infersim.deployment import deploy
from infersim.engine.early_exit import decode, full_depth

from .attention_io import KERNELS, forward_elements
from .kwon import ASSUMED, latency
from .simulation import CHAT, speed_up
from .speculation import drafts

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Figure:
    """Lines over x; `note` says what was assumed."""

    name: str
    title: str
    x: str
    y: str
    lines: Series
    note: str
    logarithmic: str = ""
    """axes, of "xy"."""
    level: float | None = field(default=None)
    """a horizontal line, such as a gain of 1"""


BATCHES = (1, 2, 4, 8, 16, 32, 64)


def all_figures() -> list[Figure]:
    """The figures in the order in which the report shows them."""
    return [
        _over_alpha(),
        _over_k(),
        _over_batch(),
        _over_context(),
        _paged(),
        _int4(),
        _attention_traffic(),
        _early_exit(),
    ]


def _over_alpha() -> Figure:
    alphas = np.linspace(0.05, 0.95, 19)
    lines = {f"k = {k}": [(a, speedup(a, k, 0.05)) for a in alphas] for k in (1, 2, 4, 8)}
    return Figure(
        "speedup-over-alpha",
        "Speculation over acceptance",
        "alpha",
        "speed-up",
        lines,
        "one sequence, draft pass 5 % of a step (Leviathan, theorem 3.8)",
        level=1.0,
    )


def _over_k() -> Figure:
    lines = {f"alpha = {a}": [(k, speedup(a, k, 0.05)) for k in range(13)] for a in (0.3, 0.5, 0.7, 0.8, 0.9)}
    return Figure(
        "speedup-over-k",
        "Speculation over the number of drafts",
        "k",
        "speed-up",
        lines,
        "one sequence, draft pass 5 % of a step",
        level=1.0,
    )


def _gain(k: int, batch: int, context: int) -> float:
    return speed_up(CHAT["model"], CHAT["hardware"], drafts("eagle3", k, 0.7), batch, context)


def _over_batch() -> Figure:
    lines = {f"k = {k}": [(b, _gain(k, b, 600)) for b in (*BATCHES, 128, 256)] for k in (1, 3, 5, 7)}
    return Figure(
        "speedup-over-batch",
        "Speculation over batch",
        "sequences",
        "throughput over none",
        lines,
        "Llama-3.1-8B, EAGLE-3, H100, acceptance 0.7, context 600: verification is free while bytes bind",
        "x",
        1.0,
    )


CONTEXTS = {1: (256, 1024, 4096, 16384, 65536), 16: (256, 1024, 4096, 16384), 64: (256, 1024, 4096)}
"""tokens by batch, as far as one device holds them"""


def _over_context() -> Figure:
    lines = {f"batch {b}": [(c, _gain(3, b, c)) for c in contexts] for b, contexts in CONTEXTS.items()}
    return Figure(
        "speedup-over-context",
        "Speculation over context",
        "tokens of context",
        "throughput over none",
        lines,
        "as above, k = 3: keys and values are read once for all drafts of a sequence",
        "x",
        1.0,
    )


def _paged() -> Figure:
    """Kwon et al.'s figure 12a by simulation: as far as a system keeps up."""
    names = {"vllm": "vLLM", "orca_oracle": "Orca (Oracle)", "orca_pow2": "Orca (Pow2)", "orca_max": "Orca (Max)",
             "ft": "FasterTransformer"}  # fmt: skip
    lines = {}
    for system, name in names.items():
        points = [(rate, latency(system, "sharegpt", rate)) for rate in np.arange(1, 25) / 10]
        lines[name] = [point for point in points if point[1] <= 1]
    return Figure(
        "paged-against-contiguous",
        "Latency over rate, OPT-13B on ShareGPT",
        "requests per second",
        "s per output token, queueing included",
        lines,
        "one A100 of 40 GB, 15,728 token slots in blocks of 16 or reserved in one piece (Kwon et al. 2023, figure 12);"
        f" {ASSUMED['sharegpt']}",
    )


def _int4() -> Figure:
    a10 = load_hardware("a10")
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    lines = {name: [(m, int4_gain(kernel, a10, m)) for m in rows] for name, kernel in INT4_KERNELS.items()}
    return Figure(
        "int4-over-batch",
        "INT4 weights over batch",
        "rows",
        "gain over 16 bits",
        lines,
        "one linear layer on an A10, by kernel",
        "x",
        1.0,
    )


def _attention_traffic() -> Figure:
    sizes = [2**i * 1024 for i in range(4, 10)]
    lines: Series = {
        k: [(s / 1024, forward_elements(k, 8192, 128, s / 2) * 2 / 1e9) for s in sizes] for k in KERNELS[:3]
    }
    return Figure(
        "attention-traffic-over-sram",
        "Attention traffic over on-chip memory",
        "KiB per multiprocessor",
        "GB per head, forward",
        lines,
        "8,192 tokens, d = 128, 16 bits; flash3 moves what flash2 does",
        "xy",
    )


def exit_gains(share: float, batch: int = 32, exit_layer: int = 28, model: str = "Llama-2-13B") -> dict[str, float]:
    """Throughput over no exits, by policy, with `share` of the tokens leaving after `exit_layer` layers."""
    engine = Engine(max_num_seqs=2 * batch, max_model_len=2048)
    d = deploy(model, load_hardware("a100-sxm-80gb"), Precision(), Parallelism(), engine)
    described = EarlyExit(exit_layers=[exit_layer], shares=[share])
    depths = compile_depths(described, d.placement, d.engine, 600)
    plain = full_depth(depths, batch)
    return {policy: decode(depths, policy, batch, 4000).tokens_per_second / plain for policy in
            ("leave_alone", "wait_for_all", "rebatch")} | {
        "one sequence": decode(depths, "wait_for_all", 1, 4000).tokens_per_second / full_depth(depths, 1)
    }  # fmt: skip


def _early_exit() -> Figure:
    shares = np.linspace(0, 0.9, 7)
    gains = [(share, exit_gains(share)) for share in shares]
    lines = {name: [(share, row[name]) for share, row in gains] for name in gains[0][1]}
    return Figure(
        "gain-over-exit-share",
        "Early exit after 28 of 40 layers",
        "share of tokens that leave",
        "gain",
        lines,
        "Llama-2-13B on an A100, 32 sequences (rebatch holds up to 64), context 600: a batch whose sure tokens"
        " ride along, or that waits for all, gains nothing; rebatching gains what one sequence does;"
        " approximate: the output is not the full model's",
        level=1.0,
    )
