"""What a benchmark client measured on a live server, whichever client: vLLM's metric names, seconds per request."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.config.units import short
from infersim.metrics.latency import PERCENTILES
from infersim.workload.requests import Requests
from infersim.workload.table import read_text

from .clients import aiperf_requests, aiperf_summary, csv_requests, guidellm_results, vllm_results

KNOWN = (
    "vllm bench serve or sglang.bench_serving JSON, aiperf profile_export.jsonl or profile_export_aiperf.json, guidellm"
    " JSON, or CSV with a row per request"
)


@dataclass(frozen=True)
class Measured:
    """One benchmark run. Failed requests are left out and counted.

    With `requests` there is a row per request in order of arrival; without, only what the client summed up.
    """

    where: str
    client: str
    summary: dict[str, float]
    """what the client itself reports, under vLLM's names: {mean,median,p90,p95,p99}_{ttft,tpot,itl,e2el}_ms, rates"""
    requests: Requests | None = None
    ttft: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """f8[n], s"""
    e2el: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """f8[n], s, from sending to the last token"""
    gaps: tuple[np.ndarray, ...] | None = None
    """each request's gaps between tokens, s, where the client kept them"""
    request_rate: float | None = None
    """what the client was asked for, 1/s; inf: all at once"""
    max_concurrency: int | None = None
    model: str | None = None
    """as the client called it"""
    mean_input: float | None = None
    mean_output: float | None = None
    """tokens of prompts and answers, where the client summed them up"""
    accepted_share: float | None = None
    """of the output tokens: those that were accepted drafts"""
    num_requests: int = 0
    failed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def tpot(self) -> np.ndarray:
        """f8[n], s per token after the first; NaN for requests of one token."""
        outputs = self.requests.output_tokens if self.requests is not None else np.zeros(0)
        return (self.e2el - self.ttft) / np.where(outputs > 1, outputs - 1, np.nan)

    def metrics(self, rows: slice = slice(None)) -> dict[str, float]:
        """vLLM's statistics in ms of the requests of these rows, or what the client reported."""
        if self.requests is None:
            return self.summary
        samples = {"ttft": self.ttft[rows], "tpot": self.tpot[rows], "e2el": self.e2el[rows]}
        if self.gaps is not None:
            samples["itl"] = np.concatenate([np.zeros(0), *self.gaps[rows]])
        return statistics(samples)


def statistics(samples: dict[str, np.ndarray]) -> dict[str, float]:
    """{mean,median,p90,p95,p99}_{name}_ms of samples in s; NaN among them are left out, as is what has none."""
    found = {}
    for name, values in samples.items():
        values = values[~np.isnan(values)]
        if len(values):
            found[f"mean_{name}_ms"] = float(values.mean()) * 1e3
            for word, value in zip(PERCENTILES, np.percentile(values, list(PERCENTILES.values())), strict=True):
                found[f"{word}_{name}_ms"] = float(value) * 1e3
    return found


def read_results(names: list[str]) -> list[Measured]:
    """Every run in these files. InputError, all problems at once, for what is no benchmark result.

    FILE.csv#NAME is the run NAME of a CSV whose column `config` tells several apart.
    """
    found: list[Measured] = []
    problems: list[str] = []
    for name in names:
        try:
            found += _read(name)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return found


def _read(name: str) -> list[Measured]:
    path, _, run = name.partition("#")
    text = read_text(Path("/dev/stdin" if path == "-" else path), "stdin" if path == "-" else path)
    if not text.lstrip().startswith(("{", "[")):
        rows = [csv_requests(text, path, run)]
    elif (documents := _documents(text, path)) and all("metadata" in one and "metrics" in one for one in documents):
        rows = [aiperf_requests(documents, path)]
    else:
        rows = [row for one in documents for row in _summaries(one, path)]
    return [_measured(row, name) for row in rows]


def _documents(text: str, where: str) -> list[dict]:
    """The JSON objects of a file that is one object, a list of them, or one per line (vLLM's --append-result)."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        try:
            whole = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {short(str(error))}; must be {KNOWN}") from None
    documents = whole if isinstance(whole, list) else [whole]
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise InputError(f"{where}: must be {KNOWN}")
    return documents


def _summaries(document: dict, where: str) -> list[dict[str, Any]]:
    if "benchmarks" in document:
        return guidellm_results(document, where)
    if "time_to_first_token" in document or "request_latency" in document:
        return [aiperf_summary(document, where)]
    if "mean_ttft_ms" in document or "ttfts" in document:
        return [vllm_results(document, where)]
    raise InputError(f"{where}: holds no latencies that infersim knows (keys: {_some(document)}); must be {KNOWN}")


def _some(document: dict) -> str:
    return ", ".join(str(key)[:30] for key in list(document)[:8])


def _measured(row: dict[str, Any], where: str) -> Measured:
    """Checks what a client's reader found and puts requests in order of arrival."""
    columns = row.pop("columns", None)
    measured = Measured(where=where, **row)
    if columns is None:
        if not measured.summary:
            raise InputError(f"{where}: holds no latencies; must be {KNOWN}")
        if wrong := [name for name, value in measured.summary.items() if not 0 <= value < math.inf]:
            raise InputError(f"{where}: {wrong[0]} must be a number >= 0 (got {measured.summary[wrong[0]]:g})")
        return measured
    arrival, prompt, output, ttft, e2el = (
        np.asarray(columns[name], "f8") for name in ("arrival", "prompt_tokens", "output_tokens", "ttft", "e2el")
    )
    good = np.isfinite(arrival) & np.isfinite(ttft) & np.isfinite(e2el) & (output >= 1) & (prompt >= 1)
    wrong = good & ((ttft <= 0) | (e2el < ttft))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{where}: request {first}: its first token comes {ttft[first]:.4g} s and its last {e2el[first]:.4g} s"
            " after it was sent; must be sent < first token <= last token"
        )
    if not good.any():
        raise InputError(f"{where}: no request succeeded; nothing to compare with")
    order = np.flatnonzero(good)[np.argsort(arrival[good], kind="stable")]
    requests = Requests(
        arrival[order] - arrival[order[0]],
        prompt[order].astype(np.int32),
        output[order].astype(np.int32),
        np.arange(len(order)),
    )
    gaps = columns.get("gaps")
    failed = measured.failed or int((~good).sum())
    return replace(
        measured,
        requests=requests,
        ttft=ttft[order],
        e2el=e2el[order],
        gaps=tuple(np.asarray(gaps[i], "f8") for i in order) if gaps is not None else None,
        num_requests=len(order),
        failed=failed,
    )
