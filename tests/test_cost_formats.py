"""Formats of weights: bytes with their scales, the kernels that multiply them, and what they buy on a shard."""

import numpy as np
import pytest
from shared import SHARED, needs_shared

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import FORMATS, Precision
from infersim.cost.formats import Kernels, weight_format
from infersim.cost.memory import weight_bytes
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.roofline import add_time, rate, zero_split
from infersim.cost.sharding import check_modelled
from infersim.deployment import deploy
from infersim.models.catalog import load_model

H100, A100, B200 = (load_hardware(name) for name in ("h100-sxm", "a100-sxm-80gb", "b200-sxm"))


@pytest.mark.parametrize(
    ("name", "size"),
    [("fp8", 1), ("fp8_block", 1 + 4 / 16384), ("int4", 0.5 + 2 / 128), ("nvfp4", 0.5625), ("mxfp4", 0.53125)],
)
def test_a_weight_comes_with_its_part_of_a_scale(name, size):
    assert FORMATS[name].bytes_per_weight() == size
    assert FORMATS["int4"].bytes_per_weight(32) == 0.5 + 2 / 32


@pytest.mark.parametrize(
    ("model", "name"),
    [("DeepSeek-V3", "fp8_block"), ("gpt-oss-120b", "mxfp4"), ("Kimi-K2.5", "int4"), ("Llama-3.1-8B", "bf16")],
)
def test_a_checkpoint_says_its_format(model, name):
    assert weight_format(load_model(model), Precision()) == name


def formats_of(placement, layer=-1):
    """Every quantised matrix of one layer -> its format."""
    kernels, layer = Kernels(placement), placement.model.layers[layer]
    return {key: kernels.of(layer, key).format for key, _ in layer.schemes}


def test_what_a_checkpoint_leaves_alone_stays_in_16_bits():
    assert formats_of(Placement(load_model("gpt-oss-120b"), H100)) == {"experts": "mxfp4"}
    placement = Placement(load_model("Kimi-K2.5"), H100)
    assert formats_of(placement) == {"experts": "int4"}
    assert formats_of(placement, 0) == {}  # the first layer is dense
    assert Kernels(placement).of(placement.model.layers[-1], "experts").weight_bytes == 0.5 + 2 / 32  # groups of 32


def test_kernels_follow_the_device():
    """A device without a rate for the format turns weights back into 16 bits (Marlin); with one it quantises inputs."""
    model = load_model("Llama-3.1-8B")
    for hardware, name, rate_of, unpacked in [
        (H100, "fp8", "fp8", False), (A100, "fp8", "bf16", True), (B200, "nvfp4", "fp4", False),
        (H100, "nvfp4", "bf16", True), (B200, "mxfp4", "fp8", False), (H100, "mxfp4", "bf16", True),
        (A100, "int8", "int8", False), (H100, "int4", "bf16", True),
    ]:  # fmt: skip
        kernel = Kernels(Placement(model, hardware, Precision(weights=name))).of(model.layers[0], "mlp.up_proj")
        assert (kernel.rate, kernel.dequantised) == (rate_of, unpacked)
        assert (kernel.activation_bytes > 0) == (not unpacked)
    device = H100.model_copy(update={"flops": {"bf16": 1e15}})
    with pytest.raises(InputError, match="has no int8 rate, which int8 needs"):
        check_modelled(Placement(model, device, Precision(weights="int8")))


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("DeepSeek-V3", 642),  # 671e9 weights in 8 bits, embedding, head, and kv_b_proj in 16
        ("gpt-oss-120b", 61),  # the model card: 60.8 GiB checkpoint
        ("Kimi-K2.5", 560),
    ],
)
def test_quantised_checkpoints_take_their_size(name, gib):
    assert weight_bytes(Placement(load_model(name), H100)) / 2**30 == pytest.approx(gib, rel=0.03)


def layer_seconds(hardware, weights, tensor, tokens, only=""):
    """The matrices of all layers of Llama-3.1-8B on one rank, or those of one name."""
    placement = Placement(load_model("Llama-3.1-8B"), hardware, Precision(weights=weights), Parallelism(tensor=tensor))
    split = zero_split(1)
    for op in forward_pass(placement):
        if op.operator_class == "gemm" and op.per == "tokens" and only in ("", op.name):
            add_time(split, op, rate(hardware, op), {"step": 1.0, "tokens": np.array([tokens])})
    return split.sum()


def test_what_quantisation_buys_depends_on_the_shard():
    """A whole matrix halves its time, an eighth of one hardly: fixed times stay."""
    gain = {n: layer_seconds(H100, "bf16", n, 1) / layer_seconds(H100, "fp8", n, 1) for n in (1, 8)}
    assert 1.3 < gain[1] < 2
    assert gain[8] < gain[1] - 0.1
    assert layer_seconds(H100, "bf16", 1, 1) / layer_seconds(H100, "int4", 1, 1) > 2.2
    # computing binds at many tokens: 4-bit weights buy nothing, and unpacking costs
    assert layer_seconds(H100, "int4", 1, 8192) > layer_seconds(H100, "bf16", 1, 8192)
    assert layer_seconds(H100, "fp8", 1, 8192) < 0.7 * layer_seconds(H100, "bf16", 1, 8192)


@needs_shared
@pytest.mark.parametrize(("system", "profile"), [("h100_sxm", "h100-sxm"), ("h200_sxm", "h200-sxm")])
def test_the_gain_of_fp8_was_measured(system, profile):
    """Time in bf16 over time in fp8 of one matrix at up to 64 tokens: small shards gain less, in the same measure."""
    parquet = pytest.importorskip("pyarrow.parquet")
    hardware = load_hardware(profile)
    filters = [("system", "=", system), ("backend", "=", "vllm"), ("m", "<=", 64)]
    rows = parquet.read_table(SHARED / "data/kernels/gemm.parquet", filters=filters).to_pylist()
    times = {}
    for row in rows:
        times.setdefault((row["m"], row["n"], row["k"]), {})[row["gemm_dtype"]] = row["latency_us"]
    gains = {"small": [], "large": []}
    for (_, n, k), measured in times.items():
        if {"bfloat16", "fp8"} <= measured.keys():
            size = 2 * n * k
            kind = "large" if size > 2.5 * hardware.l2_cache else "small" if size < hardware.l2_cache / 4 else None
            if kind:
                gains[kind].append(measured["bfloat16"] / measured["fp8"])
    small, large = np.median(gains["small"]), np.median(gains["large"])
    print(f"{system}: fp8 gains {small:.2f} on small and {large:.2f} on large matrices")
    assert len(gains["small"]) > 20
    assert small < large - 0.3
    whole = layer_seconds(hardware, "bf16", 1, 16) / layer_seconds(hardware, "fp8", 1, 16)
    assert small < whole < large + 0.3  # whose matrices are between those


@pytest.mark.parametrize(
    ("kv_cache", "head"),
    [("bf16", 256), ("fp8", 128), ("nvfp4", 64 + 8), ("int8_per_token_head", 132), ("fp8_per_token_head", 132)],
)
def test_kv_formats_take_what_vllms_specs_say(kv_cache, head):
    """Llama-3.1-8B: keys and values of 8 heads of 128 in 32 layers; bytes of one as vLLM 0.32 packs it."""
    precision = Precision(kv_cache=kv_cache)
    memory = deploy("Llama-3.1-8B", load_hardware("b200-sxm"), precision, Parallelism(), Engine()).memory
    assert memory.kv_bytes_per_token == 32 * 8 * 2 * head


def test_kv_formats_that_a_device_or_a_latent_cache_has_not():
    for model, hardware, kv_cache, message in (
        ("Llama-3.1-8B", "h100-sxm", "nvfp4", "h100-sxm has no fp4 rate"),
        ("DeepSeek-V2-Lite", "h100-sxm", "int8_per_token_head", "a latent cache has no int8_per_token_head"),
        ("DeepSeek-V3.2", "rtx-pro-6000", "bf16", "rtx-pro-6000 reads sparse latents in fp8 alone; must be fp8"),
    ):
        with pytest.raises(InputError, match=message):
            deploy(model, load_hardware(hardware), Precision(kv_cache=kv_cache), Parallelism(), Engine())
