"""The requests of one worker: those that run, with who asked and what was sampled; and the newest results."""

import asyncio
from collections import OrderedDict

from actors.engines.engine import Chunk, Work
from actors.engines.tokens import joined, shifted, unpack_ids
from actors.messages.generation import HANDED_BACK, Aborted, Completion, Generate, Tokens


class EngineRequest:
    """One request from its first ask to its result."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.tokens = request.resumed
        """The whole completion so far."""
        self.unreported = Tokens()
        self.askers = 0
        self.abandoned = False
        """Its last asker went away; it is about to end, and nobody may join any more."""
        self.abort_reason = ""
        self.generating = False
        """The engine has it; before, it waits for weights."""
        self.task: asyncio.Task[None]
        self.result: asyncio.Future[Completion | Aborted] = asyncio.get_running_loop().create_future()

    @property
    def ending(self) -> bool:
        """Nobody may join any more; one that is handed back has its tokens for whoever asks."""
        return self.abandoned or self.abort_reason not in ("", HANDED_BACK)

    def work(self) -> Work:
        """The request as the engine sees it. Raises ValueError when its prompt is malformed."""
        request = self.request
        prompt = unpack_ids(request.prompt)
        return Work(request.request_id, request.session, prompt, request.sampling, request.resumed)

    def heard(self, chunk: Chunk) -> None:
        """Add what the engine sampled."""
        self.tokens = joined(self.tokens, chunk.tokens)
        self.unreported = joined(self.unreported, chunk.tokens)

    def report(self) -> Tokens:
        """The tokens since the last report, at their positions in the whole completion."""
        tokens, self.unreported = self.unreported, Tokens()
        return shifted(tokens, (len(self.tokens.ids) - len(tokens.ids)) // 4)


class Flights:
    """Running requests by id, and up to `results_kept` results, oldest forgotten first."""

    def __init__(self, results_kept: int) -> None:
        self.running: dict[str, EngineRequest] = {}
        self._results: OrderedDict[str, Completion | Aborted] = OrderedDict()
        self._results_kept = results_kept
        self._num_askers = 0
        self.idle = asyncio.Event()
        """Set while nothing runs and every asker has its answer."""
        self.idle.set()

    def finished(self) -> tuple[str, ...]:
        """Ids whose result is kept."""
        return tuple(self._results)

    def result(self, request_id: str) -> Completion | Aborted | None:
        return self._results.get(request_id)

    def open(self, request: Generate) -> EngineRequest:
        """A new flight. The caller joins the running one itself, if there is one."""
        flight = self.running[request.request_id] = EngineRequest(request)
        self.idle.clear()
        return flight

    def close(
        self, flight: EngineRequest, result: Completion | Aborted | Exception | None, *, keep: bool = True
    ) -> None:
        """The request ended: with a result for its askers, an error, or nothing when it was cancelled."""
        if isinstance(result, Exception):
            flight.result.set_exception(result)
            flight.result.exception()  # seen here: there may be no asker left to see it
        elif result is None:
            flight.result.cancel()
        else:
            flight.result.set_result(result)
            if keep:
                self._results[result.request_id] = result
                if len(self._results) > self._results_kept:
                    self._results.popitem(last=False)
        del self.running[flight.request.request_id]
        self._settle()

    def forget(self, flight: EngineRequest) -> None:
        """Close a flight whose task ended without doing so: it was cancelled before it began."""
        if self.running.get(flight.request.request_id) is flight:
            self.close(flight, None)

    def join(self, flight: EngineRequest) -> None:
        """One more asker."""
        flight.askers += 1
        self._num_askers += 1

    def leave(self, flight: EngineRequest) -> None:
        """An asker has its answer, or went away."""
        flight.askers -= 1
        self._num_askers -= 1
        self._settle()

    def _settle(self) -> None:
        if not self.running and not self._num_askers:
            self.idle.set()
