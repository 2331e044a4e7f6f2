"""`infersim serve` as a process of its own, for benchmarks and real clients."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request


@contextlib.contextmanager
def endpoint(*options: str, **popen):
    """(process, port) of a server of scenarios/llama-8b-h100.yaml on 127.0.0.1 that answers; killed at the end."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "infersim", "serve", "llama-8b-h100", "--port", str(port), *options]
    server = subprocess.Popen(command, **popen)
    try:
        while True:
            if server.poll() is not None:
                sys.exit(f"{' '.join(command)} ended with {server.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.02)
        yield server, port
    finally:
        server.kill()
        server.wait()
