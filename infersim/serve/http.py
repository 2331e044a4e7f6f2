"""JSON in and out, and errors in OpenAI's form."""

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .protocol import ApiError, body_of, encode
from .reply import Reply

LARGEST_BODY = 16 * 2**20
MOST_READ = 256 * 2**20
"""bytes of bodies that are being read at one time"""
BODY_TIME = 60.0
"""s that a body may take to come"""
LARGEST_HEAD = 64 * 2**10


class Bounded(HttpToolsProtocol):
    """uvicorn's HTTP with a bound on what comes before a body: it keeps all of that in memory."""

    head: int | None = 0
    """bytes of it so far, None where a body comes or nothing"""

    def on_message_begin(self) -> None:
        self.head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.head = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        before = self.head
        super().data_received(data)
        if self.head is not None and self.head == before:
            self.head += len(data)
            if self.head > LARGEST_HEAD:
                self.transport.close()


class _Reading:
    size = 0


async def json_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request that is not too large, and does not take for ever to come."""
    length = request.headers.get("content-length", "")
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_TIME):
            if not length.isdecimal() or int(length) <= LARGEST_BODY:
                async for part in request.stream():
                    size += len(part)
                    _Reading.size += len(part)
                    parts.append(part)
                    if size > LARGEST_BODY or _Reading.size > MOST_READ:
                        break
        if size > LARGEST_BODY or (length.isdecimal() and int(length) > LARGEST_BODY):
            raise ApiError(413, f"the body must be at most {LARGEST_BODY} bytes")
        if _Reading.size > MOST_READ:
            raise ApiError(503, "too many bodies are being read", retry_after=1)
        return body_of(b"".join(parts))
    except TimeoutError:
        raise ApiError(408, f"the body did not come in {BODY_TIME:g} s") from None
    finally:
        _Reading.size -= size


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


def as_error(request: Request | None, error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return as_json(error.body, error.status, headers)


def as_anthropic(error: ApiError) -> Response:
    """The same in the form of Anthropic's messages."""
    kind = {404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "api_error")
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return as_json({"type": "error", "error": {"type": kind, "message": str(error)}}, error.status, headers)


async def no_route(request: Request, error: Any) -> Response:
    text = "Not Found" if error.status_code == 404 else "Method Not Allowed"
    with contextlib.suppress(AttributeError):
        text = error.detail
    return as_json(ApiError(error.status_code, text).body, error.status_code)


async def _gone(receive: Any) -> None:
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def watch(receive: Any, reply: Reply) -> asyncio.Task:
    """When the client goes away its reply ends."""

    def leave(task: asyncio.Task) -> None:
        if not task.cancelled():
            reply.leave()
            reply.wake()

    task = asyncio.ensure_future(_gone(receive))
    task.add_done_callback(leave)
    return task
