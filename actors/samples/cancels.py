"""Tells holders of tickets which of their rollouts nothing can come of any more, so that they stop at once.

A hint, and so not durable: the holder says of each what it had sampled, and the sample buffer judges that as it judges everything else. A
cancel that is lost is told again when the holder renews its tickets.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from actors.messages.samples import Cancel
from actors.samples.groups import Groups
from actors.samples.journal import Wake
from bus.errors import AskFailed
from runtime.courier import Ref

TELL_S = 1.0
"""A holder that grants no credit for this long hears of it at its next renewal."""


@dataclass(eq=False)
class Cancels:
    """Tells what `groups.cancels` gathers, whenever `changed` wakes."""

    groups: Groups
    changed: Wake
    issuer: int
    """The sample buffer's incarnation."""
    ref: Callable[[str], Ref]

    async def follow(self) -> None:
        """Tell whatever comes, until cancelled."""
        while True:
            changed = self.changed.event
            for (holder, incarnation), rollouts in self.groups.take_cancels().items():
                with suppress(AskFailed, TimeoutError):
                    async with asyncio.timeout(TELL_S):
                        await self.ref(holder).tell(Cancel(tuple(rollouts), incarnation, self.issuer))
            await changed.wait()
