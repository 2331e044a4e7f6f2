"""The whole loop with a real server: calibrate device and server, predict runs that were not used, print the errors.

    python tests/live/live.py cpu FOLDER .conformance/0.32      vLLM on one core, its client on another
    python tests/live/live.py cuda FOLDER                       this Python's own vLLM, on a GPU

Linux. Everything is done by the commands that a user has. Exit status 1 if an error is above its bound by more than
the same run differs from itself, or a number that must be equal is not.
"""

import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from cpu_time import in_cpu_time
from server import Server, Vllm
from setups import CLIENT, NGRAM, SETUPS

from infersim.config.resources import names

BOUNDS = {"mean_tpot_ms": 0.07, "mean_e2el_ms": 0.07, "mean_ttft_ms": 0.15, "request_throughput": 0.10}
METRICS = ("mean_tpot_ms", "mean_ttft_ms", "mean_e2el_ms")
QUIET, TRIES = 0.05, 2
"""share of the server's core that others may take, and how often an open loop is tried until it is so"""


@dataclass
class Run:
    """A benchmark, what it measures, and how often it was repeated."""

    name: str
    words: list[str]
    overrides: list[str] = field(default_factory=list)
    metrics: tuple[str, ...] = METRICS
    files: list[Path] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    """tokens of prompts that were found in the cache"""
    others: list[float] = field(default_factory=list)
    """share of the server's cores that other processes took"""


def preset_of(version: str) -> str:
    """The newest preset that is not newer than the release."""
    known = [tuple(map(int, name.removeprefix("vllm-").split("."))) for name in names("engine_presets")
             if name.startswith("vllm-0.")]  # fmt: skip
    newest = max(each for each in known if each <= tuple(map(int, version.split(".")[:2])))
    return "vllm-" + ".".join(map(str, newest))


class Live:
    """The folder of one pass, its cores, and the table."""

    def __init__(self, device: str, folder: Path, release: Path | None):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemExit("needs two cores: one for the server, one for its client")
        self.device, self.setup, self.folder = device, SETUPS[device], folder.resolve()
        self.cores = {cores[0]} if device == "cpu" else set(cores[:-1])
        self.client_cores = {cores[-1]}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.setup.write(self.folder / "tiny")
        self.vllm = Vllm(release, self.folder)
        self.preset = preset_of(release.name if release else importlib.metadata.version("vllm"))
        self.rows: list[list[str]] = []
        self.failed = False

    def infersim(self, *words: str, **more: str) -> str:
        """What a command prints; its errors are shown as they come."""
        done = subprocess.run(
            [sys.executable, "-m", "infersim", *words], cwd=self.folder, env=os.environ | more, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"infersim {' '.join(words)}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    def calibrate_device(self) -> None:
        """The device's profile, once for a folder."""
        if (self.folder / "device.yaml").exists():
            return
        print("calibrate device: some minutes", flush=True)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        threads = {"OMP_NUM_THREADS": "1"} if self.device == "cpu" else {}
        print(self.infersim("calibrate", "device", "--device", self.device, "--out", "device.yaml", **threads))
        os.sched_setaffinity(0, before)

    def scenario(self, name: str, words: list[str]) -> None:
        """The server's command line as a scenario, read by `show deployment`."""
        line = " ".join(f"'{word}'" if "{" in word else word for word in ["vllm", "serve", *words])
        (self.folder / f"{name}.sh").write_text(f"# simulated: {self.preset}\n{line}\n", encoding="utf-8")
        text = self.infersim("show", "deployment", f"{name}.sh", "--hardware", "device.yaml")
        load = "workload: {request_rate: 1, num_requests: 10, input_tokens: 100, output_tokens: 10}"
        (self.folder / f"{name}.yaml").write_text(f"{text}\n{load}\n", encoding="utf-8")

    def calibrate_server(self, scenario: str, *runs: Run) -> dict:
        """The overheads, which the scenario then has."""
        files = [file.name for run in runs for file in run.files]
        words = ["calibrate", "server", *files, "--scenario", scenario, "--out", "host.yaml", "--force"]
        words += ["--fit", "step", "--fit", "sequence"]  # two closed loops leave the time per request open
        print(self.infersim(*words), flush=True)
        engine = yaml.safe_load((self.folder / "host.yaml").read_text(encoding="utf-8"))["engine"]
        self.change(scenario, {"engine": engine})
        return engine

    def change(self, scenario: str, sections: dict[str, dict]) -> None:
        """Keys of a scenario file, set."""
        path = self.folder / scenario
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, keys in sections.items():
            document[name] |= keys
        path.write_text(yaml.safe_dump(document), encoding="utf-8")

    def lengths(self, prompts: int | None = None, inputs: float = 1, outputs: float = 1) -> list[str]:
        """Of random prompts and answers, as multiples of the setup's."""
        words = f"--random-input-len {inputs * self.setup.inputs:.0f} --random-output-len"
        return f"{words} {outputs * self.setup.outputs:.0f} --num-prompts {prompts or self.setup.prompts}".split()

    def measure(self, server: Server, run: Run, seed: int) -> None:
        """One benchmark of the running server, an open loop's quietest of some tries. Equal seeds, equal prompts."""
        file = self.folder / f"{run.name}-{len(run.files)}.json"
        found: list[tuple[float, int, str]] = []
        tries = 1 if "--max-concurrency" in run.words else TRIES
        while not found or (min(found)[0] > QUIET and len(found) < tries):
            server.forget()
            file.unlink(missing_ok=True)
            cached, busy = server.cached_tokens(), server.busy()
            words = [*CLIENT, *run.words, "--seed", str(seed), "--result-dir", str(self.folder), "--result-filename"]
            with server.watched() as seen:
                if self.vllm.run([*words, file.name], self.client_cores) or not file.exists():
                    raise SystemExit(f"{run.name}: the client failed; see {self.folder / 'bench.log'}")
            own, others = (after - before for after, before in zip(server.busy(), busy, strict=True))
            document = json.loads(file.read_text(encoding="utf-8"))
            share = others / (own + others) if self.device == "cpu" else 0.0
            if self.device == "cpu" and document["max_concurrency"]:
                document = in_cpu_time(document, *np.transpose(seen))
            found.append((share, server.cached_tokens() - cached, json.dumps(document)))
            print(f"{file.name}: others took {share:.0%} of the server's core", flush=True)
        others, cached, text = min(found)
        file.write_text(text, encoding="utf-8")
        run.files.append(file)
        run.cached.append(cached)
        run.others.append(others)

    def judge(self, run: Run, scenario: str) -> None:
        """Rows of the table: the mean error over the repetitions, and how far these differ."""
        words = ["validate", *(file.name for file in run.files), "--scenario", scenario, "--json"]
        documents = json.loads(self.infersim(*words, *(f"--set={override}" for override in run.overrides)))["runs"]
        for metric in run.metrics:
            found = [document["errors"][metric] for document in documents]
            measured, predicted = (np.array([one[key] for one in found]) for key in ("measured", "predicted"))
            self.row(run, metric, measured, predicted)
        for document in documents:
            said = "; ".join([document["points_to"], *document["warnings"], *document["notes"]])
            print(f"{document['where']}: {said}", flush=True)

    def row(self, run: Run, metric: str, measured: np.ndarray, predicted: np.ndarray) -> None:
        """Of a metric, f8[repeats]."""
        error, spread = float(np.mean(predicted / measured - 1)), float(np.ptp(measured) / measured.mean())
        bound = BOUNDS.get(metric, BOUNDS["request_throughput"])
        self.failed |= abs(error) > bound + spread
        self.rows.append([
            run.name, metric.removesuffix("_ms"), f"{measured.mean():.4g}", f"{predicted.mean():.4g}",
            f"{error:+.1%}", f"{bound:.0%}", "met" if abs(error) <= bound else "missed", f"{spread:.1%}",
            f"{np.mean(run.others):.0%}",
        ])  # fmt: skip

    def exact(self, what: str, measured: int, predicted: int) -> None:
        """A row of a number that must be equal."""
        self.failed |= measured != predicted
        said = "met" if measured == predicted else "missed"
        self.rows.append([what, "", str(measured), str(predicted), "", "exact", said, "", ""])


def plain(live: Live) -> tuple[dict, float]:
    """Calibration, saturation, loads below it, shared prefixes: the fitted overheads, and the rate at saturation."""
    setup = live.setup
    live.scenario("served", [*setup.serve])
    single = Run("one-at-a-time", [*live.lengths(40), "--max-concurrency", "1"])
    several = Run("several-at-a-time", [*live.lengths(80), "--max-concurrency", str(setup.several)])
    overload = Run(
        "overload", [*live.lengths(2 * setup.prompts), "--max-concurrency", "256"], [], ("request_throughput",)
    )
    with Server(live.vllm, [*setup.serve], live.cores) as server:
        blocks = json.loads(live.infersim("run", "served.yaml", "--json"))["memory"]["num_gpu_blocks"]
        live.exact("KV blocks", server.blocks(), blocks)
        warm = Run("warm-up", [*live.lengths(20), "--max-concurrency", "4"])
        live.measure(server, warm, 0)
        live.measure(server, overload, 1)
        rate = json.loads(overload.files[0].read_text(encoding="utf-8"))["request_throughput"]
        runs = [
            Run(f"{share:.0%}-load", [*live.lengths(), "--request-rate", f"{share * rate:.3f}"])
            for share in (0.3, 0.5, 0.65)
        ]
        runs.append(Run("half-as-many", [*live.lengths(None, 0.6, 1.6), "--max-concurrency", str(setup.several // 2)]))
        prefix = ["--random-prefix-len", str(setup.prefix), "--request-rate", f"{0.4 * rate:.3f}"]
        override = f"workload.prefixes={{count: 1, tokens: {setup.prefix}}}"
        shared = Run("shared-prefix", [*live.lengths(), *prefix], [override])
        for repeat in range(setup.repeats):  # in turn, those that are fitted too: a machine's speed drifts
            for seed, run in enumerate((single, several, *runs, shared), 1):
                live.measure(server, run, seed)
            if repeat:
                live.measure(server, overload, 1)
    engine = live.calibrate_server("served.yaml", single, several)
    for run in (*runs, shared, overload):
        live.judge(run, "served.yaml")
    live.exact("cached tokens", shared.cached[-1], cached_tokens(live, shared, "served.yaml"))
    return engine, rate


def cached_tokens(live: Live, run: Run, scenario: str) -> int:
    """Of the prompts of a run, as predicted."""
    from infersim.calibration.replay import predict
    from infersim.calibration.results import read_results
    from infersim.config.scenario import load_scenario

    found = predict(load_scenario(str(live.folder / scenario), run.overrides), read_results([str(run.files[-1])])[0])
    return int(found.result.requests["num_cached_tokens"].sum())


def speculative(live: Live, engine: dict, rate: float) -> None:
    """With drafts found in the text: their acceptance is read off one run, and others are predicted."""
    words = [*live.setup.serve, "--speculative-config", json.dumps(NGRAM)]
    live.scenario("drafting", words)
    lengths = live.lengths(40, 1, 1.6)
    known = Run("drafts-known", [*lengths, "--max-concurrency", "2"])
    runs = [
        Run("drafts-two-at-a-time", [*lengths, "--max-concurrency", "2"]),
        Run("drafts-40%-load", [*lengths, "--request-rate", f"{rate * 0.4:.3f}"]),
    ]
    with Server(live.vllm, words, live.cores) as server:
        live.measure(server, Run("warm-up", [*live.lengths(10), "--max-concurrency", "2"]), 0)
        live.measure(server, known, 1)
        for _ in range(live.setup.repeats):
            for seed, run in enumerate(runs, 2):
                live.measure(server, run, seed)
    live.change("drafting.yaml", {"engine": engine, "speculation": {"acceptance": acceptance(known.files[0])}})
    for run in runs:
        live.judge(run, "drafting.yaml")


def acceptance(file: Path) -> dict:
    """By position, from what `vllm bench serve` says of its server; a step without drafts is one that accepts none."""
    found = json.loads(file.read_text(encoding="utf-8"))
    steps = found["total_output_tokens"] - found["completed"] - found["spec_decode_accepted_tokens"]
    reached = [1.0, *found["spec_decode_per_position_acceptance_rates"]]
    conditional = [b / a if a else 0.0 for a, b in itertools.pairwise(reached)]
    conditional[0] *= min(1.0, found["spec_decode_num_drafts"] / steps)
    return {"conditional": [round(each, 4) for each in conditional]}


def main(device: str, folder: str, release: str | None = None) -> int:
    """0: every error is within its bound, or as near to it as the run is to itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with it
    live = Live(device, Path(folder), Path(release) if release else None)
    live.calibrate_device()
    speculative(live, *plain(live))
    head = ["run", "metric", "measured", "predicted", "error", "bound", "", "spread", "others"]
    widths = [max(len(row[i]) for row in (head, *live.rows)) for i in range(len(head))]
    for row in (head, *live.rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return int(live.failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
