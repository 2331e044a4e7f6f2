"""What does not go together: one table, printed by `infersim show compatibility` and in docs/reference.md."""

from types import CodeType
from typing import Any, NamedTuple

from infersim.config.errors import InputError
from infersim.engine.knobs import KNOBS

MAX_LOGITS = 2**20  # rows of the LM head's table
MOST_TOKENS = 2**20  # of a step: rows of its tables, as max_num_batched_tokens is bounded
WHOLE = ("max-model-len", "output-length", "power-of-two")
"""reservations that a sequence never outgrows"""
BY_HOST = ("look_up", "heads", "exit")
"""kinds of drafting that vLLM's asynchronous scheduling does not go with (config/vllm.py)"""


class Rule(NamedTuple):
    """when: a condition in Python, of knobs by name and of FACTS. key: what to change. message: why, and what would be
    right; names in braces, in a key too, are shown by their values."""

    when: str
    key: str
    message: str


RULES: tuple[Rule, ...] = (
    *(Rule(f"user.{k.name} is not None and user.{k.needs} is None and not {k.needs}", f"engine.{k.name}",
           f"does nothing while engine.{k.needs} is {{{k.needs}}} ({{origin[{k.needs}]}}); must be given together with"
           " it")
      for k in KNOBS if k.needs),  # who switches off on purpose may leave the rest as it is
    *(Rule(f"{k.name} and engine not in {k.engines}", f"engine.{k.name}",
           f"only {' and '.join(k.engines)} presets have it; remove it for {{preset}}") for k in KNOBS if k.engines),
    Rule("user.max_num_seqs is not None and user.max_num_seqs > max_num_batched_tokens", "engine.max_num_seqs",
         "a step has no tokens for {user.max_num_seqs} sequences; must be at most max_num_batched_tokens,"
         " {max_num_batched_tokens}"),
    Rule("user.watermark and not has_watermark", "engine.watermark", "vLLM has it since 0.24; must be 0 for {preset}"),
    Rule("allocator != 'paged' and reserve not in WHOLE", "engine.reserve",
         "a piece of memory cannot grow from {reserve}; must be one of max-model-len, output-length, power-of-two, or"
         " engine.allocator paged"),
    Rule("allocator != 'paged' and user.enable_prefix_caching", "engine.enable_prefix_caching",
         "pieces of memory are not shared; engine.allocator must be paged"),
    Rule("user.async_scheduling and not has_async_scheduling", "engine.async_scheduling",
         "decides otherwise in vLLM 0.11 than in later releases, which is not modelled; must be false for {preset}"),
    Rule("speculation and speculation.how.kind == 'model' and not has_draft_models", "speculation.method",
         "vLLM 0.11 has no draft models; must be another method for {preset}"),
    Rule("jump_forward_share > 0 and user.async_scheduling", "engine.async_scheduling",
         "the step after a jump cannot be scheduled before it is known; must be false with jump_forward_share"),
    Rule("jump_forward_share > jump_forward_tokens / (1 + jump_forward_tokens)", "engine.jump_forward_share",
         "a sampled token comes before each jump of {jump_forward_tokens} tokens; must be at most {most_jumps:.4g}"),
    Rule("preemption_mode == 'swap' and hardware.pcie_bandwidth is None", "hardware.pcie_bandwidth",
         "missing; requests are swapped over it ({hardware.name})"),
    Rule("kv_offloading_size > 0 and not enable_prefix_caching", "engine.kv_offloading_size",
         "keeps what prefix caching evicts; needs engine.enable_prefix_caching true"),
    Rule("kv_offloading_size > 0 and hardware.pcie_bandwidth is None", "hardware.pcie_bandwidth",
         "missing; offloaded KV returns over it ({hardware.name})"),
    Rule("kv_offloading_disk_size > 0 and kv_offloading_size == 0", "engine.kv_offloading_disk_size",
         "all that a disk has comes through the CPU's memory; engine.kv_offloading_size must be above 0"),
    Rule("kv_offloading_disk_size > 0 and kv_offloading_disk_bandwidth is None",
         "engine.kv_offloading_disk_bandwidth", "missing; the disk is read at it, such as 7 GB/s"),
    Rule("prefix_cache == 'radix' and enable_prefix_caching and preemption_mode != 'recompute'",
         "engine.preemption_mode",
         "is not modelled beside a radix tree; must be recompute, or engine.prefix_cache blocks"),
    Rule("prefix_cache == 'radix' and enable_prefix_caching and kv_offloading_size != 0", "engine.kv_offloading_size",
         "is not modelled beside a radix tree; must be 0, or engine.prefix_cache blocks"),
    Rule("'lpm' in (user.scheduling_policy, scheduling_policy) and prefix_cache != 'radix'", "engine.scheduling_policy",
         "lpm sorts by what a radix tree has; must be one of fcfs, priority, shortest-first, or engine.prefix_cache"
         " radix"),
    Rule("user.scheduling_policy == 'lpm' and prefix_cache == 'radix' and not enable_prefix_caching",
         "engine.scheduling_policy",
         "lpm sorts by what the prefix cache has, which is off; must be one of fcfs, priority, shortest-first, or"
         " engine.enable_prefix_caching true"),
    Rule("max_model_len > model_max_len", "engine.max_model_len",
         "{max_model_len} is longer than the model's {model_max_len} tokens; must be at most {model_max_len}"),
    Rule("not enable_chunked_prefill and max_model_len > MOST_TOKENS", "engine.max_model_len",
         "{max_model_len} tokens of a prompt in one step, since chunked prefill is off, are more than a step is"
         " modelled with; must be at most {MOST_TOKENS}"),
    Rule("not enable_chunked_prefill and max_num_batched_tokens < max_model_len", "engine.max_num_batched_tokens",
         "{max_num_batched_tokens} is smaller than max_model_len {max_model_len} and chunked prefill is off, so longer"
         " prompts could never run; must be at least {max_model_len}, or lower max_model_len"),
    Rule("engine == 'sglang' and enable_chunked_prefill and max_num_batched_tokens % block_size",
         "engine.max_num_batched_tokens",
         "SGLang's --chunked-prefill-size must be a multiple of its --page-size, engine.block_size {block_size}"
         " (got {max_num_batched_tokens})"),
    Rule("ignore_eos and not enable_prefix_caching", "engine.ignore_eos",
         "without a radix tree SGLang admits such requests by another rule, which is not modelled; must be false, or"
         " engine.enable_prefix_caching true"),
    Rule("prefill_schedule_interval > 1 and (engine != 'vllm' or parallelism.attention_data == 1)",
         "engine.prefill_schedule_interval",
         "balances vLLM's data-parallel ranks; must be 1, or parallelism.attention_data above 1 and a vllm preset"),
    Rule("prefill_schedule_interval > 1 and not has_prefill_schedule_interval", "engine.prefill_schedule_interval",
         "is modelled as vLLM 0.28 has it (0.24 lets prompts wait that lack one token, too); must be 1 for {preset}, or"
         " engine.preset vllm-0.28 or later"),
    Rule("parallelism.pipeline > 1 and user.async_scheduling", "engine.async_scheduling",
         "in a pipeline a token enters when the one before has left it; must be false with parallelism.pipeline above"
         " 1"),
    Rule("parallelism.all2all_backend == 'deepep_high_throughput' and user.enforce_eager is False",
         "engine.enforce_eager", "DeepEP's high-throughput kernels wait for the CPU and are in no CUDA graph; must be"
         " true, or parallelism.all2all_backend another"),
    Rule("parallelism.prefill_context > 1 and not has_prefill_context", "parallelism.prefill_context",
         "is modelled as vLLM 0.32 has it; must be 1 for {preset}, or engine.preset vllm-0.32 or later"),
    Rule("lora and lora.overlap_loading and engine == 'vllm'", "lora.overlap_loading",
         "vLLM copies adapters in front of the step that needs them; must be false"),
    Rule("parallelism.prefill_context > 1 and (speculation or early_exit or lora)", "parallelism.prefill_context",
         "is not modelled together with speculation, early exit and LoRA, of which vLLM has MTP alone; must be 1"),
    Rule("parallelism.prefill_context > 1 and kv_offloading_size > 0", "engine.kv_offloading_size",
         "is not modelled with parallelism.prefill_context; must be 0"),
    Rule("parallelism.prefill_context > 1 and sparse and user.enforce_eager is False", "engine.enforce_eager",
         "vLLM divides prompts of sparse attention outside CUDA graphs alone; must be true, or"
         " parallelism.prefill_context 1"),
    Rule("where == 'decode' and parallelism.prefill_context > 1", "cluster.decode.parallelism.prefill_context",
         "vLLM's NIXL connector has it for prefill pools alone; must be 1"),
    Rule("several_groups and user.prefix_cache == 'radix'", "engine.prefix_cache",
         "radix is not modelled for models with sliding windows or recurrent state; must be blocks"),
    Rule("several_groups and prefix_cache == 'radix' and scheduling_policy == 'lpm'", "engine.scheduling_policy",
         "lpm is not modelled for models with sliding windows or recurrent state; must be one of fcfs, priority,"
         " shortest-first"),
    Rule("windows and kv_offloading_size > 0", "engine.kv_offloading_size",
         "is not modelled for sliding windows and recurrent states, which this model has; must be 0"),
    Rule("recurrent and user.enable_prefix_caching and state_cuts == 'never'", "engine.enable_prefix_caching",
         "of recurrent states is modelled as vLLM 0.28 has it; must be false for {preset}, or"
         " engine.preset vllm-0.28 or later"),
    Rule("clip_max_new_tokens > 0 and speculation and pads_drafts != 'never'", "speculation",
         "SGLang's admission does not go with vLLM's padding of drafts; {preset} must have pads_drafts: never, or"
         " speculation must be null"),
    Rule("windows and (not recurrent or user.enable_prefix_caching) and preemption_mode == 'swap' and"
         " enable_prefix_caching", "engine.enable_prefix_caching",
         "is not modelled together with swapping for sliding windows and states, which this model has; must be false,"
         " or engine.preemption_mode recompute"),
    Rule("speculation and parallelism.pipeline > 1", "speculation",
         "is not modelled with pipeline stages yet; parallelism.pipeline must be 1"),
    Rule("speculation and engine == 'vllm' and user.async_scheduling and speculation.how.kind in BY_HOST",
         "engine.async_scheduling", "vLLM has {speculation.method}'s drafts with the step's tokens; must be false"),
    Rule("speculation and speculation.num_speculative_tokens_per_batch_size and not has_drafts_by_batch",
         "speculation.num_speculative_tokens_per_batch_size", "vLLM has it since 0.24; must be null for {preset}"),
    Rule("speculation and drafting_slots == 'max-num-seqs'"
         " and max_num_batched_tokens <= max_num_seqs * speculation.draft_slots", "engine.max_num_batched_tokens",
         "drafts take {speculation.draft_slots} for each of engine.max_num_seqs, {max_num_seqs}; must be above that"),
    Rule("speculation and drafting_slots == 'in-step' and max_num_batched_tokens <= speculation.draft_slots",
         "engine.max_num_batched_tokens",
         "drafts take {speculation.draft_slots} for each sequence, which then has no token; must be above that"),
    Rule("speculation and allocator != 'paged'", "engine.allocator",
         "drafts need memory that grows; must be paged under speculation"),
    Rule("speculation and jump_forward_share > 0", "engine.jump_forward_share",
         "is not modelled together with drafts; must be 0 under speculation"),
    Rule("speculation and preemption_mode == 'swap'", "engine.preemption_mode",
         "drafts in flight are not modelled together with swapping; must be recompute under speculation"),
    Rule("speculation and max_num_seqs * (1 + speculation.num_speculative_tokens) > MAX_LOGITS",
         "speculation.num_speculative_tokens",
         "{max_num_seqs} sequences of {speculation.num_speculative_tokens} drafts and a token are too many;"
         " engine.max_num_seqs must be smaller"),
    Rule("speculation and early_exit", "early_exit",
         "is not modelled together with speculation; one of them must be null"),
    Rule("0 < kv_offloading_size < block_of_all", "engine.kv_offloading_size",
         "has no room for a KV block of {block_of_all:,.0f} B; must be 0, or at least that"),
    Rule("0 < kv_offloading_disk_size < block_of_all", "engine.kv_offloading_disk_size",
         "has no room for a KV block of {block_of_all:,.0f} B; must be 0, or at least that"),
    Rule("preemption_mode == 'swap' and 0 < swap_space < block_bytes", "engine.swap_space",
         "has no room for a KV block of {block_bytes:,.0f} B; must be 0, or at least that"),
    # requests of several sequences
    Rule("beams and not sequence_groups", "{asked}",
         "{preset} has no beams in its scheduler (vLLM had until 0.6.2); engine.preset must be vllm-0"),
    Rule("grouped and allocator != 'paged'", "{asked}", "sequences share pages; engine.allocator must be paged"),
    Rule("grouped and allocator == 'paged' and reserve not in ('first-chunk', 'whole-prompt')", "{asked}",
         "sequences take pages as they grow; engine.reserve must be first-chunk or whole-prompt"),
    Rule("grouped and enable_prefix_caching", "{asked}",
         "blocks of a group are not looked up by others here; engine.enable_prefix_caching must be false"),
    Rule("grouped and async_scheduling", "{asked}",
         "which sequences go on is known with their tokens; engine.async_scheduling must be false"),
    Rule("grouped and jump_forward_share > 0", "{asked}",
         "is not modelled with jumps; engine.jump_forward_share must be 0"),
    Rule("grouped and speculation", "{asked}",
         "vLLM 0 verifies no drafts of several sequences; speculation must be null"),
    Rule("grouped and parallelism.pipeline > 1", "{asked}",
         "is not modelled with pipeline stages; parallelism.pipeline must be 1"),
    Rule("grouped and windows", "{asked}", "is modelled for full attention only; {model.name} has windows or states"),
    Rule("grouped and stream_interval > 1", "{asked}",
         "is not modelled with chunks of several steps; engine.stream_interval must be 1"),
    Rule("grouped and sequences > max_num_seqs", "{asked}",
         "{sequences} sequences of one request never run at once; must be at most engine.max_num_seqs,"
         " {max_num_seqs}"),
    Rule("grouped and preemption_mode == 'recompute' and origin['preemption_mode'] == 'user'", "{asked}",
         "vLLM 0 cannot recompute several sequences; engine.preemption_mode must be swap"),
    Rule("grouped and hardware.pcie_bandwidth is None", "{asked}",
         "sequences are swapped over hardware.pcie_bandwidth, which {hardware.name} has not"),
    Rule("len(group_sizes) > 1", "{asked}",
         "some replicas make one group of a prompt's samples, others requests; must be alike"),
    Rule("max(group_sizes) > 1 and (cluster.prefill or cluster.encode)", "{asked}",
         "groups of sequences are not handed over; cluster.prefill and cluster.encode must be null"),
    # several kinds of replicas
    Rule("(cluster.encode is None) != (workload.images is None)", "cluster.encode and workload.images",
         "one without the other is not modelled; give both"),
    Rule("cluster.prefill and model != first", "cluster.{where}.model",
         "must be that of the decode replicas, whose KV it computes (got {model.name} and {first.name})"),
    Rule("not cluster.prefill and model != first and not (workload.models or workload.model_column)",
         "cluster.{where}.model",
         "must be that of kinds.0, unless workload.models says which model requests ask for (got {model.name} and"
         " {first.name})"),
    Rule("model != namesake", "cluster.{where}.served_model_name", "{served} is another model already; must differ"),
    Rule("adapters != namesakes_adapters", "cluster.{where}.lora.adapters",
         "must be those of the other replicas of {served}"),
    Rule("adapters and taken", "cluster.{where}.lora.adapters", "{taken[0]!r} is another model's name; must differ"),
    Rule("adapters and hardware.pcie_bandwidth is None", "hardware.pcie_bandwidth",
         "missing; adapters are loaded over it ({hardware.name})"),
    Rule("asked_load and not cluster.kv_store and not offloads", "engine.kv_offloading_load",
         "nothing is loaded without engine.kv_offloading_size or cluster.kv_store; must be given together with it"),
    Rule("cluster.kv_store and not keeps_blocks", "cluster.kv_store",
         "is modelled for prefix caching by blocks, without sliding windows and recurrent states; must be null"),
    Rule("cluster.kv_store and (model, kv_width) != first_kv", "cluster.kv_store",
         "replicas must have one model and one format of KV to share it (cluster.{where}); must be null"),
    Rule("router.policy == 'kv-aware' and not any_prefix_caching", "{where}",
         "kv-aware needs engine.enable_prefix_caching: true"),
)  # fmt: skip

FACTS = {
    "user": "the keys of `engine` that were given",
    "origin": "where each knob's value came from",
    "preset": "its name",
    "hardware": "the device",
    "model_max_len": "tokens that the model can see",
    "most_jumps": "largest share of jumps",
    "parallelism": "of the replica",
    "speculation": "its drafts, if any",
    "early_exit": "its exits, if any",
    "lora": "its adapters, if any",
    "sparse": "the model's attention has an indexer",
    "windows": "the model has sliding windows or recurrent state",
    "recurrent": "the model has recurrent state",
    "several_groups": "its KV memory is not one group with full attention",
    "block_bytes": "of a KV block on one GPU",
    "block_of_all": "of a KV block on all GPUs of a data-parallel rank",
    "model": "of the replica",
    "asked": "workload.beam_width or workload.n: which of them asks for several sequences of a request",
    "beams": "they are beams",
    "sequences": "so many",
    "grouped": "the engine schedules them as a group",
    "group_sizes": "sequences of a request, in each kind of replicas",
    "cluster": "of the scenario",
    "workload": "of the scenario",
    "where": "the kind of replicas, or the router, by its key",
    "first": "the model of the first kind",
    "served": "what requests call the model of a kind",
    "namesake": "the first model that they call so",
    "adapters": "of the kind",
    "namesakes_adapters": "of the first kind with that model",
    "taken": "adapters whose names are another model's, or another model's adapter's",
    "asked_load": "the replica's engine.kv_offloading_load was given",
    "offloads": "it has a tier below the GPU",
    "keeps_blocks": "its prefix caching is by blocks that last as long as the text",
    "kv_width": "bytes of KV per token, of all its GPUs",
    "first_kv": "model and kv_width of the first kind",
    "router": "of the cluster, or of a pool",
    "any_prefix_caching": "some replica caches prefixes",
}
"""what conditions may name beside the knobs"""
CONSTANTS = {"WHOLE": WHOLE, "MAX_LOGITS": MAX_LOGITS, "MOST_TOKENS": MOST_TOKENS, "BY_HOST": BY_HOST}
_COMPILED: dict[str, CodeType] = {rule.when: compile(rule.when, "<rule>", "eval") for rule in RULES}
_NEEDS = {when: {knob.name for knob in KNOBS}.union(FACTS, CONSTANTS).intersection(code.co_names)
          for when, code in _COMPILED.items()}  # fmt: skip


class _Shown(dict):
    """Values as YAML spells them."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return str(value).lower() if isinstance(value, bool) else value


def check(**facts: Any) -> None:
    """InputError with all that does not go together in these facts; rules that need others are left for later."""
    known = facts | CONSTANTS
    shown = _Shown(known)
    problems = [
        f"{rule.key.format_map(shown)}: {rule.message.format_map(shown)}"
        for rule in RULES
        if _NEEDS[rule.when] <= known.keys() and eval(_COMPILED[rule.when], {}, known)
    ]
    if problems:
        raise InputError(dict.fromkeys(problems))
