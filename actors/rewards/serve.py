"""`rubato serve-rewards my.py:fn --port 8000`: a reward function as a stateless server, for `reward.url` of any number of jobs.

It speaks what actors/rewards/invoke.py says, at `/`, and answers `GET /health`. The function runs in worker processes as those of a job do. A key
that was answered lately, or is being worked on, is not computed again; nothing else is remembered, and nothing is lost with that.
"""

import argparse
import asyncio
import hmac
import os
import signal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.plugins import check_sandbox
from rubato.actors.rewards.invoke import TOKEN
from rubato.actors.rewards.scorer import Scorer
from rubato.bus.address import bare, bind_listener, spelt
from rubato.runtime.errors import ExitCode, LaunchError
from rubato.runtime.http_server import HttpServer
from rubato.runtime.importer import check_module
from rubato.runtime.observe.figures import Metrics

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ModuleNotFoundError as missing:
    raise LaunchError(f"serve-rewards needs the package {missing.name}: pip install -e '.[serve]'") from missing

MOST_BYTES = 64 * 1024 * 1024
"""Of a request."""

MOST_CALLS = 1024
"""Under way at once; more are answered 503."""

ANSWERS_KEPT = 4096
"""Trajectories whose score is remembered by its key; the oldest is forgotten first."""

_Outcomes = Mapping[str, Scores | NotScored]


class ScoreBatch(msgspec.Struct):
    """The body of a call."""

    completions: list[str]
    keys: list[str] = []
    columns: dict[str, list[Any]] = {}
    deadline_s: float = inf

    def __post_init__(self) -> None:
        num = len(self.completions)
        self.keys = self.keys or [os.urandom(16).hex() for _ in range(num)]
        odd = [name for name, column in {**self.columns, "keys": self.keys}.items() if len(column) != num]
        if odd:
            raise ValueError(f"{odd[0]} has not one entry for each of {num} completions")

    def requests(self) -> dict[str, Score]:
        """By key."""
        found: dict[str, Score] = {}
        for at, key in enumerate(self.keys):
            row = {name: column[at] for name, column in self.columns.items()}
            texts = tuple(map(str, row.pop("texts", None) or (self.completions[at],)))
            found[key] = Score(key, texts, msgspec.msgpack.encode(row))
        return found


class RewardServer:
    """Scores over HTTP with `scorer`, whose work the task group owns: it goes on where a caller's deadline ends the waiting."""

    def __init__(self, function: str, scorer: Scorer, metrics: Metrics, tasks: asyncio.TaskGroup) -> None:
        self._function = function
        self._scorer = scorer
        self._metrics = metrics
        self._tasks = tasks
        self._token = os.environ.get(TOKEN, "")
        self._answers: OrderedDict[str, Scores | NotScored] = OrderedDict()
        self._pending: dict[str, asyncio.Future[Scores | NotScored]] = {}
        self.app = Starlette(routes=[Route("/", self.score, methods=["POST"]), Route("/health", self.health, methods=["GET"])])

    async def health(self, request: Request) -> Response:
        """What is served, by how many processes, and how much was scored so far."""
        figures = self._metrics.snapshot()
        names = ("reward/workers", "reward/scored", "reward/cold_starts", "reward/busy_s")
        return _json({"function": self._function, **{name: figures.get(name, 0) for name in names}})

    async def score(self, request: Request) -> Response:
        """One batch."""
        if self._token and not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self._token}"):
            return _json({"error": f"the token is not the one that {TOKEN} has here"}, 401)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                return _json({"error": f"a batch may have {MOST_BYTES:,} bytes"}, 413)
        try:
            batch = msgspec.json.decode(body, type=ScoreBatch)
        except msgspec.MsgspecError as error:
            return _json({"error": f"this is no batch: {error}"}, 400)
        cold = self._cold_starts()
        outcomes = await self._outcomes(batch)
        if outcomes is None:
            return _json({"error": f"not scored within deadline_s={batch.deadline_s:g}; asked again, it goes on"}, 504)
        scores = [_shown(outcomes[key]) for key in batch.keys]
        return _json({"scores": scores, "cold": self._cold_starts() > cold})

    async def _outcomes(self, batch: ScoreBatch) -> _Outcomes | None:
        """By key; None where the deadline came first."""
        requests = batch.requests()
        known: dict[str, Scores | NotScored] = {key: self._answers[key] for key in requests if key in self._answers}
        fresh = [request for key, request in requests.items() if key not in known and key not in self._pending]
        if fresh:
            loop = asyncio.get_running_loop()
            self._pending |= {request.trajectory_id: loop.create_future() for request in fresh}
            self._tasks.create_task(self._score(fresh))
        waited = {key: self._pending[key] for key in requests if key not in known}
        if waited:
            timeout_s = None if batch.deadline_s == inf else batch.deadline_s
            _, late = await asyncio.wait(set(waited.values()), timeout=timeout_s)
            if late:
                return None
        return known | {key: future.result() for key, future in waited.items()}

    async def _score(self, requests: Sequence[Score]) -> None:
        """A trajectory's outcome goes to its callers once it is known, however long the others of its batch take."""

        def told(at: int, outcome: Scores | NotScored) -> None:
            key = requests[at].trajectory_id
            if (future := self._pending.pop(key, None)) is None:
                return  # it was told early
            if isinstance(outcome, Scores) or self._scorer.once(requests[at]):
                self._answers[key] = outcome
                while len(self._answers) > ANSWERS_KEPT:
                    self._answers.popitem(last=False)
            future.set_result(outcome)

        for at, outcome in enumerate(await self._scorer.score(requests, told)):
            told(at, outcome)

    def _cold_starts(self) -> float:
        return self._metrics.snapshot().get("reward/cold_starts", 0.0)


def _shown(outcome: Scores | NotScored) -> Any:
    return outcome.scores[0] if isinstance(outcome, Scores) else {"reason": outcome.reason, "detail": outcome.detail}


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def main(argv: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser("rubato serve-rewards", description="Serve a reward function over HTTP.")
    parser.add_argument("function", help="path/to/file.py:function, or package.module:function")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all of this host")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--workers", type=int, default=1, help="most processes that run the function")
    parser.add_argument("--min-workers", type=int, help="those that stay while no request comes (default: all)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="longest a call of the function may take")
    parser.add_argument("--memory-mb", type=int, default=8192, help="private writable memory of each process, in MiB")
    parser.add_argument("--sandbox", choices=("none", "bwrap"), default="none", help="run the function in a sandbox (docs/security.md)")
    parser.add_argument("--sandbox-read", action="append", default=[], metavar="PATH", help="what it shows beside the function's own file")
    parser.add_argument("--sandbox-network", action="store_true", help="it has the host's network")
    given = parser.parse_args(list(argv))
    check_module(given.function, key="serve-rewards")
    place, _, name = given.function.rpartition(":")
    if place.endswith(".py"):
        place = str(Path(place).expanduser().absolute())
    try:
        section = RewardSection(
            functions=(f"{place}:{name}",),
            workers=given.workers,
            min_workers=given.min_workers,
            timeout_s=given.timeout,
            memory_mb=given.memory_mb,
            sandbox=given.sandbox,
            sandbox_read=(*given.sandbox_read, *([place] if given.sandbox != "none" and place.endswith(".py") else [])),
            sandbox_network=given.sandbox_network,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise LaunchError(f"serve-rewards: {'.'.join(map(str, first['loc']))} {first['msg']}.".replace("  ", " ")) from None
    check_sandbox(section, "reward")
    return asyncio.run(_serve(section, given.host, given.port))


async def _serve(section: RewardSection, host: str, port: int) -> int:
    try:
        listening = bind_listener(host, port, backlog=MOST_CALLS)
    except (OSError, OverflowError) as error:
        raise LaunchError(f"can't listen at {host}:{port}: {error}. Give another --port.") from None
    function, metrics = section.functions[0], Metrics()
    scorer = Scorer(section, metrics=metrics, on_output=lambda line: print(line, flush=True))  # noqa: T201
    try:
        if problem := await scorer.start():
            raise LaunchError(problem)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scorer.run())
            served = RewardServer(function, scorer, metrics, tasks)
            server = HttpServer(uvicorn.Config(served.app, lifespan="off", ws="none", log_level="warning", limit_concurrency=MOST_CALLS))
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, server.end)
            print(f"serving {function} on http://{spelt(bare(host))}:{listening.getsockname()[1]}/", flush=True)  # noqa: T201
            await server.serve(sockets=[listening])
            await scorer.close()
            running.cancel()
    finally:
        await scorer.close()
        listening.close()
    return ExitCode.DONE
