"""A device whose prompts run through a named attention kernel, at the kernel's published rates."""

from infersim.config.engine import AttentionKernel
from infersim.config.errors import InputError
from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.config.published import generation_of, published

from .efficiency import efficiency


def with_attention_kernel(hardware: Hardware, kernel: AttentionKernel | None) -> Hardware:
    """The device with this kernel for prompts; None: as it is. InputError for one that the device cannot run."""
    if kernel is None:
        return hardware
    alike = generation_of(hardware).attention_kernels
    known = published().attention_kernels[alike]
    if kernel not in known:
        raise InputError(
            f"engine.attention_kernel: {kernel} does not run on {hardware.name}, which has no instructions for it; must"
            f" be one of {', '.join(known)}"
        )
    figures = known[kernel]
    base = efficiency(hardware, "attention_prefill", "bf16")
    row = OperatorEfficiency(
        bandwidth=base.bandwidth, flops=figures.share, fixed=base.fixed, softness=base.softness,
        terms={"query_keys": figures.keys},
        provenance="published" if alike == hardware.generation else "assumed",
        source=f"{kernel} on {alike}: {figures.source}; bandwidth and fixed time: {base.source}",
    )  # fmt: skip
    others = {key: row for key, row in hardware.efficiency.items() if key.partition(".")[0] != "attention_prefill"}
    return hardware.model_copy(update={"efficiency": {**others, "attention_prefill": row}})
