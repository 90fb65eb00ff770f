"""A loop whose time is virtual, so that a whole system runs from a seed."""

import asyncio
import contextlib
import heapq
import random
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextvars import Context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

from rubato.runtime.observe.figures import Waits

ResultT = TypeVar("ResultT")

VIRTUAL_LIMIT_S = 86_400.0
"""A virtual day. Periodic work such as heartbeats keeps virtual time moving for ever; this bound is what ends a hang."""

CALLBACKS_AT_ONCE = 200_000
"""Far above what any system does in one instant: so many callbacks without virtual time moving wake each other for ever."""

MAX_TASKS = 40
"""Tasks listed; a system of hundreds that stands still repeats itself."""

MAX_FRAMES = 6
"""Awaits shown per task, innermost first."""


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set, virtual time ran out, or it stands still for ever; the message names what every task waits for."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs without a selector and jumps its clock to the next timer whenever nothing is ready.

    Without a seed callbacks run first in, first out. With one, the task that goes on next is drawn at random, which explores
    interleavings that a live loop shows once in a month; plain callbacks keep their order, as asyncio promises. One seed gives
    one order. Executors run inline. Real I/O, signals and other threads are refused.
    """

    virtual = True

    def __init__(self, seed: int | None = None, *, limit_s: float = VIRTUAL_LIMIT_S) -> None:
        super().__init__()
        self._chance = random.Random(seed) if seed is not None else None
        self._limit_s = limit_s
        self._now = 0.0
        self._queue: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._thread = threading.get_ident()
        self.waits: list[tuple[str, Waits]] = []
        """(actor, its waits), which a deadlock report quotes."""
        self.num_steps = 0
        """Callbacks run so far; with the seed it names a point of the run."""
        self._moved_at = 0
        """`num_steps` when time moved last."""

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("another thread called into a virtual loop; use offload(), which runs inline there")
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run `func` here and now; its outcome is there when the future is awaited."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - an executor hands on whatever the function raised
            done.set_exception(error)
        return done

    def close(self) -> None:
        self._queue.clear()
        self._timers.clear()
        super().close()

    def _run_once(self) -> None:
        """One callback; BaseEventLoop's run_forever calls this until `stop`."""
        self._wake_due()
        handle = self._draw()
        if not handle.cancelled():
            self.num_steps += 1
            handle._run()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] - what a loop does

    def _wake_due(self) -> None:
        """Move due timers to the queue, jumping the clock where nothing else is ready."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._queue:
            if not self._timers:
                raise Deadlock(report(f"deadlock at {self._now:.3f} s: nothing can happen any more", self, self.waits))
            if self._timers[0][0] > self._now:
                self._now = self._timers[0][0]
                self._moved_at = self.num_steps
            if self._now > self._limit_s:
                raise Deadlock(report(f"virtual time ran past {self._limit_s:g} s", self, self.waits))
        if self.num_steps - self._moved_at > CALLBACKS_AT_ONCE:
            self._moved_at = self.num_steps  # said once; what cleans up afterwards must be able to run
            text = f"livelock at {self._now:.3f} s: time stands still after {CALLBACKS_AT_ONCE} callbacks"
            raise Deadlock(report(text, self, self.waits))
        while self._timers and self._timers[0][0] <= self._now:
            self._queue.append(heapq.heappop(self._timers)[2])

    def _draw(self) -> asyncio.Handle:
        if self._chance is None or len(self._queue) == 1:
            return self._queue.pop(0)
        index = int(self._chance.random() * len(self._queue))
        if not _steps_a_task(self._queue[index]):
            index = next(i for i, handle in enumerate(self._queue) if not _steps_a_task(handle))
        return self._queue.pop(index)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers stay in the heap and are skipped when they come up."""

    def _process_events(self, event_list: list[Any]) -> None:
        """No selector, no events."""

    def _write_to_self(self) -> None:
        """Never asleep, so never to be woken."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("real input or output was attempted on a virtual loop; use the memory transport and store")

    add_reader = add_writer = add_signal_handler = getaddrinfo = _refuse  # type: ignore[assignment]
    create_connection = create_server = create_datagram_endpoint = _refuse  # type: ignore[assignment]
    create_unix_connection = create_unix_server = subprocess_exec = subprocess_shell = _refuse  # type: ignore[assignment]
    sock_recv = sock_sendall = sock_connect = sock_accept = connect_read_pipe = _refuse  # type: ignore[assignment]


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, ResultT]],
    seed: int | None = None,
    *,
    limit_s: float = VIRTUAL_LIMIT_S,
    loop: VirtualLoop | None = None,
) -> ResultT:
    """Run `main()` to its end on `loop`, or on a fresh VirtualLoop, and return its result; tasks it left behind are cancelled.

    Raises Deadlock as the loop does, and whatever an exception handler would have been called with: nothing is only logged.
    """
    loop = loop or VirtualLoop(seed, limit_s=limit_s)
    lost: list[Exception] = []

    def remember(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lost.append(error if isinstance(error, Exception) else RuntimeError(str(context.get("message"))))

    loop.set_exception_handler(remember)
    try:
        result = loop.run_until_complete(loop.create_task(main(), name="main"))
    finally:
        _sweep(loop)
    if lost:
        raise lost[0]
    return result


def _sweep(loop: VirtualLoop) -> None:
    """Cancel what is left, as asyncio.run does, and close the loop."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    with contextlib.suppress(Deadlock):
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _steps_a_task(handle: asyncio.Handle) -> bool:
    callback = getattr(handle, "_callback", None)
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


def report(headline: str, loop: asyncio.AbstractEventLoop, waits: Iterable[tuple[str, Waits]] = ()) -> str:
    """`headline`, then a line per task with its chain of awaits, then what actors said that they wait for."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [headline, *(f"  {task.get_name()}: {_standing(task)}" for task in tasks[:MAX_TASKS])]
    if len(tasks) > MAX_TASKS:
        lines.append(f"  … and {len(tasks) - MAX_TASKS} more tasks")
    now = loop.time()
    for actor, held in waits:
        for view in held.snapshot(now):
            facts = ", ".join(fact for fact in (view.detail, view.holder, view.limit) if fact)
            lines.append(f"  {actor} waits {view.age_s:.1f} s for {view.what}" + (f" ({facts})" if facts else ""))
    return "\n".join(lines)


def _standing(task: asyncio.Task[Any]) -> str:
    frames, leaf = _chain(task.get_coro())
    if not frames:
        return "has not started" if leaf is None else f"waits on {_described(leaf)}"
    places = [_place(code, line) for code, line in reversed(frames)]
    shown = " < ".join(places[:MAX_FRAMES]) + (" < …" if len(places) > MAX_FRAMES else "")
    return f"waits on {_described(leaf)} in {shown}"


def _chain(awaited: Any) -> tuple[list[tuple[CodeType, int]], Any]:
    """The suspended frames from the task's own coroutine inwards, and what the innermost awaits."""
    frames: list[tuple[CodeType, int]] = []
    while awaited is not None:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        frames.append((frame.f_code, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames, awaited


def _place(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    return f"{code.co_qualname} ({path.name}:{line})"


def _described(leaf: Any) -> str:
    if isinstance(leaf, asyncio.Task):
        return f"task {leaf.get_name()}"
    if leaf is None or type(leaf).__name__ in ("FutureIter", "_asyncio.FutureIter"):
        return "a future"
    return type(leaf).__name__
