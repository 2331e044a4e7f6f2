"""`infersim run`: how will this deployment behave?"""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .guard import INTERRUPTED, guarded, uninterrupted

SLO_MISSED = 1


@guarded
def run(
    scenario: Annotated[str, Argument(help="Name or path of a scenario file; see `infersim show scenarios`.")],
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override, e.g. engine.max_num_seqs=512.")
    ] = None,
    seed: Annotated[int | None, Option(help="Same as --set simulation.seed=N.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, and nothing else, to stdout.")] = False,
    out: Annotated[Path | None, Option(metavar="DIR", help="Write result.json and requests.csv there.")] = None,
    save_detailed: Annotated[
        bool, Option("--save-detailed", help="Keep every inter-token gap, in DIR/itls.npz.")
    ] = False,
) -> int:
    """Simulate a scenario: how will this deployment behave?

    Exit code 0: done. 1: an SLO is missed. 2: wrong input. 130: interrupted; what was computed is reported.
    """
    from infersim.explain.summary import summarize
    from infersim.report.files import check_folder, to_json, write_result
    from infersim.report.terminal import print_report
    from infersim.run import run as simulate
    from infersim.spec.errors import InputError
    from infersim.spec.scenario import load_scenario

    seeds = [] if seed is None else [f"simulation.seed={seed}"]
    description = load_scenario(scenario, [*(overrides or []), *seeds])
    if save_detailed and out is None:
        raise InputError("--save-detailed: has nowhere to save; must come with --out DIR")
    if out is not None:
        check_folder(out)
    results = simulate(description, progress=_progress if sys.stderr.isatty() else None, save_detailed=save_detailed)
    with uninterrupted():
        document = summarize(results)
        files = write_result(out, document, results, save_detailed) if out is not None else []
    if as_json:
        print(to_json(document))
    else:
        print_report(document, files)
    if document["interrupted"]:
        return INTERRUPTED
    return SLO_MISSED if document["slo"] and not document["slo"]["met"] else 0


def _progress(now: float, last_arrival: float, finished: int, submitted: int) -> None:
    """One line that overwrites itself on a terminal, wiped out at the end."""
    text = f"simulated {now:,.0f} s (arrivals end at {last_arrival:,.0f} s), {finished:,} of {submitted:,} requests"
    text = text if finished < submitted else ""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
