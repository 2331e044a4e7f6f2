"""Mean TTFT and TPOT of deployments that others measured: a closed loop of so many clients, simulated."""

import re
from functools import cache, partial
from hashlib import sha1
from pathlib import Path

import numpy as np
from common import attempt, percent, preset_of, read_table, spread
from recipes import STREAMED, WAVES, Recipe, recipe

from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.scenario import build_scenario
from infersim.metrics.latency import measure
from infersim.run import run

FILE = "e2e/silicon_sample.parquet"
COLUMNS = (
    "id mode system backend backend_version model_path fam precision gemm_quant_mode isl osl batch_size tp_size pp_size"
    " attention_dp_size moe_tp_size moe_ep_size silicon_data_source silicon_ttft_ms silicon_tpot_ms"
)
SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
FORMATS = {"fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "bfloat16": "bf16", "float16": "bf16"}
MOE = ("DeepSeek-V3", "GLM-5", "Kimi-K2.5", "MiniMax-M2.5", "Qwen3-235B-A22B", "Qwen3.5-397B-A17B", "gpt-oss-120b")
CATALOGUE = {
    "deepseek-ai/DeepSeek-R1": "DeepSeek-R1", "deepseek-ai/DeepSeek-V3": "DeepSeek-V3",
    "nvidia/DeepSeek-R1-NVFP4": "DeepSeek-R1", "nvidia/DeepSeek-V3.1-NVFP4": "DeepSeek-V3.1",
    "zhipuai/GLM-5": "GLM-5", "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen3-235B-A22B",
}  # fmt: skip


def parallelism(row) -> dict:
    """Our names for a row's. Some rows count tensor and expert ranks of the same devices twice: where experts are
    both cut and dealt out by the same number n, and attention says n x n, there are n devices."""
    tp, dp = int(row.tp_size), int(row.attention_dp_size) if row.attention_dp_size == row.attention_dp_size else 1
    moe_tp, ep, pp = int(row.moe_tp_size), int(row.moe_ep_size), int(row.pp_size)
    if moe_tp == ep > 1 and tp * dp == ep * ep:
        tp, dp, moe_tp = (ep, 1, 1) if dp == 1 else (1, ep, 1)
    elif tp == dp > 1 and ep == tp * dp:
        tp, ep = 1, dp
    elif tp * dp != moe_tp * ep and row.fam in MOE:
        tp, dp = (tp, moe_tp * ep // tp) if dp == 1 and moe_tp * ep % tp == 0 else (tp, dp)
    if row.fam not in MOE:
        return {"tensor": tp, "pipeline": pp}
    return {"tensor": tp, "attention_data": dp, "expert": ep, "pipeline": pp}


def concurrency(row) -> int:
    found = re.search(r"silicon_concurrency=(\d+)", row.silicon_data_source)
    return int(found.group(1)) if found else int(row.batch_size)


@cache
def profile(name: str) -> dict:
    """Read once: parsing a calibrated profile takes longer than a run."""
    return load_hardware(name).model_dump(mode="json")


def scenario_of(row) -> dict:
    """The deployment of a row as a scenario. KeyError names what of it is not modelled."""
    clients, lengths = concurrency(row), (int(row.isl), int(row.osl))
    known = recipe(row, clients)
    weights = FORMATS.get(row.gemm_quant_mode, "auto") if known.quantised else "auto"
    if row.fam == "gpt-oss-120b" or row.gemm_quant_mode == "int4_wo":
        weights = "auto"  # gpt-oss is MXFP4 in its experts alone, where rows say nvfp4; int4 is Kimi-K2.5's own format
    if row.fam in MOE and weights == "fp8":
        weights = "fp8_block"  # the FP8 checkpoints of all these models are scaled by blocks
    drawn = [{"uniform": [-(-4 * n // 5), n]} if known.varied else n for n in lengths]
    longest = int(row.isl + row.osl + 256)
    repeated = {"prefixes": {"count": known.prompts, "tokens": lengths[0] - 1}} if known.prompts else {}
    return {
        "model": CATALOGUE.get(row.model_path, row.model_path.split("/")[-1]),
        "hardware": profile(SYSTEMS[row.system]),
        "workload": {"request_rate": "inf", "max_concurrency": clients, "num_requests": WAVES * clients,
                     "input_tokens": 1 if repeated else drawn[0], "output_tokens": drawn[1], **repeated},
        "parallelism": parallelism(row),
        "precision": {"weights": weights, "kv_cache": known.kv_cache},
        "engine": {"preset": preset_of(row.backend, row.backend_version), "max_model_len": longest,
                   "max_num_seqs": max(clients, 64), **known.engine},
    }  # fmt: skip


def predict(row) -> tuple[float, float]:
    """Simulated mean TTFT and TPOT in ms. InputError, KeyError for what is not modelled."""
    if row["mode"] != "agg":
        raise InputError("disaggregated prefill and decode")
    (result,) = run(build_scenario(scenario_of(row), row.id))
    metrics = measure(result)
    if metrics["mean_tpot_ms"] is None:
        raise InputError("no request completed")
    return metrics["mean_ttft_ms"], metrics["mean_tpot_ms"]


DEPLOYMENT = ("system", "backend", "model_path", "precision", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size",
              "moe_ep_size")  # fmt: skip
IN_VIEW = "in the half that was looked at"
READ = "read one by one to find how they were started"
LENGTHS = "lengths between 0.8 and 1 of the nominal"
KV = "FP8 keys and values"
RATES = "a worker's time per token"


def choices(row) -> list[str]:
    """What was chosen with this row in view. Halves are made by a hash of the deployment."""
    found, known = [], recipe(row, concurrency(row))
    if int(sha1("|".join(str(row[name]) for name in DEPLOYMENT).encode()).hexdigest(), 16) % 2 == 0:
        found.append(IN_VIEW)
    if "aic-auto-gap" in row.silicon_data_source:
        found.append(RATES)
        if row.backend == "sglang" or row.system == "h200_sxm":
            found.append(READ)
    if known.varied:
        found.append(LENGTHS)
    if known.kv_cache == "fp8" and (row.backend == "trtllm" or row.model_path.startswith("nvidia/")):
        found.append(KV)
    if known.added == STREAMED:
        found.append(STREAMED)
    return found


def evaluate(data: Path):
    """The table of rows with predictions (pandas), one row each: `simulated`, the TTFT that was, and `ttft`, that with
    what its recipe adds."""
    rows = read_table(data / FILE, COLUMNS)
    each = [row for _, row in rows.iterrows()]
    predictions = [attempt(partial(predict, row)) for row in each]
    times = [(np.nan, np.nan) if pair is None else pair for pair, _ in predictions]
    rows["simulated"], rows["tpot"] = [ttft for ttft, _ in times], [tpot for _, tpot in times]
    rows["why"] = [why for _, why in predictions]
    known = [recipe(row, concurrency(row)) if row["mode"] == "agg" else Recipe() for row in each]
    rows["added"] = [each.added for each in known]
    rows["ttft"] = rows.simulated + rows.tpot * [each.held for each in known]
    for name, column in (("ttft", "ttft"), ("simulated", "ttft"), ("tpot", "tpot")):
        rows[f"{name}_error"] = percent(rows[name], rows[f"silicon_{column}_ms"])
    rows["kind"] = np.where(rows.fam.isin(MOE), "MoE", "dense")
    rows["choices"] = [choices(row) if row["mode"] == "agg" else [] for row in each]
    return rows


def summarize(rows) -> list[dict]:
    """One entry per group: all dense, all MoE, those that nothing was chosen on, by choice those that something was,
    and each system, engine and model. added: rows whose TTFT is not simulated alone."""
    agg = rows[rows["mode"] == "agg"]
    groups = [(kind, agg[agg.kind == kind]) for kind in ("dense", "MoE")]
    groups += [(f"{kind}, held out", group[group.choices.str.len() == 0]) for kind, group in groups]
    groups += [(f"seen: {choice}", agg[[choice in found for found in agg.choices]]) for choice in
               (IN_VIEW, READ, LENGTHS, KV, STREAMED, RATES)]  # fmt: skip
    groups += [(f"{s} {b} {f}", group) for (s, b, f), group in agg.groupby(["system", "backend", "fam"])]
    entries = []
    for name, group in groups:
        added = int((group.added != "").sum())
        entry = {"group": name, "n": len(group), "unpredicted": int((group.why != "").sum()), "added": added}
        for metric in ("tpot", "ttft"):
            errors = spread(group[f"{metric}_error"].dropna())
            entry |= {f"{metric}_{key}": value for key, value in errors.items()}
        entries.append(entry)
    return entries


def additions(rows) -> list[dict]:
    """By rule, the rows whose TTFT has steps added, and what the errors are with them and without."""
    found = rows[(rows.added != "") & (rows.why == "")]
    return [
        {"rule": rule, "n": len(group), **{f"{label}_{key}": value for label, column in
         (("with", "ttft_error"), ("without", "simulated_error")) for key, value in spread(group[column]).items()}}
        for rule, group in found.groupby("added")
    ]  # fmt: skip
