"""Server-sent events: a reply's chunks, written where their steps end."""

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from infersim.engine.compiled.state import REJECTION_REASONS

from .clock import Clock
from .http import as_error, watch
from .protocol import ApiError, encode
from .reply import Reply

SEND = "infersim.send"
"""the server's own `send` in a scope: for a token, what is wrapped around it counts"""
CAME = "infersim.came"
"""in a scope: when the request came (simulated s)"""
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def failure(reply: Reply) -> ApiError:
    """Why a reply cannot be given."""
    reasons = [reply.live.reason(c.row.row) for c in reply.choices if c.row is not None]
    reason = next((one for one in reasons if one), 0)
    if reply.failed == "rejected":
        return ApiError(400, REJECTION_REASONS.get(reason, "the engine rejected it"))
    return ApiError(503, "the replica went away", retry_after=1)


class Streamed(Response):
    """An answer as server-sent events: a chunk for each step, written as the step ends."""

    def __init__(self, reply: Reply, leave: Callable[[Reply], None]):
        """leave: is told when nobody waits for the reply any more."""
        self.reply, self._leave = reply, leave
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reply = self.reply
        gone = watch(receive, reply)
        events = Events(reply, reply.live.clock, scope.get(SEND, send))
        try:
            while reply.open and not reply.gone:
                await events.flow()
            if reply.gone:
                return
            if reply.failed and not events.begun:
                await as_error(None, failure(reply))(scope, receive, send)
                return
            if reply.failed:
                await events.send(_part(b"data: " + encode(failure(reply).body) + b"\n\n"))
            await events.send({"type": "http.response.body", "body": reply.tail(), "more_body": False})
        finally:
            gone.cancel()
            self._leave(reply)


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
        self._start({"type": "http.response.body", "body": data, "more_body": True})
        self.clock.sent(due)

    def _start(self, message: dict[str, Any]) -> None:
        call = self.send(message)
        try:
            future = call.send(None)
        except StopIteration:
            return
        self._stopped.append(Stopped(call, future))
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
