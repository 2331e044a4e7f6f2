"""Tables of measured kernels: reading them, and which rows are sound.

Columns are those of ai-dynamo/aiconfigurator's tables, so that what its collectors measure is read as it is:

    gemm                 gemm_dtype, m, n, k
    context attention    kv_cache_dtype, batch_size, isl, num_heads, num_key_value_heads, head_dim[, window_size]
    generation attention the same, isl 1 and step, the number of keys before
    all                  latency_us; and if there are several: system, backend, version

A CSV or Parquet file, or a folder of such files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pandas as pd

from infersim.spec.errors import InputError
from infersim.spec.hardware import Hardware

SYSTEMS = {"a100_sxm": "a100-sxm-80gb", "b200_sxm": "b200-sxm", "h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm",
           "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000", "RTX4090": "rtx-4090",
           "RTXPRO6000": "rtx-pro-6000"}  # fmt: skip
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "sq": "int8", "int4_wo": "int4",
           "w4a16_mxfp4": "mxfp4"}  # fmt: skip
CACHED = 1.2
"""rows whose working set is below this many times the L2 cache were, or may have been, read from it"""
NEGLIGIBLE = 0.05
"""share of its time below which a row's bytes do not matter, nor whether they were cached"""


@dataclass(frozen=True)
class Rows:
    """Measured kernels of one operator class and dtype on one device.

    columns: name -> f8[n], the shape by the law's names; seconds: f8[n]; software: what ran, one text for all.
    """

    operator_class: str
    dtype: str
    software: str
    columns: dict[str, np.ndarray]
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, mask: np.ndarray) -> "Rows":
        """The rows that the mask selects."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        return replace(self, columns=columns, seconds=self.seconds[mask])


def held_out(rows: Rows, names: tuple[str, ...]) -> np.ndarray:
    """bool[n]: the shapes (values of these columns) that are not fitted on, about half of them, by a hash."""
    keys = np.stack([rows.columns[name] for name in names], axis=1).astype(np.int64)
    shapes, index = np.unique(keys, axis=0, return_inverse=True)
    chosen = np.array([crc32(",".join(map(str, shape)).encode()) % 2 == 0 for shape in shapes], dtype=bool)
    return chosen[index.ravel()]


def read(path: Path, hardware: Hardware) -> list[Rows]:
    """All tables at `path` that hold kernels of this device, one per class, dtype and software."""
    files = sorted(p for p in path.iterdir() if p.suffix in (".csv", ".parquet")) if path.is_dir() else [path]
    found = [rows for file in files for rows in _read(file, hardware, alone=not path.is_dir())]
    if not found:
        raise InputError(f"{path}: holds no kernel of {hardware.name} that infersim knows; see `calibrate --help`")
    return found


def _read(file: Path, hardware: Hardware, alone: bool) -> Iterator[Rows]:
    try:
        frame = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    except ImportError:
        raise InputError(f"{file}: Parquet files need pyarrow; install infersim[parquet]") from None
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{file}: cannot be read as a table: {str(error).splitlines()[0]}") from None
    columns = set(frame.columns)
    reader = next((reader for needed, reader in READERS.items() if columns.issuperset(needed.split())), None)
    if reader is None:
        if alone:
            known = "; ".join(READERS)
            raise InputError(f"{file}: no table of kernels that infersim knows; columns must include one of: {known}")
        return
    if "system" in columns:
        frame = frame[frame.system.astype(str).map(lambda name: SYSTEMS.get(name, name)) == hardware.name]
    frame = frame[~frame.get("kernel_source", pd.Series("", frame.index)).astype(str).str.contains("triton_attn|fa4")]
    bad = next((c for c in frame.select_dtypes("number") if not np.isfinite(frame[c]).all()), None)
    if bad or (frame.latency_us <= 0).any():
        raise InputError(f"{file}: {bad or 'latency_us'} must be a number{'' if bad else ' above 0'} in every row")
    names = [name for name in ("backend", "version") if name in columns]
    for key, part in frame.groupby(names, observed=True) if names else [((), frame)]:
        software = " ".join(map(str, key))
        for operator_class, dtype, shape, rows in reader(part):
            if len(rows) and (operator_class, dtype, software) not in BROKEN:
                values = {name: np.asarray(column, dtype=float) for name, column in shape.items()}
                yield Rows(operator_class, dtype, software, values, rows.latency_us.to_numpy(float) * 1e-6)


# Timed without CUDA graphs: 57 us at least on Hopper, 159 on B200, 291 on L40S.
BROKEN = {("gemm", "fp8_block", "vllm 0.24.0")}


def _by_dtype(frame: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    for dtype, part in frame.groupby(frame[column].astype(str)):
        yield FORMATS.get(dtype, dtype), part


def _gemm(frame: pd.DataFrame) -> Iterator:
    for dtype, part in _by_dtype(frame, "gemm_dtype"):
        yield "gemm", dtype, {name: part[name] for name in "mnk"}, part


def _attention(frame: pd.DataFrame) -> Iterator:
    for dtype, part in _by_dtype(frame, "kv_cache_dtype"):
        sequences, new, before = part.batch_size, part.isl, part.step
        window = part.get("window_size", pd.Series(0, part.index))
        context = before + new
        seen = np.where(window > 0, np.minimum(window, context), context)  # by the last query
        pairs = seen * (seen + 1) / 2 + (context - seen) * seen - before * (before + 1) / 2
        shape = {"heads": part.num_heads, "kv_heads": part.num_key_value_heads, "head_dim": part.head_dim,
                 "window": window, "sequences": sequences}  # fmt: skip
        decode = (new == 1) & (before > 0)
        work = {"queries": sequences, "keys": sequences * seen, "pairs": sequences * seen, "tiles": sequences}
        yield "attention_decode", dtype, _select(shape | work, decode), part[decode]
        work = {"queries": sequences * new, "keys": sequences * context, "pairs": sequences * pairs,
                "tiles": sequences * np.ceil(new / 128)}  # fmt: skip
        prefill = before == 0
        yield "attention_prefill", dtype, _select(shape | work, prefill), part[prefill]


def _select(shape: dict, mask: pd.Series) -> dict:
    return {name: column[mask] for name, column in shape.items()}


READERS = {
    "latency_us gemm_dtype m n k": _gemm,
    "latency_us kv_cache_dtype batch_size isl num_heads num_key_value_heads head_dim step": _attention,
}
