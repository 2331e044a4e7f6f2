"""Plans: the search finds what exhaustive simulation finds, and its answers hold."""

import json
import random

import pytest
import yaml
from bounds import beaten, check
from fuzz.draw import write_traces
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.plan import load_plan, parallelisms
from infersim.config.prices import Prices, price_of, quotes
from infersim.config.resources import names
from infersim.config.scenario import build_scenario, load_scenario
from infersim.explain.cost import cost_of, num_gpus
from infersim.explain.summary import summarize
from infersim.metrics.latency import measure
from infersim.metrics.verdict import judge
from infersim.planning.bounds import Lengths, bounds_of
from infersim.planning.decide import decide, deployed, longer
from infersim.planning.search import plan, search
from infersim.run import run, run_until_decided

SMALL = {
    "model": "Llama-3.1-8B",
    "workload": {"request_rate": 20, "num_requests": 300, "input_tokens": 500, "output_tokens": {"uniform": [50, 150]}},
    "slo": {"p99_ttft_ms": 500, "p99_tpot_ms": 40},
    "max_gpus": 4,
    "prices": {"usd_per_hour": {"l4": 0.5, "l40s": 1.0, "a100-sxm-80gb": 1.9, "h100-sxm": 3.5}},
    "candidates": {
        "hardware": ["l4", "l40s", "a100-sxm-80gb", "h100-sxm"],
        "precision": [{"weights": "bf16"}, {"weights": "bf16", "kv_cache": "fp8"}],
    },
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    """Writes SMALL with changes to a file; returns its path."""

    def write(**changes):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(SMALL | changes))
        return path

    return write


@pytest.mark.parametrize("rate", [6, 20, 60])
def test_exhaustive_simulation_finds_the_same(small, rate):
    """Every candidate with every number of replicas, simulated: none that holds the SLO is cheaper than the answer."""
    path = small(workload=SMALL["workload"] | {"request_rate": rate})
    answer = plan(path)
    the_plan, candidates = load_plan(path)
    the_plan_prices = candidates[0].prices
    costs = []
    for candidate in candidates:
        for replicas in range(1, the_plan.max_gpus // candidate.parallelism.num_gpus + 1):
            try:
                decision = decide(candidate, replicas, rate)
            except InputError:
                continue
            if decision.met:
                costs.append(num_gpus(candidate) * replicas * price_of(candidate.hardware.name, the_plan_prices).middle)
    assert answer["feasible"] == bool(costs)
    assert answer["best"]["slo_met"]
    low, high = answer["best"]["cost"]["usd_per_hour"]
    assert (low + high) / 2 == pytest.approx(min(costs))
    assert answer["considered"] == len(candidates) == answer["simulated"] + answer["pruned"]
    assert answer["simulated"] < len(candidates)
    assert sum(answer["pruned_by"].values()) == answer["pruned"]


@pytest.mark.parametrize("hardware", ["l4", "h100-sxm"])
def test_bounds_are_below_what_is_simulated(small, hardware):
    """No run is faster than a floor or completes more than the bound, at any load."""
    scenario = next(s for s in load_plan(small())[1] if s.hardware.name == hardware and s.parallelism.num_gpus == 1)
    bounds = bounds_of(scenario, Lengths(scenario.workload, 0))
    for rate in (1, 50, 1000):
        metrics = measure(run(deployed(scenario, 1, rate, 0))[0])
        for key, floor in bounds.latency.items():
            assert metrics[key] >= floor, key
        assert metrics["request_throughput"] <= bounds.rate


@pytest.mark.parametrize(
    ("engine", "load"),
    [
        ({"num_gpu_blocks_override": 1100}, {"prefixes": {"tokens": 16_000}, "input_tokens": 16}),
        ({"num_gpu_blocks_override": 1100, "preset": "vllm-0"}, {"n": 8, "input_tokens": 16_000}),
        ({"num_gpu_blocks_override": 1100, "preset": "vllm-0"}, {"beam_width": 8, "input_tokens": 16_000}),
    ],
)
def test_shared_keys_do_not_break_the_bound(engine, load):
    """Several sequences read the same blocks, which memory holds once."""
    load |= {"output_tokens": 64, "num_requests": 10}
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": {"max_model_len": 17_000} | engine}
    scenario = build_scenario(parts | {"workload": load}, "test")
    bounds = bounds_of(scenario, Lengths(scenario.workload, 0))
    assert summarize(run(scenario))["metrics"]["request_throughput"] <= bounds.rate


FEATURES = [
    {},
    {"speculation": {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"conditional": [0.9, 0.9, 0.9]}}},
    {"early_exit": {"exit_layers": [8], "shares": [1.0]}},
    {"engine": {"jump_forward_share": 0.7}},
    {"parallelism": {"pipeline": 2}},
    {"model": "gpt-oss-20b"},
    {"workload": {"prefixes": {"count": 1, "tokens": 4000}}},
    {"workload": {"turns": 5, "think_time": 2.0}},
    {"workload": {"output_tokens": {"uniform": [1, 2]}, "input_tokens": {"uniform": [10, 8000]}}},
    {"simulation": {"warmup": 0.5}},
]


@pytest.mark.parametrize("seed", range(3 * len(FEATURES)))
def test_no_feature_beats_a_bound(seed):
    """Whatever shares, saves or skips work: what a run reaches is never thrown out before it is simulated."""
    draw = random.Random(seed)
    workload = {
        "request_rate": draw.choice([0.5, 2, 50]),
        "num_requests": 60,
        "input_tokens": draw.choice([50, 2000, {"uniform": [10, 4000]}]),
        "output_tokens": draw.choice([2, 100, {"uniform": [1, 200]}]),
    }
    feature = FEATURES[seed % len(FEATURES)]
    limits = [f"{s}_{m}_ms" for s in ("mean", "p50", "p95", "p99") for m in ("ttft", "tpot", "e2el", "itl")]
    keys = {"model": "Llama-3.1-8B", "hardware": draw.choice(["h100-sxm", "l40s"]), "slo": dict.fromkeys(limits, 1e6)}
    keys |= feature | {"workload": workload | feature.get("workload", {})}
    scenario = build_scenario(keys, "test")
    bounds = bounds_of(scenario, Lengths(scenario.workload, scenario.simulation.seed))
    metrics = measure(run(scenario)[0])
    reached = {key: metrics[key.replace("p50", "median")] for key in bounds.latency}
    assert bounds.violated({key: value for key, value in reached.items() if value is not None}) == []
    assert feature or len(bounds.latency) == len(limits)
    assert metrics["request_throughput"] <= bounds.rate


def test_nothing_can_names_the_floor(small):
    """A limit below physics is answered without a simulation, with the floor that forbids it."""
    answer = plan(small(slo={"p99_ttft_ms": 1}))
    assert not answer["feasible"]
    assert answer["best"] is None
    assert answer["simulated"] == 0
    assert "p99_ttft_ms cannot be below" in answer["binding"]["text"]


def test_nothing_can_by_simulation(small):
    """A limit that floors allow and no engine holds is answered with the nearest miss."""
    answer = plan(small(slo={"p99_ttft_ms": 20}, max_gpus=1))
    assert not answer["feasible"]
    assert answer["simulated"] > 0
    assert "p99_ttft_ms" in answer["binding"]["text"]


def test_largest_rate_is_the_edge(small):
    """At the largest rate the SLO holds; at 10 % more it does not."""
    path = small()
    answer = plan(path)["best"]
    scenario = _scenario_of(answer, path)
    replicas = answer["deployment"]["replicas"]
    assert decide(scenario, replicas, answer["largest_rate"]).met
    assert not decide(scenario, replicas, 1.1 * answer["largest_rate"]).met
    assert answer["headroom"] == pytest.approx(answer["largest_rate"] / 20 - 1)


def test_a_plan_is_confirmed_by_runs_that_are_long_enough(small):
    """Twelve requests say nothing of a rate: so many are simulated as do, and the answer is that of a long run."""
    best = plan(small(workload=SMALL["workload"] | {"num_requests": 12}))["best"]
    assert best["scenario"]["workload"]["num_requests"] > 100
    assert best["deployment"] == plan(small())["best"]["deployment"]
    (result, *_) = run(build_scenario(best["scenario"], "best"))
    assert judge(result).state == "stable"


def test_goodput_objective_is_a_largest_rate(small):
    """The most that max_gpus carries is more than the cheapest deployment for less does, and holds."""
    most = plan(small(objective="goodput", candidates={"hardware": ["l40s", "h100-sxm"]}))
    assert most["feasible"]
    assert most["best"]["deployment"]["gpus"] == 4
    assert most["best"]["deployment"]["hardware"] == "h100-sxm"
    assert most["best"]["rate"] > plan(small())["best"]["largest_rate"]


def test_objectives_count_different_things(small):
    """Fewest GPUs is never more GPUs than cheapest."""
    cheapest, fewest = plan(small()), plan(small(objective="gpus"))
    assert fewest["best"]["cost"]["gpus"] <= cheapest["best"]["cost"]["gpus"]
    assert fewest["best"]["cost"]["usd_per_hour"][1] >= cheapest["best"]["cost"]["usd_per_hour"][1]
    energy = plan(small(objective="energy"))
    assert (
        energy["best"]["cost"]["joules_per_output_token"][1] <= cheapest["best"]["cost"]["joules_per_output_token"][1]
    )


def test_share_of_good_requests(small):
    """min_goodput_share is a limit like the others."""
    answer = plan(small(slo={"goodput": {"ttft_ms": 300, "tpot_ms": 40}}, min_goodput_share=0.95))
    assert answer["feasible"]
    assert answer["best"]["limits"][0]["name"] == "bad_share"
    metrics = answer["best"]["metrics"]
    assert metrics["request_goodput"] >= 0.95 * metrics["request_throughput"]


@pytest.mark.slow
def test_the_example_plan_holds_with_other_seeds():
    """scenarios/plan-llama-70b.yaml: of 20 runs with other seeds at least 19 hold the SLO."""
    answer = plan("plan-llama-70b")
    best = answer["best"]
    assert best["slo_met"]
    assert all(limit["upper"] <= limit["limit"] for limit in best["limits"])
    scenario = _scenario_of(best, "plan-llama-70b")
    held = 0
    for seed in range(1000, 1020):
        result = run_until_decided(deployed(scenario, best["deployment"]["replicas"], best["rate"], seed))[0]
        metrics = measure(result)
        within = all(metrics[name] <= limit for name, limit in scenario.slo.limits.items())
        held += within and judge(result).state == "stable"
    assert held >= 19
    keys = {"feasible", "best", "runner_up", "binding", "considered", "simulated", "pruned"}
    assert keys <= answer.keys()
    assert {"deployment", "rate", "cost", "metrics", "slo_met"} <= best.keys()


def _scenario_of(answer, path):
    wanted = answer["deployment"]
    return next(
        s for s in load_plan(path)[1]
        if s.hardware.name == wanted["hardware"]
        and s.parallelism.model_dump(mode="json") == wanted["parallelism"]
        and s.precision.model_dump(mode="json") == wanted["precision"]
        and s.engine.preset == wanted["engine"]["preset"]
    )  # fmt: skip


def test_parallelisms_are_all_of_them():
    """Powers of two whose product is at most max_gpus, each once."""
    found = [tuple(p.values()) for p in parallelisms(16)]
    assert len(found) == len(set(found)) == 35
    assert parallelisms(1) == [{"tensor": 1, "pipeline": 1, "attention_data": 1}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": {}}, None),
        ({"candidates": {"hardware": []}}, "candidates.hardware: must have 1 at least"),
        ({"candidates": {"hardware": ["h100"]}}, "no such hardware profile"),
        ({"candidates": {"hardware": ["h100-sxm"], "engine.presett": ["x"]}}, "did you mean preset"),
        ({"objective": "money"}, "objective: must be one of"),
        ({"slo": {}}, "slo: must have at least one limit"),
        ({"workload": {"input_tokens": 1, "output_tokens": 1}}, "workload.request_rate: must be a finite rate"),
        ({"max_gpus": 0}, "max_gpus: must be a whole number"),
        ({"max_gpus": 1e9}, "max_gpus: must be"),
        ({"candidates": {"hardware": [1, {"a": "b"}]}}, "hardware"),
        ({"candidates": ["h100-sxm"]}, "candidates.0: must be a mapping"),
        ({"candidates": []}, "candidates: must have 1 at least"),
        ({"candidates": [{"hardware": "h100-sxm", "engine.presett": "x"}]}, "did you mean preset"),
        ({"prices": {"usd_per_hour": {"h100": 1}}}, "prices.usd_per_hour.h100: is no device; did you mean h100-nvl"),
        ({"prices": {"kind": "rent"}}, "prices.kind: must be one of"),
        ({"cluster": {"autoscaler": {"target": 4, "max": 2}}}, "cluster.autoscaler: a plan looks for"),
        ({"objective": "users"}, "must have users or request_rate"),
        ({"hardware": "l4"}, "hardware: is among the candidates too; must be given once"),
        ({"engine": {"block_size": 16}, "candidates": {"engine.block_size": [8]}}, "engine.block_size: is among the"),
        ({"candidates": {"hardware": ["h100-sxm"], "a.b.c": [1]}}, "a: unknown key"),
    ],
)
def test_wrong_plans(small, changes, message):
    """One line that says where and what."""
    outcome = CliRunner().invoke(app, ["plan", str(small(**changes))])
    assert outcome.exit_code == 2
    assert message is None or message in outcome.output
    assert "Traceback" not in outcome.output


def test_command_line(small):
    """The answer on the terminal and as JSON; exit code 1 if nothing can; a plan is no scenario."""
    shown = CliRunner().invoke(app, ["plan", str(small())])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("answer     Llama-3.1-8B on ")
    document = json.loads(CliRunner().invoke(app, ["plan", str(small()), "--json"]).stdout)
    assert document["best"]["slo_met"]
    assert CliRunner().invoke(app, ["plan", str(small()), "--set", "slo.p99_ttft_ms=1"]).exit_code == 1
    wrong = CliRunner().invoke(app, ["run", str(small())])
    assert wrong.exit_code == 2
    assert "must be given to infersim plan" in wrong.output


def test_a_single_candidate_is_the_scenario(small):
    """With nothing to choose, the decision is about the very scenario that `run` runs."""
    path = small(candidates={"hardware": ["h100-sxm"], "parallelism": [{"tensor": 1}]})
    the_plan, (scenario,) = load_plan(path)
    answer = search(the_plan, [scenario])
    data = {key: value for key, value in SMALL.items() if key not in ("candidates", "max_gpus")}
    other = path.with_name("scenario.yaml")
    other.write_text(yaml.safe_dump(data | {"hardware": "h100-sxm"}))
    best = answer["best"]
    again = build_scenario(best["scenario"], "best")
    requests = best["scenario"]["workload"]["num_requests"]
    assert again == longer(deployed(scenario, 1, 20, 0, best["replications"]), requests)
    assert summarize(run(again))["metrics"] == pytest.approx(best["metrics"], rel=1e-12)
    settings = [f"workload.num_requests={requests}"]
    runs = [measure(run(load_scenario(other, [*settings, f"simulation.seed={seed}"]))[0]) for seed in range(4)]
    assert answer["best"]["metrics"]["p99_ttft_ms"] == pytest.approx(sum(r["p99_ttft_ms"] for r in runs) / 4)


@pytest.mark.parametrize("settings", [[], ["parallelism.tensor=2"], ["cluster.replicas=3"]])
def test_prices_apart_pay_the_hour(settings):
    """Prompt and output tokens at their own prices add up to the hourly cost; busy time is divided, not invented."""
    result = run(load_scenario("llama-8b-h100", ["workload.num_requests=300", *settings]))[0]
    metrics = measure(result)
    cost = cost_of(result, metrics)
    apart = cost["usd_per_million_apart"]
    prompts = metrics["total_token_throughput"] - metrics["output_throughput"]
    for i, hourly in enumerate(cost["usd_per_hour"]):
        per_second = (prompts * apart["prompt"][i] + metrics["output_throughput"] * apart["output"][i]) / 1e6
        assert per_second * 3600 == pytest.approx(hourly)
    assert apart["cached_prompt"] is None
    assert 0 < apart["prompt"][0] < apart["output"][0]


@pytest.mark.slow
def test_pools_are_candidates_like_others(small):
    """A cluster of prefill and decode replicas is taken as it is, priced in full, and never multiplied."""
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}, "transfer": {"bandwidth": "50 GB/s"}}
    short = SMALL["workload"] | {"num_requests": 60}
    alone = {"hardware": ["h100-sxm"], "parallelism": [{"tensor": 1}], "cluster": [pools]}
    answer = plan(small(candidates=alone, workload=short))
    assert answer["best"]["deployment"]["gpus"] == 3
    assert answer["best"]["cost"]["usd_per_hour"] == pytest.approx([3 * 3.5, 3 * 3.5])
    both = plan(small(candidates=alone | {"cluster": [{"replicas": 1}, pools]}, workload=short))
    assert both["best"]["deployment"]["gpus"] == 1
    assert both["considered"] == 2
    assert plan(small(candidates=alone, max_gpus=2))["pruned_by"] == {"more GPUs than max_gpus": 1}


def test_every_device_is_priced_or_said_not_to_be():
    """Each profile is in the file of prices; an on-demand price, if there is one, is the first such quote's."""
    assert set(quotes()) == set(names("hardware_profiles"))
    for device, quoted in quotes().items():
        first = [quote for quote in quoted if quote.kind == "on-demand"][:1]
        price = price_of(device, Prices())
        assert [(price.low, price.high)] == [quote.usd for quote in first] if price else not first
        assert all(quote.usd[0] <= quote.usd[1] for quote in quoted)
    assert price_of("l40s", Prices(usd_per_hour={"l40s": 1.5})).middle == 1.5


def test_kinds_of_prices_are_not_mixed(small):
    """L40S has a spot quote only: on demand it is left out by name, rather than compared with an H100's."""
    alone = {"hardware": ["l40s", "h100-sxm"], "parallelism": [{"tensor": 1}]}
    path = small(candidates=alone, prices={})
    answer = plan(path)
    assert answer["best"]["deployment"]["hardware"] == "h100-sxm"
    assert "no on-demand quote for l40s" in answer["prices"]["missing"]
    assert "l40s has spot" in answer["prices"]["missing"]
    assert answer["prices"]["of"]["h100-sxm"]["usd"] == [1.99, 5.0]
    assert answer["best"]["cost"]["price_sources"] == [answer["prices"]["of"]["h100-sxm"]["source"]]
    none = CliRunner().invoke(app, ["plan", str(small(candidates=alone | {"hardware": ["l40s"]}, prices={}))])
    assert none.exit_code == 1
    assert "no candidate has a price" in none.output
    own = CliRunner().invoke(app, ["plan", str(path), "--price", "l40s=0.9", "--json"])
    assert json.loads(own.stdout)["best"]["cost"]["price_sources"] == ["your own"]
    spot = CliRunner().invoke(app, ["plan", str(path), "--price-kind", "spot", "--json"])
    assert json.loads(spot.stdout)["best"]["deployment"]["hardware"] == "l40s"


def test_candidates_as_a_list(small):
    """Each is taken as it is written: its parallelism is not searched, and its number of replicas is honoured."""
    listed = [{"hardware": "h100-sxm"}, {"hardware": "l40s", "cluster.replicas": 3, "engine": {"max_num_seqs": 64}}]
    answer = plan(small(candidates=listed))
    assert answer["considered"] == 2
    assert {(d["deployment"]["hardware"], d["deployment"]["replicas"]) for d in answer["deployments"]} == {
        ("h100-sxm", 1),
        ("l40s", 3),
    }
    two = plan(small(candidates={"hardware": ["h100-sxm"], "parallelism": [{}], "cluster.replicas": [2, 3]}))
    assert two["best"]["deployment"]["replicas"] == 2


def test_pools_and_routers_are_searched(small):
    """Ratios of prefill to decode replicas, the pools' own parallelism, and routers: a candidate each."""
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "transfer": {"bandwidth": "50 GB/s"}}
    axes = {"parallelism": [{}], "cluster.prefill.replicas": [1, 2], "cluster.decode.parallelism": [{}, {"tensor": 2}]}
    axes["cluster.decode.router.policy"] = ["round-robin", "least-kv"]
    _, scenarios = load_plan(small(cluster={"transfer": pools["transfer"]}, candidates=axes, hardware="h100-sxm"))
    clusters = [s.cluster for s in scenarios]
    assert len({c.model_dump_json() for c in clusters}) == len(clusters) == 8
    assert {num_gpus(s) for s in scenarios} == {2, 3, 4}


def test_the_runner_up_is_another_deployment(small):
    """Not another engine setting, nor another replica, of the best."""
    axes = {"hardware": ["l40s", "a100-sxm-80gb", "h100-sxm"], "engine.max_num_seqs": [128, 256]}
    answer = plan(small(candidates=axes | {"parallelism": [{}]}))
    kinds = [row["deployment"]["hardware"] for row in answer["deployments"]]
    assert len(kinds) == len(set(kinds)) == 3
    best, other = answer["best"], answer["runner_up"]
    assert best["deployment"]["hardware"] != other["deployment"]["hardware"]
    cheap, dear = (sum(one["cost"]["usd_per_hour"]) for one in (best, other))
    device, gpus = other["deployment"]["hardware"], other["deployment"]["gpus"]
    price = answer["to_win"]["usd_per_hour"]
    assert price * gpus * 2 == pytest.approx(cheap)
    changed = SMALL["prices"]["usd_per_hour"] | {device: 0.99 * price}
    again = plan(small(candidates=axes | {"parallelism": [{}]}, prices={"usd_per_hour": changed}))
    assert dear > cheap
    assert again["best"]["deployment"]["hardware"] == device
    assert all(row["holds"] or row["misses"] for row in answer["deployments"])
    assert {row["provenance"] for row in best["efficiencies"]} >= {"calibrated", "assumed"}


def test_a_power_budget(small):
    """No more GPUs than may be drawn for at their limit; a device without one cannot be in it."""
    alone = {"hardware": ["h100-sxm"], "parallelism": [{}]}
    busy = SMALL["workload"] | {"request_rate": 150}
    assert plan(small(candidates=alone, workload=busy))["best"]["deployment"]["gpus"] > 1
    capped = plan(small(candidates=alone, workload=busy, max_power="1 kW"))
    assert not capped["feasible"]
    assert "kW" in capped["binding"]["text"] or "cannot serve" in capped["binding"]["text"]
    assert plan(small(candidates=alone, max_power="0.6 kW"))["pruned_by"] == {"more power than max_power": 1}


def test_most_users(small):
    """Objective users: a fixed deployment holds the SLO with that many users at once, and not with many more."""
    load = {key: value for key, value in SMALL["workload"].items() if key != "request_rate"} | {"think_time": 2}
    alone = {"hardware": ["h100-sxm"], "parallelism": [{}]}
    the_plan, (scenario,) = load_plan(small(candidates=alone, workload=load, objective="users", max_gpus=1))
    answer = search(the_plan, [scenario])
    users = answer["best"]["rate"]
    assert users == int(users) > 16
    assert decide(scenario, 1, users).met
    assert not decide(scenario, 1, round(1.1 * users)).met
    assert answer["best"]["scenario"]["workload"]["users"] == users


MORE_FEATURES = [
    *FEATURES,
    {"parallelism": {"tensor": 2}},
    {"parallelism": {"attention_data": 2}},
    {"model": "Qwen3-30B-A3B"},
    {"model": "Gemma-3-27B"},
    {"precision": {"weights": "fp8", "kv_cache": "fp8"}},
    {"precision": {"weights": "int4"}},
    {"cluster": {"replicas": 3}},
    {"cluster": {"prefill": {}, "decode": {"replicas": 2}, "transfer": {"bandwidth": "50 GB/s"}}},
    {"workload": {"n": 4}},
    {"workload": {"burstiness": 0.3}},
    {"workload": {"timeout": 3, "retries": 1}},
    {"workload": {"prefixes": {"count": 3, "tokens": {"uniform": [100, 3000]}}}, "engine": {"preset": "sglang-0.5"}},
    {"engine": {"preset": "orca"}},
    {"engine": {"preset": "static"}},
    {"engine": {"max_num_seqs": 4, "num_gpu_blocks_override": 900, "max_model_len": 13_000}},
    {"engine": {"max_num_batched_tokens": 512}},
    {"engine": {"stream_interval": 50, "stream_first_token": False}},
    {"engine": {"host_token_time": "5 ms", "host_request_time": "5 ms"}},
]


def _merged(*parts):
    found = {}
    for part in parts:
        for key, value in part.items():
            found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_no_mixture_of_features_beats_a_bound(seed):
    """One to three features at once, at a load from light to far too much."""
    draw = random.Random(f"mixture {seed}")
    limits = [f"{s}_{m}_ms" for s in ("mean", "p50", "p95", "p99") for m in ("ttft", "tpot", "e2el", "itl")]
    load = {
        "request_rate": draw.choice([0.5, 2, 10, 50]),
        "num_requests": draw.choice([20, 60, 150]),
        "input_tokens": draw.choice([50, 2000, {"uniform": [10, 4000]}, {"lognormal": {"median": 500, "p90": 3000}}]),
        "output_tokens": draw.choice([1, 2, 100, {"uniform": [1, 200]}]),
    }
    keys = {"model": "Llama-3.1-8B", "hardware": draw.choice(["h100-sxm", "l40s", "mi300x"])}
    keys |= {"workload": load, "slo": dict.fromkeys(limits, 1e6)}
    keys = _merged(keys, *draw.sample(MORE_FEATURES, draw.choice([1, 2, 3])))
    try:
        assert beaten(build_scenario(keys, "test")) == []
    except InputError:
        pytest.skip("these do not go together")


def test_a_trace_too_short_to_tell_confirms_nothing(tmp_path):
    """It cannot be lengthened: the answer is that nothing is known to hold, and it comes."""
    rows = "".join(f"{0.2 * i},500,100\n" for i in range(60))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    load = {"trace": str(tmp_path / "t.csv"), "request_rate": 2}
    keys = {"model": "Llama-3.1-8B", "max_gpus": 1, "candidates": {"hardware": ["h100-sxm"], "parallelism": [{}]}}
    answer = plan(keys | {"workload": load, "slo": {"p99_ttft_ms": 2000}})
    assert not answer["feasible"]
    assert "too short to tell" in answer["binding"]["text"]


@pytest.mark.slow
def test_no_scenario_over_the_schema_beats_a_bound(tmp_path):
    """Three hundred of those of tests/bounds.py, and one that did: short prompts share the tiles of experts."""
    found = [check(number, write_traces(tmp_path)) for number in (*range(300), 9391)]
    assert [beat for _, beat in found if beat] == []
    assert sum(kind == "bounded" for kind, _ in found) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_brute_force_finds_the_same_winner(small, seed):
    """Random small grids: no candidate with any number of replicas that holds the SLO costs less than the answer."""
    draw = random.Random(f"grid {seed}")
    devices = draw.sample(["l4", "l40s", "a100-sxm-80gb", "h100-sxm", "mi300x"], 3)
    prices = {device: round(draw.uniform(0.3, 4), 2) for device in devices}
    axes = {
        "hardware": devices,
        "parallelism": draw.sample([{}, {"tensor": 2}, {"pipeline": 2}, {"attention_data": 2}], 2),
        draw.choice(["engine.max_num_seqs", "engine.max_num_batched_tokens"]): draw.sample([128, 256, 1024], 2),
    }
    load = {"input_tokens": draw.choice([100, 500, 2000]), "output_tokens": {"uniform": [20, draw.choice([60, 200])]}}
    load |= {"request_rate": draw.choice([2, 5, 15]), "num_requests": 300}
    slo = {"p99_ttft_ms": draw.choice([300, 1000, 5000]), "p99_tpot_ms": draw.choice([20, 40, 100])}
    path = small(candidates=axes, workload=load, slo=slo, max_gpus=3, prices={"usd_per_hour": prices})
    answer = plan(path)
    the_plan, candidates = load_plan(path)
    costs = []
    for candidate in candidates:
        each = num_gpus(candidate)
        for replicas in range(1, the_plan.max_gpus // each + 1):
            cost = replicas * each * prices[candidate.hardware.name]
            if not costs or cost < min(costs):  # dearer ones cannot win
                try:
                    costs += [cost] if decide(candidate, replicas, load["request_rate"]).met else []
                except InputError:
                    break
    assert answer["feasible"] == bool(costs)
    if costs:
        assert sum(answer["best"]["cost"]["usd_per_hour"]) / 2 == pytest.approx(min(costs))


def test_a_kind_of_its_own_is_planned_as_what_it_is(tmp_path):
    """One kind with a device and an engine of its own, or both above it: one deployment, one answer."""
    own = {"hardware": "h200-sxm", "engine": {"max_num_seqs": 64}}
    load = {"request_rate": 20, "num_requests": 200, "input_tokens": 300, "output_tokens": 50}
    base = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": load, "slo": {"p99_ttft_ms": 2000}}
    answers = []
    for name, more in (("above", own), ("own", {"cluster": {"kinds": [own]}})):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(base | more | {"candidates": {"precision": [{}]}, "max_gpus": 2}))
        answers.append(search(*load_plan(path)))
    above, alone = (answer["best"]["deployment"] for answer in answers)
    assert alone == above
    assert alone["hardware"] == "h200-sxm"
    assert answers[0]["best"]["metrics"] == answers[1]["best"]["metrics"]


def test_what_a_plan_misses_has_no_powers_of_ten(tmp_path):
    """Far above a limit too."""
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({
        "model": "Llama-3.1-8B", "max_gpus": 1, "slo": {"p99_ttft_ms": 1000}, "objective": "gpus",
        "workload": {"request_rate": 60, "num_requests": 1000, "input_tokens": 500, "output_tokens": 150},
        "candidates": {"hardware": ["h100-sxm"]},
    }))  # fmt: skip
    said = CliRunner().invoke(app, ["plan", str(path)]).stdout
    assert "nothing can" in said
    assert "e+" not in said
