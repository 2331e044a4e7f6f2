"""A headless Chromium over its debugging pipe (the DevTools protocol), for tests of pages and pictures of them."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
           "--disable-background-networking", "--disable-component-update", "--disable-sync",
           "--disable-dev-shm-usage", "--remote-debugging-pipe"]  # fmt: skip


class Page:
    """One tab. `problems`: what it wrote to its console as errors and warnings, and exceptions."""

    def __init__(self, reads: int, writes: int):
        self.reads, self.writes = reads, writes
        self.number, self.rest = 0, b""
        self.problems: list[str] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command. RuntimeError if Chromium refuses it."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read(60)
            if found.get("id") == self.number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _read(self, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self.rest:
            if not select.select([self.reads], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self.reads, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium has ended")
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens an address at a size, and waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def until(self, condition: str, timeout: float = 30) -> None:
        """Waits until an expression is true. TimeoutError if it does not come to be."""
        end = time.monotonic() + timeout
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a Chromium of its own, which ends with it."""
    assert CHROMIUM, "chromium is not installed"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def pipes() -> None:  # Chromium reads commands from 3 and writes answers to 4
        a, b = os.dup(to_read), os.dup(from_write)
        os.dup2(a, 3)
        os.dup2(b, 4)
        os.set_inheritable(3, True)
        os.set_inheritable(4, True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}"],
            close_fds=False,
            preexec_fn=pipes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(from_read, to_write)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_read)
            os.close(to_write)
