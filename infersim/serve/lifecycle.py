"""What an operator does to a server: pauses, sleeps, clears its cache, loads adapters; and who gets in when."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from .http import as_json, json_of
from .live import Live
from .protocol import ApiError
from .reply import Reply

MODES = ("abort", "wait", "keep")
"""of /pause: requests that run are ended, may end by themselves first, or stay as they are and go on"""


class Gate:
    """Who may send a request to the replicas now: nobody while they are paused or asleep; under cluster.admission as
    many as it lets in, the others in their order, up to its queue."""

    def __init__(self, live: Live):
        self.live, limit = live, live.scenario.cluster.admission
        self.limit = limit if limit and limit.max_outstanding else None
        self.open = asyncio.Event()
        self.open.set()
        self.paused = False
        self.granted = 0
        self.queue: deque[tuple[list[int], asyncio.Future]] = deque()
        live.freed = self.next
        for pool in live.roster.pools:  # autoscalers count who waits
            pool.queue = self.queue  # type: ignore[assignment]  # of which they only ask how long it is

    async def enter(self, replicas: list[int], came: float) -> float:
        """Waits until one of these replicas has room for a request that came at this simulated time (s), to which the
        fleet is then advanced, or to later if it had to wait. Returns when it came. ApiError 429: the queue is full."""
        came = self.live.now(came)
        if not self.open.is_set():
            await self.open.wait()
            self.live.now()
        if self.limit is not None and (self.queue or not self._room(replicas)):
            most = self.limit.max_queue
            if most is not None and len(self.queue) >= most:
                self.live.counts[replicas[0]].refused["max_num_queued_reqs"] += 1
                raise ApiError(429, f"the queue is full: {most} requests wait", retry_after=1)
            turn = self.live.loop.create_future()
            self.queue.append((replicas, turn))
            try:
                await turn
                self.live.now()
            finally:
                self.granted -= 1
        return came

    def refusal(self, replica: int, n: int) -> str | None:
        """The queue limit at which a replica refuses n more sequences (AsyncLLM.check_admission); None: it does not."""
        live = self.live
        limit, rows = live.scenario.cluster.admission, live.array(replica)
        if limit is None:
            return None
        if limit.max_num_queued_reqs is not None and len(rows) + n > limit.max_num_queued_reqs:
            return "max_num_queued_reqs"
        records = live.fleet.requests[rows]
        queued = int(records["prompt_tokens"][records["num_output_tokens"] == 0].sum())
        if limit.max_num_queued_tokens is not None and queued >= limit.max_num_queued_tokens:
            return "max_num_queued_tokens"
        return None

    def _room(self, replicas: list[int]) -> bool:
        assert self.limit is not None and self.limit.max_outstanding is not None  # checked by Live
        most = self.limit.max_outstanding
        held = sum(min(len(self.live.rows[r]), most) for r in replicas if self.live.ready(r))
        there = sum(most for r in replicas if self.live.ready(r))
        return held + self.granted < there

    def next(self) -> None:
        """A request has ended: who waits longest comes in."""
        while self.queue and self._room(self.queue[0][0]):
            _, turn = self.queue.popleft()
            self.granted += 1
            turn.set_result(None)

    def close(self, paused: bool) -> None:
        """Nobody gets in until `reopen`."""
        self.paused = self.paused or paused
        self.open.clear()

    def reopen(self, paused: bool) -> None:
        """Ends a pause, or a sleep."""
        if paused:
            self.paused = False
        if not self.paused and not self.live.asleep:
            self.open.set()


class Lifecycle:
    """vLLM's routes for operators. replies: what is being answered, by the request's id."""

    def __init__(self, live: Live, gate: Gate, replies: dict[str, Reply]):
        self.live, self.gate, self.replies = live, gate, replies

    def routes(self) -> list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]]:
        """Path, handler, methods."""
        return [
            ("/pause", self.pause, ["POST"]),
            ("/resume", self.resume, ["POST"]),
            ("/is_paused", self.is_paused, ["GET"]),
            ("/sleep", self.sleep, ["POST"]),
            ("/wake_up", self.wake_up, ["POST"]),
            ("/is_sleeping", self.is_sleeping, ["GET"]),
            ("/abort_requests", self.abort, ["POST"]),
            ("/reset_prefix_cache", self.reset, ["POST"]),
            ("/flush_cache", self.reset, ["GET", "POST"]),
            ("/v1/load_lora_adapter", self.load_adapter, ["POST"]),
            ("/v1/unload_lora_adapter", self.unload_adapter, ["POST"]),
        ]

    def _end(self, ids: list[str] | None = None) -> None:
        for name in [*self.replies] if ids is None else [one for one in ids if one in self.replies]:
            self.replies[name].cancel()

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in MODES:
            raise ApiError(400, f"mode must be one of {', '.join(MODES)} (got {mode[:20]})", "mode")
        self.gate.close(paused=True)
        if mode == "abort":
            self._end()
        while mode == "wait" and self.live.num_live:
            await asyncio.sleep(0.01)
        return as_json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.gate.reopen(paused=True)
        return as_json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return as_json({"is_paused": self.gate.paused})

    async def sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise ApiError(400, f"level must be 1 or 2 (got {level[:20]})", "level")
        self.live.asleep = int(level)
        self.gate.close(paused=False)
        self._end()
        self.live.now()
        self.live.roster.forget()
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        self.live.asleep = 0
        self.gate.reopen(paused=False)
        return Response(status_code=200)

    async def is_sleeping(self, request: Request) -> Response:
        return as_json({"is_sleeping": bool(self.live.asleep)})

    async def abort(self, request: Request) -> Response:
        ids = (await json_of(request)).get("request_ids")
        if not isinstance(ids, list):
            raise ApiError(400, "request_ids must be a list of ids", "request_ids")
        self._end([str(one) for one in ids])
        return Response(status_code=200)

    async def reset(self, request: Request) -> Response:
        """A replica that has requests keeps its cache, as vLLM's does."""
        self.live.now()
        self.live.roster.forget()
        return Response(status_code=200)

    async def load_adapter(self, request: Request) -> Response:
        body = await json_of(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not name or not isinstance(path, str) or not path or not name.isprintable():
            raise ApiError(400, "lora_name and lora_path must be texts", "lora_name")
        if name in self.live.adapters or name in self.live.models:
            raise ApiError(400, f"The lora adapter '{name[:100]}' has already been loaded.", "lora_name")
        if len(self.live.adapters) >= MOST_ADAPTERS:
            raise ApiError(400, f"at most {MOST_ADAPTERS} adapters", "lora_name")
        self.live.adapters[name] = path
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        name = (await json_of(request)).get("lora_name")
        if not isinstance(name, str) or self.live.adapters.pop(name, None) is None:
            raise ApiError(404, f"The lora adapter '{str(name)[:100]}' cannot be found.", "lora_name")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


MOST_ADAPTERS = 1000
