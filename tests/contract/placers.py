"""What the placer contract runs over: a placer, and what only its engine can do to the hosts that it placed."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rubato.runtime.config import Config
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.host import Ending
from rubato.runtime.launch.children import until_gone
from rubato.runtime.launch.here import ThisHost
from rubato.runtime.launch.placer import HostPlacer, HostSpec, JoinCommand, NotPlaced, PlacedHost
from rubato_plugins.placer import Prefixed

LIMIT_S = 30.0
COMMAND = "tests.contract.placed_command"
ANY = HostSpec("far", 2, {"far": 2}, {"env_manager": 1})


def does(*what: str, token: str = "secret") -> JoinCommand:
    """A command that does `what`: see placed_command."""
    return JoinCommand(COMMAND, what, token)


class PlacerBed(Protocol):
    """A placer under test. `impossible` is what none of its hosts is, and `later` what it could have only later, if it knows such."""

    placer: HostPlacer
    impossible: HostSpec
    later: HostSpec | None

    async def up(self, host: PlacedHost) -> None:
        """Return once the command of `host` obeys signals."""
        ...

    def left(self) -> int:
        """What runs still, or is still asked for."""
        ...

    lose: Callable[[PlacedHost], None] | None
    """The node of a host goes away; None where no node can without the launcher's."""

    async def lose_launcher(self) -> int:
        """Place a host that stays and one that is deaf, lose the launcher without a word, and return what is left in time."""
        ...

    leave: Callable[[], Awaitable[None]] | None
    """An earlier launcher of the same run placed a host, which outlives it; None where none does."""


# -- without any process ------------------------------------------------------------------------------------------


class ScriptedHost:
    """A PlacedHost that is a line of a script: it ends as its command would."""

    def __init__(self, number: int, join: JoinCommand, over: Callable[["ScriptedHost"], None]) -> None:
        self.id, self.join, self._over = f"scripted-{number}", join, over
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        what, *rest = join.arguments
        if what == "exit":
            self.ends(Ending.of(int(rest[0]), rest[1]))
        elif what == "expect":
            self.ends(Ending.of(0 if join.token == rest[0] else 4))

    def ends(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)
            self._over(self)

    async def ended(self) -> Ending:
        return await asyncio.shield(self._ending)

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.ends(Ending.of(-9))
        elif number == signal.SIGTERM and self.join.arguments[0] != "deaf":
            self.ends(Ending.of(130))

    async def release(self) -> None:
        self.ends(Ending.of(-9))


class ScriptedPlacer:
    """A HostPlacer whose engine is this object. A spec called `none` can't be placed, one called `later` only once `room` is set."""

    def __init__(self, *_: object) -> None:
        self.asked: list[str] = []
        self.hosts: list[ScriptedHost] = []
        """Those that run."""
        self.room = asyncio.Event()
        self.waiting = 0
        self._numbers = itertools.count(1)

    async def place(self, spec: HostSpec, join: JoinCommand) -> ScriptedHost:
        self.asked.append(spec.name)
        if spec.name == "none":
            raise NotPlaced(f"no node has {spec.gpus} GPUs")
        if spec.name == "later":
            self.waiting += 1
            try:
                await self.room.wait()
            finally:
                self.waiting -= 1
        host = ScriptedHost(next(self._numbers), join, lambda host: self.hosts.remove(host) if host in self.hosts else None)
        if not host._ending.done():
            self.hosts.append(host)
        return host

    async def close(self) -> None:
        for host in tuple(self.hosts):
            await host.release()


class ScriptedBed:
    leave = None

    def __init__(self) -> None:
        self.placer = ScriptedPlacer()
        self.impossible, self.later = HostSpec("none", 1, gpus=999), HostSpec("later", 1)

    async def up(self, host: PlacedHost) -> None:
        """It is from the start."""

    def left(self) -> int:
        return len(self.placer.hosts) + self.placer.waiting

    def lose(self, host: ScriptedHost) -> None:
        host.ends(Ending("lost", "its node went away", lost=True))

    async def lose_launcher(self) -> int:
        """The engine of a script lives and dies with its launcher, as processes of one host do."""
        for what in ("stay", "deaf"):
            await self.placer.place(ANY, does(what))
        await self.placer.close()
        return self.left()


# -- processes of this host -----------------------------------------------------------------------------------------

LAUNCHER = """
import asyncio, importlib, sys
from pathlib import Path
from tests.contract.placers import ANY, ThisHostBed, does
async def main():
    folder, module, name = sys.argv[1:]
    bed = ThisHostBed(Path(folder), getattr(importlib.import_module(module), name))
    for what in ("stay", "deaf"):
        host = await bed.placer.place(ANY, does(what))
        await bed.up(host)
        print(host.id, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


class ThisHostBed:
    """Of a placer whose hosts are processes of this one: ThisHost, or one of the example's."""

    lose = None
    later = None
    leave = None

    def __init__(self, folder: Path, make: Callable[[Config, Path], Any] = ThisHost) -> None:
        config = from_mapping({"actors": {"idle": {"class": "rubato.runtime.actor:Actor"}}})
        self._folder, self._make = folder, make
        self.placer = make(config, folder)
        self.impossible = HostSpec("far", 1, labels=("h20",))

    async def up(self, host: PlacedHost) -> None:
        while not any(log.read_text() for log in self._folder.rglob("*.log")):  # noqa: ASYNC110 - another process's file
            await asyncio.sleep(0.02)

    def left(self) -> int:
        return len(self.placer.hosts)

    async def lose_launcher(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            LAUNCHER,
            str(self._folder),
            self._make.__module__,
            self._make.__qualname__,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        pids = [int(await process.stdout.readline()) for _ in range(2)]
        process.kill()
        await process.wait()
        left = set(pids)
        with suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                for pid in pids:
                    await until_gone(pid)
                    left.discard(pid)
        return len(left)


@asynccontextmanager
async def scripted(_: Path) -> AsyncGenerator[PlacerBed]:
    yield ScriptedBed()


@asynccontextmanager
async def this_host(folder: Path, make: Callable[[Config, Path], Any] = ThisHost) -> AsyncGenerator[PlacerBed]:
    bed = ThisHostBed(folder, make)
    try:
        yield bed
    finally:
        await bed.placer.close()


BEDS = {"scripted": scripted, "this host": this_host, "the example's": partial(this_host, make=Prefixed)}
