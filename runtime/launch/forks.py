"""The launcher's side of the warm parent (runtime/launch/warm.py): keeps one, asks it for processes, and waits for those."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from rubato.runtime.host import RestartBudget
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import VARIABLE as CODE_VARIABLE
from rubato.runtime.launch.children import adopt_orphans, start_module
from rubato.runtime.launch.warm import ForkReply, ForkRequest
from rubato.runtime.observe.log import logger

MODULE = "rubato.runtime.launch.warm"
EVERY_ROLE = ("uvloop", "numpy")
"""What every actor imports as it starts, whatever its class."""

RESTARTS, WINDOW_S = 10, 300.0
"""After more deaths of warm parents than this within the window, actors start without one."""

ANSWER_S = 5.0
"""For a fork, once everything is imported: a thousand times what it takes. A warm parent that is stopped is killed after it."""


class NotForked(Exception):
    """There is no process, and none will come of this request; why."""


class ForkedProcess:
    """A child of this process that the event loop did not start."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As subprocesses have it: negative is the signal that ended it."""
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._end)

    async def wait(self) -> int:
        """Return `returncode` once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens once it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class Forks:
    """Processes of the run in `folder`, forked by a warm parent that has imported `modules`."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._folder = folder
        self._modules = list(dict.fromkeys((*EVERY_ROLE, *modules)))
        self.begun = asyncio.Event()
        """There is a warm parent, or there could be none."""
        self._parent: asyncio.subprocess.Process | None = None
        self._last: asyncio.subprocess.Process | None = None
        self._imported: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked: dict[str, asyncio.Future[int]] = {}

    async def fork(self, name: str, needs: Sequence[str], pool: str = "") -> ForkedProcess:
        """The process of the actor `name` of `pool`, which begins with `needs` imported. Raises NotForked."""
        parent = self._parent
        if parent is None or parent.stdin is None:
            raise NotForked("there is no warm parent")
        reply = self._asked[name] = asyncio.get_running_loop().create_future()
        adopt_orphans(True)
        try:
            parent.stdin.write(msgspec.json.encode(ForkRequest(name, tuple(needs), pool)) + b"\n")
            return ForkedProcess(await self._answer(parent, reply))
        finally:
            del self._asked[name]
            # Only while it waits: other orphans would stay as zombies, since this process waits for none.
            adopt_orphans(bool(self._asked))

    async def _answer(self, parent: asyncio.subprocess.Process, reply: "asyncio.Future[int]") -> int:
        """What a parent forked before it is killed, or dies, tells of itself: only then do the replies end."""
        await asyncio.wait([self._imported, reply], return_when=asyncio.FIRST_COMPLETED)
        if not (await asyncio.wait([reply], timeout=ANSWER_S))[0]:
            parent.kill()
        return await reply

    async def keep(self) -> None:
        """Have a warm parent until this is cancelled, or they die too often."""
        budget, log = RestartBudget(RESTARTS, WINDOW_S), logger("launch")
        while True:
            try:
                await self._live()
            except OSError as error:
                log.warning("no_warm_parent", error=str(error))
                self.begun.set()
            plan = budget.died(asyncio.get_running_loop().time())
            log.warning("warm_parent_died", attempt=plan.attempt)
            if plan.delay_s is None:
                return
            await asyncio.sleep(plan.delay_s)

    async def _live(self) -> None:
        """The life of one. Numeric libraries there begin with one thread, as for actors: more could not be forked."""
        more: dict[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        more[CODE_VARIABLE] = str(self._folder / CODE)
        with (self._folder / "logs" / "warm.stderr").open("ab") as stderr:
            parent = await start_module(
                MODULE, str(self._folder), *self._modules, more=more,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        assert parent.stdout is not None
        assert parent.stdin is not None
        self._parent = self._last = parent
        self.begun.set()
        try:
            async for line in parent.stdout:
                self._heard(msgspec.json.decode(line, type=ForkReply))
        finally:
            self._parent = None
            self.begun.clear()
            self._imported = asyncio.get_running_loop().create_future()
            if parent.returncode is None:
                parent.kill()
            for reply in self._asked.values():
                if not reply.done():
                    reply.set_exception(NotForked("the warm parent died"))
            parent.stdin.close()
            await self.reap()

    async def reap(self) -> None:
        """Wait for the end of the last warm parent, which was killed or died."""
        if self._last is not None:
            await self._last.communicate()

    def _heard(self, reply: ForkReply) -> None:
        asked = self._asked.get(reply.name)
        if not reply.name:
            self._imported.set_result(None)
        elif asked is None or asked.done():  # its asker has given up
            if reply.pid:
                ForkedProcess(reply.pid).send_signal(signal.SIGKILL)
        elif reply.pid:
            asked.set_result(reply.pid)
        else:
            asked.set_exception(NotForked(reply.error))


def can_fork() -> bool:
    """Whether this system has what it takes: Linux, since 5.3."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and adopt_orphans(False)


@asynccontextmanager
async def forks(folder: Path, modules: Sequence[str], tasks: asyncio.TaskGroup) -> AsyncGenerator[Forks | None]:
    """With a warm parent within the block, where the system can."""
    if not can_fork():
        yield None
        return
    kept = Forks(folder, modules)
    keeping = tasks.create_task(kept.keep(), name="launch.warm_parent")
    try:
        await kept.begun.wait()
        yield kept
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await kept.reap()
