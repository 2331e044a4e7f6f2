"""What does not go together in one replica."""

from infersim.config.engine import ResolvedEngine
from infersim.config.errors import InputError

from .lower import Deployment


def refuse_room_for_nothing(deployment: Deployment) -> None:
    """InputError if the user gives memory for copies of blocks that is too small for one."""
    engine, size = deployment.engine, deployment.memory.block_bytes
    together = size * deployment.parallelism.num_gpus // deployment.parallelism.attention_data
    rooms = {"kv_offloading_size": together, "kv_offloading_disk_size": together}
    if engine.preemption_mode == "swap":
        rooms["swap_space"] = size
    problems = [
        f"engine.{name}: has no room for a KV block of {block:,.0f} B; must be 0, or at least that"
        for name, block in rooms.items()
        if 0 < getattr(engine, name) < block
    ]
    if problems:
        raise InputError(problems)


def refuse_copies_of_windows(engine: ResolvedEngine) -> None:
    """InputError if blocks are to be copied to and from the CPU that a window drops, or that are a state."""
    problems = []
    if engine.kv_offloading_size > 0:
        problems.append(
            "engine.kv_offloading_size: is not modelled for sliding windows and recurrent states, which this model has;"
            " must be 0"
        )
    if engine.preemption_mode == "swap" and engine.enable_prefix_caching:
        problems.append(
            "engine.enable_prefix_caching: is not modelled together with swapping for sliding windows, which this model"
            " has; must be false, or engine.preemption_mode recompute"
        )
    if problems:
        raise InputError(problems)
