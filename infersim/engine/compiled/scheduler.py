"""One scheduler step as vLLM V1 makes it: running sequences, then waiting ones; blocks; preemption from the tail.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule); the names are vLLM's. A request is a
row of state.REQUEST, a queue a linked list through it.
"""

from .allocation import (
    allocate,
    allocate_cached,
    allocate_identified,
    allocate_matched,
    cached_tokens,
    gate,
    keeps_tables,
    promised_blocks,
)
from .blocks import identify
from .gang import decode_group, readmit_group
from .njit import compiled, inlined
from .preemption import preempt_last, retract
from .pricing import add_to_sums, add_verification
from .queue import remove
from .radix import match_prefix
from .state import (
    ADMIT,
    DECODES,
    DECODES_IF_NO_PREFILL,
    EVERYTHING,
    PREFILLS,
    RESERVE_TO_COMPLETION,
    RESERVED_PER_SEQUENCE,
    RUNNING,
)


@compiled
def wished_tokens(requests, scheduler, knobs, running):
    """Tokens that running requests may still generate, as SGLang counts them: it expects new_token_ratio of them."""
    wished = 0
    for i in range(scheduler.num_running):
        request = requests[running[i]]
        wished += min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
    return wished


@inlined
def schedule(
    requests, replica, scheduler, knobs, running, step, drafts, plan, sums, attention, num_kinds, blocks, tables, nodes,
    segments, sequences, speculates,
):  # fmt: skip
    """Make one step: fills step[:] with entries and the scheduler's num_scheduled and num_tokens, adds to sums.

    An entry is a request; of one with several sequences (groups.py) all count, num_forked of them beyond the first.

    running: i4[max_num_seqs], the request rows in order of admission; step: i4[max_num_seqs], a request row if it
    samples a token, else its bitwise complement; drafts: i2[max_num_seqs], how many it verifies; plan: this replica's,
    sums, blocks, tables and nodes this rank's of state.ARRAYS.
    """
    scheduler.step = replica.num_steps
    if scheduler.identified < 0:
        identify(requests, knobs, scheduler, blocks, tables, -1, -1)
    budget = knobs.max_num_batched_tokens
    count = 0
    preempted = False
    threshold = knobs.long_prefill_token_threshold
    if knobs.long_prefill_needs_contention and scheduler.num_running + scheduler.num_waiting <= 1:
        threshold = 0
    only_full = num_kinds == 1 and attention[0].window == 0
    placeholder = 1 if knobs.async_scheduling else 0
    longest = knobs.max_model_len - 1
    proposed = plan[scheduler.num_running, 0]
    scheduler.draft_passes = plan[scheduler.num_running, 1]
    scheduler.num_verified = 0
    scheduler.num_drafting = 0
    scheduler.draft_keys = 0
    scheduler.num_forked = 0
    was_running = scheduler.num_running
    wished = 0
    if knobs.clip_max_new_tokens > 0 and scheduler.waiting_head >= 0:
        wished = wished_tokens(requests, scheduler, knobs, running)
    prefilled = False
    phases = knobs.order
    while phases > 0:
        phase = phases & 7
        phases >>= 3
        if phase == ADMIT:
            if preempted or (knobs.admit_when_idle and was_running > 0):
                continue
            expected = wished * scheduler.new_token_ratio
            promised = 0
            if knobs.reserve == RESERVE_TO_COMPLETION and scheduler.waiting_head >= 0:
                promised = promised_blocks(requests, scheduler, knobs, running)
            swapped_in = False
            q = scheduler.waiting_head
            while q >= 0 and budget > 0 and scheduler.num_running < knobs.max_num_seqs:
                request = requests[q]
                after = request.next
                if knobs.num_sequences > 1:
                    if scheduler.num_running + scheduler.num_forks + request.num_sequences > knobs.max_num_seqs:
                        break
                    if request.num_output_tokens > 0:  # a group, which was swapped
                        n = readmit_group(
                            requests, q, replica, scheduler, knobs, running, budget, sums, attention, num_kinds,
                            blocks, sequences,
                        )  # fmt: skip
                        if n == 0:
                            break
                        swapped_in = True
                        drafts[count] = 0
                        step[count] = q
                        count += 1
                        budget -= n
                        q = after
                        continue
                arrived = request.num_blocks > 0  # its KV came from elsewhere
                if (
                    keeps_tables(knobs)
                    and not arrived
                    and replica.num_reserved >= RESERVED_PER_SEQUENCE * knobs.max_num_seqs
                ):
                    break  # rows of the tables are left for what runs
                if request.last_step >= replica.num_steps - replica.in_flight:
                    q = after  # preempted, and a step with it is still to come back
                    continue
                if swapped_in and request.num_swapped == 0:
                    break  # prompts wait until nobody is swapped
                num_tokens = request.prompt_tokens + request.num_output_tokens
                watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
                computed = request.num_computed_tokens
                looked_up = scheduler.identified and request.table < 0
                busy_hits, idle_hits = 0, 0
                if looked_up:
                    computed = cached_tokens(q, request, scheduler, knobs, blocks, tables, segments, watermark)
                    if computed == -1:
                        break
                    if computed < 0:
                        q = after
                        continue
                    idle_hits = scheduler.idle_hit_blocks
                    busy_hits = scheduler.hit_blocks - idle_hits
                elif knobs.radix and not arrived:
                    computed = match_prefix(request, num_tokens - 1, scheduler, knobs, requests, nodes, segments)
                    idle_hits = scheduler.idle_hit_blocks
                    busy_hits = scheduler.hit_blocks - idle_hits
                n = num_tokens - computed
                if knobs.clip_max_new_tokens > 0:
                    new = min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
                    available = (scheduler.free_blocks - idle_hits) // scheduler.num_tables * knobs.block_size
                    if scheduler.num_running > 0 and n + new + knobs.block_size >= available - expected:
                        break
                if 0 < threshold < n:
                    n = threshold
                if n > budget and not knobs.chunked_prefill:
                    if knobs.skip_unfit_prefill:
                        q = after
                        continue
                    break
                n = min(n, budget)
                if not gate(request, scheduler, knobs, busy_hits, watermark, promised):
                    if (
                        looked_up
                        and knobs.reserve_full_isl
                        and not knobs.late_hits
                        and scheduler.num_tables == 1
                        and knobs.kv_window[0] == 0
                    ):
                        scheduler.blocked_request = q
                    break
                if looked_up:
                    if not allocate_cached(request, scheduler, knobs, blocks, tables, segments, computed, n, watermark):
                        break
                elif scheduler.identified:
                    if not allocate_identified(
                        request, scheduler, knobs, blocks, tables, segments, computed + n, True, watermark
                    ):
                        break
                elif knobs.radix and not arrived:
                    if not allocate_matched(request, scheduler, knobs, tables, nodes, computed, n, watermark):
                        break
                elif not allocate(request, scheduler, knobs, tables, computed + n, True, watermark):
                    break
                remove(requests, scheduler, q)
                if arrived:
                    replica.num_reserved -= 1
                request.status = RUNNING
                running[scheduler.num_running] = q
                scheduler.num_running += 1
                if knobs.num_sequences > 1:
                    scheduler.num_forks += request.num_sequences - 1
                if request.scheduled < 0.0:
                    request.scheduled = replica.now
                    request.num_cached_tokens = 0 if arrived else computed
                if knobs.reserve == RESERVE_TO_COMPLETION:
                    length = (request.max_num_tokens + knobs.block_size - 1) // knobs.block_size
                    promised += scheduler.num_tables * (length - request.table_length)
                if computed + n == num_tokens:
                    expected += min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
                add_to_sums(sums, attention, num_kinds, computed, n)
                request.last_step = replica.num_steps
                request.prefill_end = num_tokens
                if request.num_swapped > 0:
                    scheduler.free_cpu_blocks += request.num_swapped
                    scheduler.copy_time += request.num_swapped * knobs.swap_block_time
                    replica.num_copied += request.num_swapped
                    scheduler.held_tokens += computed
                    request.num_swapped = 0
                    swapped_in = True
                else:
                    prefilled = True
                    scheduler.held_tokens += computed - request.num_computed_tokens  # what was cached
                request.num_computed_tokens = computed + n
                drafts[count] = 0
                if computed + n == request.num_tokens:
                    request.num_tokens += placeholder
                    request.num_drafts = proposed
                    if proposed > 0:
                        scheduler.num_drafting += 1
                        scheduler.draft_keys += computed + n
                    step[count] = q
                else:
                    step[count] = ~q
                count += 1
                budget -= n
                q = after
            continue

        if phase == DECODES_IF_NO_PREFILL:
            if prefilled:
                continue
            phase = DECODES
        if phase == DECODES and knobs.retracts:
            if retract(requests, replica, scheduler, knobs, running, blocks, tables, nodes, segments):
                preempted = True
            elif scheduler.num_running > 0:
                scheduler.new_token_ratio = max(
                    scheduler.new_token_ratio - knobs.new_token_ratio_decay, knobs.min_new_token_ratio
                )
        plain = only_full and phase != PREFILLS
        num_decodes, decode_keys, more_queries, more_pairs = 0, 0, 0, 0
        num_verified, num_drafting, draft_keys = 0, 0, 0
        i = 0
        while i < scheduler.num_running and budget > 0:
            q = running[i]
            request = requests[q]
            i += 1
            computed = request.num_computed_tokens
            ahead = computed
            if speculates:
                ahead += request.num_drafts + knobs.lookahead
            if (
                plain
                and computed + 1 == request.num_tokens
                and ahead < request.slots
                and request.num_tokens < request.max_num_tokens - placeholder
                and (
                    phase == EVERYTHING or (computed >= request.prefill_end and request.last_step != replica.num_steps)
                )
            ):  # what comes below, for most sequences of most steps: one token, with a block to put it in
                if not speculates:
                    num_decodes += 1
                    decode_keys += computed + 1
                    request.last_step = replica.num_steps
                    request.num_computed_tokens = computed + 1
                    request.num_tokens += placeholder
                    step[count] = q
                    count += 1
                    budget -= 1
                    continue
                verified = request.num_drafts
                if verified < budget and ahead < longest and (threshold == 0 or verified < threshold):
                    n = 1 + verified
                    num_decodes += 1
                    decode_keys += computed + n
                    more_queries += verified
                    more_pairs += verified * computed + n * verified // 2
                    request.last_step = replica.num_steps
                    request.num_computed_tokens = computed + n
                    request.num_tokens += placeholder * n
                    request.num_drafts = proposed
                    num_verified += verified
                    num_drafting += 1
                    draft_keys += computed + 1
                    drafts[count] = verified
                    step[count] = q
                    count += 1
                    budget -= n
                    continue
            if phase != EVERYTHING and (
                (phase == DECODES) != (computed >= request.prefill_end) or request.last_step == replica.num_steps
            ):
                continue  # not of this phase, or scheduled in this step already
            if knobs.num_sequences > 1 and request.num_output_tokens > 0:
                before = replica.num_preemptions
                n = decode_group(
                    requests, q, replica, scheduler, knobs, running, budget, sums, attention, num_kinds, blocks,
                    tables, nodes, segments, sequences,
                )  # fmt: skip
                preempted = preempted or replica.num_preemptions > before
                if n < 0:
                    break
                if n > 0:
                    drafts[count] = 0
                    step[count] = q
                    count += 1
                    budget -= n
                continue
            known = request.prompt_tokens + request.num_output_tokens
            if request.num_tokens > known and known + 1 >= request.max_num_tokens:
                continue  # its last token is in flight
            own = request.num_tokens - computed
            if own <= 0:
                continue  # its next token is not known yet
            n = own + request.num_drafts
            if 0 < threshold < n:
                n = threshold
            n = min(n, budget, longest - computed)
            if n <= 0:
                continue
            end = min(computed + n + knobs.lookahead, knobs.max_model_len)
            # without branches, since drafts make it hard to predict: a block is missing, or full, or may leave a window
            full = known >= (request.num_hashed_blocks + 1) * knobs.block_size
            missing = end > request.table_length * knobs.block_size
            if (end > request.slots) & (full | missing | (request.slots == 0)):
                victim = -1
                while True:
                    if scheduler.identified:
                        if allocate_identified(request, scheduler, knobs, blocks, tables, segments, end, False, 0):
                            break
                    elif allocate(request, scheduler, knobs, tables, end, False, 0):
                        break
                    victim = preempt_last(requests, replica, scheduler, knobs, running, blocks, tables, nodes, segments)
                    preempted = True
                    if victim == q:
                        break
                if victim == q:
                    break
            if n == 1 and only_full:
                num_decodes += 1
                decode_keys += computed + 1
            elif own == 1 and only_full:
                num_decodes += 1
                decode_keys += computed + n
                more_queries += n - 1
                more_pairs += (n - 1) * computed + n * (n - 1) // 2
            elif own == 1 and n > 1:
                add_verification(sums, attention, num_kinds, computed, n)
            else:
                add_to_sums(sums, attention, num_kinds, computed, n)
            request.last_step = replica.num_steps
            request.num_computed_tokens = computed + n
            verified = max(n - own, 0)
            drafts[count] = verified
            if n >= own:
                request.num_tokens += placeholder * (1 + verified)
                request.num_drafts = proposed
                scheduler.num_verified += verified
                if proposed > 0:
                    scheduler.num_drafting += 1
                    scheduler.draft_keys += computed + own
                step[count] = q
            else:
                step[count] = ~q
            count += 1
            budget -= n
        prefilled = prefilled or (phase == PREFILLS and count > 0)
        scheduler.num_verified += num_verified
        if proposed > 0:
            scheduler.num_drafting += num_drafting
            scheduler.draft_keys += draft_keys
        sums[0].num_decodes += num_decodes
        sums[0].decode_keys += decode_keys
        sums[0].more_queries += more_queries
        sums[0].more_pairs += more_pairs

    scheduler.num_scheduled = count + scheduler.num_forked
    scheduler.num_tokens = knobs.max_num_batched_tokens - budget
    scheduler.held_tokens += scheduler.num_tokens - scheduler.num_forked
