"""Acts on a running job for the live view: drain, add, kill; each answers with one sentence or raises RubatoError."""

import os
import signal
import socket
from pathlib import Path
from typing import Protocol

from bus.message import Request
from runtime.errors import LaunchError
from runtime.messages import AddActors, Added, DrainActors, NotAdded, RestartActors
from runtime.monitor.views import ActorView

NODE_ROLE = "node"
"""The launcher's own actor: it is stopped with `rubato stop`, never killed from here."""


class Actions(Protocol):
    """What the live view may do to a run."""

    async def drain(self, name: str) -> str: ...
    async def restart(self, name: str) -> str: ...
    async def add(self, role: str) -> str: ...
    async def kill(self, actor: ActorView) -> str: ...


class RunActions:
    """Acts on the run in `folder` through its node agent, or by a signal to a process of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def drain(self, name: str) -> str:
        """Returns once it has exited; it is not restarted."""
        await self._ask(DrainActors((name,)))
        return f"{name} drained"

    async def restart(self, name: str) -> str:
        """Returns once its old process has ended; a new one is on its way."""
        await self._ask(RestartActors((name,)))
        return f"{name} restarted"

    async def add(self, role: str) -> str:
        """Start one more actor of `role`."""
        return f"{', '.join(await self._ask(AddActors(role, 1)))} added"

    async def kill(self, actor: ActorView) -> str:
        """SIGKILL, as a crash would be; the job's supervisor restarts it. Only processes of this host, never the launcher."""
        if actor["role"] == NODE_ROLE or actor["pid"] == os.getpid():
            raise LaunchError(
                f"{actor['name']} is not killed from here. Stop the job with: rubato stop --run {self._folder}"
            )
        if actor["host"] != socket.gethostname():
            raise LaunchError(
                f"{actor['name']} runs on {actor['host']}; only processes of this host can be killed from here."
            )
        try:
            os.kill(actor["pid"], signal.SIGKILL)
        except OSError as error:
            raise LaunchError(f"{actor['name']} (process {actor['pid']}) can't be killed: {error.strerror}.") from error
        return f"{actor['name']} killed (signal 9, process {actor['pid']})"

    async def _ask(self, request: Request[Added | NotAdded]) -> tuple[str, ...]:
        from runtime.guest import ask_node

        reply = await ask_node(self._folder, request, name=f"monitor-{os.getpid()}")
        assert isinstance(reply, Added), "what was not added was raised"
        return reply.names
