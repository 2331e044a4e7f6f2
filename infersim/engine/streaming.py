"""What clients see of the tokens: the API server sends several at once (vLLM's, SGLang's, TensorRT-LLM's
stream_interval)."""

import numpy as np

from .compiled.histogram import HISTOGRAM_BINS, HISTOGRAM_FIRST, HISTOGRAM_SHIFT
from .compiled.state import COMPLETED
from .fleet import Fleet


def stream(fleet: Fleet, interval: np.ndarray, first_alone: np.ndarray) -> None:
    """Turn a finished run's tokens into chunks, in place: times of first tokens, the gaps and their histogram.

    interval: i8[R], steps of a request that go to its client at once; first_alone: bool[R], but the first, which goes
    by itself. What is left goes with the last token. The fleet must have kept its gaps.
    """
    requests = fleet.requests
    made = np.maximum(requests["num_output_tokens"] - requests["num_accepted_tokens"], 0).astype("i8")  # steps' tokens
    counts = np.maximum(made - 1, 0)
    row = np.repeat(np.arange(len(requests)), counts)
    starts = np.cumsum(counts) - counts
    place = np.arange(counts.sum()) - np.repeat(starts, counts)  # of a gap in its request
    gaps = fleet.gaps[np.repeat(fleet.gap_offset, counts) + place].astype("f8")
    total = np.concatenate([[0.0], np.cumsum(gaps)])
    since = total[1:] - np.repeat(total[starts], counts)  # the request's first token
    size, alone = interval[requests["replica"]], first_alone[requests["replica"]]
    nth = place + 2  # of the step's token behind each gap
    full = (nth - alone[row]) % size[row] == 0
    done = requests["status"] == COMPLETED
    sent = full | ((nth == made[row]) & done[row])
    at_once = alone | (size == 1) | (made <= 1)  # whose first token is sent when it is there
    first = np.where(at_once, 0.0, np.inf)
    np.minimum.at(first, row[sent], np.where(at_once[row[sent]], np.inf, since[sent]))
    first[np.isinf(first)] = 0.0  # nothing was sent before it was given up
    begun = ~at_once[row] & (since <= first[row])  # sent with the first chunk
    chunk_ends = np.flatnonzero(sent & ~begun)
    before = np.zeros(len(chunk_ends))
    same = row[chunk_ends[1:]] == row[chunk_ends[:-1]]
    before[1:][same] = since[chunk_ends[:-1]][same]
    fresh = np.ones(len(chunk_ends), bool)
    fresh[1:] = ~same
    before[fresh] = first[row[chunk_ends[fresh]]]
    between = since[chunk_ends] - before
    number = np.bincount(row[chunk_ends], minlength=len(requests))
    started = requests["first_token"] >= 0
    later = requests["first_token"] + first  # gaps are f4: rounding must not carry it beyond the end, which is exact
    requests["first_token"][started] = np.where(done, np.minimum(later, requests["last_token"]), later)[started]
    requests["num_chunks"] = np.where(started, number + 1, 0)
    fleet.gaps, fleet.gap_offset = between.astype("f4"), np.cumsum(number) - number
    bins = (between.view("i8") >> HISTOGRAM_SHIFT) - HISTOGRAM_FIRST
    fleet.histogram[:] = np.bincount(bins.clip(0, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
