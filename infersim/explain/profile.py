"""Where each number of a hardware profile comes from."""

from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.cost.efficiency import efficiency, launch, launch_provenance
from infersim.cost.mixed import beside_prefill

CLASSES = ("gemm", "attention_prefill", "attention_decode", "elementwise", "collective")
DTYPES = ("bf16", "fp16", "fp8", "int8")
MATRIX_CLASSES = ("gemm",)
ERRORS = ("held out", "held-out shapes", "fitted", "the fitted rows")
"""what the errors of an efficiency are of, best first"""
BEWARE = ("caution", "beyond 25 %")
"""what stands beside them: fixed times above the fastest kernel's, models whose shapes the law misses"""


def profile_rows(hardware: Hardware) -> list[dict[str, str]]:
    """A row per number or efficiency: what, value, provenance, errors, source."""
    sheet = "measured" if hardware.generation == "cpu" else "datasheet"
    sources = "; ".join(hardware.sources)
    rows = []

    def add(what: str, value: str, provenance: str, errors: str, source: str) -> None:
        rows.append({"what": what, "value": value, "provenance": provenance, "errors": errors, "source": source})

    add("memory", f"{hardware.memory_usable / 2**30:.2f} GiB usable", sheet, "", sources)
    add("bandwidth", f"{hardware.memory_bandwidth / 1e9:,.4g} GB/s", sheet, "", sources)
    for dtype, flops in hardware.flops.items():
        add(f"{dtype} peak", f"{flops / 1e12:,.4g} TFLOP/s", sheet, "", sources)

    def add_efficiency(name: str, row: OperatorEfficiency) -> None:
        value = f"bandwidth {row.bandwidth:.3f}, FLOP/s {row.flops:.3f}, fixed {row.fixed * 1e6:.3g} us"
        errors = next((row.errors[what] for what in ERRORS if what in row.errors), "")
        beware = (f"{what}: {row.errors[what]}" for what in BEWARE if what in row.errors)
        errors = "; ".join(filter(None, [errors, *beware]))
        add(name, value, row.provenance, errors, row.source)

    for operator in CLASSES:
        for each in DTYPES:
            if each not in hardware.flops if operator in MATRIX_CLASSES else each != "bf16":
                continue
            name = f"{operator}.{each}" if operator in MATRIX_CLASSES else operator
            add_efficiency(name, efficiency(hardware, operator, each))
    shown = {row["what"] for row in rows} | {f"{operator}.bf16" for operator in CLASSES}
    for name, row in hardware.efficiency.items():
        if name not in shown:
            add_efficiency(name, row)
    if beside := beside_prefill(hardware):
        value = f"{beside.least:.3g} times the keys read, {beside.head * 1e9:.3g} ns per head"
        own = hardware.beside_prefill is not None
        add("decodes beside a prefill", value, "calibrated" if own else "assumed", "", beside.source)
    times = launch(hardware)
    value = f"{times.graph * 1e6:.3g} us in a graph, {times.eager * 1e6:.3g} us launched"
    add("launch", value, launch_provenance(hardware), "", times.source)
    if found := hardware.calibration:
        value = f"{found.stack} {found.version} on {found.date}, driver {found.driver}"
        for what, errors in found.errors.items():
            add(f"prediction of {what}", value, "measured", errors, found.command)
    return rows
