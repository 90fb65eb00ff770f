"""The back end of a launch: each actor a process of this host, which ends with this one, however that ends."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.errors import ActorFailed
from runtime.host import Ending, role_of
from runtime.kept_code import FOLDER as CODE
from runtime.kept_code import VARIABLE as CODE_VARIABLE
from runtime.launch.agent import Hosting, NodeAgent, Screen
from runtime.launch.children import die_with_parent
from runtime.launch.connection import RunAccess
from runtime.observe.log import logger

STDERR_TAIL = 4000
"""Characters of a dead actor's stderr that are looked at for its last sentence."""


class ActorChild:
    """One process: an Instance."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: Path, log: Path) -> None:
        self._process, self._stderr, self._log = process, stderr, log

    def drain(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def is_stopped(self) -> bool:
        if self._process.returncode is not None:
            return False
        try:
            told = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return told.rpartition(")")[2].split()[0] in "Tt"

    async def ended(self) -> Ending:
        code = await self._process.wait()
        return Ending(f"signal {-code}" if code < 0 else f"exit {code}", self._last_sentence(), str(self._log))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return

    def _last_sentence(self) -> str:
        try:
            lines = self._stderr.read_text(errors="replace")[-STDERR_TAIL:].strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip()[:300] if lines else ""


class ProcessBackend:
    """Starts `python -m runtime.node` in the run `folder`; numeric libraries there may use `threads(role)` threads."""

    def __init__(self, folder: Path, threads: Callable[[str], int]) -> None:
        self._logs = folder / "logs"
        self._folder, self._threads = folder, threads

    async def start(self, name: str) -> ActorChild:
        threads = str(self._threads(role_of(name)))
        path = self._logs / f"{name}.stderr"
        environment = dict(os.environ, PYTHONSAFEPATH="1", OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
        environment[CODE_VARIABLE] = str(self._folder / CODE)
        try:
            with path.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "runtime.node", str(self._folder), name,
                    stdin=asyncio.subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                    env=environment, start_new_session=True, preexec_fn=die_with_parent,
                )  # fmt: skip
        except OSError as error:
            raise ActorFailed(f"its process can't be started: {error.strerror}") from error
        logger("host").info("started", actor=name, pid=process.pid)
        return ActorChild(process, path, self._logs / f"{name}.jsonl")


@asynccontextmanager
async def process_host(connection: RunAccess, screen: Screen, tasks: asyncio.TaskGroup) -> AsyncGenerator[NodeAgent]:
    """This host's node agent over processes, from when it is ready; it leaves with the block, in which its actors are to be stopped."""
    job = connection.config
    backend = ProcessBackend(connection.run.folder, lambda role: job.actors[role].threads)
    hosting = Hosting(job, screen, backend, watches=True)
    kernel = await connection.kernel(NodeAgent, hosting, connection.card.node)
    agent: NodeAgent = kernel.build()
    serving = tasks.create_task(kernel.serve(), name=agent.name)
    await kernel.ready.wait()
    try:
        yield agent
    finally:
        kernel.stop()
        await asyncio.wait([serving])
