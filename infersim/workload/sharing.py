"""Requests that begin with the same text: shared prefixes, and several samples of one prompt."""

from dataclasses import replace
from typing import Any

import numpy as np

from ..config.errors import InputError
from ..config.workload import MAX_TOKENS, Prefixes, Workload
from .draws import generator
from .lengths import draw_lengths
from .requests import Requests


def with_prefixes(requests: Requests, prefixes: Prefixes, seed: int, inside: bool = False) -> Requests:
    """The same behind one of `prefixes.count` texts each, by chance: system prompts, tools, documents. All prompts of a
    session begin with one. inside: the prompts have it already, and are as long as they were."""
    n = len(requests)
    who = np.arange(n) if requests.session is None else requests.session
    chosen = generator(seed, "prefixes").integers(0, prefixes.count, int(who.max()) + 1)[who]
    lengths = draw_lengths(prefixes.tokens, prefixes.count, generator(seed, "prefixes", "tokens"))[chosen]
    longer = requests.prompt_tokens.astype("i8") + (0 if inside else lengths)
    if (longer <= lengths).any():
        raise InputError(
            f"workload.prefixes: a prompt of {longer.min()} tokens cannot begin with {lengths.max()}; must be shorter"
        )
    if longer.max() > MAX_TOKENS:
        raise InputError(f"workload.prefixes: a prompt has {longer.max()} tokens; must be at most {MAX_TOKENS:.0e}")
    begins, counts, ids, own = requests.segments or (np.arange(n), np.zeros(n, "i8"), np.zeros(0, "i8"), np.zeros(0))
    heads, rows = np.unique(begins, return_index=True)  # of each session, in which prompts begin alike
    places = np.minimum(heads, len(ids))
    starts = places + np.arange(len(heads))
    return replace(
        requests,
        prompt_tokens=longer.astype("i4"),
        segment_offsets=np.append(starts[np.searchsorted(heads, begins)], len(ids) + len(heads)),
        segment_ids=np.insert(ids, places, chosen[rows]),
        segment_lengths=np.insert(own, places, lengths[rows]).astype("i4"),
        segment_counts=counts + 1,
    )


def with_samples(requests: Requests, workload: Workload, seed: int) -> Requests:
    """`workload.n` requests for each, with its prompt and outputs of their own, as vLLM V1 serves `n` of one request.

    Generated outputs have lengths of their own, a trace's are all as long as the trace says.
    """
    rows, n = len(requests), workload.n
    which = np.repeat(np.arange(rows), n)
    outputs = np.repeat(requests.output_tokens, n).reshape(rows, n)
    if workload.trace is None:
        assert workload.output_tokens is not None
        for k in range(1, n):
            outputs[:, k] = draw_lengths(workload.output_tokens, rows, generator(seed, "output_tokens", k))
    _, counts, ids, lengths = requests.segments_one_by_one()
    shared = np.zeros(rows, "i8")
    np.add.at(shared, np.repeat(np.arange(rows), counts), lengths)
    # each prompt's segments, and one for what follows them, which is all samples' own
    ends = np.cumsum(counts + 1)
    place = np.ones(int(ends[-1]), bool)
    place[ends - 1] = False
    all_ids, all_lengths = np.zeros(len(place), "i8"), np.zeros(len(place), "i4")
    all_ids[place], all_lengths[place] = ids, lengths
    all_ids[~place] = int(ids.max(initial=-1)) + 1 + np.arange(rows)
    all_lengths[~place] = requests.prompt_tokens - shared
    starts = ends - counts - 1
    take = np.concatenate([np.arange(a, b) for a, b in zip(starts[which], ends[which], strict=True)])
    take = take[all_lengths[take] > 0]
    kept = np.repeat(np.arange(rows), counts + 1)[all_lengths > 0]
    per_row = np.bincount(kept, minlength=rows)[which]
    columns: dict[str, Any] = {
        name: np.repeat(getattr(requests, name), n)
        for name in ("arrival", "prompt_tokens", "tenant", "images", "model")
        if getattr(requests, name) is not None
    }
    return replace(
        requests,
        **columns,
        output_tokens=outputs.reshape(-1),
        request_id=np.repeat(requests.request_id * n, n) + np.tile(np.arange(n), rows),
        segment_offsets=np.concatenate(([0], np.cumsum(per_row))),
        segment_ids=all_ids[take],
        segment_lengths=all_lengths[take],
        segment_counts=None,
        samples=n,
        notes=(*requests.notes, f"each of a prompt's {n} samples counts as a request"),
    )
