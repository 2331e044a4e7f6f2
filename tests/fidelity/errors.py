"""hardware_profiles/published/errors.csv: how far predictions are from measurements on which nothing was chosen.

Rows of the deployments that were not looked at (`silicon.in_view`), and the published tables' but those that were read
for the cost model. The same rows once more as if their device had no kernels of its own: with those of its sibling, or
with those of another generation, as a device that only its datasheet describes gets them.
"""

from functools import partial
from hashlib import sha1
from pathlib import Path

import numpy as np
import published
import silicon
from common import attempt

from infersim.config.hardware import load_hardware
from infersim.explain.uncertainty import FIGURES, device_of, load_of

HEAD = """\
# ln(measured / predicted), written by `python tests/fidelity/run.py --data DIR --errors FILE`. A line is a load of a
# deployment with which nothing was chosen but how it was started: {silicon} of aiconfigurator's and InferenceX's
# (silicon_sample, Apache-2.0), {published} of published tables (sources in published.csv). sibling, datasheet: the same
# deployments without the kernels of their own device, and rows of devices that have none.
"""
COLUMNS = ("deployment", "model", "engine", "device", "pools", "load", *FIGURES)
STAND_INS = {
    "h100_sxm": ("sibling", {"efficiencies_of": "h200-sxm"}),
    "h200_sxm": ("sibling", {"efficiencies_of": "h100-sxm"}),
    "b200_sxm": ("datasheet", {"generation": "unmeasured"}),
}
"""of each system, what its profile is predicted as, and what makes it so beside having no efficiencies"""
SERVERS = {"TensorRT-LLM": "trtllm", "vLLM": "vllm", "vLLM (TPU)": "vllm"}
MEASURED = {"output_throughput_total": "throughput", "output_throughput_per_gpu": "throughput", "decode_speed": "tpot",
            "request_throughput": "throughput", "e2e_latency_batch": "e2e", "first_token_latency": "ttft",
            "ttft_mean": "ttft", "tpot_mean": "tpot"}  # fmt: skip
"""metric of a published row -> figure"""
ALONE = (*silicon.DEPLOYMENT, *(f"{pool}_{part}" for pool in ("prefill", "decode") for part in (
    "num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")))  # fmt: skip
"""columns by which one deployment differs from another"""


def without_kernels(row) -> dict | None:
    """The row's device as if nobody had measured it."""
    changes = STAND_INS[row.system][1]
    device = silicon.profile(silicon.SYSTEMS[row.system])
    return device | {"name": f"{device['name']}-unmeasured", "efficiency": {}, "launch": None, **changes}


def _name(parts) -> str:
    return sha1("|".join(map(str, parts)).encode()).hexdigest()[:6]


def _silicon_lines(rows, device: str | None = None) -> list[tuple]:
    """Lines of predicted rows; E2E is TTFT and the other tokens' TPOT, throughput its inverse (Little's law)."""
    lines = []
    for _, row in rows[rows.why == ""].iterrows():
        tokens = silicon.length(row.osl) - 1
        times = [(ttft, tpot, ttft + tokens * tpot) for ttft, tpot in
                 ((row.silicon_ttft_ms, row.silicon_tpot_ms), (row.ttft, row.tpot))]  # fmt: skip
        ttft, tpot, e2e = np.log(np.array(times[0]) / times[1])
        load = load_of(silicon.concurrency(row) / silicon.replicas(row))
        pools = "pools" if row["mode"] == "disagg" else "aggregated"
        name = _name(row[part] for part in ALONE)
        kind = "MoE" if row.fam in silicon.MOE else "dense"
        lines.append((name, kind, row.backend, device or "calibrated", pools, load, ttft, tpot, e2e, -e2e))
    return lines


def _published_lines(rows) -> list[tuple]:
    """Lines of the tables' rows that one of our engines served."""
    lines = []
    for row in rows[(rows.why == "") & rows.engine.isin(SERVERS) & rows.metric.isin(MEASURED)].itertuples():
        figure, batch = MEASURED[row.metric], published.batch_of(row)
        error = float(np.log(row.value / row.predicted))
        device = device_of(load_hardware(published.HARDWARE[row.gpu]))
        kind = "MoE" if row.model in silicon.MOE or row.model.startswith("DeepSeek") else "dense"
        name = _name((row.group, row.model, row.gpu, row.tp, row.pp, row.dtype_w, row.engine_version))
        load = load_of(batch.concurrency or batch.requests)
        errors = (error if each == figure else np.nan for each in FIGURES)
        lines.append((name, kind, SERVERS[row.engine], device, "aggregated", load, *errors))
    return lines


def evaluate(tables: dict) -> list[tuple]:
    """The lines, from the suite's tables and from the same rows predicted without their devices' kernels."""
    rows = tables["silicon"]
    held = rows[~rows.in_view | (rows["mode"] == "disagg")]
    lines = _silicon_lines(held) + _published_lines(tables["published"])
    for system, (device, _) in STAND_INS.items():
        own = held[(held.system == system) & (held["mode"] == "agg") & (held.why == "")].copy()
        pairs = [attempt(partial(silicon.predict, row, without_kernels(row))) for _, row in own.iterrows()]
        own["ttft"], own["tpot"] = ([np.nan if p is None else p[i] for p, _ in pairs] for i in (0, 1))
        own["why"] = [why for _, why in pairs]
        lines += _silicon_lines(own, device)
    return sorted(lines)


def write(path: Path, tables: dict) -> None:
    lines, tabled = evaluate(tables), len(_published_lines(tables["published"]))
    own = sum(line[3] == "calibrated" for line in lines) - tabled
    text = [HEAD.format(silicon=own, published=tabled) + ",".join(COLUMNS)]
    text += [",".join([*line[:6], *("" if x != x else f"{x:.3f}" for x in line[6:])]) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
