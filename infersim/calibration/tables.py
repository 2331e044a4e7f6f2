"""Tables of measured kernels: reading them, and which rows are sound.

Columns are those of ai-dynamo/aiconfigurator's tables, so that what its collectors measure is read as it is:

    gemm                 gemm_dtype, m, n, k
    context attention    kv_cache_dtype, batch_size, isl, num_heads, num_key_value_heads, head_dim[, window_size]
    generation attention the same, isl 1 and step, the number of keys before
    MLA                  mla_dtype, kv_cache_dtype, num_heads, batch_size, isl, step
    mixture of experts   moe_dtype, num_tokens, hidden_size, inter_size, topk, num_experts, moe_tp_size, moe_ep_size,
                         distribution (only balanced ones are used)
    collectives          nccl_dtype and op_name, or allreduce_dtype; num_gpus, bytes
    all                  latency_us; and if there are several: system, backend, version, kernel_source

or those of calibration/layers.py. A CSV or Parquet file, or a folder of such files; what other columns say is not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
import pandas as pd

from infersim.config.errors import InputError
from infersim.config.hardware import Hardware
from infersim.cost.efficiency import efficiency

from . import layers

FORMATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "sq": "int8", "int4_wo": "int4",
           "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4"}  # fmt: skip
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
    in_place: bool = False
    """measured between a model's other layers, which leave the cache as they do when serving"""
    kernels: tuple[str, ...] = ()
    """names of the experts' kernels that were measured, most rows first; of other classes none is kept"""

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


def read_all(path: Path, hardware: Hardware) -> list[Rows]:
    """All tables at `path` that hold kernels of this device, one per class, dtype and software; there may be none."""
    files = sorted(p for p in path.iterdir() if p.suffix in (".csv", ".parquet")) if path.is_dir() else [path]
    return [rows for file in files for rows in _read(file, hardware, alone=not path.is_dir())]


def read(path: Path, hardware: Hardware) -> list[Rows]:
    """The same. InputError if there is none."""
    found = read_all(path, hardware)
    if not found:
        raise InputError(f"{path}: holds no kernel of {hardware.name} that infersim knows; see `calibrate --help`")
    return found


@lru_cache(maxsize=32)
def _frame(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
    except ImportError:
        raise InputError(f"{file}: Parquet files need pyarrow; install infersim[parquet]") from None
    except (OSError, ValueError) as error:  # pandas' own are ValueErrors
        raise InputError(f"{file}: cannot be read as a table: {str(error).splitlines()[0]}") from None


def _read(file: Path, hardware: Hardware, alone: bool) -> Iterator[Rows]:
    frame = _frame(file)
    columns = set(frame.columns)
    needed = next((needed for needed in READERS if columns.issuperset(needed.split())), None)
    if needed is None:
        if alone:
            known = "; ".join(READERS)
            raise InputError(f"{file}: no table of kernels that infersim knows; columns must include one of: {known}")
        return
    numbers = [name for name in (*needed.split(), "window_size") if name in columns and name not in TEXTS]
    for name in numbers:
        values = pd.to_numeric(frame[name], errors="coerce")
        if name in ("latency_us", "time_us"):
            what, right = "a number above 0", values > 0
        else:
            least = LEAST.get(name, 1)
            what, right = f"a whole number >= {least}", (values >= least) & (values % 1 == 0)
        if not (np.isfinite(values) & right).all():
            raise InputError(f"{file}: {name} must be {what} in every row")
    frame = frame.rename(columns={"hardware": "system", "time_us": "latency_us"})
    if "system" in frame:
        frame = frame[frame.system.astype(str).isin([hardware.name, *hardware.also_called])]
    if "kernel_source" in frame:
        frame = frame[~frame.kernel_source.astype(str).str.contains(NOT_DEFAULT)]
    if "moe_dtype" in frame:  # MXFP4 weights meet the inputs that cost/formats.py says
        other = "w4a16_mxfp4" if "fp4" in hardware.flops else "w4a8_mxfp4_mxfp8"
        frame = frame[frame.moe_dtype.astype(str) != other]
    if frame.empty:
        return
    # products of 32-bit integers would overflow
    frame = frame.astype(dict.fromkeys([name for name in numbers if name in frame], float))
    names = [name for name in ("backend", "version") if name in columns]
    for key, part in frame.groupby(names, observed=True, dropna=False) if names else [((), frame)]:
        software = " ".join(str(word) for word in key if not pd.isna(word))
        try:
            found = list(READERS[needed](part))
        except InputError as error:
            raise InputError(f"{file}: {error.problems[0]}") from None
        for operator_class, dtype, shape, rows in found:
            if len(rows) and (operator_class, dtype, software) not in BROKEN:
                if (hardware.name, operator_class) in ONLY_PAIRS:
                    pairs = shape["ranks"] == 2
                    shape, rows = _select(shape, pairs), rows[pairs]
                values = {name: np.asarray(column, dtype=float) for name, column in shape.items()}
                seconds = rows.latency_us.to_numpy(float) * 1e-6
                if operator_class == "attention_prefill" and "model" not in columns:
                    write = _cache_write(hardware, dtype, values)
                    keep = write < MOSTLY * seconds
                    values, seconds = _select(values, keep), (seconds - write)[keep]
                kernels: tuple[str, ...] = ()
                if operator_class == "moe" and "kernel_source" in rows:
                    kernels = tuple(rows.kernel_source.astype(str).value_counts().index)
                yield Rows(operator_class, dtype, software, values, seconds, "model" in columns, kernels)


def _cache_write(hardware: Hardware, dtype: str, shape: dict[str, np.ndarray]) -> np.ndarray:
    """Seconds of writing a prompt's keys and values to the cache, which its tables count in and the engine prices as a
    kernel of its own: read in 16 bits, written in the cache's format.

    vLLM's kernel (reshape_and_cache_flash) gives each token a block of up to 512 threads: few heads leave it to the
    blocks' own time.
    """
    width, fp8 = shape["kv_heads"] * shape["head_dim"], dtype == "fp8"
    moved = 2.0 * width * (3.0 if fp8 else 4.0)
    by_bytes = moved / (efficiency(hardware, "elementwise", "bf16").bandwidth * hardware.memory_bandwidth)
    by_blocks = np.minimum(width, 512.0) / THREADS * (FP8_BLOCK if fp8 else BLOCK) / (hardware.num_sms or 1)
    return shape["queries"] * np.maximum(by_bytes, by_blocks)


THREADS = 2048
"""of an SM at a time"""
BLOCK, FP8_BLOCK = 2.0e-6, 3.6e-6
"""seconds of a token's block, by what prompts in windows of 128 take longer with 4 key heads than 1 (H100, B200)"""
MOSTLY = 0.4
"""share of its time from which a row tells more of the cache's write than of attention"""

TEXTS = ("gemm_dtype", "kv_cache_dtype", "mla_dtype", "moe_dtype", "nccl_dtype", "allreduce_dtype", "op_name",
         "kernel_source", "distribution", "hardware", "model", "layer")  # fmt: skip
LEAST = dict.fromkeys(("step", "window_size", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), 0) | {
    "num_gpus": 2
}
"""of columns that count; of all others 1"""
# Kernels that an engine does not take by itself, collectives outside of CUDA graphs, and on Blackwell the block-FP8
# experts that vLLM takes where FlashInfer's kernel cannot do the model's routing too: one law cannot hold both.
NOT_DEFAULT = "triton_attn|fa4|eager|trtllmfp8expertsmodular"
# Timed without CUDA graphs: no GEMM under 57 us on Hopper, 159 on B200, 291 on L40S; no MLA kernel under 100 us.
BROKEN = {("gemm", "fp8_block", "vllm 0.24.0")} | {
    (kind, dtype, "vllm 0.14.0") for kind in ("mla_prefill", "mla_decode") for dtype in ("bf16", "fp8")
}
ONLY_PAIRS = {("l40s", kind) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")}
"""a broken PCIe path between more of them"""


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
        # FlashAttention 2 does not read the keys of a group's heads together where there is a window
        apart = part.get("kernel_source", pd.Series("", part.index)).astype(str).str.endswith("flash_attn_fa2")
        decode = (new == 1) & (before > 0) & ~(apart & (window > 0))
        work = {"queries": sequences, "keys": sequences * seen, "pairs": sequences * seen, "tiles": sequences}
        yield "attention_decode", dtype, _select(shape | work, decode), part[decode]
        work = {"queries": sequences * new, "keys": sequences * context, "pairs": sequences * pairs,
                "tiles": sequences * np.ceil(new / 128)}  # fmt: skip
        prefill = before == 0
        yield "attention_prefill", dtype, _select(shape | work, prefill), part[prefill]


def _latent(frame: pd.DataFrame) -> Iterator:
    """DeepSeek's MLA: heads of 128 + 64 and values of 128, over a latent of 512 + 64 that all heads share.

    SGLang's flash_attention prefills over the latents too, another kernel than vLLM's, and with an FP8 cache converts
    the whole pool.
    """
    other = frame.kernel_source.astype(str) == "flash_attention"
    frame = frame[~(other & ((frame.step == 0) | (frame.kv_cache_dtype.astype(str) == "fp8")))]
    for dtype, part in _by_dtype(frame, "kv_cache_dtype"):
        heads, sequences, new, before = part.num_heads, part.batch_size, part.isl, part.step
        ones = pd.Series(1, part.index)
        shape = {"heads": heads, "sequences": sequences, "window": 0 * ones}
        decode = (new == 1) & (before > 0)
        keys = sequences * (before + 1)
        work = {"kv_heads": ones, "head_dim": 576 * ones, "queries": sequences, "keys": keys, "pairs": keys,
                "tiles": sequences}  # fmt: skip
        yield "mla_decode", dtype, _select(shape | work, decode), part[decode]
        prefill = before == 0
        work = {"kv_heads": heads, "head_dim": 192 * ones, "queries": sequences * new, "keys": sequences * new,
                "pairs": sequences * new * (new + 1) / 2, "tiles": sequences * np.ceil(new / 128)}  # fmt: skip
        yield "mla_prefill", dtype, _select(shape | work, prefill), part[prefill]


def _experts(frame: pd.DataFrame) -> Iterator:
    """Balanced routing: as many experts are touched as can be, equally. Experts without a gate are another kernel.

    Left out: SGLang's ranks with a part of the experts, which its collector gives the tokens of all ranks (at the same
    tokens a half, a quarter, an eighth of the FLOP/s of one rank).
    """
    kernel = frame.get("kernel_source", pd.Series("", frame.index)).astype(str)
    grouped = kernel.str.endswith("monolithic") & (frame.hidden_size == 7168) & (frame.num_experts == 256)
    other = frame.inter_size.isin(UNGATED) | ((kernel.str.startswith("sglang") | grouped) & (frame.moe_ep_size > 1))
    frame = frame[(frame.distribution.astype(str) == "balanced") & ~other].assign(grouped=grouped)
    for dtype, part in _by_dtype(frame, "moe_dtype"):
        held = part.num_experts / part.moe_ep_size
        routed = part.num_tokens * part.topk / part.moe_ep_size
        # DeepSeek's routing, inside the kernel, keeps 4 of 8 groups: of a balanced token's 8 experts the 4 that are in
        # them, and 4 that all tokens share (weights of so many are read in all such tables, at 0.9 of the bandwidth)
        touched = np.where(part.grouped, np.minimum(routed / 2, held / 2) + 4, np.clip(routed, 1, held))
        yield "moe", dtype, {"tokens": part.num_tokens, "hidden": part.hidden_size,
                             "inter": part.inter_size / part.moe_tp_size, "held": held, "routed": routed,
                             "touched": touched, "chosen": part.num_tokens * part.topk}, part  # fmt: skip


UNGATED = (1856, 2688)
"""intermediate sizes of Nemotron's experts, which have no gate"""


def _nccl(frame: pd.DataFrame) -> Iterator:
    for (kind, dtype), part in frame.groupby([frame.op_name.astype(str), frame.nccl_dtype.astype(str)]):
        if dtype == "half":
            yield {"alltoall": "all_to_all"}.get(kind, kind), "bf16", {"ranks": part.num_gpus, "size": part.bytes}, part


def _all_reduce(frame: pd.DataFrame) -> Iterator:
    for dtype, part in _by_dtype(frame, "allreduce_dtype"):
        yield "all_reduce", dtype, {"ranks": part.num_gpus, "size": part.bytes}, part


def _select(shape: dict, mask) -> dict:
    return {name: column[mask] for name, column in shape.items()}


EXPERTS = "latency_us moe_dtype num_tokens hidden_size inter_size topk num_experts moe_tp_size moe_ep_size distribution"
READERS = {
    "latency_us gemm_dtype m n k": _gemm,
    "latency_us kv_cache_dtype batch_size isl num_heads num_key_value_heads head_dim step": _attention,
    "latency_us mla_dtype kv_cache_dtype kernel_source batch_size isl num_heads step": _latent,
    EXPERTS: _experts,
    "latency_us nccl_dtype op_name num_gpus bytes": _nccl,
    "latency_us allreduce_dtype num_gpus bytes": _all_reduce,
    "time_us hardware model tp layer tokens": layers.linears,
    "time_us hardware model tp layer sequences": layers.linears,
    "time_us hardware model tp prefill_chunk kv_prefill n_decode kv_decode": layers.attention,
}
