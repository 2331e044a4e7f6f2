"""The engines' own shapes beside OpenAI's: vLLM's /inference/v1/generate and SGLang's /generate."""

from collections.abc import Iterator
from typing import Any

from .protocol import ApiError, encode
from .reply import DONE, Choice, Reply


def from_vllm(body: dict[str, Any]) -> dict[str, Any]:
    """The same as a request for completions. ApiError says what is wrong with it."""
    ids = body.get("token_ids")
    if not isinstance(ids, list):
        raise ApiError(400, "token_ids must be a list of token ids", "token_ids")
    outside = {name: body.get(name) for name in ("model", "stream", "kv_transfer_params")}
    return _sampled(body, "sampling_params") | outside | {"prompt": ids}


def from_sglang(body: dict[str, Any]) -> dict[str, Any]:
    """The same as a request for completions. ApiError says what is wrong with it."""
    options = _sampled(body, "sampling_params")
    options["max_tokens"] = options.pop("max_new_tokens", 128)  # SGLang's default
    options["min_tokens"] = options.pop("min_new_tokens", None)
    prompt = body.get("input_ids") if body.get("text") is None else body.get("text")
    return options | {"prompt": prompt, "stream": body.get("stream"), "request_id": body.get("rid")}


def _sampled(body: dict[str, Any], name: str) -> dict[str, Any]:
    options = body.get(name)
    if options is not None and not isinstance(options, dict):
        raise ApiError(400, f"{name} must be an object", name)
    return dict(options or {})


class TokenReply(Reply):
    """Token ids alone, as vLLM's disaggregated front end wants them."""

    def whole(self) -> bytes:
        choices = [
            {"index": c.index, "token_ids": self.ids(c, 0, c.tokens), "logprobs": None, "finish_reason": c.finish}
            for c in self.choices
        ]
        body = {
            "request_id": self.ask.id,
            "choices": choices,
            "prompt_logprobs": None,
            "kv_transfer_params": self.transfer,
        }
        return encode(body)

    def chunks(self, choice: Choice, n: int) -> Iterator[bytes]:
        ids = self.ids(choice, choice.tokens - n, choice.tokens)
        one = {"index": choice.index, "token_ids": ids, "finish_reason": choice.finish}
        yield b"data: " + encode({"request_id": self.ask.id, "choices": [one]}) + b"\n\n"

    def tail(self) -> bytes:
        return DONE


class SglangReply(Reply):
    """Text so far and `meta_info`, as SGLang's own route has them; several prompts are a list."""

    def _one(self, choice: Choice) -> dict[str, Any]:
        row = choice.row.row if choice.row is not None else 0
        record = self.live.fleet.requests[row]
        ended = {"type": choice.finish}
        if choice.finish == "length":
            ended["length"] = choice.tokens  # type: ignore[assignment]
        meta = {
            "id": self.ask.id,
            "finish_reason": ended if choice.finish else None,
            "prompt_tokens": len(choice.prompt),
            "completion_tokens": choice.tokens,
            "cached_tokens": int(record["num_cached_tokens"]),
            "e2e_latency": choice.last - float(record["sent"]),
        }
        ids = self.ids(choice, 0, choice.tokens)
        return {"text": self.text(choice, 0, choice.tokens), "output_ids": ids, "meta_info": meta}

    def whole(self) -> bytes:
        found = [self._one(choice) for choice in self.choices]
        return encode(found if len(found) > 1 else found[0])

    def chunks(self, choice: Choice, n: int) -> Iterator[bytes]:
        index = {"index": choice.index} if len(self.choices) > 1 else {}
        yield b"data: " + encode(self._one(choice) | index) + b"\n\n"

    def tail(self) -> bytes:
        return DONE
