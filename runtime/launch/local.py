"""Actor processes of this host: started, watched, started again within their budget; none outlives the launcher."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.config import ActorSpec
from runtime.kept_code import FOLDER as CODE
from runtime.kept_code import VARIABLE as CODE_VARIABLE
from runtime.launch.children import die_with_parent
from runtime.observe.log import logger
from runtime.supervision import RestartBudget

STDERR_TAIL = 4000
"""Characters of a dead actor's stderr that are looked at for its last sentence."""


class Death(NamedTuple):
    """How an actor's process ended. `restart_in_s` is None when it will not be started again."""

    name: str
    how: str
    after_s: float
    sentence: str
    attempt: int
    limit: int
    restart_in_s: float | None
    expected: bool


class Watcher(Protocol):
    """What the node agent does when processes come and go."""

    async def died(self, death: Death) -> None: ...


class _Child:
    def __init__(self, spec: ActorSpec) -> None:
        self.budget = RestartBudget(spec.restarts, spec.restart_window_s)
        self.limit = spec.restarts
        self.process: asyncio.subprocess.Process | None = None
        self.leaving = False
        self.restarting = False
        """It was asked to end, and is to be started again at once."""
        self.wake = asyncio.Event()
        """Ends the pause before a restart."""
        self.gone = asyncio.Event()


class LocalLauncher:
    """Supervises the processes of one run folder. Every child dies with this process, however that dies."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup, watcher: Watcher, threads: Callable[[str], int]) -> None:
        self._folder = folder
        self._tasks = tasks
        self._watcher = watcher
        self._threads = threads
        self._children: dict[str, _Child] = {}
        self._stopping = False
        self._log = logger("launch")

    def names(self, role: str | None = None) -> list[str]:
        """Actors this host supervises, oldest first."""
        return [n for n, c in self._children.items() if not c.leaving and role in (None, n.rsplit("-", 1)[0])]

    def is_stopped(self, name: str) -> bool:
        """Whether its process exists and was stopped by a signal; False where the system does not tell."""
        child = self._children.get(name)
        if child is None or child.process is None or child.process.returncode is not None:
            return False
        try:
            told = Path(f"/proc/{child.process.pid}/stat").read_text()
        except OSError:
            return False
        return told.rpartition(")")[2].split()[0] in "Tt"

    def start(self, name: str, spec: ActorSpec) -> None:
        """Start `name` and keep it running."""
        self._children[name] = _Child(spec)
        self._tasks.create_task(self._supervise(name, self._children[name]), name=f"supervise.{name}")

    async def drain(self, name: str, limit_s: float) -> None:
        """Ask `name` to drain and return when it has exited; it is killed past `limit_s` and never restarted."""
        child = self._children.get(name)
        if child is None:
            return
        child.leaving = True
        child.wake.set()
        self._signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await child.gone.wait()
        except TimeoutError:
            self._log.warning("killed_after_drain", actor=name, limit_s=limit_s)
            self._signal(child, signal.SIGKILL)
            await child.gone.wait()

    async def restart(self, name: str, limit_s: float) -> None:
        """Drain `name` and start it again, outside its budget; returns when its process has ended, killed past `limit_s`."""
        child = self._children.get(name)
        if child is None or child.process is None:
            return
        process, child.restarting = child.process, True
        self._signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            self._log.warning("killed_after_drain", actor=name, limit_s=limit_s)
            self._signal(child, signal.SIGKILL)
            await process.wait()

    def stop_restarting(self) -> None:
        """From now on every exit is final."""
        self._stopping = True

    def kill_all(self) -> None:
        """End every process now."""
        self._stopping = True
        for child in self._children.values():
            child.leaving = True
            child.wake.set()
            self._signal(child, signal.SIGKILL)

    async def _supervise(self, name: str, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not (child.leaving or self._stopping):
                started = loop.time()
                code = await self._run(name, child)
                expected = child.leaving or self._stopping
                if child.restarting and not expected:
                    child.restarting = False
                    await self._watcher.died(
                        Death(name, "restart", loop.time() - started, "", 0, child.limit, 0.0, True)
                    )
                    continue
                plan = child.budget.died(loop.time())
                delay = None if expected else plan.delay_s
                how = f"signal {-code}" if code < 0 else f"exit {code}"
                sentence = self._last_sentence(name)
                death = Death(name, how, loop.time() - started, sentence, plan.attempt, child.limit, delay, expected)
                await self._watcher.died(death)
                if delay is None:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await child.wake.wait()
        finally:
            child.gone.set()
            self._children.pop(name, None)

    async def _run(self, name: str, child: _Child) -> int:
        role = name.rsplit("-", 1)[0]
        threads = str(self._threads(role))
        environment = dict(os.environ, PYTHONSAFEPATH="1", OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
        environment[CODE_VARIABLE] = str(self._folder / CODE)
        with self._stderr(name).open("wb") as stderr:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "runtime.node", str(self._folder), name,
                stdin=asyncio.subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=environment,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._log.info("started", actor=name, pid=child.process.pid)
        if child.leaving:
            self._signal(child, signal.SIGTERM)
        return await child.process.wait()

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            try:
                child.process.send_signal(number)
            except ProcessLookupError:
                return

    def _stderr(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.stderr"

    def _last_sentence(self, name: str) -> str:
        try:
            lines = self._stderr(name).read_text(errors="replace")[-STDERR_TAIL:].strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip()[:300] if lines else ""
