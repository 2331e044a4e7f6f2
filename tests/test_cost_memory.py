"""KV blocks against what vLLM logged, and the refusals that it makes."""

import math

import pytest

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.scenario import build_scenario
from infersim.cost.memory import GIB, KVGroup, longest_sequence, memory_waterfall, weight_bytes
from infersim.cost.placement import Placement
from infersim.deployment import deployment_of, resolve
from infersim.models.catalog import load_model
from infersim.run import run


def waterfall(model, hardware, tensor=1, preset="vllm-0.19", precision=None, **engine):
    model, hardware = load_model(model), hardware if not isinstance(hardware, str) else load_hardware(hardware)
    knobs = resolve(Engine(preset=preset, **engine), hardware, model.max_position_embeddings)
    return memory_waterfall(Placement(model, hardware, precision or Precision(), Parallelism(tensor=tensor)), knobs)


H100 = load_hardware("h100-sxm")
BUDGET_2048 = {"gpu_memory_utilization": 0.9, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
RTX_4090 = {**BUDGET_2048, "max_model_len": 32768}


def test_rtx_4090_has_2588_blocks():
    """vLLM 0.19, Llama-3.1-8B (LLMServingSim's log): within 3 % with what recent drivers report as total memory."""
    assert waterfall("Llama-3.1-8B", "rtx-4090", **RTX_4090).num_gpu_blocks == pytest.approx(2588, rel=0.03)


def test_rtx_4090_has_2588_blocks_with_the_total_of_older_drivers():
    """23.64 GiB, as driver 550 and before report: within 0.5 %."""
    card = load_hardware("rtx-4090").model_copy(update={"memory_usable": 23.64 * GIB})
    assert waterfall("Llama-3.1-8B", card, **RTX_4090).num_gpu_blocks == pytest.approx(2588, rel=0.005)


@pytest.mark.parametrize(
    ("model", "hardware", "tensor", "preset", "tokens", "sequences", "blocks"),
    [
        ("Qwen2.5-7B", "h100-sxm", 1, "vllm-0.15", 2048, 128, 65352),
        ("Llama-3.1-70B", "h100-sxm", 4, "vllm-0.15", 2048, 128, 30425),
        ("Llama-3.1-70B", "h100-sxm", 4, "vllm-0.15", 8192, 128, 30251),
        # start-up log of vLLM 0.31 with server defaults: "GPU KV cache size: 460,496 tokens"
        ("Llama-3.1-8B", "a100-sxm-80gb", 1, "vllm-0.33", None, None, 28781),
    ],
)
def test_blocks_that_vllm_logged(model, hardware, tensor, preset, tokens, sequences, blocks):
    memory = waterfall(model, hardware, tensor, preset, max_num_batched_tokens=tokens, max_num_seqs=sequences)
    assert memory.num_gpu_blocks == pytest.approx(blocks, rel=0.015)


def test_terms_that_vllm_logged():
    """Llama-3.1-8B: 14.99 GiB of weights (14.96 and a rotary table), 1.2 GiB of activations with 256 sequences."""
    memory = waterfall("Llama-3.1-8B", "h100-sxm", **BUDGET_2048)
    assert memory.weights_bytes / GIB == pytest.approx(14.9889, abs=0.0005)
    assert memory.activation_bytes / GIB == pytest.approx(1.2, abs=0.04)
    assert memory.activation_terms["sorted logits"] == 256 * 128256 * 4


def test_the_waterfall_adds_up():
    for preset in ("vllm-0.11", "vllm-0.33"):
        memory = waterfall("Llama-3.1-8B", "h100-sxm", preset=preset)
        spent = memory.weights_bytes + memory.activation_bytes + memory.cuda_graph_bytes + memory.overhead_bytes
        assert 0 <= memory.usable_bytes - spent - memory.kv_bytes < memory.block_bytes
        assert memory.kv_bytes == memory.num_gpu_blocks * memory.block_bytes
        assert memory.block_bytes == 16 * 131072 == 16 * memory.kv_bytes_per_token
        assert memory.activation_bytes == sum(memory.activation_terms.values())
        assert (memory.cuda_graph_bytes > 0) == (preset == "vllm-0.33")
        assert memory.max_concurrency == memory.num_gpu_blocks / (131072 / 16)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-7B", "Gemma-2-9B", "OPT-6.7B", "GPT-2-XL"])
def test_weights_of_one_rank_are_the_models(name):
    """Parameters times their bytes, a padded vocabulary, and the rotary table."""
    model = load_model(name)
    padding = (-model.vocab_size % 64) * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    attention = model.layers[0].attention
    rotary = model.max_position_embeddings * attention.head_dim * attention.rope
    assert weight_bytes(Placement(model, H100)) == 2 * (model.num_params + padding + rotary)


def test_weights_of_ranks():
    """Eight ranks hold the matrices once, and norms and rotary table eight times."""
    model = load_model("Llama-3.1-70B")
    norms = 161 * model.hidden_size
    copied = 7 * 2 * (norms + model.max_position_embeddings * 128)
    one, rank = (weight_bytes(Placement(model, H100, parallelism=Parallelism(tensor=n))) for n in (1, 8))
    assert rank * 8 - one == pytest.approx(copied, rel=1e-3)


def test_a_fp8_cache_holds_twice_the_blocks():
    full, half = (
        waterfall("Llama-3.1-8B", "h100-sxm", precision=Precision(kv_cache=dtype)).num_gpu_blocks
        for dtype in ("bf16", "fp8")
    )
    assert half in (2 * full, 2 * full + 1)


def test_key_heads_copied_to_ranks_take_their_memory_on_each():
    """Qwen2.5-7B has 4 key heads, Qwen2.5-3B has 2."""
    divided = [waterfall("Qwen2.5-7B", "h100-sxm", tensor).kv_bytes_per_token for tensor in (1, 2, 4)]
    assert divided == [57344, 28672, 14336]
    copied = [waterfall("Qwen2.5-3B", "h100-sxm", tensor).kv_bytes_per_token for tensor in (2, 4, 8)]
    assert len(set(copied)) == 1


def test_windows_have_block_tables_of_their_own():
    """Gemma-3-27B: 10 full and 52 window layers, in tables of 10 layers: 1 full table and 6 with a window."""
    memory = waterfall("Gemma-3-27B", "h100-sxm", max_model_len=32768)
    assert {(group.window, group.tables) for group in memory.kv_groups} == {(0, 1), (1024, 6)}
    assert memory.layers_per_table == 10
    assert memory.block_bytes == 10 * 16 * 2 * 16 * 128 * 2
    assert waterfall("Mistral-7B-v0.1", "h100-sxm").kv_groups == (KVGroup(4096, 1),)
    assert waterfall("Llama-3.1-8B", "h100-sxm").kv_groups == (KVGroup(0, 1),)


def test_a_number_of_blocks_can_be_given():
    memory = waterfall("Llama-3.1-8B", "h100-sxm", num_gpu_blocks_override=1000, max_model_len=999 * 16)
    assert memory.num_gpu_blocks == 1000
    assert memory.kv_bytes == 1000 * 2 * 2**20
    with pytest.raises(InputError, match=r"8193 KV blocks.* num_gpu_blocks_override is 1000; must be at most 15984"):
        waterfall("Llama-3.1-8B", "h100-sxm", num_gpu_blocks_override=1000)


def test_the_memory_of_the_kv_cache_can_be_given():
    """As vLLM 0.32 counted on a CPU: 256 MiB hold 2,048 blocks of 32 tokens of 4 layers with 4 heads of 64."""
    memory = waterfall(
        "Llama-3.1-8B", "h100-sxm", kv_cache_memory_bytes=2**31, gpu_memory_utilization=0.2, max_model_len=4096
    )
    assert memory.num_gpu_blocks == 1024  # whatever the utilisation leaves
    assert memory.num_gpu_blocks * memory.block_bytes == memory.kv_bytes == 2**31
    with pytest.raises(InputError, match=r"kv_cache_memory_bytes 70.00 GiB\) and there are 79"):
        waterfall("Llama-3.1-8B", "h100-sxm", kv_cache_memory_bytes=70 * 2**30)
    given = {"kv_cache_memory_bytes": 2**31, "max_model_len": 4096}
    more = {"speculation": {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"rate": 0.7}}}
    beside = {"lora": {"adapters": {"law": 16}, "max_loras": 4}}
    for part, fewer in ((more, 2**31 // (memory.block_bytes + 16 * 4096)), (beside, 1024)):
        data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": given, **part}
        load = {"request_rate": 1, "num_requests": 5, "input_tokens": 10, "output_tokens": 5}
        assert deployment_of(build_scenario(data | {"workload": load}, "test")).memory.num_gpu_blocks == fewer


def test_the_number_of_blocks_fits_the_engines_integers_whatever_the_memory():
    boundless = load_hardware("h100-sxm").model_copy(update={"memory_usable": 1e30})
    assert waterfall("Llama-3.1-8B", boundless).num_gpu_blocks == 2**31 - 1


@pytest.mark.parametrize(
    ("deployed", "said"),
    [
        (
            ("Llama-3.1-70B", "h100-sxm"),
            ["does not fit h100-sxm", "weights 131.45 GiB", "parallelism.tensor 4 would fit"],
        ),
        (("Llama-3.1-405B", "rtx-4090"), ["does not fit rtx-4090", "more or larger GPUs, or a smaller model"]),
        (("Llama-3.1-8B", "rtx-4090"), ["engine.max_model_len: one sequence of 131072", "4.93 GiB", "at most 40"]),
        (("Llama-3.1-8B", "a10"), ["engine.max_model_len", "must be at most"]),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(deployed, said):
    with pytest.raises(InputError) as error:
        waterfall(*deployed)
    (line,) = error.value.problems
    for part in said:
        assert part in line


def test_the_remedy_is_true():
    """The longest max_model_len that the error names is accepted; one token more is not."""
    with pytest.raises(InputError) as error:
        waterfall("Llama-3.1-8B", "rtx-4090")
    longest = int(str(error.value).rsplit(" ", 1)[1])
    memory = waterfall("Llama-3.1-8B", "rtx-4090", max_model_len=longest)
    assert longest == (memory.num_gpu_blocks - 1) * 16  # one block is vLLM's null block
    with pytest.raises(InputError):
        waterfall("Llama-3.1-8B", "rtx-4090", max_model_len=longest + 1)
    assert waterfall("Llama-3.1-70B", "h100-sxm", 4).num_gpu_blocks > 0


def test_the_longest_sequence():
    """What fits is the model's; what does not is shortened; what never fits is refused as the waterfall refuses it."""
    card = load_hardware("rtx-4090")

    def longest(name):
        model = load_model(name)
        engine = resolve(Engine(preset="vllm-0.19"), card, model.max_position_embeddings)
        return longest_sequence(Placement(model, card), engine)

    assert longest("Llama-2-7B") == 4096
    memory = waterfall("Llama-3.1-8B", "rtx-4090", max_model_len=longest("Llama-3.1-8B"))
    assert longest("Llama-3.1-8B") == (memory.num_gpu_blocks - 1) * 16
    with pytest.raises(InputError, match="does not fit rtx-4090"):
        longest("Llama-3.1-70B")


@pytest.mark.parametrize(("hardware", "weights"), [("l4", "int4"), ("rtx-4090", "int8_wo"), ("rtx-4090", "int4")])
def test_a_buddy_allocator_shortens_the_longest_sequence_to_a_power_of_two(hardware, weights):
    """Its blocks of one token come in powers of two, and so does the longest piece that there is room for."""
    data = {"model": "Llama-3.1-8B", "hardware": hardware, "precision": {"weights": weights}}
    data |= {"engine": {"preset": "orca"}, "workload": {"input_tokens": 5, "output_tokens": 2, "num_requests": 3}}
    scenario = build_scenario(data, "x.yaml")
    usable = deployment_of(scenario).memory.num_gpu_blocks - 1
    longest = deployment_of(scenario).engine.max_model_len
    assert longest == 2 ** int(math.log2(usable))
    assert run(scenario)[0].completed.all()
    data["engine"] |= {"num_gpu_blocks_override": 900, "max_model_len": 700}
    with pytest.raises(InputError, match="one sequence of 700 tokens needs 1025 KV blocks"):
        run(build_scenario(data, "x.yaml"))
    data["engine"]["num_gpu_blocks_override"] = 1366
    adapters = {"lora": {"adapters": {"x": 16}, "max_loras": 1}}  # take nothing of blocks that are asked for
    assert run(build_scenario(data | adapters, "x.yaml"))[0].completed.all()


def test_more_memory_or_utilisation_never_means_fewer_blocks():
    card = load_hardware("h100-sxm")
    blocks = [waterfall("Llama-3.1-8B", card, gpu_memory_utilization=share, max_model_len=4096).num_gpu_blocks
              for share in (0.5, 0.7, 0.9, 1.0)]  # fmt: skip
    assert blocks == sorted(blocks)
    larger = card.model_copy(update={"memory_usable": card.memory_usable * 1.5})
    assert waterfall("Llama-3.1-8B", larger).num_gpu_blocks > blocks[2]


def test_larger_budgets_take_from_the_cache():
    """The sampler's peak grows with max_num_seqs, the MLP's with max_num_batched_tokens."""
    few, many = (waterfall("Llama-3.1-8B", "h100-sxm", max_num_seqs=n) for n in (64, 1024))
    assert many.activation_bytes > few.activation_bytes
    assert many.num_gpu_blocks < few.num_gpu_blocks
    deep = waterfall("Llama-3.1-8B", "h100-sxm", max_num_seqs=64, max_num_batched_tokens=65536)
    per_token = 2 * (4096 + 2 * 14336 + 14336)
    assert deep.activation_bytes == 65536 * per_token
    assert "gate_up_proj" in deep.activation_terms


def test_memory_is_described_per_gpu():
    memory = waterfall("Llama-3.1-70B", "h100-sxm", 4)
    assert memory.kv_bytes_per_token == 2 * 80 * 2 * 128 * 2
    assert memory.usable_bytes == math.ceil(load_hardware("h100-sxm").memory_usable * 0.9)


@pytest.mark.parametrize(
    ("model", "hardware"), [("Gemma-3-27B", "h100-sxm"), ("Gemma-3-4B", "l4"), ("Mistral-7B-v0.1", "rtx-4090")]
)
@pytest.mark.parametrize("preset", ["vllm-0.11", "vllm-0.33"])
def test_the_engine_runs_the_longest_sequence_in_the_fewest_blocks_that_the_waterfall_accepts(model, hardware, preset):
    """Windows hold less than the whole sequence, and both must count so."""
    data = {"model": model, "hardware": hardware, "engine": {"preset": preset}}
    data["workload"] = {"input_tokens": 1, "output_tokens": 1, "num_requests": 1}
    whole = deployment_of(build_scenario(data, "x.yaml"))
    longest = whole.engine.max_model_len
    groups = whole.memory.kv_groups
    budget, steps = whole.engine.max_num_batched_tokens, 2 if preset == "vllm-0.33" else 1  # steps in flight
    blocks = 1
    for group in groups:
        held = min(longest, group.window - 1 + steps * budget) if group.window else longest
        blocks += group.tables * (math.ceil(held / 16) + (held < longest))
    data["engine"] |= {"max_model_len": longest, "num_gpu_blocks_override": blocks}
    data["workload"] |= {"input_tokens": longest - 20, "output_tokens": 20, "num_requests": 3}
    (result,) = run(build_scenario(data, "x.yaml"))
    assert result.completed.all()
    assert result.peak_blocks <= blocks - 1


def test_sglang_keeps_what_its_formula_says():
    """H100: 512 MB + 1.5 x 8192 MB + 1 GB / 8 + 2 x 256 MB, 10 GB at least; the rest is weights and KV cache."""
    memory = waterfall("Llama-3.1-8B", "h100-sxm", preset="sglang-0.5", max_num_seqs=256)
    reserved = (512 + 1.5 * 8192 + 1024 / 8 + 2 * 256) * 2**20
    assert memory.overhead_bytes == reserved
    assert memory.kv_bytes == pytest.approx(
        H100.memory_usable - reserved - memory.weights_bytes, abs=memory.block_bytes
    )
    small = waterfall("Llama-3.1-8B", "h100-sxm", preset="sglang-0.5", max_num_seqs=8, max_num_batched_tokens=2048)
    assert small.overhead_bytes == 10 * 2**30
    given = waterfall("Llama-3.1-8B", "h100-sxm", preset="sglang-0.5", gpu_memory_utilization=0.8)
    assert given.weights_bytes + given.kv_bytes == pytest.approx(0.8 * H100.memory_usable, abs=given.block_bytes)


def test_tensorrt_llm_takes_a_share_of_what_is_left():
    memory = waterfall("Llama-3.1-8B", "h100-sxm", preset="trtllm-1.0-no-evict", max_num_seqs=256, max_model_len=8192)
    fixed = memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes
    assert memory.kv_bytes == pytest.approx(0.9 * (H100.memory_usable - fixed), abs=memory.block_bytes)
    assert memory.block_size == 32
    vllm = waterfall("Llama-3.1-8B", "h100-sxm", max_num_seqs=256, max_model_len=8192)
    assert memory.kv_bytes > vllm.kv_bytes


def test_a_gate_that_counts_windows_whole_can_wait_for_ever():
    """vLLM 0.19 starts with a KV cache in which a long prompt then never gets the blocks that its gate asks for."""
    data = {
        "model": "Gemma-3-27B",
        "hardware": "h100-sxm",
        "engine": {"preset": "vllm-0.19", "max_model_len": 32768},
        "workload": {"input_tokens": 30000, "output_tokens": 10, "num_requests": 3},
    }
    with pytest.raises(InputError, match="its gate counts windows as whole sequences"):
        run(build_scenario(data, "x.yaml"))
    assert run(build_scenario(data | {"engine": data["engine"] | {"preset": "vllm-0.33"}}, "x.yaml"))
