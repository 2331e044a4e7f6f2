"""The seconds of one step of a stated batch, as the engine prices it: its law, on the tables of a deployment."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from infersim.engine.compiled import law
from infersim.engine.compiled.state import RESOURCES, SUMS
from infersim.engine.price import DraftCost, StepCost, rows_of_kinds

NAMES = SUMS.names or ()


class Part(NamedTuple):
    """`count` sequences of a step that each bring `tokens` new tokens after `computed` ones.

    drafts: how many of the tokens are drafts, which the target verifies beside one token of its own.
    samples: whether they get an output token; no chunk of a prompt but its last does.
    """

    computed: int
    tokens: int = 1
    count: int = 1  # type: ignore[assignment]  # a tuple has a method of that name
    drafts: int = 0
    samples: bool = True


def decodes(sequences: int, context: int, drafts: int = 0) -> tuple[Part]:
    """Sequences that decode after `context` tokens, with `drafts` verified each."""
    return (Part(context, 1 + drafts, sequences, drafts),)


def _sums(attention: np.ndarray, batch: Sequence[Part]) -> list[SimpleNamespace]:
    """state.SUMS of the batch, one for each kind of attention."""
    rows = attention.view(np.recarray)
    total = np.zeros((len(rows), len(NAMES)), "i8")
    for part in batch:
        one = np.zeros(len(rows), SUMS).view(np.recarray)
        add = law.add_verification if part.drafts else law.add_to_sums
        add(one, rows, len(rows), part.computed, part.tokens)
        total += part.count * np.array(one.tolist(), "i8")
    return [SimpleNamespace(**dict(zip(NAMES, row, strict=True))) for row in total.tolist()]


def attention_split(attention: np.ndarray, sums: Sequence[SimpleNamespace]) -> np.ndarray:
    """f8[9]: seconds by resource of a step's attention. attention: ATTENTION_PRICE[k]; sums: state.SUMS of each, whole
    numbers or not."""
    split = np.zeros(len(RESOURCES))
    law.attention_time(attention.view(np.recarray), len(attention), sums, split)
    return split


def attention_time(attention: np.ndarray, batch: Sequence[Part]) -> float:
    """Seconds of attention in a step of this batch."""
    return float(attention_split(attention, _sums(attention, batch)).sum())


def step_split(cost: StepCost, batch: Sequence[Part]) -> np.ndarray:
    """f8[9]: seconds by resource of a step of this batch on each rank, drafting not counted."""
    tokens = sum(part.count * part.tokens for part in batch)
    split = cost.linear[tokens] + cost.head[sum(part.count * (1 + part.drafts) for part in batch)]
    if cost.shared is not None:
        split = split + cost.shared[tokens]
    return split + attention_split(cost.attention, _sums(cost.attention, batch))


def step_time(cost: StepCost, batch: Sequence[Part]) -> float:
    """Seconds of a step of this batch on each rank, drafting not counted."""
    return float(step_split(cost, batch).sum())


def batch_time(cost: StepCost, sequences: int, context: int, drafts: int = 0) -> float:
    """Seconds of a step in which so many sequences decode after `context` tokens, with `drafts` verified each."""
    return step_time(cost, decodes(sequences, context, drafts))


def drafting_time(draft: DraftCost, target: StepCost, batch: Sequence[Part], drafts: int) -> float:
    """Seconds that drafting adds to a step of this batch, if every sequence that samples drafts so many."""
    sampling = [part for part in batch if part.samples and drafts > 0]
    sequences = sum(part.count for part in sampling)
    passes = int(draft.passes[drafts])
    tokens = sum(part.count * part.tokens for part in batch)
    seconds = law.pass_time(0.0, 0.0, draft.first[tokens], draft.once[sequences], passes, draft.following[sequences])
    rows, sums = rows_of_kinds(draft, target).view(np.recarray), _sums(target.attention, batch)
    for part in sampling:
        one = np.zeros(len(sums), SUMS).view(np.recarray)
        law.add_drafts(one, target.attention.view(np.recarray), len(sums), part.computed + part.tokens - part.drafts)
        for total, keys in zip(sums, one.draft_keys.tolist(), strict=True):
            total.draft_keys += part.count * keys
    return float(seconds + law.draft_attention_time(rows, len(rows), sums, draft.first_attends, passes, sequences))


def draft_time(draft: DraftCost, target: StepCost, sequences: int, context: int, drafts: int) -> float:
    """Seconds of drafting in the step of `batch_time`, as many drafts as are verified."""
    return drafting_time(draft, target, decodes(sequences, context, drafts), drafts)
