"""The inputs group by group: which there are, and what they are called."""

import math
from dataclasses import replace
from typing import Any, get_args

from infersim.config.precision import FORMATS, KV_FORMATS
from infersim.config.prices import PriceKind, Prices, price_of
from infersim.config.resources import names
from infersim.config.scenario import Scenario
from infersim.config.workload import Length
from infersim.engine.knobs import KNOBS
from infersim.workload.draws import generator
from infersim.workload.lengths import draw_lengths

from .control import Change, Control, Form
from .edit import Remove

POWERS = ("1", "2", "4", "8", "16")
POLICIES = ("round-robin", "random", "least-outstanding", "power-of-two", "least-kv", "prefix-aware", "kv-aware")


def traffic(scenario: Scenario) -> list[Control | Form]:
    load = scenario.workload
    ways: dict[str, list[Change]] = {
        "requests per second": [("workload.max_concurrency", Remove), ("workload.users", Remove),
                                ("workload.ramp_up", Remove), ("workload.request_rate", 10)],
        "clients in a closed loop": [("workload.request_rate", Remove), ("workload.users", Remove),
                                     ("workload.ramp_up", Remove), ("workload.max_concurrency", 32)],
        "users who read and think": [("workload.request_rate", Remove), ("workload.max_concurrency", Remove),
                                     ("workload.ramp_up", Remove), ("workload.prefixes", Remove),
                                     ("workload.users", 32), ("workload.think_time", 5)],
        "all at once": [("workload.max_concurrency", Remove), ("workload.users", Remove),
                        ("workload.ramp_up", Remove), ("workload.request_rate", "inf")],
    }  # fmt: skip
    if load.trace is not None:
        ways = {"the trace's own times": [("workload.request_rate", Remove), ("workload.ramp_up", Remove)],
                "requests per second": ways["requests per second"]}  # fmt: skip
    finite = load.request_rate is not None and math.isfinite(load.request_rate)
    if load.ramp_up is not None:
        ways["a ramp"] = []
    now = (
        "users who read and think"
        if load.users
        else "a ramp"
        if load.ramp_up
        else "requests per second"
        if finite
        else "the trace's own times"
        if load.trace and load.request_rate is None
        else "clients in a closed loop"
        if load.max_concurrency
        else "all at once"
    )
    if now != "users who read and think":
        ways = {name: [*changes, ("workload.think_time", Remove)] if load.think_time and load.turns == 1 else changes
                for name, changes in ways.items()}  # fmt: skip
    found: list[Control | Form] = [Form("workload.arrivals", "Arrivals", ways, now)]
    if finite:
        unit = "requests/s" if load.turns == 1 else "sessions/s"
        found.append(
            Control("workload.request_rate", "Request rate", low=0.1, high=500, log=True, whole=False, unit=unit)
        )
        found.append(
            Control("workload.burstiness", "Burstiness", low=0.1, high=10, log=True, whole=False,
                    about="1: Poisson; below 1: burstier; above 1: more even")
        )  # fmt: skip
    if load.users:
        found.append(Control("workload.users", "Users", low=1, high=2000, log=True))
        found.append(Control("workload.think_time", "Think time", low=0, high=120, whole=False, unit="s"))
    if load.max_concurrency or finite:
        found.append(
            Control("workload.max_concurrency", "Most at one time", low=1, high=2000, log=True, unit="requests")
        )
    found.append(
        Control("workload.timeout", "Clients give up after", low=0.1, high=600, log=True, whole=False, unit="s")
    )
    if load.trace and load.request_rate is None and load.ramp_up is None:
        found.append(
            Control("workload.time_scale", "Stretch of the trace's times", low=0.05, high=20, log=True, whole=False)
        )
    return found


def lengths(scenario: Scenario) -> list[Control | Form]:
    load = scenario.workload
    if load.trace is not None:
        return []
    found: list[Control | Form] = []
    for name, words, most in (("input_tokens", "Prompt", 128_000), ("output_tokens", "Answer", 16_000)):
        length, key = getattr(load, name), f"workload.{name}"
        mean = max(2, round(float(draw_lengths(length, 2000, generator(0, name)).mean())))
        ways: dict[str, list[Change]] = {
            "fixed": [(key, mean)],
            "lognormal": [(key, {"lognormal": {"median": round(0.8 * mean), "mean": mean}})],
            "uniform": [(key, {"uniform": [max(1, mean // 2), mean + mean // 2]})],
            "mean and range": [(key, {"mean": mean, "range_ratio": 0.5})],
        }
        now = "fixed"
        if isinstance(length, Length):
            kinds = {"lognormal": "lognormal", "uniform": "uniform", "quantiles": "quantiles", "mean": "mean and range"}
            now = next(words for field, words in kinds.items() if getattr(length, field) is not None)
        if now == "quantiles":
            ways["quantiles"] = []
        found.append(Form(f"{key}.form", f"{words} lengths", ways, now))
        tokens = Control("", "", low=1, high=most, log=True, unit="tokens")
        if now == "fixed":
            found.append(replace(tokens, key=key, label=f"{words} length"))
        elif now == "lognormal":
            log = length.lognormal
            least = {"mean": log.median or 1, "p90": log.median or 1, "max": log.mean or log.median or 1}
            found += [
                replace(tokens, key=f"{key}.lognormal.{field}", label=f"{words} {field}", low=least.get(field, 1),
                        high=log.mean if field == "median" and log.mean else most)
                for field in ("median", "mean", "p90", "max")
                if getattr(log, field) is not None
            ]  # fmt: skip
        elif now == "mean and range":
            found.append(replace(tokens, key=f"{key}.mean", label=f"{words} mean"))
            found.append(Control(f"{key}.range_ratio", f"{words} range", low=0, high=1, whole=False))
    if isinstance(load.turns, int) and not load.prefixes:
        found.append(Control("workload.turns", "Turns of a session", low=1, high=20))
    if load.has_sessions:  # their prompts begin with what was said before
        return found
    prefix: list[Change] = [("workload.prefixes", {"count": 1, "tokens": 500})]
    ways = {"none": [("workload.prefixes", Remove)], "shared": prefix}
    found.append(Form("workload.prefixes.form", "Shared prefixes", ways, "shared" if load.prefixes else "none",
                      "system prompts that many prompts begin with"))  # fmt: skip
    if load.prefixes:
        found.append(Control("workload.prefixes.count", "Different prefixes", low=1, high=1000, log=True))
        if isinstance(load.prefixes.tokens, int):
            found.append(
                Control("workload.prefixes.tokens", "Prefix length", low=1, high=32_000, log=True, unit="tokens")
            )
    return found


def slo() -> list[Control | Form]:
    limits = (("p99_ttft_ms", "TTFT p99 at most", 20_000), ("p99_tpot_ms", "TPOT p99 at most", 500),
              ("p99_itl_ms", "ITL p99 at most", 2_000), ("p99_e2el_ms", "E2E p99 at most", 120_000))  # fmt: skip
    return [
        Control(f"slo.{key}", label, low=1, high=high, log=True, whole=False, unit="ms") for key, label, high in limits
    ]


def device(scenario: Scenario) -> list[Control | Form]:
    quote = price_of(scenario.hardware.name, Prices(kind=scenario.prices.kind))
    return [
        Control("model", "Model", "text", about="a name of the catalogue, or the path of a config.json"),
        Control(
            "hardware",
            "GPU",
            "choice",
            choices=tuple(dict.fromkeys([*names("hardware_profiles"), scenario.hardware.name])),
        ),
        Control("parallelism.tensor", "Tensor parallel", "choice", choices=POWERS, about="GPUs that share every layer"),
        Control("parallelism.pipeline", "Pipeline stages", "choice", choices=POWERS),
        Control("parallelism.attention_data", "Data-parallel attention", "choice", choices=POWERS),
        Control("parallelism.expert", "Expert parallel", "choice", choices=POWERS),
        Control("parallelism.context", "Context parallel", "choice", choices=POWERS,
                about="ranks that share the KV cache of one sequence"),
        Control("prices.kind", "Prices", "choice", choices=get_args(PriceKind), about="quotes of one kind"),
        Control(f"prices.usd_per_hour.{scenario.hardware.name}", "Own price", low=0.05, high=50, log=True, whole=False,
                unit="USD/h of a GPU", about=f"without: {quote.source}" if quote else "nobody quotes one"),
    ]  # fmt: skip


def cluster(scenario: Scenario) -> list[Control | Form]:
    cluster = scenario.cluster
    if cluster.kinds:
        return []
    pools: list[Change] = [
        ("cluster.replicas", Remove),
        ("cluster.router", Remove),
        ("cluster.prefill", {"replicas": 1}),
        ("cluster.decode", {"replicas": 1}),
        ("cluster.transfer", {"bandwidth": "50 GB/s"}),
    ]
    one: list[Change] = [(f"cluster.{name}", Remove) for name in ("prefill", "decode", "transfer")]
    ways = {"replicas behind a router": one, "prefill and decode pools": pools}
    now = "prefill and decode pools" if cluster.prefill else "replicas behind a router"
    found: list[Control | Form] = [Form("cluster.form", "Arrangement", ways, now)]
    if cluster.prefill:
        found += [
            Control(f"cluster.{pool}.replicas", f"{pool.capitalize()} replicas", low=1, high=16)
            for pool in ("prefill", "decode")
        ]
        found.append(
            Control("cluster.transfer.bandwidth", "Link between the pools", low=1, high=900, log=True, whole=False,
                    unit="GB/s", suffix="GB/s", factor=1e-9)
        )  # fmt: skip
        return found
    found.append(Control("cluster.replicas", "Replicas", low=1, high=32))
    if cluster.replicas > 1:
        found.append(Control("cluster.router.policy", "Router", "choice", choices=POLICIES))
        if cluster.router.policy not in ("round-robin", "random"):
            found.append(
                Control("cluster.router.signal_age", "Age of its signals", low=0, high=2000, unit="ms", suffix="ms",
                        factor=1e3)
            )  # fmt: skip
    return found


def precision() -> list[Control | Form]:
    return [
        Control("precision.weights", "Weights", "choice", choices=("auto", *FORMATS)),
        Control("precision.kv_cache", "KV cache", "choice", choices=("auto", *KV_FORMATS)),
    ]


ENGINE = {"max_num_seqs": (1, 4096), "max_num_batched_tokens": (256, 65_536), "max_model_len": (512, 262_144),
          "block_size": (1, 1024), "stream_interval": (1, 100)}  # fmt: skip
CHOICES = ("scheduling_policy", "preemption_mode", "prefix_cache")
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enforce_eager")


def engine_controls(engine: dict[str, Any]) -> list[Control | Form]:
    about = {knob.name: knob.about for knob in KNOBS}
    choices = {knob.name: tuple(map(str, knob.choices)) for knob in KNOBS if knob.choices}
    found: list[Control | Form] = [Control("engine.preset", "Preset", "choice", choices=tuple(names("engine_presets")))]
    found += [
        Control(f"engine.{name}", name, low=low, high=high, log=True, about=about[name])
        for name, (low, high) in ENGINE.items()
    ]
    name = "gpu_memory_utilization"
    found.append(Control(f"engine.{name}", name, low=0.5, high=1.0, whole=False, about=about[name]))
    found += [Control(f"engine.{name}", name, "switch", about=about[name]) for name in SWITCHES]
    found += [Control(f"engine.{name}", name, "choice", choices=choices[name], about=about[name]) for name in CHOICES]
    name = "kv_offloading_size"
    return [*found, Control(f"engine.{name}", name, low=0, high=1000, whole=False, unit="GB", suffix="GB", factor=1e-9,
                            about=about[name])]  # fmt: skip


def speculation(scenario: Scenario) -> list[Control | Form]:
    spec = scenario.speculation
    ways: dict[str, list[Change]] = {"off": [("speculation", Remove)]}
    for method in names("drafters"):
        how: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "acceptance": {"rate": 0.7}}
        how |= {"model": "Llama-3.2-1B"} if method == "draft_model" else {}
        how |= {"exit_layer": 8} if method == "self" else {}
        ways[method] = [("speculation", how)]
    now = spec.method if spec else "off"
    ways.setdefault(now, [])
    found: list[Control | Form] = [Form("speculation.form", "Method", ways, now)]
    if spec:
        found.append(Control("speculation.num_speculative_tokens", "Draft tokens", low=1, high=16))
        if spec.acceptance and spec.acceptance.rate is not None:
            found.append(Control("speculation.acceptance.rate", "Acceptance rate", low=0, high=1, whole=False))
        if spec.model is not None:
            found.append(Control("speculation.model", "Draft model", "text"))
    return found


def run() -> list[Control | Form]:
    return [
        Control("workload.num_requests", "Requests of the run", low=100, high=100_000, log=True),
        Control(
            "simulation.replications", "Replications", low=1, high=20, about="runs with other draws, for error bars"
        ),
        Control("simulation.seed", "Seed", low=0, high=100),
    ]
