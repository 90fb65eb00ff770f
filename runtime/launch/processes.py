"""The back end of a launch: each actor a process of this host, which ends with this one, however that ends."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.blobs.server import BlobServer
from runtime.config import Config
from runtime.errors import ActorFailed, ExitCode
from runtime.host import Ending, role_of
from runtime.importer import FOLDER as CODE
from runtime.importer import PACKAGES
from runtime.importer import VARIABLE as CODE_VARIABLE
from runtime.launch.agent import Hosting, NodeAgent, Screen
from runtime.launch.children import is_stopped, last_line, start_module
from runtime.launch.connection import RunAccess
from runtime.launch.forks import ForkedProcess, Forks, NotForked, forks
from runtime.observe.log import logger


class ActorChild:
    """One process: an Instance."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, stderr: Path, log: Path) -> None:
        self._process, self._stderr, self._log = process, stderr, log

    def drain(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def is_stopped(self) -> bool:
        return self._process.returncode is None and is_stopped(self._process.pid)

    async def ended(self) -> Ending:
        code = await self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        return Ending(how, last_line(self._stderr)[:300], str(self._log), permanent=code == ExitCode.REFUSED)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return


class ProcessBackend:
    """Starts the actors of `job`, each as `python -m runtime.node` in the run `folder`: forked by `warm` where its role may be."""

    def __init__(self, folder: Path, job: Config, warm: Forks | None) -> None:
        self._logs = folder / "logs"
        self._folder, self._job, self._warm = folder, job, warm
        self._needs = modules_of(job)

    async def start(self, name: str) -> ActorChild:
        path = self._logs / f"{name}.stderr"
        try:
            path.open("wb").close()
            process = await self._forked(name) or await self._executed(name, path)
        except OSError as error:
            raise ActorFailed(f"its process can't be started: {error}") from error
        logger("host").info("started", actor=name, pid=process.pid, forked=isinstance(process, ForkedProcess))
        return ActorChild(process, path, self._logs / f"{name}.jsonl")

    async def _forked(self, name: str) -> ForkedProcess | None:
        needs = self._needs.get(role_of(name))
        if self._warm is None or needs is None:
            return None
        try:
            return await self._warm.fork(name, needs)
        except NotForked as error:
            logger("host").warning("not_forked", actor=name, why=str(error))
            return None

    async def _executed(self, name: str, path: Path) -> asyncio.subprocess.Process:
        threads = str(self._job.actors[role_of(name)].threads)
        more = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, CODE_VARIABLE: str(self._folder / CODE)}
        with path.open("wb") as stderr:
            return await start_module(
                "runtime.node", str(self._folder), name,
                more=more, stdout=stderr, stderr=stderr, start_new_session=True,
            )  # fmt: skip


def modules_of(job: Config) -> Mapping[str, tuple[str, ...]]:
    """What the actors of each role that may be forked begin with, imported. User code is not in it: it may start threads."""
    found: dict[str, tuple[str, ...]] = {}
    for role, spec in job.actors.items():
        actor_class = job.actor_class(role)
        preloads = actor_class.preload(job.actor_config(role)) if spec.threads == 1 else None
        if preloads is not None:
            own = actor_class.__module__
            found[role] = (own, *preloads) if own.partition(".")[0] in PACKAGES else preloads
    return found


@asynccontextmanager
async def process_backend(
    folder: Path, job: Config, roles: Iterable[str], tasks: asyncio.TaskGroup
) -> AsyncGenerator[ProcessBackend]:
    """With a warm parent, which begins at once with what this host's `roles` need: what few of them wait for comes last."""
    modules = modules_of(job)
    needed = sorted((modules[role] for role in roles if role in modules), key=len)
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
    hosting = Hosting(connection.config, screen, backend, watches=True)
    try:
        kernel = await connection.kernel(NodeAgent, hosting, connection.card.node)
        agent: NodeAgent = kernel.build()
        serving = tasks.create_task(kernel.serve(), name=agent.name)
        await kernel.ready.wait()
        try:
            yield agent
        finally:
            kernel.stop()
            await asyncio.wait([serving])
    finally:
        await blobs.close()
