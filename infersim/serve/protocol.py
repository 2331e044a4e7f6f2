"""What clients send, checked, and the JSON of what they get."""

import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from .text import Tokenizer, chat_ids, content_of

MOST_CHOICES = 128
"""choices of one request, prompts times n"""
KINDS = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 429: "RateLimitError"}
JSON = b"application/json"
encode = msgspec.json.encode


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        kind = KINDS.get(status, "ServiceUnavailableError" if status == 503 else "InternalServerError")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass
class Generation:
    """One request for text, as far as it changes anything."""

    id: str
    model: str
    chat: bool
    prompts: list[list[int]]
    n: int
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stream_interval: int
    priority: int
    session: str
    salt: str
    logprobs: bool
    token_ids: bool
    echo: bool
    tool: str | None
    """the function that the answer calls"""
    json: bool
    """the answer is a JSON object"""
    output_tokens: int | None
    """vllm_xargs.output_tokens: exactly so many"""
    transfer: dict[str, Any]
    """kv_transfer_params"""
    created: int


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a request. ApiError for anything else."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _integer(body: dict, name: str, least: int, most: int, default: Any = None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a whole number from {least} to {most} (got {str(value)[:50]})", name)
    return value


def _flag(body: dict, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false (got {str(value)[:50]})", name)
    return value


def _object(body: dict, name: str) -> dict:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object", name)
    return value or {}


MOST = 2**31 - 1


def generation_of(
    body: dict, chat: bool, tokenizer: Tokenizer, most_tokens: int, request_id: str, session: str
) -> Generation:
    """A request of /v1/completions or /v1/chat/completions, whose prompts have at most so many tokens. ApiError says
    what is wrong with it."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError(400, "model must be a name", "model")
    options, extra = _object(body, "stream_options"), _object(body, "vllm_xargs")
    prompts = (
        [messages_of(body, tokenizer, most_tokens)] if chat else prompts_of(body.get("prompt"), tokenizer, most_tokens)
    )
    n = _integer(body, "n", 1, MOST, 1)
    if n * len(prompts) > MOST_CHOICES:
        raise ApiError(400, f"n x prompts must be at most {MOST_CHOICES} (got {n * len(prompts)})", "n")
    most = _integer(body, "max_completion_tokens", 1, MOST, _integer(body, "max_tokens", 1, MOST))
    least = _integer(body, "min_tokens", 0, MOST, 0)
    if most is None and not chat:
        most = 16  # OpenAI's default of completions
    if most is not None and least > most:
        raise ApiError(400, f"min_tokens must be at most max_tokens (got {least} and {most})", "min_tokens")
    logprobs = body.get("logprobs")
    form = _object(body, "response_format").get("type")
    return Generation(
        id=request_id,
        model=model or "",
        chat=chat,
        prompts=prompts,
        n=n,
        max_tokens=most,
        min_tokens=least,
        ignore_eos=_flag(body, "ignore_eos"),
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats"),
        stream_interval=_integer(body, "stream_interval", 1, MOST, 1),
        priority=_integer(body, "priority", -MOST, MOST, 0),
        session=str(body.get("session_id") or session),
        salt=str(body.get("cache_salt") or ""),
        logprobs=logprobs is not None and logprobs is not False,
        token_ids=_flag(body, "return_token_ids"),
        echo=_flag(body, "echo"),
        tool=_tool(body),
        json=form in ("json_object", "json_schema") or body.get("structured_outputs") is not None,
        output_tokens=_integer(extra, "output_tokens", 1, MOST),
        transfer=_object(body, "kv_transfer_params"),
        created=int(time.time()),
    )


def _check_size(size: int, tokenizer: Tokenizer, most_tokens: int) -> None:
    """ApiError for text of so many characters that needs no counting to be too long: that would take seconds."""
    if size > most_tokens * tokenizer.longest_token:
        raise ApiError(
            400,
            f"This model's maximum context length is {most_tokens} tokens; the request's text has {size} characters.",
            "prompt",
        )


def messages_of(body: dict, tokenizer: Tokenizer, most_tokens: int) -> list[int]:
    """Token ids of a chat."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ApiError(400, "messages must be a list of messages, at least one", "messages")
    tools = encode(body["tools"]).decode() if body.get("tools") else ""
    _check_size(len(tools) + sum(len(content_of(one)) for one in messages), tokenizer, most_tokens)
    return tokenizer.encode(tools) + chat_ids(messages, tokenizer)


def _is_ids(value: Any) -> bool:
    return bool(value) and all(type(one) is int and 0 <= one < 2**62 for one in value)


def prompts_of(prompt: Any, tokenizer: Tokenizer, most_tokens: int) -> list[list[int]]:
    """Token ids of each prompt: a text, token ids, or a list of either."""
    for one in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(one, str):
            _check_size(len(one), tokenizer, most_tokens)
    if isinstance(prompt, str) and prompt:
        return [tokenizer.encode(prompt)]
    if isinstance(prompt, list) and _is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and 0 < len(prompt) <= MOST_CHOICES:
        if all(isinstance(one, str) and one for one in prompt):
            return [tokenizer.encode(one) for one in prompt]
        if all(isinstance(one, list) and _is_ids(one) for one in prompt):
            return prompt
    raise ApiError(
        400, f"prompt must be a text, token ids, or a list of at most {MOST_CHOICES} of either, none empty", "prompt"
    )


def _tool(body: dict) -> str | None:
    choice, tools = body.get("tool_choice"), body.get("tools")
    names = [
        str(tool["function"].get("name"))
        for tool in (tools if isinstance(tools, list) else ())
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = str(choice["function"].get("name"))
        if name not in names:
            raise ApiError(400, f"tool_choice names {name[:50]}, which is not among the tools", "tool_choice")
        return name
    return names[0] if choice == "required" and names else None


_SAFE = re.compile(r"[^\w.:-]")


def clean_id(text: str) -> str:
    """An id of the client's that can stand in JSON and in a header."""
    return _SAFE.sub("", text)[:128]
