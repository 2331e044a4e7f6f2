"""INT4 kernels by name, against the published speed-ups of each over batch; and when they stop helping."""

import pytest
import yaml
from shared import SHARED, needs_shared

from infersim.config.hardware import load_hardware
from infersim.cost.weight_only import KERNELS, crossover_rows, gain

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@needs_shared
@pytest.mark.parametrize("name", KERNELS)
def test_gain_over_batch_is_the_published_one(name):
    """marlin within 5 % at every batch, the others within 25 %, and on the same side of 1."""
    anchors = yaml.safe_load((SHARED / "facts" / "paper_anchors.yaml").read_text())["anchors"]
    (peak,) = [anchor["value"] for anchor in anchors if anchor["id"] == "marlin.peak"]
    a10 = load_hardware("a10")
    for batch, want in zip(BATCHES, peak[name], strict=True):
        got = gain(KERNELS[name], a10, batch)
        assert got == pytest.approx(want, rel=0.05 if name == "marlin" else 0.25), batch
        assert (got > 1) == (want > 1), batch


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_beats_its_bytes(name):
    for hardware in ("a10", "h100-sxm", "rtx-4090"):
        for batch in BATCHES:
            assert gain(KERNELS[name], load_hardware(hardware), batch) <= 16 / KERNELS[name].bits + 1e-9


def test_crossovers():
    """marlin stops helping near the ridge; awq after 3 rows, exllamav2 between 8 and 16, bnb at 2."""
    a10 = load_hardware("a10")
    rows = {name: crossover_rows(kernel, a10) for name, kernel in KERNELS.items()}
    assert 2 < rows["awq"] <= 4
    assert 8 < rows["exllamav2"] <= 16
    assert rows["bnb"] == 2
    ridge = a10.flops["fp16"] / a10.memory_bandwidth
    assert rows["marlin"] == pytest.approx(ridge, rel=0.1)
