"""Requests for completions that are asked for more than once: they run once, for all who ask.

The proxy and each engine hold one table. A repeated Generate is recognised here and nowhere else: under the id of a running request it
joins the run, under that of a finished one it gets the result that was kept.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rubato.actors.messages.generation import Generate, GenerateReply, Tokens
from rubato.runtime.courier import current_trace

Answer = asyncio.Future[GenerateReply]

Run = asyncio.Future[GenerateReply | Exception]
"""A run of a request: an exception that is its result is its askers' to hear."""


class SharedRequest:
    """One request while it runs."""

    run: Run

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.trace = current_trace.get()
        """Of its first asker."""
        self.tokens: Tokens = request.resumed
        """All of its tokens that are known so far."""
        self.abort_reason = ""
        self.ending = False
        """Its last asker went away, or it was aborted: a new asker waits for its end, then it runs anew."""
        self.askers: list[Answer] = []
        self.next: list[tuple[Generate, Answer]] = []
        """Asks that came while it was ending."""

    def keeps(self, result: GenerateReply) -> bool:
        """Whether a later asker gets this `result`; else it runs anew."""
        return True


RequestT = TypeVar("RequestT", bound=SharedRequest)


@dataclass(eq=False)
class SharedRequests(Generic[RequestT]):
    """Each request runs once for all who ask, and ends early when the last of them went away.

    `begin` starts a run; `cancel` ends one, whose future is cancelled then or soon. Up to `max_results` results are kept, of at most
    `max_mb` MiB together; the oldest is forgotten first.
    """

    new: Callable[[Generate], RequestT]
    begin: Callable[[RequestT], Run]
    max_results: int
    max_mb: int = 64
    """Enough for some thousand long completions."""
    cancel: Callable[[RequestT], object] = lambda shared: shared.run.cancel()
    too_late: Callable[[Generate], GenerateReply] | None = None
    """The answer to an asker whose time is over."""

    def __post_init__(self) -> None:
        self.running: dict[str, RequestT] = {}
        self.idle = asyncio.Event()
        """Set while nothing runs and every asker has its answer."""
        self.idle.set()
        self._results: dict[str, GenerateReply] = {}
        self._size_bytes = 0
        self._num_askers = 0

    def finished(self) -> tuple[str, ...]:
        """Ids whose result is kept."""
        return tuple(self._results)

    def ask(self, request: Generate, within_s: float | None = None) -> Answer:
        """The result, by a run that is in progress, or that begins now, or that ended lately. To cancel it is to go away."""
        loop = asyncio.get_running_loop()
        asker: Answer = loop.create_future()
        self._admit(request, asker)
        timer = None if within_s is None else loop.call_later(within_s, self._time_is_over, request, asker)
        self._num_askers += 1
        self.idle.clear()
        asker.add_done_callback(partial(self._left, request.request_id, timer))
        return asker

    def _admit(self, request: Generate, asker: Answer) -> None:
        request_id = request.request_id
        if (result := self._results.get(request_id)) is not None:
            asker.set_result(result)
            return
        shared = self.running.get(request_id)
        if shared is not None and shared.ending:
            shared.next.append((request, asker))
            return
        if shared is None:
            shared = self.running[request_id] = self.new(request)
            shared.run = self.begin(shared)
            shared.run.add_done_callback(partial(self._ended, shared))
        shared.askers.append(asker)

    def _time_is_over(self, request: Generate, asker: Answer) -> None:
        if self.too_late is not None and not asker.done():
            asker.set_result(self.too_late(request))

    def _left(self, request_id: str, timer: asyncio.TimerHandle | None, asker: Answer) -> None:
        """It has its answer, or went away without one."""
        if timer is not None:
            timer.cancel()
        shared = self.running.get(request_id)
        if shared is not None and asker in shared.askers:
            shared.askers.remove(asker)
            if not shared.askers:
                shared.ending = True
                self.cancel(shared)
        self._num_askers -= 1
        self._settle()

    def _ended(self, shared: RequestT, run: Run) -> None:
        del self.running[shared.request.request_id]
        askers = [asker for asker in shared.askers if not asker.done()]
        result = None if run.cancelled() else run.exception() or run.result()
        for asker in askers:
            if result is None:
                asker.cancel()
            elif isinstance(result, BaseException):
                asker.set_exception(result)
            else:
                asker.set_result(result)
        if not (result is None or isinstance(result, BaseException)) and shared.keeps(result):
            self._keep(shared.request.request_id, result)
        for request, asker in shared.next:
            if not asker.done():
                self._admit(request, asker)
        self._settle()

    def _keep(self, request_id: str, result: GenerateReply) -> None:
        results = self._results
        results[request_id] = result
        self._size_bytes += _size(result)
        while len(results) > self.max_results or (self._size_bytes > self.max_mb << 20 and len(results) > 1):
            oldest = next(iter(results))
            self._size_bytes -= _size(results.pop(oldest))

    def _settle(self) -> None:
        if not self.running and not self._num_askers:
            self.idle.set()


def _size(result: GenerateReply) -> int:
    return len(result.tokens.ids) + len(result.tokens.logprobs)


def in_task(
    run: Callable[[RequestT], Awaitable[GenerateReply]], spawn: Callable[..., asyncio.Task[Any]], *, fatal: tuple[type[Exception], ...] = ()
) -> Callable[[RequestT], Run]:
    """`begin` for a `run` that is a coroutine: each has a task of its own. An error of class `fatal` ends the actor too."""

    async def outcome(shared: RequestT) -> GenerateReply | Exception:
        current_trace.set(shared.trace)
        try:
            return await run(shared)
        except fatal:
            raise
        except Exception as error:  # noqa: BLE001 - its askers hear of it
            return error

    return lambda shared: spawn(outcome(shared), name=f"request {shared.request.request_id}")
