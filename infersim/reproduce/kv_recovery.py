"""What brings a preempted sequence back, computing its keys and values again or swapping them (Kwon et al. 2023,
figure 19).

A block is as many transfers as there are layers, twice: keys and values lie apart. Small ones cost a launch each.
"""

from itertools import pairwise

from infersim.config.hardware import load_hardware
from infersim.models.catalog import load_model

from .claims import SIMULATED, Claim, claim, share_holding
from .kwon import SERVERS
from .simulation import prompt_time

TOKENS = 256  # of the sequence: assumed
TRANSFER = 3e-6  # s to start one: assumed
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def swap_time(block_size: int) -> float:
    """Seconds to host memory and back over PCIe."""
    name, gpu, _, _ = SERVERS["13b"]
    model, hardware = load_model(name), load_hardware(gpu)
    assert hardware.pcie_bandwidth is not None
    transfers = TOKENS // block_size * model.num_layers * 2
    moved = TOKENS * model.kv_bytes_per_token(2)
    return 2 * (moved / hardware.pcie_bandwidth + transfers * TRANSFER)


def recompute_time() -> float:
    """Seconds of the same tokens as a prompt."""
    name, gpu, tensor, _ = SERVERS["13b"]
    return prompt_time(TOKENS, model=name, hardware=gpu, parallelism={"tensor": tensor})


def _as_in_figure_19() -> float:
    """Recomputing costs the same at any block size and swapping less the larger the blocks: small ones are dearer to
    swap, from 16 to 64 both take the same order of time, large ones are cheaper to swap."""
    swap, recompute = {size: swap_time(size) for size in BLOCK_SIZES}, recompute_time()
    return share_holding(
        [
            *(a > b for a, b in pairwise(swap.values())),
            *(swap[size] > recompute for size in (1, 2)),
            *(1 / 3 <= swap[size] / recompute <= 3 for size in (16, 32, 64)),
            swap[256] < recompute,
        ]
    )


def claims() -> tuple[Claim, ...]:
    note = (
        f"{TOKENS} tokens of OPT-13B, {TRANSFER * 1e6:.0f} us to start a transfer: assumed; recomputing is simulated;"
        " the printed 20 % can be read in two ways and is not checked"
    )
    return (claim("vllm.fig19", SIMULATED, _as_in_figure_19, note),)
