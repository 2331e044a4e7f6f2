"""Random small scenarios for the engine and its oracle: tiny KV pools, many ties, every combination of knobs.

The times of exact scenarios are whole multiples of TICK, a power of two, and prices are sums of such: floating point
adds them without rounding in any order, so arrivals and ends of steps tie exactly and both sides must decide alike.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from infersim.engine.compiled.state import ATTENTION_PRICE, RESOURCES
from infersim.engine.price import DraftCost, StepCost

COLUMNS = ("arrival", "prompt_tokens", "output_tokens", "max_tokens")
"""beside priority, name and segments"""
TICK = 2.0**-10
ODD_TICK = 0.7316528461937 * TICK  # for requests of scenarios that round: a near tie would be decided by the rounding


@dataclass(frozen=True)
class Scenario:
    """requests: dicts of arrival, prompt_tokens, output_tokens, max_tokens and, with prefix caching, name and segments;
    knobs: by the oracle's names."""

    requests: list[dict]
    knobs: dict
    cost: StepCost
    draft: DraftCost | None = None
    accepted: np.ndarray | None = None
    """f8[rows, 2, depth]; request i has row i % rows"""

    def accept(self, index: int, outputs: int, all_accepted: bool) -> int:
        """Drafts accepted, by the engine's rule of draws worked out in plain integers."""
        key = integer_keys(0, "acceptance", -1 - index)
        row = self.accepted[index % len(self.accepted), int(all_accepted)]
        draw = (splitmix64(key, outputs) >> 11) * 2.0**-53
        return next((i for i, chance in enumerate(row) if not draw < chance), len(row))

    def parent(self, index: int, outputs: int, sequence: int) -> int:
        """The beam from which a beam goes on, by the same rule."""
        k, turnover = self.knobs["num_sequences"], self.knobs["beam_turnover"]
        draw = (splitmix64(integer_keys(0, "beams", -1 - index), outputs * k + sequence) >> 11) * 2.0**-53
        return min(int(draw / turnover * k), k - 1) if draw < turnover else sequence

    def jumps(self, index: int, outputs: int) -> bool:
        """Whether the grammar decides what follows, by the same rule."""
        draw = (splitmix64(integer_keys(0, "jumps", -1 - index), outputs) >> 11) * 2.0**-53
        return draw < self.knobs.get("jump_chance", 0.0)


def splitmix64(key: int, position: int) -> int:
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def integer_keys(seed: int, purpose: str, name: int) -> int:
    """The key of a request's draws: its name under seed and purpose."""
    key = seed % 2**64
    for byte in purpose.encode():
        key = splitmix64(key, byte) >> 11
    return splitmix64(name % 2**64 ^ (key << 11) % 2**64, 0) >> 11


@dataclass(frozen=True)
class InTurn:
    """An acceptance table whose rows take turns."""

    accepted: np.ndarray

    def rows(self, request_ids, uniform):
        return (request_ids % len(self.accepted)).astype("i4")


@st.composite
def families(draw) -> dict:
    """The rules in which engines differ; half of the time vLLM's."""
    if draw(st.booleans()):
        return {}
    clip = draw(st.sampled_from([0, 0, 3, 30]))
    return {
        "order": draw(st.sampled_from(["running-first", "decodes-first", "prefills-first", "prefills-only"])),
        "reserve": draw(st.sampled_from(["first-chunk", "whole-prompt", "max-model-len", "to-completion"])),
        "admit_when_idle": draw(st.sampled_from([False, False, True])),
        "late_hits": draw(st.sampled_from(["hit", "miss", "wait"])),
        "clip_max_new_tokens": clip,
        "retracts": draw(st.booleans()),
        "new_token_ratio": (ratio := draw(st.sampled_from([0.25, 0.5, 1]))),
        "min_new_token_ratio": draw(st.sampled_from([0.125, ratio])),
        "new_token_ratio_decay": draw(st.sampled_from([0, 0.0625])),
    }


@st.composite
def knobs(draw, exact: bool = True) -> dict:
    """Settings as vLLM accepts them: any request of max_model_len tokens can run alone."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    load = TICK if exact else 0.6180339887 * TICK  # of no step's length
    max_model_len = draw(st.integers(4, 40))
    kv_window, kv_multiplicity = draw(
        st.sampled_from(
            [((0,), (1,))] * 4
            + [((5,), (1,)), ((0, 4), (1, 1)), ((0, 7), (1, 2)), ((3, 0, 9), (1, 1, 1)), ((0, 1), (1, 2))]
        )
    )
    needed_blocks = -(-max_model_len // block_size) * sum(kv_multiplicity)
    chunked_prefill = draw(st.sampled_from([True, True, False]))
    max_num_batched_tokens = draw(st.integers(1, 32)) + (0 if chunked_prefill else max_model_len)
    async_scheduling = draw(st.booleans())
    allocator = draw(st.sampled_from(["paged"] * 4 + ["contiguous", "buddy"]))
    if allocator != "paged":
        kv_window, kv_multiplicity = (0,), (1,)
        needed_blocks = -(-max_model_len // block_size)
        needed_blocks = 1 << (needed_blocks - 1).bit_length()
        reserve = draw(st.sampled_from(["max-model-len", "power-of-two", "output-length"]))
        pieces = {"allocator": allocator, "reserve": reserve, "enable_prefix_caching": False}
    elif kv_window == (0,) and draw(st.sampled_from([False, False, True])):
        room = draw(st.sampled_from([2, needed_blocks, 100]))
        pieces = {"num_cpu_blocks": room, "swap_block_time": TICK}
    elif kv_window == (0,) and draw(st.booleans()):
        policy = draw(st.sampled_from(["fcfs", "lpm", "lpm", "priority", "shortest-first"]))
        pieces = {"radix": True, "policy": policy, "enable_prefix_caching": False}
        if policy == "lpm" and draw(st.booleans()):  # prompts long enough to wait for one another's text
            max_model_len += 40
            max_num_batched_tokens += 0 if chunked_prefill else 40
            needed_blocks = -(-max_model_len // block_size)
    else:
        pieces = {}
    if kv_window == (0,) and allocator == "paged" and "radix" not in pieces and draw(st.booleans()):
        cpu = draw(st.sampled_from([1, 2, 5, needed_blocks, 100]))
        pieces["tier_blocks"] = (cpu, draw(st.sampled_from([0, 1, 3, needed_blocks, 100])))
        pieces["tier_latency"] = tuple(draw(st.sampled_from([0, 1, 5])) * load for _ in range(2))
        pieces["tier_block_time"] = tuple(draw(st.sampled_from([0, 1, 3])) * load for _ in range(2))
        pieces["enable_prefix_caching"] = True
        pieces["write_through"] = draw(st.sampled_from(["write_back", "write_through"]))
    if "allocator" not in pieces and kv_window == (0,) and "radix" not in pieces:
        pieces["kv_offloading_load"] = draw(st.sampled_from(["blocking", "layers", "background"]))
        pieces |= {
            "num_layers": draw(st.sampled_from([1, 4])),
            "store_block_time": draw(st.sampled_from([0, 2])) * load,
        }
        pieces["store_latency"] = draw(st.sampled_from([0, 3])) * load
    return {
        "block_size": block_size,
        "num_gpu_blocks": 1 + needed_blocks + draw(st.sampled_from([0, needed_blocks // 2, 2 * needed_blocks])),
        "max_num_seqs": min(draw(st.integers(1, 10)), max_num_batched_tokens),
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "chunked_prefill": chunked_prefill,
        "skip_unfit_prefill": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 8])),
        "long_prefill_needs_contention": draw(st.booleans()),
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 1, 2, 5])),
        "reserve_full_isl": draw(st.booleans()),
        "gate_caps_windows": draw(st.booleans()),
        "windows_by_processed": draw(st.booleans()),
        "sparse_windows": draw(st.booleans()),
        "evict_unhashed_first": draw(st.booleans()),
        "admission_lookahead": draw(st.booleans()),
        "skips_behind_victim": draw(st.booleans()),
        "resumes_in_flight": draw(st.booleans()),
        "keeps_skipped_first": draw(st.booleans()),
        "drafts_within_max_tokens": draw(st.booleans()),
        "watermark_blocks": draw(st.sampled_from([0, 0, 1, 3])),
        "batch_queue": draw(st.sampled_from(["steps", "until-done", "until-full"])),
        "steps_in_flight": draw(st.sampled_from([2, 1] if async_scheduling else [1, 2, 3])),
        "async_scheduling": async_scheduling,
        **draw(families()),
        "enable_prefix_caching": draw(st.booleans()) or 1 in kv_window,  # a state that is only counted is no window
        "state_cuts": draw(st.sampled_from(["last-block", "last-token"])),
        "kv_window": kv_window,
        "kv_multiplicity": kv_multiplicity,
        "max_concurrency": draw(st.sampled_from([0, 0, 1, 2, 5])),
        "host_step_time": draw(st.sampled_from([0, 0, 1, 4])) * TICK,
        "host_sequence_time": draw(st.sampled_from([0, 0, 1])) * TICK,
        "host_request_time": draw(st.sampled_from([0, 0, 1, 7])) * (TICK if exact else ODD_TICK),
        "host_prompt_token_time": draw(st.sampled_from([0, 0, 1])) * TICK,
        "host_request_latency": draw(st.sampled_from([0, 0, 5])) * TICK,
        **draw(
            st.sampled_from(
                [
                    {},
                    {},
                    {},
                    {"scheduler_recv_interval": 3},
                    {"batch_wait_timeout_iters": 4},
                    {"batch_wait_timeout_iters": 4, "batch_wait_max_tokens_ratio": 0.75},
                ]
            )
        ),
        "host_token_time": draw(st.sampled_from([0, 0, 0, 1, 3])) * TICK,
        "policy": draw(st.sampled_from(["fcfs", "fcfs", "priority", "shortest-first"])),
        **pieces,
    }


@st.composite
def requests(draw, max_model_len: int, exact: bool = True) -> list[dict]:
    """3 to 40 requests, often several at once; most fit max_model_len, and many end before their max_tokens."""
    size = draw(st.integers(3, 40))
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 0, 1, 2, 5, 10, 40]),  # ticks since the one before
                st.integers(1, max_model_len // 2) | st.integers(1, max_model_len + 1),
                st.integers(1, max_model_len),
                st.sampled_from(["exact", "exact", "early", "early", "cut", "unbounded"]),
            ),
            min_size=size,
            max_size=size,
        )
    )
    result, arrival = [], 0.0
    for gap, prompt_tokens, length, end in rows:
        arrival += gap * (TICK if exact else ODD_TICK)
        room = max(1, max_model_len - prompt_tokens)
        fitting = min(length, room)
        output_tokens, max_tokens = {
            "exact": (fitting, fitting),
            "early": (fitting, room),
            "cut": (length, max(1, fitting // 2)),
            "unbounded": (length, length),  # rejected if it does not fit
        }[end]
        result.append(
            {
                "arrival": arrival,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
                "max_tokens": max_tokens,
                "priority": len(result) * 7 % 3,
            }
        )
    return result


@st.composite
def with_shared_text(draw, rows: list[dict]) -> list[dict]:
    """The same requests with prompts that begin alike, or with what an earlier request asked and was answered."""
    result = []
    for index, row in enumerate(rows):
        segments = []
        earlier = draw(st.integers(-4, index - 1))
        if earlier >= 0:
            before = result[earlier]
            used = sum(length for _, length in before["segments"])
            segments += [
                *before["segments"],
                (before["name"], before["prompt_tokens"] + before["output_tokens"] - used),
            ]
        else:
            segments += draw(st.lists(st.tuples(st.integers(1, 2), st.sampled_from([4, 4, 12, 33])), max_size=3))
        kept, left = [], row["prompt_tokens"]
        for name, length in segments:
            if left > 0:
                kept.append((name, min(length, left)))
                left -= length
        result.append({**row, "name": -1 - index, "segments": tuple(kept)})
    return result


def price_attention(draw, kind: np.void, exact: bool) -> None:
    """Fills one row of ATTENTION_PRICE, but for its window."""
    ticks = st.sampled_from([0, 0, 1, 2]) if exact else st.floats(0, 2)
    for name in ATTENTION_PRICE.names:
        if name.endswith("_softness"):
            kind[name] = draw(st.sampled_from([0, 1]) if exact else st.floats(0, 1))
        elif name.endswith(("_axes", "_grid")):  # without, times are whole ticks
            values = st.lists(st.floats(-1, 2), min_size=kind[name].size, max_size=kind[name].size)
            kind[name] = 0 if exact else np.reshape(draw(values), kind[name].shape)
        elif name != "window":
            kind[name] = draw(ticks) * TICK


@st.composite
def step_costs(draw, max_num_batched_tokens: int, max_num_seqs: int, exact: bool = True) -> StepCost:
    """A StepCost whose cheapest step takes a tick; exact: whole ticks, and halves and quarters until the next step."""
    ticks = st.sampled_from([0, 0, 1, 2]) if exact else st.floats(0, 2)
    resource = st.integers(0, len(RESOURCES) - 1)
    linear = np.zeros((max_num_batched_tokens + 1, len(RESOURCES)))
    tokens = np.arange(max_num_batched_tokens + 1)
    linear[1:, draw(resource)] += (1 + 2 * draw(ticks)) * TICK
    linear[:, draw(resource)] += draw(ticks) * TICK * tokens
    linear[:, draw(resource)] += draw(ticks) * TICK * -(-tokens // 8)  # waves
    head = np.zeros((max_num_seqs + 1, len(RESOURCES)))
    head[:, draw(resource)] = draw(ticks) * TICK * np.arange(max_num_seqs + 1)
    attention = np.zeros(draw(st.integers(1, 4)), ATTENTION_PRICE)
    for kind in attention:
        kind["window"] = draw(st.sampled_from([0, 0, 1, 4, 16, -3, -8]))
        price_attention(draw, kind, exact)
    return StepCost(linear, head, attention, issue_share=draw(st.sampled_from([1, 1, 0.5, 0.25])))


@st.composite
def speculation(draw, knobs: dict, cost: StepCost, exact: bool = True) -> tuple[DraftCost, np.ndarray]:
    """A drafter and its acceptance; adds drafts, draft_passes, depth and lookahead to the knobs.

    Blocks that are only counted are not followed through windows that roll back: no windows without prefix caching.
    """
    ticks = st.sampled_from([0, 0, 1, 2]) if exact else st.floats(0, 2)
    most = draw(st.integers(1, 6))
    depth = draw(st.sampled_from([most, max(most // 2, 1)]))  # a tree has more nodes than levels
    drafts = draw(st.lists(st.sampled_from([most, most, 0, 1]), min_size=1, max_size=3))
    drafts += [drafts[-1]] * (knobs["max_num_seqs"] + 1 - len(drafts))
    knobs["drafts"] = tuple(drafts[: knobs["max_num_seqs"] + 1])
    passes = [0, *(max(i - 1, 0) for i in range(1, most + 1))]
    knobs["draft_passes"], knobs["depth"] = tuple(passes), depth
    knobs["lookahead"] = draw(st.sampled_from([0, most]))
    knobs["drop_last_hit"] = draw(st.booleans())
    knobs["drafter_drop"] = draw(st.sampled_from(["each", "one", "one-or-last"]))
    knobs["resumes_in_flight"] = False  # of pipelines, in which nothing speculates
    room = knobs["max_num_batched_tokens"] - 1
    knobs["draft_slots"] = draw(st.sampled_from([0, 0, min(room, 1)]))
    knobs["pads_drafts"] = draw(st.sampled_from(["beside-or-cached", "beside-running"]))
    fits = most + knobs["draft_slots"] <= room and not knobs.get("clip_max_new_tokens")  # vLLM's, and SGLang's
    knobs["padded_drafts"] = draw(st.sampled_from([0, most])) if fits else 0
    attention = np.zeros(draw(st.integers(0, 2)), ATTENTION_PRICE)
    for kind in attention:
        kind["window"] = draw(st.sampled_from(cost.attention["window"].tolist()))
        price_attention(draw, kind, exact)
    sequences = np.arange(knobs["max_num_seqs"] + 1)
    draft = DraftCost(
        first=draw(ticks) * TICK * np.arange(knobs["max_num_batched_tokens"] + 1),
        once=draw(ticks) * TICK * sequences,
        following=draw(ticks) * TICK * sequences,
        attention=attention,
        passes=np.array(passes, "i4"),
        first_attends=draw(st.booleans()),
    )
    chances = st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=depth, max_size=depth)
    rows = draw(st.lists(st.tuples(chances, chances), min_size=1, max_size=3))
    return draft, np.array(rows).cumprod(axis=2)


@st.composite
def grouped(draw, knobs: dict, rows: list[dict], exact: bool) -> list[dict]:
    """Makes each request a group: beams, or samples with ends of their own. Sets the knobs that go with it."""
    k = draw(st.integers(2, 6))
    knobs |= {
        "num_sequences": k,
        "beam_turnover": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "max_num_seqs": k * draw(st.integers(1, 3)) + draw(st.integers(0, 1)),
        "num_cpu_blocks": draw(st.sampled_from([0, 3, 10, 100])),
        "swap_block_time": TICK,
        "copy_block_time": draw(st.sampled_from([0, 1])) * (TICK if exact else ODD_TICK),
        "enable_prefix_caching": False,
        "radix": False,
        "tier_blocks": (0, 0),
        "policy": draw(st.sampled_from(["fcfs", "fcfs", "priority", "shortest-first"])),
        "async_scheduling": False,
        "steps_in_flight": 1,
        "kv_window": (0,),
        "kv_multiplicity": (1,),
        "retracts": False,
        "clip_max_new_tokens": 0,
        "order": draw(st.sampled_from(["running-first", "running-first", "prefills-only"])),
        "reserve": draw(st.sampled_from(["first-chunk", "whole-prompt"])),
        "allocator": "paged",
    }
    whole = -(-knobs["max_model_len"] // knobs["block_size"])
    knobs["num_gpu_blocks"] = 1 + whole + draw(st.sampled_from([0, 1, k, 2 * k, k * whole]))
    budget = knobs["max_num_batched_tokens"]
    if knobs["chunked_prefill"] and draw(st.booleans()):  # a prompt beside a group may leave too little for it
        budget = 0
    knobs["max_num_batched_tokens"] = max(budget, knobs["max_num_seqs"])
    if knobs["beam_turnover"] > 0:
        return rows
    result = []
    for row in rows:
        most = min(row["output_tokens"], row["max_tokens"])
        stops = [most, *draw(st.lists(st.integers(1, most), min_size=k - 1, max_size=k - 1))]
        result.append({**row, "stop_tokens": tuple(draw(st.permutations(stops)))})
    return result


@st.composite
def scenarios(draw, exact: bool = True, may_speculate: bool = True, forks: bool | None = None) -> Scenario:
    """exact=False: prices that are no whole ticks, for the comparison of times to 1e-9. forks: requests are groups of
    sequences, None: sometimes."""
    k = draw(knobs(exact))
    rows = draw(requests(k["max_model_len"], exact))
    if forks or (forks is None and draw(st.integers(0, 5)) == 5):
        rows = draw(grouped(k, rows, exact))
        return Scenario(rows, k, draw(step_costs(k["max_num_batched_tokens"], k["max_num_seqs"], exact)))
    speculates = may_speculate and draw(st.booleans()) and (k["enable_prefix_caching"] or k["kv_window"] == (0,))
    speculates = speculates and "allocator" not in k and "num_cpu_blocks" not in k
    if may_speculate and not speculates and not k["async_scheduling"] and draw(st.booleans()):
        k |= {"jump_tokens": draw(st.integers(1, 6)), "jump_chance": draw(st.sampled_from([0.1, 0.5, 1.0]))}
    logits = k["max_num_batched_tokens"] if speculates else k["max_num_seqs"]
    cost = draw(step_costs(k["max_num_batched_tokens"], logits, exact))
    more = draw(speculation(k, cost, exact)) if speculates else ()
    if (k["enable_prefix_caching"] or k.get("radix")) and draw(st.sampled_from([True, True, False])):
        rows = draw(with_shared_text(rows))
        if "kv_offloading_load" in k and draw(st.booleans()):  # what others have stored
            rows = [{**row, "stored_tokens": draw(st.integers(0, row["prompt_tokens"]))} for row in rows]
    return Scenario(rows, k, cost, *more)
