"""Engine presets: server defaults by GPU memory as vLLM sets them, and the differences between versions."""

import pytest

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.presets import packaged_presets
from infersim.deployment import deploy, resolve

H100, A100, B200, RTX4090 = (load_hardware(n) for n in ("h100-sxm", "a100-sxm-80gb", "b200-sxm", "rtx-4090"))


@pytest.mark.parametrize(
    ("preset", "hardware", "tokens", "seqs"),
    [
        ("vllm-0.11", H100, 8192, 1024),
        ("vllm-0.11", B200, 8192, 1024),
        ("vllm-0.33", B200, 16384, 1024),
        ("vllm-0.33", H100, 8192, 1024),
        ("vllm-0.33", A100, 2048, 256),
        ("vllm-0.19", RTX4090, 2048, 256),
    ],
)
def test_server_defaults_by_memory(preset, hardware, tokens, seqs):
    resolved = resolve(Engine(preset=preset), hardware, 131072)
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs) == (tokens, seqs)
    assert resolved.origin["max_num_seqs"] == "GPU default"
    assert resolved.max_model_len == 131072
    assert resolved.block_size == 16
    assert resolved.watermark == 0


def test_differences_between_versions():
    """Each difference appears once and stays: a version has all that its elders have."""
    rows = [packaged_presets()[f"vllm-0.{minor}"] for minor in (11, 15, 19, 33)]
    assert [p.values["gpu_memory_utilization"] for p in rows] == [0.9, 0.9, 0.9, 0.92]
    assert [p.values["scheduler_reserve_full_isl"] for p in rows] == [False, False, True, True]
    assert [p.values["async_scheduling"] for p in rows] == [False, True, True, True]
    assert [p.values["skip_unfit_prefill"] for p in rows] == [True, False, False, False]
    assert [p.values["count_cuda_graph_memory"] for p in rows] == [False, False, False, True]
    assert [p.values["long_prefill_needs_contention"] for p in rows] == [False, False, False, True]
    assert all(p.source and p.notes and p.sources["host_step_time"] for p in rows)


def test_user_wins_and_is_named():
    engine = Engine(preset="vllm-0.11", max_num_seqs=7, scheduler_reserve_full_isl=True, gpu_memory_utilization=0.5)
    resolved = resolve(engine, H100, 4096)
    assert (resolved.max_num_seqs, resolved.gpu_memory_utilization) == (7, 0.5)
    assert resolved.scheduler_reserve_full_isl
    assert resolved.origin["max_num_seqs"] == resolved.origin["scheduler_reserve_full_isl"] == "user"
    assert resolved.origin["async_scheduling"] == "preset default"
    assert set(resolved.origin) == set(vars(resolved)) - {"preset", "origin"}


def test_sequences_never_exceed_the_token_budget():
    resolved = resolve(Engine(max_num_batched_tokens=64), H100, 4096)
    assert resolved.max_num_seqs == 64
    assert resolved.origin["max_num_seqs"] == "limited by max_num_batched_tokens"


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt():
    assert resolve(Engine(enable_chunked_prefill=False), RTX4090, 131072).max_num_batched_tokens == 131072
    assert resolve(Engine(enable_chunked_prefill=False), RTX4090, 1024).max_num_batched_tokens == 2048
    with pytest.raises(InputError, match="2048 is smaller than max_model_len 4096 and chunked prefill is off"):
        resolve(Engine(enable_chunked_prefill=False, max_num_batched_tokens=2048), RTX4090, 4096)


def test_longer_than_the_model_is_refused():
    with pytest.raises(InputError, match=r"engine.max_model_len: 8192 is longer than the model's 4096 tokens"):
        resolve(Engine(max_model_len=8192), H100, 4096)


@pytest.mark.parametrize(
    ("given", "switch", "value"),
    [
        ({"kv_offloading_latency": 1e-3}, "kv_offloading_size", 0),
        ({"kv_offloading_disk_bandwidth": 1e9}, "kv_offloading_disk_size", 0),
        ({"kv_offloading_disk_latency": 1e-3}, "kv_offloading_disk_size", 0),
        ({"prefix_cache": "radix", "preset": "vllm-0"}, "enable_prefix_caching", False),
        ({"jump_forward_tokens": 8}, "jump_forward_share", 0.2),
    ],
)
def test_a_knob_whose_switch_nobody_touched_is_refused(given, switch, value):
    """It would do nothing; one who switches off on purpose, in a sweep say, may leave it where it is."""
    with pytest.raises(InputError, match=rf"does nothing while engine.{switch} is .*; must be given together with it"):
        resolve(Engine(**given), H100, 4096)
    resolve(Engine(**given, **{switch: value}), H100, 4096)


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_offloading_size": 2**20},
        {"kv_offloading_size": 2**30, "kv_offloading_disk_size": 1e3, "kv_offloading_disk_bandwidth": 1e9},
        {"preemption_mode": "swap", "swap_space": 2**20},
    ],
)
def test_room_for_less_than_a_block_is_refused(engine):
    """A block of Llama-3.1-8B is 16 x 131,072 bytes."""
    with pytest.raises(InputError, match=r"has no room for a KV block of 2,097,152 B; must be 0, or at least that"):
        deploy("Llama-3.1-8B", H100, Precision(), Parallelism(), Engine(**engine))
    big = {key: 2**31 if key.endswith(("size", "space")) else value for key, value in engine.items()}
    deploy("Llama-3.1-8B", H100, Precision(), Parallelism(), Engine(**big))
