"""Hosts the actors of a job on one host: starts them, starts what ends again within its budget, and drains them in order.

Where they run is a back end's: processes of this host (runtime/launch/processes.py) or tasks of this loop (here). The same supervision
serves the launcher, a host that joined, an embedded job and the simulation.
"""

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, Self

from rubato.runtime.errors import ActorFailed, ExitCode, first_cause, said_by
from rubato.runtime.kernel import Kernel, is_permanent
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import role_of

# -- what a back end is -----------------------------------------------------------------------------------------


class Ending(NamedTuple):
    """How an instance ended; `sentence` is the last that it said, and `log` where the rest of it is."""

    how: str
    sentence: str = ""
    log: str = ""
    permanent: bool = False
    """It never got ready, for a reason that another start would meet again."""
    code: int | None = None
    """Exit code, or minus the signal; None where there is none that is known."""
    lost: bool = False
    """The host that it was on went away with it."""

    @classmethod
    def of(cls, code: int, sentence: str = "", log: str = "") -> Self:
        """That of a process which ended with `code`."""
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        return cls(how, sentence, log, permanent=code == ExitCode.REFUSED, code=code)


class Incarnation(Protocol):
    """One incarnation of an actor, from its start to its end."""

    def drain(self) -> None:
        """Ask it to finish and to end. Nothing happens once it has ended."""
        ...

    def kill(self) -> None:
        """End it now; nothing more that it does has an effect."""
        ...

    def is_stopped(self) -> bool:
        """Whether something holds it still without ending it (SIGSTOP); False where the back end can't tell."""
        ...

    async def ended(self) -> Ending:
        """Return once it has ended; any number of callers may wait, before or after."""
        ...


class Backend(Protocol):
    """Starts actors by name. None of them outlives the process that holds the back end."""

    async def start(self, name: str) -> Incarnation:
        """A new incarnation of `name`, on its way. Raises ActorFailed where there can't be one now, which counts as its death."""
        ...


# -- how often ---------------------------------------------------------------------------------------------------

RESTART_S = (0.5, 8.0)
"""Pause before an actor that died is started again: the first, and what it doubles up to."""


class RestartPlan(NamedTuple):
    """Restart after `delay_s` (the `attempt`-th within the window), or escalate when `delay_s` is None."""

    delay_s: float | None
    attempt: int


class RestartBudget:
    """At most `limit` restarts within any `window_s`; the pause doubles with each of them, within `pauses_s`. Pure: time is an argument."""

    def __init__(self, limit: int, window_s: float, pauses_s: tuple[float, float] = RESTART_S) -> None:
        self.limit = limit
        self._window_s = window_s
        self._first_s, self._longest_s = pauses_s
        self._deaths: deque[float] = deque(maxlen=max(1, limit + 1))

    def died(self, now: float) -> RestartPlan:
        """Note a death at `now` (seconds, any monotonic clock) and say what follows."""
        while self._deaths and self._deaths[0] <= now - self._window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        attempt = len(self._deaths)
        if attempt > self.limit:
            return RestartPlan(None, attempt)
        return RestartPlan(min(self._longest_s, self._first_s * 2 ** (attempt - 1)), attempt)


# -- supervision -------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    """An actor ended. `restart_in_s` is None when it will not be started again; `expected` when it was asked to end."""

    name: str
    ending: Ending
    after_s: float
    attempt: int
    limit: int
    restart_in_s: float | None
    expected: bool


class _Hosted:
    def __init__(self, budget: RestartBudget, rank: int) -> None:
        self.budget, self.rank = budget, rank
        self.instance: Incarnation | None = None
        self.lives = 0
        self.leaving = False
        self.restarting = False
        """It was asked to end, and is to be started again at once."""
        self.wake = asyncio.Event()
        """Ends the pause before a restart."""
        self.gone = asyncio.Event()

    def leave(self) -> None:
        self.leaving = True
        self.wake.set()


class JobHost:
    """Keeps actors running over `backend`. Its tasks are made by `spawn`; `died` hears of every end before anything follows from it.

    An actor whose first life ends for good is not started again.
    """

    def __init__(
        self,
        backend: Backend,
        spawn: Callable[..., "asyncio.Task[Any]"],
        died: Callable[[Death], Awaitable[None]],
        leaves_by: Collection[int] = (),
    ) -> None:
        """`leaves_by`: exit codes of what left in order by itself, and is not started again."""
        self._backend, self._spawn, self._died, self._leaves_by = backend, spawn, died, leaves_by
        self._hosted: dict[str, _Hosted] = {}
        self._stopping = False
        self._log = logger("host")

    def names(self, role: str | None = None, *, leaving: bool = False) -> list[str]:
        """The actors it keeps running, oldest first; and those that still drain, where `leaving` is asked for."""
        return [n for n, one in self._hosted.items() if (leaving or not one.leaving) and role in (None, role_of(n))]

    def is_stopped(self, name: str) -> bool:
        """See Incarnation."""
        found = self._hosted.get(name)
        return found is not None and found.instance is not None and found.instance.is_stopped()

    def start(self, name: str, budget: RestartBudget, rank: int = 0) -> None:
        """Start `name` and keep it running within `budget`; those of a lower `rank` drain first."""
        hosted = self._hosted[name] = _Hosted(budget, rank)
        self._spawn(self._supervise(name, hosted), name=f"supervise.{name}")

    async def drain(self, name: str, limit_s: float) -> None:
        """Ask `name` to drain and return when it has ended; it is killed past `limit_s` and never restarted."""
        hosted = self._hosted.get(name)
        if hosted is None:
            return
        hosted.leave()
        if hosted.instance is not None:
            hosted.instance.drain()
        await self._within(limit_s, name, hosted, hosted.gone.wait())

    async def restart(self, name: str, limit_s: float, *, held: bool = False) -> None:
        """Drain `name` and start it again, outside its budget; returns when it has ended, killed past `limit_s`.

        What is held still (SIGSTOP) could not drain: it is killed. What has ended already is started again as its budget says. With `held`
        whatever is not held still is left alone.
        """
        hosted = self._hosted.get(name)
        if hosted is None or hosted.instance is None or (held and not hosted.instance.is_stopped()):
            return
        hosted.restarting = True
        if hosted.instance.is_stopped():
            hosted.instance.kill()
        else:
            hosted.instance.drain()
        await self._within(limit_s, name, hosted, hosted.instance.ended())

    async def drain_all(self, limit_s: float, *, by_rank: bool, below: float = math.inf) -> None:
        """Drain all of a rank `below` that, one rank after another or at once; whatever ends from now on is not started again."""
        self._stopping = True
        ranks: dict[int, list[str]] = {}
        for name, hosted in self._hosted.items():
            if hosted.rank < below:
                ranks.setdefault(hosted.rank if by_rank else 0, []).append(name)
        for _, names in sorted(ranks.items()):
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(self.drain(name, limit_s), name=f"drain.{name}")

    def kill_all(self) -> None:
        """End every actor now."""
        self._stopping = True
        for hosted in self._hosted.values():
            hosted.leave()
            if hosted.instance is not None:
                hosted.instance.kill()

    async def _within(self, limit_s: float, name: str, hosted: _Hosted, end: Coroutine[Any, Any, Any]) -> None:
        """Wait for the `end` of the present instance, and bring it about where it takes too long."""
        instance = hosted.instance
        try:
            async with asyncio.timeout(limit_s):
                await end
        except TimeoutError:
            self._log.warning("killed_after_drain", actor=name, limit_s=limit_s)
            if instance is not None:
                instance.kill()
                await instance.ended()

    async def _supervise(self, name: str, hosted: _Hosted) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while not (hosted.leaving or self._stopping):
                began = clock()
                ending = await self._run(name, hosted)
                if not await self._goes_on(name, hosted, ending, clock() - began):
                    return
        finally:
            self._hosted.pop(name, None)
            hosted.gone.set()

    async def _run(self, name: str, hosted: _Hosted) -> Ending:
        hosted.lives += 1
        try:
            hosted.instance = instance = await self._backend.start(name)
        except ActorFailed as error:
            return Ending("not started", str(error))
        if hosted.leaving:
            instance.drain()
        ending = await instance.ended()
        hosted.instance = None
        return ending

    async def _goes_on(self, name: str, hosted: _Hosted, ending: Ending, after_s: float) -> bool:
        """Tell of an end, and wait for as long as the actor's budget says. False when it is not to be started again."""
        expected = hosted.leaving or self._stopping or ending.code in self._leaves_by
        if hosted.restarting and not expected:
            hosted.restarting = False
            await self._died(Death(name, Ending("restart"), after_s, 0, hosted.budget.limit, 0.0, expected=True))
            return True
        plan = hosted.budget.died(asyncio.get_running_loop().time())
        hopeless = ending.permanent and hosted.lives == 1
        pause_s = None if expected or hopeless else plan.delay_s
        await self._died(Death(name, ending, after_s, plan.attempt, hosted.budget.limit, pause_s, expected))
        if pause_s is None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await hosted.wake.wait()
        return True


# -- the back end of one loop -------------------------------------------------------------------------------------


class HostedTask:
    """An actor that is a task of this loop, in a context of its own: an Incarnation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context = contextvars.copy_context()
        self.kernel: Kernel | None = None
        self.task: asyncio.Task[None] | None = None
        self._ending = Ending("killed")
        self._leaving = False
        self._over = asyncio.Event()

    def drain(self) -> None:
        self._leaving = True
        if self.kernel is not None:
            self.kernel.stop()

    def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def is_stopped(self) -> bool:
        return False

    async def ended(self) -> Ending:
        await self._over.wait()
        return self._ending

    def failed(self, error: BaseException) -> None:
        """It ends with `error`."""
        logger("host").error("actor_failed", actor=self.name, error=repr(error), exc_info=error)

    def over(self) -> None:
        """It has ended, however."""
        self._over.set()

    def begin(self, tasks: asyncio.TaskGroup, make: "Callable[[Any], Awaitable[Kernel]]") -> None:
        self.task = tasks.create_task(self._serve(make), name=f"serve.{self.name}", context=self.context)
        self.task.add_done_callback(lambda _: self.over())

    async def _serve(self, make: "Callable[[Any], Awaitable[Kernel]]") -> None:
        try:
            self.kernel = await make(self)
            if self._leaving:
                self.kernel.stop()
            await self.kernel.serve()
            self._ending = Ending("exit 0")
        except Exception as group:  # noqa: BLE001 - what ends an actor may be anything; it is named and handed on
            error = first_cause(group)
            said = said_by(error)
            told = said if said.startswith(f"{self.name}:") else f"{self.name}: {said}"
            self._ending = Ending("raised", told, permanent=is_permanent(error, self.kernel))
            self.failed(error)


class TaskBackend:
    """Actors as tasks of `tasks`; `make` builds the kernel of an incarnation, and `hosted` what stands for it."""

    def __init__(
        self, tasks: asyncio.TaskGroup, make: Callable[[Any], Awaitable[Kernel]], hosted: Callable[[str], HostedTask] = HostedTask
    ) -> None:
        self._tasks, self._make, self._hosted = tasks, make, hosted

    async def start(self, name: str) -> HostedTask:
        hosted = self._hosted(name)
        hosted.begin(self._tasks, self._make)
        return hosted
