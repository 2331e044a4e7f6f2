"""`infersim show`: look things up."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from .break_even import break_even
from .guard import guarded
from .options import Json, Overrides
from .printing import print_fields, print_json, print_rows, print_yaml

app = typer.Typer(help="Look up models, hardware, engines, workloads, scenarios and the schema.", no_args_is_help=True)
app.command("break-even")(break_even)


def _holding(part: str, what: str, rows: list[Any], texts: Callable[[Any], tuple[str, ...]]) -> list[Any]:
    """The rows that have `part` in one of their texts."""
    from infersim.config.errors import InputError
    from infersim.config.units import short

    found = [row for row in rows if any(part.lower() in text.lower() for text in texts(row))]
    if not found:
        raise InputError(f"show {what}: nothing has {short(part)} in it; `infersim show {what}` lists all")
    return found


@app.command("model")
@guarded
def model(
    name: Annotated[str, Argument(help="Catalogue name, or path of a config.json or its folder.")],
    hardware: Annotated[
        str | None, Option(help="Profile name or path; adds memory and floors (the least times that physics allows).")
    ] = None,
    tensor_parallel_size: Annotated[int, Option(help="GPUs that share each matrix.")] = 1,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """A model's parameters; with --hardware also its KV blocks and floors, the least times that physics allows."""
    from infersim.config.errors import InputError
    from infersim.config.scenario import build_scenario
    from infersim.models.catalog import load_model

    if hardware is None:
        if overrides or tensor_parallel_size != 1:
            raise InputError(
                "show model: --set and --tensor-parallel-size need --hardware, such as --hardware h100-sxm"
            )
        fields = _architecture(load_model(name))
    else:
        data = {
            "model": name,
            "hardware": hardware,
            "workload": {"input_tokens": 1, "output_tokens": 1},
            "parallelism": {"tensor": tensor_parallel_size},
        }
        fields = _deployment(build_scenario(data, "show model", overrides or []))
    (print_json if as_json else print_fields)(fields)


def _architecture(model: Any) -> dict[str, Any]:
    from infersim.cost.formats import parameters_by_format

    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.num_params,
        "active_parameters": model.num_active_params,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "parameters_by_format": parameters_by_format(model),
        "source": model.source,
    }


FLOOR_TOKENS = 1024  # context of the ITL floor, prompt of the TTFT floor


def _deployment(scenario: Any) -> dict[str, Any]:
    """A model on hardware: memory per GPU in bytes, floors in ms."""
    from dataclasses import asdict

    from infersim.cost.floors import floor_itl, floor_ttft
    from infersim.deployment import deployment_of

    deployment = deployment_of(scenario)
    model, engine, memory = deployment.model, deployment.engine, asdict(deployment.memory)
    sizes = ("weights_bytes", "activation_bytes", "cuda_graph_bytes", "overhead_bytes", "kv_bytes", "block_size")
    counts = ("num_gpu_blocks", "kv_bytes_per_token", "max_concurrency")
    return {
        **_architecture(model),
        "hardware": scenario.hardware.name,
        "tensor_parallel_size": scenario.parallelism.tensor,
        "engine": engine.preset,
        **{name: getattr(engine, name) for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")},
        **{name: memory[name] for name in (*sizes, *counts)},
        "floor_tokens": FLOOR_TOKENS,
        "floor_itl_ms": floor_itl(deployment.placement, FLOOR_TOKENS) * 1e3,
        "floor_ttft_ms": floor_ttft(deployment.placement, FLOOR_TOKENS) * 1e3,
    }


@app.command("models")
@guarded
def models(
    part: Annotated[str, Argument(help="Part of a name or family, in any case.")] = "", as_json: Json = False
) -> None:
    """The catalogue of models, or those whose name or family has a part. Any config.json works by path."""
    from infersim.models.catalog import load_model, names

    found = [load_model(name) for name in names()]
    found = _holding(part, "models", found, lambda model: (model.name, model.family))
    rows: list[dict[str, Any]] = [{"name": m.name, "family": m.family, "parameters": m.num_params} for m in found]
    if as_json:
        print_json(rows)
    else:
        print_rows([row | {"parameters": f"{row['parameters'] / 1e9:.2f}e9"} for row in rows])


@app.command("hardware")
@guarded
def hardware(
    name: Annotated[str, Argument(help="Name or path, or part of a name, vendor or generation.")] = "",
    as_json: Json = False,
) -> None:
    """All hardware profiles, those whose name, vendor or generation has a part, or one in full with its sources."""
    from infersim.config.hardware import load_hardware
    from infersim.config.prices import Prices, price_of, quotes
    from infersim.config.resources import is_file, names

    if not is_file(Path(name)) and name.lower() not in names("hardware_profiles"):
        profiles = [load_hardware(each) for each in names("hardware_profiles")]
        profiles = _holding(name, "hardware", profiles, lambda p: (p.name, p.vendor, p.generation))
        if as_json:
            print_json([profile.model_dump(mode="json") for profile in profiles])
        else:
            print_rows(
                [
                    {
                        "name": p.name,
                        "memory GiB": f"{p.memory_capacity / 2**30:.0f}",
                        "TB/s": f"{p.memory_bandwidth / 1e12:.2f}",
                        "16-bit TFLOP/s": f"{(p.flops.get('bf16') or p.flops['fp16']) / 1e12:.0f}",
                        "link GB/s": f"{p.link.bandwidth / 1e9:.0f}",
                        "joins": p.link.domain_size,
                        "USD/h on demand": f"{q.low:.2f}-{q.high:.2f}"
                        if (q := price_of(p.name, Prices()))
                        else "no quote",
                    }
                    for p in profiles
                ]
            )
    else:
        profile = load_hardware(name).model_dump(mode="json")
        if as_json:
            print_json(profile)
        else:
            print_yaml(profile)
            for quote in quotes().get(profile["name"], []):
                low, high = quote.usd
                print(f"# {quote.kind}: {low:.2f}-{high:.2f} USD/h ({quote.source}, {quote.date})")


@app.command("profile")
@guarded
def profile(name: Annotated[str, Argument(help="Profile name or path.")], as_json: Json = False) -> None:
    """What of a hardware profile is measured, calibrated, from a datasheet, published or assumed."""
    from infersim.config.hardware import load_hardware
    from infersim.explain.profile import profile_rows

    hardware = load_hardware(name)
    rows = profile_rows(hardware)
    if as_json:
        print_json(rows)
        return
    print_rows([{key: value for key, value in row.items() if key != "source"} for row in rows])
    print()
    for source in dict.fromkeys(row["source"] for row in rows):
        print(f"{', '.join(row['what'] for row in rows if row['source'] == source)}: {source}")


@app.command("engines")
@guarded
def engines(as_json: Json = False) -> None:
    """The engine presets: their knobs side by side, sources, and how versions differ. --json has every knob."""
    from textwrap import fill

    from infersim.config.presets import packaged_presets

    rows = [preset.row() for preset in packaged_presets().values()]
    if as_json:
        print_json(rows)
        return
    print_rows([{column: knob(row) for column, knob in ENGINE_COLUMNS.items()} for row in rows])
    for row in rows:
        print(f"\n{row['name']}: {row['source']}")
        print(fill(row["notes"], 98, initial_indent="  ", subsequent_indent="  "))


@app.command("compatibility")
@guarded
def compatibility(as_json: Json = False) -> None:
    """What does not go together: the condition, the key to change, and why."""
    from infersim.deployment.compatibility import FACTS, RULES

    if as_json:
        print_json([rule._asdict() for rule in RULES])
        return
    for rule in RULES:
        print(f"{rule.key}: {rule.message}\n    when {rule.when}")
    print("\nConditions name knobs, and:")
    for name, about in FACTS.items():
        print(f"    {name}: {about}")


ENGINE_COLUMNS: dict[str, Any] = {
    "preset": lambda row: row["name"],
    "step order": lambda row: row["order"],
    "admits with": lambda row: "whole prompt free" if row["scheduler_reserve_full_isl"] else row["reserve"],
    "memory in": lambda row: {"paged": "pages"}.get(row["allocator"], row["allocator"]),
    "evicts": lambda row: (
        "never"
        if row["reserve"] in ("to-completion", "max-model-len")
        else "fewest outputs"
        if row["retracts"]
        else "last"
    ),
    "prefix cache": lambda row: row["prefix_cache"] if row["enable_prefix_caching"] else "no",
    "chunked": lambda row: "yes" if row["enable_chunked_prefill"] else "no",
    "block": lambda row: str(row["block_size"]),
    "budget/seqs": lambda row: " ".join(
        f"{each['max_num_batched_tokens']}/{each['max_num_seqs']}" for each in row["batch_defaults"]
    ),
    "memory": lambda row: f"{row['gpu_memory_utilization']:g}",
    "watermark": lambda row: f"{row['watermark']:g}",
    "async": lambda row: "yes" if row["async_scheduling"] else "no",
    "host ms": lambda row: f"{row['host_step_time'] * 1e3:g}",
}


@app.command("network")
@guarded
def network(
    path: Annotated[Path, Argument(help="YAML of a classifier with branches: layers, branches, batches.")],
    as_json: Json = False,
) -> None:
    """What early exits gain a classifier (BranchyNet), one input at a time and batched."""
    from infersim.config.network import load_network
    from infersim.cost.depth import network_depths
    from infersim.explain.break_even import network_gains

    description = load_network(path)
    rows = network_gains(network_depths(description), description.batches)
    if as_json:
        print_json({"shares": description.shares, "approximate": True, "over_batch": rows})
        return
    shares = ", ".join(f"{share:.1%} after {branch.after} layers" for share, branch in
                       zip(description.shares, description.branches, strict=False))  # fmt: skip
    print(f"early exit (approximate: answers may change): {shares}, {description.shares[-1]:.1%} at the end")
    print_rows([{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])


@app.command("schema")
@guarded
def schema(
    of: Annotated[
        str, Option(help="scenario: a file; result, plan, compare, sweep: what run and these write with --json.")
    ] = "scenario",
) -> None:
    """JSON Schema of a scenario file, for editors, or of what a verb answers, for programs that read it."""
    from infersim.config.errors import InputError
    from infersim.config.schema import json_schema
    from infersim.planning.document import DOCUMENTS, document_schema

    if of != "scenario" and of not in DOCUMENTS:
        raise InputError(f"--of {of[:40]}: must be one of scenario, {', '.join(DOCUMENTS)}")
    print_json(json_schema() if of == "scenario" else document_schema(of))


@app.command("reference")
@guarded
def reference() -> None:
    """Every key of scenario and plan files, as Markdown."""
    from infersim.deployment.compatibility import FACTS, RULES
    from infersim.report.reference import reference as text

    print(text(RULES, FACTS), end="")


def _list_folder(folder: str, as_json: bool) -> None:
    """Names of packaged files, each with the first words of the comment at its top."""
    from itertools import takewhile
    from textwrap import shorten

    from infersim.config.resources import find, names

    rows = []
    for name in names(folder):
        lines = find(folder, name).read_text(encoding="utf-8").splitlines()
        comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
        rows.append({"name": name, "about": shorten(comment, 75, placeholder=" ...")})
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows)


@app.command("workloads")
@guarded
def workloads(as_json: Json = False) -> None:
    """The workloads that a scenario can name."""
    _list_folder("workloads", as_json)


@app.command("scenarios")
@guarded
def scenarios(as_json: Json = False) -> None:
    """The scenarios that `infersim run` knows by name, and plan-*, the plans of `infersim plan`."""
    _list_folder("scenarios", as_json)


@app.command("deployment")
@guarded
def deployment(
    file: Annotated[
        str, Argument(help="A script or text with `vllm serve ...`, or manifests of --export k8s; -: standard input.")
    ],
    hardware: Annotated[str | None, Option(help="Name or path of the profile of its accelerators.")] = None,
    workload: Annotated[str | None, Option(help="Name or path of a workload.")] = None,
) -> None:
    """A running deployment as a scenario file: from a `vllm serve` line or Kubernetes manifests."""
    from infersim.config.errors import InputError
    from infersim.config.started import read_started

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {getattr(error, 'strerror', 'not UTF-8 text')}") from None
    started = read_started(text, "stdin" if file == "-" else file)
    given = {"hardware": hardware, "workload": workload}
    for line in started.unknown:
        print(f"# not in the file: {line}")
    print_yaml(started.keys | {key: value for key, value in given.items() if value})


@app.command("bench")
@guarded
def bench(
    file: Annotated[str, Argument(help="Result of vllm bench serve, sglang.bench_serving, aiperf or guidellm.")],
    as_json: Json = False,
) -> None:
    """What a benchmark client measured, under vLLM's names: a run, or several, after one another."""
    from infersim.calibration.results import read_results

    runs: list[dict[str, Any]] = [
        {"client": run.client, "model": run.model, "completed": run.num_requests, "failed": run.failed,
         "request_rate": run.request_rate, "max_concurrency": run.max_concurrency, "mean_input": run.mean_input,
         "mean_output": run.mean_output, "metrics": run.metrics() | run.summary}
        for run in read_results([file])
    ]  # fmt: skip
    if as_json:
        print_json(runs)
        return
    for run in runs:
        print_fields({key: value for key, value in (run | run.pop("metrics")).items() if value is not None})
