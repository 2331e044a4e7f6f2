"""Attribution of differences: exact, symmetric, and what re-simulation finds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.scenario import Scenario, load_scenario
from infersim.deployment import deployment_of
from infersim.engine.compiled.state import RESOURCES
from infersim.engine.fleet import Fleet
from infersim.engine.replica import ReplicaSpec
from infersim.explain.attribution import (
    divide_product,
    divide_sum,
    latency_terms,
    log_mean,
    phase_of,
    ratio_factors,
    row_of,
    throughput_terms,
    total,
)
from infersim.explain.change import by_row
from infersim.explain.techniques import FEWER_BYTES, FEWER_STEPS, TECHNIQUES, TILED, label, technique_of
from infersim.metrics.latency import measure
from infersim.planning.compare import compare, load_compared
from infersim.report.compare import print_comparison
from infersim.run import run
from infersim.workload.build import build_requests

POSITIVE = st.floats(1e-6, 1e6)
FACTORS = st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=5)


@given(POSITIVE, POSITIVE)
def test_log_mean_lies_between_the_means(x, y):
    """sqrt(x y) <= L(x, y) <= (x + y) / 2, and L(x, y) = L(y, x)."""
    mean = log_mean(x, y)
    assert math.sqrt(x * y) * (1 - 1e-9) <= mean <= (x + y) / 2 * (1 + 1e-9)
    assert mean == pytest.approx(log_mean(y, x), rel=1e-9)


@given(FACTORS)
def test_a_product_is_divided_without_a_rest(pairs):
    """The parts add up to the difference; exchanging the two changes every sign; each part has its factor's sign."""
    a = {f"f{i}": x for i, (x, _) in enumerate(pairs)}
    b = {f"f{i}": y for i, (_, y) in enumerate(pairs)}
    parts, back = divide_product(a, b), divide_product(b, a)
    scale = math.prod(a.values()) + math.prod(b.values())
    assert math.fsum(parts.values()) == pytest.approx(math.prod(b.values()) - math.prod(a.values()), abs=1e-8 * scale)
    for name, part in parts.items():
        assert back[name] == pytest.approx(-part, rel=1e-6, abs=1e-12 * scale)
        if len(a) > 1 and abs(b[name] / a[name] - 1) > 1e-9:
            assert math.copysign(1, part) == math.copysign(1, b[name] - a[name])


def test_a_product_that_begins_at_zero():
    """What was not there before is the difference of the factor that was zero."""
    assert divide_product({"steps": 10, "seconds": 0}, {"steps": 20, "seconds": 0.5}) == {"steps": 0, "seconds": 10}


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=6))
def test_a_ratio_is_the_product_of_its_factors(pairs):
    """No rest, whatever the order of the two."""
    a = {f"t{i}": {"seconds": x} for i, (x, _) in enumerate(pairs)}
    b = {f"t{i}": {"seconds": y} for i, (_, y) in enumerate(pairs)}
    factors, back = ratio_factors(a, b), ratio_factors(b, a)
    assert math.prod(factors.values()) == pytest.approx(total(b) / total(a), rel=1e-9)
    assert all(back[name] == pytest.approx(1 / factor, rel=1e-9) for name, factor in factors.items())


CLOSED = ["workload.num_requests=600", "workload.request_rate=inf", "workload.max_concurrency=24"]
OPEN = ["workload.num_requests=600", "workload.request_rate=1"]
BASES = {
    "8b": ("llama-8b-h100", CLOSED),
    "70b": ("llama-70b-4xh100", CLOSED),
    "8b open": ("llama-8b-h100", OPEN),
}
CHANGES = [
    "parallelism.tensor=8",
    "precision.kv_cache=fp8",
    "precision.weights=fp8",
    "precision.weights=int4",
    "parallelism.pipeline=2",
    "speculation={method: eagle3, num_speculative_tokens: 3, acceptance: {rate: 0.7}}",
    "hardware.flops.bf16=5e14",
    "hardware=h200-sxm",
    "hardware=h100-pcie",
    "hardware=b200-sxm",
    "hardware.memory_bandwidth=5e12",
    "hardware.link.bandwidth=1e11",
    "workload.input_tokens=2000",
    "workload.output_tokens=400",
]
PAIRS = [(base, change) for base in BASES for change in CHANGES]


@pytest.fixture(scope="module")
def simulated():
    """(base, change or none) -> the scenario and its result, each simulated once."""
    cache = {}

    def get(base, change=None):
        if (base, change) not in cache:
            name, settings = TECHNIQUE_BASES[base]
            scenario = load_scenario(name, [*settings, *([change] if change else [])])
            cache[base, change] = run(scenario)[0]
        return cache[base, change]

    return get


@pytest.mark.parametrize(("base", "change"), PAIRS)
def test_terms_add_up_to_the_metrics(simulated, base, change):
    """Latency terms sum to mean e2el, clock terms to 1 / throughput; parts of a difference to the difference."""
    a, b = simulated(base), simulated(base, change)
    for result in (a, b):
        metrics = measure(result)
        assert total(latency_terms(result)) * 1e3 == pytest.approx(metrics["mean_e2el_ms"], rel=1e-9)
        assert 1 / total(throughput_terms(result)) == pytest.approx(metrics["output_throughput"], rel=1e-9)
    x, y = latency_terms(a), latency_terms(b)
    parts = divide_sum(x, y)
    whole = math.fsum(part for factors in parts.values() for part in factors.values())
    assert whole == pytest.approx(total(y) - total(x), abs=1e-9 * total(x))


THRASHING = {
    "engine.max_model_len=512": ["engine.num_gpu_blocks_override=40", "engine.max_num_seqs=64"],
    "engine.preset=sglang-0.5": ["engine.max_model_len=512", "engine.num_gpu_blocks_override=700"],
    "engine.preset=static": ["engine.max_model_len=512", "engine.block_size=1", "engine.num_gpu_blocks_override=515",
                             "engine.reserve=first-chunk", "workload.timeout=1", "workload.retries=2"],
    "cluster.transfer.bandwidth=1e11": ["engine.max_model_len=512", "engine.num_gpu_blocks_override=33",
                                        "engine.max_num_seqs=1", "engine.enable_prefix_caching=false",
                                        "cluster.prefill.replicas=2", "cluster.decode.replicas=1"],
}  # fmt: skip


@pytest.mark.parametrize("first", THRASHING)
def test_no_row_is_below_zero_however_often_requests_are_preempted(first):
    """What a preempted request waits is no decoding, and if it had no token yet no waiting between tokens either."""
    load = ["workload.num_requests=300", "workload.request_rate=100", "workload.input_tokens={uniform: [1, 300]}"]
    load += ["workload.output_tokens={uniform: [1, 170]}"]
    result = run(load_scenario("llama-8b-h100", [*load, first, *THRASHING[first]]))[0]
    terms = latency_terms(result)
    assert total(terms) * 1e3 == pytest.approx(measure(result)["mean_e2el_ms"], rel=1e-9)
    rows = {}
    for name, factors in terms.items():
        rows[row_of(name)] = rows.get(row_of(name), 0.0) + math.prod(factors.values())
    assert all(seconds >= 0 for seconds in rows.values()), rows


# in a pipeline a batch is cut in two that wait for each other: no price of one resource brings that about
# and speculation is fewer steps, which no price of one step brings about
ONE_PRICE = [(base, change) for base, change in PAIRS if not change.startswith(("parallelism.pipeline", "speculation"))]


@pytest.mark.parametrize(("base", "change"), ONE_PRICE)
def test_terms_are_what_re_simulation_finds(simulated, base, change):
    """With only one resource's prices from the other deployment, mean e2el moves the way its row says, and by at most
    twice as much."""
    a, b = simulated(base), simulated(base, change)
    parts = by_row(divide_sum(latency_terms(a), latency_terms(b)))
    before = measure(a)["mean_e2el_ms"] / 1e3
    if change.startswith("workload"):  # the pair is its own re-simulation
        assert math.fsum(parts.values()) == pytest.approx(measure(b)["mean_e2el_ms"] / 1e3 - before, rel=1e-6)
        return
    one, other = deployment_of(a.scenario).step_cost(), deployment_of(b.scenario).step_cost()
    for resource in ("weights", "kv", "activations", "compute", "collectives", "launch"):
        found = _mean_e2el(a, _with_price_of(one, other, resource)) - before
        if abs(parts[resource]) > 0.02 * before:
            assert math.copysign(1, found) == math.copysign(1, parts[resource]), resource
            assert abs(parts[resource]) >= 0.5 * abs(found), resource


# What each technique works through: rows or phases of the division
RETURNS = ["workload.num_requests=200", "workload.request_rate=0.15", "workload.turns=4", "workload.think_time=60",
           "workload.input_tokens=3000", "engine.max_model_len=32768",
           "engine.num_gpu_blocks_override=4000"]  # fmt: skip
TECHNIQUE_BASES = {
    **BASES,
    "alone": ("llama-8b-h100", ["workload.num_requests=50", "workload.request_rate=inf", "workload.max_concurrency=1"]),
    "few": ("llama-8b-h100", ["workload.num_requests=300", "workload.request_rate=inf", "workload.max_concurrency=4"]),
    "busy": ("llama-8b-h100", ["workload.num_requests=1500", "workload.request_rate=18"]),
    "tight": ("llama-8b-h100", ["workload.num_requests=600", "workload.request_rate=12", "engine.max_model_len=16384",
                                "engine.num_gpu_blocks_override=2000"]),
    "long": ("llama-8b-h100", ["workload.num_requests=300", "workload.request_rate=4", "workload.input_tokens=4000",
                               "engine.max_model_len=16384", "engine.num_gpu_blocks_override=1500",
                               "engine.max_num_batched_tokens=2048"]),
    "chunks": ("llama-8b-h100", ["workload.num_requests=600", "workload.request_rate=18", "workload.input_tokens=1500",
                                 "engine.max_num_batched_tokens=2048", "engine.max_model_len=2048"]),
    "chats": ("llama-8b-h100", ["workload.num_requests=600", "workload.request_rate=4", "workload.turns=4",
                                "workload.think_time=2"]),
    "returns": ("llama-8b-h100", RETURNS),
    "disk": ("llama-8b-h100", [*RETURNS, "engine.kv_offloading_size=2GiB", "engine.kv_offloading_disk_size=1TB",
                               "engine.kv_offloading_disk_bandwidth=7GB/s"]),
    "sglang": ("llama-8b-h100", ["workload.num_requests=1500", "workload.request_rate=18",
                                 "engine.preset=sglang-0.5"]),
    "streams": ("llama-8b-h100", [*CLOSED, "workload.max_concurrency=64", "engine.host_token_time=400us"]),
    "pieces": ("llama-8b-h100", ["workload.num_requests=600", "workload.request_rate=12", "engine.preset=orca",
                                 "engine.reserve=output-length",
                                 "engine.max_model_len=4096", "engine.num_gpu_blocks_override=40000"]),
    "paged": ("llama-8b-h100", ["workload.num_requests=600", "workload.request_rate=12", "engine.preset=vllm-0",
                                "engine.max_model_len=4096", "engine.num_gpu_blocks_override=700"]),
    "experts": ("llama-70b-4xh100", ["model=Mixtral-8x7B-v0.1", *CLOSED]),
    "latent": ("llama-70b-4xh100", ["model=DeepSeek-V3", "hardware=h200-sxm", "parallelism={tensor: 8}",
                                    "precision=null", *CLOSED]),
}  # fmt: skip
TECHNIQUE_PAIRS = [
    ("8b", "precision.activations=fp32", {"weights", "activations", "compute"}),
    ("alone", "early_exit={exit_layers: [8, 16], shares: [0.3, 0.4]}", {"weights"}),
    ("8b", "early_exit={exit_layers: [16], shares: [0.4], policy: leave_alone}", {"weights"}),
    ("70b", "parallelism.pipeline=2", {"collectives", "kv"}),  # each step holds half of the sequences
    ("experts", "parallelism={tensor: 1, attention_data: 4}", {"weights", "compute"}),
    ("experts", "parallelism={tensor: 4, expert: 4}", {"weights", "compute"}),
    ("latent", "parallelism={tensor: 8, context: 2}", {"collectives"}),
    ("latent", "parallelism={tensor: 8, prefill_context: 2}", {"prefill", "interference"}),
    ("chats", "engine.enable_prefix_caching=false", {"interference", "prefill"}),
    ("returns", "engine.kv_offloading_size=200GiB", {"compute"}),
    ("disk", "engine.kv_offloading_disk_bandwidth=2GB/s", {"offload"}),
    ("busy", "engine.max_num_seqs=16", {"queue"}),
    ("busy", "engine.max_num_batched_tokens=1024", {"interference", "prefill"}),
    ("few", "engine.long_prefill_token_threshold=128", {"prefill"}),
    ("chunks", "engine.enable_chunked_prefill=false", {"queue", "interference"}),
    ("sglang", "engine.enable_mixed_chunk=true", {"interference", "prefill"}),
    ("busy", "engine.gpu_memory_utilization=0.28", {"queue", "preemption"}),
    ("tight", "engine.num_gpu_blocks_override=3000", {"queue", "preemption"}),
    ("tight", "engine.block_size=64", {"queue", "preemption"}),
    ("tight", "engine.watermark=0.2", {"queue", "preemption"}),
    ("long", "engine.scheduler_reserve_full_isl=false", {"queue"}),
    ("alone", "engine.grammar_mask_time=0.02", {"host"}),
    ("alone", "engine.jump_forward_share=0.4", {"weights", "steps"}),
    ("pieces", "engine.allocator=contiguous", {"queue"}),
    ("pieces", "engine.reserve=max-model-len", {"queue"}),
    ("paged", "engine.preemption_mode=swap", {"queue", "preemption", "prefill", "interference"}),
    ("paged", "engine.scheduling_policy=shortest-first", {"queue", "preemption"}),
    ("8b", "engine.async_scheduling=false", {"host"}),
    ("alone", "engine.host_step_time=0.03", {"host"}),
    ("alone", "engine.enforce_eager=true", {"host", "launch"}),
    ("streams", "engine.stream_interval=10", {"prefill"}),  # first tokens wait behind those that are being sent
    ("sglang", "engine.scheduler_recv_interval=10", {"interference"}),  # prompts gather: fewer steps hold one
    ("8b", "engine.worker_step_time=0.003", {"host"}),
    ("8b", "engine.preset=vllm-0.11", {"host"}),
    ("busy", "cluster.replicas=2", {"interference", "decode"}),
    ("8b", "lora={adapters: {sql: 8}}", {"activations", "launch"}),
    ("8b", "model=Llama-3.2-3B", {"weights", "compute"}),
]


@pytest.mark.parametrize(("base", "change", "through"), TECHNIQUE_PAIRS)
def test_a_technique_works_through_its_terms(simulated, base, change, through):
    """One setting changed and re-simulated: the terms that its mechanism acts on have the sign of what comes out, and
    at least half its size."""
    a, b = simulated(base), simulated(base, change)
    found = (measure(b)["mean_e2el_ms"] - measure(a)["mean_e2el_ms"]) / 1e3
    parts = divide_sum(latency_terms(a), latency_terms(b))
    assert math.fsum(by_row(parts).values()) == pytest.approx(found, rel=1e-6)
    mine = math.fsum(
        math.fsum(factors.values()) for term, factors in parts.items() if {row_of(term), phase_of(term)} & through
    )
    assert abs(found) > 0.002 * measure(a)["mean_e2el_ms"] / 1e3
    assert math.copysign(1, mine) == math.copysign(1, found)
    assert abs(mine) >= 0.5 * abs(found)


@pytest.mark.parametrize(("base", "change", "through"), [pair for pair in TECHNIQUE_PAIRS if "early_exit" in pair[1]])
def test_early_exit_is_fewer_bytes(simulated, base, change, through):
    """Its gain is bytes of weights that are not read, its cost those of the exits' heads: as much as re-simulating with
    its prices of weights finds."""
    a, b = simulated(base), simulated(base, change)
    one, other = deployment_of(a.scenario).step_cost(), deployment_of(b.scenario).step_cost()
    found = _mean_e2el(a, _with_price_of(one, other, "weights")) - measure(a)["mean_e2el_ms"] / 1e3
    parts = divide_sum(latency_terms(a), latency_terms(b))
    assert by_row(parts)["weights"] == pytest.approx(found, rel=0.1)
    factors = parts["weights.decode"]
    assert abs(factors["bytes per step"]) > 0.9 * abs(math.fsum(factors.values()))


def test_every_technique_has_a_pair():
    """At least one pair above for each; each one's setting is a key of a scenario."""
    changes = [*CHANGES, *(change for _, change, _ in TECHNIQUE_PAIRS)]
    settings = [change.partition("=")[0] for change in changes]
    inner = [f"parallelism.{key}" for change in changes for key in ("attention_data", "expert", "context",
             "prefill_context") if f" {key}:" in change]  # fmt: skip
    covered = {found.name for setting in [*settings, *inner] if (found := technique_of(setting))}
    chosen = [technique for technique in TECHNIQUES if technique.setting != TILED]
    assert covered >= {technique.name for technique in chosen}
    for technique in chosen:
        section, _, key = technique.setting.partition(".")
        kind = Scenario.model_fields[section].annotation
        assert not key or any(name.startswith(key) for name in kind.model_fields), technique.setting


ATTENTION = {
    "kv": ("decode_kv", "prefill_kv"),
    "activations": ("decode_activations", "prefill_activations"),
    "compute": ("decode_compute", "prefill_compute", "prefill_tile"),
    "launch": ("decode_fixed", "prefill_fixed"),
}


def _with_price_of(cost, other, resource):
    """`cost` with one resource's seconds from `other`."""
    column = RESOURCES.index(resource)
    linear, head, attention = cost.linear.copy(), cost.head.copy(), cost.attention.copy()
    rows, places = min(len(linear), len(other.linear)), min(len(head), len(other.head))
    linear[:rows, column], head[:places, column] = other.linear[:rows, column], other.head[:places, column]
    for name in ATTENTION.get(resource, ()):
        attention[name] = other.attention[name]
    return replace(cost, linear=linear, head=head, attention=attention)


def _mean_e2el(result, cost):
    """Mean end-to-end latency (s) of the same requests at other prices."""
    workload = result.scenario.workload
    knobs = deployment_of(result.scenario).knobs(workload.max_concurrency or 0)
    requests = build_requests(workload, result.seed, None)
    fleet = Fleet([ReplicaSpec(knobs, cost)])
    fleet.submit(0, requests.arrival, requests.prompt_tokens, requests.output_tokens, requests.output_tokens)
    fleet.advance()
    return float(np.mean(fleet.requests["last_token"] - fleet.requests["sent"]))


@pytest.mark.parametrize("base", BASES)
def test_speculation_is_fewer_steps(simulated, base):
    """Its gain is read as steps per output token, its cost as drafting, and it is labelled so."""
    a, b = simulated(base), simulated(base, next(change for change in CHANGES if change.startswith("speculation")))
    parts = divide_sum(latency_terms(a), latency_terms(b))
    steps = math.fsum(factors.get("steps per output token", 0.0) for factors in parts.values())
    assert steps < 0
    assert math.fsum(parts["draft.decode"].values()) > 0
    assert latency_terms(b)["weights.decode"]["steps per output token"] < 0.6  # of 1 + 0.7 + 0.49 + 0.34 tokens


def test_a_queue_is_named():
    """Fewer places than the load needs: the difference is waiting to be scheduled."""
    document = compare(load_compared(["llama-8b-h100"], ["workload.num_requests=500,engine.max_num_seqs=8"])[:2])
    terms = {term["term"]: term["difference"] for term in document["differences"][0]["latency"]["terms"]}
    assert terms["queue"] > 0.9 * document["differences"][0]["latency"]["difference"]
    assert "waiting to be scheduled" in document["differences"][0]["why"]


def test_order_of_the_pair_changes_signs_only():
    """B against A is minus A against B, term by term and factor by factor."""
    pair = load_compared(["llama-8b-h100"], ["workload.num_requests=300,hardware=h200-sxm"])
    pair[0] = ("base", load_scenario("llama-8b-h100", ["workload.num_requests=300"]))
    forth, back = compare(pair)["differences"][0], compare(pair[::-1])["differences"][0]
    for x, y in zip(forth["latency"]["terms"], back["latency"]["terms"], strict=True):
        assert x["difference"] == pytest.approx(-y["difference"], abs=1e-9)
        for factor, part in x["factors"].items():
            assert part == pytest.approx(-y["factors"][factor], abs=1e-6)
    assert forth["throughput"]["ratio"] == pytest.approx(1 / back["throughput"]["ratio"])
    x, y = forth["metrics"]["p99_ttft_ms"], back["metrics"]["p99_ttft_ms"]
    assert x["difference"] == pytest.approx(-y["difference"])


def test_common_random_numbers_narrow_the_interval():
    """The interval of the difference is far narrower than those of the two means."""
    scenarios = load_compared(["llama-8b-h100"], ["precision.kv_cache=fp8"])
    document = compare([(n, s.model_copy(update={"workload": s.workload.model_copy(update={"num_requests": 400})}))
                        for n, s in scenarios])  # fmt: skip
    difference = document["differences"][0]["metrics"]["mean_e2el_ms"]
    alone = document["variants"][0]["answer"]["confidence"]["half_width"]["mean_e2el_ms"]
    assert difference["half_width"] < alone / 3
    assert difference["clear"]


def test_settings_one_by_one_add_up():
    """Each changed setting's Shapley value, re-simulated: they add up to the whole difference, with the right signs."""
    names = ["llama-8b-h100"]
    few = "workload.num_requests=300"
    pair = load_compared(names, [few + ",hardware=a100-sxm-80gb,precision.kv_cache=fp8,engine.max_num_seqs=64"])
    pair[0] = ("base", load_scenario(names[0], [few]))
    found = compare(pair)["differences"][0]["one_by_one"]
    assert math.fsum(found["changes"].values()) == pytest.approx(found["difference"])
    assert found["changes"]["hardware"] > 0 > found["changes"]["precision.kv_cache"]


def test_techniques_have_the_notes_sides():
    """Quantised KV is fewer bytes and approximate; speculation fewer steps and exact; early exit is fewer bytes."""
    kv, speculation, early = label(["precision.kv_cache", "speculation.method", "early_exit.layers"])
    assert (kv["side"], kv["mechanism"], kv["exact"]) == (FEWER_BYTES, "KV", False)
    assert (speculation["side"], speculation["exact"]) == (FEWER_STEPS, True)
    assert (early["side"], early["mechanism"], early["exact"]) == (FEWER_BYTES, "depth", False)
    assert label(["simulation", "slo"]) == []


def test_command_line():
    """Two files, one file with variants, and what is wrong input."""
    few = ["--set", "workload.num_requests=50"]
    two = CliRunner().invoke(app, ["compare", "llama-8b-h100", "llama-8b-rtx-4090", *few])
    assert two.exit_code == 0, two.output
    assert "B against A" in two.output
    variants = CliRunner().invoke(app, ["compare", "llama-8b-h100", *few, "--set", "precision.kv_cache=fp8"])
    assert variants.exit_code == 0
    assert "C against A" in variants.output
    for wrong in (["llama-8b-h100"], ["llama-8b-h100", "--set", "a.b=1"], ["nope", "llama-8b-h100"]):
        outcome = CliRunner().invoke(app, ["compare", *wrong])
        assert outcome.exit_code == 2
        assert "Traceback" not in outcome.output


def test_a_variant_that_cannot_run_is_named():
    """One line that begins with the variant."""
    with pytest.raises(InputError, match=r"parallelism.tensor=1: model: .* does not fit"):
        compare(load_compared(["llama-70b-4xh100"], ["parallelism.tensor=1"]))


def test_one_deployment_written_in_two_ways_is_the_same(capsys, monkeypatch):
    """No row differs, and it is said; routers have a row of what their caches hold."""
    load = {"request_rate": 4, "num_requests": 40, "input_tokens": 300, "output_tokens": 20, "turns": 3}
    keys = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": load}
    own = {"parallelism": {"tensor": 2}}
    pools = {"prefill": {}, "decode": {}, "transfer": {"bandwidth": "50 GB/s"}}
    inside = {"cluster": pools | {"prefill": own, "decode": own}}
    same = compare(load_compared([keys | inside, keys | own | {"cluster": pools}]))
    assert same["differences"][0]["why"] == "no difference: both are the same deployment"
    assert all(term["difference"] == 0 for term in same["differences"][0]["latency"]["terms"])
    monkeypatch.setenv("COLUMNS", "80")
    others = ["cluster.router=prefix-aware", "cluster.router=session"]
    routers = compare(load_compared([keys | {"cluster": {"replicas": 2, "router": "round-robin"}}], others))
    print_comparison(routers)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = [line.split()[2:] for line in lines if line.startswith("prompts cached")]
    found = [float(cell.rstrip("%")) for row in cells for cell in row]
    rates = [v["answer"]["explain"]["prefix_cache_token_hit_rate"] or 0.0 for v in routers["variants"]]
    assert found == pytest.approx([100 * rate for rate in rates], abs=0.06)
    assert found[1] > found[0]
    shares = [row["cached_share"] for row in routers["variants"][1]["answer"]["replicas"]]
    assert min(shares) <= rates[1] <= max(shares)
