"""Prompt and token times of static batches (Splitwise, arXiv:2311.18677), simulated as batches that arrive at once."""

from pathlib import Path

from common import percent, preset_of, read_table, spread
from static import Batch, serve

from infersim.config.errors import InputError

FILE = "e2e/splitwise_step_times.csv"
MODELS = {"llama2-70b": "Llama-2-70B", "bloom-176b": "bloom"}
HARDWARE = {"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm"}
KEYS = ["model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
TIMES = ["prompt_time", "token_time"]


def evaluate(data: Path):
    """One row per setting, medians of its repetitions (pandas), with predictions in ms."""
    table = read_table(data / FILE, " ".join([*KEYS, *TIMES]))
    rows = table.groupby(KEYS)[TIMES].median().reset_index()
    prompt, token, why = [], [], []
    for row in rows.itertuples():
        times = None
        if row.model not in MODELS:
            why.append(f"no counterpart of {row.model}")
        elif row.hardware in HARDWARE:
            try:
                times = serve(
                    Batch(MODELS[row.model], HARDWARE[row.hardware], row.prompt_size, row.token_size, row.batch_size,
                          tensor=row.tensor_parallel, weights="fp16", preset=preset_of("vllm", "0.2"))
                )  # fmt: skip
            except InputError as error:
                why.append(error.problems[0].split(": ", 1)[-1])
        else:
            why.append("power-capped device")
        prompt.append(times.ttft * 1e3 if times else float("nan"))
        token.append(times.tpot * 1e3 if times else float("nan"))
        if times:
            why.append("")
    rows["prompt"], rows["token"], rows["why"] = prompt, token, why
    rows["prompt_error"], rows["token_error"] = percent(prompt, rows.prompt_time), percent(token, rows.token_time)
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
