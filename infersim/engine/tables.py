"""The replicas' prices, laid out as the compiled loop reads them."""

from collections.abc import Sequence

import numpy as np

from .compiled import state
from .price import rows_of_kinds
from .replica import ReplicaSpec

MOST_LAID = 16


def lay_prices(replicas: Sequence[ReplicaSpec]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """PRICE[n], ATTENTION_PRICE[n, kinds], and each distinct cost's tables in one: f8[m] seconds, and f8[m, 9] busy
    seconds by resource.

    Raises ValueError if a cost's tables end before the replica's largest step.
    """
    prices = np.zeros(len(replicas), state.PRICE)
    prices["slow"] = 1.0
    attention = np.zeros((len(replicas), state.MAX_ATTENTION_KINDS), state.ATTENTION_PRICE)
    parts: list[np.ndarray] = []
    shares: list[float] = []
    offsets: dict[int, list[int]] = {}

    def laid(owner: object, tables: list[np.ndarray], share: float) -> list[int]:
        """Where the tables begin."""
        if id(owner) not in offsets:
            offsets[id(owner)] = []
            for table in tables:
                offsets[id(owner)].append(sum(map(len, parts)))
                parts.append(table)
                shares.append(share)
        return offsets[id(owner)]

    for r, replica in enumerate(replicas):
        cost, draft, price = replica.cost, replica.draft, prices[r]
        _check(replica)
        tables = [cost.linear, cost.head] + ([] if cost.shared is None else [cost.shared])
        price["linear"], price["head"], price["shared"] = (*laid(cost, tables, cost.issue_share), -1)[:3]
        price["draft_first"] = -1
        if draft is not None:
            tables = [
                np.zeros((len(table), len(state.RESOURCES))) for table in (draft.first, draft.once, draft.following)
            ]
            for table, seconds in zip(tables, (draft.first, draft.once, draft.following), strict=True):
                table[:, state.DRAFT] = seconds
            starts = laid(draft, tables, cost.issue_share)
            price["draft_first"], price["draft_once"], price["draft_following"] = starts
            price["num_draft_kinds"], price["first_attends"] = len(draft.attention), draft.first_attends
        price["issue_share"], price["num_kinds"] = cost.issue_share, len(cost.attention)
        attention[r, : len(cost.attention)] = cost.attention
    return prices, attention, *_in_one(parts, shares)


_LAID: list[tuple[list[np.ndarray], list[float], tuple[np.ndarray, np.ndarray]]] = []
"""of the last fleets: most have the tables of one before"""


def _in_one(parts: list[np.ndarray], shares: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """f8[m] seconds and f8[m, 9] busy seconds of all tables, for reading only. Tables that nobody can write to are
    known by being the same arrays."""
    for known, those, laid in _LAID[:]:
        if those == shares and all(a is b for a, b in zip(known, parts, strict=True)):
            return laid
    by_resource = np.concatenate(parts)
    laid = by_resource.sum(axis=1), by_resource * np.repeat(shares, [len(part) for part in parts])[:, None]
    if not any(part.flags.writeable for part in parts):
        _LAID.append((parts, shares, laid))
        del _LAID[:-MOST_LAID]
    return laid


def _check(replica: ReplicaSpec) -> None:
    cost, most = replica.cost, 0
    if replica.draft is not None and replica.drafts is not None:
        most = int(replica.drafts.max())
    budget, sequences = replica.knobs["max_num_batched_tokens"], replica.knobs["max_num_seqs"]
    if len(cost.linear) <= budget or len(cost.head) <= min(sequences * (1 + most), budget):
        raise ValueError("the cost tables end before max_num_batched_tokens or max_num_seqs")
    if cost.shared is not None and len(cost.shared) <= budget:
        raise ValueError("the table of the ranks' shared work ends before max_num_batched_tokens")


def lay_drafts(replicas: Sequence[ReplicaSpec], max_num_seqs: int) -> tuple[np.ndarray, np.ndarray]:
    """i4[n, max_num_seqs + 1, 2]: drafts of a sequence, and further passes, by running sequences; and the drafters'
    ATTENTION_PRICE[n, kinds]."""
    plan = np.zeros((len(replicas), max_num_seqs + 1, 2), "i4")
    attention = np.zeros((len(replicas), state.MAX_ATTENTION_KINDS), state.ATTENTION_PRICE)
    for r, replica in enumerate(replicas):
        if replica.draft is not None and (k := replica.drafts) is not None:
            plan[r, : len(k), 0], plan[r, : len(k), 1] = k, replica.draft.passes[k]
            attention[r, : len(replica.draft.attention)] = rows_of_kinds(replica.draft, replica.cost)
    return plan, attention
