"""Phases of a program of one's own, which takes turns with other jobs on the pools of a cluster: `with phase("rollout"): …`."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Self

from actors.cluster import check_pool, permits_of
from actors.config import ClusterSection
from actors.permits import Grant, PermitLost, Permits
from runtime.errors import ConfigError


class Phases:
    """The pools of the cluster in the folder `cluster`, for `job`. `pools` says on which pool each phase runs; one that it lacks runs on
    the pool of its own name. Pools of a cluster that places jobs are called as `rubato monitor CLUSTER` shows them.

    The permit is renewed by a thread of this object, so the program may compute without a pause. Used as a context manager, it lets go of
    the cluster at the end. Raises ConfigError where no cluster is up, or it has no such pool.
    """

    def __init__(self, cluster: str, job: str, pools: Mapping[str, str] | None = None) -> None:
        self._section = ClusterSection(dir=cluster, job=job)
        self._pools = pools or {}
        for phase in self._pools:
            self._pool(phase)
        self._loop: asyncio.AbstractEventLoop
        self._leaving: asyncio.Event
        reached = Future[Permits]()
        name, work = f"rubato.permits.{job}", self._serve(reached)
        self._thread = threading.Thread(target=asyncio.run, args=(work,), name=name, daemon=True)
        self._thread.start()
        self._permits = reached.result()

    def __call__(self, name: str) -> "Phase":
        """A context manager, and a decorator, that waits for the permit of the phase's pool, and gives it back.

        Raises ConfigError where the cluster has no such pool.
        """
        self._pool(name)
        return Phase(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()

    def _pool(self, phase: str) -> str:
        pool = self._pools.get(phase, phase)
        check_pool(Path(self._section.dir), pool, f"the pool of phase {phase}")
        return pool

    async def _serve(self, reached: "Future[Permits]") -> None:
        self._loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with permits_of(self._section) as permits:
                reached.set_result(permits)
                await self._leaving.wait()
        except ConfigError as error:
            reached.set_exception(error)

    def begin(self, phase: str) -> "tuple[Grant, asyncio.Event, Future[None]]":
        """The grant once it is held, what ends it, and its end."""
        granted, over = Future[Grant](), asyncio.Event()
        held = asyncio.run_coroutine_threadsafe(self._hold(phase, granted, over), self._loop)
        return granted.result(), over, held

    def end(self, over: asyncio.Event, held: "Future[None]") -> None:
        """Give it back."""
        self._loop.call_soon_threadsafe(over.set)
        held.result()

    async def _hold(self, phase: str, granted: "Future[Grant]", over: asyncio.Event) -> None:
        async with self._permits.hold(self._pool(phase), phase, self._section.job) as grant:
            granted.set_result(grant)
            await over.wait()


class Phase(ContextDecorator):
    """See `Phases`. The block gets its grant; where that is lost by the end of the block, PermitLost is raised there."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def _recreate_cm(self) -> "Phase":
        return Phase(self._phases, self._name)

    def __enter__(self) -> Grant:
        self._grant, self._over, self._held = self._phases.begin(self._name)
        return self._grant

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lost = self._grant.lost.is_set()
        self._phases.end(self._over, self._held)
        if lost and error is None:
            raise PermitLost(
                f"the permit of {self._grant.pool} was lost within the phase {self._name}: do that phase again."
            )
