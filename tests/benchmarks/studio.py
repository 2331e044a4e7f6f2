"""How long the studio takes from an input event in a real browser to the painted answer:

    python tests/benchmarks/studio.py [moves]

p95 is to be at most 100 ms for one replica, and 250 ms for eight behind a router, on a machine with two free cores. The
server's CPU time for a move is what a busy machine leaves to be compared.
"""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from browser import Page, browser

BOUNDS = {"llama-8b-h100": 100, "llama-8b-8xh100-router": 250}


@contextlib.contextmanager
def studio(scenario: str) -> Iterator[str]:
    """The address of a studio of its own."""
    with process(scenario) as (address, _):
        yield address


@contextlib.contextmanager
def process(scenario: str) -> Iterator[tuple[str, int]]:
    """The same, and the number of its process."""
    command = [sys.executable, "-m", "infersim", "studio", scenario, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        line = server.stderr.readline()
        assert "http://" in line, line
        yield line.split()[3], server.pid
    finally:
        server.terminate()
        server.wait()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MOVE = """new Promise((done) => {
  document.addEventListener("painted", (event) => done(event.detail.ms), { once: true });
  const slider = document.querySelector('[data-key="%s"] input[type=range]');
  slider.value = %d;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  if (!page.waiting) done(null);  // it stands there already
})"""
KEYS = ("workload.request_rate", "workload.output_tokens.lognormal.mean", "workload.input_tokens.lognormal.mean",
        "engine.max_num_seqs", "engine.gpu_memory_utilization")  # fmt: skip


def latencies(page: Page, address: str, moves: int) -> list[float]:
    """ms of each of so many moves of random sliders, one after the other."""
    page.open(address)
    page.until("document.querySelector('#numbers dd')")
    draw, found = random.Random(0), []
    for _ in range(moves):
        key, at = draw.choice(KEYS), draw.randint(450, 800)
        found.append(page.run(MOVE % (key, at)))
    return [ms for ms in found if ms is not None]


def main() -> None:
    moves = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with browser() as page:
        for scenario, bound in BOUNDS.items():
            with process(scenario) as (address, pid):
                before = cpu_seconds(pid)
                ms = sorted(latencies(page, address, moves))
                spent = 1e3 * (cpu_seconds(pid) - before) / moves
            p50, p95 = (ms[min(len(ms) - 1, round(share * (len(ms) - 1)))] for share in (0.5, 0.95))
            load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            print(
                f"{scenario}: p50 {p50:.0f} ms, p95 {p95:.0f} ms of {bound} ({len(ms)} moves; {load};"
                f" {spent:.0f} ms of the server's CPU each)"
            )


if __name__ == "__main__":
    main()
