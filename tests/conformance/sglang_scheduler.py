"""What SGLang's own scheduler decides: random scenarios run in its process, without a model, on a CPU.

Runs where sglang's sources and torch are found and needs nothing of infersim; what is not installed is replaced by a
stub. Scheduler, PrefillAdder, ScheduleBatch, the radix tree, the allocators and the processing of results are SGLang's;
the forward pass is not run. Reads scenarios, one JSON object a line, and answers each with a line {"scenario",
"decisions"}, in the format of replay.py. Every step lasts a second on the device; get_next_batch_to_run takes SCHEDULE
on the scheduler's clock. The loop is that of event_loop_normal or, with async_scheduling, of event_loop_overlap.
"""

import importlib.machinery
import json
import sys
import types
from array import array

SCHEDULE = 2.0**-20
STUBBED = ("triton", "sgl_kernel", "torchvision", "IPython", "orjson", "pybase64", "zmq")
"""imported by modules of the scheduler, and not used by what it decides"""


class Names(type):
    """Of a class that is asked for any name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=Names):
    """Stands for a name of a package that is not installed: may be called, decorate, be asked for names."""

    def __init__(self, *args, **named):
        pass

    def __call__(self, *args, **named):
        return args[0] if len(args) == 1 and callable(args[0]) and not named else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Package(types.ModuleType):
    """A package that is not installed."""

    __path__ = ()
    __version__ = "0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = Names(name, (Anything,), {})
        setattr(self, name, value)
        return value


class Stubs:
    """Finds the packages that are not installed; asked last."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        known = name.split(".")[0] in STUBBED
        return importlib.machinery.ModuleSpec(name, Stubs, is_package=True) if known else None

    @staticmethod
    def create_module(spec):
        return Package(spec.name)

    @staticmethod
    def exec_module(module):
        pass


class Stub:
    """A configuration of which only what is asked for exists; all else is None."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Ignores:
    """Something whose methods do nothing: metrics, streams of output."""

    num_generated_tokens = forward_ct_decode = num_retracted_reqs = 0
    enable_metrics = False

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: None


BAGS = {
    "schedule": Stub(schedule_conservativeness=1.0, retraction_policy="length", schedule_policy="fcfs",
                     schedule_low_priority_values_first=True),
    "memory": Stub(radix_eviction_policy="lru"),
    "disagg": Stub(disaggregation_mode="null"),
    "exec": Stub(
        kernel=Stub(attention_backend="torch_native", prefill_attention_backend=None, decode_attention_backend=None),
        **{name: Stub() for name in ("mamba", "features", "overlap", "deterministic")},
    ),
    "parallel": Stub(tp_size=1, pp_size=1, dp_size=1, attn_dp_size=1, dcp_size=1, dcp_enabled=False, tp_rank=0),
    **{name: Stub() for name in ("spec", "lora", "mm", "serving", "observability", "model", "device")},
}  # fmt: skip


def configure() -> None:
    """SGLang's configuration, before anything imports it by name."""
    import sglang.srt.runtime_context as context

    for name, bag in BAGS.items():
        setattr(context, f"get_{name}", lambda bag=bag: bag)
    bags = Stub(is_config_namespace_published=lambda name: False)
    context.get_context = lambda: bags
    context.attention_backends = lambda: ("torch_native", "torch_native")


def make_loop_class(run):
    """SGLang's Scheduler without what asks for a model, sockets or other ranks; its clock is `run`."""
    from sglang.srt.managers.scheduler import Scheduler

    class Loop(Scheduler):
        def __init__(self):
            pass

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return None

        def ingest_requests(self, stop_at_pause=False):
            run.look()

        def get_next_batch_to_run(self, running_batch, last_batch):
            run.before()
            return super().get_next_batch_to_run(running_batch, last_batch)

        def run_batch(self, batch, pp_proxy_tensors=None):
            self.forward_ct += 1
            return run.launch(batch)

        def process_batch_result(self, batch, result):
            run.finish(batch, result)
            super().process_batch_result(batch, result)
            run.finished()

        def on_idle(self):
            run.idle()

        def nothing(self, *args, **named):
            pass

        _apply_war_barrier = launch_batch_sample_if_needed = _record_step_counters = _process_hicache_events = nothing
        publish_load_snapshot = maybe_send_health_check_signal = send_abort_output = nothing

    return Loop


def make_scheduler(config: dict, run):
    """SGLang's Scheduler with what __init__ would have given it."""
    import torch
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    loop, page = make_loop_class(run)(), config["block_size"]
    size = config["num_gpu_blocks"] * page
    policy = config["policy"] if config["policy"] != "priority" else "fcfs"
    BAGS["schedule"].__dict__.update(
        schedule_policy=policy, enable_mixed_chunk=config["mixed"], disable_priority_preemption=True,
        chunked_prefill_size=config["max_num_batched_tokens"] if config["enable_chunked_prefill"] else -1,
    )  # fmt: skip
    BAGS["parallel"].pp_max_micro_batch_size = config["max_num_seqs"]
    pool = ReqToTokenPool(config["max_num_seqs"], config["max_model_len"] + page, "cpu", False)
    kind = (torch.float16, "cpu", Stub(), False)
    allocator = TokenToKVPoolAllocator(size, *kind) if page == 1 else PagedTokenToKVPoolAllocator(size, page, *kind)
    disabled, full = not config["enable_prefix_caching"], (ComponentType.FULL,)
    params = CacheInitParams(disabled, pool, allocator, page, tree_components=full, tree_core_backend="python")
    loop.__dict__.update(
        req_to_token_pool=pool, token_to_kv_pool_allocator=allocator, tree_cache=UnifiedRadixCache(params),
        page_size=page, enable_overlap=config["async_scheduling"],
        max_prefill_tokens=config["max_prefill_tokens"] or config["max_num_batched_tokens"],
        max_running_requests=config["max_num_seqs"], schedule_policy=policy, is_generation=True, require_mlp_sync=False,
        enable_priority_scheduling=config["policy"] == "priority", schedule_low_priority_values_first=True,
        disaggregation_mode=DisaggregationMode.NULL, spec_algorithm=SpeculativeAlgorithm.from_string(None),
        processed_tokens_counter=0, priority_scheduling_preemption_threshold=0,
        model_config=Stub(vocab_size=1 << 30, is_encoder_decoder=False, is_multimodal=False,
                          _resolved_model_impl="sglang"),
        tp_worker=Stub(model_runner=Stub(attn_backend=Stub(extend_attention_block_m=64))),
        metrics_reporter=Ignores(), load_inquirer=Ignores(), output_streamer=Ignores(), load_publisher=Ignores(),
        grammar_manager=Stub(has_waiting_grammars=lambda: False, abort_requests=lambda request: None),
        dp_attn_adapter=Stub(maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
                             maybe_convert_decode_to_extend=lambda batch: batch),
        ngram_embedding_manager=Stub(prepare_for_forward=lambda batch, chunked_req: batch),
        beam_coordinator=Stub(pending_member_rows=lambda batch: 0, commit_decode=lambda batch: set(),
                              retire_group=lambda request: None),
    )  # fmt: skip
    loop.init_running_status()
    loop.init_chunked_prefill()
    loop.init_schedule_policy()
    names = SchedulerBatchResultProcessor.__dataclass_fields__
    loop.batch_result_processor = SchedulerBatchResultProcessor(**{name: getattr(loop, name) for name in names})
    return loop


class Run:
    """One scenario; `steps` and `requests` as a record has them."""

    def __init__(self, scenario: dict):
        self.config, self.rows = scenario["config"], scenario["requests"]
        self.loop = make_scheduler(self.config, self)
        self.tokens: dict[tuple, int] = {}
        self.now = self.free = 0.0
        self.steps: list[list] = []
        self.requests: dict[int, object] = {}
        self.records = [{"scheduled": None, "first": None, "last": None, "cached": None} for _ in self.rows]
        self.unsent = sorted(range(len(self.rows)), key=lambda i: self.rows[i]["arrival"])
        self.aborts = sorted((r["abort"], i) for i, r in enumerate(self.rows) if r["abort"] is not None)
        self.retractions: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.idles = 0

    def token(self, i: int, position: int) -> int:
        """The token of request i at a position: equal tokens of a text have equal numbers, and no others."""
        for name, length in self.rows[i]["segments"]:
            if position < length:
                return self.tokens.setdefault((name, position), len(self.tokens) + 10)
            position -= length
        return self.tokens.setdefault((self.rows[i]["name"], position), len(self.tokens) + 10)

    def add(self, i: int) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        row = self.rows[i]
        stops = [self.token(i, row["prompt"] + row["output"] - 1)] if row["output"] < row["max_tokens"] else []
        more = {"temperature": 0, "ignore_eos": self.config.get("ignore_eos", False)}
        sampling = SamplingParams(max_new_tokens=row["max_tokens"], stop_token_ids=stops, **more)
        sampling.normalize(None)
        prompt = array("q", [self.token(i, p) for p in range(row["prompt"])])
        self.requests[i] = Req(f"{i:06}", "", prompt, sampling, vocab_size=1 << 30, priority=row["priority"])
        self.loop._add_request_to_queue(self.requests[i])

    def look(self) -> None:
        """What has come by now, and what was aborted."""
        while self.unsent and self.rows[self.unsent[0]]["arrival"] <= self.now:
            self.add(self.unsent.pop(0))
        due = [i for time, i in self.aborts if time <= self.now and i in self.requests]
        self.aborts = [(time, i) for time, i in self.aborts if i not in due]
        for i in due:
            if not self.requests[i].finished():
                self.records[i]["aborted"] = True
                self.loop.abort_request(Stub(rid=f"{i:06}"))

    def before(self) -> None:
        """A batch is about to be made."""
        if not self.steps or self.noted == len(self.steps):
            self.retractions = {i: request.retraction_count for i, request in self.requests.items()}
        self.noted = -1

    def launch(self, batch):
        """A batch is made, and launched."""
        from sglang.srt.managers.utils import GenerationBatchResult

        decodes = batch.forward_mode.is_decode()
        lengths = [1] * len(batch.reqs) if decodes else batch.extend_lens
        entries = [[int(r.rid), n, r.kv.kv_committed_len] for r, n in zip(batch.reqs, lengths, strict=True)]
        for i, n, computed in entries:
            if self.records[i]["scheduled"] is None:
                self.records[i] |= {"scheduled": self.now, "cached": computed - n}
        retracted = [i for i, n in self.retractions.items() if self.requests[i].retraction_count > n]
        free = self.loop.token_to_kv_pool_allocator.available_size() + self.loop.tree_cache.evictable_size()
        running = sum(r.kv.holds_kv and not r.finished() for r in self.requests.values())
        counts = [free // self.config["block_size"], running, len(self.loop.waiting_queue)]
        self.steps.append([self.now, entries, sorted(retracted), *counts])
        self.noted, self.idles = len(self.steps), 0
        self.now += SCHEDULE
        self.free = max(self.now, self.free) + 1
        return GenerationBatchResult(can_run_cuda_graph=False, extend_input_len_per_req=self.free)

    def finish(self, batch, result) -> None:
        """A batch ends."""
        import torch

        self.now = max(self.now, result.extend_input_len_per_req)
        self.outputs = {i: len(r.output_ids) for i, r in self.requests.items()}
        result.next_token_ids = torch.tensor([self.token(int(r.rid), r.seqlen) for r in batch.reqs])

    def finished(self) -> None:
        """The results of a batch have been processed."""
        for i, r in self.requests.items():
            if len(r.output_ids) > self.outputs[i]:
                self.records[i]["last"] = self.now
                self.records[i]["first"] = self.now if self.records[i]["first"] is None else self.records[i]["first"]

    def idle(self) -> None:
        """Nothing runs: go on to the next arrival, or stop."""
        self.idles += 1
        waits = bool(self.loop.waiting_queue)
        if not waits:  # on_idle, which also checks memory of ranks that are not there
            self.loop.new_token_ratio_tracker.reset()
        if self.unsent:
            self.now = max(self.now, self.rows[self.unsent[0]]["arrival"])
        elif not waits or self.idles > 50:
            self.loop.gracefully_exit = True

    def run(self) -> dict:
        (self.loop.event_loop_overlap if self.config["async_scheduling"] else self.loop.event_loop_normal)()
        for i, record in enumerate(self.records):
            request = self.requests.get(i)
            record["preemptions"] = request.retraction_count if request else 0
            record["outputs"] = len(request.output_ids) if request else 0
        from sglang.version import __version__

        return {"version": f"sglang-{__version__}", "steps": self.steps, "requests": self.records,
                "stuck": self.idles > 50}  # fmt: skip


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.meta_path.append(Stubs)
    configure()
    for line in sys.stdin:
        scenario = json.loads(line)
        print(json.dumps({"scenario": scenario, "decisions": Run(scenario).run()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
