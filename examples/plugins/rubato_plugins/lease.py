"""ComputeLease: trainers of any jobs on one host take turns, a step at a time, by a lock on a file.

HOST_LOCK=/run/lock/gpu-0 rubato launch CONFIG cluster.lease=rubato_plugins.lease:HostTurns
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from rubato.actors.cluster.lease import TRAINING, AlwaysHeld, Held
from rubato.runtime.actor import Actor


class Turn(Held):
    """The lock, while a block holds it. The system takes it from a process that died."""

    def __init__(self, actor: Actor, waited_s: float) -> None:
        super().__init__(actor)
        self.waited_s = waited_s

    @property
    def figures(self) -> Mapping[str, float]:
        return {"turns/waited_s": self.waited_s}


class HostTurns(AlwaysHeld):
    """Training alone waits for the lock; engines compute whenever they have something to compute."""

    @asynccontextmanager
    async def __call__(self, phase: str) -> AsyncGenerator[Held]:
        if phase != TRAINING:
            yield Held(self.actor)
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        with Path(os.environ["HOST_LOCK"]).open("ab") as file:  # noqa: ASYNC230 - an empty file of this host
            await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
            yield Turn(self.actor, loop.time() - began)
