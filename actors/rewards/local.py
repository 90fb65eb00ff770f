"""Scores trajectories by user functions in killable worker processes; each failure has a name."""

import asyncio
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast

import msgspec

from actors.config import RewardSection
from actors.messages.samples import MOST_REWARD, NotScored, Score, Scores, flaw_of_reward
from runtime.pool.errors import (
    BadResult,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from runtime.pool.pool import Unsendable, WorkerPool, decode, encode_call
from runtime.pool.sandbox import WorkerLimits

LOAD_S = 60.0
"""For importing a user's module: some load a model."""

LOAD_TRIES = 3
"""Of one function, while its worker dies as it loads."""

KILLED_TRIES = 3
"""Tries of a call that was only a bystander of another one's death."""

ALONE_TIMEOUTS = 3
"""A batch that failed is tried one by one for this many times `reward.timeout_s`; what is left then fails as the batch did."""


class LocalScorer:
    """Runs `reward.functions` one after another over a batch of requests."""

    def __init__(self, section: RewardSection, *, on_output: Callable[[str], None] | None = None) -> None:
        self._section = section
        self._pool = WorkerPool(
            workers=section.workers,
            limits=WorkerLimits(section.memory_mb, max_processes=section.max_processes, writes=False),
            on_output=on_output,
        )

    async def start(self) -> str:
        """Load every function in every worker; returns "" or the sentence that says which one can't be used."""
        for name in self._section.functions:
            try:
                await self._load(name)
            except TargetMissing as error:
                return f"reward function {error}"
            except PoolError as error:
                return f"reward function {name} can't be loaded: {describe(error)}"
        return ""

    async def _load(self, name: str) -> None:
        """A worker that ended meanwhile may have been killed by somebody else: no reason to end a job at the first time."""
        for _ in range(LOAD_TRIES - 1):
            try:
                return await self._pool.preload(name, deadline_s=LOAD_S)
            except (WorkerDied, WorkerKilled):
                continue
        return await self._pool.preload(name, deadline_s=LOAD_S)

    async def close(self) -> None:
        """Kill the workers."""
        await self._pool.close()

    async def score(self, requests: Sequence[Score]) -> list[Scores | NotScored]:
        """One reply per request. When a batch fails, each of its members is tried alone, so that one bad trajectory costs no other."""
        try:
            return [*await self._score(requests)]
        except _Refused as error:
            if len(requests) == 1:
                return [NotScored(error.reason, error.detail)]
            return await self._one_by_one(requests, error)

    async def _one_by_one(self, requests: Sequence[Score], together: "_Refused") -> list[Scores | NotScored]:
        """Bounded as a whole: were each of a full batch given its own timeout, the last would wait for minutes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + ALONE_TIMEOUTS * self._section.timeout_s
        replies: list[Scores | NotScored] = []
        for request in requests:
            if loop.time() < end:
                replies += await self.score([request])
            else:
                replies.append(NotScored(together.reason, f"{together.detail} (in one call with others)"))
        return replies

    async def _score(self, requests: Sequence[Score]) -> list[Scores]:
        found: list[tuple[float, ...]] = [() for _ in requests]
        arguments = _arguments(requests)
        for name in self._section.functions:
            numbers = await self._call(name, arguments, len(requests))
            found = [(*scores, number) for scores, number in zip(found, numbers, strict=True)]
        return [Scores(scores) for scores in found]

    async def _call(self, name: str, arguments: bytes, num: int) -> list[float]:
        for tries_left in reversed(range(KILLED_TRIES)):
            try:
                reply = await self._pool.apply(name, arguments, deadline_s=self._section.timeout_s)
            except WorkerKilled as error:
                if not tries_left:
                    raise _Refused(error.reason, f"{name}: {error}") from error
            except PoolError as error:
                raise _Refused(error.reason, f"{name} {describe(error)}{self._limits(error)}") from error
            else:
                return _checked(name, decode(reply), num)
        raise AssertionError

    def _limits(self, error: PoolError) -> str:
        if not (isinstance(error, UserCodeRaised) and error.at_limit):
            return ""
        return f" (reward.memory_mb={self._section.memory_mb}, reward.max_processes={self._section.max_processes})"


class _Refused(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def describe(error: PoolError) -> str:
    """What user code did, for the middle of a sentence."""
    match error:
        case UserCodeRaised():
            return f"raised {error.text} at {error.where}"
        case WorkerTimeout() | WorkerDied(reason="exited" | "crashed"):
            return f"failed: {error}"
        case BadResult():
            return f"returned nothing usable: {error}"
        case _:
            return str(error)


def _arguments(requests: Sequence[Score]) -> bytes:
    """Completions, then one list per column that any of the requests has."""
    rows: list[dict[str, Any]] = []
    for request in requests:
        row = msgspec.msgpack.decode(request.columns, type=dict[str, Any])
        rows.append({**row, "texts": list(request.completions)})
    names = dict.fromkeys(name for row in rows for name in row if name != "completions")
    columns = {name: [row.get(name) for row in rows] for name in names}
    return encode_call(completions=["\n".join(request.completions) for request in requests], **columns)


def _checked(name: str, result: Any, num: int) -> list[float]:
    if not isinstance(result, list):
        kind = result.type_name if isinstance(result, Unsendable) else type(result).__name__
        raise _Refused("wrong_type", f"{name} returned a {kind} instead of a list of numbers")
    numbers = cast("list[Any]", result)
    if len(numbers) != num:
        raise _Refused("wrong_length", f"{name} returned {len(numbers)} numbers for {num} trajectories")
    for number in numbers:
        if not isinstance(number, Real):
            kind = number.type_name if isinstance(number, Unsendable) else type(number).__name__
            raise _Refused("wrong_type", f"{name} returned a {kind} instead of a number")
        if flaw := flaw_of_reward(float(number)):
            most = f", more than ±{MOST_REWARD:g}" if flaw == "out_of_range" else ""
            raise _Refused(flaw, f"{name} returned {number}{most}")
    return [float(number) for number in numbers]
