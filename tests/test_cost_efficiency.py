"""Every efficiency is a share, has a source, and says what it is."""

from dataclasses import replace

import pytest

from infersim.config.hardware import OPERATOR_CLASSES, OperatorEfficiency, load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.published import generations, profile, published
from infersim.config.resources import names
from infersim.cost.efficiency import efficiency, launch
from infersim.cost.mixed import beside_prefill
from infersim.cost.placement import Placement
from infersim.cost.steptime import provenance
from infersim.models.catalog import load_model


@pytest.mark.parametrize("name", names("hardware_profiles"))
@pytest.mark.parametrize("operator_class", OPERATOR_CLASSES)
def test_every_profile_has_every_efficiency(name, operator_class):
    found = efficiency(load_hardware(name), operator_class, "bf16")
    assert 0 < found.bandwidth <= 1
    assert 0 < found.flops <= 1
    assert 0 <= found.fixed < 2e-4
    assert 0 <= found.softness <= 1
    assert len(found.source) > 20
    own = load_hardware(name).efficiency.keys() & {operator_class, f"{operator_class}.bf16"}
    assert (found.provenance == "calibrated") == bool(own)
    assert (found.provenance == "published") == (not own and name in published().operators.get(operator_class, ()))


def test_a_device_without_figures_takes_its_generations_and_says_so():
    found = efficiency(load_hardware("h100-nvl"), "gemm", "bf16")
    assert found.provenance == "assumed"
    assert found.source.startswith("as h100-sxm: ")
    assert found.flops == efficiency(load_hardware("h100-sxm"), "gemm", "bf16").flops
    new = load_hardware("h100-sxm").model_copy(update={"name": "new", "generation": "unheard-of", "efficiency": {}})
    assert efficiency(new, "gemm", "bf16").provenance == "assumed"


def test_another_dtype_is_an_assumption():
    assert efficiency(load_hardware("h100-sxm"), "gemm", "fp32").provenance == "assumed"


def test_the_profile_comes_first():
    mine = OperatorEfficiency(bandwidth=0.5, flops=0.5, fixed=1e-6, softness=0.17, provenance="measured", source="here")
    finer = mine.model_copy(update={"flops": 0.4})
    device = load_hardware("h100-sxm").model_copy(update={"efficiency": {"gemm": mine, "gemm.bf16": finer}})
    assert efficiency(device, "gemm", "bf16") is finer
    assert efficiency(device, "gemm", "fp16") is mine
    assert efficiency(device, "elementwise", "bf16").provenance != "measured"


def test_every_chain_ends_at_a_figure():
    """And what a generation takes from elsewhere is there."""
    figures = published()
    for generation in generations().values():
        for table in (*figures.operators.values(), figures.launch):
            assert any(name in table for name in (*generation.efficiencies_of, *generations()["other"].efficiencies_of))
        assert generation.attention_kernels in figures.attention_kernels
        assert generation.beside_prefill is None or profile(generation.beside_prefill).beside_prefill


def test_a_device_of_a_new_generation_takes_those_of_the_one_it_names():
    """With its generation's kernels: a tile's keys, and what decodes cost beside a prefill."""
    known = load_hardware("rtx-4090")
    changes = {"name": "new", "generation": "unheard-of", "efficiency": {}, "beside_prefill": None}
    new = known.model_copy(update={**changes, "efficiencies_of": "rtx-4090"})
    for operator_class in ("gemm", "attention_prefill", "attention_decode", "elementwise"):
        found, theirs = (efficiency(device, operator_class, "bf16") for device in (new, known))
        assert found.provenance == "assumed"
        assert (found.bandwidth, found.flops, found.terms) == (theirs.bandwidth, theirs.flops, theirs.terms)
    assert beside_prefill(new) == known.beside_prefill
    assert beside_prefill(new.model_copy(update={"efficiencies_of": "h100-sxm"})) is None


def test_a_graph_launches_faster():
    for name in names("hardware_profiles"):
        times = launch(load_hardware(name))
        assert 0 < times.graph < times.eager


def test_provenance_lists_what_a_price_rests_on():
    placement = Placement(load_model("Llama-3.1-8B"), load_hardware("h100-sxm"), parallelism=Parallelism(tensor=2))
    rows = provenance(placement)
    layers = {"gemm", "attention_prefill", "attention_decode", "elementwise"}
    assert {row["operator"] for row in rows} == {*layers, "all_reduce", "all_gather", "launch"}
    keys = {"operator", "dtype", "bandwidth", "flops", "fixed", "softness", "provenance", "source"}
    assert all(set(row) == keys for row in rows)
    assert {row["operator"] for row in provenance(replace(placement, parallelism=Parallelism()))} == {*layers, "launch"}


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm"])
def test_int4_experts_reach_marlins_share_where_no_table_has_them(name):
    """0.63 (Hopper's mma.sync) of what Marlin's own tables reach on devices that multiply with nothing else."""
    found = efficiency(load_hardware(name), "moe", "int4")
    assert found.provenance == "assumed"
    measured = [
        efficiency(load_hardware("a100-sxm-80gb"), "moe", "int4"),
        efficiency(load_hardware("l40s"), "moe", "mxfp4"),
    ]
    for own in measured:
        assert found.flops == pytest.approx(0.63 * own.flops, rel=0.02)
    assert found.softness == pytest.approx(max(own.softness for own in measured), abs=0.01)
