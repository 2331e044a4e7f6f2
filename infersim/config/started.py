"""Reads how a deployment is started: a `vllm serve` line, or the Kubernetes manifests that `--export k8s` writes.

What comes back are keys of a scenario; hardware and workload are no settings of a server, and of `Started.unknown` a
sentence each says what else the file does not tell.
"""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import near
from .errors import InputError
from .units import short

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
KV_DTYPES = DTYPES | {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
WEIGHTS = {"fp8": "fp8"}
"""formats that vLLM makes itself; others say what the checkpoint says"""
SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def whole(word: str) -> int:
    """A number as vLLM's options take it: 8192, 8K (of 1,024) or 25.6k (of 1,000)."""
    suffix = SUFFIXES.get(word[-1:])
    return int(word) if suffix is None else round(float(word[:-1]) * suffix)


SWITCHES = ("enable_chunked_prefill", "enable_prefix_caching", "async_scheduling", "enforce_eager")
VALUES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    **{name: ("engine", name, whole) for name in (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override",
        "kv_cache_memory_bytes", "long_prefill_token_threshold", "prefill_schedule_interval",
        "stream_interval")},
    "gpu_memory_utilization": ("engine", "gpu_memory_utilization", float),
    "scheduling_policy": ("engine", "scheduling_policy", str),
    "kv_offloading_size": ("engine", "kv_offloading_size", lambda gib: float(gib) * 2**30),
    "tensor_parallel_size": ("parallelism", "tensor", int),
    "pipeline_parallel_size": ("parallelism", "pipeline", int),
    "data_parallel_size": ("parallelism", "attention_data", int),
    "decode_context_parallel_size": ("parallelism", "context", int),
    "prefill_context_parallel_size": ("parallelism", "prefill_context", int),
    "all2all_backend": ("parallelism", "all2all_backend", str),
    "dtype": ("precision", "activations", lambda name: None if name == "auto" else DTYPES[name]),
    "kv_cache_dtype": ("precision", "kv_cache", lambda name: None if name == "auto" else KV_DTYPES[name]),
    "quantization": ("precision", "weights", WEIGHTS.get),
    "max_loras": ("lora", "max_loras", int),
    "max_lora_rank": ("lora", "max_lora_rank", int),
}  # fmt: skip
"""option -> section and key of a scenario, and how its word is read; None: says nothing"""
SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
         "dcp": "decode_context_parallel_size", "pcp": "prefill_context_parallel_size",
         "q": "quantization"}  # fmt: skip
APART = (
    "model",
    "enable_expert_parallel",
    "enable_dbo",
    "enable_lora",
    "lora_modules",
    "speculative_config",
    "kv_transfer_config",
)
NOTHING = ("port", "host", "served_model_name", "api_key", "trust_remote_code", "kv_offloading_backend",
           "is_prefill_worker", "tokenizer", "download_dir", "disable_log_requests", "seed", "load_format")  # fmt: skip
"""options that change no time"""
SCORERS = {"queue-scorer": "queue", "kv-cache-utilization-scorer": "kv_usage", "active-request-scorer": "outstanding",
           "prefix-cache-scorer": "prefix", "lora-affinity-scorer": "lora_affinity"}  # fmt: skip
SCALED_BY = {"vllm:num_requests_running": "outstanding", "vllm:num_requests_waiting": "queue",
             "vllm:kv_cache_usage_perc": "kv_usage"}  # fmt: skip
"""vLLM's metric that a HorizontalPodAutoscaler looks at -> an autoscaler's policy"""


@dataclass
class Started:
    """keys: of a scenario; unknown: what else it would take, a sentence each."""

    keys: dict[str, Any]
    unknown: list[str] = field(default_factory=list)


def read_started(text: str, where: str) -> Started:
    """The deployment that a script, a line or manifests start. InputError for what is neither, or an unknown option."""
    import yaml

    if re.search(r"^\s*(apiVersion|kind):", text, re.MULTILINE):
        try:
            documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
        except yaml.YAMLError as error:
            raise InputError(f"{where}: not YAML text: {str(error).splitlines()[0]}") from None
        return _manifests(documents, where)
    lines = " ".join(line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    try:
        words = shlex.split(lines)
    except ValueError as error:
        raise InputError(f"{where}: not a command line: {error}") from None
    if "serve" not in words or "vllm" not in words[: words.index("serve")]:
        raise InputError(f"{where}: has no line `vllm serve MODEL ...`, and is no Kubernetes manifest")
    started = _line(words[words.index("serve") + 1 :], where)
    if preset := re.search(r"^# simulated: (\S+)$", text, re.MULTILINE):
        started.keys.setdefault("engine", {})["preset"] = preset[1]
    started.unknown.insert(0, "hardware and workload: no options of a server")
    return started


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Option names with underscores, and the words that follow each; what stands before the first is ""."""
    name = ""
    values: list[str] = []
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            yield name, values
            option, equals, value = word.lstrip("-").partition("=")
            name, values = option.replace("-", "_"), [value] if equals else []
            name = SHORT.get(name, name)
        else:
            values.append(word)
    yield name, values


def _line(words: Sequence[str], where: str) -> Started:
    """Keys of a scenario from the words behind `vllm serve`."""
    keys: dict[str, Any] = {}
    problems: list[str] = []
    options = dict(_options(words))
    for name, values in options.items():
        value, switch = values[0] if values else "", name.removeprefix("no_")
        if switch in SWITCHES:
            keys.setdefault("engine", {})[switch] = name == switch
        elif name in VALUES:
            section, key, read = VALUES[name]
            try:
                found = read(value)
            except (ValueError, KeyError):
                problems.append(f"{where}: --{name.replace('_', '-')} {short(value)}: not understood")
                continue
            if found is not None:
                keys.setdefault(section, {})[key] = found
        elif name and name not in (*APART, *NOTHING):
            hint = near(name, [*VALUES, *SWITCHES, *APART])
            problems.append(f"{where}: --{name.replace('_', '-')}: not understood{hint}")
    model = [*options.get("model", ()), *options[""]]
    if not model:
        problems.append(f"{where}: names no model; must be vllm serve MODEL ...")
    if problems:
        raise InputError(problems)
    return _apart({"model": model[0], **keys}, options, where)


def _apart(keys: dict[str, Any], options: dict[str, list[str]], where: str) -> Started:
    """With the options that are more than a value."""
    started = Started(keys)
    if "enable_expert_parallel" in options:
        sizes = keys.setdefault("parallelism", {})
        sizes["expert"] = math.prod(sizes.get(key, 1) for key in ("tensor", "attention_data", "prefill_context"))
        sizes |= {"enable_dbo": True} if "enable_dbo" in options else {}
    if "speculative_config" in options:
        _drafts(options["speculative_config"], started, where)
    if "kv_transfer_config" in options:
        started.unknown.append("cluster.transfer, prefill and decode: other lines have the other pool")
    if "enable_lora" in options:
        _adapters(options.get("lora_modules", []), started)
    else:
        keys.pop("lora", None)
    return started


def _drafts(words: Sequence[str], started: Started, where: str) -> None:
    known = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size",
             "num_speculative_tokens_per_batch_size")  # fmt: skip
    try:
        config = json.loads(words[0])
        drafts = {key: config[key] for key in known if key in config}
    except (ValueError, IndexError, TypeError):
        raise InputError(f"{where}: --speculative-config: not a JSON object") from None
    if drafts.get("method") != "draft_model":
        drafts.pop("model", None)  # an EAGLE head, say: its cost follows from the method
    started.keys["speculation"] = drafts | {"acceptance": {"rate": 0.7}}
    started.unknown.append("speculation.acceptance: a property of the text; 0.7 is assumed")


def _adapters(modules: Sequence[str], started: Started) -> None:
    given = started.keys.get("lora", {})
    rank = given.get("max_lora_rank", 16)
    adapters = {module.partition("=")[0]: rank for module in modules}
    started.keys["lora"] = {"max_loras": 1, **given, "max_lora_rank": rank, "adapters": adapters or {"adapter": rank}}
    started.unknown.append("lora.adapters: their ranks; the largest is assumed")


def _manifests(documents: list[dict[str, Any]], where: str) -> Started:
    """Keys of a scenario from Deployments with `vllm serve`, an llm-d picker's configuration, or a Dynamo graph."""
    groups: list[dict[str, Any]] = []
    unknown: list[str] = []
    config: dict[str, Any] = {}
    router: dict[str, Any] | None = None
    scalers = {one["spec"]["scaleTargetRef"]["name"]: one["spec"] for one in documents
               if one.get("kind") == "HorizontalPodAutoscaler"}  # fmt: skip
    for one in documents:
        spec = one.get("spec") or {}
        if one.get("kind") == "ConfigMap" and "plugins.yaml" in (one.get("data") or {}):
            config = json.loads(one["data"]["plugins.yaml"])
        elif one.get("kind") == "Deployment":
            pod = spec["template"]
            words = [*pod["spec"]["containers"][0].get("command", ()), *pod["spec"]["containers"][0].get("args", ())]
            if words[:2] == ["vllm", "serve"]:
                labels, notes = pod["metadata"]["labels"], pod["metadata"].get("annotations", {})
                groups.append(_group(words[2:], spec.get("replicas", 1), labels.get("llm-d.ai/role", ""), notes, where))
                if scaler := scalers.get(one["metadata"]["name"]):
                    groups[-1]["autoscaler"] = _autoscaler(scaler)
                    what = ".startup: how long a replica takes" if groups[-1]["autoscaler"] else ": its metric"
                    unknown.append(f"cluster.autoscaler{what}")
        elif one.get("kind") == "DynamoGraphDeployment":
            for service in spec["services"].values():
                if service["componentType"] == "frontend":
                    values = {each["name"]: each["value"] for each in service.get("envs", ())}
                    weight = float(values.get("DYN_KV_OVERLAP_SCORE_WEIGHT", 1))
                    router = {"policy": "kv-aware", "overlap_weight": weight}
                else:
                    args, role = service["extraPodSpec"]["mainContainer"]["args"], service.get("subComponentType", "")
                    if args[:2] != ["-m", "dynamo.vllm"]:
                        raise InputError(f"{where}: workers must be dynamo.vllm's (got {' '.join(args[:2])})")
                    groups.append(_group(args[2:], service["replicas"], role, service.get("annotations", {}), where))
    if not groups:
        raise InputError(f"{where}: has no Deployment with `vllm serve`, and no Dynamo graph")
    routers = {"": router} if router else {each["name"]: _policy(each) for each in config.get("schedulingProfiles", ())}
    return _joined(
        groups, routers, config, [*dict.fromkeys([*unknown, *(u for g in groups for u in g.pop("unknown"))])]
    )


def _group(words: Sequence[str], replicas: int, role: str, notes: dict[str, str], where: str) -> dict[str, Any]:
    started = _line(words, where)
    keys = started.keys
    if hardware := notes.get("infersim/hardware"):
        keys["hardware"] = hardware
    if preset := notes.get("infersim/preset"):
        keys.setdefault("engine", {})["preset"] = preset
    unknown = [line for line in started.unknown if not line.startswith("cluster.transfer")]
    return {
        "keys": keys,
        "replicas": replicas,
        "role": role,
        "transfer": notes.get("infersim/transfer"),
        "unknown": unknown,
    }


def _autoscaler(spec: dict[str, Any]) -> dict[str, Any]:
    """Of a HorizontalPodAutoscaler; empty if its metric is none of the server's."""
    for pods in (metric.get("pods", {}) for metric in spec.get("metrics", ())):
        if policy := SCALED_BY.get(pods.get("metric", {}).get("name")):
            delay = spec.get("behavior", {}).get("scaleDown", {}).get("stabilizationWindowSeconds", 300)
            found = {"policy": policy, "target": float(pods["target"]["averageValue"]), "scale_down_delay": delay}
            return {"autoscaler": found | {"min": spec.get("minReplicas", 1), "max": spec["maxReplicas"]}}
    return {}


def _policy(profile: dict[str, Any]) -> Any:
    """The router that chooses as an llm-d profile's scorers do."""
    weights = {each["pluginRef"]: each.get("weight", 1) for each in profile["plugins"]}
    scorers = {name: weights[plugin] for plugin, name in SCORERS.items() if plugin in weights}
    if "session-affinity-scorer" in weights:
        return {"policy": "session"}
    if list(scorers) == ["outstanding"]:
        return {"policy": "least-outstanding"}
    if list(scorers) == ["kv_usage"]:
        return {"policy": "least-kv"}
    return (
        {"policy": "weighted", "scorers": dict.fromkeys(SCORERS.values(), 0) | scorers}
        if scorers
        else {"policy": "random"}
    )


def _joined(
    groups: list[dict[str, Any]], routers: dict[str, Any], config: dict[str, Any], unknown: list[str]
) -> Started:
    """One scenario of groups of replicas: pools, kinds, or replicas that are all alike."""
    first = dict(groups[0]["keys"])
    if len(groups) == 1:
        cluster = (
            {"replicas": groups[0]["replicas"]}
            | groups[0].get("autoscaler", {})
            | ({"router": next(iter(routers.values()))} if routers else {})
        )
        return Started(first | {"cluster": cluster}, [*unknown, "workload: no setting of a server"])
    roles = {group["role"]: group for group in groups}
    each = {name: {"replicas": group["replicas"], **{k: v for k, v in group["keys"].items() if k != "speculation"},
                   **group.get("autoscaler", {})}
            for name, group in ((group["role"] or str(i), group) for i, group in enumerate(groups))}  # fmt: skip
    shared = {key: value for key, value in first.items() if all(g["keys"].get(key) == value for g in groups)}
    top = {key: first[key] for key in ("model", "hardware") if key in first} | shared
    for group in each.values():
        for key in shared:
            group.pop(key, None)
    if {"prefill", "decode"} <= roles.keys():
        for name in ("prefill", "decode"):
            if router := routers.get(name) or (routers.get("") if name == "decode" else None):
                each[name]["router"] = router
        transfer = json.loads(roles["decode"]["transfer"] or "{}") or {"bandwidth": "50 GB/s"}
        if not roles["decode"]["transfer"]:
            unknown.append("cluster.transfer: the network's bandwidth; 50 GB/s is assumed")
        return Started(
            top | {"cluster": {**each, "transfer": transfer}}, [*unknown, "workload: no setting of a server"]
        )
    cluster = {"kinds": list(each.values())} | ({"router": next(iter(routers.values()))} if routers else {})
    return Started(top | {"cluster": cluster}, [*unknown, "workload: no setting of a server"])
