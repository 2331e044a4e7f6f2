"""One client's answer: choices whose tokens come from rows of the fleet, written as JSON or as a stream of events."""

import asyncio
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from .ask import Ids, Push, Row
from .live import Live
from .protocol import Generation, encode
from .text import Tokenizer

DONE = b"data: [DONE]\n\n"
GOES_ON = b'","logprobs":null,"finish_reason":null}]}\n\n'
CHAT_GOES_ON = b'"},"logprobs":null,"finish_reason":null}]}\n\n'


@lru_cache(maxsize=8)
def _escaped(words: tuple[str, ...]) -> list[bytes]:
    return [encode(word)[1:-1] for word in words]


class Choice:
    """One of the answers of a request. Tokens of its text are words in an order of their own."""

    __slots__ = ("finish", "first", "head", "held", "index", "last", "prompt", "row", "start", "tokens")

    def __init__(self, index: int, prompt: list[int], start: int):
        self.index, self.prompt, self.start = index, prompt, start
        self.tokens = 0
        self.held = 0
        """of these: not yet sent, under stream_interval"""
        self.finish: str | None = None
        self.row: Row | None = None
        self.first = self.last = -1.0
        self.head = b""
        """what its events begin with"""


class Reply:
    """What has come for one request, and what is to be sent. Raised as `failed` if a choice was lost."""

    def __init__(self, live: Live, ask: Generation, tokenizer: Tokenizer):
        self.live, self.ask, self.tokenizer = live, ask, tokenizer
        self.choices: list[Choice] = []
        self.open = 0
        self.failed: str | None = None
        self.gone = False
        self.transfer: dict[str, Any] | None = None
        """where the KV of its prompt is kept, if that was asked for"""
        self.due = 0.0
        """when the last tokens that came were due (simulated s)"""
        self.write: Callable[[bytes, float], None] | None = None
        """takes an event that was due at a simulated time; None while nobody can: then tokens wait"""
        self._waiting: dict[Choice, int] = {}
        """tokens that have come and are in no event yet"""
        self._waiter: asyncio.Future | None = None
        self._escaped = _escaped(tuple(tokenizer.words))

    def add(self, prompt: list[int]) -> Choice:
        """Another choice; `submit` of its row gets `listener(choice)`."""
        index = len(self.choices)
        choice = Choice(index, prompt, self.live.fleet.num_requests * 7 % len(self.tokenizer.words))
        self.choices.append(choice)
        self.open += 1
        return choice

    def listener(self, choice: Choice) -> Push:
        """What the choice's row tells of its tokens."""

        words, start, goes_on = self._escaped, choice.start, CHAT_GOES_ON if self.ask.chat else GOES_ON
        number, quick = len(words), self.ask.stream_interval <= 1

        def push(n: int, due: float, finish: str | None) -> None:
            if n == 1 and finish is None and quick and choice.head and (write := self.write) is not None:  # most are so
                i = choice.tokens
                choice.tokens, choice.last, self.due = i + 1, due, due
                write(choice.head + words[(start + i * i) % number] + goes_on, due)
                return
            if not choice.tokens:
                choice.first = due
            choice.tokens += n
            choice.last = self.due = due
            if finish is not None:
                self._end(choice, finish)
            if (write := self.write) is not None:
                for data in self.chunks(choice, n):
                    write(data, due)
            else:
                self._waiting[choice] = self._waiting.get(choice, 0) + n
            if self._waiter is not None and (not self.open or (self.ask.stream and self.write is None)):
                self.wake()

        return push

    def _end(self, choice: Choice, finish: str) -> None:
        if finish in ("abort", "rejected"):
            self.failed, self.open, self.write = finish, 0, None
            return
        ended = "abort" if finish == "cancelled" else finish
        choice.finish = "tool_calls" if self.ask.tool and ended != "abort" else ended
        self.open -= 1
        if self.ask.transfer.get("do_remote_decode") and ended != "abort" and self.live.hand_over and choice.row:
            self.transfer = self.live.hand_over.keep(f"{self.ask.id}-{choice.row.row}", choice.row.row)

    def wake(self) -> None:
        """Whoever waits looks again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """The server ends it: what there is of each choice is its answer, which finished with abort."""
        for choice in self.choices:
            if choice.row is not None and choice.finish is None:
                self.live.abort(choice.row)
                choice.row.push(0, self.live.until, "cancelled")

    def leave(self) -> None:
        """The client has gone."""
        self.gone = True
        self.write = None
        for choice in self.choices:
            if choice.row is not None and choice.finish is None:
                self.live.abort(choice.row)

    async def wait(self) -> None:
        """Until something is to be done: a first or a held-back event to send, an end, nobody to send to."""
        if not self._waiting and not self.gone and self.open:
            self._waiter = self.live.loop.create_future()
            await self._waiter
            self._waiter = None

    def held_back(self) -> Iterator[bytes]:
        """Events of the tokens that nobody could take when they came: one a choice, as vLLM merges them."""
        while self._waiting and not self.failed:
            yield from self.chunks(*self._waiting.popitem())

    # --- text ---------------------------------------------------------------------------------------------------------

    def words(self, choice: Choice, first: int, end: int) -> list[str]:
        """The texts of tokens first ... end - 1 of a choice."""
        words, start = self.tokenizer.words, choice.start
        return [words[(start + i * i) % len(words)] for i in range(first, end)]

    def ids(self, choice: Choice, first: int, end: int) -> list[int]:
        """Their ids."""
        ids, start = self.tokenizer.ids, choice.start
        return [ids[(start + i * i) % len(ids)] for i in range(first, end)]

    def all_ids(self, choice: Choice) -> Ids:
        """Of its prompt and what follows it, by position."""

        def between(first: int, end: int) -> list[int]:
            n = len(choice.prompt)
            return choice.prompt[first:end] + self.ids(choice, max(first - n, 0), max(end - n, 0))

        return between

    def text(self, choice: Choice, first: int, end: int) -> str:
        """What tokens first ... end - 1 say: words, in a JSON object if that is asked for."""
        text = "".join(self.words(choice, first, end))
        if self.ask.tool or self.ask.json:
            begin = '{"text":"' if not first else ""
            text = begin + text + ('"}' if choice.finish and end == choice.tokens else "")
        return text

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}
        prompt, out = sum(prompts.values()), sum(choice.tokens for choice in self.choices)
        requests = self.live.fleet.requests
        cached = sum(
            int(requests["num_cached_tokens"][choice.row.row])
            for choice in self.choices[:: self.ask.n]
            if choice.row is not None
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": out,
            "total_tokens": prompt + out,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def metrics(self) -> dict[str, Any] | None:
        """vLLM's per-request metrics of the first choice, in simulated milliseconds."""
        choice = self.choices[0]
        if choice.row is None or choice.first < 0:
            return None
        r = self.live.fleet.requests[choice.row.row]
        first, last, n = choice.first, choice.last, choice.tokens
        took = last - first
        asked = choice.row.asked
        return {
            "time_to_first_token_ms": (first - asked) * 1e3,
            "generation_time_ms": took * 1e3,
            "queue_time_ms": (float(r["scheduled"]) - asked) * 1e3,
            "mean_itl_ms": took / (n - 1) * 1e3 if n > 1 else None,
            "tokens_per_second": (n - 1) / took if took > 0 else None,
        }

    def _logprobs(self, choice: Choice, first: int, end: int) -> Any:
        """Valid, and of no meaning: every token is as likely as among the words there are."""
        if not self.ask.logprobs:
            return None
        words, value = self.words(choice, first, end), -math.log(len(self.tokenizer.words))
        if self.ask.chat:
            content = [
                {"token": word, "logprob": value, "bytes": list(word.encode()), "top_logprobs": []} for word in words
            ]
            return {"content": content}
        offsets, at = [], sum(map(len, self.words(choice, 0, first)))
        for word in words:
            offsets.append(at)
            at += len(word)
        return {
            "tokens": words,
            "token_logprobs": [value] * len(words),
            "top_logprobs": [{word: value} for word in words],
            "text_offset": offsets,
        }

    # --- JSON ---------------------------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        ask = self.ask
        return {"id": ask.id, "object": kind, "created": ask.created, "model": ask.model}

    def whole(self) -> bytes:
        """The answer that is not streamed."""
        ask, choices = self.ask, []
        for choice in self.choices:
            text = self.text(choice, 0, choice.tokens)
            if ask.echo:
                text = self.tokenizer.decode(choice.prompt) + text
            one: dict[str, Any] = {"index": choice.index}
            if ask.chat:
                message: dict[str, Any] = {"role": "assistant", "content": text}
                if ask.tool:
                    call = {"id": f"call-{ask.id}", "type": "function"}
                    call |= {"function": {"name": ask.tool, "arguments": text}}  # type: ignore[dict-item]
                    message = {"role": "assistant", "content": None, "tool_calls": [call]}
                one["message"] = message
            else:
                one["text"] = text
            one |= {"logprobs": self._logprobs(choice, 0, choice.tokens), "finish_reason": choice.finish}
            one["stop_reason"] = None
            if ask.token_ids:
                one |= {"token_ids": self.ids(choice, 0, choice.tokens), "prompt_token_ids": choice.prompt}
            choices.append(one)
        kind = "chat.completion" if ask.chat else "text_completion"
        body = self._head(kind) | {"choices": choices, "usage": self.usage(), "metrics": self.metrics()}
        return encode(body | {"kv_transfer_params": self.transfer})

    def chunks(self, choice: Choice, n: int) -> Iterator[bytes]:
        """The events for n new tokens of a choice."""
        first = choice.tokens - n
        if self.ask.chat and not first:
            yield self._event(choice, {"role": "assistant", "content": ""}, None, 0, 0)
        if self.ask.stream_interval > 1:
            choice.held += n
            if first and choice.finish is None and choice.held < self.ask.stream_interval:
                return
            n, choice.held = choice.held, 0
            first = choice.tokens - n
        ask = self.ask
        if not (ask.tool or ask.json or ask.logprobs or ask.token_ids or ask.continuous_usage or ask.echo):
            yield self._quick(choice, first)
            return
        text = self.text(choice, first, choice.tokens)
        if ask.echo and not first:
            text = self.tokenizer.decode(choice.prompt) + text
        delta: dict[str, Any] = {"content": text}
        if ask.tool:
            call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
            if not first:
                call = {"index": 0, "id": f"call-{ask.id}", "type": "function"}
                call["function"] = {"name": ask.tool, "arguments": text}
            delta = {"tool_calls": [call]}
        yield self._event(choice, delta, text, first, choice.tokens)

    def _event(self, choice: Choice, delta: dict, text: str | None, first: int, end: int) -> bytes:
        ask = self.ask
        one: dict[str, Any] = {"index": choice.index}
        one |= {"delta": delta} if ask.chat else {"text": text}
        one["logprobs"] = self._logprobs(choice, first, end) if end > first else None
        one["finish_reason"] = choice.finish if end == choice.tokens and end > first else None
        if ask.token_ids:
            one["token_ids"] = self.ids(choice, first, end)
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        body = self._head(kind) | {"choices": [one]}
        if ask.token_ids and not first:
            body["prompt_token_ids"] = choice.prompt
        if ask.continuous_usage:
            body["usage"] = self.usage()
        return b"data: " + encode(body) + b"\n\n"

    def _quick(self, choice: Choice, first: int) -> bytes:
        """The same event where it holds only text: most chunks are like that."""
        if not choice.head:
            kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
            begin = b"data: " + encode(self._head(kind))[:-1] + b',"choices":[{"index":%d' % choice.index
            choice.head = begin + (b',"delta":{"content":"' if self.ask.chat else b',"text":"')
        words, start = self._escaped, choice.start
        if choice.tokens - first == 1:
            text = words[(start + first * first) % len(words)]
        else:
            text = b"".join([words[(start + i * i) % len(words)] for i in range(first, choice.tokens)])
        if choice.finish is None:
            return choice.head + text + (CHAT_GOES_ON if self.ask.chat else GOES_ON)
        return (
            choice.head
            + text
            + (b'"},"logprobs":null,"finish_reason":"' if self.ask.chat else b'","logprobs":null,"finish_reason":"')
            + choice.finish.encode()
            + b'","stop_reason":null}]}\n\n'
        )

    def tail(self) -> bytes:
        """What ends the stream."""
        if not self.ask.include_usage:
            return DONE
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        body = self._head(kind) | {"choices": [], "usage": self.usage(), "metrics": self.metrics()}
        return b"data: " + encode(body) + b"\n\n" + DONE
