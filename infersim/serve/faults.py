"""What no engine has: faults on demand, the clock's speed, what has happened; and llm-d-inference-sim's names."""

import random
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from infersim.explain.summary import summarize
from infersim.report.files import to_json

from .http import as_json, json_of
from .live import Live
from .outcome import result
from .protocol import ApiError
from .roster import STATES

FAILURES = {
    "rate_limit": 429,
    "invalid_api_key": 401,
    "context_length": 400,
    "server_error": 503,
    "invalid_request": 400,
    "model_not_found": 404,
}
"""llm-d-inference-sim's failure-types"""


class Faults:
    """/simulate/* and /admin/config. replicas: behind the port that was asked; exact: tokens are a tokenizer's."""

    def __init__(self, live: Live, replicas: Callable[[Request], list[int]], exact: bool):
        self.live, self._replicas, self.exact = live, replicas, exact
        self.rate, self.statuses = 0.0, [500]
        """share of requests that fail, and how"""
        self._types: list[str] = []
        self._random = random.Random(live.scenario.simulation.seed)

    def routes(self) -> list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]]:
        """Path, handler, methods."""
        return [
            ("/simulate/state", self.state, ["GET"]),
            ("/simulate/result", self.result, ["GET"]),
            ("/simulate/crash", self.crash, ["POST"]),
            ("/simulate/slow", self.slow, ["POST"]),
            ("/simulate/errors", self.errors, ["POST"]),
            ("/simulate/speed", self.speed, ["POST"]),
            ("/admin/config", self.config, ["GET", "POST"]),
        ]

    def inject(self, header: str | None) -> None:
        """An error that was asked for."""
        if header:
            if not header.isdecimal() or not 400 <= int(header) <= 599:
                raise ApiError(400, "X-Return-Error must be a status from 400 to 599")
            raise ApiError(int(header), "this error was asked for by X-Return-Error")
        if self.rate and self._random.random() < self.rate:
            raise ApiError(self._random.choice(self.statuses), "this error was asked for", retry_after=1)

    async def state(self, request: Request) -> Response:
        live = self.live
        time = live.now()
        replicas = []
        for r in self._replicas(request):
            running, waiting = live.roster.queues(r)
            replicas.append(
                {
                    "replica": r,
                    "ready": live.ready(r),
                    "state": STATES[live.roster.state(r)],
                    "running": running,
                    "waiting": waiting,
                    "kv_usage": live.roster.kv_usage(r),
                    "steps": int(live.fleet.replicas["num_steps"][r]),
                }
            )
        counts = {"live": live.num_live, "finished": live.finished, "aborted": live.aborted}
        return as_json(
            {
                "simulated_s": time,
                "speed": live.clock.speed,
                "prompts_are_counted": "exactly" if self.exact else "by an estimate: about 4 bytes a token",
                "requests": counts | {"lost": len(live.roster.lost)},
                "lateness": live.clock.lateness(),
                "replicas": replicas,
            }
        )

    async def result(self, request: Request) -> Response:
        found = result(self.live)
        if found is None:
            raise ApiError(404, "nothing has come yet")
        return Response(to_json(summarize([found])), media_type="application/json")

    async def crash(self, request: Request) -> Response:
        body = await json_of(request)
        lost = self.live.crash(self._of(body), _number(body, "duration", 0.0, 1e9, 60.0))
        return as_json({"lost": lost})

    async def slow(self, request: Request) -> Response:
        body = await json_of(request)
        self.live.now()
        self.live.roster.slow(self._of(body), _number(body, "factor", 1.0, 1e6, 2.0))
        return as_json({})

    async def errors(self, request: Request) -> Response:
        body = await json_of(request)
        self.rate = _number(body, "rate", 0.0, 1.0, 0.0)
        self.statuses = [int(_number(body, "status", 400, 599, 500))]
        return as_json({"rate": self.rate, "status": self.statuses[0]})

    async def config(self, request: Request) -> Response:
        """llm-d-inference-sim's: failures may be set; times are the engine's."""
        if request.method == "POST":
            body = {key: value for key, value in (await json_of(request)).items() if value is not None}
            for key in body.keys() - {"failure-injection-rate", "failure-types"}:
                raise ApiError(400, f"{key[:50]}: is not set here: times come from the simulated engine", key)
            types = body.get("failure-types", self._types)
            if not isinstance(types, list) or not all(isinstance(one, str) and one in FAILURES for one in types):
                raise ApiError(400, f"failure-types must be a list of {', '.join(FAILURES)}", "failure-types")
            self.rate = _number(body, "failure-injection-rate", 0, 100, self.rate * 100) / 100
            self._types = types
            self.statuses = [FAILURES[one] for one in types or FAILURES]
        live, names = self.live, [self.live.models[r] for r in self._replicas(request)]
        about = {"model": names[0], "served-model-name": list(dict.fromkeys(names))}
        about |= {"max-model-len": live.deployments[0].engine.max_model_len, "lora-modules": list(live.adapters)}
        return as_json(about | {"failure-injection-rate": round(self.rate * 100), "failure-types": self._types})

    async def speed(self, request: Request) -> Response:
        self.live.change_speed(_number(await json_of(request), "speed", 1e-3, 1e6, 1.0))
        return as_json({"speed": self.live.clock.speed})

    def _of(self, body: dict) -> int:
        return int(_number(body, "replica", 0, len(self.live.deployments) - 1, 0))


def _number(body: dict, name: str, least: float, most: float, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a number from {least:g} to {most:g} (got {str(value)[:50]})", name)
    return value
