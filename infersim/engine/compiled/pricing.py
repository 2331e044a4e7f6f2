"""The price of a step: law.py, compiled, on a replica's tables."""

from types import FunctionType

from . import law
from .njit import compiled, inlined
from .state import ACTIVATIONS, COMPUTE, DRAFT, KV, LAUNCH, LAYERS, OFFLOAD


def _compile(names: dict, one_caller: set[str]) -> dict:
    """Every function of a plain module, compiled: where they call one another they call the compiled ones."""
    own = [name for name, value in names.items() if isinstance(value, FunctionType)]
    for name in own:
        how = inlined if name in one_caller else compiled
        names[name] = how(FunctionType(names[name].__code__, names, name))
    return names


_LAW = _compile(dict(vars(law)), one_caller={"attention_time", "pass_time"})
add_to_sums, add_verification, add_drafts = (_LAW[name] for name in ("add_to_sums", "add_verification", "add_drafts"))
attention_time, draft_attention_time, pass_time = (
    _LAW[name] for name in ("attention_time", "draft_attention_time", "pass_time")
)


@inlined
def clear(sums, num_kinds):
    """Make the sums ready for the next step."""
    for kind in range(num_kinds):
        s = sums[kind]
        s.num_decodes = 0
        s.decode_keys = 0
        s.more_queries = 0
        s.more_pairs = 0
        s.prefill_tokens = 0
        s.prefill_keys = 0
        s.prefill_pairs = 0
        s.query_tiles = 0
        s.num_prefills = 0
        s.draft_keys = 0


@inlined
def count(core, computed, n, drafts):
    """n tokens after `computed` ones, so many of them drafts, are in the step."""
    if drafts > 0 and drafts == n - 1:
        add_verification(core.sums, core.attention, core.price.num_kinds, computed, n)
    else:
        add_to_sums(core.sums, core.attention, core.price.num_kinds, computed, n)
    core.scheduler.num_verified += drafts


@inlined
def price_step(a, r):
    """Seconds of the step just made, on the device: the slowest rank's, and what all ranks do together on the tokens of
    all; `slow` times as long while the replica is slow.

    An idle rank runs a dummy step. steps_priced counts the rows of the table used (their split by resource is added up
    from it afterwards); the split of attention and copies is added to the replica's.
    """
    ranks = a.call.ranks
    price = a.prices[r]
    slowest = -1.0
    chosen = 0
    tokens = 0
    for rank in range(ranks):
        scheduler, sums = a.schedulers[r * ranks + rank], a.sums[r * ranks + rank]
        tokens += scheduler.num_tokens
        linear = a.table[price.linear + scheduler.num_tokens]
        head = a.table[price.head + scheduler.num_scheduled + scheduler.num_verified]
        if price.draft_first >= 0:
            total = pass_time(
                linear,
                head,
                a.table[price.draft_first + scheduler.num_tokens],
                a.table[price.draft_once + scheduler.num_drafting],
                scheduler.draft_passes,
                a.table[price.draft_following + scheduler.num_drafting],
            )
            a.scratch[rank, DRAFT] = draft_attention_time(
                a.draft_attention[r], price.num_draft_kinds, sums, price.first_attends, scheduler.draft_passes,
                scheduler.num_drafting,
            )  # fmt: skip
            total += a.scratch[rank, DRAFT]
        else:
            total = pass_time(linear, head, 0.0, 0.0, 0, 0.0)
        if scheduler.num_block_copies > 0:
            copies = scheduler.num_block_copies * a.knobs[r].copy_block_time
            a.replicas[r].num_block_copies += scheduler.num_block_copies
            scheduler.num_block_copies = 0
            a.scratch[rank, KV] += copies
            total += copies
        total += attention_time(a.attention[r], price.num_kinds, sums, a.scratch[rank])
        if scheduler.copy_time > 0.0:
            copies = scheduler.copy_time
            if a.knobs[r].kv_offloading_load == LAYERS:  # a layer is computed while the next one is loaded
                hidden = min(total, scheduler.load_time)
                copies -= hidden - hidden / a.knobs[r].num_layers
            a.scratch[rank, OFFLOAD] += copies
            total += copies
            a.replicas[r].load_time += scheduler.load_time * price.slow
            scheduler.copy_time = scheduler.load_time = 0.0
        clear(sums, price.num_kinds)
        if total > slowest:
            slowest = total
            chosen = rank
    scheduler = a.schedulers[r * ranks + chosen]
    a.steps_priced[price.linear + scheduler.num_tokens] += price.slow
    a.steps_priced[price.head + scheduler.num_scheduled + scheduler.num_verified] += price.slow
    if price.draft_first >= 0:
        a.steps_priced[price.draft_first + scheduler.num_tokens] += price.slow
        a.steps_priced[price.draft_once + scheduler.num_drafting] += price.slow
        a.steps_priced[price.draft_following + scheduler.num_drafting] += scheduler.draft_passes * price.slow
    if price.shared >= 0:
        own = a.knobs[r].ranks
        row = price.shared + (tokens + own - 1) // own
        slowest += a.table[row]
        a.steps_priced[row] += price.slow
    spend(a, r, chosen)
    return slowest * price.slow


@inlined
def spend(a, r, chosen):
    """Add what the chosen rank's step took to its replica's time by resource."""
    price = a.prices[r]
    for rank in range(a.call.ranks):
        share = price.issue_share * price.slow if rank == chosen else 0.0
        spend_on(a, r, rank, KV, share)
        spend_on(a, r, rank, ACTIVATIONS, share)
        spend_on(a, r, rank, COMPUTE, share)
        spend_on(a, r, rank, LAUNCH, share)
        if price.draft_first >= 0:
            spend_on(a, r, rank, DRAFT, share)
        if a.scratch[rank, OFFLOAD] > 0.0:
            spend_on(a, r, rank, OFFLOAD, share)


@inlined
def spend_on(a, r, rank, resource, share):
    """`spend` of one resource; a loop over them takes a twentieth of a run."""
    a.replicas[r].time_by_resource[resource] += a.scratch[rank, resource] * share
    a.scratch[rank, resource] = 0.0
