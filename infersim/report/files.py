"""result.json and requests.csv, written whole or not at all."""

import csv
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.files import remove_leftovers, replace_file, replace_text
from infersim.metrics.result import Result

RESULT, REQUESTS, GAPS = "result.json", "requests.csv", "itls.npz"
EXPORTS = {
    "vllm-bench": r"vllm-bench\.json",
    "deployment": r"((vllm|sglang|trtllm)(-[\w.-]+)?|router|bench)\.sh|trace\.jsonl",
    "k8s": r"k8s\.yaml",
}
"""what each kind of export writes beside them, as a pattern"""
OURS = "|".join([*map(re.escape, (RESULT, REQUESTS, GAPS)), *EXPORTS.values()])
ROWS = 10_000  # of requests.csv formatted at a time


def to_json(document: dict[str, Any]) -> str:
    """The document as JSON text: no NaN, no infinity."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False)


def check_folder(folder: Path) -> None:
    """InputError if `folder` is no place to write: it holds something else, or cannot be made. Makes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, OURS)
        others = sorted(path.name for path in folder.iterdir() if not re.fullmatch(OURS, path.name))
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; must be a folder that can be made") from None
    if others:
        raise InputError(
            f"--out {folder}: holds {others[0]}, which infersim did not write; must be a new or an empty"
            " folder, or that of an earlier run"
        )
    if not writable:
        raise InputError(f"--out {folder}: cannot be written to; must be a folder that can")


def write_result(folder: Path, document: dict[str, Any], results: list[Result], gaps: bool) -> list[str]:
    """Writes result.json, requests.csv (all replications) and, with `gaps`, itls.npz (the first replication).

    Replaces what an earlier run left there; returns the paths. itls.npz: `itl` f4[...] in s, request after request,
    `offset` i8[n] where each request's gaps begin, `request_id` i8[n].
    """
    replace_file(folder / REQUESTS, lambda file: _write_requests(file, results), "--out")
    written = [REQUESTS]
    first = results[0]
    if gaps:
        arrays: dict[str, Any] = {"itl": first.itl_gaps, "offset": first.itl_offsets, "request_id": first.request_ids}
        replace_file(folder / GAPS, lambda file: np.savez(file, **arrays), "--out")
        written.append(GAPS)
    else:
        (folder / GAPS).unlink(missing_ok=True)
    replace_text(folder / RESULT, to_json(document) + "\n", "--out")
    return [str(folder / name) for name in (RESULT, *written)]


def _write_requests(file: Any, results: list[Result]) -> None:
    """One row per request: times in s to the microsecond, empty where something never happened; quoted as in RFC 4180,
    since names of tenants, models and adapters are any text."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    for number, result in enumerate(results):
        columns = {"replication": np.full(len(result.requests), number)} if len(results) > 1 else {}
        columns |= result.columns()
        if number == 0:
            writer.writerow(columns)
        for start in range(0, len(result.requests), ROWS):
            cells = [_cells(column[start : start + ROWS]) for column in columns.values()]
            writer.writerows(zip(*cells, strict=True))
    text.detach()


def _cells(column: np.ndarray) -> list[Any]:
    values = column.tolist()
    if column.dtype.kind != "f":
        return values
    return ["" if math.isnan(value) else f"{value:.6f}" for value in values]
