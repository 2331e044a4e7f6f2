"""The studio's server: one page, answers as lines of JSON, and refusals of whoever is not that page."""

import asyncio
import contextlib
import functools
import json
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infersim import __version__
from infersim.config.errors import InputError
from infersim.config.resources import names
from infersim.models.catalog import load_model
from infersim.models.catalog import names as model_names
from infersim.report.html import templates
from infersim.report.studio import head_of

from .control import Control, Group
from .controls import changes_of, controls, text_alone
from .edit import WHERE, read, set_key
from .jobs import Jobs
from .work import first_look, parts_at_a_glance, scenario_of

HERE = Path(__file__).parent
LARGEST_BODY = 64 * 2**20
"""a benchmark's file with every token's time"""
LEAST, MOST = 250, 2000
"""requests of a first answer"""
QUICK, SLOW = 0.012, 0.04
"""wall s of a first answer: below, the next one has more requests; above, fewer"""
REST = 0.12
"""wall s without a change, after which the whole run begins"""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
LOADED = ("hardware", "parallelism", "cluster.replicas")
"""keys that a row of a plan sets"""


class Studio:
    """The page of one scenario file. text: its YAML; near: the file, whose folder paths are looked for in."""

    def __init__(self, text: str, near: Path | None):
        self.text, self.near = text, near
        self.jobs = Jobs()
        self.most = 1000
        self.one = asyncio.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="infersim-studio-")
        self._last: tuple[str, list[Group]] | None = None
        self._pinned: dict[tuple[str, int], dict[str, Any]] = {}
        get, post = ["GET"], ["POST"]
        self.routes = Starlette(
            routes=[
                Route("/", self.page, methods=get),
                Route("/report.css", self.style, methods=get),
                *(Route(f"/{name}", functools.partial(_file, path), methods=get) for name, path in FILES.items()),
                Route("/answer", self.answer, methods=post),
                Route("/job/{kind}", self.job, methods=post),
                Route("/config", self.config, methods=post),
            ],
            exception_handlers={InputError: _problems},  # type: ignore[dict-item]
        )

    # --- the page -----------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        template = templates().from_string((HERE / "page.html.j2").read_text(encoding="utf-8"))
        text = template.render(
            text=self.text, models=model_names(), hardware=names("hardware_profiles"), version=__version__
        )
        return Response(text, media_type="text/html; charset=utf-8")

    async def style(self, request: Request) -> Response:
        return Response(templates().get_template("report.css.j2").render(), media_type="text/css")

    # --- answers ------------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        """The first answer to a text, or to a text and changes of it; then what is found out about it."""
        body = await _body(request)
        began = time.perf_counter()
        text, pin = str(body.get("text", "")), body.get("pin")
        pin = pin if isinstance(pin, str) else None
        changes = body.get("changes") or []
        async with self.one:
            found = await asyncio.to_thread(self._first, text, changes, pin)
        found["took_ms"] = round(1e3 * (time.perf_counter() - began), 1)
        if "errors" in found:
            return JSONResponse(found)
        arguments = {"text": found["text"], "near": self.near, "pin": pin, "points": _points(body.get("points"))}
        return Streamed(self._then(found, "refine", arguments))

    def _first(self, text: str, changes: Any, pin: str | None) -> dict[str, Any]:
        """Everything that a first look at the changed text says. A change that cannot be leaves the text as it would
        be, so that the page shows what is wrong with it."""
        try:
            for change in changes if isinstance(changes, list) else [None]:
                if not isinstance(change, dict) or not isinstance(change.get("key"), str):
                    raise InputError(f"{WHERE}: changes: each must be a mapping with key and value")
                text = self._changed(text, change["key"], change.get("value"))
            scenario = scenario_of(text, self.near)
            began = time.perf_counter()
            brief, result = first_look(scenario, self.most)
            took = time.perf_counter() - began
            groups = controls(scenario, read(text), dict(vars(result.engine)))
            self._last = text, groups
            count, asked = len(result.requests), scenario.workload.num_requests
            brief["other"] = self._first_of(pin) if pin is not None else None
            found = {
                "text": text,
                "controls": _values(groups),
                "alone": text_alone(read(text), groups),
                "inputs": _inputs(tuple((name, tuple(c.bare() for c in group)) for name, group in groups if group)),
                "head": head_of(brief),
                "parts": parts_at_a_glance(brief),
                "stage": f"first look at {count:,} of {asked:,} requests"
                if asked
                else f"first look at {count:,} requests",
            }
        except InputError as error:
            return {"text": text, "errors": error.problems}
        if took > SLOW:
            self.most = max(LEAST, self.most // 2)
        elif took < QUICK:
            self.most = min(MOST, self.most * 2)
        return found

    def _changed(self, text: str, key: str, value: Any) -> str:
        if key in LOADED:
            return set_key(text, key, value, self.near)
        for name, new in changes_of(self._groups(text), key, value):
            text = set_key(text, name, new, self.near)
        return text

    def _groups(self, text: str) -> list[Group]:
        """The inputs of a text; the last ones are remembered, since the next change is one of them."""
        if self._last is None or self._last[0] != text:
            try:
                self._last = text, controls(scenario_of(text, self.near), read(text))
            except InputError:  # the text is wrong as it stands: the inputs are those of before, and one may mend it
                if self._last is None:
                    raise
        return self._last[1]

    def _first_of(self, pin: str) -> dict[str, Any] | None:
        """What the pinned text's first requests say."""
        if (pin, self.most) not in self._pinned:
            self._pinned.clear()
            try:
                brief = first_look(scenario_of(pin, self.near), self.most)[0]
            except InputError:
                return None
            self._pinned[pin, self.most] = {"metrics": brief["answer"]["metrics"], "cost": brief["cost"]}
        return self._pinned[pin, self.most]

    async def _then(
        self, first: dict[str, Any], kind: str, arguments: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        yield first
        await asyncio.sleep(REST)
        async with contextlib.aclosing(self.jobs.run(kind, arguments)) as messages:
            async for message in messages:
                yield message

    async def job(self, request: Request) -> Response:
        """A plan, a report, a measured run: its progress, and what came out."""
        body, kind = await _body(request), request.path_params["kind"]
        arguments: dict[str, Any] = {"text": str(body.get("text", "")), "near": self.near}
        if kind == "plan":
            arguments["asked"] = body.get("asked") or {}
        elif kind == "measured":
            arguments |= {"name": str(body.get("name", ""))[:200], "content": str(body.get("content", ""))}
        elif kind == "steps":
            at = body.get("at")
            if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e9:
                raise InputError(f"{WHERE}: at: must be a second of the run (got {str(at)[:40]})")
            arguments["at"] = float(at)
        elif kind != "report":
            return JSONResponse({"errors": [f"there is no {kind[:40]}"]}, 404)
        return Streamed(self.jobs.run(kind, arguments))

    async def config(self, request: Request) -> Response:
        """A model's config.json that was dropped or pasted becomes a file, which lasts as long as the studio."""
        body = await _body(request)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(body.get("name", "")))[:60].strip(".-") or "model"
        path = Path(self.folder.name) / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(body.get("content", "")), encoding="utf-8")
        load_model(path)
        return JSONResponse({"model": str(path.parent)})


def _points(sent: Any) -> list[dict[str, float]]:
    """Measured runs as the page keeps them: numbers by the names of metrics."""
    known = [each for each in sent if isinstance(each, dict)] if isinstance(sent, list) else []
    return [{str(key): value for key, value in each.items() if isinstance(value, int | float)} for each in known[:1000]]


def _values(groups: list[Group]) -> list[dict[str, Any]]:
    return [
        {"key": c.key, "value": c.value, "default": c.default, "given": c.given, "low": getattr(c, "low", 0),
         "high": getattr(c, "high", 0)}
        for _, group in groups
        for c in group
    ]  # fmt: skip


@functools.lru_cache(maxsize=16)
def _inputs(groups: tuple[tuple[str, tuple[Control, ...]], ...]) -> str:
    """The inputs as a piece of the page, without their values, so that the page knows when others are needed."""
    return str(_macros().inputs(groups))


@functools.cache
def _macros() -> Any:
    return templates().from_string((HERE / "inputs.html.j2").read_text(encoding="utf-8")).module


class Streamed(Response):
    """Lines of JSON as they come; when the page has gone, what makes them is closed."""

    def __init__(self, messages: AsyncGenerator[dict[str, Any], None]):
        super().__init__(media_type="application/x-ndjson")
        self.messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            while True:
                message = asyncio.ensure_future(anext(self.messages, None))
                await asyncio.wait({gone, message}, return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    message.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await message
                    return
                if (line := message.result()) is None:
                    break
                await send({"type": "http.response.body", "body": json.dumps(line).encode() + b"\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            await self.messages.aclose()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> dict[str, Any]:
    """The JSON mapping that was sent. InputError if it is none, or too large."""
    whole = bytearray()
    try:
        async for chunk in request.stream():
            whole += chunk
            if len(whole) > LARGEST_BODY:
                raise InputError(f"{WHERE}: larger than {LARGEST_BODY >> 20} MiB; must be smaller")
    except ClientDisconnect:
        return {}
    try:
        body = json.loads(bytes(whole))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise InputError(f"{WHERE}: the request must be a JSON object")
    return body


def _problems(request: Request, error: InputError) -> Response:
    return JSONResponse({"errors": error.problems}, 400)


TYPES = {".js": "text/javascript", ".css": "text/css"}
FILES = {"studio.js": HERE / "studio.js", "studio.css": HERE / "studio.css",
         "tables.js": Path(__file__).parents[2] / "report" / "tables.js"}  # fmt: skip


async def _file(path: Path, request: Request) -> Response:
    return Response(path.read_text(encoding="utf-8"), media_type=TYPES[path.suffix])


class Guarded:
    """Refuses names of the server that are not its own (DNS rebinding) and pages that are not its own (CSRF)."""

    def __init__(self, app: ASGIApp, hosts: set[str]):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        site = headers.get(b"sec-fetch-site", "none")
        wrong = ""
        if self.hosts and host not in self.hosts:
            wrong = "this is not the name of this server"
        elif (origin is not None and origin != f"http://{host}") or (
            scope["method"] != "GET" and site not in ("same-origin", "none")
        ):
            wrong = "requests of other pages are refused"
        elif scope["method"] == "POST" and not headers.get(b"content-type", "").startswith("application/json"):
            wrong = "must be application/json"
        if wrong:
            await Response(wrong, 403, media_type="text/plain")(scope, receive, send)
            return

        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cross-origin-resource-policy", b"same-origin"),
                ]
            await send(message)

        await self.app(scope, receive, with_policy)


def hosts_of(host: str, port: int) -> set[str]:
    """What a browser may call a server that listens there; empty: anything, where it listens to the whole network."""
    if host in ("0.0.0.0", "::"):
        return set()
    called = {host, "localhost", "127.0.0.1", "[::1]"} if host in ("127.0.0.1", "localhost", "::1") else {host}
    return {f"{name}:{port}" for name in called} | ({*called} if port == 80 else set())


def open_studio(text: str, near: Path | None, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until interrupted. InputError for what cannot be served."""
    try:
        import uvicorn
        import uvloop
    except ImportError as error:
        raise InputError(f"studio: needs the package {error.name}: pip install 'infersim[serve]'") from None
    from infersim.serve.server import listen

    sock = listen(host, port)
    actual = sock.getsockname()[1]
    studio = Studio(text, near)
    config = uvicorn.Config(
        Guarded(studio.routes, hosts_of(host, actual)),
        http="httptools",
        loop="none",
        log_level="critical",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
    )

    async def serve() -> None:
        asyncio.get_running_loop().run_in_executor(None, studio.jobs.warm)
        with contextlib.suppress(InputError):
            await asyncio.to_thread(first_look, scenario_of(text, near), LEAST)
        say(f"infersim studio at http://{host}:{actual}/ (Ctrl-C ends it)")
        await uvicorn.Server(config).serve(sockets=[sock])

    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(sock):
        uvloop.run(serve())
    studio.folder.cleanup()
