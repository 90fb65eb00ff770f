"""Requests for completions that are asked for more than once: they run once, for all who ask.

The proxy and each engine hold one table. A repeated Generate is recognised here and nowhere else: under the id of a running request it
joins the run, under that of a finished one it gets the result that was kept.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from actors.messages.generation import Aborted, Completion, Generate
from runtime.courier import current_trace


class SharedRequest:
    """One request while it runs."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.tokens = request.resumed
        """All of its tokens that are known so far."""
        self.abort_reason = ""
        self.ending = False
        """Its last asker went away, or it was aborted: whoever asks now waits for its end, then it runs anew."""
        self.askers = 0
        self.result: asyncio.Future[Completion | Aborted] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[Any]

    def keeps(self, result: Completion | Aborted) -> bool:
        """Whether whoever asks again gets this `result`; else it runs anew."""
        return True


RequestT = TypeVar("RequestT", bound=SharedRequest)


@dataclass(eq=False)
class SharedRequests(Generic[RequestT]):
    """Each request runs in a task of its own, which ends early when its last asker went away.

    Up to `max_results` results are kept, of at most `max_mb` MiB together; the oldest is forgotten first. An error of a run is its
    askers' to hear; one of class `fatal` ends the actor too.
    """

    new: Callable[[Generate], RequestT]
    run: Callable[[RequestT], Awaitable[Completion | Aborted]]
    spawn: Callable[..., asyncio.Task[Any]]
    max_results: int
    max_mb: int = 64
    """Enough for some thousand long completions."""
    fatal: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        self.running: dict[str, RequestT] = {}
        self.idle = asyncio.Event()
        """Set while nothing runs and every asker has its answer."""
        self.idle.set()
        self._results: dict[str, Completion | Aborted] = {}
        self._size_bytes = 0
        self._num_askers = 0

    def finished(self) -> tuple[str, ...]:
        """Ids whose result is kept."""
        return tuple(self._results)

    async def ask(self, request: Generate) -> Completion | Aborted:
        """The result, by a run that is in progress, or that begins now, or that ended lately."""
        while (result := self._results.get(request.request_id)) is None:
            shared = self.running.get(request.request_id)
            if shared is None or not shared.ending:
                return await self._join(shared or self._start(request))
            await asyncio.wait([shared.task])
        return result

    def _start(self, request: Generate) -> RequestT:
        shared = self.running[request.request_id] = self.new(request)
        self.idle.clear()
        work = self._run_for_all(shared, current_trace.get())
        shared.task = self.spawn(work, name=f"request {request.request_id}")
        shared.task.add_done_callback(lambda _: self._ended(shared))
        return shared

    async def _join(self, shared: RequestT) -> Completion | Aborted:
        shared.askers += 1
        self._num_askers += 1
        try:
            return await asyncio.shield(shared.result)
        finally:
            shared.askers -= 1
            self._num_askers -= 1
            if not shared.askers and not shared.result.done():
                shared.ending = True
                shared.task.cancel()
            self._settle()

    async def _run_for_all(self, shared: RequestT, trace: bytes) -> None:
        current_trace.set(trace)
        try:
            result = await self.run(shared)
        except Exception as error:
            shared.result.set_exception(error)
            shared.result.exception()  # seen here: there may be no asker left to see it
            if isinstance(error, self.fatal):
                raise
        else:
            shared.result.set_result(result)
            if shared.keeps(result):
                self._keep(shared.request.request_id, result)

    def _ended(self, shared: RequestT) -> None:
        """Also where the task was cancelled before it began."""
        shared.result.cancel()
        del self.running[shared.request.request_id]
        self._settle()

    def _keep(self, request_id: str, result: Completion | Aborted) -> None:
        results = self._results
        results[request_id] = result
        self._size_bytes += _size(result)
        while len(results) > self.max_results or (self._size_bytes > self.max_mb << 20 and len(results) > 1):
            oldest = next(iter(results))
            self._size_bytes -= _size(results.pop(oldest))

    def _settle(self) -> None:
        if not self.running and not self._num_askers:
            self.idle.set()


def _size(result: Completion | Aborted) -> int:
    return len(result.tokens.ids) + len(result.tokens.logprobs)
