"""The process: sockets, the event loop, and what is written when it ends."""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario

from .live import Live
from .outcome import write_trace
from .text import load_tokenizer

BACKLOG = 16384
STALLED = 120
"""s after which a client that neither reads nor acknowledges is given up"""
GRACE = 2
"""s that answers have to end in when the server stops"""


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on. InputError if it cannot be."""
    sock = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # and so for what it accepts
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED * 1e3))
        sock.bind(address)
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise InputError(f"--host {host} --port {port}: {error}; must be an address that is free here") from None
    return sock


@dataclass(frozen=True)
class Settings:
    """What `infersim serve` is told beside the scenario."""

    host: str
    port: int
    speed: float
    ports_per_replica: bool
    tokenizer: str | None
    record: Path | None
    kv_events: str | None


def serve(scenario: Scenario, settings: Settings, say: Callable[[str], None]) -> Live:
    """Serve until interrupted, then the state in which everything is. InputError for what cannot be served."""
    try:
        import uvicorn
        import uvloop

        from .app import Endpoint
        from .http import Bounded
    except ImportError as error:
        raise InputError(f"serve: needs the package {error.name}: pip install 'infersim[serve]'") from None
    host, port, ports_per_replica = settings.host, settings.port, settings.ports_per_replica
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # a connection is a file
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * BACKLOG), hard))
    tokenizer = load_tokenizer(settings.tokenizer)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        live = Live(scenario, settings.speed, loop)
        number = len(live.deployments) if ports_per_replica else 1
        sockets = [listen(host, port + r if port else 0) for r in range(number)]
        endpoint = Endpoint(live, tokenizer, sockets[0].getsockname()[1] if ports_per_replica else None)
        first = sockets[0].getsockname()[1]
        if settings.kv_events is not None:
            from .kv_events import KvEvents

            topics = [f"kv@{host}:{first + (r if number > 1 else 0)}@{model}" for r, model in enumerate(live.models)]
            live.events = KvEvents(live, settings.kv_events, topics)
        config = uvicorn.Config(
            endpoint,
            http=Bounded,
            log_level="critical",
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=60,
            server_header=False,
            ws="none",
        )
        where = f"http://{host}:{first}" + (f" to {sockets[-1].getsockname()[1]}" if number > 1 else "")
        counted = "counted by the tokenizer" if tokenizer.exact else "estimated, about 4 bytes a token"
        names = ", ".join(dict.fromkeys(live.models))
        say(f"{names} at {where}, speed {settings.speed:g}; tokens of prompts are {counted}")
        server = uvicorn.Server(config)
        gc.freeze()  # what is there stays
        gc.set_threshold(5000, 20, 20)  # a reply and what tells it of tokens know each other: nothing else frees them
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # which uvicorn gives on when it has stopped
        with contextlib.suppress(KeyboardInterrupt):
            loop.run_until_complete(server.serve(sockets=sockets))
        if live.events is not None:
            loop.run_until_complete(live.events.close())
        for sock in sockets:
            sock.close()
        if settings.record is not None:
            say(f"{write_trace(live, settings.record)} requests recorded in {settings.record}")
        return live
    finally:
        asyncio.set_event_loop(None)
        loop.close()
