"""A user's own process inside a running job: typed asks to its actors, without being supervised by it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from runtime.actor import Actor, ActorConfig
from runtime.kernel import Kernel
from runtime.launch.connection import connect


class Guest(Actor):
    """Has no handlers of its own: it only asks."""

    role: ClassVar[str] = "guest"


@asynccontextmanager
async def join(folder: str | Path, *, name: str = "guest-1") -> AsyncIterator[Guest]:
    """Join the run in `folder` from its own host: `async with join("runs/a") as me: await me.ref("llm_proxy").ask(…)`.

    The guest appears in the monitor under `name` and leaves when the block ends; what it held (tickets) is then reissued.
    Raises LaunchError when no run is up there.
    """
    async with connect(Path(folder)) as connection:
        kernel = await connection.kernel(Guest, ActorConfig(), name)
        async with serving(kernel) as guest:
            yield guest


@asynccontextmanager
async def serving(kernel: Kernel) -> AsyncIterator[Actor]:
    """Run `kernel` beside the block, drained when the block ends."""
    actor = kernel.build()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kernel.serve(), name=f"serve.{kernel.name}")
        await kernel.ready.wait()
        try:
            yield actor
        finally:
            kernel.stop()
