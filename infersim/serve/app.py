"""The routes: vLLM's, and /simulate/* for what no engine has."""

import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infersim import __version__
from infersim.engine.compiled.state import REJECTION_REASONS
from infersim.explain.summary import summarize
from infersim.report.files import to_json

from .ask import Ask
from .clock import Clock
from .exposition import exposition
from .http import as_error, as_json, json_of, no_route, watch
from .lifecycle import Gate, Lifecycle
from .live import Live
from .native import SglangReply, TokenReply, from_sglang, from_vllm
from .outcome import result
from .protocol import ApiError, Generation, clean_id, encode, generation_of, messages_of, prompts_of
from .reply import Reply
from .text import Tokenizer, names_of

MOST_LIVE = 20_000  # requests at one time
SEND = "infersim.send"
STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class Endpoint:
    """A fleet behind HTTP. base_port: replica r answers on port base_port + r; None: one port, infersim's router."""

    def __init__(self, live: Live, tokenizer: Tokenizer, base_port: int | None):
        self.live, self.tokenizer, self.base_port = live, tokenizer, base_port
        self.ids = itertools.count(1)
        self.error_rate, self.error_status = 0.0, 500
        self.replies: dict[str, Reply] = {}
        self.gate = Gate(live)
        self.lifecycle = Lifecycle(live, self.gate, self.replies)
        self._random = random.Random(live.scenario.simulation.seed)
        get, post = ["GET"], ["POST"]
        routes: list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]] = [
            ("/health", self.health, get),
            ("/ping", self.health, ["GET", "POST"]),
            ("/health_generate", self.health, get),
            ("/version", self.version, get),
            ("/v1/models", self.models, get),
            ("/metrics", self.metrics, get),
            ("/load", self.load, get),
            ("/kv_event_sources", self.kv_event_sources, get),
            ("/server_info", self.server_info, get),
            ("/v1/completions", self.completions, post),
            ("/v1/chat/completions", self.chat, post),
            ("/inference/v1/generate", self.tokens, post),
            ("/generate", self.sglang, post),
            ("/get_server_info", self.server_info, get),
            ("/get_model_info", self.model_info, get),
            ("/model_info", self.model_info, get),
            ("/tokenize", self.tokenize, post),
            ("/detokenize", self.detokenize, post),
            ("/v1/completions/render", self.render, post),
            ("/v1/chat/completions/render", self.render_chat, post),
            ("/start_profile", self.nothing, post),
            ("/stop_profile", self.nothing, post),
            *self.lifecycle.routes(),
            ("/simulate/state", self.state, get),
            ("/simulate/result", self.result, get),
            ("/simulate/crash", self.crash, post),
            ("/simulate/slow", self.slow, post),
            ("/simulate/errors", self.errors, post),
            ("/simulate/speed", self.speed, post),
        ]
        self._routes = Starlette(
            routes=[Route(path, handler, methods=methods) for path, handler, methods in routes],
            exception_handlers={
                ApiError: as_error,  # type: ignore[dict-item]  # a handler of one kind of error
                404: no_route,
                405: no_route,
            },
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's entry. The server's own `send` is kept at hand: for a token, what is wrapped around it counts."""
        scope[SEND] = send
        await self._routes(scope, receive, send)

    # --- who is asked -------------------------------------------------------------------------------------------------

    def _replicas(self, request: Request) -> list[int]:
        """The replicas behind the port that was asked."""
        if self.base_port is None:
            return list(range(len(self.live.deployments)))
        return [request.scope["server"][1] - self.base_port]

    # --- about the server ---------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        if any(self.live.ready(r) for r in self._replicas(request)):
            return Response(status_code=200)
        raise ApiError(503, "the replica is starting", retry_after=1)

    async def version(self, request: Request) -> Response:
        engine = self.live.deployments[self._replicas(request)[0]].engine.preset
        return as_json({"version": engine.partition("-")[2], "engine": engine, "infersim": __version__})

    async def models(self, request: Request) -> Response:
        cards = {}
        for r in self._replicas(request):
            name = self.live.models[r]
            cards[name] = {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "root": self.live.deployments[r].model.name,
                "parent": None,
                "max_model_len": self.live.deployments[r].engine.max_model_len,
                "permission": [],
            }
        first = next(iter(cards.values()))
        loras = [first | {"id": name, "root": path, "parent": first["id"]} for name, path in self.live.adapters.items()]
        return as_json({"object": "list", "data": [*cards.values(), *loras]})

    async def metrics(self, request: Request) -> Response:
        self.live.now()
        page = exposition(self.live, self._replicas(request))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(self, request: Request) -> Response:
        return as_json({"server_load": sum(len(self.live.rows[r]) for r in self._replicas(request))})

    async def kv_event_sources(self, request: Request) -> Response:
        events = self.live.events
        return as_json(events.sources(self._replicas(request)) if events else {})

    async def server_info(self, request: Request) -> Response:
        return as_json({"scenario": self.live.scenario.resolved(), "infersim": __version__})

    async def model_info(self, request: Request) -> Response:
        r = self._replicas(request)[0]
        path = self.live.deployments[r].model.name
        return as_json({"model_path": path, "tokenizer_path": path, "is_generation": True})

    async def nothing(self, request: Request) -> Response:
        return Response(status_code=200)

    # --- tokens -------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await json_of(request)
        chat = "messages" in body
        ids = messages_of(body, self.tokenizer) if chat else prompts_of(body.get("prompt"), self.tokenizer)[0]
        longest = self.live.deployments[self._replicas(request)[0]].engine.max_model_len
        return as_json({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        ids = (await json_of(request)).get("tokens")
        return as_json({"prompt": self.tokenizer.decode(prompts_of(ids, self.tokenizer)[0])})

    async def render(self, request: Request) -> Response:
        prompts = prompts_of((await json_of(request)).get("prompt"), self.tokenizer)
        return as_json([{"token_ids": ids} for ids in prompts])

    async def render_chat(self, request: Request) -> Response:
        return as_json({"token_ids": messages_of(await json_of(request), self.tokenizer)})

    # --- text ---------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, await json_of(request))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, await json_of(request), chat=True)

    async def tokens(self, request: Request) -> Response:
        return await self._generate(request, from_vllm(await json_of(request)), shape=TokenReply)

    async def sglang(self, request: Request) -> Response:
        return await self._generate(request, from_sglang(await json_of(request)), shape=SglangReply)

    async def _generate(
        self, request: Request, body: dict[str, Any], chat: bool = False, shape: type[Reply] = Reply
    ) -> Response:
        headers, kind = request.headers, "chatcmpl" if chat else "cmpl"
        self._inject(headers.get("x-return-error"))
        given = clean_id(headers.get("x-request-id") or str(body.get("request_id") or ""))
        request_id = f"{kind}-{given or next(self.ids)}"
        ask = generation_of(body, chat, self.tokenizer, request_id, headers.get("x-session-id", ""))
        replicas = self._replicas(request)
        names = {self.live.models[r] for r in replicas} | self.live.adapters.keys()
        if ask.model and ask.model not in names:
            raise ApiError(404, f"The model `{ask.model[:200]}` does not exist.", "model")
        ask.model = ask.model or self.live.models[replicas[0]]
        if self.live.num_live + ask.n * len(ask.prompts) > MOST_LIVE:
            raise ApiError(503, f"{MOST_LIVE} requests are being served", retry_after=1)
        came = await self.gate.enter(replicas)
        reply = shape(self.live, ask, self.tokenizer)
        asks = self._asks(ask, came)
        self._submit(reply, asks, replicas)
        self.replies[ask.id] = reply
        return Streamed(reply, self) if ask.stream else await self._whole(reply, request)

    def _inject(self, header: str | None) -> None:
        """An error that was asked for."""
        if header:
            status = int(header) if header.isdecimal() and 400 <= int(header) <= 599 else 500
            raise ApiError(status, "this error was asked for by X-Return-Error")
        if self.error_rate and self._random.random() < self.error_rate:
            raise ApiError(self.error_status, "this error was asked for by /simulate/errors", retry_after=1)

    def _asks(self, ask: Generation, came: float) -> list[tuple[list[int], Ask]]:
        """What is asked of the engine: for each choice its prompt's ids and the request."""
        asks = []
        for ids in ask.prompts:
            names, lengths = names_of(ids, ask.salt or ask.model)
            for _ in range(ask.n):
                one = self._ask(ask, len(ids), came)
                one.names, one.lengths = names, lengths
                asks.append((ids, one))
        if ask.transfer:
            first, kept = asks[0][1], self.live.hand_over
            if kept is None:
                raise ApiError(400, "kv_transfer_params: the scenario has no prefill and decode pools")
            first.hold = bool(ask.transfer.get("do_remote_decode"))
            if ask.transfer.get("do_remote_prefill"):
                first.pull = str(ask.transfer.get("remote_request_id"))
                if first.pull not in kept.held:
                    raise ApiError(500, "KV load failure: no replica keeps the blocks of remote_request_id")
        return asks

    def _submit(self, reply: Reply, asks: list[tuple[list[int], Ask]], replicas: list[int]) -> None:
        live = self.live
        for ids, one in asks:
            replica, begin = replicas[0], live.submit
            if self.base_port is None and len(replicas) > 1:
                live.now()
                chosen = None
                if live.door.hands_over and not reply.ask.transfer:
                    chosen, begin = live.choose(one, prefill=True), live.relay
                if chosen is None:
                    chosen, begin = live.choose(one), live.submit
                replica = -1 if chosen is None else chosen
            if replica < 0 or not live.ready(replica):
                reply.leave()
                raise ApiError(503, "no replica is there", retry_after=1)
            choice = reply.add(ids)
            choice.row = begin(one, replica, reply.listener(choice), reply.all_ids(choice))

    def _base(self, model: str) -> str:
        """The model itself, or that of an adapter: the first there is."""
        return self.live.models[0] if model in self.live.adapters else model

    def _ask(self, ask: Generation, prompt: int, came: float) -> Ask:
        longest = min(
            d.engine.max_model_len
            for d, name in zip(self.live.deployments, self.live.models, strict=True)
            if name == self._base(ask.model)
        )
        most = longest - prompt if ask.max_tokens is None else ask.max_tokens
        if most < 1 or prompt + most > longest:
            wanted = f" and {ask.max_tokens} of output" if ask.max_tokens is not None else ""
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens; the request has {prompt} of prompt{wanted}.",
                "prompt" if prompt >= longest else "max_tokens",
            )
        if ask.output_tokens is not None:
            output = min(ask.output_tokens, most)
        else:
            exact = ask.ignore_eos or ask.min_tokens == most
            output = self.live.output_tokens(most, ask.min_tokens, exact)
        held = came if self.gate.limit else None
        more = {"priority": ask.priority, "session": ask.session, "model": ask.model, "salt": ask.salt}
        more["base"] = self._base(ask.model)
        return Ask(prompt, output, most, came=held, **more)  # type: ignore[arg-type]

    async def _whole(self, reply: Reply, request: Request) -> Response:
        """The answer in one piece, unless the client goes away before."""
        gone = watch(request.receive, reply)
        try:
            await reply.wait()
        finally:
            gone.cancel()
            self.leave(reply)
        if reply.failed:
            raise self.failure(reply)
        if reply.open:
            return Response(status_code=499)  # gone
        self.live.clock.sent(reply.due)
        return Response(reply.whole(), media_type="application/json", headers={"x-request-id": reply.ask.id})

    def leave(self, reply: Reply) -> None:
        """Nobody waits for it any more."""
        reply.leave()
        self.replies.pop(reply.ask.id, None)

    def failure(self, reply: Reply) -> ApiError:
        """Why a reply cannot be given."""
        reasons = [self.live.reason(c.row.row) for c in reply.choices if c.row is not None]
        reason = next((one for one in reasons if one), 0)
        if reply.failed == "rejected":
            return ApiError(400, REJECTION_REASONS.get(reason, "the engine rejected it"))
        return ApiError(503, "the replica went away", retry_after=1)

    # --- what no engine has -------------------------------------------------------------------------------------------

    async def state(self, request: Request) -> Response:
        live = self.live
        time = live.now()
        replicas = []
        for r in self._replicas(request):
            running, waiting = live.queues(r)
            replicas.append(
                {
                    "replica": r,
                    "ready": live.ready(r),
                    "running": running,
                    "waiting": waiting,
                    "kv_usage": live.kv_usage(r),
                    "steps": int(live.fleet.replicas["num_steps"][r]),
                }
            )
        counts = {"live": live.num_live, "finished": live.finished, "aborted": live.aborted}
        return as_json(
            {
                "simulated_s": time,
                "speed": live.clock.speed,
                "prompts_are_counted": "exactly" if self.tokenizer.exact else "by an estimate: about 4 bytes a token",
                "requests": counts | {"lost": len(live.lost_rows)},
                "lateness": live.clock.lateness(),
                "replicas": replicas,
            }
        )

    async def result(self, request: Request) -> Response:
        found = result(self.live)
        if found is None:
            raise ApiError(404, "nothing has come yet")
        return Response(to_json(summarize([found])), media_type="application/json")

    async def crash(self, request: Request) -> Response:
        body = await json_of(request)
        lost = self.live.crash(self._of(body), _number(body, "duration", 0.0, 1e9, 60.0))
        return as_json({"lost": lost})

    async def slow(self, request: Request) -> Response:
        body = await json_of(request)
        self.live.slow(self._of(body), _number(body, "factor", 1.0, 1e6, 2.0))
        return as_json({})

    async def errors(self, request: Request) -> Response:
        body = await json_of(request)
        self.error_rate = _number(body, "rate", 0.0, 1.0, 0.0)
        self.error_status = int(_number(body, "status", 400, 599, 500))
        return as_json({"rate": self.error_rate, "status": self.error_status})

    async def speed(self, request: Request) -> Response:
        self.live.change_speed(_number(await json_of(request), "speed", 1e-3, 1e6, 1.0))
        return as_json({"speed": self.live.clock.speed})

    def _of(self, body: dict) -> int:
        return int(_number(body, "replica", 0, len(self.live.deployments) - 1, 0))


class Streamed(Response):
    """An answer as server-sent events: a chunk for each step, written as the step ends."""

    def __init__(self, reply: Reply, endpoint: Endpoint):
        self.reply, self.endpoint = reply, endpoint
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reply, clock = self.reply, self.endpoint.live.clock
        gone = watch(receive, reply)
        events = Events(reply, clock, scope.get(SEND, send))
        try:
            while reply.open and not reply.gone:
                await events.flow()
            if reply.gone:
                return
            if reply.failed and not events.begun:
                await as_error(None, self.endpoint.failure(reply))(scope, receive, send)
                return
            if reply.failed:
                await events.send(_part(b"data: " + encode(self.endpoint.failure(reply).body) + b"\n\n"))
            await events.send({"type": "http.response.body", "body": reply.tail(), "more_body": False})
        finally:
            gone.cancel()
            self.endpoint.leave(reply)


class Events:
    """A reply's events, sent from where they come up: waking a task for each would take longer than they do."""

    def __init__(self, reply: Reply, clock: Clock, send: Any):
        self.reply, self.clock, self.send = reply, clock, send
        self.begun = False
        self._stopped: list[Stopped] = []
        """calls of `send` that wait for a client which reads too slowly"""

    async def flow(self) -> None:
        """Lets events through until one has to wait, or there are no more; what had to wait then goes out."""
        self.reply.write = self._write
        await self.reply.wait()
        self.reply.write = None
        for call in self._stopped:
            await call
        self._stopped.clear()
        for data in self.reply.held_back():
            await self.send(_part(data))
            self.clock.sent(self.reply.due)

    def _write(self, data: bytes, due: float) -> None:
        if not self.begun:
            self.begun = True
            headers = [*STREAM, (b"x-request-id", self.reply.ask.id.encode())]
            self._start({"type": "http.response.start", "status": 200, "headers": headers})
        self._start(_part(data))
        self.clock.sent(due)

    def _start(self, message: dict[str, Any]) -> None:
        call = self.send(message)
        try:
            self._stopped.append(Stopped(call, call.send(None)))
        except StopIteration:
            return
        self.reply.write = None
        self.reply.wake()


class Stopped:
    """A call that has begun, to be awaited: `future` is what it waits for first."""

    def __init__(self, call: Any, future: Any):
        self.call, self.future = call, future

    def __await__(self) -> Any:
        future = self.future
        while True:
            yield future
            try:
                future = self.call.send(None)
            except StopIteration:
                return


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _number(body: dict, name: str, least: float, most: float, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a number from {least:g} to {most:g} (got {str(value)[:50]})", name)
    return value
