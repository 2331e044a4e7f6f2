"""A deployment as what starts it: scripts of three engines, the matching benchmark, and Kubernetes manifests.

What an export cannot say stands as comments at its top.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from infersim.config.errors import InputError
from infersim.files import replace_text
from infersim.metrics.result import Result

from . import kubernetes, servers, units
from .bench import TRACE, bench_left_out, bench_words, is_random, trace_text
from .files import EXPORTS, to_json
from .servers import PORT, script, sglang_serve, trtllm_serve, vllm_serve
from .units import Unit, units_of

if TYPE_CHECKING:
    from infersim.workload.requests import Requests

ROUTERS = {
    "round-robin": "round_robin",
    "random": "random",
    "power-of-two": "power_of_two",
    "prefix-aware": "cache_aware",
    "session": "consistent_hash",
    "least-outstanding": "power_of_two",
}
"""policy -> vllm-router's, or the nearest"""
NEAREST = ("least-outstanding",)


def check_kind(kind: str, folder: Path | None) -> None:
    """InputError if there is no such export, or nowhere to write it."""
    if kind not in EXPORTS:
        raise InputError(f"--export {kind[:40]}: must be one of {', '.join(EXPORTS)}")
    if folder is None:
        raise InputError("--export: needs --out DIR, where to write")


def write_export(
    kind: str, folder: Path, result: Result, requests: "Requests", bench: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Writes what `kind` names into `folder`; returns the paths, and what they leave out. requests: the run's
    (workload.Requests); bench: of vllm_bench."""
    notes: list[str] = []
    if kind == "vllm-bench":
        texts = {"vllm-bench.json": to_json(bench) + "\n"}
    elif kind == "deployment":
        texts, notes = _scripts(result, requests)
    else:
        text, notes = manifests(result)
        texts = {"k8s.yaml": text}
    for name, text in texts.items():
        replace_text(folder / name, text, "--out")
    return [str(folder / name) for name in texts], notes


def _left_out(result: Result, of: list[Unit]) -> list[str]:
    notes = [note for unit in of for note in servers.left_out(unit.scenario, unit.engine)]
    return list(dict.fromkeys([*notes, *units.left_out(result.scenario.cluster)]))


def _scripts(result: Result, requests: "Requests") -> tuple[dict[str, str], list[str]]:
    """A script for each kind of replica and engine, the router's, and the benchmark with its trace."""
    scenario, of = result.scenario, units_of(result)
    notes = _left_out(result, of)
    notes += ["cluster.autoscaler: see --export k8s; a script starts one"] * any(unit.autoscaler for unit in of)
    texts = {}
    for unit in of:
        head = [f"{unit.replicas} of these, each on {unit.scenario.parallelism.num_gpus} {unit.scenario.hardware.name}",
                f"simulated: {unit.engine['preset']}"]  # fmt: skip
        mine = [*head, *(f"left out: {note}" for note in notes)]
        for name, make in (("vllm", vllm_serve), ("sglang", sglang_serve), ("trtllm", trtllm_serve)):
            end = f"-{unit.suffix}" if unit.suffix else ""
            texts[f"{name}{end}.sh"] = script(make(unit.scenario, unit.engine, unit.role), mine)
    if sum(unit.replicas for unit in of) > 1:
        texts["router.sh"], router_notes = _router(of)
        notes = notes + router_notes
    load = scenario.workload
    bench_notes = bench_left_out(load)
    texts["bench.sh"] = script(bench_words(scenario), [f"left out: {note}" for note in bench_notes])
    if not is_random(load):
        texts[TRACE] = trace_text(result, requests)
    return texts, [*notes, *bench_notes]


def _router(of: list[Unit]) -> tuple[str, list[str]]:
    """A script that starts a router with the policy that was simulated, or the nearest; replicas have made-up names."""
    notes = []
    policies = {unit.role: unit.router for unit in of}
    first = next(iter(policies.values()))
    urls = [(unit.role, f"http://{unit.title}-{i}:{PORT}") for unit in of for i in range(unit.replicas)]
    if any(router.policy == "kv-aware" for router in policies.values()):
        words = ["python3", "-m", "dynamo.frontend", "--router-mode", "kv", "--http-port", str(PORT)]
        words += ["--kv-overlap-score-weight", f"{first.overlap_weight:g}"]
        for module in dict.fromkeys(kubernetes.dynamo_words(unit)[1] for unit in of):
            own = f"the words of {module.removeprefix('dynamo.')}.sh, as --export k8s has them"
            notes.append(f"router kv-aware: workers are Dynamo's, python3 -m {module} with {own}")
        return script(words, [f"left out: {note}" for note in notes]), notes
    for role, router in policies.items():
        if router.policy not in ROUTERS:
            notes.append(f"router {router.policy} ({role}): llm-d's, see --export k8s; round_robin stands here")
        elif router.policy in NEAREST:
            notes.append(f"router {router.policy} ({role}): power_of_two is the nearest")
        if router.signal_age:
            notes.append(f"router.signal_age {router.signal_age:g} s ({role}): no option of the router")
    words = ["vllm-router", "--port", str(PORT)]
    if "decode" in policies:
        words += ["--vllm-pd-disaggregation"]
        words += [word for role, url in urls for word in (f"--{role}", url)]
        for role, router in policies.items():
            words += [f"--{role}-policy", ROUTERS.get(router.policy, "round_robin")]
    else:
        words += ["--policy", ROUTERS.get(first.policy, "round_robin")]
        if first.policy == "prefix-aware":
            words += ["--cache-threshold", f"{first.cache_threshold:g}"]
            words += ["--balance-abs-threshold", str(first.balance_abs_threshold)]
            words += ["--balance-rel-threshold", f"{first.balance_rel_threshold:g}"]
        words += ["--worker-urls", *(url for _, url in urls)]
    return script(words, [f"left out: {note}" for note in notes]), notes


def manifests(result: Result) -> tuple[str, list[str]]:
    """The Kubernetes manifests as text, and what they leave out."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Equal parts are written out, not referred to."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    of = units_of(result)
    notes = [*_left_out(result, of), *kubernetes.left_out(of)]
    text = "".join(f"# left out: {note}\n" for note in notes)
    return text + yaml.dump_all(kubernetes.manifests(of), Dumper=Dumper, sort_keys=False), notes


def starting_commands(result: Result) -> dict[str, str]:
    """The command line of each kind of replica, as a report shows it."""
    return {unit.suffix: servers.join(unit.words) for unit in units_of(result)}


def bench_command(result: Result) -> str:
    """The benchmark's command line, as a report shows it."""
    note = "" if is_random(result.scenario.workload) else f"# {TRACE}: --export deployment writes it\n"
    return note + servers.join(bench_words(result.scenario))
