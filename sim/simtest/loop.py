"""SimLoop: the virtual loop of a whole system, which knows whose callback runs and can hold one process back."""

import asyncio
import itertools
import math
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, Protocol

from rubato.sim.virtual import Deadlock, VirtualLoop


class Scheduled(Protocol):
    """What the loop asks of a process before it runs a callback of it."""

    frozen: bool
    resumes_at: float
    """Loop time before which nothing of it runs: its loop is busy."""
    slowness_s: float
    """What each of its callbacks costs."""
    held: list[asyncio.Handle]


current_process: ContextVar[Scheduled | None] = ContextVar("sim_process", default=None)
"""Inherited by everything a process starts: its tasks, timers and callbacks."""


class SimTask(asyncio.Task[Any]):
    """Hashes by its number: asyncio keeps tasks in sets, and an order by address would differ from run to run."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> None:
        self.number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.number


class SimLoop(VirtualLoop):
    """A frozen process's callbacks wait until it is thawed; those of a slow one run `slowness_s` apart."""

    def __init__(self, seed: int | None = None, *, limit_s: float) -> None:
        super().__init__(seed, limit_s=limit_s)
        self._holding: dict[int, Scheduled] = {}
        numbers = itertools.count(1)
        self.set_task_factory(lambda loop, coro, **kwargs: SimTask(next(numbers), coro, loop=loop, **kwargs))  # type: ignore[arg-type, misc]

    def thaw(self, process: Scheduled) -> None:
        """Let everything that was held back run, in its order."""
        process.frozen = False
        held, process.held = process.held, []
        for handle in held:
            self._queue.append(handle)

    def thaw_all(self) -> None:
        """Let all processes run again: for the clean-up."""
        for process in self._holding.values():
            process.slowness_s = process.resumes_at = 0.0
            self.thaw(process)
        self._holding.clear()

    def _wake_due(self) -> None:
        try:
            super()._wake_due()
        except Deadlock:  # said once; what cleans up afterwards must be able to run
            self._limit_s = math.inf
            self.thaw_all()
            raise

    def _run_once(self) -> None:
        self._wake_due()
        handle = self._draw()
        if handle.cancelled():
            return
        process = handle._context.get(current_process)  # type: ignore[attr-defined]
        if process is None or not self._holds(process, handle):
            self.num_steps += 1
            handle._run()  # type: ignore[attr-defined]

    def _holds(self, process: Scheduled, handle: asyncio.Handle) -> bool:
        if not process.frozen and process.resumes_at <= self._now:
            if process.slowness_s:
                process.resumes_at = self._now + process.slowness_s
            return False
        if not process.frozen and not process.held:
            self.call_at(process.resumes_at, self._go_on, process)
        process.held.append(handle)
        self._holding[id(process)] = process
        return True

    def _go_on(self, process: Scheduled) -> None:
        if not process.frozen:
            self.thaw(process)
