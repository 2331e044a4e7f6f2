"""The HTML report: self-contained, readable without eyes, small, and alive in a real browser."""

import html.parser
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.scenario import load_scenario
from infersim.explain.roofline import roofline
from infersim.explain.summary import summarize
from infersim.metrics.timeline import timeline
from infersim.planning.briefing import brief
from infersim.planning.outlook import load_curve, what_if
from infersim.report.html import render_page
from infersim.report.sections import run_page
from infersim.report.svg import Mark, Series, axis, bar, chart, short
from infersim.run import run

FEW = ["--set", "workload.num_requests=300"]


PLAN = {
    "model": "Llama-3.1-8B",
    "workload": {"request_rate": 20, "num_requests": 300, "input_tokens": 500, "output_tokens": {"uniform": [50, 150]}},
    "slo": {"p99_ttft_ms": 500, "p99_tpot_ms": 40},
    "max_gpus": 2,
    "candidates": {"hardware": ["l40s", "a100-sxm-80gb", "h100-sxm"]},
}  # fmt: skip
VARIANTS = ["--set", "workload.num_requests=300", "--set", "workload.num_requests=300,precision.kv_cache=fp8"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Verb -> the path of its report: a run with an SLO and replications, a plan, a comparison of three."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    commands = {
        "run": ["run", "llama-70b-4xh100", *FEW, "--set", "simulation.replications=3"],
        "plan": ["plan", str(folder / "plan.yaml")],
        "compare": ["compare", "llama-8b-h100", *VARIANTS],
    }
    found = {}
    for verb, command in commands.items():
        found[verb] = folder / f"{verb}.html"
        outcome = CliRunner().invoke(app, [*command, "--report", str(found[verb])])
        assert outcome.exit_code == 0, outcome.output
        assert f"{found[verb]}\n" in outcome.output
    return found


class Outline(html.parser.HTMLParser):
    """Counts what is there, and what lies open at the end."""

    VOID = ("meta", "br", "link", "img", "input", "hr", "line", "path", "rect")

    def __init__(self):
        super().__init__()
        self.count, self.open, self.attributes = {}, [], []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


SECTIONS = {
    "run": ("Answer", "SLO attainment", "Latency", "Load", "Memory", "Over time", "Where the time goes", "What if",
            "What it rests on", "Inputs and commands"),
    "plan": ("Answer", "Best and runner-up", "Candidates", "Latency", "Load", "Memory", "Over time",
             "Where the time goes", "What if", "What it rests on", "Search", "Inputs and commands"),
    "compare": ("Answer", "Why B differs", "Why C differs", "Metrics side by side", "Latency", "Load", "Memory",
                "Where the time goes", "What if", "What it rests on", "Inputs and commands"),
}  # fmt: skip


@pytest.mark.parametrize("verb", SECTIONS)
def test_the_page_is_whole_and_needs_nothing(pages, verb):
    """Well formed; no address of anything else, no loaded file; every section is there."""
    text = pages[verb].read_text()
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "url(" not in text
    assert "@import" not in text
    assert tuple(re.findall(r"<h2[^>]*>(.*?)</h2>", text)) == SECTIONS[verb]
    for words in ("vllm serve", "vllm bench serve", f"infersim {verb} ", ">knee", "prefers-color-scheme: dark",
                  "@media print", 'lang="en"'):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("verb", SECTIONS)
def test_every_chart_has_words(pages, verb):
    """Each picture has a role, a title and a description; each table a caption and heads with a scope."""
    text = pages[verb].read_text()
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 12
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for picture in charts:
        named = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', picture)
        assert re.search(rf'<title id="{named[1]}">\S', picture)
        assert re.search(rf'<desc id="{named[2]}">\S', picture)
        assert "nan" not in picture
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    assert all("<caption>" in table and 'scope="col"' in table for table in tables)


def test_a_plan_that_nothing_can_serve_has_a_report(tmp_path):
    """By a floor, and by simulation: what forbids it, and what was tried."""
    for limit, tried in ((1, False), (20, True)):
        path, page = tmp_path / "plan.yaml", tmp_path / "page.html"
        path.write_text(yaml.safe_dump(PLAN | {"slo": {"p99_ttft_ms": limit}, "max_gpus": 1}))
        assert CliRunner().invoke(app, ["plan", str(path), "--report", str(page)]).exit_code == 1
        text = page.read_text()
        assert "No deployment holds the SLO" in text
        assert (">Candidates</h2>" in text) == tried


def test_what_the_user_wrote_is_text(tmp_path):
    """A name from the scenario is shown, never run."""
    scenario = load_scenario("llama-8b-h100", ["workload.num_requests=20"])
    hardware = scenario.hardware.model_copy(update={"name": "<script>alert(1)</script>"})
    results = run(scenario.model_copy(update={"hardware": hardware}))
    text = render_page(run_page(brief(results, summarize(results)), results[0], ["infersim", "run", "<b>"]))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


@pytest.mark.parametrize(
    "settings",
    [
        ["workload.request_rate=inf", "workload.num_requests=1"],
        ["workload.output_tokens=1", "workload.num_requests=50"],
        ["workload.request_rate=500", "workload.num_requests=400"],
        ["workload.max_concurrency=4", "workload.num_requests=30"],
        ["cluster.replicas=2", "workload.num_requests=100"],
    ],
)
def test_odd_runs_have_a_report(settings):
    """One request, one token, saturation, a closed loop, two replicas."""
    results = run(load_scenario("llama-8b-h100", settings))
    text = render_page(run_page(brief(results, summarize(results)), results[0], ["infersim"]))
    assert "</html>" in text


@pytest.mark.slow
def test_a_large_run_is_a_small_page(tmp_path):
    """100,000 requests: below 2 MB."""
    path = tmp_path / "large.html"
    large = ["--set", "workload.num_requests=100000", "--report", str(path)]
    assert CliRunner().invoke(app, ["run", "llama-8b-h100", *large]).exit_code == 0
    assert path.stat().st_size < 2e6


CHECK = """<script>
const errors = []; window.addEventListener("error", (e) => errors.push(e.message));
window.addEventListener("load", () => setTimeout(() => {
  const boxes = [...document.querySelectorAll("svg")].map((s) => s.getBoundingClientRect());
  const sizes = boxes.map((r) => [r.width, r.height]);
  const outside = [...document.querySelectorAll("svg text")].filter((t) => {
    const text = t.getBoundingClientRect(), box = t.ownerSVGElement.getBoundingClientRect();
    return text.left < box.left - 1 || text.right > box.right + 1 || text.bottom > box.bottom + 1;
  }).map((t) => t.textContent);
  const table = [...document.querySelectorAll("table")].find((t) => t.caption.textContent.startsWith("Loads"));
  const column = () => [...table.tBodies[0].rows].map((r) => Number(r.cells[0].dataset.v));
  const button = table.querySelector("th button");
  button.focus(); const focused = document.activeElement === button && button.tabIndex === 0;
  const before = column(); button.click(); const up = column(); button.click(); const down = column();
  const sorted = button.parentElement.getAttribute("aria-sort");
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.body.innerHTML = "";
  document.body.dataset.found = JSON.stringify({errors, sizes, before, up, down, sorted, wide, focused, outside});
}, 0));
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (Debian: apt install chromium)")
@pytest.mark.parametrize("verb", SECTIONS)
@pytest.mark.parametrize("width", [500, 1200])
def test_in_a_real_browser(pages, tmp_path, width, verb):
    """No errors, plots have a size and hold their words, tables sort both ways, nothing is wider than the screen."""
    checked = tmp_path / "checked.html"
    checked.write_text(pages[verb].read_text().replace("<head>", "<head>" + CHECK))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--enable-logging=stderr",
               "--virtual-time-budget=5000", "--dump-dom"]  # fmt: skip
    outcome = subprocess.run(["chromium", *options, checked.as_uri()], capture_output=True, text=True, timeout=120)
    assert ":CONSOLE" not in outcome.stderr
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', outcome.stdout)[1]))
    assert found["errors"] == []
    assert len(found["sizes"]) >= 12
    assert all(w > 200 and h > 50 for w, h in found["sizes"])
    assert found["up"] == sorted(found["before"])
    assert found["down"] == sorted(found["before"], reverse=True)
    assert found["sorted"] == "descending"
    assert found["focused"]
    assert found["outside"] == []
    assert not found["wide"]


@pytest.mark.parametrize("name", ["llama-8b-rtx-4090", "llama-70b-4xh100"])
def test_the_timeline_is_the_engine_s(name):
    """Integrals over the timeline are the engine's own: requests running and waiting, KV blocks held, tokens made."""
    result = run(load_scenario(name, ["workload.num_requests=1000"]))[0]
    lines = timeline(result)
    length = result.end_time - result.requests["arrival"].min()
    assert lines["running"].mean() * length == pytest.approx(result.running_time, rel=0.03)
    in_engine = (lines["waiting"] + lines["running"]).mean() * length
    assert in_engine == pytest.approx(result.outstanding_time, rel=0.01)
    assert lines["output_tokens"].mean() * length == pytest.approx(result.requests["num_output_tokens"].sum(), rel=1e-6)
    assert lines["completions"].mean() * length == pytest.approx(1000)
    blocks = result.block_time / (result.memory.num_gpu_blocks - 1) / length
    assert lines["kv_usage"].mean() == pytest.approx(blocks, rel=0.05)


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_at_work_are_those_with_a_request(replicas):
    """What counting them at many moments gives."""
    settings = ["workload.num_requests=200", "workload.request_rate=1", f"cluster.replicas={replicas}"]
    result = run(load_scenario("llama-8b-h100", settings))[0]
    r, lines = result.requests, timeline(result)
    half = (lines["time"][1] - lines["time"][0]) / 2
    moments = np.linspace(lines["time"][0] - half, lines["time"][-1] + half, 20_001)
    active = (r["scheduled"][:, None] <= moments) & (moments < r["last_token"][:, None])
    count = sum(active[r["replica"] == k].any(axis=0) for k in range(replicas))
    assert lines["replicas"].mean() == pytest.approx(count.mean(), rel=0.01)
    assert 0 < lines["replicas"].mean() < lines["replicas"].max() <= replicas + 1e-9


def test_the_curve_rises_to_a_knee():
    """Throughput and latency grow with the load; the curve ends in saturation; the knee is before it."""
    curve = load_curve(load_scenario("llama-8b-h100"))
    rates = [p["request_rate"] for p in curve["points"]]
    assert rates == sorted(rates)
    stable = [p for p in curve["points"] if p["state"] == "stable"]
    e2el = [p["metrics"]["mean_e2el_ms"] for p in stable]
    assert all(b > 0.95 * a for a, b in itertools.pairwise(e2el))
    assert curve["points"][curve["knee"]]["state"] == "stable"


def test_what_ifs_do_what_they_say():
    """More of anything is not slower, and each row is another system."""
    rows = {row["change"]: row["metrics"] for row in what_if(load_scenario("llama-8b-h100", FEW[1:]))}
    base = rows.pop("as it is")
    assert {"+10 % memory bandwidth", "+10 % FLOP/s", "KV cache in fp8", "one more replica"} <= rows.keys()
    assert "one more draft token" not in rows
    for change in ("+10 % memory bandwidth", "+10 % FLOP/s", "KV cache in fp8", "one more replica"):
        assert rows[change]["mean_e2el_ms"] < base["mean_e2el_ms"], change


def test_operators_lie_below_the_roof():
    """No operator is above the device's limits, and both phases are there."""
    roof = roofline(run(load_scenario("llama-8b-h100", FEW[1:]))[0])
    assert {p["phase"] for p in roof["points"]} == {"decode", "prefill"}
    for p in roof["points"]:
        assert p["flops_per_s"] <= min(p["intensity"] * roof["bandwidth"], max(roof["peaks"].values())) * (1 + 1e-9)
    for phase in ("decode", "prefill"):
        assert 0.5 < sum(p["share"] for p in roof["points"] if p["phase"] == phase) <= 1


def test_figures_are_written(tmp_path):
    """PNG and SVG of each figure, with content."""
    outcome = CliRunner().invoke(app, ["run", "llama-8b-h100", *FEW, "--plots", str(tmp_path / "p")])
    assert outcome.exit_code == 0, outcome.output
    files = sorted((tmp_path / "p").iterdir())
    assert len(files) == 14
    assert all(file.stat().st_size > 5000 for file in files)


@pytest.mark.parametrize("where", ["/", ".", "nowhere/x.html", "file/x.html"])
def test_places_that_cannot_be_written(tmp_path, monkeypatch, where):
    """One line before anything is simulated, for the page and for the trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for option in ("--report", "--chrome-trace"):
        outcome = CliRunner().invoke(app, ["run", "llama-8b-h100", option, where])
        assert outcome.exit_code == 2
        assert outcome.output.startswith(option)
        assert "must be" in outcome.output


def test_axes_have_round_ticks():
    """Linear axes begin at 0; ticks are 1, 2 or 5 times a power of ten, inside."""
    for values, log in (([3, 97], False), ([0.2, 0.9], False), ([1, 90_000], True), ([5, 5], True), ([], False)):
        made = axis("x", values, log)
        ticks = made.ticks()
        assert 1 <= len(ticks) <= 12
        assert all(made.low <= t * (1 + 1e-9) and t <= made.high * (1 + 1e-9) for t in ticks)
        for tick in filter(None, ticks):
            digit = float(f"{tick:e}".split("e")[0])
            assert any(np.isclose(digit, n) for n in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)), tick
    assert [short(x) for x in (0, 0.25, 12, 1500, 9.89e14)] == ["0", "0.25", "12", "1.5k", "989T"]


def test_charts_escape_and_survive_nothing():
    """A title is text; series without points draw nothing."""
    picture = chart("a < b", "c & d", [Series("x", [], [])], "<", "&", marks=[Mark(1, "<i>")])
    assert "a &lt; b" in picture
    assert "<i>" not in picture
    assert "<svg" in bar("t", "d", [], "s")


def test_a_run_without_an_answer_lasts_until_the_last_arrival():
    settings = ["cluster.failures=[{kind: crash, at: 0}]", "workload.num_requests=20"]
    result = run(load_scenario("llama-8b-h100", settings))[0]
    lines, r = timeline(result), result.requests
    assert lines["time"][-1] == pytest.approx(r["arrival"].max(), rel=0.01)
    assert lines["arrivals"].mean() * np.ptp(r["arrival"]) == pytest.approx(20)
