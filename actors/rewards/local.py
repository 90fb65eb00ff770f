"""Reward functions in killable worker processes of this host: as many as `reward.workers`, or from `reward.min_workers` to so many."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score
from rubato.actors.plugins import sandbox_wall
from rubato.actors.rewards.backend import CallLimit, RewardRefused, Told, checked, columns_of
from rubato.planning.autoscale import PoolBounds, PoolMeter, WorkersWanted, autoscale
from rubato.runtime.observe.figures import Metrics
from rubato.runtime.pool.errors import (
    BadResult,
    NoWorker,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from rubato.runtime.pool.pool import WorkerPool
from rubato.runtime.pool.sandbox import WorkerLimits
from rubato.runtime.pool.values import decode, encode_call

LOAD_S = 60.0
"""For importing a user's module: some load a model."""

LOAD_TRIES = 3
"""Of one function, while its worker dies as it loads."""

KILLED_TRIES = 3
"""Tries of a call that was only a bystander of another one's death."""

IDEMPOTENT = "idempotent"
"""Attribute of a function: where it is False no trajectory is asked for twice."""

OnOutput = Callable[[str], None]


class LocalBackend:
    """A fixed number of processes, each with every function loaded."""

    def __init__(self, section: RewardSection, metrics: Metrics, limit: CallLimit, on_output: OnOutput | None = None) -> None:
        self._functions = _Functions(section, metrics, limit)
        self._pool = _pool(section, section.workers, on_output)
        metrics.gauge("reward/workers", section.workers)

    async def load(self, function: str) -> str:
        return await self._functions.load(self._pool, function)

    async def call(self, function: str, requests: Sequence[Score]) -> list[float | NotScored]:
        return await self._functions.call(self._pool, function, requests)

    async def each(self, function: str, requests: Sequence[Score], told: Told) -> None:
        await self._functions.each(self._pool, function, requests, told)

    def once(self, function: str) -> bool:
        return self._functions.once(function)

    async def run(self) -> None:
        """Nothing: a call starts what it needs."""

    async def close(self) -> None:
        await self._pool.close()


class ElasticBackend:
    """From `reward.min_workers` to `reward.workers` processes, as `rubato.planning.autoscale` has it; a call waits for one that is free.

    Processes are started and ended by `run` alone.
    """

    def __init__(self, section: RewardSection, metrics: Metrics, limit: CallLimit, on_output: OnOutput | None = None) -> None:
        self._metrics = metrics
        self._functions = _Functions(section, metrics, limit)
        self._new_pool = partial(_pool, section, 1, on_output)
        self._bounds = PoolBounds(section.min_workers or 0, section.workers)
        self._meter = PoolMeter()
        self._loaded: list[str] = []
        self._waiting: deque[asyncio.Future[WorkerPool]] = deque()
        self._all: set[WorkerPool] = set()
        self._idle: list[WorkerPool] = []
        self._busy: set[WorkerPool] = set()
        self._starting = 0
        self._plan = WorkersWanted(0, "nothing was asked yet")
        self._changed = asyncio.Event()
        self._closed = False
        metrics.gauge("reward/workers", 0)

    @property
    def num_workers(self) -> int:
        """Processes that serve, and those on their way."""
        return len(self._idle) + len(self._busy) + self._starting

    async def load(self, function: str) -> str:
        """Tried in a process that serves afterwards, until it is found to be one too many."""
        pool = self._idle[0] if self._idle else self._one()
        if problem := await self._functions.load(pool, function):
            return problem
        self._loaded.append(function)
        if not self._idle:
            self._idle.append(pool)
            self._metrics.gauge("reward/workers", self.num_workers)
        return ""

    async def call(self, function: str, requests: Sequence[Score]) -> list[float | NotScored]:
        loop = asyncio.get_running_loop()
        self._meter.arrived(loop.time())
        pool = await self._free_worker()
        began = loop.time()
        try:
            return await self._functions.call(pool, function, requests)
        finally:
            self._meter.served(loop.time() - began)
            self._busy.discard(pool)
            self._free(pool)

    async def each(self, function: str, requests: Sequence[Score], told: Told) -> None:
        self._meter.arrived(asyncio.get_running_loop().time())
        try:
            pool = await self._free_worker()
        except RewardRefused as error:
            for at in range(len(requests)):
                told(at, NotScored(error.reason, error.detail))
            return
        try:
            await self._functions.each(pool, function, requests, told)
        finally:
            self._busy.discard(pool)
            self._free(pool)

    def once(self, function: str) -> bool:
        return self._functions.once(function)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._closed:
                self._changed.clear()
                wait_s = self._follow(tasks)
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass  # what was kept for a while may go

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        for waiting in self._waiting:
            _fail(waiting, NoWorker("the pool was closed"))
        self._idle.clear()
        for pool in list(self._all):
            await self._end(pool)

    def _follow(self, tasks: asyncio.TaskGroup) -> float | None:
        """Start and end processes as planned now; returns when to plan again even if nothing happens (None: then only)."""
        now = asyncio.get_running_loop().time()
        load = self._meter.load(now, waiting=len(self._waiting), running=len(self._busy), workers=self.num_workers)
        self._plan = autoscale(load, self._bounds, self._plan)
        for _ in range(self._plan.workers - self.num_workers):
            self._starting += 1
            tasks.create_task(self._start())
        while self._idle and self.num_workers > self._plan.workers:
            tasks.create_task(self._end(self._idle.pop()))
        self._metrics.gauge("reward/workers", self.num_workers)
        return None if self._plan.again_s is None else max(0.0, self._plan.again_s - now)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        began, pool = loop.time(), self._one()
        self._metrics.count("reward/cold_starts")
        try:
            for function in self._loaded:
                await pool.preload(function, deadline_s=LOAD_S)
        except PoolError as error:
            self._starting -= 1
            if self._waiting:  # so that a pool which can start nothing ends with as many errors as there were calls
                _fail(self._waiting.popleft(), error)
            self._changed.set()
            await self._end(pool)
        else:
            self._starting -= 1
            self._meter.started(loop.time() - began)
            self._free(pool)

    def _one(self) -> WorkerPool:
        pool = self._new_pool()
        self._all.add(pool)
        return pool

    async def _end(self, pool: WorkerPool) -> None:
        await pool.close()
        self._all.discard(pool)

    async def _free_worker(self) -> WorkerPool:
        if self._closed:
            raise RewardRefused("lost", "no process could be started for it: the pool was closed")
        if self._idle and not self._waiting:
            pool = self._idle.pop()
            self._busy.add(pool)
            self._changed.set()
            return pool
        waiting: asyncio.Future[WorkerPool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._changed.set()
        try:
            return await waiting
        except PoolError as error:
            raise RewardRefused("lost", f"no process could be started for it: {error}") from error
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._busy.discard(waiting.result())
                self._free(waiting.result())
            raise

    def _free(self, pool: WorkerPool) -> None:
        """To the call that waits longest, or among the idle ones."""
        self._changed.set()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                self._busy.add(pool)
                waiting.set_result(pool)
                return
        if not self._closed:
            self._idle.append(pool)


class _Functions:
    """Calls of functions in a pool, and what their signatures take."""

    def __init__(self, section: RewardSection, metrics: Metrics, limit: CallLimit) -> None:
        self._section = section
        self._metrics = metrics
        self._limit = limit
        self._takes: dict[str, Sequence[str]] = {}
        self._once: set[str] = set()

    async def load(self, pool: WorkerPool, function: str) -> str:
        try:
            await self._load(pool, function)
        except TargetMissing as error:
            return f"reward function {error}"
        except PoolError as error:
            return f"reward function {function} can't be loaded: {describe(error)}"
        return ""

    async def _load(self, pool: WorkerPool, function: str) -> None:
        """A worker that ended meanwhile may have been killed from outside: no reason to end a job at the first time."""
        for tries_left in reversed(range(LOAD_TRIES)):
            try:
                traits = await pool.preload(function, deadline_s=LOAD_S, attributes=(IDEMPOTENT,))
                self._takes[function] = traits.takes
                if traits.declared.get(IDEMPOTENT) is False:
                    self._once.add(function)
                return
            except (WorkerDied, WorkerKilled):
                if not tries_left:
                    raise

    def once(self, function: str) -> bool:
        return function in self._once

    async def each(self, pool: WorkerPool, function: str, requests: Sequence[Score], told: Told) -> None:
        loop = asyncio.get_running_loop()
        began, takes = loop.time(), self._takes.get(function, ("**",))
        limit_s = self._limit.of(function, requests)

        def ended(at: int, result: bytes | PoolError) -> None:
            if isinstance(result, WorkerTimeout):
                told(at, NotScored(result.reason, f"{function} failed: no answer within {limit_s:g} s, asked alone"))
            elif isinstance(result, PoolError):
                told(at, NotScored(result.reason, f"{function} {describe(result)}{self._limits(result)}"))
            else:
                try:
                    (score,) = checked(function, decode(result), 1)
                except RewardRefused as error:
                    told(at, NotScored(error.reason, error.detail))
                else:
                    self._metrics.count("reward/scored")
                    told(at, score)

        payloads = [_arguments([request], takes) for request in requests]
        await pool.apply_each(function, payloads, deadline_s=limit_s, told=ended)
        self._metrics.count("reward/busy_s", loop.time() - began)

    async def call(self, pool: WorkerPool, function: str, requests: Sequence[Score]) -> list[float | NotScored]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            found = await self._call(pool, function, requests)
        finally:
            self._metrics.count("reward/busy_s", loop.time() - began)
        self._metrics.count("reward/scored", len(found))
        return [*found]

    async def _call(self, pool: WorkerPool, function: str, requests: Sequence[Score]) -> list[float]:
        arguments, seconds = _arguments(requests, self._takes.get(function, ("**",))), [0.0]
        for tries_left in reversed(range(KILLED_TRIES)):
            limit_s = self._limit.of(function, requests)
            try:
                reply = await pool.apply(function, arguments, deadline_s=limit_s, took=seconds.append)
            except WorkerKilled as error:
                if not tries_left:
                    raise RewardRefused(error.reason, f"{function}: {error}") from error
            except PoolError as error:
                raise RewardRefused(error.reason, f"{function} {describe(error)}{self._limits(error)}") from error
            else:
                scores = checked(function, decode(reply), len(requests))
                self._limit.took(function, requests, scores, seconds[-1])
                return scores
        raise AssertionError

    def _limits(self, error: PoolError) -> str:
        if not (isinstance(error, UserCodeRaised) and error.at_limit):
            return ""
        return f" (reward.memory_mb={self._section.memory_mb}, reward.max_processes={self._section.max_processes})"


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


def _arguments(requests: Sequence[Score], takes: Sequence[str]) -> bytes:
    """Completions, then one list per column that any of the requests has and the function `takes`."""
    rows = [columns_of(request) for request in requests]
    names = dict.fromkeys(name for row in rows for name in row if name in takes or "**" in takes)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    return encode_call(completions=["\n".join(request.completions) for request in requests], **columns)


def _pool(section: RewardSection, workers: int, on_output: OnOutput | None) -> WorkerPool:
    limits = WorkerLimits(section.memory_mb, max_processes=section.max_processes, writes=False)
    return WorkerPool(workers=workers, limits=limits, on_output=on_output, wall=sandbox_wall(section))


def _fail(waiting: "asyncio.Future[WorkerPool]", error: PoolError) -> None:
    if not waiting.done():
        waiting.set_exception(error)
