"""A vLLM server in a session of its own, and what it says of itself."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setups import PORT

TICK = os.sysconf("SC_CLK_TCK")  # per s


class Vllm:
    """How vLLM is run: the release that an installation left in `release`, by its python; else this python's own."""

    def __init__(self, release: Path | None, work: Path):
        self.work = work
        self.python = str(release.resolve().parent / "python/bin/python") if release else sys.executable
        self.environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CACHE_ROOT": str(work / "cache"),
        }  # fmt: skip
        if release:
            self.environment |= {"PYTHONPATH": str(release.resolve()), "VLLM_TARGET_DEVICE": "cpu"}

    def start(self, words: list[str], cores: set[int], **more: str) -> subprocess.Popen:
        """`vllm ...` on these cores; what it prints is in WORD.log."""
        with open(self.work / f"{words[0]}.log", "a", encoding="utf-8") as log:
            return subprocess.Popen(
                [self.python, "-m", "vllm.entrypoints.cli.main", *words], cwd=self.work, env=self.environment | more,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip

    def run(self, words: list[str], cores: set[int], seconds: float = 600) -> int:
        """Its exit status; an interruption ends it."""
        process = self.start(words, cores)
        try:
            return process.wait(seconds)
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Every process of its session."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class Server:
    """A running server; a context, which ends every process of it."""

    def __init__(self, vllm: Vllm, words: list[str], cores: set[int], seconds: float = 600):
        self.cores, bound = cores, {}
        if len(cores) == 1:
            bound = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(*cores)}
        self.process = vllm.start(["serve", *words], cores, **bound)
        try:
            ends = time.monotonic() + seconds
            while not self._is_ready():
                if self.process.poll() is not None or time.monotonic() > ends:
                    raise SystemExit(f"the server did not start; see {vllm.work / 'serve.log'}")
                time.sleep(1)
        except BaseException:
            end(self.process)
            raise

    def _is_ready(self) -> bool:
        try:
            self._ask("/health")
        except OSError:
            return False
        return True

    def _ask(self, path: str, data: bytes | None = None) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data, timeout=10) as answer:
            return answer.read().decode()

    def forget(self) -> None:
        """Empties the prefix cache, so that the same prompts may come again."""
        self._ask("/reset_prefix_cache", b"")

    def cached_tokens(self) -> int:
        """Of all prompts until now, those that were found in the cache."""
        found = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", self._ask("/metrics"), re.MULTILINE)
        return round(sum(map(float, found)))

    def blocks(self) -> int:
        """KV blocks, the null block included."""
        found = re.search(r'num_gpu_blocks="(\d+)"', self._ask("/metrics"))
        return int(found[1]) if found else 0

    def busy(self) -> tuple[float, float]:
        """CPU time of the server's cores until now, s: the server's, and all others'."""
        names, total, own = {f"cpu{core}" for core in self.cores}, 0, 0
        for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines():
            name, *ticks = line.split()
            if name in names:
                total += sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])  # idle, waiting for a disk
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:  # the session
                own += int(fields[11]) + int(fields[12])
        return own / TICK, total / TICK - own / TICK

    @contextmanager
    def watched(self, every: float = 0.1) -> Iterator[list[tuple[float, float]]]:
        """(clock, CPU time that the server has had), s, as long as it lasts."""
        seen, over = [], threading.Event()

        def watch() -> None:
            while not over.is_set():
                seen.append((time.perf_counter(), self.busy()[0]))
                over.wait(every)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
