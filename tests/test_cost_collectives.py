"""Collectives: bytes on the wire by algorithm, lines in the size, links and networks."""

import numpy as np
import pytest

from infersim.config.hardware import OperatorEfficiency, load_hardware, with_kernels_of
from infersim.config.parallelism import Parallelism
from infersim.config.resources import names
from infersim.cost.collectives import ALGORITHMS, NETWORK_BANDWIDTH, collective, wire_factor
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.models.catalog import load_model

KINDS = tuple(ALGORITHMS)


def test_bytes_on_the_wire():
    """Textbook factors: what a rank sends per byte of the message."""
    assert wire_factor("all_reduce", "ring", 8) == wire_factor("all_reduce", "two_shot", 8) == 2 * 7 / 8
    assert wire_factor("all_reduce", "one_shot", 8) == 7
    assert wire_factor("all_reduce", "in_switch", 8) == 1 + 1 / 8
    assert wire_factor("all_gather", "direct", 8) == wire_factor("all_to_all", "direct", 8) == 7 / 8
    for ranks in (2, 4, 8):  # no algorithm sends less than reading the sum takes
        assert all(wire_factor("all_reduce", name, ranks) >= 1 for name in ("one_shot", "ring", "in_switch"))


@pytest.mark.parametrize("name", names("hardware_profiles"))
@pytest.mark.parametrize("kind", KINDS)
def test_no_collective_beats_its_link(name, kind):
    hardware = load_hardware(name)
    for ranks in (2, 4, 8):
        size = np.array([1e3, 1e6, 1e9])
        seconds = collective(hardware, kind, "bf16", ranks).seconds(size)
        inside = hardware.link.domain_size == 1 or ranks <= hardware.link.domain_size
        link = hardware.link.bandwidth if inside else hardware.pcie_bandwidth
        switched = ("in_switch",) * (kind == "all_reduce" and hardware.link.in_switch_reduction)
        least = min(wire_factor(kind, algorithm, ranks) for algorithm in (*ALGORITHMS[kind], *switched))
        if link:
            assert (seconds >= least * size / link).all()
        assert (np.diff(seconds) > 0).all()


@pytest.mark.parametrize("name", ["rtx-pro-6000", "l40"])  # calibrated, and not
def test_a_given_link_rules_where_devices_meet_over_pcie(name):
    """With a domain of 1 the link is PCIe as it is in this box; pcie_bandwidth is the way to the host."""
    hardware = load_hardware(name)
    slow = hardware.link.model_copy(update={"bandwidth": 0.375 * hardware.link.bandwidth})
    size = np.array([2**26, 2**28])
    before, after, host = (
        np.diff(collective(each, "all_reduce", "bf16", 2).seconds(size))
        for each in (hardware, *(hardware.model_copy(update=u) for u in ({"link": slow}, {"pcie_bandwidth": 1e9})))
    )
    assert after == pytest.approx(before / 0.375, rel=1e-3)
    assert host == before


def test_small_messages_go_in_one_shot_and_large_ones_in_two():
    own = OperatorEfficiency(bandwidth=0.5, flops=1, fixed=5e-6, softness=0, provenance="assumed", source="test")
    hardware = load_hardware("h100-sxm").model_copy(update={"efficiency": {"all_reduce": own}})
    switched, link = collective(hardware, "all_reduce", "bf16", 8), 0.5 * hardware.link.bandwidth
    law = collective(_without_switches(hardware), "all_reduce", "bf16", 8)
    assert law.seconds(2048) == switched.seconds(2048) == pytest.approx(5e-6 + 7 * 2048 / link)
    assert law.seconds(2**26) == pytest.approx(1e-5 + 2 * 7 / 8 * 2**26 / link)
    assert switched.seconds(2**26) == pytest.approx(1e-5 + (1 + 1 / 8) * 2**26 / link)


def _without_switches(hardware):
    return hardware.model_copy(update={"link": hardware.link.model_copy(update={"in_switch_reduction": False})})


@pytest.mark.parametrize(("name", "microseconds"), [("h100-sxm", 50.7), ("h200-sxm", 48.4), ("b200-sxm", 39.2)])
def test_switches_add_up_large_messages_of_many(name, microseconds):
    """8 MiB over 8 GPUs, vLLM 0.24 (aiconfigurator): 77 us on H100 before symmetric memory (0.14). Few ranks or small
    messages go as before."""
    hardware = load_hardware(name)
    alone = _without_switches(hardware)
    law, plain = (collective(one, "all_reduce", "bf16", 8) for one in (hardware, alone))
    assert law.seconds(8 * 2**20) < 0.9 * plain.seconds(8 * 2**20)
    assert law.seconds(8 * 2**20) == pytest.approx(microseconds * 1e-6, rel=0.15)
    assert law.seconds(8 * 2**10) == plain.seconds(8 * 2**10)
    few = [collective(one, "all_reduce", "bf16", 2).seconds(8 * 2**20) for one in (hardware, alone)]
    assert few[0] == few[1]


@pytest.mark.parametrize(("name", "microseconds"), [("h100-sxm", 3.8), ("h200-sxm", 3.9), ("b200-sxm", 6.1)])
def test_an_engine_has_kernels_of_its_own(name, microseconds):
    """32 KiB over 8 GPUs, TensorRT-LLM 1.3.0rc20 (aiconfigurator); vLLM's takes 5.6, 5.7 and 8.2 us."""
    device = load_hardware(name)
    own = with_kernels_of(device, "trtllm")
    seconds = [float(collective(one, "all_reduce", "bf16", 8).seconds(32 * 1024)) for one in (own, device)]
    assert seconds[0] == pytest.approx(microseconds * 1e-6, rel=0.15)
    assert seconds[0] < seconds[1]
    assert with_kernels_of(device, "sglang") is device


@pytest.mark.parametrize("kind", KINDS)
def test_across_nodes_it_takes_longer(kind):
    hardware = load_hardware("h100-sxm")
    size = np.array([1e4, 1e8])
    inside = collective(hardware, kind, "bf16", 8).seconds(size)
    across = collective(hardware, kind, "bf16", 16).seconds(size)
    assert (across > inside + 1e-5).all()
    assert (collective(load_hardware("gb200"), kind, "bf16", 16).seconds(size) < across).all()  # one domain of 72


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_ranks_that_others_stand_between_meet_over_the_network(kind):
    """Tensor ranks fill a node of 8, so the others of a group are elsewhere: all bytes cross the network card."""
    hardware, size = load_hardware("h100-sxm"), np.array([1e4, 1e8])
    neighbours, apart = (collective(hardware, kind, "bf16", 2, n).seconds(size) for n in (1, 8))
    assert (apart > neighbours).all()
    assert (apart >= wire_factor(kind, "ring", 2) * size / NETWORK_BANDWIDTH).all()
    half = collective(hardware, kind, "bf16", 4, 4).seconds(size)  # two in each node
    assert (half > neighbours).all()


@pytest.mark.parametrize(
    ("tensor", "pipeline", "inside", "across"), [(8, 2, 0, 1), (4, 2, 1, 0), (4, 4, 2, 1), (2, 4, 3, 0), (16, 2, 0, 1)]
)
def test_stages_of_different_nodes_send_over_the_network(tensor, pipeline, inside, across):
    model, hardware = load_model("Llama-3.1-405B"), load_hardware("h100-sxm")
    parallelism = Parallelism(tensor=tensor, pipeline=pipeline)
    sends = [op for op in forward_pass(Placement(model, hardware, parallelism=parallelism)) if op.name == "send"]
    assert {op.apart: op.count for op in sends} == {n: count for n, count in ((1, inside), (8, across)) if count}
    for op in sends:
        whole = model.hidden_size * 2
        assert op.message == {"tokens": whole if op.apart == 1 else whole / tensor}
        seconds = collective(hardware, "send", "bf16", op.ranks, op.apart).seconds(1e6)
        assert (seconds > 1e6 / NETWORK_BANDWIDTH) == (op.apart == 8)
    one_domain = forward_pass(Placement(model, load_hardware("gb200"), parallelism=parallelism))
    assert [(op.count, op.apart) for op in one_domain if op.name == "send"] == [(pipeline - 1, 1)]


def test_data_parallel_ranks_of_whole_nodes_gather_over_the_network():
    model, hardware = load_model("DeepSeek-V3"), load_hardware("h200-sxm")
    for tensor, ranks, apart in ((8, 2, 8), (4, 2, 4), (1, 8, 1)):
        parallelism = Parallelism(tensor=tensor, attention_data=ranks)
        found = {
            op.apart
            for op in forward_pass(Placement(model, hardware, parallelism=parallelism))
            if op.shared and op.message
        }
        assert found == {apart}
