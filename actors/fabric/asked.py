"""Circuits that somebody asked for between two phases: promised, lit or not to be had, one epoch after the other."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from actors.messages.fabric import CircuitsReady, NoCircuits

RESHARD = "reshard"
"""Stands for the phase where circuits are asked for."""


class AskedCircuits:
    """Of the newest epoch; that of an older one is over."""

    def __init__(self) -> None:
        self.epoch = -1
        self.lent = False
        """Whether the asker has them, or is about to, in place of the phase's own."""
        self._answer: asyncio.Future[str] | None = None

    def begin(self, epoch: int) -> None:
        self.settle(f"epoch {epoch} was asked for instead")
        self.epoch, self.lent, self._answer = epoch, True, asyncio.get_running_loop().create_future()

    def settle(self, why_not: str = "") -> None:
        """They are lit, or `why_not`; the first word counts."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(why_not)

    @contextmanager
    def told(self, epoch: int) -> Generator[None]:
        """What comes of the block is the outcome of those of `epoch`, if nobody asked for others meanwhile."""
        try:
            yield
        except Exception as error:
            if epoch == self.epoch:
                self.settle(str(error) or type(error).__name__)
            raise
        if epoch == self.epoch:
            self.settle()

    async def outcome(self, epoch: int) -> CircuitsReady | NoCircuits:
        if epoch != self.epoch or self._answer is None:
            return NoCircuits(f"epoch {epoch} is not the one that was asked for last, which is {self.epoch}")
        why_not = await asyncio.shield(self._answer)
        return NoCircuits(why_not) if why_not else CircuitsReady(epoch)
