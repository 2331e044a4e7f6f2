"""JSON in and out, and errors in OpenAI's form."""

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .protocol import ApiError, body_of, encode
from .reply import Reply

LARGEST_BODY = 16 * 2**20


async def json_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request that is not too large."""
    length = request.headers.get("content-length", "")
    parts, size = [], int(length) if length.isdecimal() else 0
    if size <= LARGEST_BODY:
        size = 0
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            if size > LARGEST_BODY:
                break
    if size > LARGEST_BODY:
        raise ApiError(413, f"the body must be at most {LARGEST_BODY} bytes")
    return body_of(b"".join(parts))


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
