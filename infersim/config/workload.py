"""What arrives: requests by a rule (as `vllm bench serve` makes them), or from a trace file."""

import math
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PlainSerializer, Tag, model_validator

from .base import Description, Sparse
from .slo import Goodput
from .units import MOST, Count, CountOrZero, Number, Parsed, Seconds, Share, Weight, parse_quantity, short

Format = Literal[
    "azure", "mooncake", "bailian", "burstgpt", "servegen", "vidur", "llmservingsim", "aibrix", "splitwise", "plain"
]
MAX_TOKENS = 10**9  # columns are 32 bits wide
MAX_REQUESTS = 10**8  # some 15 GB of records
Tokens = Annotated[Count, Field(le=MAX_TOKENS)]


def _or_inf(unit: str) -> Parsed:
    """A number > 0 or inf, which YAML and JSON write as `inf`."""

    def parse(value: Any) -> float:
        if value in ("inf", ".inf", math.inf):
            return math.inf
        number = parse_quantity(value, unit)
        if number < 1e-6:
            raise ValueError(f"must be inf or a number of at least 1e-6 (got {short(value)})")
        return number

    return Parsed(parse, {"anyOf": [{"type": "number", "minimum": 1e-6}, {"type": "string"}]})


FloatOrInf = Annotated[
    float, Field(allow_inf_nan=True), PlainSerializer(lambda value: "inf" if value == math.inf else value)
]


def _mapping_or(other: str) -> Discriminator:
    """Which member of a union is meant, so that a wrong value gets the errors of that member only."""
    return Discriminator(lambda value: "Mapping" if isinstance(value, dict | Description) else other)


class Lognormal(Sparse):
    """Log-normally distributed tokens: `median` with one of p90, mean and sigma, or `mean` with sigma."""

    median: Annotated[Number, Field(ge=1, le=MAX_TOKENS)] | None = None
    mean: Annotated[Number, Field(ge=1, le=MAX_TOKENS)] | None = None
    p90: Annotated[Number, Field(ge=1, le=MAX_TOKENS)] | None = None
    sigma: Annotated[Number, Field(le=10)] | None = None
    """standard deviation of the logarithm"""
    max: Tokens | None = None
    """the most: longer draws are cut to it"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [key for key in ("median", "mean", "p90", "sigma") if getattr(self, key) is not None]
        if given not in (["median", "mean"], ["median", "p90"], ["median", "sigma"], ["mean", "sigma"]):
            raise ValueError(
                "must have two of median, mean, p90 and sigma: median with one of the others, or mean with sigma"
                f" (got {', '.join(given) or 'none'})"
            )
        if self.median is not None and self.median > (self.mean or self.p90 or math.inf):
            raise ValueError(f"median must not be above {given[1]} (got {self.median:g} and {self.mean or self.p90:g})")
        return self


class Length(Sparse):
    """How many tokens: one of four distributions; a plain number is a fixed length."""

    mean: Tokens | None = None
    range_ratio: Annotated[Number, Field(lt=1)] | None = None
    """with `mean` L: whole numbers evenly in [floor(L (1 - r)), ceil(L (1 + r))], vLLM's random dataset"""
    uniform: tuple[Tokens, Tokens] | None = None
    """[shortest, longest]: every whole number between them is equally likely"""
    lognormal: Lognormal | None = None
    quantiles: dict[str, Annotated[Number, Field(ge=1, le=MAX_TOKENS)]] | None = None
    """{p0: shortest, p50: median, ..., p100: longest}, interpolated between"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        forms = [self.mean or self.range_ratio is not None, self.uniform, self.lognormal, self.quantiles]
        if sum(bool(form) for form in forms) != 1 or (self.mean is None) != (self.range_ratio is None):
            raise ValueError(
                "must be a number of tokens or one of {mean: 512, range_ratio: 0.25}, {uniform: [384, 640]},"
                " {lognormal: {median: 300, p90: 1200}}, {quantiles: {p0: 1, p50: 300, p100: 4000}}"
            )
        if self.uniform and self.uniform[0] > self.uniform[1]:
            raise ValueError(f"uniform must be [shortest, longest] (got {list(self.uniform)})")
        if self.quantiles:
            self.quantile_points()
        return self

    def quantile_points(self) -> tuple[list[float], list[float]]:
        """`quantiles` as cumulative shares 0 ... 1, rising, and the tokens there."""
        points = {}
        for key, tokens in (self.quantiles or {}).items():
            try:
                share = float(key.removeprefix("p")) / 100
            except ValueError:
                share = math.nan
            if not key.startswith("p") or not 0 <= share <= 1:
                raise ValueError(f"quantiles: keys must be p0 ... p100, such as p50 or p99.9 (got {short(key)})")
            points[share] = tokens
        shares = sorted(points)
        if shares[0] != 0 or shares[-1] != 1:
            raise ValueError("quantiles must have p0 (the shortest) and p100 (the longest)")
        rising = [points[share] for share in shares]
        if rising != sorted(rising):
            raise ValueError(f"quantiles must not fall (got {', '.join(f'{t:g}' for t in rising)})")
        return shares, rising


LengthOrTokens = Annotated[Annotated[Length, Tag("Mapping")] | Annotated[Tokens, Tag("Tokens")], _mapping_or("Tokens")]


class RampUp(Description):
    """A rate that rises from request to request, as `vllm bench serve --ramp-up-strategy` does."""

    strategy: Literal["linear", "exponential"]
    start_rps: Annotated[Number, Field(ge=1e-6, le=1e9)]
    """requests per second at the first request"""
    end_rps: Annotated[Number, Field(ge=1e-6, le=1e9)]
    """requests per second at the last request"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start_rps >= self.end_rps:
            raise ValueError(f"end_rps must be above start_rps (got {self.start_rps:g} to {self.end_rps:g})")
        return self


class Spike(Description):
    """From `at` on, for `duration`, the rate is `factor` times as high."""

    at: Seconds
    duration: Annotated[Seconds, Field(gt=0)]
    factor: Annotated[Number, Field(ge=1e-6, le=1e6)]


class Images(Description):
    """Images in prompts (video frames and audio alike): an encoder makes tokens of them, which come beside the text."""

    tokens: Tokens
    """of the prompt, for each image; they add to input_tokens, or to the trace's prompts"""
    per_request: LengthOrTokens = 1
    share: Share = 1.0
    """of the requests: those that have any"""


class Prefixes(Description):
    """Texts that many prompts begin with: system prompts, tool descriptions, documents."""

    count: Count = 1
    """different ones; each request has one of them, by chance"""
    tokens: LengthOrTokens
    """length of each; it adds to input_tokens"""


class SubAgents(Description):
    """Agents that a turn of a session starts side by side, each a conversation of its own (fan-out); the session's next
    turn waits for the last answer of all of them, and reads it (join)."""

    count: LengthOrTokens
    """how many a turn starts; not a session's last"""
    share: Share = 1.0
    """of those turns: which start any"""
    turns: LengthOrTokens = 1
    """requests of each, one after another: each prompt begins with all that the agent said before"""
    input_tokens: LengthOrTokens
    """its task, and what tools return to its later requests"""
    output_tokens: LengthOrTokens
    """tokens that the model generates for each of its requests"""
    think_time: Seconds = 0.0
    """mean time from one of its answers to its next request (exponential): a tool"""
    inherits: bool = False
    """its prompts begin with all that its session has said"""


class Tenant(Description):
    """One of several customers."""

    share: Weight = 1.0
    """of the requests, or of the sessions, relative to the other tenants'"""
    priority: CountOrZero = 0
    """where the front door holds requests back: lower goes first"""
    goodput: Goodput | None = None
    """limits of its requests, beside those of slo.goodput: the class of service that it bought"""


class MaxTokensFactor(Description):
    """Clients that ask for `factor` times what the model will generate."""

    factor: Annotated[Number, Field(ge=1, le=1e6)]


MaxTokens = Annotated[
    Annotated[MaxTokensFactor, Tag("Mapping")]
    | Annotated[Literal["output_length", "max_model_len"], Tag("Word")]
    | Annotated[Tokens, Tag("Tokens")],
    Discriminator(
        lambda v: "Mapping" if isinstance(v, dict | Description) else "Word" if isinstance(v, str) else "Tokens"
    ),
]


class Workload(Description):
    """Requests: `input_tokens` and `output_tokens` at a `request_rate`, or a `trace`.

    Null means the default. Defaults of generated requests are those of `vllm bench serve`: 1000 requests, all at once.
    A trace arrives at its own times, unless `request_rate` or `ramp_up` replaces them.
    """

    trace: Annotated[str, Field(min_length=1)] | None = None
    """a trace file, or a folder of ServeGen"""
    format: Format | None = None
    """of the trace; default: recognised from its columns"""
    time_scale: Annotated[Number, Field(ge=1e-6, le=1e6)] = 1.0
    """factor on the trace's times: 2 halves the rate"""

    input_tokens: LengthOrTokens | None = None
    """prompt length"""
    output_tokens: LengthOrTokens | None = None
    """tokens that the model generates"""

    num_requests: Annotated[Count, Field(le=MAX_REQUESTS)] | None = None
    """how many; of a trace, the first so many; default: 1000, of a trace or with a duration all"""
    duration: Annotated[Seconds, Field(gt=0)] | None = None
    """how long requests arrive, or sessions begin, at a request_rate or the times of a trace; with num_requests too,
    whichever ends first"""
    request_rate: Annotated[FloatOrInf, _or_inf("1/s")] | None = None
    """requests per second; inf: all arrive at once"""
    burstiness: Annotated[FloatOrInf, _or_inf("")] = 1.0
    """shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 is burstier, inf is evenly spaced"""
    ramp_up: RampUp | None = None
    """a rising rate instead of `request_rate`"""
    spikes: tuple[Spike, ...] = ()
    """times with more traffic"""
    curve: list[tuple[Seconds, Annotated[Number, Field(ge=1e-6, le=1e6)]]] | None = None
    """[[seconds, factor of the rate], ...], straight lines between, over and over: a day, a week"""

    n: Annotated[Count, Field(le=1024)] = 1
    """answers to each prompt (parallel sampling), each counted as a request: they come at the same time and find the
    prompt's full KV blocks in the prefix cache; under vllm-0 they are one group, which computes the prompt once, shares
    its blocks and copies the last one when it is written to"""
    beam_width: Annotated[Count, Field(le=1024)] = 1
    """beam search, by engines that have it (vllm-0): sequences of each request that decode together; the best is its
    answer, and they share the KV blocks of what they have in common"""
    beam_turnover: Annotated[Number, Field(le=1)] = 0.1
    """which beams survive: the chance that a beam goes on from one drawn evenly rather than from its own predecessor,
    after each token (assumed: chosen on beams of width 4 on Alpaca, Kwon et al. 2023, figure 15)"""
    prefixes: Prefixes | None = None
    """texts that generated prompts begin with; all prompts of a session with one"""
    turns: LengthOrTokens = 1
    """requests of one session: each prompt begins with all that was said before; num_requests counts requests,
    request_rate sessions"""
    users: Count | None = None
    """a closed loop instead of a request_rate: each user sends the next request when the last one has ended"""
    think_time: Seconds = 0.0
    """mean time from an answer to the next request of its session or user (exponential): reading, typing, a tool"""
    sub_agents: SubAgents | None = None
    """agents that the turns of a session start and wait for; num_requests counts theirs too"""
    tenants: Annotated[dict[str, Tenant], Field(min_length=1)] | None = None
    """customers that send the requests, by name; a session belongs to one of them"""
    deadline_order: bool = False
    """a request's priority is when its first token is due, arrival + its tenant's goodput.ttft_ms (0 without one): what
    is due soonest goes first at the front door, and in engines with scheduling_policy priority"""
    models: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    """models that the requests ask for, under their served names: {name: share}; a session stays with one"""
    model_column: Annotated[str, Field(min_length=1)] | None = None
    """instead of `models`: the column of the trace that names each request's model"""

    images: Images | None = None
    """images in the prompts; needs cluster.encode"""

    timeout: Annotated[Seconds, Field(gt=0)] | None = None
    """how long a client waits for the whole answer before it gives up; default: for ever"""
    retries: CountOrZero = 0
    """how often a client repeats a request that was refused, lost or not answered in time"""
    backoff: Seconds = 1.0
    """time before the first retry, doubled for each further one"""

    max_concurrency: Count | None = None
    """most requests in the system: the next one is sent when one has finished"""
    max_tokens: MaxTokens | None = None
    """what clients ask for, the only length that a scheduler may know: output_length (default of generated requests),
    max_model_len (default of traces), a number of tokens or {factor: x} times the true length"""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        generated = data.get("trace") is None
        defaults: dict[str, Any] = {"burstiness": 1.0, "time_scale": 1.0, "turns": 1, "think_time": 0.0}
        defaults |= {"spikes": (), "retries": 0, "backoff": 1.0, "n": 1, "beam_width": 1, "beam_turnover": 0.1}
        defaults["max_tokens"] = "output_length" if generated else "max_model_len"
        if generated:
            if data.get("duration") is None:
                defaults["num_requests"] = 1000
            if data.get("ramp_up") is None and data.get("users") is None:
                defaults["request_rate"] = math.inf
        return data | {key: value for key, value in defaults.items() if data.get(key) is None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = []
        if self.trace is None:
            if self.input_tokens is None or self.output_tokens is None:
                wrong.append("must have trace, or both input_tokens and output_tokens")
            if self.format is not None:
                wrong.append("format is for a trace; remove it")
            if self.time_scale != 1:
                wrong.append("time_scale is for the times of a trace; change request_rate")
        else:
            if self.input_tokens is not None or self.output_tokens is not None:
                wrong.append("trace has its own lengths; remove it or input_tokens and output_tokens")
            if self.burstiness != 1 and not self.has_arrival_rule:
                wrong.append("burstiness is for a request_rate; the trace has its own times")
            if self.time_scale != 1 and self.has_arrival_rule:
                wrong.append("time_scale is for the times of the trace, which request_rate or ramp_up replaces")
            wrong += [
                f"{name} is for generated requests; the trace has its own"
                for name, given in (
                    ("turns", self.turns != 1),
                    ("users", self.users),
                    ("think_time", self.think_time),
                    ("sub_agents", self.sub_agents),
                )
                if given
            ]
        if self.users and self.has_arrival_rule:
            wrong.append("must have users or request_rate, not both: users send when their last request has ended")
        if self.users and self.max_concurrency:
            wrong.append("must have users or max_concurrency, not both")
        if self.think_time and self.turns == 1 and not self.users:
            wrong.append("think_time is for users or sessions; give users or turns")
        if self.sub_agents and self.turns == 1:
            wrong.append("sub_agents are for sessions, whose next turn waits for them; turns must be above 1")
        if (self.curve or self.spikes) and (self.request_rate in (None, math.inf)):
            wrong.append("curve and spikes change a request_rate; give one")
        if self.curve is not None:
            times = [time for time, _ in self.curve]
            if len(times) < 2 or times[0] != 0 or any(b <= a for a, b in pairwise(times)):
                wrong.append("curve must be points from 0 s on, in order, and end with the period")
        if self.deadline_order and (self.tenants is None or self.has_sessions or self.max_concurrency):
            wrong.append("deadline_order is for requests of tenants that are sent when they arrive; give tenants alone")
        if self.n > 1 and self.has_sessions:
            wrong.append("n is for single requests; turns must be 1, without users")
        if self.n > 1 and self.beam_width > 1:
            wrong.append("must have n or beam_width, not both: the best beam is the answer")
        if self.prefixes and self.trace:
            wrong.append("prefixes are for generated requests; a trace has its own")
        if self.duration and (self.ramp_up or (not self.trace and self.request_rate in (None, math.inf))):
            wrong.append("duration is for a finite request_rate or a trace; give num_requests instead")
        if self.images and self.turns != 1:
            wrong.append("images are for single requests; turns must be 1")
        if self.model_column and (self.trace is None or self.models):
            wrong.append("model_column is for a trace, instead of models")
        if self.ramp_up and self.request_rate is not None:
            wrong.append("must have request_rate or ramp_up, not both")
        if self.retries and self.backoff and math.log2(self.backoff) + self.retries - 1 > math.log2(MOST["s"]):
            wrong.append(f"retries: a backoff that doubles {self.retries - 1} times ends above 32 years; must be fewer")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def has_sessions(self) -> bool:
        """Whether requests wait for one another."""
        return self.users is not None or self.turns != 1

    @property
    def has_arrival_rule(self) -> bool:
        """Whether requests arrive by a rule rather than at the times of a trace."""
        return self.request_rate is not None or self.ramp_up is not None
