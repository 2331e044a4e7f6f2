"""Prefill context parallelism: what of a step is divided, what every rank does, and what is gathered."""

import numpy as np
import pytest

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.scenario import build_scenario
from infersim.cost.batch import Part, attention_time, decodes
from infersim.cost.collectives import collective
from infersim.cost.steptime import sum_operators
from infersim.deployment import deploy
from infersim.engine.compiled.state import COLLECTIVES
from infersim.explain.break_even import pays_from, prompts_over_tokens
from infersim.metrics.latency import measure
from infersim.run import run

H200 = load_hardware("h200-sxm")
EAGER = {"enforce_eager": True, "eager_launch_time": 0, "max_num_batched_tokens": 8192, "max_model_len": 8192}


def placed(model: str, **parallelism):
    return deploy(model, H200, Precision(), Parallelism(**parallelism), Engine(**EAGER))


def price(model: str, **parallelism):
    deployment = placed(model, **parallelism)
    return sum_operators(deployment.placement, deployment.engine)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_computes_its_part_and_gathers_latents(ranks):
    """A dense model: the step of a rank's part, a gather of n latents of 288 in each of 62 layers, and one of n hidden
    states of 2,560."""
    one, many = price("MiniCPM3-4B"), price("MiniCPM3-4B", prefill_context=ranks)
    assert np.array_equal(one.head, many.head)
    gather = collective(H200, "all_gather", "bf16", ranks)
    for n in (1, 100, 4096, 8192):
        part = -(-n // ranks)
        beside = 62 * gather.seconds(part * ranks * 288 * 2.0) + gather.seconds(part * ranks * 2560 * 2.0)
        assert many.linear[n].sum() == pytest.approx(one.linear[part].sum() + beside)
        assert many.linear[n, COLLECTIVES] == pytest.approx(beside)


def test_each_decode_is_on_one_rank():
    """Of D decodes a rank has ceil(D / 4) at most: attention takes what so many take on one."""
    one, many = price("MiniCPM3-4B").attention, price("MiniCPM3-4B", prefill_context=4).attention
    for n in (1, 4, 5, 64):
        few = attention_time(one, decodes(-(-n // 4), 3000))
        assert attention_time(many, decodes(n, 3000)) == pytest.approx(few, rel=0.01)


def test_a_rank_has_its_part_of_the_pairs_and_all_the_keys():
    """A long prompt's attention takes a fourth where pairs bind; keys are expanded on every rank."""
    one, many = price("MiniCPM3-4B").attention, price("MiniCPM3-4B", prefill_context=4).attention
    for name, share in (("prefill_compute", 4), ("prefill_activations", 4), ("prefill_kv", 1), ("decode_kv", 1)):
        assert (one[name] / share).tolist() == pytest.approx(many[name].tolist())
    prompt = [Part(0, 8192)]
    assert 2.5 < attention_time(one, prompt) / attention_time(many, prompt) < 4.1


def test_experts_are_dealt_out_and_the_cache_is_copied():
    """As many experts and their exchange as data-parallel ranks have; keys and values as one rank holds them."""
    divided, ranks = (
        placed("DeepSeek-V3", tensor=2, expert=8, **{key: 4}) for key in ("prefill_context", "attention_data")
    )
    assert divided.memory.weights_bytes == ranks.memory.weights_bytes
    assert divided.memory.num_gpu_blocks == ranks.memory.num_gpu_blocks
    assert divided.parallelism.num_gpus == ranks.parallelism.num_gpus == 8
    whole, part = (sum_operators(each.placement, each.engine) for each in (divided, ranks))
    beside = whole.linear[2048] - part.linear[512] - part.shared[512]  # of 4 ranks with 512 tokens each
    assert 0 < beside[COLLECTIVES] < 0.1 * whole.linear[2048].sum()
    assert np.delete(beside, COLLECTIVES) == pytest.approx(0.0, abs=1e-9)


def ttft(model: str, prompt: int, **parallelism) -> float:
    load = {"num_requests": 2, "max_concurrency": 1, "input_tokens": prompt, "output_tokens": 2}
    data = {"model": model, "hardware": "h200-sxm", "parallelism": parallelism, "workload": load}
    return measure(run(build_scenario(data, ""))[0])["mean_ttft_ms"]


def test_it_pays_for_long_prompts_of_sparse_attention():
    """Under tensor parallelism every rank runs the whole indexer; here each has its part of the queries."""
    cut, divided = ({"tensor": 8, "expert": 8}, {"tensor": 1, "prefill_context": 8, "expert": 8})
    gains = [ttft("DeepSeek-V3.2", n, **cut) / ttft("DeepSeek-V3.2", n, **divided) for n in (1000, 60_000)]
    assert gains[1] > max(1.3, gains[0])


def test_where_it_begins_to_pay():
    """Against tensor parallelism of as many GPUs; where it pays the two take equally long, and never for dense heads
    that do not divide."""
    deployment = placed("DeepSeek-V3.2", prefill_context=8, expert=8)
    other = Parallelism(tensor=8, expert=8)
    rows = prompts_over_tokens(deployment.placement, deployment.engine, other)
    assert [row["tokens"] for row in rows][-1] == 8192
    assert rows[-1]["gain"] == pytest.approx(rows[-1]["other_ms"] / rows[-1]["step_ms"])
    assert rows[-1]["gain"] > 1.1
    assert rows[0]["tokens"] <= pays_from(rows) <= 8192
    few = [{"tokens": n, "gain": gain} for n, gain in ((32, 2 / 3), (128, 2.0))]
    assert pays_from(few) == 64  # half way between, in the logarithms
    dense = placed("MiniCPM3-4B", prefill_context=16)
    assert prompts_over_tokens(dense.placement, dense.engine, Parallelism(tensor=16)) == []


def test_the_prompts_pool_sends_one_copy():
    def sent(**parallelism):
        load = {"num_requests": 3, "max_concurrency": 1, "input_tokens": 4000, "output_tokens": 5}
        pools = {"prefill": {"parallelism": parallelism}, "decode": {}, "transfer": {"bandwidth": 1e8}}
        data = {"model": "MiniCPM3-4B", "hardware": "h200-sxm", "cluster": pools, "workload": load}
        (result,) = run(build_scenario(data, ""))
        assert result.completed.all()
        return result.requests["last_token"][-1]

    assert sent(prefill_context=4) == pytest.approx(sent(), rel=0.05)  # the link takes nearly all of the time


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "Llama-3.1-8B"}, "prefill_context: vLLM has it for MLA models alone; must be 1 for Llama-3.1-8B"),
        ({"engine": {"preset": "vllm-0.28"}}, "prefill_context: is modelled as vLLM 0.32 has it"),
        ({"engine": {"preset": "sglang-0.5"}}, "prefill_context: is modelled as vLLM 0.32 has it"),
        ({"parallelism": {"prefill_context": 2, "pipeline": 2}}, "not modelled together with pipeline"),
        ({"parallelism": {"prefill_context": 2, "tensor": 2, "context": 2}}, "not modelled together with context"),
        ({"engine": {"kv_offloading_size": "8 GiB"}}, "kv_offloading_size: is not modelled with"),
        ({"speculation": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 0.5}}}, "speculation"),
        ({"lora": {"adapters": {"a": 8}}}, "together with speculation, early exit and LoRA"),
        ({"model": "DeepSeek-V3.2", "parallelism": {"prefill_context": 8, "expert": 8},
          "engine": {"enforce_eager": False}}, "outside CUDA graphs alone"),
        ({"cluster": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "transfer": {"bandwidth": 1e9}}},
         "cluster.decode.parallelism.prefill_context: vLLM's NIXL"),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with(changes, problem):
    data = {"model": "MiniCPM3-4B", "hardware": "h200-sxm", "parallelism": {"prefill_context": 2},
            "workload": {"num_requests": 1, "input_tokens": 5, "output_tokens": 5}}  # fmt: skip
    with pytest.raises(InputError, match=problem):
        run(build_scenario(data | changes, ""))
