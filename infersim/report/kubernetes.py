"""A deployment as Kubernetes manifests: plain replicas behind a Service, llm-d's router and pools, or Dynamo's.

Which one follows from the router: random and round-robin are a Service (whose proxy chooses at random), kv-aware is
Dynamo's, whatever looks at the replicas is an llm-d endpoint picker; so are prefill and decode pools, whose decode
replicas have llm-d's side-car. Images of routers carry no version here: pin one.
"""

import json
from typing import Any

from infersim.config.cluster import Autoscaler
from infersim.config.router import Router
from infersim.config.started import SCALED_BY

from .servers import PORT, SIDE_CHANNEL
from .units import Unit

IMAGES = {
    ("vllm", "nvidia"): "vllm/vllm-openai:v{version}",
    ("vllm", "amd"): "rocm/vllm:latest",
    ("sglang", "nvidia"): "lmsysorg/sglang:v{version}",
    ("trtllm", "nvidia"): "nvcr.io/nvidia/tensorrt-llm/release:{version}",
}
GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
SIDECAR = "ghcr.io/llm-d/llm-d-routing-sidecar"
PICKER = "ghcr.io/llm-d/llm-d-inference-scheduler"
DYNAMO = {"sglang": "sglang", "trtllm": "tensorrtllm"}  # an engine's runtime; of others vLLM's
SERVED = 8200  # where an engine listens behind the side-car
SCORERS = {
    "queue": "queue-scorer",
    "kv_usage": "kv-cache-utilization-scorer",
    "outstanding": "active-request-scorer",
    "prefix": "prefix-cache-scorer",
    "lora_affinity": "lora-affinity-scorer",
}
PICKED = {
    "least-outstanding": {"active-request-scorer": 1.0},
    "power-of-two": {"active-request-scorer": 1.0},
    "least-kv": {"kv-cache-utilization-scorer": 1.0},
    "prefix-aware": {"prefix-cache-scorer": 3.0, "queue-scorer": 1.0},
    "session": {"session-affinity-scorer": 1.0},
}
"""policy -> weights of llm-d's scorers that choose alike, or nearest to it"""
METRICS = {policy: metric for metric, policy in SCALED_BY.items()}
"""an autoscaler's figure -> vLLM's metric"""
SYNC_PERIOD = 15.0  # s, of Kubernetes' controller by default

Manifest = dict[str, Any]


def manifests(units: list[Unit]) -> list[Manifest]:
    """Every object of the deployment, its replicas first."""
    routers = {unit.role: unit.router for unit in units}
    if any(router.policy == "kv-aware" for router in routers.values()):
        return [dynamo(units)]
    name = units[0].name
    picker = units[0].role != "serve" or routers["serve"].policy in ("weighted", *PICKED)
    found = [deployment(unit, picker) for unit in units]
    found += [autoscaler(unit, unit.autoscaler) for unit in units if unit.autoscaler]
    if picker:
        return [*found, *endpoint_picker(name, units)]
    labels = {"app": name}
    return [*found, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
                     "spec": {"selector": labels, "ports": [{"port": PORT, "targetPort": PORT}]}}]  # fmt: skip


def left_out(units: list[Unit]) -> list[str]:
    """What was simulated and no manifest says, a sentence each."""
    found = []
    follows = any(unit.router.policy == "kv-aware" for unit in units)
    for unit in units:
        policy = unit.router.policy
        if follows and unit.autoscaler:
            found.append("autoscaler: Dynamo's planner scales its workers, and is deployed apart")
        if follows and unit.role == "prefill":
            found.append(f"router {policy} of the prefill pool: Dynamo's frontend chooses its prefill workers itself")
            continue
        if policy in ("round-robin", "weighted-random") and unit.replicas > 1:
            found.append(f"router {policy}: a Service chooses at random")
        if policy in ("power-of-two", "prefix-aware"):
            found.append(f"router {policy}: llm-d has the nearest, {', '.join(PICKED[policy])}")
        if unit.router.signal_age and policy != "kv-aware":
            found.append("router.signal_age: an option of the picker's program")
        if unit.autoscaler and unit.autoscaler.policy not in METRICS:
            found.append(f"autoscaler {unit.autoscaler.policy}: no metric of the server; scaled by running requests")
        if unit.autoscaler and not unit.autoscaler.min:
            found.append("autoscaler.min 0: a HorizontalPodAutoscaler keeps one")
        if unit.autoscaler and unit.autoscaler.interval != SYNC_PERIOD:
            found.append("autoscaler.interval: the controller's own, --horizontal-pod-autoscaler-sync-period")
        if unit.role != "serve" and unit.engine["engine"] != "vllm":
            found.append(f"pools of {unit.engine['preset']}: llm-d's side-car is told its connector, sglang")
    return list(dict.fromkeys(found))


def deployment(unit: Unit, picked: bool) -> Manifest:
    """A Deployment of the replicas of one kind."""
    decodes = unit.role == "decode"
    words = unit.words
    if decodes:  # the side-car answers at the port that is asked
        words = [str(SERVED) if before == "--port" else word for before, word in zip(["", *words], words, strict=False)]
    vendor = unit.scenario.hardware.vendor.lower()
    image = IMAGES.get((unit.engine["engine"], vendor), IMAGES["vllm", "nvidia"]).format(version=unit.engine["version"])
    port = SERVED if decodes else PORT
    container: Manifest = {
        "name": unit.engine["engine"],
        "image": image,
        "command": words[:2],
        "args": words[2:],
        "ports": [{"containerPort": port}],
        "resources": {"limits": {GPUS.get(vendor, "nvidia.com/gpu"): unit.scenario.parallelism.num_gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10, "failureThreshold": 60},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    spec: Manifest = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    labels = unit.labels
    if picked:
        labels = labels | {"llm-d.ai/inferenceServing": "true"}
    if unit.role in ("prefill", "decode"):
        labels = labels | {"llm-d.ai/role": unit.role}
        host = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container["env"] = [host, {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL)}]
        container["ports"].append({"containerPort": SIDE_CHANNEL, "name": "nixl"})
    if decodes:
        connector = "nixlv2" if unit.engine["engine"] == "vllm" else "sglang"
        spec["initContainers"] = [{
            "name": "routing-proxy", "image": f"{SIDECAR}:latest", "restartPolicy": "Always",
            "args": [f"--port={PORT}", f"--vllm-port={SERVED}", f"--connector={connector}", "--secure-proxy=false"],
            "ports": [{"containerPort": PORT}],
        }]  # fmt: skip
    pod = {"metadata": {"labels": labels, "annotations": unit.annotations}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": unit.title, "labels": labels},
        "spec": {"replicas": unit.replicas, "selector": {"matchLabels": labels}, "template": pod},
    }


def autoscaler(unit: Unit, scaler: Autoscaler) -> Manifest:
    """A HorizontalPodAutoscaler on the server's own metric (through an adapter for custom metrics)."""
    metric = METRICS.get(scaler.policy, METRICS["outstanding"])
    target = {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": f"{scaler.target:g}"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": unit.title},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": unit.title},
            "minReplicas": max(scaler.min, 1),
            "maxReplicas": scaler.max,
            "metrics": [{"type": "Pods", "pods": target}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": round(scaler.scale_down_delay)}},
        },
    }


def endpoint_picker(name: str, units: list[Unit]) -> list[Manifest]:
    """llm-d's endpoint picker with the routers' scorers, and the InferencePool that asks it."""
    config: Manifest = {"apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig"}
    plugins, profiles = [], []
    for unit in {unit.role: unit for unit in units}.values():
        weights = _weights(unit.router)
        filters = [] if unit.role == "serve" else [f"{unit.role}-filter"]
        plugins += [*filters, *weights, "max-score-picker"]
        chosen: list[Manifest] = [{"pluginRef": one} for one in filters]
        chosen += [{"pluginRef": one, "weight": weight} for one, weight in weights.items()]
        profiles.append({"name": "default" if unit.role == "serve" else unit.role,
                         "plugins": [*chosen, {"pluginRef": "max-score-picker"}]})  # fmt: skip
    listed: list[Manifest] = [{"type": one} for one in dict.fromkeys(plugins)]
    if units[0].role != "serve":
        given = units[0].cluster.transfer
        hand_over = given.hand_over if given else "always"
        threshold = {"always": 0, "never": 2**31 - 1}.get(str(hand_over), hand_over)
        block = units[0].engine["block_size"]
        handler = {"type": "pd-profile-handler", "parameters": {"threshold": threshold, "hashBlockSize": block}}
        listed = [{"type": "prefill-header-handler"}, *listed, handler]
    else:
        listed.append({"type": "single-profile-handler"})
    config |= {"plugins": listed, "schedulingProfiles": profiles}
    picker = f"{name}-epp"
    labels = {"app": picker}
    container = {
        "name": "epp",
        "image": f"{PICKER}:latest",
        "args": ["--pool-name", name, "--config-file", "/config/plugins.yaml"],
        "ports": [{"containerPort": 9002}],
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
    }
    pod = {"metadata": {"labels": labels},
           "spec": {"containers": [container],
                    "volumes": [{"name": "config", "configMap": {"name": picker}}]}}  # fmt: skip
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": picker},
         "data": {"plugins.yaml": json.dumps(config, indent=1)}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": picker, "labels": labels},
         "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": picker},
         "spec": {"selector": labels, "ports": [{"port": 9002, "targetPort": 9002, "appProtocol": "http2"}]}},
        {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": name},
         "spec": {"selector": {"matchLabels": {"app": name, "llm-d.ai/inferenceServing": "true"}},
                  "targetPorts": [{"number": PORT}], "endpointPickerRef": {"name": picker, "port": {"number": 9002}}}},
    ]  # fmt: skip


def _weights(router: Router) -> dict[str, float]:
    """llm-d's scorers and their weights for a policy."""
    if router.policy == "weighted":
        given = {SCORERS[key]: float(weight) for key, weight in router.scorers.model_dump().items() if weight}
        return given
    return PICKED.get(router.policy, {"random-scorer": 1.0})


def dynamo(units: list[Unit]) -> Manifest:
    """Dynamo's graph: its frontend, whose router follows KV events, and workers."""
    router = next(unit.router for unit in units if unit.router.policy == "kv-aware")
    values = {"DYN_ROUTER_MODE": "kv", "DYN_KV_OVERLAP_SCORE_WEIGHT": f"{router.overlap_weight:g}"}
    services: Manifest = {"Frontend": {
        "componentType": "frontend", "replicas": 1,
        "envs": [{"name": name, "value": value} for name, value in values.items()],
        "extraPodSpec": {"mainContainer": {"image": _runtime(units[0])}},
    }}  # fmt: skip
    for unit in units:
        main = {"image": _runtime(unit), "command": ["python3"], "args": dynamo_words(unit)}
        worker: Manifest = {
            "componentType": "worker",
            "replicas": unit.replicas,
            "resources": {"limits": {"gpu": str(unit.scenario.parallelism.num_gpus)}},
            "annotations": unit.annotations,
            "extraPodSpec": {"mainContainer": main},
        }
        if unit.role != "serve":
            worker["subComponentType"] = unit.role
        services[f"{unit.role.capitalize()}Worker{unit.suffix}"] = worker
    return {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeployment",
            "metadata": {"name": units[0].name}, "spec": {"services": services}}  # fmt: skip


def _runtime(unit: Unit) -> str:
    return f"nvcr.io/nvidia/ai-dynamo/{DYNAMO.get(unit.engine['engine'], 'vllm')}-runtime:latest"


def dynamo_words(unit: Unit) -> list[str]:
    """What follows `python3` for a worker of the engine that was simulated: the words of its own server. Those of
    dynamo.trtllm are of ai-dynamo/dynamo at 0a6a115c, components/src/dynamo/trtllm/backend_args.py; dynamo.sglang takes
    SGLang's own."""
    words = unit.words
    if unit.engine["engine"] == "sglang":
        return ["-m", "dynamo.sglang", *_without_port(words[3:])]
    if unit.engine["engine"] == "trtllm":
        own = [TRTLLM.get(word, word.replace("_", "-") if word.startswith("--") else word) for word in words[2:]]
        role = ["--disaggregation-mode", unit.role] if unit.role in ("prefill", "decode") else []
        model = ["--model", words[1], "--publish-kv-events"]
        return ["-m", "dynamo.trtllm", *model, *role, *_without_port(own)]
    extra = ["--is-prefill-worker"] if unit.role == "prefill" else []
    return ["-m", "dynamo.vllm", "--model", words[2], *extra, *_without_port(words[3:])]


TRTLLM = {"--tp_size": "--tensor-parallel-size", "--pp_size": "--pipeline-parallel-size",
          "--ep_size": "--expert-parallel-size",
          "--kv_cache_free_gpu_memory_fraction": "--free-gpu-memory-fraction"}  # fmt: skip
"""trtllm-serve's options -> dynamo.trtllm's, where they are not the same with hyphens"""


def _without_port(words: list[str]) -> list[str]:
    at = words.index("--port")
    return words[:at] + words[at + 2 :]
