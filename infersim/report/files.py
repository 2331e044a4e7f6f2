"""result.json and requests.csv or requests.parquet, written whole or not at all."""

import importlib.util
import io
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.files import remove_leftovers, replace_file, replace_text
from infersim.metrics.result import Result

RESULT, REQUESTS, PARQUET, GAPS = "result.json", "requests.csv", "requests.parquet", "itls.npz"
EXPORTS = {
    "vllm-bench": r"vllm-bench\.json",
    "deployment": r"((vllm|sglang|trtllm)(-[\w.-]+)?|router|bench)\.sh|trace\.jsonl",
    "k8s": r"k8s\.yaml",
}
"""what each kind of export writes beside them, as a pattern"""
OURS = "|".join([*map(re.escape, (RESULT, REQUESTS, PARQUET, GAPS)), *EXPORTS.values()])
ROWS = 50_000  # of requests that are written at a time


def to_json(document: dict[str, Any]) -> str:
    """The document as JSON text: no NaN, no infinity."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False)


def check_folder(folder: Path, parquet: bool = False) -> None:
    """InputError if `folder` is no place to write: it holds something else, or cannot be made; or if what writes
    Parquet is not there. Makes the folder."""
    if parquet and not importlib.util.find_spec("pyarrow"):
        raise InputError("--parquet: needs the package pyarrow: pip install 'infersim[parquet]'")
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


def write_result(
    folder: Path, document: dict[str, Any], results: list[Result], gaps: bool, parquet: bool = False
) -> list[str]:
    """Writes result.json, requests.csv or .parquet (all replications) and, with `gaps`, itls.npz (the first one).

    Replaces what an earlier run left there; returns the paths. itls.npz: `itl` f4[...] in s, request after request,
    `offset` i8[n] where each request's gaps begin, `request_id` i8[n].
    """
    write, name, other = (_write_parquet, PARQUET, REQUESTS) if parquet else (_write_csv, REQUESTS, PARQUET)
    replace_file(folder / name, lambda file: write(file, _tables(results)), "--out")
    (folder / other).unlink(missing_ok=True)
    written = [name]
    first = results[0]
    if gaps:
        arrays: dict[str, Any] = {"itl": first.itl_gaps, "offset": first.itl_offsets, "request_id": first.request_ids}
        replace_file(folder / GAPS, lambda file: np.savez(file, **arrays), "--out")
        written.append(GAPS)
    else:
        (folder / GAPS).unlink(missing_ok=True)
    replace_text(folder / RESULT, to_json(document) + "\n", "--out")
    return [str(folder / name) for name in (RESULT, *written)]


def _tables(results: list[Result]) -> Iterator[dict[str, np.ndarray]]:
    """The requests of all replications, ROWS at a time."""
    for number, result in enumerate(results):
        for start in range(0, len(result.requests), ROWS):
            columns = result.columns(slice(start, start + ROWS))
            which = {"replication": np.full(len(columns["status"]), number)} if len(results) > 1 else {}
            yield which | columns


def _write_csv(file: Any, tables: Iterator[dict[str, np.ndarray]]) -> None:
    """Times in s to the microsecond, empty where something never happened; quoted as in RFC 4180, since names of
    tenants, models and adapters are any text."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    for number, columns in enumerate(tables):
        if number == 0:
            text.write(",".join(columns) + "\n")
        cells, forms = zip(*map(_cells, columns.values()), strict=True)
        line = ",".join(forms) + "\n"
        text.write("".join(map(line.__mod__, zip(*cells, strict=True))))
    text.detach()


def _cells(column: np.ndarray) -> tuple[list[Any], str]:
    """Cells of a column, and how they are written."""
    values = column.tolist()
    if column.dtype.kind == "f":
        if not np.isnan(column).any():
            return values, "%.6f"
        return ["" if math.isnan(value) else f"{value:.6f}" for value in values], "%s"
    if column.dtype.kind == "U":
        quoted = {
            text: '"' + text.replace('"', '""') + '"' if re.search('[,"\r\n]', text) else text for text in set(values)
        }
        return [quoted[text] for text in values], "%s"
    return values, "%s"


def _write_parquet(file: Any, tables: Iterator[dict[str, np.ndarray]]) -> None:
    """The same columns as they are, with null where something never happened."""
    import pyarrow
    import pyarrow.parquet

    writer = None
    for columns in tables:
        batch = pyarrow.table({name: pyarrow.array(column, from_pandas=True) for name, column in columns.items()})
        writer = writer or pyarrow.parquet.ParquetWriter(file, batch.schema)
        writer.write_table(batch)
    if writer is not None:
        writer.close()
