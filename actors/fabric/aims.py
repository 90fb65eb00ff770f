"""What the fabric works towards: at most one aim for the phase that runs and one for the phase to come, the one due first comes first."""

import asyncio
from typing import NamedTuple


class Aim(NamedTuple):
    """Circuits to work towards: those of `phase`, beginning the change at `due` (times are loop times)."""

    phase: str
    due: float
    starts_at: float
    """When the phase began, or is expected to."""
    restore: bool = False
    """The switch lost its circuits: however short the phase, it needs a connected fabric."""


class Aims:
    """A new aim replaces the one of its kind."""

    def __init__(self) -> None:
        self.present: Aim | None = None
        self.coming: Aim | None = None
        self._changed = asyncio.Event()

    def now(self, aim: Aim) -> None:
        self.present = aim
        self._changed.set()

    def later(self, aim: Aim) -> None:
        self.coming = aim
        self._changed.set()

    async def next(self) -> Aim:
        """Waits until an aim is due, and takes it."""
        while True:
            self._changed.clear()
            aim = min((a for a in (self.present, self.coming) if a), key=lambda a: a.due, default=None)
            try:
                async with asyncio.timeout_at(aim.due if aim else None):
                    await self._changed.wait()
            except TimeoutError:
                if aim is not None and aim is self.present:
                    self.present = None
                    return aim
                if aim is not None and aim is self.coming:
                    self.coming = None
                    return aim
