"""One simulated process: a kernel with its own view of Store, blobs and network, which can be killed, frozen or slowed."""

import asyncio
from collections.abc import Callable
from typing import Any

from rubato.bus.memory import MemoryTransport
from rubato.runtime.host import Ending, HostedTask
from rubato.runtime.registry import role_of
from rubato.sim.simtest.loop import current_process


class Killed(Exception):
    """Raised inside a process that was killed at this very point: nothing it does afterwards has any effect."""


class ActorProcess(HostedTask):
    """One incarnation. `alive` ends for good; a frozen process is alive."""

    def __init__(self, name: str, failed: "Callable[[ActorProcess, BaseException], None]") -> None:
        super().__init__(name)
        self.context.run(current_process.set, self)
        self.role = role_of(name)
        self.drawn = 0
        """The incarnation it started as."""
        self.alive = True
        self.frozen = False
        self.resumes_at = 0.0
        self.slowness_s = 0.0
        self.thawed_at = 0.0
        self.held: list[asyncio.Handle] = []
        self.transport: MemoryTransport | None = None
        self.at_death: dict[object, Callable[[], None]] = {}
        """What its end does at once to those who hold a connection to it."""
        self._failed = failed

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
        self._die()
        super().kill()

    def give_up(self) -> None:
        """Its supervisor takes it for dead, whatever it is."""
        super().over()

    def failed(self, error: BaseException) -> None:
        if self.alive:
            self._failed(self, error)

    def over(self) -> None:
        self._die()
        super().over()

    def _die(self) -> None:
        self.alive = False
        for end in list(self.at_death.values()):
            end()
        if self.transport is not None:
            self.transport.die()


class Place:
    """A name, whichever process has it: the supervisor's view of its process, and of one that took its place."""

    def __init__(self, name: str, holder: Callable[[str], ActorProcess], hangs: Callable[[str], None]) -> None:
        self._name, self._holder, self._hangs = name, holder, hangs

    def drain(self) -> None:
        self._holder(self._name).drain()

    def kill(self) -> None:
        self._hangs(self._name)
        self._holder(self._name).kill()

    def is_stopped(self) -> bool:
        return self._holder(self._name).frozen

    async def ended(self) -> Ending:
        while True:
            process = self._holder(self._name)
            ending = await process.ended()
            if self._holder(self._name) is process:
                return ending
