"""Other shapes of the same answer: OpenAI's /v1/responses and /v1/embeddings, Anthropic's /v1/messages."""

import base64
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from .protocol import ApiError, encode
from .reply import Choice, Reply


def event(kind: str, **body: Any) -> bytes:
    """A named server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind} | body) + b"\n\n"


def from_messages(body: dict[str, Any]) -> dict[str, Any]:
    """A request for Anthropic's messages as one for a chat. ApiError says what is wrong with it."""
    if body.get("max_tokens") is None:
        raise ApiError(400, "max_tokens: Field required", "max_tokens")
    messages, tools, choice = body.get("messages"), body.get("tools"), body.get("tool_choice")
    if body.get("system") and isinstance(messages, list):
        messages = [{"role": "system", "content": body["system"]}, *messages]
    more = {"messages": messages, "stream_options": None, "logprobs": None, "response_format": None}
    if isinstance(tools, list):
        more["tools"] = [{"type": "function", "function": one} for one in tools]
    if isinstance(choice, dict):
        named = {"function": {"name": choice.get("name")}}
        more["tool_choice"] = {"any": "required", "tool": named}.get(str(choice.get("type")))
    return body | more


def from_responses(body: dict[str, Any]) -> dict[str, Any]:
    """A request for OpenAI's responses as one for a chat. ApiError says what is wrong with it."""
    given, tools, text = body.get("input"), body.get("tools"), body.get("text")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise ApiError(400, "input must be a text or a list of items, at least one", "input")
    messages = [
        one if "content" in one else {"role": "tool", "content": str(one.get("output") or one.get("arguments") or "")}
        for one in given
    ]
    if isinstance(body.get("instructions"), str):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    more = {"messages": messages, "max_tokens": body.get("max_output_tokens"), "stream_options": None, "logprobs": None}
    if isinstance(tools, list):
        more["tools"] = [{"type": "function", "function": one} for one in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        more["tool_choice"] = {"function": {"name": choice.get("name")}}
    if isinstance(text, dict):
        more["response_format"] = text.get("format")
    return body | more


def from_embeddings(body: dict[str, Any]) -> dict[str, Any]:
    """A request for embeddings as one for a token each: what a prompt takes is computed. ApiError for a wrong one."""
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise ApiError(400, "encoding_format must be float or base64", "encoding_format")
    size = body.get("dimensions")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 65536):
        raise ApiError(400, "dimensions must be a whole number from 1 to 65536", "dimensions")
    return {"prompt": body.get("input"), "model": body.get("model"), "max_tokens": 1, "ignore_eos": True}


class MessagesReply(Reply):
    """Anthropic's message and its events."""

    def _usage(self) -> dict[str, int]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _block(self, text: str, **more: Any) -> dict[str, Any]:
        if self.ask.tool:
            return {"type": "tool_use", "id": f"toolu_{self.ask.id}", "name": self.ask.tool, "input": {}} | more
        return {"type": "text", "text": text}

    def _message(self, content: list, stop: str | None) -> dict[str, Any]:
        about = {"id": self.ask.id, "type": "message", "role": "assistant", "model": self.ask.model}
        return about | {"content": content, "stop_reason": stop, "stop_sequence": None, "usage": self._usage()}

    def _stop(self) -> str:
        ends = {"length": "max_tokens", "tool_calls": "tool_use"}
        return ends.get(str(self.choices[0].finish), "end_turn")

    def whole(self) -> bytes:
        text = self.text(self.choices[0], 0, self.choices[0].tokens)
        return encode(self._message([self._block(text, input={"text": text})], self._stop()))

    def chunks(self, choice: Choice, n: int) -> Iterator[bytes]:
        first = choice.tokens - n
        if not first:
            yield event("message_start", message=self._message([], None))
            yield event("content_block_start", index=0, content_block=self._block(""))
        text = self.text(choice, first, choice.tokens)
        delta = (
            {"type": "input_json_delta", "partial_json": text}
            if self.ask.tool
            else {"type": "text_delta", "text": text}
        )
        yield event("content_block_delta", index=0, delta=delta)

    def tail(self) -> bytes:
        end = {"stop_reason": self._stop(), "stop_sequence": None}
        return (
            event("content_block_stop", index=0)
            + event("message_delta", delta=end, usage=self._usage())
            + event("message_stop")
        )


class ResponsesReply(Reply):
    """OpenAI's response and its events, which are numbered."""

    _number = -1

    def _event(self, kind: str, **body: Any) -> bytes:  # type: ignore[override]
        self._number += 1
        return event(kind, sequence_number=self._number, **body)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        if self.ask.tool:
            call = {"type": "function_call", "id": f"fc_{self.ask.id}", "call_id": f"call_{self.ask.id}"}
            return call | {"name": self.ask.tool, "arguments": text, "status": status}
        part = [self._part(text)] if status != "in_progress" else []
        return {"type": "message", "id": f"msg_{self.ask.id}", "role": "assistant", "status": status, "content": part}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _response(self, status: str, output: list) -> dict[str, Any]:
        usage, ask = self.usage(), self.ask
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": ask.id,
            "object": "response",
            "created_at": ask.created,
            "model": ask.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": 1.0,
            "top_p": 1.0,
            "max_output_tokens": ask.max_tokens,
            "usage": counts if output else None,
            "kv_transfer_params": self.transfer,
        }

    def _ended(self) -> str:
        return "incomplete" if self.choices[0].finish == "length" else "completed"

    def _said(self) -> str:
        return self.text(self.choices[0], 0, self.choices[0].tokens)

    def whole(self) -> bytes:
        return encode(self._response(self._ended(), [self._item(self._said(), self._ended())]))

    def chunks(self, choice: Choice, n: int) -> Iterator[bytes]:
        first = choice.tokens - n
        item = self._item("", "in_progress")
        where = {"item_id": item["id"], "output_index": 0}
        if not first:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress", []))
            yield self._event("response.output_item.added", output_index=0, item=item)
            if not self.ask.tool:
                yield self._event("response.content_part.added", content_index=0, part=self._part(""), **where)
        text = self.text(choice, first, choice.tokens)
        if self.ask.tool:
            yield self._event("response.function_call_arguments.delta", delta=text, **where)
        else:
            yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[], **where)

    def tail(self) -> bytes:
        text, ended = self._said(), self._ended()
        item = self._item(text, ended)
        where = {"item_id": item["id"], "output_index": 0}
        if self.ask.tool:
            done = self._event("response.function_call_arguments.done", name=self.ask.tool, arguments=text, **where)
        else:
            done = self._event("response.output_text.done", content_index=0, text=text, logprobs=[], **where)
            done += self._event("response.content_part.done", content_index=0, part=self._part(text), **where)
        done += self._event("response.output_item.done", output_index=0, item=item)
        return done + self._event(f"response.{ended}", response=self._response(ended, [item]))


class EmbeddingsReply(Reply):
    """A vector of length 1 for each prompt, drawn from the prompt alone: equal texts are equal, others mean nothing."""

    size: int = 0
    as_text = False

    def whole(self) -> bytes:
        data, usage = [], self.usage()
        for choice in self.choices:
            random = np.random.default_rng(abs(hash(tuple(choice.prompt))) % 2**32)
            vector = random.standard_normal(self.size).astype("<f4")
            vector /= np.linalg.norm(vector)
            value = base64.b64encode(vector.tobytes()).decode() if self.as_text else vector.tolist()
            data.append({"object": "embedding", "index": choice.index, "embedding": value})
        prompt = usage["prompt_tokens"]
        about = {"id": self.ask.id, "object": "list", "created": int(time.time()), "model": self.ask.model}
        return encode(about | {"data": data, "usage": {"prompt_tokens": prompt, "total_tokens": prompt}})
