"""Hardware profiles: what is shipped is complete, possible, sourced, and equal to the collected facts."""

import csv

import pytest
from shared import SHARED, needs_shared

from infersim.config.errors import InputError
from infersim.config.hardware import Correction, Hardware, OperatorEfficiency, load_hardware
from infersim.config.resources import names

ROWS = {
    "a100-sxm-40gb": "A100 SXM 40GB", "a100-sxm-80gb": "A100 SXM 80GB", "a100-pcie-80gb": "A100 PCIe 80GB",
    "h100-sxm": "H100 SXM 80GB", "h100-pcie": "H100 PCIe 80GB", "h100-nvl": "H100 NVL 94GB",
    "h200-sxm": "H200 SXM 141GB", "b200-sxm": "B200 SXM 180GB", "b300-sxm": "B300 SXM 288GB",
    "gb200": "GB200 (per GPU)", "l4": "L4", "l40s": "L40S", "a10": "A10", "rtx-3090": "RTX 3090",
    "rtx-4090": "RTX 4090", "rtx-pro-6000": "RTX PRO 6000 Blackwell Server", "mi300x": "MI300X", "mi325x": "MI325X",
    "mi355x": "MI355X", "tpu-v5e": "TPU v5e", "tpu-v6e": "TPU v6e", "gb300": "GB300 (per GPU)", "h20": "H20 96GB",
    "h200-nvl": "H200 NVL 141GB", "a100-pcie-40gb": "A100 PCIe 40GB", "a10g": "A10G", "rtx-a6000": "RTX A6000",
    "a40": "A40", "rtx-5090": "RTX 5090", "rtx-6000-ada": "RTX 6000 Ada", "t4": "T4",
    "v100-sxm2-32gb": "V100 SXM2 32GB", "gaudi3": "Gaudi 3", "tpu-v5p": "TPU v5p", "tpu-v7": "TPU v7x Ironwood",
    "trainium2": "Trainium2", "inferentia2": "Inferentia2", "arc-pro-b60": "Intel Arc Pro B60",
}  # fmt: skip
ELSEWHERE = {
    "a30", "dgx-spark", "h800", "l40", "m3-ultra", "m4-max", "mi210", "mi250x", "mi350x", "mi455x", "rubin-cpx",
    "tpu-v4", "trainium3", "vera-rubin",
}  # fmt: skip
"""profiles from other sources than the collected facts"""
WITHOUT_SMS = {"mi455x", "vera-rubin", "rubin-cpx"}
"""announced: the inside of the chip is not published"""
PROFILES = {name: load_hardware(name) for name in names("hardware_profiles")}


def test_every_listed_device_has_a_profile():
    assert set(PROFILES) == {*ROWS, *ELSEWHERE}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_profile_is_possible_and_sourced(profile):
    """Usable memory is part of the capacity; smaller formats are not slower on matrix units; sources are named."""
    assert profile.memory_usable <= profile.memory_capacity
    assert profile.memory_usable > (0.7 if profile.vendor == "apple" else 0.9) * profile.memory_capacity
    half = profile.flops.get("bf16") or profile.flops["fp16"]  # Volta and Turing have no bf16
    assert half >= profile.flops.get("tf32", profile.flops.get("fp32", 0))
    assert profile.flops.get("fp8", half) >= half
    assert any("memory_usable" in source for source in profile.sources)
    assert len(profile.sources) >= 2
    # a token of a 7e9-parameter model in bf16 takes 14e9 bytes: more than one device of any kind reads in 0.5 ms
    assert 5e-4 < 14e9 / profile.memory_bandwidth < 0.1
    if profile.vendor in ("nvidia", "amd") and profile.name not in WITHOUT_SMS:
        assert profile.num_sms
        assert profile.shared_memory_per_sm
        assert profile.l2_cache
        assert profile.pcie_bandwidth <= 450e9


@needs_shared
@pytest.mark.parametrize("name", ROWS)
def test_profile_equals_the_collected_facts(name):
    profile = PROFILES[name]
    with (SHARED / "facts" / "hardware.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["gpu"] == ROWS[name])
    assert profile.memory_bandwidth == float(row["mem_bw_GBs"]) * 1e9
    assert profile.link.bandwidth == float(row["link_GBs_per_dir"]) * 1e9
    assert profile.link.domain_size == int(row["scaleup_world"])
    assert profile.tdp == (float(row["tdp_w"]) if row["tdp_w"] else None)
    sixteen = "bf16" if "bf16" in profile.flops else "fp16"
    for dtype, column in {
        sixteen: "bf16_tflops",
        "fp8": "fp8_tflops",
        "int8": "int8_tops",
        "fp4": "fp4_tflops",
    }.items():
        assert profile.flops.get(dtype) == (float(row[column]) * 1e12 if row[column] else None)


def test_name_in_any_case_and_near_names():
    assert load_hardware("H100-SXM") == PROFILES["h100-sxm"]
    with pytest.raises(InputError, match=r"'h100': no such .*; did you mean h100-nvl or h100-pcie or h100-sxm\?"):
        load_hardware("h100")
    with pytest.raises(InputError, match=r"'h101': .*did you mean h100-nvl or h100-pcie or h100-sxm\?"):
        load_hardware("h101")
    with pytest.raises(InputError, match=r"'k80': no such hardware profile or file; nearest of \d+ known: \w"):
        load_hardware("k80")


def test_a_number_whose_unit_was_forgotten_is_no_device():
    """3.35 is a bandwidth in TB/s, not in B/s."""
    data = PROFILES["h100-sxm"].model_dump()
    data |= {"memory_capacity": 80, "memory_bandwidth": 3350, "flops": {"bf16": 989}}
    with pytest.raises(InputError) as error:
        Hardware.validate(data, "x.yaml")
    assert [line.split(" (got")[0] for line in error.value.problems] == [
        f"x.yaml: {key}: must be at least {least}; a number without a unit is in bytes or FLOPs"
        for key, least in (("memory_capacity", "1 MB"), ("memory_bandwidth", "1 MB/s"), ("flops.bf16", "1 MFLOP/s"))
    ]


def test_all_problems_of_a_profile_at_once():
    data = PROFILES["h100-sxm"].model_dump()
    data |= {"memory_bandwidht": 1, "memory_usable": "80 GHz", "tdp": -5, "flops": {"fp8": 0, "bf17": 1}}
    data["efficiency"] = {"gemm": {"bandwidth": 1.2, "flops": 0.5, "fixed": 0, "softness": 1.5, "provenance": "guess"}}
    with pytest.raises(InputError) as error:
        Hardware.validate(data, "x.yaml")
    starts = [line.split(":")[:2] for line in error.value.problems]
    for key in (
        "memory_usable", "flops.fp8", "flops.bf17", "tdp", "memory_bandwidht", "efficiency.gemm.bandwidth",
        "efficiency.gemm.softness", "efficiency.gemm.provenance", "efficiency.gemm.source",
    ):  # fmt: skip
        assert ["x.yaml", f" {key}"] in starts


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("gem", "did you mean gemm"),
        ("gemm.bf17", "did you mean bf16"),
        ("x", "nearest of 13 known: "),
        ("all_reduce.bf16@trtlm", "did you mean trtllm"),
    ],
)
def test_efficiency_keys_are_known(key, message):
    data = PROFILES["h100-sxm"].model_dump()
    data["efficiency"] = {
        key: {"bandwidth": 1, "flops": 1, "fixed": 0, "softness": 0.17, "provenance": "assumed", "source": "test"}
    }
    with pytest.raises(InputError, match=message):
        Hardware.validate(data, "x.yaml")


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("gemm.bf16", {"tile_deph": 200}, "terms.tile_deph is no term of gemm; did you mean tile_depth?"),
        ("gemm.bf16", {"small_tile": None}, "terms must give small_tile too"),
        ("all_reduce.bf16", {"library_bandwidth": 5.9}, "library_bandwidth is a share; must be above 0 and at most 1"),
        ("all_reduce.bf16", {"library_bandwidth": 0}, "library_bandwidth is a share; must be above 0 and at most 1"),
        ("all_reduce.bf16@trtllm", {"library_fixed": None}, "terms must give library_fixed too"),
        ("all_reduce.bf16", {"switch_fixed": None}, "both switch_fixed and switch_bandwidth, or neither"),
        ("all_gather.bf16", {"quick_bandwidth": None}, "terms must give quick_bandwidth too"),
    ],
)
def test_a_law_has_all_of_its_terms_and_no_share_above_one(key, change, message):
    data = PROFILES["h100-sxm"].model_dump(mode="json")
    terms = data["efficiency"][key]["terms"] | change
    data["efficiency"][key]["terms"] = {name: value for name, value in terms.items() if value is not None}
    with pytest.raises(InputError, match=message):
        Hardware.validate(data, "x.yaml")


def test_a_correction_has_the_axes_of_its_class():
    data = PROFILES["h100-sxm"].model_dump(mode="json")
    data["efficiency"]["gemm.bf16"]["correction"] = {"axes": {"work": [0, 1, 2]}, "values": "0 0"}
    with pytest.raises(InputError, match=r"gemm.bf16.correction.axes must be m, n, k \(got work\)"):
        Hardware.validate(data, "x.yaml")


def test_a_correction_means_the_same_however_its_axes_are_written():
    """A resolved scenario goes through tools that sort keys, and so do its profile's corrections."""
    shares = load_hardware("l40s").model_dump(mode="json")["efficiency"]["gemm.bf16"]
    shares["correction"]["axes"] = dict(sorted(shares["correction"]["axes"].items()))
    correction = OperatorEfficiency.validate(shares, "x").correction
    assert list(correction.axes) == ["m", "n", "k"]
    assert correction == load_hardware("l40s").efficiency["gemm.bf16"].correction
    with pytest.raises(InputError, match="x is none; must be of m, n, k"):
        Correction.validate({"axes": {"x": [0, 1, 2]}, "values": "0 0"}, "here")
