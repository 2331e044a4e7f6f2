"""KV memory as a capacity: what of it holds tokens, and how many sequences run at once (Kwon et al. 2023, figures 2 and
13), and the notes on it."""

from functools import partial

from infersim.explain.summary import kv_shares
from infersim.models.catalog import load_model

from .claims import SIMULATION, Claim, relation, share_holding
from .kwon import ASSUMED, LONGEST, PAPER, SATURATED, running, served, slots, throughput

NOTES = "The Papers Behind Modern Inference Optimisation (notes)"
TABLE_1 = (("13b", 15_700, 0.002), ("66b", 9_700, 0.02), ("175b", 60_100, 0.001))  # slots, tolerance
FIGURE_2 = (  # % token, reserved, internal and external (with what is free), tolerance in points
    ("orca_max", (20.4, 13.3, 57.3, 8.9), 2),
    ("orca_pow2", (26.8, 17.9, 13.6, 41.6), 3),
    ("orca_oracle", (38.2, 25.2, 0.0, 36.6), 3),
)
FIGURE_13 = (  # data, requests a second, system, sequences at once, tolerance
    ("a", "sharegpt", 2.0, "orca_max", 7.0, 0.005),
    ("a", "sharegpt", 2.0, "orca_pow2", 9.81, 0.10),
    ("a", "sharegpt", 2.0, "orca_oracle", 13.62, 0.10),
    ("b", "alpaca", 30.0, "orca_max", 7.0, 0.005),
    ("b", "alpaca", 30.0, "orca_pow2", 43.24, 0.15),
    ("b", "alpaca", 30.0, "vllm", 132.44, 0.15),
)
HELD = (("max", "orca_max", 458, 0.05), ("pow2", "orca_pow2", 430, 0.05), ("oracle", "orca_oracle", 441, 0.05),
        ("vllm", "vllm", 498, 0.10))  # fmt: skip


def memory(system: str) -> tuple[float, ...]:
    """Percent of KV memory that holds tokens, is reserved, wasted inside reservations, and all other: figure 2."""
    shares = kv_shares(served(system))
    rest = shares["external"] + shares["free"]
    return tuple(100 * part for part in (shares["token"], shares["reserved"], shares["internal"], rest))


def held(system: str) -> float:
    """Tokens per sequence as the anchors are derived: figure 2's share of the slots, with more waiting than fits, over
    the sequences of figure 13a, at 2 requests a second, which vLLM still serves."""
    return kv_shares(served(system))["token"] * slots("13b") / running(served(system, rate=2.0))


def _left_over() -> float:
    return 100 * (1 - slots("13b") // LONGEST * LONGEST / slots("13b"))


def _concurrency() -> float:
    """More sequences at once, more tokens per second, at a time per token that is less than twice as long."""
    both, tpot = (served("vllm"), served("orca_max")), []
    for result in both:
        r = result.requests[result.requests["num_output_tokens"] > 1]
        tpot.append(((r["last_token"] - r["first_token"]) / (r["num_output_tokens"] - 1)).mean())
    sequences, rate = ([measure(result) for result in both] for measure in (running, throughput))
    return share_holding([sequences[0] > 3 * sequences[1], rate[0] > 2 * rate[1], tpot[0] < 2 * tpot[1]])


def _alpaca_step() -> float:
    result = served("vllm", "alpaca", 30.0)
    return 1e3 * result.busy_time / result.num_steps


def claims() -> tuple[Claim, ...]:
    rows = [
        Claim(f"vllm.tab1.{name}", PAPER, expected, "token slots", tolerance, partial(slots, name),
              "input: the size of the KV cache, GiB that are printed as GB")
        for name, expected, tolerance in TABLE_1
    ]  # fmt: skip
    rows.append(
        Claim("vllm.kv_per_token.13b", PAPER, 819_200, "bytes", 0,
              lambda: load_model("OPT-13B").kv_bytes_per_token(2), "OPT-13B in 16 bits")
    )  # fmt: skip
    for system, expected, points in FIGURE_2:
        rows.append(
            Claim(f"vllm.fig2.{system}", PAPER, expected, "% token, reserved, internal, external", points,
                  partial(memory, system),
                  f"OPT-13B, {SATURATED:.0f} requests a second; simulated; {ASSUMED['sharegpt']}", absolute=True)
        )  # fmt: skip
    rows += [
        Claim("vllm.fig2.orca_max.external", PAPER, 8.9, "% that no reservation fits", 0.1, _left_over,
              "7 reservations of 2,048 slots", absolute=True),
        Claim("vllm.fig2.vllm", PAPER, 96.3, "% of slots used", 1.5,
              lambda: 100 * kv_shares(served("vllm"))["token"], "more waiting than fit; simulated", absolute=True),
    ]  # fmt: skip
    for part, data, rate, system, expected, tolerance in FIGURE_13:
        rows.append(
            Claim(f"vllm.fig13{part}.{system}", PAPER, expected, "sequences at once", tolerance,
                  lambda system=system, data=data, rate=rate: running(served(system, data, rate)),
                  f"OPT-13B, {data}, {rate:.0f} requests a second; simulated; {ASSUMED[data]}")
        )  # fmt: skip
    for name, system, expected, tolerance in HELD:
        rows.append(
            Claim(f"vllm.derived.{name}", PAPER, expected, "tokens held per running sequence", tolerance,
                  partial(held, system), "figure 2's share over figure 13a's sequences; input: the final lengths"
                  " beside it, which give the spread of the outputs; simulated")
        )  # fmt: skip
    rows += [
        Claim("vllm.derived.step", PAPER, 75, "ms per step, Alpaca", SIMULATION, _alpaca_step,
              "30 requests a second; input: the 45 ms for ShareGPT, which give the host's time per sequence"),
        relation("kv.concurrency", NOTES, _concurrency,
                 "OPT-13B, more waiting than fit: sequences, tokens/s, time per token", "behaviour"),
    ]  # fmt: skip
    return tuple(rows)
