"""The requests that a workload describes."""

import difflib
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config.errors import InputError
from ..config.units import short
from ..config.workload import MAX_REQUESTS, MAX_TOKENS, Images, Workload
from .agents import agents_of
from .arrivals import draw_arrivals
from .draws import generator
from .lengths import draw_lengths
from .requests import Requests
from .servegen import clients_of_folder, clients_of_json, draw_requests
from .sessions import draw_sessions
from .sharing import with_prefixes, with_samples
from .table import json_table, read_csv, read_json_lines, read_text
from .trace import requests_of

LONGEST = 1e9
"""s that arrivals may span, 32 years: a later time is no longer exact to a microsecond"""


def build_requests(workload: Workload, seed: int, base: Path) -> Requests:
    """Draw or read the requests; `base` is the folder of the scenario, from which a relative trace is found first.

    InputError, with file, line and column, for a trace that is not one, and for arrivals over more than LONGEST.
    """
    requests = _from_trace(workload, seed, base) if workload.trace is not None else _draw(workload, seed)
    if requests.arrival[-1] > LONGEST:
        raise InputError(
            f"workload: requests arrive over {requests.arrival[-1]:.3g} s; must be at most {LONGEST:.0e} s, 32 years"
        )
    if workload.prefixes:
        requests = with_prefixes(requests, workload.prefixes, seed)
    if workload.tenants:
        tenant = _by_share(requests, [tenant.share for tenant in workload.tenants.values()], seed, "tenants")
        requests = replace(requests, tenant=tenant)
    if workload.images:
        requests = _with_images(requests, workload.images, seed)
    if workload.models:
        model = _by_share(requests, list(workload.models.values()), seed, "models")
        requests = replace(requests, model=model, models=tuple(workload.models))
    if workload.n > 1:
        if requests.after is not None:
            raise InputError("workload.n: the trace's requests wait for one another; must be 1")
        requests = with_samples(requests, workload, seed)
    return _apart(requests)


def _with_images(requests: Requests, images: Images, seed: int) -> Requests:
    """The same with images in some of the prompts, before the text that is the request's own."""
    n = len(requests)
    number = draw_lengths(images.per_request, n, generator(seed, "images"))
    number = np.where(generator(seed, "images", "share").random(n) < images.share, number, 0)
    longer = requests.prompt_tokens.astype("i8") + number.astype("i8") * images.tokens
    if longer.max() > MAX_TOKENS:
        raise InputError(f"workload.images: a prompt has {longer.max()} tokens; must be at most {MAX_TOKENS:.0e}")
    return replace(requests, prompt_tokens=longer.astype("i4"), images=number.astype("i4"))


def _by_share(requests: Requests, shares: list[float], seed: int, purpose: str) -> np.ndarray:
    """i8[n]: which of several each request, or each session, has by chance."""
    who = requests.session if requests.session is not None else np.arange(len(requests))
    chance = generator(seed, purpose).random(int(who.max()) + 1)[who]
    return np.searchsorted(np.cumsum(shares)[:-1] / np.sum(shares), chance, "right")


def _apart(requests: Requests) -> Requests:
    """The same text under two models, adapters included, is not the same KV: a trace's blocks get a name for each."""
    if requests.model is None or requests.segments is None:
        return requests
    begins, counts, ids, lengths = requests.segments_one_by_one()
    model, shared = np.repeat(requests.model, counts), ids >= 0
    _, ids[shared] = np.unique(np.stack((model, ids))[:, shared], axis=1, return_inverse=True)
    offsets = np.append(begins, len(ids))
    return replace(requests, segment_offsets=offsets, segment_ids=ids, segment_lengths=lengths, segment_counts=None)


def _draw(workload: Workload, seed: int) -> Requests:
    """Generated requests; for a duration, twice as many until they go on for so long, less those that come later."""
    n, duration = workload.num_requests, workload.duration
    if duration is None:
        assert n is not None
        return _draw_number(workload, n, seed)
    most = n or MAX_REQUESTS
    n = min(int(duration * (workload.request_rate or 0)) + 16, most)
    while (requests := _draw_number(workload, n, seed)).arrival[-1] < duration and n < most:
        n = min(2 * n, most)
    return _within(requests, duration)


def _within(requests: Requests, duration: float) -> Requests:
    kept = requests.arrival < duration
    if not kept.any():
        raise InputError(f"workload.duration: no request arrives within {duration:g} s; must be longer")
    return requests.keep(kept)


def _draw_number(workload: Workload, n: int, seed: int) -> Requests:
    assert workload.input_tokens is not None and workload.output_tokens is not None  # no trace
    if workload.has_sessions:
        return draw_sessions(workload, n, seed)
    return Requests(
        draw_arrivals(workload, n, seed),
        draw_lengths(workload.input_tokens, n, generator(seed, "input_tokens")),
        draw_lengths(workload.output_tokens, n, generator(seed, "output_tokens")),
        np.arange(n),
    )


def _from_trace(workload: Workload, seed: int, base: Path) -> Requests:
    assert workload.trace is not None
    path = _find(workload.trace, base)
    requests = _read(path, workload, seed)
    if workload.model_column and not requests.models:
        raise InputError(
            f"workload.model_column: {path} has no row per request and so no such column; use workload.models instead"
        )
    notes, n = list(requests.notes), workload.num_requests
    if n is not None and n < len(requests):
        requests = requests.keep(np.arange(len(requests)) < n)
    elif n is not None and n > len(requests):
        notes.append(f"the trace has {len(requests)} requests, fewer than num_requests: {n}")
    if workload.has_arrival_rule:
        arrival = draw_arrivals(workload, len(requests), seed)
        notes.append(f"{'ramp_up' if workload.ramp_up else 'request_rate'} replaces the trace's arrivals")
    else:
        arrival = requests.arrival * workload.time_scale
    requests = replace(requests, arrival=arrival, notes=tuple(notes))
    return _within(requests, workload.duration) if workload.duration else requests


def _read(path: Path, workload: Workload, seed: int) -> Requests:
    where, name = str(path), workload.format
    if path.is_dir():
        return draw_requests(clients_of_folder(path, where), workload.num_requests, seed)
    text = read_text(path, where)
    own_times = not workload.has_arrival_rule
    if not text.lstrip().startswith("{"):
        return requests_of(read_csv(text, where), name, own_times, workload.model_column)
    if name == "servegen" or (name is None and '"clients"' in text[:4096]):
        return draw_requests(clients_of_json(text, where), workload.num_requests, seed)
    rows = read_json_lines(text, where)
    if "sub_requests" in rows[0][1]:
        return agents_of(rows, where, own_times)
    return requests_of(json_table(rows, where), name, own_times, workload.model_column)


def _find(trace: str, base: Path) -> Path:
    """The file or folder meant, from `base`, else from the current folder."""
    for folder in (base, Path()):
        try:
            if (folder / trace).exists():
                return folder / trace
        except (OSError, ValueError):  # a text that cannot be a path
            break
    try:
        others = [path.name for path in (base / trace).parent.iterdir()]
    except (OSError, ValueError):
        others = []
    close = difflib.get_close_matches(Path(trace[:200]).name, others, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else "give a path from the scenario's folder or this one"
    raise InputError(f"workload.trace: {short(trace)}: no such file; {hint}")
