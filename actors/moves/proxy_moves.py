"""Moves a request from one engine to another while its asker waits.

The source parks it and the target is asked to go on with it, so that for a while two asks stand for one request. The one that the source
keeps or gives away by is its own (actors/moves/departures.py); here only the answers are put together: whichever engine ends the request has
the answer, and whichever drops out leaves the request to the other.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from rubato.actors import plugins
from rubato.actors.messages.generation import HandedBack, HandedOver, MovedFrom
from rubato.actors.messages.moves import AbortMove, Move, Moved, MovePrepared, NotMoved, PrepareMove
from rubato.actors.proxy.picker import ProxyHook
from rubato.actors.proxy.placement import EngineAsk, EngineSeat, ProxyRequest
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.errors import AskFailed, NotSent, Refused, Unknown
from rubato.runtime.actor import handler

PREPARE_S = 5.0
"""Limit of parking a request: longer than any decode step."""

MOVE_S = 20.0
"""Until the target has the request, or leaves it to the source: longer than a source parks it."""


@dataclass(eq=False)
class PendingMove:
    """A request that its source has parked, while the target is asked to take it from there: `shared.second` is its ask of the source."""

    number: int
    over: "asyncio.Future[bool]"
    """Whether it moved."""


class Moves(ProxyHook):
    """The requests of one proxy that are under way."""

    def __init__(self, proxy: LLMProxy) -> None:
        super().__init__(proxy)
        self._placement = proxy.placement
        self._running = proxy.requests.running
        self._num = 0
        self._preparing: set[str] = set()

    @handler(concurrency=64)
    async def ordered(self, request: Move) -> Moved | NotMoved:
        """Answered once another engine has the request, or it is clear that none will; who asked for it hears of neither."""
        if self.proxy.hook(plugins.SURVEYS).is_old(request.term):
            return NotMoved(f"an order of term {request.term}: a later orchestrator is at work")
        return await self.move(request)

    async def move(self, order: Move) -> Moved | NotMoved:
        """See one move through."""
        shared = self._running.get(order.request_id)
        why = self._why_not(shared, order)
        if why or shared is None or shared.asked is None:
            return NotMoved(why)
        self._preparing.add(order.request_id)
        try:
            return await self._move(shared, shared.asked, self._placement.seats[order.target])
        finally:
            self._preparing.discard(order.request_id)

    def _why_not(self, shared: ProxyRequest | None, order: Move) -> str:
        target = self._placement.seats.get(order.target)
        if shared is None or shared.asked is None:
            return f"no engine runs {order.request_id}"
        if target is None or target.gone:
            return f"{order.target} is no engine that is here; there are {', '.join(sorted(self._placement.seats))}"
        if shared.seat is target:
            return f"{order.request_id} is on {order.target} already"
        if shared.second is not None or order.request_id in self._preparing:
            return f"{order.request_id} moves already"
        if target.info.asleep:
            return f"{order.target} is asleep"
        if shared.request.weights.exact or target.info.pinned:
            return f"{order.request_id} or {order.target} is bound to one version for an evaluation"
        return ""

    async def _move(self, shared: ProxyRequest, ask: EngineAsk, target: EngineSeat) -> Moved | NotMoved:
        self._num += 1
        number = (self.proxy.incarnation << 24) + self._num
        request_id, source = shared.request.request_id, ask.seat
        order = PrepareMove(request_id, number, target.name, target.info.version)
        try:
            prepared = await source.ref.ask(order, timeout=PREPARE_S, retry=False)
        except AskFailed as error:
            await self._call_off(source, request_id, number)
            return NotMoved(f"{source.name} did not park {request_id}: {error}")
        if not isinstance(prepared, MovePrepared):
            return prepared
        left = self._placement.seats.get(target.name) is not target
        if shared.asked is not ask or ask.future.done() or shared.abort_reason or left:
            await self._call_off(source, request_id, number)
            return NotMoved(f"{request_id} was no longer on {source.name}, or {target.name} left")
        shared.tokens = prepared.tokens
        over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        shared.second, shared.settles = ask, partial(self._settles, shared, PendingMove(number, over))
        self._placement.take(shared, target)
        route, moved = self._placement.picker.route(shared, target), MovedFrom(source.name, prepared.incarnation, number)
        self.proxy.ask(target, shared, msgspec.structs.replace(route, moved=moved, cache_at=""))
        return await self._outcome(shared, over, target)

    async def _outcome(self, shared: ProxyRequest, over: "asyncio.Future[bool]", target: EngineSeat) -> Moved | NotMoved:
        try:
            async with asyncio.timeout(MOVE_S):
                moved = await asyncio.shield(over)
        except TimeoutError:
            shared.take_away(target)
            moved = False
        request_id = shared.request.request_id
        self.proxy.log.info("request_moved", request=request_id, target=target.name, moved=moved)
        return Moved(target.name) if moved else NotMoved(f"{target.name} did not take {request_id}: it stays, or is over")

    async def _call_off(self, source: EngineSeat, request_id: str, number: int) -> None:
        """The source goes on now; where it does not hear of this, it does once no target came for the request."""
        try:
            await source.ref.ask(AbortMove(request_id, number), timeout=PREPARE_S, retry=False)
        except AskFailed as error:
            self.proxy.log.info("move_not_called_off", engine=source.name, request=request_id, error=str(error))

    # -- two asks for one request ---------------------------------------------------------------------------------------

    def _settles(self, shared: ProxyRequest, move: PendingMove, ask: EngineAsk) -> bool:
        """Whether what the ask came to is the request's, to be dealt with as that of any other: False where the other ask stands for it."""
        source, target = shared.second, shared.asked
        if source is None or target is None or ask not in (source, target):
            if all(ask.seat is not each.seat for each in shared.asks):
                self._placement.release(ask.seat, shared)  # it dropped out a moment ago
            return False
        shared.second = shared.settles = None
        if ask.future.cancelled() and not ask.taken_away:
            shared.run.cancel()  # this actor stops
        ends = shared.run.done() or _ends(ask.future)
        if ask is target:
            return self._target_answered(shared, source, target, move, ends=ends)
        return self._source_answered(shared, source, target, move, ends=ends)

    def _source_answered(self, shared: ProxyRequest, source: EngineAsk, target: EngineAsk, move: PendingMove, *, ends: bool) -> bool:
        """It gave the request away, or is gone: the target has it. Or it had kept it, and the answer is the request's."""
        if ends:
            target.future.cancel()
            target.wait.close()
            self._stand_on(shared, source)
            move.over.set_result(False)
            return True
        source.wait.close()
        self._placement.release(source.seat, shared)
        move.over.set_result(True)
        return False

    def _target_answered(self, shared: ProxyRequest, source: EngineAsk, target: EngineAsk, move: PendingMove, *, ends: bool) -> bool:
        """It ended the request, or dropped out: then the source has it."""
        if ends:
            move.over.set_result(True)
            source.wait.close()
            source.future.cancel()
            return True
        target.wait.close()
        self._stand_on(shared, source)
        self._placement.release(target.seat, shared)
        move.over.set_result(False)
        call_off = self._call_off(source.seat, shared.request.request_id, move.number)
        self.proxy.spawn(call_off, name=f"{self.proxy.name}.call_off.{source.seat.name}")
        return False

    @staticmethod
    def _stand_on(shared: ProxyRequest, ask: EngineAsk) -> None:
        shared.asked, shared.seat = ask, ask.seat


def _ends(asking: "asyncio.Future[Any]") -> bool:
    """Whether this answers the request's asker; else the other engine has the request."""
    if asking.cancelled():
        return False
    found = asking.exception() or asking.result()
    if isinstance(found, HandedOver):
        return not found.to
    return not isinstance(found, HandedBack | NotSent | Refused | Unknown)
