"""The routes: vLLM's, and /simulate/* for what no engine has."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from infersim import __version__

from .ask import Ask, Outputs
from .dialects import EmbeddingsReply, MessagesReply, ResponsesReply, from_embeddings, from_messages, from_responses
from .exposition import exposition
from .faults import Faults
from .http import as_anthropic, as_error, as_json, json_of, no_route, watch
from .lifecycle import Gate, Lifecycle
from .live import Live
from .native import SglangReply, TokenReply, from_sglang, from_vllm
from .protocol import ApiError, Generation, clean_id, generation_of, messages_of, prompts_of
from .reply import Reply
from .stream import CAME, SEND, Streamed, failure
from .text import Tokenizer, names_of

MOST_LIVE = 20_000  # requests at one time
SEPARATORS = {"resp": "_", "msg": "_"}
"""between an id's kind and the rest of it, where it is no dash"""


class Endpoint:
    """A fleet behind HTTP. base_port: replica r answers on port base_port + r; None: one port, infersim's router."""

    def __init__(self, live: Live, tokenizer: Tokenizer, base_port: int | None):
        self.live, self.tokenizer, self.base_port = live, tokenizer, base_port
        self.longest = max(d.engine.max_model_len for d in live.deployments)
        self.ids = itertools.count(1)
        self._outputs = Outputs(live.scenario)
        self.replies: dict[str, Reply] = {}
        self.gate = Gate(live)
        self.lifecycle = Lifecycle(live, self.gate, self.replies)
        self.faults = Faults(live, self._replicas, tokenizer.exact)
        get, post = ["GET"], ["POST"]
        routes: list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]] = [
            ("/health", self.health, get),
            ("/ping", self.health, ["GET", "POST"]),
            ("/health/ready", self.health, get),
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
            ("/v1/responses", self.responses, post),
            ("/v1/messages", self.messages, post),
            ("/v1/messages/count_tokens", self.count_tokens, post),
            ("/v1/embeddings", self.embeddings, post),
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
            *self.faults.routes(),
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
        """ASGI's entry. When a request came is before it was read, which a real server's own times have in them."""
        scope[SEND], scope[CAME] = send, self.live.clock.now()
        await self._routes(scope, receive, send)

    # --- who is asked -------------------------------------------------------------------------------------------------

    def _replicas(self, request: Request) -> list[int]:
        """The replicas behind the port that was asked."""
        if self.base_port is None:
            return list(range(len(self.live.deployments)))
        return [request.scope["server"][1] - self.base_port]

    # --- about the server ---------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        if not any(self.live.ready(r) for r in self._replicas(request)):
            raise ApiError(503, "no replica is there", retry_after=1)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        engine = self.live.deployments[self._replicas(request)[0]].engine.preset
        return as_json({"version": engine.partition("-")[2], "engine": engine, "infersim": __version__})

    async def models(self, request: Request) -> Response:
        await self.health(request)
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
        ids = (
            messages_of(body, self.tokenizer, self.longest)
            if chat
            else prompts_of(body.get("prompt"), self.tokenizer, self.longest)[0]
        )
        longest = self.live.deployments[self._replicas(request)[0]].engine.max_model_len
        return as_json({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        ids = (await json_of(request)).get("tokens")
        return as_json({"prompt": self.tokenizer.decode(prompts_of(ids, self.tokenizer, self.longest)[0])})

    async def render(self, request: Request) -> Response:
        prompts = prompts_of((await json_of(request)).get("prompt"), self.tokenizer, self.longest)
        return as_json([{"token_ids": ids} for ids in prompts])

    async def render_chat(self, request: Request) -> Response:
        return as_json({"token_ids": messages_of(await json_of(request), self.tokenizer, self.longest)})

    # --- text ---------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, await json_of(request), "cmpl")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, await json_of(request), "chatcmpl")

    async def tokens(self, request: Request) -> Response:
        return await self._generate(request, from_vllm(await json_of(request)), "cmpl", TokenReply)

    async def sglang(self, request: Request) -> Response:
        return await self._generate(request, from_sglang(await json_of(request)), "cmpl", SglangReply)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, from_responses(await json_of(request)), "resp", ResponsesReply)

    async def messages(self, request: Request) -> Response:
        try:
            return await self._generate(request, from_messages(await json_of(request)), "msg", MessagesReply)
        except ApiError as error:
            return as_anthropic(error)

    async def count_tokens(self, request: Request) -> Response:
        try:
            body = from_messages(await json_of(request) | {"max_tokens": 1})
            return as_json({"input_tokens": len(messages_of(body, self.tokenizer, self.longest))})
        except ApiError as error:
            return as_anthropic(error)

    async def embeddings(self, request: Request) -> Response:
        body = await json_of(request)
        size = self.live.deployments[self._replicas(request)[0]].model.hidden_size

        of = {"size": body.get("dimensions") or size, "as_text": body.get("encoding_format") == "base64"}
        return await self._generate(request, from_embeddings(body), "embd", type("Shaped", (EmbeddingsReply,), of))

    async def _generate(
        self, request: Request, body: dict[str, Any], kind: str, shape: type[Reply] = Reply
    ) -> Response:
        headers, chat = request.headers, kind in ("chatcmpl", "resp", "msg")
        self.faults.inject(headers.get("x-return-error"))
        given = clean_id(headers.get("x-request-id") or str(body.get("request_id") or ""))
        request_id = f"{kind}{SEPARATORS.get(kind, '-')}{given or next(self.ids)}"
        if request_id in self.replies:  # two of the same name at one time
            request_id += f"-{next(self.ids)}"
        ask = generation_of(body, chat, self.tokenizer, self.longest, request_id, headers.get("x-session-id", ""))
        replicas = self._replicas(request)
        names = {self.live.models[r] for r in replicas} | self.live.adapters.keys()
        if ask.model and ask.model not in names:
            raise ApiError(404, f"The model `{ask.model[:200]}` does not exist.", "model")
        ask.model = ask.model or self.live.models[replicas[0]]
        if self.live.num_live + ask.n * len(ask.prompts) > MOST_LIVE:
            raise ApiError(503, f"{MOST_LIVE} requests are being served", retry_after=1)
        came = await self.gate.enter(replicas, request.scope[CAME])
        reply = shape(self.live, ask, self.tokenizer)
        asks = self._asks(ask, came)
        if (rank := headers.get("x-data-parallel-rank", "")).isdecimal():
            ranks = min(int(self.live.fleet.knobs["ranks"][r]) for r in replicas)
            if int(rank[:9]) >= ranks:
                raise ApiError(400, f"X-data-parallel-rank must be from 0 to {ranks - 1} (got {rank[:20]})")
            for _, one in asks:
                one.rank = int(rank)
        self._submit(reply, asks, replicas)
        self.replies[ask.id] = reply
        return Streamed(reply, self.leave) if ask.stream else await self._whole(reply, request)

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
                chosen = None
                if not reply.ask.transfer and live.hands_over(one):
                    chosen, begin = live.choose(one, prefill=True), live.relay
                if chosen is None:
                    chosen, begin = live.choose(one), live.submit
                replica = -1 if chosen is None else chosen
            if replica < 0 or not live.ready(replica):
                reply.leave()
                raise ApiError(503, "no replica is there", retry_after=1)
            if limit := self.gate.refusal(replica, 1 if reply.choices else len(asks)):
                reply.leave()
                live.counts[replica].refused[limit] += 1
                raise ApiError(503, f"The engine is busy: {limit} is reached. Try again later.", retry_after=1)
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
            output = most if ask.ignore_eos or ask.min_tokens == most else self._outputs.draw(most, ask.min_tokens)
        held = came if self.gate.limit else None
        more = {"priority": ask.priority, "session": ask.session, "model": ask.model, "salt": ask.salt}
        more["base"] = self._base(ask.model)
        return Ask(prompt, output, most, came=held, **more)  # type: ignore[arg-type]

    async def _whole(self, reply: Reply, request: Request) -> Response:
        """The answer in one piece, unless the client goes away before."""
        gone = watch(request.receive, reply)
        try:
            await reply.wait()
            if reply.failed:
                raise failure(reply)
            if reply.open:
                return Response(status_code=499)  # gone
            self.live.clock.sent(reply.due)
            return Response(reply.whole(), media_type="application/json", headers={"x-request-id": reply.ask.id})
        finally:
            gone.cancel()
            self.leave(reply)

    def leave(self, reply: Reply) -> None:
        """Nobody waits for it any more. Its rows know it: without this only a collector of cycles would free it."""
        reply.leave()
        for choice in reply.choices:
            choice.row = None
        self.replies.pop(reply.ask.id, None)
