"""Text and tokens: prompts become token ids, and answers are text that encodes to just as many tokens."""

import hashlib
import re
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from infersim.config.errors import InputError

# English words that are one token, with the space before them, in the common vocabularies.
WORDS = re.findall(
    r"\w+",
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were all her she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like our
    over man me even most made after also did many before must through years where much your way well down should
    because each just those people how too little state good very make world still own see men work long get here
    between both life being under never day same another know while last might us great old year off come since
    against go came right used take three
    """,
)
SEGMENT = 16
"""tokens of a piece of text whose name is the same wherever it stands behind the same text: vLLM's block"""


class Tokenizer(Protocol):
    """What the endpoint needs of one."""

    exact: bool
    """whether a model's own tokens are counted, or an estimate"""
    words: list[str]
    """texts of one token each, that stay so in any order"""
    ids: list[int]
    """their tokens"""
    longest_token: int
    """bytes: a text of n has at least n / longest_token tokens"""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Estimate:
    """About four bytes to a token, for want of a tokenizer: a word of WORDS is one, anything else up to five bytes of
    a word and its space. A token's id says which bytes it is, so that nothing need be remembered."""

    exact = False
    longest_token = 1 + max(map(len, WORDS))
    _PIECES = re.compile(
        rb" (?:" + b"|".join(sorted((w.encode() for w in WORDS), reverse=True)) + rb")(?![^ ])| ?[^ ]{1,4}| "
    )

    def __init__(self) -> None:
        self.words = [f" {word}" for word in WORDS]
        self._id_of = {word.encode(): i for i, word in enumerate(self.words)}
        self.ids = list(range(len(WORDS)))

    def encode(self, text: str) -> list[int]:
        get = self._id_of.get
        pieces = self._PIECES.findall(text.encode("utf-8", "replace"))
        return [
            found if (found := get(piece)) is not None else int.from_bytes(b"\1" + piece, "big") for piece in pieces
        ]

    def decode(self, ids: Sequence[int]) -> str:
        parts = []
        for one in ids:
            if 0 <= one < len(WORDS):
                parts.append(self.words[one].encode())
            else:
                parts.append(one.to_bytes(8, "big").lstrip(b"\0")[1:] if 0 < one < 2**63 else b"?")
        return b"".join(parts).decode("utf-8", "replace")


class Given:
    """A Hugging Face tokenizer.json. InputError if it cannot be read or has no words of one token."""

    exact = True

    def __init__(self, path: str):
        try:
            from tokenizers import Tokenizer as Read
        except ImportError:
            raise InputError("--tokenizer: needs the package tokenizers (pip install tokenizers)") from None
        try:
            self._read: Any = Read.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"--tokenizer {path}: not a tokenizer.json: {error}") from None
        single = [(f" {word}", self.encode(f" {word}")) for word in WORDS]
        kept = [(word, ids[0]) for word, ids in single if len(ids) == 1]
        self.words, self.ids = [word for word, _ in kept], [one for _, one in kept]
        self.longest_token = max(len(token.encode()) for token in self._read.get_vocab())
        text = "".join(self.words + self.words[::-1])
        if len(kept) < 8 or self.encode(text) != self.ids + self.ids[::-1]:
            raise InputError(
                f"--tokenizer {path}: common English words are not one token each in it, so no answer could be"
                " counted; must be a byte-level BPE of a model that knows English"
            )

    def encode(self, text: str) -> list[int]:
        return self._read.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._read.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a file, or an estimate."""
    return Estimate() if path is None else Given(path)


ROLE_TOKENS = 4
"""around each message of a chat: begin, role, end of the header, end of the message"""


def chat_ids(messages: Sequence[dict], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a chat: each message between ROLE_TOKENS marks, and the header of the answer. A template of no
    model: the content's tokens are those of the text, the marks are as many as Llama 3 has."""
    ids: list[int] = []
    for message in messages:
        role = int.from_bytes(hashlib.blake2b(str(message.get("role")).encode(), digest_size=4).digest(), "big")
        ids += [2**40, 2**40 + 1 + role, 2**40 + 2**33]
        ids += tokenizer.encode(content_of(message))
        ids.append(2**40 + 2**33 + 1)
    return [*ids, 2**40, 2**40 + 1, 2**40 + 2**33]


def content_of(message: dict) -> str:
    """The text of a message: a string, or the texts of its parts; of a tool call its name and arguments."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return (content if isinstance(content, str) else "") + (str(calls) if calls else "")


def names_of(ids: Sequence[int], salt: str) -> tuple[list[int], list[int]]:
    """Names and lengths of a prompt's pieces of SEGMENT tokens: equal names are equal text, and the same before it."""
    names, lengths = [], []
    data = array("q", ids).tobytes()
    chain = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, len(data), 8 * SEGMENT):
        piece = data[start : start + 8 * SEGMENT]
        chain = hashlib.blake2b(chain + piece, digest_size=8).digest()
        names.append(int.from_bytes(chain, "big") >> 1)  # not negative: those are requests' own texts
        lengths.append(len(piece) // 8)
    return names, lengths
