"""Room for KV blocks, block tables and radix trees: memory that is not touched before it is used."""

import ctypes
import mmap
import sys

import numpy as np

from .compiled import state

MAP_NORESERVE = 0x4000  # linux/mman.h; Python names it from 3.13 on


def untouched(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that take memory only where they are used, so that 1000 replicas fit."""
    size = max(int(np.prod(shape)) * dtype.itemsize, 1)
    if sys.platform != "linux":
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(pages, dtype, int(np.prod(shape))).reshape(shape)


def grown(array: np.ndarray, used: int, size: int) -> np.ndarray:
    """The array, or with its first `used` rows one of at least `size` rows, twice as many as before."""
    if size <= len(array):
        return array
    larger = np.zeros((max(size, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def _forget(rows: np.ndarray, key: str, used: range, buckets: int) -> None:
    """Clears those `used` of BLOCK[n] or NODE[n], and the buckets in which their keys are found; `buckets` rows have
    one."""
    mine = rows[used.start : used.stop]
    keys = mine[key][mine[key] != 0]
    rows["bucket"][keys & (buckets - 1)] = 0
    ctypes.memset(mine.ctypes.data, 0, mine.nbytes)  # numpy goes field by field: 50 times slower


def empty(knobs: np.void, schedulers: np.ndarray, blocks: np.ndarray, nodes: np.ndarray) -> None:
    """A replica's KNOBS, and SCHEDULER[ranks], BLOCK[ranks, :], NODE[ranks, :] from now on without any KV."""
    for own, tree, scheduler in zip(blocks, nodes, schedulers, strict=True):
        ring = int(knobs["num_gpu_blocks"])
        for size in knobs["tier_blocks"].tolist() if knobs["tier_blocks"].any() else ():
            _forget(own, "hash", range(ring, ring + 1 + int(own["references"][ring])), len(own))
            ring += 1 + size
        used = max(int(scheduler["fresh_block"]), int(scheduler["num_tree_blocks"]) + 1)
        _forget(own, "hash", range(used), len(own))
        _forget(tree, "key", range(int(scheduler["num_nodes"]) + 1), min(len(tree), state.NUM_BUCKETS))
    for name in ("evictable_blocks", "num_nodes", "free_node", "num_first", "load_end", "free_tree_block",
                 "num_tree_blocks"):  # fmt: skip
        schedulers[name] = 0
    schedulers["identified"] *= np.where(schedulers["identified"] > 0, -1, 1)


def size_memory(knobs: np.ndarray, schedulers: np.ndarray, call: np.ndarray, shares_text: bool) -> None:
    """How many blocks, nodes and tables a fleet needs, as far as prefix caching may need them, noted in `call`; and how
    each scheduler begins. knobs: KNOBS[replicas]; schedulers: SCHEDULER[replicas x ranks]."""
    ranks, num_sequences = len(schedulers) // len(knobs), int(knobs["num_sequences"][0])
    caching = knobs["enable_prefix_caching"] != 0
    num_tables = np.array([int(k["kv_multiplicity"][: k["num_kv_groups"]].sum()) for k in knobs])
    stride = -(-knobs["max_model_len"] // knobs["block_size"])
    schedulers["num_tables"], schedulers["table_stride"] = num_tables.repeat(ranks), stride.repeat(ranks)
    schedulers["new_token_ratio"] = knobs["new_token_ratio"].repeat(ranks)
    schedulers["free_table"] = schedulers["blocked_request"] = -1
    windows = knobs["kv_window"].any(axis=1) | (num_tables > 1)
    tiered = knobs["tier_blocks"].any(axis=1)
    schedulers["identified"] = np.where(caching & (windows | tiered | shares_text), -1, 0).repeat(ranks)
    slots = knobs["num_gpu_blocks"] + (knobs["tier_blocks"] + 1).sum(axis=1) * tiered
    num_blocks = 1 << (int(slots[caching].max(initial=1)) - 1).bit_length()
    num_nodes = 1 << (int(knobs["num_gpu_blocks"][knobs["radix"] != 0].max(initial=1)) - 1).bit_length()
    if num_sequences > 1:  # twice the GPU's: groups that a schedule gives up keep their trees until it is made
        num_blocks = int((2 * knobs["num_gpu_blocks"] + knobs["num_cpu_blocks"]).max())
    kept = caching | (knobs["allocator"] != state.PAGED)
    rows = (1 + state.RESERVED_PER_SEQUENCE) * int(knobs["max_num_seqs"][kept].max(initial=0)) + 1
    columns = max(int((num_tables * stride)[caching].max(initial=0)) + 1, 2)
    call["num_blocks"], call["num_nodes"] = num_blocks, num_nodes
    call["num_table_rows"], call["num_table_columns"] = rows, columns
