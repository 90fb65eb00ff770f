"""One simulated process: a kernel with its own view of Store, blobs and network, which can be killed, frozen or slowed."""

import asyncio
from typing import Any

from bus.memory import MemoryTransport
from runtime.kernel import Kernel


class Killed(Exception):
    """Raised inside a process that was killed at this very point: nothing it does afterwards has any effect."""


class ActorProcess:
    """One incarnation. `alive` ends for good; a frozen process is alive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.role = name.rpartition("-")[0]
        self.drawn = 0
        """The incarnation it started as."""
        self.alive = True
        self.leaving = False
        """It was asked to drain: its end is expected."""
        self.frozen = False
        self.resumes_at = 0.0
        self.slowness_s = 0.0
        self.thawed_at = 0.0
        self.held: list[asyncio.Handle] = []
        self.kernel: Kernel | None = None
        self.transport: MemoryTransport | None = None
        self.task: asyncio.Task[Any] | None = None
        self.ended = asyncio.Event()

    @property
    def incarnation(self) -> int:
        """The present one: a process that was silent for long comes back as a new one."""
        return self.drawn if self.kernel is None else self.kernel.incarnation

    @property
    def actor(self) -> Any:
        """The actor object, once built."""
        return None if self.kernel is None else self.kernel._actor  # pyright: ignore[reportPrivateUsage]

    def check_alive(self) -> None:
        """Raises Killed in a process that is dead already: its clean-up has no effects."""
        if not self.alive:
            raise Killed(self.name)

    def kill(self) -> None:
        """SIGKILL: links end, nothing more has any effect. What clean-up code runs, runs in vain."""
        if not self.alive:
            return
        self.alive = False
        if self.transport is not None:
            self.transport.die()
        if self.task is not None:
            self.task.cancel()
