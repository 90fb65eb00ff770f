"""What the job's actors sent each other in a phase, counted where it was sent."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from rubato.bus.errors import AskFailed
from rubato.planning.demand import Demand
from rubato.planning.volumes import Way
from rubato.runtime.actor import Actor
from rubato.runtime.messages import BytesCounted, CountBytes
from rubato.runtime.registry import role_of

COUNT_S = 1.0
"""For the answers of all actors: a phase that is over is counted while the next one runs."""

LEFT_OUT = frozenset({"node", "fabric_controller", "optical_switch"})
"""Roles that are not counted: what node agents carry are weights, of which the trainer tells, and the others are the fabric's own."""


class Meter:
    """Of one controller."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._before: Mapping[str, BytesCounted] | None = None
        """As last read; None before the first time."""
        self._counting = asyncio.Lock()
        self._missed = False
        """A phase ended while another one was counted: what is counted next is of several."""

    async def since(self) -> tuple[Demand, ...] | None:
        """Bytes between actors since the last call; None where that is not known, as at the first."""
        if self._counting.locked():
            self._missed = True
            return None
        async with self._counting:
            missed, self._missed, before = self._missed, False, self._before
            now = await self._read()
            silent = {name: counted for name, counted in (before or {}).items() if name not in now and self._actor.directory.find(name)}
            self._before = now | silent
        if before is None or missed:
            return None
        found: Counter[Way] = Counter()
        for name, counted in now.items():
            earlier = before.get(name)
            if earlier is None or earlier.incarnation != counted.incarnation:
                earlier = BytesCounted(counted.incarnation, {}, {})
            found.update(
                {(name, other): size - earlier.sent.get(other, 0) for other, size in counted.sent.items() if other in self._before}
            )
            found.update(
                {(other, name): size - earlier.came.get(other, 0) for other, size in counted.came.items() if other in self._before}
            )
        return tuple((*way, size) for way, size in sorted(found.items()) if size > 0)

    async def _read(self) -> dict[str, BytesCounted]:
        """Of those that answer in time."""

        async def one(name: str) -> BytesCounted | None:
            try:
                return await self._actor.ref(name).ask(CountBytes(), timeout=COUNT_S, retry=False)
            except AskFailed:
                return None

        names = [name for name in sorted(self._actor.directory.names()) if role_of(name) not in LEFT_OUT]
        read = await asyncio.gather(*map(one, names))
        return {name: counted for name, counted in zip(names, read, strict=True) if counted is not None}
