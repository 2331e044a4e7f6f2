"""Prompt and token times of static batches (Splitwise, arXiv:2311.18677), simulated as batches that arrive at once."""

from functools import partial
from pathlib import Path

import numpy as np
from common import attempt, percent, preset_of, read_table, spread
from static import Batch, Times, serve

from infersim.config.errors import InputError

FILE = "e2e/splitwise_step_times.csv"
MODELS = {"llama2-70b": "Llama-2-70B", "bloom-176b": "bloom"}
HARDWARE = {"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm"}
KEYS = ["model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
TIMES = ["prompt_time", "token_time"]


def _times(row) -> Times:
    if row.model in MODELS and row.hardware not in HARDWARE:
        raise InputError("power-capped device")
    return serve(
        Batch(MODELS[row.model], HARDWARE[row.hardware], row.prompt_size, row.token_size, row.batch_size,
              tensor=row.tensor_parallel, weights="fp16", preset=preset_of("vllm", "0.2"))
    )  # fmt: skip


def evaluate(data: Path):
    """One row per setting, medians of its repetitions (pandas), with predictions in ms."""
    table = read_table(data / FILE, " ".join([*KEYS, *TIMES]))
    rows = table.groupby(KEYS)[TIMES].median().reset_index()
    found = [attempt(partial(_times, row)) for row in rows.itertuples()]
    rows["prompt"] = [np.nan if times is None else times.ttft * 1e3 for times, _ in found]
    rows["token"] = [np.nan if times is None else times.tpot * 1e3 for times, _ in found]
    rows["why"] = [why for _, why in found]
    rows["prompt_error"] = percent(rows.prompt, rows.prompt_time)
    rows["token_error"] = percent(rows.token, rows.token_time)
    return rows


def summarize(rows) -> list[dict]:
    entries = []
    groups = [("all", rows), *((f"{hw} {model}", g) for (hw, model), g in rows.groupby(["hardware", "model"]))]
    for name, group in groups:
        entry = {"group": name, "n": len(group), "unpredicted": int((group.why != "").sum())}
        for time in ("prompt", "token"):
            errors = spread(group[f"{time}_error"].dropna())
            entry |= {f"{time}_{key}": value for key, value in errors.items()}
        entries.append(entry)
    return entries
