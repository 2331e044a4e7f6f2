"""The product made wrong on purpose, one fault at a time: which claims of `infersim reproduce` notice.

    python tests/mutations.py [--report reports/mutations.md] [NAME]...

A fault of the engine changes what it is given: tables of seconds, knobs, chances. A fault of a formula replaces the
function in every module that has it. A claim notices if it no longer agrees; that it cannot be computed does not
count.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from infersim.cluster import routers
from infersim.cost import attention_kernel, depth, floors, speculation, weight_only
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.replica import ReplicaSpec
from infersim.explain import techniques
from infersim.models.architecture import Attention, Model
from infersim.reproduce.claims import CLOSED_FORM, FAILED, OK, SIMULATED, Claim, verdict
from infersim.reproduce.table import all_claims

SLOW = ("vllm.fig", "vllm.derived", "vllm.rate", "vllm.alpaca", "vllm.sharegpt", "vllm.blog", "kv.gain", "kv.sharing",
        "kv.internal", "kv.concurrency", "law.taxonomy", "specbench", "sys.", "sarathi.cap", "turbospec")  # fmt: skip
"""groups of claims that take long: asked only about faults that name them"""


RESERVE, ALLOCATOR = state.CODES["reserve"], state.CODES["allocator"]


@dataclass(frozen=True)
class Mutation:
    """A fault, what it does to the product while it lasts, and which kinds of claims and slow groups it may reach."""

    name: str
    fault: Callable[[], Any]
    reaches: tuple[str, ...] = (SIMULATED,)
    slow: tuple[str, ...] = ()


@contextmanager
def attributes(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(owner, name, value) each, put back at the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def function(module: Any, name: str, make: Callable[[Callable], Callable]) -> Callable[[], Any]:
    """The module's function replaced by make(it), wherever it was imported."""

    def fault():
        old = getattr(module, name)
        owners = [m for key, m in sys.modules.items() if key.startswith("infersim") and m is not None]
        found = [(m, key) for m in owners for key, value in vars(m).items() if value is old]
        new = make(old)
        return attributes(*((m, key, new) for m, key in found))

    return fault


def of_fleet(change: Callable[[list[ReplicaSpec], dict], list[ReplicaSpec]]) -> Callable[[], Any]:
    """Every fleet is built of other specs."""

    def fault():
        old = Fleet.__init__

        def init(self, replicas, *args, **kwargs):
            old(self, change(replicas, kwargs), *args, **kwargs)

        return attributes((Fleet, "__init__", init))

    return fault


def of_spec(change: Callable[[ReplicaSpec], ReplicaSpec]) -> Callable[[], Any]:
    return of_fleet(lambda specs, _: [change(spec) for spec in specs])


def tables(**factors: float) -> Callable[[], Any]:
    """The step's tables with resources multiplied."""
    rows = [(state.RESOURCES.index(name), factor) for name, factor in factors.items()]

    def change(spec: ReplicaSpec) -> ReplicaSpec:
        cost = spec.cost
        new = {}
        for name in ("linear", "head", "shared"):
            if (table := getattr(cost, name)) is not None:
                new[name] = table.copy()
                for row, factor in rows:
                    new[name][:, row] *= factor
        return replace(spec, cost=replace(cost, **new))

    return of_spec(change)


def attention(*names: str, factor: float = 0.0, plus: float = 0.0) -> Callable[[], Any]:
    """Columns of the price of attention multiplied, and added to."""

    def change(spec: ReplicaSpec) -> ReplicaSpec:
        prices = spec.cost.attention.copy()
        for name in names:
            prices[name] = prices[name] * factor + plus
        return replace(spec, cost=replace(spec.cost, attention=prices))

    return of_spec(change)


def knobs(**values: Any) -> Callable[[], Any]:
    """Knobs set to values, or to value(record)."""

    def change(spec: ReplicaSpec) -> ReplicaSpec:
        record = spec.knobs.copy()
        for name, value in values.items():
            record[name] = value(spec.knobs) if callable(value) else value
        return replace(spec, knobs=record)

    return of_spec(change)


def _head_free(spec: ReplicaSpec) -> ReplicaSpec:
    return replace(spec, cost=replace(spec.cost, head=np.zeros_like(spec.cost.head)))


def _verified_free(spec: ReplicaSpec) -> ReplicaSpec:
    """What is verified beside a sequence's own token costs nothing: a batch's tables end at its sequences."""
    if spec.draft is None:
        return spec
    most = int(spec.knobs["max_num_seqs"])
    linear, head = spec.cost.linear.copy(), spec.cost.head.copy()
    width = len(spec.draft.passes)
    n = np.arange(min(most * width + 1, len(linear)))
    linear[: len(n)] = linear[-(-n // width)]
    rows = np.arange(len(head))
    head[:] = head[-(-rows // width)]
    return replace(spec, cost=replace(spec.cost, linear=linear, head=head))


def _misattributed(spec: ReplicaSpec) -> ReplicaSpec:
    linear = spec.cost.linear.copy()
    linear[:, state.WEIGHTS] += linear[:, state.COMPUTE]
    linear[:, state.COMPUTE] = 0.0
    return replace(spec, cost=replace(spec.cost, linear=linear))


def _drafts_free(spec: ReplicaSpec) -> ReplicaSpec:
    if spec.draft is None:
        return spec
    old = spec.draft
    zeros = {name: np.zeros_like(getattr(old, name)) for name in ("first", "once", "following", "passes")}
    return replace(spec, draft=replace(old, **zeros, attention=old.attention[:0], first_attends=False))


def _acceptance(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Any]:
    def fault(specs: list[ReplicaSpec], kwargs: dict) -> list[ReplicaSpec]:
        if (table := kwargs.get("acceptance")) is not None:
            kwargs["acceptance"] = replace(table, accepted=change(table.accepted.copy()))
        return specs

    return of_fleet(fault)


def _one_more(accepted: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ones_like(accepted[:, :, :1]), accepted[:, :, :-1]], axis=2)


def _technique(**changes: Any) -> Callable[[], Any]:
    def make(old):
        return lambda setting: (
            (found := old(setting))
            and replace(found, **{name: change(getattr(found, name)) for name, change in changes.items()})
        )

    return function(techniques, "technique_of", make)


def _model(name: str, factor: float) -> Callable[[], Any]:
    old = getattr(Model, name)
    return lambda: attributes((Model, name, lambda self, *args: old(self, *args) * factor))


def _hardware(**factors: float) -> Callable[[], Any]:
    from infersim.config import hardware

    def make(old):
        def load(name):
            found = old(name)
            update = {key: getattr(found, key) * factor for key, factor in factors.items() if key != "flops"}
            if "flops" in factors:
                update["flops"] = {key: rate * factors["flops"] for key, rate in found.flops.items()}
            return found.model_copy(update=update)

        return load

    return function(hardware, "load_hardware", make)


def _reserves_longest() -> Any:
    return knobs(
        reserve=lambda k: (
            RESERVE["max-model-len"]
            if k["allocator"] == ALLOCATOR["paged"] and not k["num_sequences"] > 1
            else k["reserve"]
        )
    )()


_FORMULAS, _BOTH = (CLOSED_FORM,), (CLOSED_FORM, SIMULATED)
_KEYS, _PAIRS = ("decode_kv", "prefill_kv"), ("prefill_compute", "prefill_query", "prefill_tile")
MUTATIONS = (
    # what a step costs
    Mutation("attention bytes x 1.5", attention(*_KEYS, factor=1.5), slow=("vllm.derived", "kv.concurrency")),
    Mutation("attention free of arithmetic", attention(*_PAIRS, "decode_compute"), slow=("sys.flash",)),
    Mutation("no overlap in attention", attention("prefill_softness", "decode_softness", plus=1.0)),
    Mutation("head free", of_spec(_head_free), slow=("sys.sglang",)),
    Mutation("no launch time", tables(launch=0.0)),
    Mutation("all-reduce free", tables(collectives=0.0)),
    Mutation("weights at twice their size", tables(weights=2.0), slow=("vllm.derived",)),
    Mutation("weights free", tables(weights=0.0), slow=("sys.trtllm",)),
    Mutation("arithmetic of linear layers free", tables(compute=0.0), slow=("vllm.fig19", "sarathi.cap")),
    Mutation("arithmetic counted as weights", of_spec(_misattributed)),
    Mutation("waits for the host free", tables(host=0.0), slow=("specbench",)),
    # speculation
    Mutation("draft passes free", of_spec(_drafts_free), slow=("sys.dynamo", "turbospec")),
    Mutation("verification free", of_spec(_verified_free), slow=("turbospec",)),
    Mutation("acceptance off by one", _acceptance(_one_more), slow=("specbench",)),
    Mutation("drafts never accepted", _acceptance(np.zeros_like), slow=("law.taxonomy", "sys.trtllm")),
    # the scheduler and its memory
    Mutation("prefix cache always misses", knobs(enable_prefix_caching=0, radix=0), slow=("kv.sharing", "sys.")),
    Mutation("no block rounding", knobs(block_size=1, num_gpu_blocks=lambda k: k["num_gpu_blocks"] * k["block_size"]),
             slow=("vllm.fig2.vllm", "vllm.fig15", "vllm.fig18b", "kv.internal", "vllm.blog", "sys.vllm")),
    Mutation("paged memory reserves the longest", _reserves_longest,
             slow=("vllm.rate", "kv.gain", "vllm.fig13b.vllm", "vllm.fig2.vllm", "law.taxonomy", "kv.internal")),
    Mutation("contiguous memory reserves the first chunk", knobs(reserve=RESERVE["first-chunk"],
             allocator=ALLOCATOR["paged"]), slow=("vllm.fig13b.orca", "kv.gain", "vllm.alpaca", "vllm.fig2")),
    Mutation("the longest reservation is a power of two", knobs(reserve=lambda k: RESERVE["power-of-two"]
             if k["reserve"] == RESERVE["max-model-len"] else k["reserve"]), slow=("vllm.fig2.orca_max",)),
    Mutation("a batch is admitted when the last has ended", knobs(admit_when_idle=1),
             slow=("kv.concurrency", "sys.vllm", "sys.trtllm", "vllm.derived")),
    Mutation("half of the KV blocks", knobs(num_gpu_blocks=lambda k: k["num_gpu_blocks"] // 2),
             slow=("vllm.fig13b", "vllm.blog")),
    Mutation("beams never turn over", knobs(beam_turnover=0.0), slow=("vllm.fig15", "vllm.alpaca")),
    Mutation("samples turn over as beams do", knobs(beam_turnover=0.3), slow=("vllm.fig15", "vllm.sharegpt")),
    Mutation("routers deal in turn", lambda: attributes((routers, "POLICIES", dict.fromkeys(
             routers.POLICIES, routers.POLICIES["round-robin"]))), slow=("sys.llmd", "sys.dynamo")),
    # sizes, devices, labels
    Mutation("a KV head for each query head", lambda: attributes((Attention, "kv_elements_per_token", property(lambda a:
             2 * a.num_heads * a.head_dim))), _FORMULAS),
    Mutation("KV bytes halved", _model("kv_bytes_per_token", 0.5), _FORMULAS),
    Mutation("bandwidth 10 % up", _hardware(memory_bandwidth=1.1), _FORMULAS),
    Mutation("peak rates 10 % up", _hardware(flops=1.1), _FORMULAS),
    Mutation("every technique exact", _technique(exact=lambda _: True), _FORMULAS),
    Mutation("bytes called steps", _technique(side=lambda _: techniques.FEWER_STEPS), slow=("law.taxonomy",)),
    Mutation("early exits run to the end", function(depth, "with_early_exit",
             lambda _: lambda cost, *rest: cost)),
    # closed forms
    Mutation("floors without FLOPs", function(floors, "peak_flops", lambda _: lambda *args: np.inf), _FORMULAS),
    Mutation("floors of twice the weights", function(floors, "step_bytes", lambda old: lambda operators, sums,
             scale=1.0: old(operators, sums, 2 * scale)), _FORMULAS),
    Mutation("no token of the target's own", function(speculation, "tokens_per_step", lambda old: lambda alpha, k:
             old(alpha, k) - 1), _BOTH),
    Mutation("drafting free in closed form", function(speculation, "speedup", lambda old: lambda alpha, k, c:
             old(alpha, k, 0.0)), _FORMULAS),
    Mutation("break-even without drafting", function(speculation, "tokens_needed", lambda _: lambda *args: 1.0),
             _FORMULAS),
    Mutation("acceptance as the largest overlap", function(speculation, "acceptance_rate", lambda _: lambda p, q:
             float(np.minimum(p, q).max())), _FORMULAS),
    Mutation("attention kernels alike", function(attention_kernel, "with_attention_kernel", lambda old: lambda hardware,
             kernel: old(hardware, kernel and "flash2")), slow=("sys.flash",)),
    Mutation("packed weights unpacked for nothing", function(weight_only, "weight_only_time", lambda old: lambda kernel,
             hardware, rows, weights: old(replace(kernel, row_ops=0.0, unpack_ops=0.0, flops=1.0), hardware, rows,
             weights)), _FORMULAS),
)  # fmt: skip


def _forget() -> None:
    """Nothing computed before counts."""
    for key, module in list(sys.modules.items()):
        if key.startswith("infersim") and module is not None:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "").startswith("infersim"):
                    value.cache_clear()


def _found(claim: Claim) -> str:
    try:
        return verdict(claim, claim.compute())
    except Exception:  # the fault made it impossible to say
        return "error"


@cache
def baseline() -> dict[str, str]:
    """Verdict of each claim on the product as it is."""
    return {claim.id: _found(claim) for claim in all_claims()}


def killed(mutation: Mutation, among: Iterable[str]) -> list[str]:
    """Which of these claims, which agree, do not under this fault."""
    among = set(among)
    _forget()
    try:
        with mutation.fault():
            return [claim.id for claim in all_claims() if claim.id in among and _found(claim) == FAILED]
    finally:
        _forget()


def asked(mutation: Mutation) -> list[str]:
    """The claims that agree and that a fault may reach."""
    return [
        claim.id
        for claim in all_claims()
        if claim.evidence in mutation.reaches
        and (not claim.id.startswith(SLOW) or claim.id.startswith(mutation.slow or ("-",)))
        and baseline()[claim.id] == OK
    ]


def table(found: dict[str, list[str]]) -> str:
    """The report: faults with the claims that notice, and claims with the number of faults that they notice."""
    claims = [claim for claim in all_claims() if baseline()[claim.id] == OK and claim.evidence in _BOTH]
    noticed = {claim.id: sum(claim.id in ids for ids in found.values()) for claim in claims}
    lines = [
        "# Mutations",
        "",
        f"{len(found)} faults; {sum(n > 0 for n in noticed.values())} of {len(claims)} simulated and closed-form claims"
        " that agree notice at least one.",
        "",
        "Written by `python tests/mutations.py --report reports/mutations.md`. Each fault makes the product wrong in"
        " one place;",
        "a claim notices if it no longer agrees. Claims that take seconds are asked only about the faults that are"
        " named for them.",
        "",
        "| fault | claims that notice |",
        "|---|---|",
        *(f"| {name} | {', '.join(ids) or '**none**'} |" for name, ids in found.items()),
        "",
        "| claim | evidence | faults noticed |",
        "|---|---|---|",
        *(f"| {claim.id} | {claim.evidence} | {noticed[claim.id]} |" for claim in claims),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    import argparse
    import time

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(arguments)
    found = {}
    for mutation in MUTATIONS:
        if not options.names or mutation.name in options.names:
            started = time.perf_counter()
            found[mutation.name] = killed(mutation, asked(mutation))
            print(
                f"{time.perf_counter() - started:5.1f} s  {mutation.name}: {', '.join(found[mutation.name]) or 'NONE'}",
                flush=True,
            )
    if options.report:
        options.report.write_text(table(found), encoding="utf-8")
    seen = {id for ids in found.values() for id in ids}
    claims = {claim.id for claim in all_claims() if baseline()[claim.id] == OK and claim.evidence in _BOTH}
    print("not noticed by:", ", ".join(sorted(claims - seen)) or "none")


if __name__ == "__main__":
    main(sys.argv[1:])
