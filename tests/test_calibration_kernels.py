"""Kernel laws: what is fitted is what the engine is priced with, a fit finds what made the table, and the shipped
profiles reach the errors that they state on shapes that they were not fitted to."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from shared import SHARED, needs_shared
from typer.testing import CliRunner

from infersim.calibration.classes import CLASSES, MATRICES, known
from infersim.calibration.fit import Parameter, fit_grid, mean_error, search
from infersim.calibration.guard import MOST, errors_by_shape
from infersim.calibration.kernel_profile import with_efficiency
from infersim.calibration.kernels import calibrate, choose, fit, layout_change, slower_than_wider, soundness
from infersim.calibration.tables import Rows, held_out, read, read_all
from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.hardware import DTYPES, Hardware, load_hardware
from infersim.config.precision import FORMATS
from infersim.config.resources import names, parse_yaml
from infersim.cost.collectives import collective
from infersim.cost.correction import exp2, interpolate
from infersim.cost.efficiency import efficiency
from infersim.cost.moe import Routing
from infersim.cost.operator import Operator
from infersim.cost.roofline import add_time, rate, zero_split
from infersim.engine.compiled.law import log2

sys.path.insert(0, str(Path(__file__).parent / "fidelity"))
H100 = load_hardware("h100-sxm")


def predicted(hardware, operator_class, dtype, **columns):
    """The calibration's own prediction of one row per value."""
    columns = dict(zip(columns, np.broadcast_arrays(*map(np.asarray, columns.values())), strict=True))
    columns = {name: np.atleast_1d(np.asarray(column, dtype=float)) for name, column in columns.items()}
    rows = Rows(operator_class, dtype, "", columns, np.ones(len(next(iter(columns.values())))))
    return CLASSES[operator_class].predict(hardware.efficiency[f"{operator_class}.{dtype}"], hardware, rows)


def priced(operator, hardware, **sums):
    shape = np.broadcast_shapes(*(np.shape(value) for value in sums.values()))
    split = zero_split(*shape)
    add_time(split, operator, rate(hardware, operator), {"step": 1.0, **sums})
    assert (split >= 0).all()
    return split.sum(-1)


@pytest.mark.parametrize(("device", "dtype"), [("h100-sxm", "bf16"), ("h100-sxm", "fp8"), ("h200-sxm", "int4"),
                                               ("b200-sxm", "nvfp4"), ("a100-sxm-80gb", "bf16")])  # fmt: skip
def test_a_matrix_is_priced_as_it_was_fitted(device, dtype):
    hardware, m = load_hardware(device), np.array([1, 7, 16, 33, 128, 500, 1025, 8192])
    weight, _, arithmetic, moved = MATRICES[dtype]
    for n, k in ((6144, 4096), (4096, 14336), (57344, 8192), (128, 2048)):
        operator = Operator(
            "x", "gemm", dtype, 1, "tokens", flops={"tokens": 2 * n * k}, weights={"step": n * k * weight},
            activations={"tokens": 1.0}, rate=arithmetic,
            shape={"n": n, "k": k, "quantised": MATRICES[dtype][1] if moved else 0.0},
        )  # fmt: skip
        want = predicted(hardware, "gemm", dtype, m=m, n=n, k=k)
        assert priced(operator, hardware, tokens=m) == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_attention_is_priced_as_it_was_fitted(phase):
    queries = np.array([1, 16, 200, 2048])
    pairs = queries * np.array([5.5, 900, 100, 4000])
    for heads, kv_heads, head_dim in ((32, 8, 128), (8, 1, 64), (16, 16, 128)):
        names = {"prefill": ("prefill_pairs", "prefill_keys", "prefill_tokens"),
                 "decode": ("decode_keys", "decode_keys", "decodes")}[phase]  # fmt: skip
        operator = Operator(
            "x", f"attention_{phase}", "bf16", 1, names[2], flops={names[0]: 4 * heads * head_dim},
            kv={names[1]: 4 * kv_heads * head_dim}, activations={names[2]: 4 * heads * head_dim},
            shape={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        )  # fmt: skip
        keys = pairs if phase == "decode" else 2 * queries
        sums = {names[0]: pairs, names[1]: keys, names[2]: queries, "query_tiles": np.ceil(queries / 128)}
        want = predicted(H100, f"attention_{phase}", "bf16", heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                         queries=queries, keys=keys, pairs=pairs, tiles=np.ceil(queries / 128))  # fmt: skip
        assert priced(operator, H100, **sums) == pytest.approx(want, rel=1e-6)


def test_experts_are_priced_as_they_were_fitted():
    """All 64 experts are touched, each by as many tokens."""
    tokens, hidden, inter = np.array([4096, 16384]), 4096, 1024
    routed = tokens * 4.0
    weight = MATRICES["bf16"][0]
    per_token = (hidden + inter) * 2 + (2 * inter + hidden) * 2
    operator = Operator(
        "experts", "moe", "bf16", 1, "tokens", flops={"expert_tokens": 6 * hidden * inter},
        weights={"experts": 3 * hidden * inter * weight},
        activations={"expert_tokens": per_token + hidden * 2, "tokens": hidden * 2}, routing=Routing(64, 4),
        shape={"hidden": hidden, "inter": inter, "quantised": 0.0},
    )  # fmt: skip
    want = predicted(H100, "moe", "bf16", tokens=tokens, hidden=hidden, inter=inter, held=64, routed=routed, touched=64,
                     chosen=routed)  # fmt: skip
    assert priced(operator, H100, tokens=tokens) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_is_priced_as_it_was_fitted(kind):
    size = np.array([512, 2**18, 2**22, 2**26, 2**29])
    for ranks in (2, 4, 8):
        want = predicted(H100, kind, "bf16", ranks=ranks, size=size)
        assert collective(H100, kind, "bf16", ranks).seconds(size) == pytest.approx(want)


def test_no_shipped_law_beats_physics():
    """Matrices and decodes of many shapes, on every device with a calibration."""
    m = np.array([1, 16, 256, 4096])
    for name in ("h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm-80gb", "l40s", "rtx-4090", "rtx-pro-6000"):
        hardware = load_hardware(name)
        for n in (256, 4096, 65536):
            for k in (512, 8192):
                seconds = predicted(hardware, "gemm", "bf16", m=m, n=n, k=k)
                assert (seconds >= 2 * m * n * k / hardware.flops["bf16"]).all()
                assert (seconds >= 2 * n * k / hardware.memory_bandwidth).all()


# --- fitting ----------------------------------------------------------------------------------------------------------
def test_log2_is_straight_between_powers_of_two():
    x = np.array([0.25, 1.0, 1.5, 3.0, 1024.0, 1536.0])
    assert log2(x) == pytest.approx([-2, 0, 0.5, 1.5, 10, 10.5])
    assert exp2(log2(x)) == pytest.approx(x)


def test_interpolation_is_multilinear():
    axes = [(0.0, 4.0, 3), (1.0, 2.0, 2), (5.0, 5.0, 1)]
    values = np.arange(6.0).reshape(3, 2, 1)
    x, y = np.array([1.0, 4.0, 9.0]), np.array([1.5, 2.0, 1.0])
    assert interpolate(values, axes, [x, y, np.full(3, 7.0)]) == pytest.approx([1.5, 5.0, 4.0])  # constant beyond
    assert interpolate(values, axes, [x, 1.5, 0.0]) == pytest.approx([1.5, 4.5, 4.5])


def test_search_finds_the_least():
    found = search(
        lambda v: (np.log(v["a"]) - np.log(0.3)) ** 2 + (v["b"] - 40.0) ** 2 / 1e4,
        [Parameter("a", 0.9, 0.01, 1.0), Parameter("b", 100, 0, 200, ratio=False)],
    )
    assert found["a"] == pytest.approx(0.3, rel=0.02)
    assert found["b"] == pytest.approx(40, abs=1)


def test_a_grid_follows_the_median_and_its_neighbours():
    draw = np.random.default_rng(0)
    x, y = draw.uniform(0, 8, 2000), draw.uniform(0, 4, 2000)
    truth = 0.1 * x - 0.05 * y
    noisy = truth + np.where(draw.random(2000) < 0.1, 3.0, draw.normal(0, 0.01, 2000))  # one in ten went wrong
    axes = [(0.0, 8.0, 5), (0.0, 6.0, 4)]  # no row beyond 4
    grid = fit_grid(axes, [x, y], noisy, 0.1)
    assert interpolate(grid, axes, [x, y]) == pytest.approx(truth, abs=0.03)
    assert np.abs(np.diff(grid[:, -2:])).max() < 0.25
    assert mean_error(np.array([0.1, -0.1, 9.0])) == pytest.approx((0.1 + 0.1 + 0.5) / 3)


def made_up_table(bandwidth=0.8, fixed=4e-6):
    """GEMMs of a device whose law is a plain roofline: bytes at 0.8 of H100's bandwidth, FLOPs at 0.7 of its rate."""
    shapes = [(n, k) for n in (4096, 8192, 14336, 28672, 57344) for k in (4096, 8192, 12288, 16384)]
    rows = [(m, n, k) for n, k in shapes for m in (1, 4, 16, 64, 256, 1024, 4096)]
    m, n, k = np.array(rows, dtype=float).T
    memory = 2 * (n * k + m * k + m * n) / (bandwidth * H100.memory_bandwidth)
    compute = 2 * m * n * k / (0.7 * H100.flops["bf16"])
    return pd.DataFrame({"m": m, "n": n, "k": k, "gemm_dtype": "bfloat16",
                         "latency_us": 1e6 * (fixed + np.maximum(memory, compute))})  # fmt: skip


def test_the_command_finds_what_made_the_table(tmp_path):
    table, out = tmp_path / "gemm.csv", tmp_path / "mine.yaml"
    made_up_table().to_csv(table, index=False)
    result = CliRunner().invoke(app, ["calibrate", "kernels", str(table), "--hardware", "h100-nvl", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "held-out shapes: median" in result.output
    mine = load_hardware(str(out))
    found = mine.efficiency["gemm.bf16"]
    assert found.provenance == "calibrated"
    assert found.source == "gemm.csv"
    assert mine.memory_bandwidth == load_hardware("h100-nvl").memory_bandwidth
    again = CliRunner().invoke(app, ["calibrate", "kernels", str(table), "--hardware", "h100-nvl", "--out", str(out)])
    assert again.exit_code == 2
    assert "--force" in again.output


def test_a_fit_predicts_what_it_has_not_seen():
    table = made_up_table()
    rows = Rows("gemm", "bf16", "", {name: table[name].to_numpy() for name in "mnk"}, table.latency_us.to_numpy() / 1e6)
    shares = fit(rows, H100, "made up")
    assert shares.bandwidth == pytest.approx(0.8, rel=0.15)
    assert shares.fixed == pytest.approx(4e-6, rel=0.5)
    test = held_out(rows, ("n", "k"))
    assert 0.2 < test.mean() < 0.8
    unseen = rows.where(test)
    off = np.abs(CLASSES["gemm"].predict(shares, H100, unseen) / unseen.seconds - 1)
    assert np.median(off) < 0.03
    assert np.quantile(off, 0.9) < 0.12


def test_one_kernel_measured_a_hundred_times_is_no_table():
    row = pd.concat([made_up_table().tail(1)] * 100)
    rows = Rows("gemm", "bf16", "", {name: row[name].to_numpy() for name in "mnk"}, row.latency_us.to_numpy() / 1e6)
    assert fit(rows, H100, "made up") is None


def test_times_in_a_wrong_unit_are_seen():
    table = made_up_table()
    seconds = table.latency_us.to_numpy() / 1e9
    rows = Rows("gemm", "bf16", "", {name: table[name].to_numpy() for name in "mnk"}, seconds)
    with pytest.raises(InputError, match=f"got {len(rows)} rows .* {len(rows)} faster than h100-sxm can be"):
        calibrate([rows], H100, "made up")


def test_software_without_a_version_is_read_too(tmp_path):
    made_up_table().assign(backend="vllm", version=np.nan).to_csv(tmp_path / "t.csv", index=False)
    (rows,) = read(tmp_path / "t.csv", H100)
    assert len(rows) == len(made_up_table())
    assert rows.software == "vllm"


def test_rows_that_a_cache_may_have_served_do_not_count():
    columns = {"m": np.array([1.0, 1.0, 1.0]), "n": np.array([1024.0, 32768.0, 32768.0]), "k": np.full(3, 4096.0)}
    moved = 2 * columns["n"] * columns["k"]
    seconds = moved / H100.memory_bandwidth * np.array([1.5, 1.5, 0.8])
    sound = soundness(Rows("gemm", "bf16", "", columns, seconds), H100)
    assert sound.cold.tolist() == [False, True, False]
    assert (sound.cached, sound.impossible) == (1, 1)


def test_a_profile_is_written_as_it_is_read():
    path = Path(__file__).parents[1] / "hardware_profiles/h100-sxm.yaml"
    text = path.read_text(encoding="utf-8")
    assert with_efficiency(text, H100.efficiency) == text
    assert Hardware.validate(parse_yaml(text, "x"), "x") == H100


ATTENTION = "kv_cache_dtype,batch_size,isl,num_heads,num_key_value_heads,head_dim,step,latency_us,window_size"
EXPERTS = "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_ep_size,distribution,latency_us"
LAYERS = "hardware,model,tp,layer,tokens,time_us"
BATCHES = "hardware,model,tp,prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "no table of kernels that infersim knows; columns must include one of"),
        ("m,n,k,gemm_dtype,latency_us\n1,2,3,bfloat16,-4\n", "latency_us must be a number above 0 in every row"),
        ("m,n,k,gemm_dtype,latency_us\n1,,3,bfloat16,4\n", "n must be a whole number >= 1 in every row"),
        ("m,n,k,gemm_dtype,latency_us\nx,2,3,bfloat16,4\n", "m must be a whole number >= 1 in every row"),
        ("m,n,k,gemm_dtype,latency_us\n1,2,0,bfloat16,4\n", "k must be a whole number >= 1 in every row"),
        ("m,n,k,gemm_dtype,latency_us\n1.5,2,3,bfloat16,4\n", "m must be a whole number >= 1 in every row"),
        ("allreduce_dtype,num_gpus,bytes,latency_us\nhalf,1,1024,4\n", "num_gpus must be a whole number >= 2"),
        (f"{ATTENTION}\nbfloat16,1,1,32,0,128,100,4,0\n", "num_key_value_heads must be a whole number >= 1"),
        (f"{ATTENTION}\nbfloat16,1,1,32,8,128,100,4,\n", "window_size must be a whole number >= 0"),
        (f"{EXPERTS}\nfp8,1,2048,512,2,8,1,balanced,4\n", "no table of kernels that infersim knows"),
        (f"{LAYERS}\nh100-sxm,Llama-3.1-8B,3,qkv_proj,1,4\n", "column tp: must divide the 32 heads of Llama-3.1-8B"),
        (f"{LAYERS}\nh100-sxm,Llama-3.1-8B,0,qkv_proj,1,4\n", "tp must be a whole number >= 1 in every row"),
        (f"{BATCHES}\nh100-sxm,Llama-3.1-8B,5,16,0,0,0,4\n", "column tp: must divide the 32 heads of Llama-3.1-8B"),
        ("", "cannot be read as a table"),
        ("m,n,k,gemm_dtype,latency_us,system\n1,2,3,bfloat16,4,abacus\n", "holds no kernel of h100-sxm"),
    ],
)
def test_a_wrong_table_is_refused_in_a_line(content, message, tmp_path):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(InputError) as error:
        read(tmp_path / "t.csv", H100)
    (line,) = error.value.problems
    assert line.startswith(str(tmp_path / "t.csv"))
    assert message in line
    assert "\n" not in line


# --- the shipped profiles ---------------------------------------------------------------------------------------------
REACH = {  # class, dtype, devices -> median and 90th percentile in percent
    ("gemm", "bf16", ("h100-sxm", "h200-sxm", "b200-sxm")): (5, 15),
    ("gemm", "bf16", ("a100-sxm-80gb",)): (5, 17),
    ("gemm", "fp8", ("h100-sxm", "h200-sxm")): (8, 25),
    ("attention_prefill", "bf16", ("h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm-80gb")): (6, 20),
    ("attention_decode", "bf16", ("h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm-80gb")): (6, 22),
    ("all_reduce", "bf16", ("h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm-80gb")): (8, 25),
}


@needs_shared
def test_the_profiles_reach_their_errors_on_held_out_shapes():
    import kernels

    if not (SHARED / "data/kernels/gemm.parquet").exists():
        pytest.skip("no measured kernels")
    entries = kernels.evaluate(SHARED / "data")
    found = {(e["op"], e["dtype"], e["system"]): e for e in entries if e["split"] == "held_out"}
    for (operator_class, dtype, devices), (median, p90) in REACH.items():
        for device in devices:
            entry = found[operator_class, dtype, device]
            assert entry["median_pct"] <= median, entry
            assert entry["p90_pct"] <= p90, entry
            stated = load_hardware(device).efficiency[f"{operator_class}.{dtype}"].errors["held-out shapes"]
            assert abs(float(stated.split("%")[0].split()[-1]) - entry["median_pct"]) < 0.11, stated


def experts(dtype: str, times: float) -> Rows:
    """Experts on a device that reaches 80 % of its bandwidth, `times` slower."""
    tokens, held, inter = (x.ravel() for x in np.meshgrid(2.0 ** np.arange(13), [8.0, 32, 128], [512.0, 1024, 4096]))
    hidden = np.full(len(tokens), 4096.0)
    columns = {"tokens": tokens, "hidden": hidden, "inter": inter, "held": held, "routed": 2 * tokens,
               "touched": np.clip(2 * tokens, 1, held), "chosen": 2 * tokens}  # fmt: skip
    rows = Rows("moe", dtype, "vllm 1.0", columns, np.ones(len(tokens)), kernels=(f"kernel_of_{dtype}",))
    return replace(rows, seconds=times * (2e-5 + CLASSES["moe"].work(H100, rows).floor(H100) / 0.8))


def test_a_narrow_format_that_is_slower_than_16_bits_is_not_the_devices():
    tables = [experts("bf16", 1.0), experts("fp8", 4.0), experts("fp8_block", 1.0)]
    assert [*slower_than_wider(tables, H100)] == ["moe.fp8"]
    found = calibrate(tables, H100, "made up")
    fp8, block = found["moe.fp8"], found["moe.fp8_block"]
    assert (fp8.bandwidth, fp8.fixed, fp8.provenance) == (block.bandwidth, block.fixed, "assumed")
    assert fp8.source.startswith("as moe.fp8_block, for kernel_of_fp8 of vllm 1.0 takes 2.")
    assert block.source == "made up, vllm 1.0, kernel_of_fp8_block"
    assert "moe.fp8" not in calibrate(tables[:2], H100, "made up"), "no law rather than a wrong one"


def test_a_layout_change_that_only_a_benchmark_pays_is_found():
    """Block-scaled GEMMs that take 8 us longer than plain FP8 at any small size: 8 us; those that take 1: nothing."""
    m, n, k = (x.ravel() for x in np.meshgrid([1.0, 8, 64, 4096], [512.0, 1024], [256.0, 512]))
    plain = Rows("gemm", "fp8", "", {"m": m, "n": n, "k": k}, 5e-6 + m * 1e-8)
    for excess, found in ((8e-6, 8e-6), (1e-6, 0.0)):
        blocks = replace(plain, dtype="fp8_block", seconds=plain.seconds + excess * (m < 100))
        assert layout_change(blocks, plain) == pytest.approx(found)


# Device -> how many shapes laws may miss by more than 25 %, of some hundreds; the profile must name them.
NAMED = {"h100-sxm": 1, "h200-sxm": 2, "b200-sxm": 14, "l40s": 2, "a100-sxm-80gb": 2}


@needs_shared
@pytest.mark.parametrize("device", [name for name in names("hardware_profiles") if load_hardware(name).efficiency])
def test_every_law_holds_for_every_model_or_its_profile_names_it(device):
    """Every calibrated profile, every model of the catalogue on 1, 2, 4 and 8 ranks: within 25 % in the median of the
    rows of each shape; no fixed time above the fastest kernel's and no narrow format slower than 16 bits unsaid."""
    if not (SHARED / "data/kernels/moe.parquet").exists():
        pytest.skip("no measured kernels")
    hardware, judged, named = load_hardware(device), 0, []
    tables = [rows for rows in read_all(SHARED / "data/kernels", hardware) if known(rows)]
    slow = slower_than_wider(tables, hardware)
    for rows in choose(tables, hardware):
        key = f"{rows.operator_class}.{rows.dtype}"
        shares = hardware.efficiency.get(key)
        assert key not in slow
        if shares is None:
            continue
        sound = soundness(rows, hardware)
        assert shares.fixed <= 1.001 * rows.seconds[sound.usable].min() or "caution" in shares.errors, key
        if rows.operator_class == "moe":
            assert shares.fixed <= 1.001 * rows.seconds.min(), key
            wide = CLASSES["moe"].predict(hardware.efficiency["moe.bf16"], hardware, replace(rows, dtype="bf16"))
            narrow = CLASSES["moe"].predict(shares, hardware, rows)
            assert rows.dtype == "bf16" or np.median(narrow / wide) < 1.0, key
        for shape, (off, who) in errors_by_shape(shares, hardware, rows.where(sound.cold)).items():
            judged += len(who)
            if abs(off) > MOST:
                named.append((key, shape))
                assert f"{shape} {off:+.0%}" in shares.errors.get("beyond 25 %", ""), (key, who)
    assert {*slow} <= {"moe.fp8"}
    assert all(hardware.efficiency[key].provenance == "assumed" for key in slow)
    assert judged >= 20
    assert len(named) <= NAMED.get(device, 0), named


@pytest.mark.parametrize("device", names("hardware_profiles"))
def test_experts_borrow_from_experts(device):
    """In any format, on any device: never from plain matrices, since some device's experts were measured."""
    hardware = load_hardware(device)
    for weights in (*DTYPES, *FORMATS):
        assert "as gemm" not in efficiency(hardware, "moe", weights).source, weights
