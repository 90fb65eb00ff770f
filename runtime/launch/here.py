"""The placer of a laptop: each placed host is one more node agent, with actors of its own, on this host."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from rubato.runtime.config import Config
from rubato.runtime.launch.children import start_module
from rubato.runtime.launch.folder import make_private
from rubato.runtime.launch.placer import HostSpec, JoinCommand, NotPlaced
from rubato.runtime.launch.processes import ActorChild


class ThisHost:
    """A HostPlacer. What it placed ends with the launcher, however that ends; its logs and folders are in RUN/hosts."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._labels, self._folder = config.host.labels, folder / "hosts"
        self._numbers = itertools.count(1)
        self.hosts: set[LocalHost] = set()

    async def place(self, spec: HostSpec, join: JoinCommand) -> "LocalHost":
        if missing := [label for label in spec.labels if label not in self._labels]:
            raise NotPlaced(f"this host is none of {', '.join(missing)}: add that to host.labels, or change launch.backend.")
        if spec.gpus:
            raise NotPlaced("this host's GPUs go to its own pools: raise the count of these, or change launch.backend.")
        make_private(self._folder)
        host = await start_here(join, self._folder / f"{spec.name}.{next(self._numbers)}.log", self.hosts.discard)
        self.hosts.add(host)
        return host

    async def close(self) -> None:
        for host in tuple(self.hosts):
            await host.release()


class LocalHost(ActorChild):
    """A PlacedHost: the process of its node agent, with which all that it started ends."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, released: Callable[["LocalHost"], None]) -> None:
        super().__init__(process, log, log)
        self.id, self._released = str(process.pid), released

    async def release(self) -> None:
        self.kill()
        await self.ended()
        self._released(self)


async def start_here(join: JoinCommand, log: Path, released: Callable[[LocalHost], None]) -> LocalHost:
    """Run `join` on this host, in the folder of its `log`."""
    with log.open("wb") as file:
        process = await start_module(
            join.module, *join.arguments,
            cwd=log.parent, stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(f"{join.token}\n".encode())
    process.stdin.close()
    return LocalHost(process, log, released)
