"""Mean TTFT and TPOT of deployments that others measured: a closed loop of so many clients, simulated."""

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path

import numpy as np
from common import percent, preset_of, read_table, spread
from recipes import WAVES, recipe

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


@dataclass(frozen=True)
class Prediction:
    """Milliseconds, or why there are none."""

    ttft: float = np.nan
    tpot: float = np.nan
    why: str = ""


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


def predict(row) -> Prediction:
    if row["mode"] != "agg":
        return Prediction(why="disaggregated prefill and decode")
    try:
        (result,) = run(build_scenario(scenario_of(row), row.id))
    except KeyError as error:
        return Prediction(why=f"no counterpart of {error.args[0]}")
    except InputError as error:
        return Prediction(why=error.problems[0].split(": ", 1)[-1])
    metrics = measure(result)
    if metrics["mean_tpot_ms"] is None:
        return Prediction(why="no request completed")
    ttft, tpot = metrics["mean_ttft_ms"], metrics["mean_tpot_ms"]
    return Prediction(ttft + tpot * recipe(row, concurrency(row)).held, tpot)


DEPLOYMENT = ("system", "backend", "model_path", "precision", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size",
              "moe_ep_size")  # fmt: skip


def held_out(row) -> bool:
    """Whether the row's deployment is of the half that was not looked at when the cost model was changed: by a hash,
    less those of aiconfigurator's rows that were read to find out how they were started."""
    read = "aic-auto-gap" in row.silicon_data_source and (row.backend == "sglang" or row.system == "h200_sxm")
    half = int(sha1("|".join(str(row[name]) for name in DEPLOYMENT).encode()).hexdigest(), 16) % 2 == 1
    return half and not read


def evaluate(data: Path):
    """The table of rows with predictions (pandas), one row each."""
    rows = read_table(data / FILE, COLUMNS)
    predictions = [predict(row) for _, row in rows.iterrows()]
    rows["ttft"], rows["tpot"] = [p.ttft for p in predictions], [p.tpot for p in predictions]
    rows["why"] = [p.why for p in predictions]
    rows["ttft_error"] = percent(rows.ttft, rows.silicon_ttft_ms)
    rows["tpot_error"] = percent(rows.tpot, rows.silicon_tpot_ms)
    rows["kind"] = np.where(rows.fam.isin(MOE), "MoE", "dense")
    rows["held_out"] = [held_out(row) for _, row in rows.iterrows()]
    return rows


def summarize(rows) -> list[dict]:
    """One entry per group: all dense, all MoE, the held-out halves of both, and each system, engine and model."""
    agg = rows[rows["mode"] == "agg"]
    groups = [(kind, agg[agg.kind == kind]) for kind in ("dense", "MoE")]
    groups += [(f"{kind}, held-out deployments", group[group.held_out]) for kind, group in groups]
    groups += [(f"{s} {b} {f}", group) for (s, b, f), group in agg.groupby(["system", "backend", "fam"])]
    entries = []
    for name, group in groups:
        entry = {"group": name, "n": len(group), "unpredicted": int((group.why != "").sum())}
        for metric in ("tpot", "ttft"):
            errors = spread(group[f"{metric}_error"].dropna())
            entry |= {f"{metric}_{key}": value for key, value in errors.items()}
        entries.append(entry)
    return entries
