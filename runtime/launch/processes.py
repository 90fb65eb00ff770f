"""The back end of a launch: each actor a process of this host, which ends with this one, however that ends."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.blobs.server import BlobServer
from runtime.errors import ActorFailed, ExitCode
from runtime.host import Ending, role_of
from runtime.importer import FOLDER as CODE
from runtime.importer import VARIABLE as CODE_VARIABLE
from runtime.launch.agent import Hosting, NodeAgent, Screen
from runtime.launch.children import is_stopped, last_line, start_module
from runtime.launch.connection import RunAccess
from runtime.observe.log import logger


class ActorChild:
    """One process: an Instance."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: Path, log: Path) -> None:
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
    """Starts `python -m runtime.node` in the run `folder`; numeric libraries there may use `threads(role)` threads."""

    def __init__(self, folder: Path, threads: Callable[[str], int]) -> None:
        self._logs = folder / "logs"
        self._folder, self._threads = folder, threads

    async def start(self, name: str) -> ActorChild:
        threads = str(self._threads(role_of(name)))
        path = self._logs / f"{name}.stderr"
        more = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, CODE_VARIABLE: str(self._folder / CODE)}
        try:
            with path.open("wb") as stderr:
                process = await start_module(
                    "runtime.node",
                    str(self._folder),
                    name,
                    more=more,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,
                )
        except OSError as error:
            raise ActorFailed(f"its process can't be started: {error}") from error
        logger("host").info("started", actor=name, pid=process.pid)
        return ActorChild(process, path, self._logs / f"{name}.jsonl")


@asynccontextmanager
async def process_host(connection: RunAccess, screen: Screen, tasks: asyncio.TaskGroup) -> AsyncGenerator[NodeAgent]:
    """This host's blobs, and its node agent over processes, from when it is ready; both leave with the block, in which its actors are
    to be stopped.
    """
    job = connection.config
    blobs = BlobServer(Path(connection.card.sockets) / "blobs.sock")
    await blobs.start()
    backend = ProcessBackend(connection.run.folder, lambda role: job.actors[role].threads)
    hosting = Hosting(job, screen, backend, watches=True)
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
