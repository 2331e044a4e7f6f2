"""Mean TTFT and TPOT of deployments that others measured: a closed loop of so many clients, simulated."""

import re
from functools import cache, partial
from hashlib import sha1
from pathlib import Path

import numpy as np
from common import attempt, percent, preset_of, read_table, spread
from recipes import ACCEPTANCE, WAVES, disaggregated, recipe

from infersim.config.errors import InputError
from infersim.config.hardware import Hardware, load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.scenario import build_scenario
from infersim.cost.efficiency import efficiency
from infersim.metrics.latency import measure
from infersim.run import run

FILE = "e2e/silicon_sample.parquet"
COLUMNS = (
    "id mode system backend backend_version model_path fam precision gemm_quant_mode isl osl batch_size tp_size pp_size"
    " attention_dp_size moe_tp_size moe_ep_size silicon_data_source silicon_ttft_ms silicon_tpot_ms"
)
SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm", "b300_sxm": "b300-sxm",
           "gb200": "gb200", "gb200_sxm": "gb200", "gb300": "gb300", "gb300_sxm": "gb300", "l40s": "l40s",
           "a100_sxm": "a100-sxm-80gb"}  # fmt: skip
FORMATS = {"fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "bfloat16": "bf16", "float16": "bf16"}
MOE = ("DeepSeek-V3", "GLM-5", "Kimi-K2.5", "MiniMax-M2.5", "Qwen3-235B-A22B", "Qwen3.5-397B-A17B", "gpt-oss-120b")
CATALOGUE = {
    "deepseek-ai/DeepSeek-R1": "DeepSeek-R1", "deepseek-ai/DeepSeek-V3": "DeepSeek-V3",
    "nvidia/DeepSeek-R1-NVFP4": "DeepSeek-R1", "nvidia/DeepSeek-V3.1-NVFP4": "DeepSeek-V3.1",
    "zhipuai/GLM-5": "GLM-5", "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen3-235B-A22B", "nvidia/Qwen3-32B-NVFP4": "Qwen3-32B",
}  # fmt: skip


def parallelism(row, pool: str = "") -> dict:
    """Our names for a row's, or for those of its pool ("prefill_", "decode_"). Some rows count tensor and expert ranks
    of the same devices twice: where experts are both cut and dealt out by the same number n, and attention says n x n,
    there are n devices. So do others data and tensor ranks: Kimi-K2.5's measurements with tp 4, dp 4, ep 16 stand in
    another dump with tp 4, dp 1, ep 4."""

    def of(name: str) -> int:
        value = row[f"{pool}{name}_size"]
        return int(value) if value == value else 1

    tp, dp, moe_tp, ep, pp = of("tp"), of("attention_dp"), of("moe_tp"), of("moe_ep"), of("pp")
    if moe_tp == ep > 1 and tp * dp == ep * ep:
        tp, dp, moe_tp = (ep, 1, 1) if dp == 1 else (1, ep, 1)
    elif tp == dp > 1 and ep == tp * dp:
        dp, ep = 1, tp
    elif tp * dp != moe_tp * ep and row.fam in MOE:
        tp, dp = (tp, moe_tp * ep // tp) if dp == 1 and moe_tp * ep % tp == 0 else (tp, dp)
    if row.fam not in MOE:
        return {"tensor": tp, "pipeline": pp}
    if row.fam == "MiniMax-M2.5" and row.gemm_quant_mode == "fp8" and (row.system == "b200_sxm" or tp == 8):
        # minimaxm2.5_fp8_b200.sh deals the experts out for any EP_SIZE; blocks of 128 do not divide an eighth of one
        ep = tp
    return {"tensor": tp, "attention_data": dp, "expert": ep if tp * dp % ep == 0 else 1, "pipeline": pp}


def concurrency(row) -> int:
    found = re.search(r"silicon_concurrency=(\d+)", row.silicon_data_source)
    if found:
        return int(found.group(1))
    return int(row.batch_size) if row.batch_size == row.batch_size else 1


@cache
def profile(name: str) -> dict:
    """Read once: parsing a calibrated profile takes longer than a run."""
    return load_hardware(name).model_dump(mode="json")


def with_experts_of(device: dict, key: str) -> dict:
    """The device whose MXFP4 experts run with the kernel of the class `key`."""
    shares = efficiency(Hardware.validate(device, "hardware"), *key.split("."))
    return device | {"efficiency": device["efficiency"] | {"moe.mxfp4": shares.model_dump(mode="json")}}


def length(value) -> int:
    """Tokens: of "20000 +-15%" the middle."""
    return int(float(re.match(r"[\d.]+", str(value)).group(0)))


def replicas(row) -> int:
    """Servers behind the row's clients: where the batch, which is of one rank with attention by data, is a whole
    fraction of the concurrency, so many."""
    ranks = int(row.attention_dp_size) if row.attention_dp_size == row.attention_dp_size else 1
    batch = int(row.batch_size) * ranks if row["mode"] == "agg" else 0
    return concurrency(row) // batch if batch and concurrency(row) % batch == 0 else 1


def scenario_of(row, device: dict | None = None) -> dict:
    """The deployment of a row as a scenario, on its device unless another is given. KeyError names what of it is not
    modelled."""
    pools = row["mode"] == "disagg"
    if pools and not (row.prefill_num_workers >= 1 and row.decode_num_workers >= 1):
        raise InputError("disaggregated, and how many workers is not known")
    if pools and "concurrency=" not in row.silicon_data_source:
        raise InputError("disaggregated, and with how many clients is not known")
    clients = concurrency(row) // replicas(row)
    if row.backend == "vllm" and row.fam == "gpt-oss-120b" and clients > 256:  # TPOT of 8 beside TTFT of minutes
        raise InputError("its server ran fewer sequences at once than it had clients, and how many is not known")
    lengths = (length(row.isl), length(row.osl))
    known = disaggregated(row) if pools else recipe(row, clients)
    weights = FORMATS.get(row.gemm_quant_mode, "auto") if known.quantised else "auto"
    if row.fam == "gpt-oss-120b" or row.gemm_quant_mode == "int4_wo":
        weights = "auto"  # gpt-oss is MXFP4 in its experts alone, where rows say nvfp4; int4 is Kimi-K2.5's own format
    if row.fam in MOE and weights == "fp8":
        weights = "fp8_block"  # the FP8 checkpoints of all these models are scaled by blocks
    drawn = [{"uniform": [-(-4 * n // 5), n]} if known.varied else n for n in lengths]
    longest = sum(lengths) + 256
    repeated = {"prefixes": {"count": known.prompts, "tokens": lengths[0] - 1}} if known.prompts else {}
    drafts = {"method": "mtp", "num_speculative_tokens": known.drafts, "acceptance": {"conditional": ACCEPTANCE}}
    device = device or profile(SYSTEMS[row.system])
    scenario = {
        "model": CATALOGUE.get(row.model_path, row.model_path.split("/")[-1]),
        "hardware": with_experts_of(device, known.experts) if known.experts else device,
        "workload": {"request_rate": "inf", "max_concurrency": clients, "num_requests": WAVES * clients,
                     "input_tokens": 1 if repeated else drawn[0], "output_tokens": drawn[1], **repeated},
        "precision": {"weights": weights, "kv_cache": known.kv_cache},
        "engine": {"preset": preset_of(row.backend, row.backend_version), "max_model_len": longest,
                   "max_num_seqs": max(clients, 64), **known.engine},
        "speculation": drafts if known.drafts else None,
    }  # fmt: skip
    if not pools:
        return scenario | {"parallelism": parallelism(row)}
    prefill, decode = (
        {"replicas": int(row[f"{pool}_num_workers"]), "parallelism": parallelism(row, f"{pool}_"),
         "engine": scenario["engine"] | own, "router": "round-robin"}
        for pool, own in (("prefill", known.prefill), ("decode", known.decode))
    )  # fmt: skip
    gpus = [pool["replicas"] * Parallelism(**pool["parallelism"]).num_gpus for pool in (prefill, decode)]
    transfer = {"bandwidth": NETWORK * min(gpus), "request_time": HAND_OVER}
    cluster = {"prefill": prefill, "decode": decode, "transfer": transfer}
    return scenario | {"parallelism": decode["parallelism"], "cluster": cluster}


NETWORK = 50e9
"""B/s of each GPU's network card (400 Gbit/s), of whichever pool has fewer"""
HAND_OVER = 5e-3
"""s per request of the front door and of NIXL's hand-shake: assumed"""


def predict(row, device: dict | None = None) -> tuple[float, float]:
    """Simulated mean TTFT and TPOT in ms. InputError, KeyError for what is not modelled."""
    (result,) = run(build_scenario(scenario_of(row, device), row.id))
    metrics = measure(result)
    if metrics["mean_tpot_ms"] is None:
        raise InputError("no request completed")
    return metrics["mean_ttft_ms"], metrics["mean_tpot_ms"]


DEPLOYMENT = ("system", "backend", "model_path", "precision", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size",
              "moe_ep_size")  # fmt: skip
IN_VIEW = "in the half that was looked at"
STREAMED = "the first token is sent with the tenth"
READ = "read one by one to find how they were started"
LENGTHS = "lengths between 0.8 and 1 of the nominal"
KV = "FP8 keys and values"
DRAFTED = "MTP by version and date"


def in_view(row) -> bool:
    """Whether the row's deployment is in the half that was looked at, by a hash of what it is."""
    return int(sha1("|".join(str(row[name]) for name in DEPLOYMENT).encode()).hexdigest(), 16) % 2 == 0


def choices(row) -> list[str]:
    """What was chosen with this row in view."""
    found, known = [], recipe(row, concurrency(row))
    if in_view(row):
        found.append(IN_VIEW)
    if "aic-auto-gap" in row.silicon_data_source and (row.backend == "sglang" or row.system == "h200_sxm"):
        found.append(READ)
    if known.varied:
        found.append(LENGTHS)
    if known.kv_cache == "fp8" and (row.backend == "trtllm" or row.model_path.startswith("nvidia/")):
        found.append(KV)
    if not known.engine.get("stream_first_token", True):
        found.append(STREAMED)
    if known.drafts:
        found.append(DRAFTED)
    return found


def evaluate(data: Path):
    """The table of rows with predictions (pandas), one row each."""
    rows = read_table(data / FILE, COLUMNS)
    configs = rows.silicon_data_source.str.extract(r"config_id=(\d+)")[0].fillna(rows.id)
    rows["largest_batch"] = rows.decode_batch_size.groupby(configs).transform("max")
    each = [row for _, row in rows.iterrows()]
    predictions = [attempt(partial(predict, row)) for row in each]
    times = [(np.nan, np.nan) if pair is None else pair for pair, _ in predictions]
    rows["ttft"], rows["tpot"] = [ttft for ttft, _ in times], [tpot for _, tpot in times]
    rows["why"] = [why for _, why in predictions]
    for name in ("ttft", "tpot"):
        rows[f"{name}_error"] = percent(rows[name], rows[f"silicon_{name}_ms"])
    rows["kind"] = np.where(rows.fam.isin(MOE), "MoE", "dense")
    rows["in_view"] = [in_view(row) for row in each]
    rows["choices"] = [choices(row) if row["mode"] == "agg" else [] for row in each]
    return rows


def summarize(rows) -> list[dict]:
    """One entry per group: all dense, all MoE, those that nothing was chosen on, the half that was not looked at, by
    choice those that something was, disaggregated ones, and each system, engine and model."""
    agg, pools = rows[rows["mode"] == "agg"], rows[rows["mode"] == "disagg"]
    groups = [(kind, agg[agg.kind == kind]) for kind in ("dense", "MoE")]
    groups += [(f"{kind}, other half", group[~group.in_view]) for kind, group in groups]
    groups += [(f"{kind}, held out", agg[(agg.kind == kind) & (agg.choices.str.len() == 0)])
               for kind in ("dense", "MoE")]  # fmt: skip
    known = pools.prefill_num_workers.notna() & pools.silicon_data_source.str.contains("concurrency=")
    groups += [("disaggregated, workers and clients known", pools[known]),
               ("disaggregated, workers or clients unknown", pools[~known])]  # fmt: skip
    groups += [(f"seen: {choice}", agg[[choice in found for found in agg.choices]]) for choice in
               (IN_VIEW, READ, LENGTHS, KV, STREAMED, DRAFTED)]  # fmt: skip
    groups += [(f"{s} {b} {f}", group) for (s, b, f), group in agg.groupby(["system", "backend", "fam"])]
    entries = []
    for name, group in groups:
        entry = {"group": name, "n": len(group), "unpredicted": int((group.why != "").sum())}
        for metric in ("tpot", "ttft"):
            errors = group[f"{metric}_error"].dropna()
            entry |= {f"{metric}_{key}": value for key, value in spread(errors).items()}
            entry[f"{metric}_p90_pct"] = round(float(np.quantile(errors.abs(), 0.9)), 2) if len(errors) else None
        entries.append(entry)
    return entries
