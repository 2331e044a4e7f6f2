"""Kills commands that write at random moments, starts them again, and compares what is left with undisturbed runs.

    python tests/fuzz/kills.py 500

A command is killed some times, then let run to its end: its files must be those of a run that nobody killed, byte for
byte, and nothing else may lie beside them.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEW = ["--set", "workload.num_requests=300"]
PLAN = """
model: Llama-3.1-8B
workload: {request_rate: 3, num_requests: 200, input_tokens: 300, output_tokens: 50}
slo: {p99_ttft_ms: 2000, p99_tpot_ms: 80}
max_gpus: 1
candidates: {hardware: [h100-sxm, l40s]}
"""


def commands(folder: Path) -> dict[str, list[str]]:
    """Each verb that writes, with OUT for where it does; they run in `folder`."""
    (folder / "plan.yaml").write_text(PLAN)
    bench = ["run", "llama-8b-h100", *FEW, "--out", "bench", "--export", "vllm-bench", "--save-detailed"]
    subprocess.run([sys.executable, "-m", "infersim", *bench], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    grid = ["--over", "workload.request_rate=1:12:1", "--workers", "1"]
    return {
        "run": ["run", "llama-8b-h100", *FEW, "--save-detailed", "--out", "OUT/run"],
        "sweep": ["sweep", "llama-8b-h100", *FEW, *grid, "--out", "OUT/sweep"],
        "plan": ["plan", "plan.yaml", "--report", "OUT/plan.html"],
        "calibrate": ["calibrate", "server", "bench/vllm-bench.json", "--scenario", "llama-8b-h100", *FEW, "--force",
                      "--out", "OUT/overheads.yaml"],
    }  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(folder: Path, command: list[str], out: str) -> subprocess.Popen:
    """The command, whose output goes into folder/out."""
    words = [word.replace("OUT", out) for word in command]
    (folder / out).mkdir(exist_ok=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "infersim", *words], cwd=folder, start_new_session=True, **quiet)


def main(kills: int, seed: int) -> int:
    """The number of commands whose files differ."""
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="infersim-kills-"))
    print(f"seed {seed}, in {folder}", flush=True)
    known, wrong, done = commands(folder), 0, 0
    seconds = {}
    for name, command in known.items():
        began = time.time()
        assert start(folder, command, "whole").wait() in (0, 1), name
        seconds[name] = time.time() - began
    whole = files(folder / "whole")
    while done < kills:
        for name, command in known.items():
            for _ in range(draw.randint(1, 10)):
                process = start(folder, command, "cut")
                time.sleep(draw.uniform(0, 1.1 * seconds[name]))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    done += 1
                process.wait()
            code = start(folder, command, "cut").wait()
            wrong += code not in (0, 1)
            if code not in (0, 1):
                print(f"{name} ended with {code}", flush=True)
        cut = files(folder / "cut")
        differ = sorted(key for key in whole.keys() | cut.keys() if whole.get(key) != cut.get(key))
        wrong += bool(differ)
        print(f"{done} killed", *(f"differs: {key}" for key in differ), flush=True)
    print(f"{done} kills, {wrong} rounds or commands wrong")
    return wrong


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    sys.exit(bool(main(kills, int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().getrandbits(32))))
