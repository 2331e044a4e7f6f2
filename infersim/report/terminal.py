"""The answer of a run: lines as wide as the terminal, plain, or coloured for it."""

import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import IO, Any

from infersim.explain.change import plain
from infersim.explain.uncertainty import ends_of
from infersim.metrics.verdict import per_second

NARROWEST, USUAL, WIDEST = 76, 100, 120
LABEL = 11
GIB = 2**30
MAX_MODELS = 6
STYLES = {"good": "\x1b[1;32m", "bad": "\x1b[1;31m", "head": "\x1b[1m"}
RESET = "\x1b[0m"

Line = tuple[str, str]
"""a style (a key of STYLES, or none) and a text"""


def width() -> int:
    """Columns of a line: the terminal's, or COLUMNS, within what can be read; USUAL for a file."""
    return min(max(shutil.get_terminal_size((USUAL, 24)).columns, NARROWEST), WIDEST)


def print_report(document: dict[str, Any], files: list[str], stream: IO[str] | None = None) -> None:
    """Prints the document of `explain.summary`; in colour if `stream` (default: stdout) is a terminal."""
    stream = stream or sys.stdout
    colour = stream.isatty() and "NO_COLOR" not in os.environ  # no-color.org
    for style, text in render(document, files):
        stream.write(f"{STYLES[style]}{text}{RESET}\n" if colour and style else f"{text}\n")


def render(document: dict[str, Any], files: list[str]) -> list[Line]:
    """The lines of the report."""
    blank = ("", "")
    lines = [*_head(document), blank, *_metrics(document), blank, *_why(document["explain"])]
    lines += [
        *_cluster(document["replicas"], document["route"]),
        *_tenants(document["tenants"]),
        *_jobs(document["jobs"]),
    ]
    lines += [*_models(document["models"]), blank]
    lines += [*_memory(document["memory"], document["engine"]), blank]
    return [*lines, *field("assumed", document["assumed"]), *field("written", files)]


def title(document: dict) -> str:
    """What was run, in one line."""
    scenario = document["scenario"]
    model = scenario["model"].rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
    groups = [scenario, *(scenario["cluster"].get("kinds") or ())]
    adapters = {name for group in groups for name in (group.get("lora") or {}).get("adapters", ())}
    if len(models := (document["models"] or {}).keys() - adapters) > 1:
        model = f"{len(models)} models"
    return f"{model} on {_devices(document)}, {document['engine']['preset']}, {_load(scenario['workload'])}"


ROLES = {"serve": "", "prefill": " for prefill", "decode": " for decode", "encode": " to encode"}


def _devices(document: dict) -> str:
    """Every kind of replica: its GPUs, and how many there are."""
    cluster, rows = document["scenario"]["cluster"], document["replicas"]
    if scaler := cluster.get("autoscaler"):
        return copies(f"{scaler['min']} to {scaler['max']}", rows[0]["gpus"], rows[0]["hardware"])
    counts = Counter((row["role"], row["gpus"], row["hardware"]) for row in rows)
    parts = []
    for (role, gpus, name), n in counts.items():
        pool = cluster.get(role) or {}
        most = f"{pool['autoscaler']['min']} to {n}" if pool.get("autoscaler") and n > 1 else n
        parts.append(f"{copies(most, gpus, name)}{ROLES[role]}{' at first' * bool(cluster.get('role_switch'))}")
    return " and ".join(parts)


def copies(replicas: int | str, gpus: int, hardware: str) -> str:
    """What replicas of one kind run on, in words."""
    return f"{gpus} {hardware}" if replicas == 1 else f"{replicas} replicas of {gpus} {hardware}"


SLO = {True: "met", False: "missed", None: "held in this run, too short to tell whether it stays so"}


def state(document: dict) -> str:
    """The verdict in one word, or a few."""
    verdict = document["verdict"]
    word = f"INTERRUPTED, {verdict['state']} so far" if document["interrupted"] else verdict["state"].upper()
    growth = verdict["backlog_per_s"] and not document["interrupted"]
    return f"{word}, backlog grows by {per_second(verdict['backlog_per_s'])} requests/s" if growth else word


def _head(document: dict) -> list[Line]:
    counts, verdict = document["counts"], document["verdict"]
    mood = {"STABLE": "good", "TOO SHORT TO TELL": ""}.get(state(document), "bad")
    lines = [("head", line) for line in wrapped(title(document), width())]
    more = verdict["needed_requests"] and document["scenario"]["workload"]["trace"] is None
    reason = f"{state(document)}: {verdict['reason']}{' (--until-decided)' if more else ''}"
    lines += [(mood, line) for line in wrapped(reason, width())]
    parts = [f"{counts['completed']:,} of {counts['submitted']:,} requests completed"]
    parts += [f"{counts[key]:,} {key}" for key in ("rejected", "timed_out", "lost", "unfinished") if counts[key]]
    parts += [f"{counts[key]:,} {key}" for key in ("preemptions", "retries") if counts[key]]
    lines += field("requests", [", ".join(parts)])
    if slo := document["slo"]:
        texts = [f"{x['name']} {number(x['value'])} {'<=' if x['met'] else '>'} {x['limit']:g}" for x in slo["limits"]]
        alone = slo["met"] is False and texts and all(x["met"] for x in slo["limits"])
        why = ", as the load is not kept up with" if alone else ""
        lines += field("slo", [f"{SLO[slo['met']]}{why}: {', '.join(texts) or verdict['state']}"])
        if slo["met"] is False:
            lines[-1] = ("bad", lines[-1][1])
        lines += field("", _with_error_bar(document["model_error"], slo))
    return lines


def _with_error_bar(error: dict, slo: dict) -> list[str]:
    """Whether limits are held, or missed, all over the interval of 4 in 5 deployments of this kind."""
    limits = {x["name"]: x["limit"] for x in slo["limits"]}
    ends = {x["name"]: found for x in slo["limits"] if (found := ends_of(error, x["name"], x["value"]))}
    missed = [x["name"] for x in slo["limits"] if not x["met"]]
    if slo["met"]:
        beyond = [name for name in ends if ends[name][1] > limits[name]]
        words, names = ("but not with the error bar", beyond) if beyond else ("with the error bar too", list(ends))
    elif missed and all(name in ends and ends[name][0] <= limits[name] for name in missed):
        words, names = "but maybe within the error bar", missed
    else:
        return []
    figures = [f"{name} {'up' if slo['met'] else 'down'} to {ends[name][bool(slo['met'])]:.3g}" for name in names]
    return [f"{words}: {', '.join(figures)} in 4 of 5 deployments of this kind"] if figures else []


def _load(workload: dict) -> str:
    """What arrives, in a few words."""
    if workload["ramp_up"]:
        return "{start_rps:g} to {end_rps:g} requests/s".format(**workload["ramp_up"])
    if workload["request_rate"] == "inf":
        clients = workload["max_concurrency"]
        return f"{clients:,} client{'s' * (clients > 1)} in a closed loop" if clients else "all requests at once"
    if workload["users"]:
        return f"{workload['users']:,} users"
    if workload["request_rate"]:
        what = "request" if workload["turns"] == 1 else "session"
        return f"{workload['request_rate']:g} {what}{'s' * (workload['request_rate'] != 1)}/s"
    return workload["trace"].rstrip("/").rsplit("/", 1)[-1][:40]


def _metrics(document: dict) -> list[Line]:
    metrics, confidence = document["metrics"], document["confidence"]
    rates = [
        f"{number(metrics['request_throughput'])} requests/s",
        f"{number(metrics['output_throughput'])} output tokens/s",
        f"{number(metrics['total_token_throughput'])} tokens/s in all",
    ]
    if metrics["request_goodput"] is not None:
        rates.append(f"goodput {number(metrics['request_goodput'])} requests/s")
    if not metrics["duration_s"]:
        return field("throughput", ["nothing completed"])
    lines = field("throughput", [f"{', '.join(rates)} over {number(metrics['duration_s'])} s"])
    interval, told = (document["sampling"] or {"interval": {}})["interval"], False
    columns = ("mean", "median", "p90", "p95", "p99")
    header = "".join(f"{column:>13}" for column in columns)
    lines.append(("head", f"{'ms':{LABEL}}{header}"))
    for metric in ("ttft", "tpot", "itl", "e2el"):
        names = [f"{column}_{metric}_ms" for column in columns]
        lines.append(("", f"{metric:{LABEL}}{''.join(f'{number(metrics[name]):>13}' for name in names)}"))
        if confidence:
            widths = ("+-" + number(confidence["half_width"][name]) for name in names)
            lines.append(("", f"{'':{LABEL}}{''.join(f'{width:>13}' for width in widths)}"))
        pairs = [interval.get(name) for name in names]
        if any(pair and _is_wide(pair, metrics[name]) for pair, name in zip(pairs, names, strict=True)):
            told = True
            lines.append(("", f"{'  95 %':{LABEL}}{''.join(f'{interval_text(pair):>13}' for pair in pairs)}"))
    if told:
        lines += field("", ["95 %: where chance alone may move it, in a run of so many requests"])
    texts = [*document["model_error"]["text"], *(row["text"] for row in document.get("unknowns", ()))]
    return lines + field("error bar", texts)


WIDE = 0.2  # of the value: a narrower interval is not printed


def _is_wide(pair: list[float | None], value: float | None) -> bool:
    low, high = pair
    return low is not None and (high is None or high - low > WIDE * (value or 0.0))


def interval_text(pair: list[float | None] | None) -> str:
    """[low, high] in few characters; "from low" where nothing bounds it."""
    if pair is None or pair[0] is None:
        return ""
    low, high = (_short(value) if value is not None else "" for value in pair)
    return f"{low}-{high}" if high else f"from {low}"


def _short(value: float) -> str:
    return f"{value / 1e3:.3g}k" if abs(value) >= 999.5 else f"{value:.3g}"


def _why(explain: dict) -> list[Line]:
    lines = field("binding", [explain["binding"]])
    if explain["ceiling"]:
        lines += field("ceiling", [explain["ceiling"]])
    if explain["busy_s"]:
        ranked = sorted(explain["time_by_resource"].items(), key=lambda item: -item[1])
        shares = [f"{name} {t / explain['busy_s']:.1%}" for name, t in ranked if t > 0.0005 * explain["busy_s"]]
        busy = f"busy {_percent(explain['busy_share'])} of the time, {explain['num_steps']:,} steps"
        lines += field("time", [f"{busy}: {', '.join(shares)}"])
    floors = [
        f"{name} {number(explain[f'floor_{name}_ms'])} ms" + (f", {share:.1%} of the mean" if share is not None else "")
        for name in ("itl", "ttft")
        for share in (explain[f"floor_share_{name}"],)
    ]
    lines += field("floors", ["; ".join(floors)])
    if explain["mean_running"] is not None:
        batch = (
            f"{number(explain['mean_running'])} running (peak {explain['peak_running']:,}),"
            f" {number(explain['mean_waiting'])} waiting ({number(explain['mean_queue_ms'])} ms each);"
            f" KV {_percent(explain['mean_kv_usage'])} used (peak {_percent(explain['peak_kv_usage'])})"
        )
        if explain["prefix_cache_token_hit_rate"]:
            batch += f", {explain['prefix_cache_token_hit_rate']:.1%} of prompt tokens cached"
        lines += field("batch", [batch])
    if group := explain["sequences"]:
        counted = "output tokens are the best one's" if group["kind"] == "beams" else "each is a request"
        text = (
            f"{group['per_request']} {group['kind']} of each prompt decode together: {counted},"
            f" {group['decoded_tokens']:,} tokens were decoded; sharing saves"
            f" {_percent(explain['kv_blocks_saved'])} of their KV blocks, {group['copied_blocks']:,} copied on write"
        )
        lines += field(group["kind"], [text])
    if tiers := explain["kv_offloading"]:
        found = ", ".join(f"{tiers[f'{name.lower()}_hit_rate']:.1%} {name}" for name in ("GPU", "CPU", "disk"))
        lines += field("cached", [f"prompt tokens by tier: {found}; loading took {number(tiers['load_s'])} s"])
    if spec := explain["speculation"]:
        text = (
            f"{spec['method']}: {number(spec['mean_acceptance_length'])} tokens per step and sequence,"
            f" {_percent(spec['acceptance_rate'])} of {spec['num_drafts']:,} drafts accepted"
        )
        lines += field("drafts", [text])
    if (explain["mean_client_queue_ms"] or 0) > 0.1:
        lines += field("client", [f"requests wait {number(explain['mean_client_queue_ms'])} ms before they are sent"])
    return lines


def _cluster(replicas: list[dict], route: dict) -> list[Line]:
    """How several replicas shared the work, least to most; hand-overs and scaling."""

    def span(name: str, form: Callable[[Any], str]) -> str:
        values = [row[name] for row in replicas if row["available_s"]] or [0]
        low, high = form(min(values)), form(max(values))
        return low if low == high else f"{low} to {high}"

    shares = (
        f"{route['policy']}: {span('requests', '{:,}'.format)} requests each, busy {span('busy_share', _percent)},"
        f" KV {span('mean_kv_usage', _percent)} used (peak {span('peak_kv_usage', _percent)})"
    )
    lines = field("replicas", [shares]) if len(replicas) > 1 else []
    if "images" in route:
        text = (
            f"{route['images']:,} images, {number(route['embedding_bytes'] / 1e9)} GB:"
            f" {number(route['mean_encode_ms'])} ms until they had been encoded and had come over the link"
        )
        lines += field("encode", [text])
    if "handed_over" in route:
        text = (
            f"{route['handed_over']:,} prompts, {number(route['transfer_bytes'] / 1e9)} GB:"
            f" {number(route['mean_wait_for_room_ms'])} ms until there was room,"
            f" {number(route['mean_transfer_ms'])} ms on the way (link busy {_percent(route['link_busy_share'])})"
        )
        lines += field("hand-over", [text])
    if switched := route.get("role_switch"):
        drain = f", drained in {number(switched['mean_drain_s'])} s on average" if switched["mean_drain_s"] else ""
        _, decode, prefill = switched["roles"][-1]
        text = f"{switched['to_decode']} switches to decode, {switched['to_prefill']} to prefill{drain};"
        lines += field("roles", [f"{text} in the end {decode} decode and {prefill} prefill"])
    if "adapter_loads" in route:
        text = f"{route['adapter_loads']:,} loads for {route['adapter_requests']:,} requests,"
        text += f" which waited {number(route['mean_adapter_wait_ms'])} ms for a slot"
        stalls = f"; steps waited {number(route['adapter_stalls_s'])} s for loads" if route["adapter_stalls_s"] else ""
        lines += field("adapters", [text + stalls])
    if scalers := route.get("autoscalers"):
        usd = f", {' to '.join(f'{x:.2f}' for x in route['usd'])} USD" if route["usd"] else ""
        parts = [
            f"{'' if len(scalers) == 1 else scaler['group'] + ' '}{scaler['starts']} starts of"
            f" {number(scaler['startup_s'])} s, {scaler['stops']} stops, at most {scaler['peak_replicas']} at once"
            for scaler in scalers
        ]
        lines += field("scaling", [f"{'; '.join(parts)}; {route['gpu_seconds'] / 3600:.3g} GPU hours{usd}"])
    return lines


def _models(models: dict | None) -> list[Line]:
    """How requests for each model fare, those with most first."""
    if models is None:
        return []
    ranked = sorted(models.items(), key=lambda item: -item[1]["requests"])
    parts = [
        f"{name} {row['requests']:,}: {number(row['mean_ttft_ms'])} / {number(row['p99_ttft_ms'])}"
        for name, row in ranked[:MAX_MODELS]
    ]
    more = f", and {len(ranked) - MAX_MODELS} more" if len(ranked) > MAX_MODELS else ""
    return field("models", [f"requests, mean / p99 ttft in ms: {', '.join(parts)}{more}"])


def _jobs(jobs: dict | None) -> list[Line]:
    """How long conversations and agents take as a whole."""
    if jobs is None:
        return []
    times = ", ".join(f"{name} {number(jobs[f'{name}_s'])}" for name in ("mean", "median", "p99"))
    return field("jobs", [f"{jobs['completed']} of {jobs['sessions']} sessions; completion in s: {times}"])


def _tenants(tenants: dict | None) -> list[Line]:
    """The tenants' speeds, and how fair they are."""
    if tenants is None:
        return []
    parts = [
        f"{name} {number(row['mean_ttft_ms'])} / {number(row['p99_ttft_ms'])}"
        + (f" ({row['good_share']:.1%} within its limits)" if row.get("good_share") is not None else "")
        for name, row in tenants["by_name"].items()
    ]
    jain = number(tenants["jain_index"])
    return field("tenants", [f"mean / p99 ttft in ms: {', '.join(parts)}; Jain's index of their tokens/s {jain}"])


def _memory(memory: dict, engine: dict) -> list[Line]:
    parts = [
        f"{name} {memory[key] / GIB:.2f}"
        for name, key in (
            ("weights", "weights_bytes"),
            ("adapters", "adapter_bytes"),
            ("activations", "activation_bytes"),
            ("graphs", "cuda_graph_bytes"),
            ("other", "overhead_bytes"),
            ("KV", "kv_bytes"),
        )
        if memory[key]
    ]
    share = "" if engine["kv_cache_memory_bytes"] else f" x {engine['gpu_memory_utilization']:g}"
    total = f"{memory['total_bytes'] / GIB:.1f} GiB{share}"
    blocks = (
        f"{memory['num_gpu_blocks']:,} KV blocks of {memory['block_size']} tokens x"
        f" {memory['kv_bytes_per_token']:,.0f} B: {number(memory['max_concurrency'])} sequences of"
        f" {engine['max_model_len']:,} tokens"
    )
    return field("memory", [f"{total}: {', '.join(parts)}", blocks])


def wrapped(text: str, room: int) -> list[str]:
    """The text in lines; only a word that is longer than a line is cut."""
    return textwrap.wrap(text, room, break_on_hyphens=False) or [""]


def field(label: str, texts: list[str]) -> list[Line]:
    """Texts behind a label, wrapped and indented; paths stay whole."""
    lines = []
    for text in texts:
        lines += textwrap.wrap(text, width() - LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    return [("", f"{label if i == 0 else '':{LABEL}}{line}") for i, line in enumerate(lines)]


def number(value: float | None) -> str:
    """Four digits that matter, thousands apart."""
    return "-" if value is None else plain(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
