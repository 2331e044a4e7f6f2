"""The kinds of replicas of a run as exports write them: each with settings of its own."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from infersim.config.cluster import Autoscaler, Cluster, Kind
from infersim.config.router import Router
from infersim.config.scenario import Scenario
from infersim.metrics.result import Result

from .servers import serve_words

PARTS = ("model", "hardware", "parallelism", "precision", "engine", "lora")


@dataclass(frozen=True)
class Unit:
    """Replicas of one kind. scenario: with the kind's own settings; engine: its ResolvedEngine as a dict."""

    scenario: Scenario
    engine: dict[str, Any]
    role: str
    replicas: int
    suffix: str
    """of its name beside others: a pool's role or a kind's number"""
    router: Router
    autoscaler: Autoscaler | None
    cluster: Cluster

    @property
    def name(self) -> str:
        """Of the whole deployment, as Kubernetes allows it."""
        model = self.scenario.model.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1].lower()
        return re.sub(r"[^a-z0-9-]+", "-", model).strip("-")

    @property
    def title(self) -> str:
        return f"{self.name}-{self.suffix}" if self.suffix else self.name

    @property
    def labels(self) -> dict[str, str]:
        return {"app": self.name} | ({"infersim/kind": self.suffix} if self.suffix else {})

    @property
    def words(self) -> list[str]:
        return serve_words(self.scenario, self.engine, self.role)

    @property
    def annotations(self) -> dict[str, str]:
        """What Kubernetes and the engine's options have no word for, to read the deployment back."""
        found = {"infersim/hardware": self.scenario.hardware.name, "infersim/preset": self.engine["preset"]}
        if self.cluster.transfer and self.role == "decode":
            found["infersim/transfer"] = json.dumps(self.cluster.transfer.model_dump(mode="json"))
        return found


def units_of(result: Result) -> list[Unit]:
    """Every kind of replica that generates, in the order of the cluster's groups; those alike are one."""
    scenario, cluster = result.scenario, result.scenario.cluster
    units: list[Unit] = []
    names = dict(zip(cluster.group_names, zip(cluster.groups, cluster.ranges, strict=True), strict=True))
    several = len([name for name in names if name != "encode"]) > 1
    for name, (group, numbers) in names.items():
        if not isinstance(group, Kind):
            continue
        ran = next(each for each in result.ran if each.replicas.start <= numbers.start < each.replicas.stop)
        own = {part: given for part in PARTS if (given := getattr(group, part)) is not None}
        suffix = (name if cluster.prefill else name.replace("kinds.", "kind-")) if several else ""
        router = getattr(group, "router", cluster.router)
        units.append(Unit(scenario.model_copy(update=own), asdict(ran.deployment.engine), ran.role, group.replicas,
                          suffix, router, group.autoscaler, cluster))  # fmt: skip
    return units


def left_out(cluster: Cluster) -> list[str]:
    """What of the cluster no server and no manifest has, a sentence each."""
    found = []
    if cluster.encode:
        found.append("cluster.encode: replicas that encode images")
    if cluster.admission:
        found.append("cluster.admission: flow control of the gateway")
    if cluster.failures:
        found.append("cluster.failures: they come by themselves")
    if cluster.transfer:
        found.append("cluster.transfer: the network's bandwidth and latency")
    if cluster.kv_store:
        found.append("cluster.kv_store: its servers, and the connector that reaches them")
    if cluster.role_switch:
        found.append("cluster.role_switch: who watches the pools asks a server for it (SGLang's /pd_role_switch)")
    return found
