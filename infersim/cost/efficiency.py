"""How close a device comes to its datasheet, by class of operator.

The profile's own `efficiency` comes first (class.dtype, then class). Then a published figure of this very device
(hardware_profiles/published); then what the nearest device has of its `efficiencies_of` and its generation's: that is
an assumption, and says so.
"""

from infersim.config.hardware import Hardware, LaunchTime, OperatorEfficiency, Provenance
from infersim.config.published import Figure, generation_of, profile, published, relatives

EXPERT_KERNELS = 5
"""launches of vLLM's fused_experts: sorting tokens, two grouped GEMMs, activation, sum"""
# Classes of operators without figures of their own take those of the class that is most like them.
LIKE = {
    "mla_prefill": "attention_prefill",
    "mla_decode": "attention_decode",
    "recurrent": "attention_decode",
    "low_latency_all_to_all": "all_to_all",
    "forwarded_all_to_all": "all_to_all",
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), "collective"),
}
SAME_KERNEL = {"fp8_wo": "int8_wo", "nvfp4_wo": "int4", "int4_fp8": "fp8", "int4_int8": "int8", "mxfp8": "fp8_block",
               "nf4": "bf16"}  # fmt: skip
"""formats that were not measured -> that whose kernel theirs is most like: Marlin's, or the arithmetic's own"""
NEAREST = {"int4": "mxfp4", "mxfp4": "int4", "fp8": "fp8_block", "fp8_block": "fp8", "int8": "fp8_block",
           "nvfp4": "mxfp4"}  # fmt: skip
"""formats of experts -> that whose kernels are nearest, where theirs were not measured; all others: 16 bits"""
QUANTISED_INPUTS = ("fp8", "fp8_block", "int8", "nvfp4")


def launch(hardware: Hardware) -> LaunchTime:
    """Launch times of this device, or of the nearest that was measured."""
    times = published().launch
    return hardware.launch or times[next(name for name in relatives(hardware) if name in times)]


def launch_provenance(hardware: Hardware) -> Provenance:
    """What its launch times are: its profile's, published for this very device, or those of another."""
    if hardware.launch:
        return "measured"
    return "published" if hardware.name in published().launch else "assumed"


def efficiency(hardware: Hardware, operator_class: str, dtype: str) -> OperatorEfficiency:
    """The shares, fixed time and softness of one class of operators of one dtype on this device, with their source.

    The device's own first, then what the nearest device with any has: calibrated before published.
    """
    if found := calibrated(hardware, operator_class, dtype):
        return found
    if dtype in SAME_KERNEL:
        other = SAME_KERNEL[dtype]
        return _assumed(efficiency(hardware, operator_class, other), f"as {other}")
    figures = published().operators.get(operator_class, {})
    for name in relatives(hardware):
        if name != hardware.name and (found := calibrated(profile(name), operator_class, dtype)):
            return _assumed(found, f"as {name}")
        if name in figures and (dtype not in QUANTISED_INPUTS or operator_class != "gemm"):
            return _published(hardware, operator_class, dtype, name)
    if operator_class == "moe":  # another format's experts before other matrices
        for name in relatives(hardware):
            for other in (NEAREST.get(dtype, "bf16"), "bf16"):
                if base := calibrated(hardware if name == hardware.name else profile(name), "moe", other):
                    what = f"as moe.{other}" + (f" of {name}" if name != hardware.name else "")
                    return _marlin(base, what, hardware) if dtype == "int4" else _assumed(base, what)
    if operator_class in LIKE:
        base = efficiency(hardware, LIKE[operator_class], dtype)
        # what a law adds to the roofline holds for its own kernels
        terms = {name: value for name, value in base.terms.items() if name == "query_keys"}
        return _assumed(base, f"as {LIKE[operator_class]}", terms=terms, correction=None)
    # a kernel in front turns the inputs into the format
    base = efficiency(hardware, "gemm", "bf16")
    what = "as bf16, twice its fixed time for quantising the inputs"
    return _assumed(base, what, fixed=2 * base.fixed, correction=None)


def calibrated(hardware: Hardware | None, operator_class: str, dtype: str) -> OperatorEfficiency | None:
    """What the profile itself says; of attention over keys in a format that was not measured, as in bf16."""
    if hardware is None:
        return None
    own = hardware.efficiency
    if found := own.get(f"{operator_class}.{dtype}") or own.get(operator_class):
        return found
    if dtype == "fp16" or (operator_class.startswith(("attention", "mla")) and dtype != "fp32"):
        return own.get(f"{operator_class}.bf16")
    return None


def _assumed(base: OperatorEfficiency, what: str, **changes) -> OperatorEfficiency:
    source = f"{what}: {base.source}"
    return base.model_copy(update={"provenance": "assumed", "source": source, "errors": {}, **changes})


def _marlin(base: OperatorEfficiency, what: str, hardware: Hardware) -> OperatorEfficiency:
    """Marlin's experts after another kernel's that reads the same bytes."""
    own = generation_of(hardware).marlin
    if own is None:
        return _assumed(base, what)
    what = f"{what}, {own.flops:g} of the peak ({own.source})"
    return _assumed(base, what, flops=own.flops, softness=own.softness)


def _published(hardware: Hardware, operator_class: str, dtype: str, device: str) -> OperatorEfficiency:
    """The figures of `device`, for this one."""
    figures, times = published().operators[operator_class][device], launch(hardware)
    fixed = figures.fixed or Figure(value=times.graph, source=times.source)
    named = {"bandwidth": figures.bandwidth, "flops": figures.flops, "softness": figures.softness, "fixed": fixed}
    source = "; ".join(f"{key}: {figure.source}" for key, figure in named.items() if figure)
    exact = device == hardware.name and (dtype in ("bf16", "fp16") or figures.flops is None)
    query_keys = generation_of(hardware).query_keys.value
    return OperatorEfficiency(
        **{key: figure.value if figure else 1.0 for key, figure in named.items()},
        terms={"query_keys": query_keys} if operator_class == "attention_prefill" else {},
        provenance="published" if exact else "assumed",
        source=source if exact else f"as {device} in bf16: {source}",
    )
