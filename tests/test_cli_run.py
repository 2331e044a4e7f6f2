"""`infersim run` from the command line: output, files, exit codes, interruption, what it imports."""

import csv
import importlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.resources import names

SMALL = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "workload": {"input_tokens": 200, "output_tokens": 20, "request_rate": 5, "num_requests": 50},
}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """The engine, whose first use after a change compiles it and says so."""
    invoke("run", "llama-8b-h100", "--set", "workload.num_requests=1")


@pytest.fixture
def scenario(tmp_path):
    def write(**keys):
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({**SMALL, **keys}))
        return str(path)

    return write


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def python(code, **keys):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **keys)


def test_the_report_is_plain_and_at_most_one_screen(scenario):
    outcome = invoke("run", scenario())
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    lines = outcome.stdout.splitlines()
    assert 20 <= len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in outcome.stdout
    assert "50 of 50 requests completed" in outcome.stdout


def test_json_is_all_that_stdout_holds_and_the_same_seed_gives_the_same_bytes(scenario):
    first, again = invoke("run", scenario(), "--json"), invoke("run", scenario(), "--json")
    assert first.stdout == again.stdout
    document = json.loads(first.stdout)
    assert document["counts"]["completed"] == 50
    assert (document["verdict"]["state"], document["verdict"]["needed_requests"] > 50) == ("stable", True)
    assert invoke("run", scenario(), "--json", "--seed", "1").stdout != first.stdout


def test_overrides_reach_the_scenario(scenario):
    outcome = invoke("run", scenario(), "--json", "--set", "engine.max_num_seqs=7", "--set", "workload.num_requests=10")
    document = json.loads(outcome.stdout)
    assert document["engine"]["max_num_seqs"] == 7
    assert document["counts"]["submitted"] == 10


def test_files_hold_the_document_and_a_row_per_request(scenario, tmp_path):
    out = tmp_path / "new" / "out"
    outcome = invoke("run", scenario(), "--json", "--out", str(out))
    assert outcome.exit_code == 0
    document = json.loads((out / "result.json").read_text())
    assert document == json.loads(outcome.stdout)
    assert document["schema_version"] == 1
    assert all(row["source"] and row["provenance"] for row in document["provenance"])
    rows = list(csv.DictReader((out / "requests.csv").read_text().splitlines()))
    assert [int(row["request_id"]) for row in rows] == list(range(50))
    mean = sum(float(row["e2el_ms"]) for row in rows) / 50
    assert mean == pytest.approx(document["metrics"]["mean_e2el_ms"], rel=1e-6)
    assert {path.name for path in out.iterdir()} == {"result.json", "requests.csv"}


def test_parquet_holds_what_csv_holds(scenario, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    out = str(tmp_path / "out")
    assert invoke("run", scenario(), "--out", out).exit_code == 0
    told = pandas.read_csv(f"{out}/requests.csv", keep_default_na=False, na_values={"tpot_ms": ""})
    assert invoke("run", scenario(), "--out", out, "--parquet").exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"result.json", "requests.parquet"}
    found = pandas.read_parquet(f"{out}/requests.parquet")
    pandas.testing.assert_frame_equal(found, told, check_dtype=False, rtol=0, atol=1e-6)
    refused = invoke("run", scenario(), "--parquet")
    assert (refused.exit_code, refused.stderr) == (2, "--parquet: needs --out DIR, where to save\n")


def test_gaps_are_saved_on_demand_and_make_percentiles_exact(scenario, tmp_path):
    import numpy as np

    out = tmp_path / "out"
    outcome = invoke("run", scenario(), "--json", "--out", str(out), "--save-detailed")
    arrays = np.load(out / "itls.npz")
    assert len(arrays["itl"]) == 50 * 19
    expected = np.percentile(arrays["itl"], 99) * 1e3
    assert json.loads(outcome.stdout)["metrics"]["p99_itl_ms"] == pytest.approx(expected, rel=1e-6)
    assert invoke("run", scenario(), "--save-detailed").exit_code == 2


def test_an_earlier_result_is_replaced_and_anything_else_is_not(scenario, tmp_path):
    out = tmp_path / "out"
    assert invoke("run", scenario(), "--out", str(out)).exit_code == 0
    assert invoke("run", scenario(), "--out", str(out)).exit_code == 0
    (out / "thesis.tex").write_text("years of work")
    outcome = invoke("run", scenario(), "--out", str(out))
    assert outcome.exit_code == 2
    assert "thesis.tex" in outcome.stderr
    file = tmp_path / "file"
    file.write_text("")
    assert invoke("run", scenario(), "--out", str(file)).exit_code == 2
    assert invoke("run", scenario(), "--out", str(file / "below")).exit_code == 2


def test_a_folder_in_which_a_writer_was_killed_is_still_ours(scenario, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".requests.csv.12345").write_text("request_id,")
    assert invoke("run", scenario(), "--out", str(out)).exit_code == 0
    assert {path.name for path in out.iterdir()} == {"result.json", "requests.csv"}


def test_cells_are_names_as_they_are_whatever_they_hold(scenario, tmp_path):
    """Commas, quotes, newlines, and names that begin with "nan": what csv reads is what was described."""
    adapters, tenants = ["nano", "a,b", "line\nbreak"], ["nancy", 'x"y', "nan"]
    workload = SMALL["workload"] | {"models": dict.fromkeys(adapters, 1), "tenants": {name: {} for name in tenants}}
    described = scenario(lora={"adapters": dict.fromkeys(adapters, 8), "max_loras": 4}, workload=workload)
    assert invoke("run", described, "--out", str(tmp_path / "out")).exit_code == 0
    with open(tmp_path / "out" / "requests.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    assert {row["model"] for row in rows} == set(adapters)
    assert {row["tenant"] for row in rows} == set(tenants)
    assert all(row["status"] == "completed" and float(row["e2el_ms"]) > 0 for row in rows)


def test_a_run_without_an_answer_has_a_report(scenario, tmp_path):
    page = tmp_path / "page.html"
    dead = scenario(cluster={"failures": [{"kind": "crash", "at": 0}]})
    assert invoke("run", dead, "--report", str(page)).exit_code == 0
    assert "time out or are lost" in page.read_text()


def test_a_missed_slo_is_exit_code_1_and_a_met_one_0(scenario):
    missed = invoke("run", scenario(slo={"p99_ttft_ms": 1}))
    assert missed.exit_code == 1
    assert "missed" in missed.stdout
    assert invoke("run", scenario(slo={"p99_ttft_ms": 10_000})).exit_code == 0


def test_a_limit_is_weighed_against_the_error_bar(scenario):
    """Held or missed in the simulation, between the ends of 4 in 5 deployments of this kind or beyond both."""
    load = {**SMALL["workload"], "num_requests": 2000}
    answer = json.loads(invoke("run", scenario(workload=load), "--json").stdout)
    value, (low, high) = answer["metrics"]["mean_tpot_ms"], answer["model_error"]["factors"]["tpot"]
    for factor, words in ((2 * high, "with the error bar too"), ((1 + high) / 2, "but not with the error bar"),
                          ((1 + low) / 2, "but maybe within the error bar"), (low / 2, None)):  # fmt: skip
        text = invoke("run", scenario(workload=load, slo={"mean_tpot_ms": value * factor})).stdout
        assert ("error bar:" in text or "error bar too:" in text) == (words is not None)
        assert words is None or words in text


def test_every_problem_is_one_line_on_stderr_and_exit_code_2(scenario):
    outcome = invoke("run", scenario(engine={"max_num_seq": 5}, precision={"weights": "bf17"}))
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    problems = outcome.stderr.splitlines()
    assert len(problems) == 2
    assert all("small.yaml: " in problem for problem in problems)
    assert "did you mean max_num_seqs?" in outcome.stderr
    assert invoke("run", "no-such-scenario").exit_code == 2
    assert invoke("run").exit_code == 2
    assert invoke("run", scenario(), "--set", "nonsense").exit_code == 2


def test_replications_show_intervals(scenario):
    outcome = invoke("run", scenario(simulation={"replications": 3}))
    assert "+-" in outcome.stdout
    assert "3 of 3 replications" in outcome.stdout


@pytest.mark.parametrize("name", [name for name in names("scenarios") if not name.startswith("plan-")])
def test_every_packaged_scenario_runs(name):
    outcome = invoke("run", name, "--json", "--set", "workload.num_requests=50")
    assert outcome.exit_code in (0, 1), outcome.stderr


def test_an_interruption_leaves_what_was_computed(scenario, tmp_path):
    """Progress in simulated time appears on a terminal; then Ctrl-C."""
    out = tmp_path / "out"
    many = {**SMALL["workload"], "num_requests": 200_000, "output_tokens": 5000, "request_rate": 3}
    command = [sys.executable, "-m", "infersim", "run", scenario(workload=many), "--out", str(out)]
    main, terminal = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        stderr = b""
        while b"simulated" not in stderr:
            stderr += os.read(main, 10_000)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    os.close(main)
    assert process.returncode == 130
    assert "INTERRUPTED" in stdout
    document = json.loads((out / "result.json").read_text())
    assert document["interrupted"]
    assert document["counts"]["unfinished"] > 0
    assert sum(list(document["counts"].values())[1:6]) == 200_000


@pytest.mark.parametrize("arguments", ["--help", "run {0}", "run {0} --json", "show model gpt2", "reproduce"])
def test_a_full_disk_behind_stdout_is_one_line(scenario, arguments):
    command = f"{sys.executable} -m infersim {arguments.format(scenario())} > /dev/full"
    outcome = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 2
    assert outcome.stderr == "infersim: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(scenario, closed):
    command = f"{sys.executable} -m infersim run {scenario()} {closed}"
    outcome = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_too_little_memory_is_one_line(scenario, monkeypatch):
    def build(*_):
        raise MemoryError

    monkeypatch.setattr(importlib.import_module("infersim.run"), "build_requests", build)
    outcome = invoke("run", scenario())
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("not enough memory")


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_an_interruption_while_it_is_loading_is_one_line(scenario, tmp_path, module):
    """Ctrl-C during an import, before or inside the verb: no traceback, exit code 130."""
    (tmp_path / f"{module}.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "infersim", "run", scenario()]
    environment = {**os.environ, "PYTHONPATH": path}
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (130, "", "interrupted\n")


def test_a_reader_that_leaves_is_no_traceback(scenario):
    command = f"{sys.executable} -m infersim run {scenario()} --json | head -c 10"
    outcome = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert outcome.stderr == ""


def test_help_imports_nothing_heavy_and_run_only_what_it_needs(scenario):
    code = (
        "import sys; from infersim.cli.app import main\n"
        "sys.argv = ['infersim', {arguments}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = [m for m in {modules} if m in sys.modules]; print('heavy:', heavy)"
    )
    heavy = ["numpy", "pydantic", "yaml", "numba", "pandas", "matplotlib", "simpy", "rich"]
    assert python(code.format(arguments="'--help'", modules=heavy)).stdout.endswith("heavy: []\n")
    outcome = python(code.format(arguments=f"'run', {scenario()!r}", modules=heavy[4:]))
    assert outcome.stdout.endswith("heavy: []\n"), outcome.stderr


def test_without_arguments_it_explains_itself():
    outcome = subprocess.run([sys.executable, "-m", "infersim"], capture_output=True, text=True, timeout=30)
    assert all(verb in outcome.stdout + outcome.stderr for verb in ("run", "show", "reproduce"))
    version = subprocess.run(
        [sys.executable, "-m", "infersim", "--version"], capture_output=True, text=True, timeout=30
    )
    assert version.stdout == "0.1.0\n"


def test_colour_is_for_terminals_only(scenario):
    main, terminal = pty.openpty()
    long = {"workload": SMALL["workload"] | {"num_requests": 1000}}
    command = [sys.executable, "-m", "infersim", "run", scenario(**long)]
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    subprocess.run(command, stdout=terminal, stderr=subprocess.DEVNULL, timeout=60, env=environment, check=True)
    os.close(terminal)
    assert b"\x1b[1;32mSTABLE" in os.read(main, 100_000)
    os.close(main)


def test_a_ramp_is_not_decided_by_more_requests(scenario):
    """They would only stretch it; the verdict asks for none."""
    ramp = [
        "--set",
        "workload.request_rate=null",
        "--set",
        "workload.ramp_up={strategy: linear, start_rps: 1, end_rps: 9}",
    ]
    refused = invoke("run", scenario(), "--until-decided", *ramp)
    assert refused.exit_code == 2
    assert "stretch workload.ramp_up" in refused.output
    verdict = json.loads(invoke("run", scenario(), "--json", *ramp).stdout)["verdict"]
    assert verdict["needed_requests"] is None


def test_until_decided_goes_on_until_the_run_is_long_enough(scenario):
    """Fifty requests tell nothing; the answer is then that of a longer run, which the document shows."""
    document = json.loads(invoke("run", scenario(), "--until-decided", "--json").stdout)
    assert document["verdict"]["state"] == "stable"
    assert document["counts"]["submitted"] == document["scenario"]["workload"]["num_requests"] > 100


def test_who_is_refused_misses_the_slo(scenario):
    """One request at a time, no queue, and twenty times too much: what is served is fast, and the SLO is missed."""
    crowd = SMALL["workload"] | {"request_rate": 200, "num_requests": 1000}
    door = {"admission": {"max_outstanding": 1, "max_queue": 0}}
    slo = {"p99_ttft_ms": 1000}
    outcome = invoke("run", scenario(workload=crowd, cluster=door, slo=slo), "--json")
    assert outcome.exit_code == 1
    document = json.loads(outcome.stdout)
    assert document["verdict"]["state"] == "saturated"
    assert document["metrics"]["p99_ttft_ms"] < 1000
    assert not document["slo"]["met"]
    assert document["slo"]["goodput_share"] == pytest.approx(document["counts"]["completed"] / 1000)
