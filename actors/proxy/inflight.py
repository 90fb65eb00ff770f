"""The in-flight table: every request once, with the tokens sampled so far; and the newest results, for lost replies."""

import asyncio
from collections import OrderedDict

import msgspec

from actors.messages.generation import Aborted, Completion, Generate, Tokens, VersionSpan


class ProxyRequest:
    """One request that is not answered yet. At any moment at most one handler drives it; others that asked wait for it."""

    __slots__ = (
        "abort_reason",
        "deaths",
        "driven",
        "engine",
        "freed",
        "joined",
        "request",
        "result",
        "scope",
        "tokens",
    )

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.tokens = request.resumed
        """Every token known to be sampled; what a move to another engine carries."""
        self.engine = ""
        """The one engine it lives on; empty while it waits."""
        self.scope: asyncio.Timeout | None = None
        """Open while an engine is asked; ended early to take the request away from it."""
        self.driven = False
        self.joined = 0
        self.freed: asyncio.Event | None = None
        """Set when the driver ends, where others wait."""
        self.abort_reason = ""
        self.deaths = 0
        """Engines that died while they ran it."""
        self.result: Completion | Aborted | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.ids) // 4

    def to_send(self) -> Generate:
        """The request as the next engine gets it: with the tokens sampled so far."""
        if self.tokens is self.request.resumed:
            return self.request
        return msgspec.structs.replace(self.request, resumed=self.tokens)

    def outcome(self) -> Completion | Aborted | None:
        """The answer that follows from what is known without an engine, if one does."""
        request, tokens = self.request, self.tokens
        if self.abort_reason:
            return Aborted(request.request_id, tokens, self.abort_reason)
        if tokens.ids:
            if int.from_bytes(tokens.ids[-4:], "little", signed=True) in request.sampling.stop_token_ids:
                return Completion(request.request_id, tokens, "stop", self.engine)
            if self.num_tokens >= request.sampling.max_new_tokens:
                return Completion(request.request_id, tokens, "length", self.engine)
        return None

    def take_away(self) -> None:
        """End the ask that runs now: the driver goes on elsewhere, or ends with `abort_reason`."""
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(0.0)


class InFlight:
    """Flights by request id, and up to `max_results` results of at most `max_bytes` together, oldest forgotten first."""

    def __init__(self, max_results: int, max_bytes: int) -> None:
        self._flights: dict[str, ProxyRequest] = {}
        self._results: OrderedDict[str, Completion | Aborted] = OrderedDict()
        self._max_results, self._max_bytes = max_results, max_bytes
        self._size_bytes = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, request_id: str) -> ProxyRequest | None:
        return self._flights.get(request_id)

    def result(self, request_id: str) -> Completion | Aborted | None:
        """The result of a request that ended lately."""
        return self._results.get(request_id)

    def open(self, request: Generate) -> ProxyRequest:
        """The flight of this request id, new or joined."""
        flight = self._flights.get(request.request_id)
        if flight is None:
            flight = self._flights[request.request_id] = ProxyRequest(request)
            self.idle.clear()
        return flight

    def finish(self, flight: ProxyRequest, result: Completion | Aborted) -> None:
        """Keep the result for whoever joined, and for whoever asks again."""
        flight.result = result
        self._results[flight.request.request_id] = result
        self._size_bytes += _size(result)
        while len(self._results) > self._max_results or (self._size_bytes > self._max_bytes and len(self._results) > 1):
            _, old = self._results.popitem(last=False)
            self._size_bytes -= _size(old)

    def leave(self, flight: ProxyRequest) -> None:
        """Its driver ends, with a result or cancelled: whoever joined takes over."""
        flight.driven = False
        if flight.freed is not None:
            flight.freed.set()
            flight.freed = None
        self.close(flight)

    def close(self, flight: ProxyRequest) -> None:
        """Forget the flight unless somebody drives it or waits for it."""
        if not flight.driven and not flight.joined:
            self._flights.pop(flight.request.request_id, None)
            if not self._flights:
                self.idle.set()


def extend(tokens: Tokens, more: Tokens) -> Tokens:
    """`tokens` and what `more` adds at their end; `more` has positions in the whole completion.

    Overlaps are cut. A gap (a report was missed) adds nothing: what follows it will be sampled again.
    """
    have = len(tokens.ids) // 4
    if not more.spans or not more.spans[0].start <= have < more.spans[-1].end:
        return tokens
    skip = (have - more.spans[0].start) * 4
    spans = list(tokens.spans)
    for version, start, end in ((s.version, max(s.start, have), s.end) for s in more.spans if s.end > have):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(version, start, end))
    return Tokens(tokens.ids + more.ids[skip:], tokens.logprobs + more.logprobs[skip:], tuple(spans))


def _size(result: Completion | Aborted) -> int:
    return len(result.tokens.ids) + len(result.tokens.logprobs)
