"""The requests of one run, as columns."""

from dataclasses import dataclass, replace

import numpy as np

from ..config.workload import MAX_TOKENS, MaxTokensFactor, Workload


@dataclass(frozen=True)
class Requests:
    """n requests in order of arrival.

    A prompt may begin with segments: request i has those from `segment_offsets[i]` up to the next request's, or the
    first `segment_counts[i]` of them where prompts begin alike; each is `segment_lengths` tokens of `segment_ids`, and
    equal ids are equal text. What follows the last segment is the request's own.
    """

    arrival: np.ndarray
    """f8[n], seconds >= 0, not decreasing; a trace begins at 0"""
    prompt_tokens: np.ndarray
    """i4[n], >= 1"""
    output_tokens: np.ndarray
    """i4[n], >= 1: what the model generates if it may"""
    request_id: np.ndarray
    """i8[n]: the row in the trace or the number of the draw, whatever else is left out"""
    segment_offsets: np.ndarray | None = None
    """i8[n + 1]"""
    segment_ids: np.ndarray | None = None
    """i8[m]"""
    segment_lengths: np.ndarray | None = None
    """i4[m], >= 1"""
    segment_counts: np.ndarray | None = None
    """i8[n]"""
    session: np.ndarray | None = None
    """i8[n]: equal for requests of one conversation"""
    after: np.ndarray | None = None
    """i8[n]: the row whose end a request waits for, -1 for none; its `arrival` is then only the earliest possible"""
    delay: np.ndarray | None = None
    """f8[n], s: from that end to its being sent"""
    join_rows: np.ndarray | None = None
    """i8[k]: requests that wait for others too, ..."""
    join_after: np.ndarray | None = None
    """i8[k]: ... each for the end of this row, ..."""
    join_delay: np.ndarray | None = None
    """f8[k], s: ... and so long beyond it; a request is sent when all that it waits for is over"""
    tenant: np.ndarray | None = None
    """i2[n]: which of the workload's tenants sends it"""
    images: np.ndarray | None = None
    """i4[n]: images in each prompt, whose tokens are among prompt_tokens"""
    model: np.ndarray | None = None
    """i4[n]: which of `models` it asks for; None: the only one that there is"""
    models: tuple[str, ...] = ()
    """names of models as clients call them"""
    samples: int = 1
    """so many rows in turn are samples of one prompt"""
    notes: tuple[str, ...] = ()
    """one sentence for each liberty taken with the data"""

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """Where each request's begin, i8[n], and how many they are, i8[n]; ids and lengths; if there are any."""
        if self.segment_offsets is None or self.segment_ids is None or self.segment_lengths is None:
            return None
        counts = np.diff(self.segment_offsets) if self.segment_counts is None else self.segment_counts
        return self.segment_offsets[:-1], counts, self.segment_ids, self.segment_lengths

    @property
    def joins(self) -> list[tuple[int, int, float]]:
        """Who waits, for the end of which row, and s beyond it, besides `after`."""
        if self.join_rows is None or self.join_after is None or self.join_delay is None:
            return []
        return list(zip(self.join_rows.tolist(), self.join_after.tolist(), self.join_delay.tolist(), strict=True))

    def segments_one_by_one(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The same, no segment being part of two prompts; empty if there are none."""
        none = np.zeros(len(self), "i8"), np.zeros(len(self), "i8"), np.zeros(0, "i8"), np.zeros(0, "i4")
        begins, counts, ids, lengths = self.segments or none
        ends = np.cumsum(counts)
        places = np.arange(counts.sum()) + np.repeat(begins - ends + counts, counts)
        return ends - counts, counts, ids[places], lengths[places]

    def keep(self, rows: np.ndarray) -> "Requests":
        """The rows where the mask bool[n] is true; ids stay."""
        names = ("arrival", "prompt_tokens", "output_tokens", "request_id", "session", "delay", "tenant", "images",
                 "model")  # fmt: skip
        columns = {name: getattr(self, name)[rows] for name in names if getattr(self, name) is not None}
        if self.after is not None:  # of a row whose predecessor is left out nothing is known but its delay
            places = np.append(np.where(rows, np.cumsum(rows) - 1, -1), -1)
            columns["after"] = places[self.after[rows]]
            if self.join_rows is not None and self.join_after is not None and self.join_delay is not None:
                there = rows[self.join_rows] & rows[self.join_after]
                columns |= {"join_rows": places[self.join_rows[there]], "join_after": places[self.join_after[there]],
                            "join_delay": self.join_delay[there]}  # fmt: skip
        if self.segments is not None:
            begins, counts, ids, _ = self.segments
            columns["segment_offsets"] = np.append(begins[rows], len(ids))
            columns["segment_counts"] = counts[rows]
        return replace(self, **columns)


def own_text(rows: np.ndarray) -> np.ndarray:
    """Segment ids of what a request itself says and generates: never those of a trace, which are not negative."""
    return -1 - rows


def resolve_max_tokens(workload: Workload, requests: Requests, max_model_len: int | np.ndarray) -> np.ndarray:
    """i4[n]: the most tokens that each client asks for, which is what a scheduler may know. max_model_len: or i8[n].

    `max_model_len` is what vLLM assumes when a client says nothing: the room that the prompt leaves, here at least 1.
    Other values are the client's wish as it is: a sum above the model's length is for the engine to judge.
    """
    asked = workload.max_tokens
    if asked == "output_length":
        return requests.output_tokens
    if asked == "max_model_len":
        return np.maximum(max_model_len - requests.prompt_tokens, 1)
    if isinstance(asked, MaxTokensFactor):
        wish = np.ceil(requests.output_tokens * asked.factor)
        return np.minimum(wish, MAX_TOKENS).astype(np.int32)
    return np.full(len(requests), asked, np.int32)
