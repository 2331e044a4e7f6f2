"""The studio: every input is a key of the scenario, every answer a run of the YAML, and no other page is heard."""

import http.client
import itertools
import json
import random
import subprocess
import sys

import pytest
import yaml
from browser import CHROMIUM, browser
from hypothesis import given
from hypothesis import strategies as st

from infersim.config.errors import InputError
from infersim.config.scenario import load_scenario
from infersim.explain.summary import summarize
from infersim.metrics.latency import measure
from infersim.planning.capacity import capacity
from infersim.planning.steps import steps_of
from infersim.report.studio import memory_log
from infersim.run import run
from infersim.serve.studio.control import Form
from infersim.serve.studio.controls import changes_of, controls, text_alone
from infersim.serve.studio.edit import Remove, read, set_key
from infersim.serve.studio.work import first_look, measured, plan, refine, scenario_of

BASE = """# traffic of a chat
model: Llama-3.1-8B
hardware: h100-sxm   # one of them
workload:
  request_rate: 10  # a second
  num_requests: 300
  input_tokens: {lognormal: {median: 1020, mean: 1155}}
  output_tokens: {lognormal: {median: 129, mean: 211, max: 1000}}
slo: {p99_ttft_ms: 300}
"""
SESSIONS = {"cluster": {"replicas": 3, "router": {"policy": "least-kv", "signal_age": "50 ms"}},
            "speculation": {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"rate": 0.7}},
            "workload": {"users": 20, "think_time": 2, "turns": 3, "num_requests": 200, "input_tokens": 300,
                         "output_tokens": {"uniform": [50, 100]}}}  # fmt: skip
POOLS = {"cluster": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "transfer": {"bandwidth": "50 GB/s"}}}


def texts():
    base = read(BASE)
    shared = base | {
        "workload": base["workload"] | {"prefixes": {"count": 3, "tokens": 200}},
        "precision": {"weights": "fp8"},
    }
    return [BASE, *(yaml.safe_dump(base | other) for other in (SESSIONS, POOLS, shared))]


KEYS = st.sampled_from(["slo.p99_ttft_ms", "slo.p99_tpot_ms", "engine.max_num_seqs", "workload.request_rate",
                        "workload.input_tokens", "workload.output_tokens.lognormal.mean", "precision.kv_cache",
                        "cluster.replicas", "cluster.router.policy"])  # fmt: skip
VALUES = st.one_of(st.integers(1, 10**6), st.floats(0.01, 1e6), st.text(min_size=1, max_size=20), st.booleans(),
                   st.just(Remove))  # fmt: skip


@given(st.lists(st.tuples(KEYS, VALUES), max_size=8))
def test_a_change_of_the_text_is_that_change_alone(changes):
    """After any changes the text holds what changing the mapping gives; comments above it stay while nothing that
    stands at their side goes."""
    text, data = BASE, read(BASE)
    for key, value in changes:
        try:
            text = set_key(text, key, value, None)
        except InputError:  # a part of the key is a plain value by now
            continue
        here, (*path, last) = data, key.split(".")
        for name in path:
            here = here.setdefault(name, {}) if value is not Remove else here.get(name, {})
        if value is Remove:
            here.pop(last, None)
            for depth in range(len(path), 0, -1):  # what has nothing left in it goes too
                inside = data
                for name in path[: depth - 1]:
                    inside = inside.get(name, {})
                if inside.get(path[depth - 1]) == {}:
                    del inside[path[depth - 1]]
        else:
            here[last] = value
        assert read(text) == data


def test_comments_stay():
    text = set_key(set_key(BASE, "workload.request_rate", 25, None), "engine.max_num_seqs", 64, None)
    assert "# traffic of a chat" in text
    assert "request_rate: 25  # a second" in text
    assert "# one of them" in text
    assert set_key(text, "engine.max_num_seqs", Remove, None) == set_key(BASE, "workload.request_rate", 25, None)


@pytest.mark.parametrize("text", texts(), ids=["plain", "sessions", "pools", "prefixes"])
def test_every_input_is_its_key(text):
    """Setting an input to the value that it shows changes nothing but that it is written now; to another value, its own
    key in the scenario; and every way of a choice between forms is a scenario that can be."""
    scenario = scenario_of(text, None)
    groups = controls(scenario, read(text))
    seen = 0
    for control in (control for _, group in groups for control in group):
        if isinstance(control, Form):
            for way in control.options:
                changed = text
                for key, value in changes_of(groups, control.key, way):
                    changed = set_key(changed, key, value, None)
                again = controls(scenario_of(changed, None), read(changed))
                shown = next(c for _, group in again for c in group if c.key == control.key)
                assert shown.value == way
            continue
        if control.value is None:
            continue
        ((key, value),) = changes_of(groups, control.key, control.value)
        same = scenario_of(set_key(text, key, value, None), None).resolved()
        expected = scenario.resolved()
        if not key.startswith("engine."):  # what the engine's default comes to is written out
            assert same == expected, key
        seen += 1
        if control.kind == "range" and control.high > control.value:
            other = round(control.value + (control.high - control.value) / 3) if control.whole else control.high
            ((key, value),) = changes_of(groups, control.key, other)
            changed = set_key(text, key, value, None)
            assert read(changed) != read(text)
            try:
                after = controls(scenario_of(changed, None), read(changed))
            except InputError:  # an input at its limit may not go with another one: the page says which
                continue
            assert next(c for _, g in after for c in g if c.key == key).value == pytest.approx(other)
    assert seen >= 15


@pytest.mark.parametrize("settings", [{}, {"engine.max_num_seqs": 8}, {"engine.async_scheduling": False},
                                      {"cluster.replicas": 2}])  # fmt: skip
def test_steps_of_a_second_are_those_of_the_run(settings):
    """Every token that a step computes is somebody's, prompts of all seconds add up to all prompts, and the replica
    holds no more blocks than at its peak."""
    text = BASE
    for key, value in settings.items():
        text = set_key(text, key, value, None)
    result = run(scenario_of(text, None))[0]
    found = steps_of(result, 0.0, result.end_time)
    row = result.replicas.rows[found["replica"]]
    steps = found["steps"]
    assert sum(step["tokens"] for step in steps) == row["num_scheduled_tokens"]
    assert all(s["tokens"] == sum(n for _, n, _ in s["prompts"]) + len(s["decodes"]) for s in steps)
    computed = {}
    for i, tokens, _ in (each for step in steps for each in step["prompts"]):
        computed[i] = computed.get(i, 0) + tokens
    mine = result.requests[result.requests["replica"] == found["replica"]]
    assert list(computed.values()) == (mine["prompt_tokens"] - mine["num_cached_tokens"]).tolist()
    assert max(step["blocks"] for step in steps) == row["peak_blocks"]
    assert all(a["end"] < b["end"] for a, b in itertools.pairwise(steps))


def test_what_no_input_shows_is_named():
    text = set_key(set_key(BASE, "simulation.warmup", 3, None), "workload.retries", 2, None)
    groups = controls(scenario_of(BASE, None), read(BASE))
    assert text_alone(read(BASE), groups) == []
    assert text_alone(read(text), groups) == ["workload.retries", "simulation.warmup"]


def test_the_first_answer_is_a_run_of_the_first_requests():
    """Common random numbers: the first requests of a long run, at any other setting too."""
    scenario = scenario_of(BASE, None)
    brief, result = first_look(scenario, 100)
    alone = run(scenario_of(set_key(BASE, "workload.num_requests", 100, None), None))[0]
    assert (result.requests == alone.requests).all()
    assert brief["answer"]["metrics"] == summarize([alone])["metrics"]


def heard(job, *arguments):
    found = []
    job(found.append, *arguments)
    return found


def test_the_whole_answer_is_the_run():
    """The numbers of the last head are those of `infersim run`; what surrounds them is there; pinned, both are."""
    faster = set_key(BASE, "precision.kv_cache", "fp8", None)
    messages = heard(refine, faster, None, BASE)
    head = [m["head"] for m in messages if "head" in m][-1]
    document = summarize(run(scenario_of(faster, None)))
    numbers = {number["key"]: number["value"] for number in head["numbers"]}
    for name in ("p99_ttft_ms", "p99_tpot_ms", "output_throughput"):
        assert numbers[name] == document["metrics"][name]
    assert numbers["largest_rate"] > 5
    pieces = {name for message in messages for name in message.get("parts", {})}
    assert pieces == {"latency", "memory", "spent", "lengths", "time", "requests", "assumed", "commands", "compare",
                      "load", "help", "steps"}  # fmt: skip
    assert all(number["other"].startswith("A ") for number in head["numbers"][:4])
    assert messages[-1]["done"]


def test_the_sentence_says_what_the_slo_says():
    for limit, word in ((10_000, "Holds"), (1, "Misses")):
        text = set_key(set_key(BASE, "slo.p99_ttft_ms", limit, None), "workload.num_requests", 2000, None)
        messages = heard(refine, text, None, None)
        heads = [m["head"] for m in messages if "head" in m]
        assert all(head["sentence"].startswith(word) for head in heads)
        assert heads[-1]["mood"] == ("good" if word == "Holds" else "bad")
    over = set_key(set_key(BASE, "workload.request_rate", 200, None), "workload.num_requests", 2000, None)
    assert heard(refine, over, None, None)[-1]["head"]["sentence"].startswith("Does not keep up")


def test_room_is_judged_against_what_measured_deployments_differ_by():
    """A limit between the prediction and the end of its interval is held, but not surely; a far one surely."""
    text = set_key(BASE, "workload.num_requests", 2000, None)
    found = summarize(run(scenario_of(text, None)))
    value, factor = found["metrics"]["p99_ttft_ms"], found["model_error"]["factors"]["ttft"][1]
    for limit, sure in ((round(value * (0.3 + 0.7 * factor)), False), (round(3 * value * factor), True)):
        head = [
            m["head"] for m in heard(refine, set_key(text, "slo.p99_ttft_ms", limit, None), None, None) if "head" in m
        ][-1]
        words = head["lines"][-1]["answer"]
        assert head["sentence"].startswith("Holds")
        assert f"{value * factor:.3g} ms" in words
        assert ("differ by" in head["sentence"], "may miss" in words) == (not sure, not sure)


def test_the_largest_rate_is_held_and_no_more():
    """A rate below it holds the limits, and one far above breaks them; a floor that forbids every number is told."""
    scenario = load_scenario("llama-8b-h100", ["workload.num_requests=2000", "slo.p99_ttft_ms=200"])
    found = capacity(scenario, lambda low, high: None)
    assert found["enough"] == {"replicas": 1, "gpus": 1}
    for factor, met in ((0.95, True), (1.6, False)):
        load = scenario.workload.model_copy(update={"request_rate": found["largest_rate"] * factor})
        assert summarize(run(scenario.model_copy(update={"workload": load})))["slo"]["met"] is met
    floor = load_scenario("llama-8b-h100", ["workload.num_requests=200", "slo.p99_tpot_ms=1"])
    assert "cannot be below" in capacity(floor, lambda low, high: None)["enough_note"]


def test_memory_is_told_as_vllm_tells_it():
    answer = summarize(run(scenario_of(BASE, None)))
    memory, engine = answer["memory"], answer["engine"]
    lines = memory_log(answer).splitlines()
    assert lines[1] == f"GPU KV cache size: {memory['num_gpu_blocks'] * memory['block_size']:,} tokens"
    tokens = memory["num_gpu_blocks"] * memory["block_size"]
    assert float(lines[2].split()[-1].rstrip("x")) == pytest.approx(tokens / engine["max_model_len"], abs=0.02)


def test_a_plan_from_the_page():
    asked = {"hardware": ["l40s", "h100-sxm"], "max_gpus": 2, "objective": "cost"}
    found = heard(plan, BASE, None, asked)[-1]["plan"]
    assert any(row["state"] == "met" for row in found["rows"])
    row = found["rows"][0]
    text = BASE
    for key, value in row["load"].items():
        text = set_key(text, key, value, None)
    scenario = scenario_of(text, None)
    assert scenario.hardware.name == row["hardware"]
    assert scenario.parallelism.num_gpus * scenario.cluster.replicas == row["gpus"]


def test_a_measured_file_is_compared(tmp_path):
    """infersim's own records are met exactly; a file that is none is told by its name."""
    result = run(scenario_of(BASE, None))[0]
    content = result.to_pandas().to_csv(index=False)
    message = heard(measured, BASE, None, "mine.csv", content)[-1]
    assert "mine.csv" in message["parts"]["measured"]
    (point,) = message["points"]
    assert point["p99_ttft_ms"] == pytest.approx(measure(result)["p99_ttft_ms"])
    drawn = next(m["parts"]["load"] for m in heard(refine, BASE, None, None, [point]) if "load" in m.get("parts", {}))
    assert "measured p99" in drawn
    with pytest.raises(InputError, match=r"odd\.json"):
        heard(measured, BASE, None, "odd.json", "{}")


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    path = tmp_path_factory.mktemp("studio") / "base.yaml"
    path.write_text(BASE)
    command = [sys.executable, "-m", "infersim", "studio", str(path), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    line = process.stderr.readline()
    assert line.startswith("infersim studio at http://127.0.0.1:"), line
    yield int(line.split(":")[2].split("/")[0])
    process.terminate()
    process.wait(20)
    process.stderr.close()


def asked(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    given_headers = {"content-type": "application/json"} if data else {}
    connection.request(method, path, data, given_headers | {k.replace("_", "-"): v for k, v in headers.items()})
    reply = connection.getresponse()
    first = reply.readline() if reply.status == 200 else reply.read()
    connection.close()
    return reply, first


def test_only_its_own_page_is_answered(port):
    """A foreign Host (DNS rebinding), a foreign Origin or site (CSRF) and a form's POST are refused."""
    body = {"text": BASE}
    reply, first = asked(port, "POST", "/answer", body)
    assert reply.status == 200
    assert json.loads(first)["head"]["sentence"]
    assert "script-src 'self'" in reply.headers["content-security-policy"]
    for headers in ({"host": "evil.example"}, {"host": f"evil.example:{port}"}, {"origin": "http://evil.example"},
                    {"origin": "null"}, {"sec_fetch_site": "cross-site"}, {"content_type": "text/plain"},
                    {"origin": f"https://127.0.0.1:{port}"}):  # fmt: skip
        assert asked(port, "POST", "/answer", body, **headers)[0].status == 403, headers
    assert asked(port, "GET", "/", host="evil.example")[0].status == 403
    for path in ("/../pyproject.toml", "/%2e%2e/x", "/studio.js/../../x", "/nothing"):
        assert asked(port, "GET", path)[0].status == 404
    assert asked(port, "POST", "/job/nothing", body)[0].status == 404


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "model: ["}, "line 2"),
        ({"text": "- a"}, "must be a mapping"),
        ({"text": BASE, "changes": [{"key": "x.y", "value": 1}]}, "no input"),
        ({"text": BASE, "changes": [{"key": "workload.request_rate", "value": "x"}]}, "must be a number"),
        ({"text": BASE, "changes": [{"key": "workload.request_rate", "value": -1}]}, "request_rate"),
        ({"text": BASE, "changes": [1]}, "changes"),
        ({"text": BASE.replace("h100-sxm", "h101")}, "hardware"),
        ({"text": BASE.replace("Llama-3.1-8B", "<script>alert(1)</script>")}, "<script>"),
        ([], "JSON object"),
    ],
)
def test_wrong_input_is_one_clear_line(port, body, words):
    reply, first = asked(port, "POST", "/answer", body)
    assert reply.status in (200, 400)
    problems = json.loads(first)["errors"]
    assert words in problems[0]
    assert all("\n" not in problem for problem in problems)


def test_errors_are_those_of_the_command_line(port, tmp_path):
    """The same text, but for the name of the file."""
    text = BASE.replace("request_rate: 10", "request_rate: -1").replace("300}", "-5}")
    path = tmp_path / "scenario"
    path.write_text(text)
    outcome = subprocess.run([sys.executable, "-m", "infersim", "run", str(path)], capture_output=True, text=True)
    assert outcome.returncode == 2
    first = asked(port, "POST", "/answer", {"text": text})[1]
    assert json.loads(first)["errors"] == outcome.stderr.replace(str(path), "scenario").splitlines()


# --- in a real browser ------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt install chromium)")
MOVE = """new Promise((done) => {
  document.addEventListener("painted", (event) => done(event.detail), { once: true });
  const place = document.querySelector('[data-key="%s"]'), value = %s;
  const field = place.querySelector("input[type=number], select, input[type=text], input[type=checkbox]");
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("change", { bubbles: true }));
})"""
NUMBERS = """Object.fromEntries([...document.querySelectorAll("#numbers > div")].map((d) =>
  [d.dataset.key, JSON.parse(d.dataset.value)]))"""
CHANGED = {
    "workload.request_rate": 12.5, "workload.burstiness": 2, "workload.max_concurrency": 64,
    "workload.input_tokens.lognormal.median": 800, "workload.input_tokens.form": "fixed",
    "workload.output_tokens.lognormal.mean": 180, "slo.p99_ttft_ms": 250, "slo.p99_tpot_ms": 40, "model": "Qwen3-8B",
    "hardware": "h200-sxm", "parallelism.tensor": "2", "cluster.replicas": 2, "cluster.router.policy": "least-kv",
    "precision.kv_cache": "fp8", "engine.max_num_seqs": 40, "engine.enable_prefix_caching": False,
    "engine.preset": "vllm-0.19", "speculation.form": "ngram", "speculation.acceptance.rate": 0.5,
    "simulation.seed": 7,
}  # fmt: skip


@real
@pytest.mark.slow
def test_each_control_in_a_browser(port):
    """Each input changes its own key in the YAML that is shown; the last answer is exactly that of `infersim run`."""
    with browser() as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.until("document.querySelector('#numbers dd') && document.querySelector('.input')")
        for key, value in CHANGED.items():
            before = read(page.run("document.getElementById('yaml').value"))
            detail = page.run(MOVE % (key, json.dumps(value)))
            assert not detail["errors"], key
            after = read(page.run("document.getElementById('yaml').value"))
            assert after != before, key
            if not key.endswith(".form"):
                resolved = scenario_of(page.run("document.getElementById('yaml').value"), None).resolved()
                at = resolved["hardware"]["name"] if key == "hardware" else resolved
                for name in key.split(".") if key != "hardware" else ():
                    at = at[name]
                assert str(at) == str(value) or at == value, key
            changed = {section for section in before.keys() | after.keys() if before.get(section) != after.get(section)}
            assert changed == {key.split(".")[0]}, key
        page.until("document.getElementById('stage').textContent.startsWith('whole run')", 60)
        document = summarize(run(scenario_of(page.run("document.getElementById('yaml').value"), None)))
        numbers = page.run(NUMBERS)
        for name in ("p99_ttft_ms", "p99_tpot_ms", "output_throughput"):
            assert numbers[name] == document["metrics"][name]
        assert page.problems == []


@real
@pytest.mark.slow
def test_random_moves_leave_nothing_behind(port):
    """500 moves of sliders as fast as they come: no error in the console, no stale answer, no growth of the heap."""
    draw = random.Random(1)
    keys = ["workload.request_rate", "workload.output_tokens.lognormal.mean", "engine.max_num_seqs", "slo.p99_ttft_ms",
            "cluster.replicas", "engine.gpu_memory_utilization"]  # fmt: skip
    slide = """{ const s = document.querySelector('[data-key="%s"] input[type=range]'); s.value = %d;
      s.dispatchEvent(new Event("input", { bubbles: true })); }"""

    def heap():
        page.call("HeapProfiler.collectGarbage")
        return page.run("performance.memory.usedJSHeapSize")

    with browser() as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.until("document.querySelector('#numbers dd') && document.querySelector('.input')")
        sizes = []
        for i in range(500):
            page.run(slide % (draw.choice(keys), draw.randint(300, 700)))
            if i in (99, 499):
                sizes.append(heap())
        page.until("document.getElementById('stage').textContent.startsWith('whole run')", 120)
        assert page.problems == []
        assert page.run("document.getElementById('problems').hidden")
        assert sizes[1] < 1.5 * sizes[0] + 2e6
        text = page.run("document.getElementById('yaml').value")
        numbers = page.run(NUMBERS)
        assert numbers["p99_ttft_ms"] == summarize(run(scenario_of(text, None)))["metrics"]["p99_ttft_ms"]


EVIL = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"


@real
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_the_page_at_every_width(port, width):
    """Nothing is wider than the screen, every control has a name, what users write is text, links work."""
    with browser() as page:
        page.open(f"http://127.0.0.1:{port}/", width)
        page.until("document.querySelector('#numbers dd') && document.querySelector('#requests-at svg')")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.run(wide) <= 0
        nameless = """[...document.querySelectorAll("input, select, textarea, button")].filter((e) => e.offsetParent
          && !e.labels?.length && !e.getAttribute("aria-label") && !e.textContent.trim())
          .map((e) => e.id || e.outerHTML)"""
        assert page.run(nameless) == []
        ids = "[...document.querySelectorAll('[id]')].map((e) => e.id)"
        found = page.run(ids)
        assert len(found) == len(set(found))
        assert page.run(MOVE % ("model", json.dumps(EVIL)))["errors"]
        assert "script" in page.run("document.getElementById('problems').textContent")
        slower = json.dumps(BASE.replace("request_rate: 10", "request_rate: 7"))
        page.run(f"location.hash = '#scenario=' + encodeURIComponent({slower}), 0")
        page.until("document.getElementById('title').textContent.endsWith(' 7 requests/s')")
        name = json.dumps(f"{EVIL}.csv")
        page.run(f"""(() => {{ const data = new DataTransfer(); data.items.add(new File(["a,b\\n1,2"], {name}));
          const event = new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }});
          document.body.dispatchEvent(event); }})()""")
        page.until("document.getElementById('file-words').textContent.includes('script')")
        assert page.run("window.hit") is None
        assert page.problems == []


@real
@pytest.mark.slow
def test_a_and_b_and_a_plan_in_a_browser(port):
    """Pinned, another setting is compared with it; a plan's row is loaded into the inputs."""
    with browser() as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.until("document.querySelector('#numbers dd') && document.querySelector('.input')")
        page.run("document.getElementById('pin').click(), 0")
        page.run(MOVE % ("precision.kv_cache", '"fp8"'))
        page.until("document.querySelector('#numbers .other').textContent.startsWith('A ')")
        page.until("document.querySelector('#compare-at h2')", 60)
        page.run("document.getElementById('unpin').click(), 0")
        page.run("document.querySelector('#plan-form [type=submit]').click(), 0")
        page.until("document.querySelector('#plan-table tbody tr')", 120)
        page.run("document.querySelector('#plan-table tbody tr button').click(), 0")
        hardware = page.run("document.querySelector('#plan-table tbody tr').dataset.hardware")
        page.until(f"document.getElementById('yaml').value.includes('hardware: {hardware}')")
        assert page.problems == []
