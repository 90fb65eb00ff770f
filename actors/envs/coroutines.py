"""Users' coroutines on the manager's own event loop: each has a deadline, one that lets nothing end it is run no further, and one that
blocks the loop is named.

A worker process that hangs is killed. Here a call that is over time is cancelled; where it swallows that, it is never resumed again, and its
instance is not used any more. Only tasks that it started itself go on.
"""

import asyncio
import inspect
import os
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
from typing import Any, cast

from rubato.actors.envs.hosting import Hung, Raised
from rubato.runtime.pool.values import Caught

END_S = 0.5
"""A call that was cancelled may clean up for so long."""

BLOCKED_S = 0.25
"""Nothing else runs in the manager while a call computes, or sleeps without awaiting, for so long: shown once per method."""

_Work = Coroutine[Any, Any, tuple[Any, BaseException | None]]

SCHEDSTAT = "/proc/thread-self/schedstat"


class Coroutines:
    """The calls of one host. `on_blocked` gets what `timed` was given, and the seconds."""

    def __init__(self, on_blocked: Callable[[Any, float], None]) -> None:
        self._on_blocked = on_blocked
        self._calls: dict[Call, None] = {}  # in order, which is that of their ends
        self._fd = -1

    def begin(self, awaitable: Any, what: Any, context: Context) -> "Call":
        """Run it as a task that is owned here, in `context`; `what` names it where it blocks."""
        inner = _awaited(awaitable)
        call = Call(_outcome(_driven(inner, partial(self.timed, what))), context)
        self._calls[call] = None

        def ended(_: Any) -> None:
            self._calls.pop(call, None)
            for each in (inner, awaitable):  # a call that was ended before its first step never ran them
                if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                    each.close()

        call.task.add_done_callback(ended)
        return call

    def call(self, what: Any, run: Callable[[], Any]) -> Any:
        """What user code returns, `timed`. Raises Raised."""
        with Caught() as caught:
            return self.timed(what, run)
        raise Raised(cast("BaseException", caught.error))

    def timed(self, what: Any, run: Callable[[], Any]) -> Any:
        """What user code returns that nothing interrupts. Where it waited for a core, that is not its own doing."""
        began, waited_s = time.perf_counter(), self._waited_s()
        try:
            return run()
        finally:
            took_s = time.perf_counter() - began
            if took_s > BLOCKED_S and (took_s := took_s - self._waited_s() + waited_s) > BLOCKED_S:
                self._on_blocked(what, took_s)

    async def close(self) -> None:
        """End what still runs, where that can be ended."""
        async with asyncio.TaskGroup() as tasks:
            for call in [*self._calls]:
                tasks.create_task(call.end())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _waited_s(self) -> float:
        """Seconds that this thread was ready to run and had no core."""
        try:
            if self._fd < 0:
                self._fd = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._fd, 100, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0  # not every system tells


class Call:
    """One awaitable under way."""

    def __init__(self, work: _Work, context: Context) -> None:
        self._work = work
        asker = asyncio.current_task()
        name = None if asker is None else asker.get_name()  # a call goes by the name of its rollout
        self.task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self.abandoned = False
        """It was left where it stood, since it swallowed its cancellation."""

    async def result(self, limit_s: float) -> Any:
        """Raises Raised, or Hung after `limit_s`, when it was ended. Cancelled, it leaves that to a caller of `end`."""
        await asyncio.wait([self.task], timeout=limit_s)
        if not self.task.done():
            await self.end()
            raise Hung
        if self.task.cancelled():
            raise Raised(asyncio.CancelledError())
        if (raised := self.task.exception()) is not None:  # GeneratorExit, which also ends what is closed
            raise Raised(raised)
        found, error = self.task.result()
        if error is not None:
            raise Raised(error)
        return found

    async def end(self) -> None:
        """Cancel it, and wait a moment for that; then resume it no more."""
        if self.task.done() or self.abandoned:
            return
        self.task.cancel()
        if not (await asyncio.wait([self.task], timeout=END_S))[0]:
            self.abandoned = True
            self._work.close()
            self.task.add_done_callback(_seen)
            self.task.cancel()  # what it awaited has no other use


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


@types.coroutine
def _driven(inner: "Coroutine[Any, Any, Any]", timed: Callable[[Callable[[], Any]], Any]) -> Generator[Any, Any, Any]:
    """Runs `inner`, each stretch between two awaits under `timed`."""
    go_on: Callable[[], Any] = partial(inner.send, None)
    while True:
        try:
            awaited = timed(go_on)
        except StopIteration as end:
            return end.value
        found = None
        with Caught() as thrown:  # whatever it is, it is for the user's code
            found = yield awaited
        if isinstance(thrown.error, GeneratorExit):  # of Call.end
            with Caught():  # it swallows this too, or raises something of its own
                inner.close()
            raise thrown.error
        go_on = partial(inner.send, found) if thrown.error is None else partial(inner.throw, thrown.error)


async def _outcome(work: Any) -> tuple[Any, BaseException | None]:
    """(result, error): a task that ends with SystemExit would end the whole loop."""
    with Caught(asyncio.CancelledError, GeneratorExit) as caught:
        return await work, None
    return None, caught.error


def _seen(task: "asyncio.Task[Any]") -> None:
    """Take note of an exception, or its loss would be reported."""
    if not task.cancelled():
        task.exception()
