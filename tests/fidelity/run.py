"""The fidelity suite: predictions against measurements that others published, by simulating the engine; what is added
to a simulated time is counted by its rule.

    python tests/fidelity/run.py --data DIR [--json] [--report reports/fidelity.md]
                                 [--errors hardware_profiles/published/errors.csv]

DIR is laid out as the project's shared data. A missing file skips its set. Exit codes: 1, an efficiency above 1 or an
overhead below 0 (bugs, whatever the errors are); 2, a file that cannot be read as what it should be.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import published
import silicon
import step_times
import vllm_requests
from common import PRESETS

from infersim.config.errors import InputError
from infersim.config.hardware import DTYPES, OPERATOR_CLASSES, load_hardware
from infersim.config.precision import FORMATS
from infersim.config.presets import packaged_presets
from infersim.config.resources import names
from infersim.cost.efficiency import efficiency
from infersim.explain.summary import finite

BASELINES = {
    "silicon": (
        "AIConfigurator, 107 dense rows: median TPOT 11.8 %, TTFT 50.8 %; 174 MoE rows: 20 and 45 %",
        "its discrete-event successor, 26 rows: 10.5 and 46 %",
        "a closed form of four fitted scalars, half of 1,042 dense rows: 9 and 42 %; on the 107: 11.7 and 35.9 %",
    ),
    "vllm_requests": ("another simulator's prediction of each request, in the log itself (peer_sim)",),
}


def impossible() -> list[str]:
    """Efficiencies above 1 and overheads below 0."""
    found = []
    for name in names("hardware_profiles"):
        try:
            hardware = load_hardware(name)  # refuses shares above 1 and times below 0 that it says itself
        except InputError as error:
            found += error.problems
            continue
        used = {f"{kind}.{dtype}": efficiency(hardware, kind, dtype)
                for kind in OPERATOR_CLASSES for dtype in (*DTYPES, *FORMATS)}  # fmt: skip
        for key, e in (used | hardware.efficiency).items():
            shares = {"bandwidth": e.bandwidth, "flops": e.flops}
            shares |= {term: value for term, value in e.terms.items() if term.endswith("_bandwidth")}
            times = {"fixed": e.fixed, **{term: value for term, value in e.terms.items() if term not in shares}}
            found += [f"{name} {key}: {share} {value}" for share, value in shares.items() if not 0 < value <= 1]
            found += [f"{name} {key}: {time} {value}" for time, value in times.items() if value < 0]
    for name, preset in packaged_presets().items():
        times = {key: value for key, value in preset.values.items() if key.endswith("_time") and value < 0}
        found += [f"{name}: {key} {value}" for key, value in times.items()]
    return found


def evaluate(data: Path) -> tuple[dict, dict]:
    """The suite's document, and the tables behind it by set."""
    document, tables = {"kernels": [], "vllm_requests": [], "silicon": [], "published": [], "step_times": []}, {}
    if (Path(__file__).parent / "kernels.py").exists() and (data / "kernels").is_dir():
        tables["kernels"] = importlib.import_module("kernels").evaluate(data)
        document["kernels"] = tables["kernels"]
    if (data / vllm_requests.FILE).exists() and (data / vllm_requests.META).exists():
        tables["vllm_requests"] = vllm_requests.evaluate(data)
        document["vllm_requests"] = [
            {key: value for key, value in entry.items() if key != "requests"} for entry in tables["vllm_requests"]
        ]
    for name, module in (("silicon", silicon), ("published", published), ("step_times", step_times)):
        if (data / module.FILE).exists():
            rows = module.evaluate(data)
            if len(rows):
                tables[name], document[name] = rows, module.summarize(rows)
    return finite(document), tables


def show(document: dict, tables: dict) -> str:
    """The document as text: one table per set."""
    lines = ["engine versions: the newest row that is not newer"]
    lines += [f"  {engine:7s} {'.'.join(map(str, since)):6s} {preset}" for (engine, since), preset in PRESETS.items()]
    for name, entries in document.items():
        lines += ["", f"{name}: {len(entries)} groups" if entries else f"{name}: skipped, its file is missing or empty"]
        lines += [f"  best known: {text}" for text in BASELINES.get(name, ())]
        if entries:
            columns = [key for key in entries[0] if not isinstance(entries[0][key], dict)]
            rows = [[str(entry.get(key, "")) for key in columns] for entry in entries]
            widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
            lines += ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                      for row in [columns, *rows]]  # fmt: skip
        if name in ("silicon", "published", "step_times") and name in tables:
            lines += [f"  not predicted, {n} rows: {why}" for why, n in reasons(tables[name]).items()]
    return "\n".join(lines)


def reasons(rows) -> dict[str, int]:
    """Why rows could not be predicted, most frequent first; numbers that differ from row to row left out."""
    why = rows.why[rows.why != ""].str.replace(r"needs [^;]*;.*", "needs more memory", regex=True)
    return why.str.replace(r"^\d+ is longer", "longer", regex=True).str.slice(0, 90).value_counts().to_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with kernels/ and e2e/")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--report", type=Path, help="write the report there, its figures beside it")
    parser.add_argument("--errors", type=Path, help="write there how far held-out rows are off (see errors.py)")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"--data {options.data}: no such folder")
    started = time.perf_counter()
    bugs = impossible()
    for bug in bugs:
        print(f"impossible: {bug}", file=sys.stderr)
    try:
        document, tables = evaluate(options.data)
    except InputError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 1 if bugs else 2
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print(show(document, tables))
        print(f"\n{time.perf_counter() - started:.0f} s")
    if options.report:
        import report

        report.write(options.report, document, tables)
    if options.errors:
        import errors

        errors.write(options.errors, tables)
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
