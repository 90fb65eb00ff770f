"""The back end of a launch: each actor a process of this host, which ends with this one, however that ends."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from rubato.runtime.blobs.server import BlobServer
from rubato.runtime.config import Config
from rubato.runtime.config.config import Pool
from rubato.runtime.config.sections import DEVICES
from rubato.runtime.errors import ActorFailed
from rubato.runtime.host import Ending
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import NAME
from rubato.runtime.importer import VARIABLE as CODE_VARIABLE
from rubato.runtime.launch.agent import Hosting, NodeAgent, Screen
from rubato.runtime.launch.children import is_stopped, last_line, start_module
from rubato.runtime.launch.connection import RunAccess
from rubato.runtime.launch.forks import ForkedProcess, Forks, NotForked, forks
from rubato.runtime.observe.log import logger
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import role_of


class ActorChild:
    """One process: an Incarnation."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, stderr: Path, log: Path) -> None:
        self._process, self._stderr, self._log = process, stderr, log

    def drain(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def is_stopped(self) -> bool:
        return self._process.returncode is None and is_stopped(self._process.pid)

    async def ended(self) -> Ending:
        """What it started in its own session, of which it was the leader, is killed: what is set up there may wait long for a dead parent."""
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        return Ending.of(code, last_line(self._stderr)[:300], str(self._log))

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens once it has ended."""
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return


class ProcessBackend:
    """Starts the actors of `job`, each as `python -m rubato.runtime.node` in the run `folder`: forked by `warm` where its role may be."""

    def __init__(self, folder: Path, job: Config, warm: Forks | None) -> None:
        self._logs = folder / "logs"
        self._folder, self._job, self._warm = folder, job, warm
        self._needs = modules_of(job)
        self.places = HostPlaces.here(job)
        """Which actor of this host is in which pool, and what it has of the host."""

    async def start(self, name: str) -> ActorChild:
        path = self._logs / f"{name}.stderr"
        try:
            path.open("wb").close()
            process = await self._forked(name) or await self._executed(name, path)
        except OSError as error:
            raise ActorFailed(f"its process can't be started: {error}") from error
        place = self.places.of(name)
        logger("host").info(
            "started", actor=name, pid=process.pid, forked=isinstance(process, ForkedProcess),
            pool=place.pool, devices=place.environment.get(DEVICES, ""), cores=place.cores,
        )  # fmt: skip
        return ActorChild(process, path, self._logs / f"{name}.jsonl")

    async def _forked(self, name: str) -> ForkedProcess | None:
        pool = self.places.of(name).pool
        needs = self._needs.get(Pool(role_of(name), pool))
        if self._warm is None or needs is None:
            return None
        try:
            return await self._warm.fork(name, needs, pool)
        except NotForked as error:
            logger("host").warning("not_forked", actor=name, why=str(error))
            return None

    async def _executed(self, name: str, path: Path) -> asyncio.subprocess.Process:
        threads, place = str(self._job.actors[role_of(name)].threads), self.places.of(name)
        more = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **place.environment}
        more[CODE_VARIABLE] = str(self._folder / CODE)
        with path.open("wb") as stderr:
            return await start_module(
                "rubato.runtime.node", str(self._folder), name, *filter(None, [place.pool]),
                more=more, cores=place.cores, stdout=stderr, stderr=stderr, start_new_session=True,
            )  # fmt: skip


def modules_of(job: Config) -> Mapping[Pool, tuple[str, ...]]:
    """What the actors that may be forked begin with, imported, by role and pool. User code is not in it: it may start threads."""
    found: dict[Pool, tuple[str, ...]] = {}
    for role, spec in job.actors.items():
        actor_class = job.actor_class(role)
        for name in spec.pools or ("",):
            forks = spec.threads == 1 and not (name and spec.pools[name].own_process)
            preloads = actor_class.preload(job.actor_config(role, name)) if forks else None
            if preloads is not None:
                own = actor_class.__module__
                found[Pool(role, name)] = (own, *preloads) if own.partition(".")[0] == NAME else preloads
    return found


@asynccontextmanager
async def process_backend(folder: Path, job: Config, roles: Iterable[str], tasks: asyncio.TaskGroup) -> AsyncGenerator[ProcessBackend]:
    """With a warm parent, which begins at once with what this host's `roles` need: what few of them wait for comes last."""
    modules = modules_of(job)
    chosen = set(roles)
    needed = sorted((needs for pool, needs in modules.items() if pool.role in chosen), key=len)
    async with forks(folder, [module for needs in needed for module in needs], tasks) as warm:
        yield ProcessBackend(folder, job, warm)


@asynccontextmanager
async def process_host(
    connection: RunAccess, screen: Screen, backend: ProcessBackend, tasks: asyncio.TaskGroup
) -> AsyncGenerator[NodeAgent]:
    """This host's blobs, and its node agent over processes, from when it is ready; both leave with the block, in which its actors are
    to be stopped.
    """
    blobs = BlobServer(Path(connection.card.sockets) / "blobs.sock")
    await blobs.start()
    hosting = Hosting(connection.config, screen, backend, watches=True, places=backend.places)
    try:
        kernel = await connection.kernel(NodeAgent, hosting, connection.card.node)
        agent: NodeAgent = kernel.build()
        serving = tasks.create_task(kernel.serve(), name=agent.name)
        await kernel.ready.wait()
        try:
            if connection.config.host.listen:
                from rubato.runtime.launch.endpoint import open_endpoint  # for hosts alone that listen

                open_endpoint(agent)
            yield agent
        finally:
            kernel.stop()
            await asyncio.wait([serving])
    finally:
        await blobs.close()
