"""The fields of one config.json, read one by one; what is wrong with them is collected and raised together."""

from collections.abc import Iterable, Mapping
from typing import Any

from infersim.config.errors import InputError
from infersim.config.units import short

MAX_LAYERS = 10_000
MAX_SIZE = 10**9


class Fields:
    """Reads fields of `config`; null counts as absent, as it does for Hugging Face.

    A wrong field is noted and answered with a harmless value, so that reading goes on and `check` can raise every
    problem at once. `where` is the file (or name) and the key path that errors start with.
    """

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config = config
        self.where = where
        self.problems: dict[str, None] = {}  # an ordered set: a field may be read twice
        self.wrong: set[str] = set()

    def problem(self, name: str, message: str, given: Iterable[str] = ()) -> None:
        """Note what is wrong with a field. `given` are the fields it was compared with: if one of those is wrong
        itself, the comparison says nothing."""
        if self.wrong.isdisjoint(given):
            self.problems.setdefault(f"{self.where}{name}: {message}")
            self.wrong.update(name.split(" or "))

    def check(self) -> None:
        """InputError if anything read so far was wrong."""
        if self.problems:
            raise InputError(self.problems)

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number in [least, most], under the first of `names` that is there."""
        name = next((name for name in names if self.has(name)), names[0])
        value = self.config.get(name)
        right = f"a whole number >= {least}"
        if value is None and default is not None:
            return default
        if value is None:
            self.problem(" or ".join(names), f"missing; must be {right}")
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.problem(name, f"must be {right} (got {short(value)})")
        elif value > most:
            self.problem(name, f"must be at most {most:,} (got {short(value)})")
        else:
            return value
        return max(least, 1)

    def of(self, config: Mapping[str, Any]) -> "Fields":
        """The same of another config, or part of one; problems are noted here."""
        other = Fields(config, self.where)
        other.problems, other.wrong = self.problems, self.wrong
        return other

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_SIZE):
            return default if value is None else value
        self.problem(name, f"must be a number above 0 (got {short(value)})")
        return default

    def integers(self, name: str) -> list[int]:
        """A list of layer numbers; empty where absent."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            self.problem(name, f"must be a list of layer numbers (got {short(value)})")
            return []
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.problem(name, f"must be true or false (got {short(value)})")
            return default
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            self.problem(name, f"must be a text (got {short(value)})")
            return default
        return default if value is None else value

    def heads(
        self,
        heads: str = "num_attention_heads",
        kv_heads: str = "num_key_value_heads",
        default_heads: int | None = None,
        default_kv_heads: int | None = None,
    ) -> tuple[int, int]:
        """Query heads and KV heads; without a default, as many KV heads as query heads where the field is absent."""
        n = self.integer(heads, default=default_heads)
        k = self.integer(kv_heads, default=default_kv_heads or n)
        if n % k:
            self.problem(kv_heads, f"must divide {heads} {n} (got {k})", given=(heads, kv_heads))
        return n, k

    def head_dim(self, hidden_size: int, num_heads: int, heads: str = "num_attention_heads") -> int:
        """Width of a head: the field, else the hidden size over the heads."""
        if not self.has("head_dim") and hidden_size % num_heads:
            message = f"must divide the hidden size {hidden_size} where there is no head_dim (got {num_heads})"
            self.problem(heads, message, given=(heads, "hidden_size", "n_embd"))
        return self.integer("head_dim", default=max(hidden_size // num_heads, 1))

    def num_layers(self, *names: str) -> int:
        return self.integer(*(names or ("num_hidden_layers",)), most=MAX_LAYERS)

    def per_letter(self, name: str, letters: Mapping[str, Any]) -> list[Any]:
        """A text with a letter for each layer, translated to what they stand for."""
        text = self.text(name, "")[:MAX_LAYERS]
        if wrong := [letter for letter in text if letter not in letters]:
            self.problem(name, f"must be letters of {''.join(letters)} (got {short(wrong[0])})")
            return []
        return [letters[letter] for letter in text]

    def per_layer(self, name: str, num_layers: int, words: Mapping[Any, Any]) -> list[Any] | None:
        """A list with one of `words` for each layer, translated to what they stand for; None where absent."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            message = f"must be a list with one entry for each of {num_layers} layers (got {short(value)})"
            self.problem(name, message, given=("num_hidden_layers",))
            return None
        for i, word in enumerate(value):
            if not isinstance(word, str | int) or word not in words:
                known = ", ".join(str(known) for known in words)
                self.problem(f"{name}[{i}]", f"must be one of {known} (got {short(word)})")
                return None
        return [words[word] for word in value]
