"""Moves a request from one engine to another while its asker waits.

The source parks it and the target is asked to go on with it, so that for a while two asks stand for one request. The one that the source
keeps or gives away by is its own (actors/engines/moves.py); here only the answers are put together: whichever engine ends the request has
the answer, and whichever drops out leaves the request to the other.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from actors.messages.generation import HANDED_BACK, Aborted, Completion, MovedFrom
from actors.messages.moves import AbortMove, Move, Moved, MovePrepared, NotMoved, PrepareMove
from actors.proxy.placement import Behind, EngineSeat, Placement, ProxyRequest
from bus.errors import AskFailed, NotSent, Refused, Unknown
from runtime.actor import Actor

PREPARE_S = 5.0
"""Limit of parking a request: longer than any decode step."""

MOVE_S = 20.0
"""Until the target has the request, or leaves it to the source: longer than a source parks it."""


class Moves:
    """The requests of one proxy that are under way."""

    def __init__(
        self,
        actor: Actor,
        placement: Placement,
        running: Mapping[str, ProxyRequest],
        ask: Callable[[EngineSeat, ProxyRequest, MovedFrom], None],
    ) -> None:
        self._actor = actor
        self._placement = placement
        self._running = running
        self._ask = ask
        self._num = 0
        self._preparing: set[str] = set()

    async def move(self, order: Move) -> Moved | NotMoved:
        """See one move through."""
        shared = self._running.get(order.request_id)
        why = self._why_not(shared, order)
        if why or shared is None or shared.seat is None:
            return NotMoved(why)
        self._preparing.add(order.request_id)
        try:
            return await self._move(shared, shared.seat, self._placement.seats[order.target])
        finally:
            self._preparing.discard(order.request_id)

    def _why_not(self, shared: ProxyRequest | None, order: Move) -> str:
        target = self._placement.seats.get(order.target)
        if shared is None or shared.asking is None or shared.seat is None:
            return f"no engine runs {order.request_id}"
        if target is None or target.gone:
            return f"{order.target} is no engine that is here; there are {', '.join(sorted(self._placement.seats))}"
        if shared.seat is target:
            return f"{order.request_id} is on {order.target} already"
        if shared.behind is not None or order.request_id in self._preparing:
            return f"{order.request_id} moves already"
        if target.asleep:
            return f"{order.target} is asleep"
        if shared.request.exact or target.held:
            return f"{order.request_id} or {order.target} is bound to one version for an evaluation"
        return ""

    async def _move(self, shared: ProxyRequest, source: EngineSeat, target: EngineSeat) -> Moved | NotMoved:
        self._num += 1
        epoch = (self._actor.incarnation << 24) + self._num
        request_id, asking = shared.request.request_id, shared.asking
        order = PrepareMove(request_id, epoch, target.name, target.version)
        try:
            prepared = await source.ref.ask(order, timeout=PREPARE_S, retry=False)
        except AskFailed as error:
            await self._call_off(source, request_id, epoch)
            return NotMoved(f"{source.name} did not park {request_id}: {error}")
        if not isinstance(prepared, MovePrepared):
            return prepared
        left = self._placement.seats.get(target.name) is not target
        if asking is None or shared.asking is not asking or asking.done() or shared.abort_reason or left:
            await self._call_off(source, request_id, epoch)
            return NotMoved(f"{request_id} was no longer on {source.name}, or {target.name} left")
        shared.tokens = prepared.tokens
        over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        shared.behind = Behind(source, asking, shared.wait, epoch, over)
        self._ask(self._placement.take(shared, target), shared, MovedFrom(source.name, prepared.incarnation, epoch))
        return await self._outcome(shared, over, target)

    async def _outcome(
        self, shared: ProxyRequest, over: "asyncio.Future[bool]", target: EngineSeat
    ) -> Moved | NotMoved:
        try:
            async with asyncio.timeout(MOVE_S):
                moved = await asyncio.shield(over)
        except TimeoutError:
            shared.take_away(target)
            moved = False
        request_id = shared.request.request_id
        self._actor.log.info("request_moved", request=request_id, target=target.name, moved=moved)
        return (
            Moved(target.name) if moved else NotMoved(f"{target.name} did not take {request_id}: it stays, or is over")
        )

    async def _call_off(self, source: EngineSeat, request_id: str, epoch: int) -> None:
        """The source goes on now; where it can't be told, it does once nobody came for the request."""
        try:
            await source.ref.ask(AbortMove(request_id, epoch), timeout=PREPARE_S, retry=False)
        except AskFailed as error:
            self._actor.log.info("move_not_called_off", engine=source.name, request=request_id, error=str(error))

    # -- two asks for one request ---------------------------------------------------------------------------------------

    def is_settled(self, seat: EngineSeat, shared: ProxyRequest, asking: "asyncio.Future[Any]") -> bool:
        """Whether what `asking` came to is the request's, to be dealt with as that of any other: False where another ask stands for it."""
        behind = shared.behind
        if behind is None:
            if shared.asking is asking:
                return True
            if shared.seat is not seat:
                self._placement.release(seat, shared)  # it dropped out a moment ago
            return False
        shared.behind = None
        taken_away = behind.taken_away if asking is behind.asking else shared.taken_away
        if asking.cancelled() and not taken_away:
            shared.run.cancel()  # this actor stops
        ends = shared.run.done() or _ends(asking)
        if asking is not behind.asking:
            return self._target_answered(shared, seat, behind, ends=ends)
        return self._source_answered(shared, behind, ends=ends)

    def _source_answered(self, shared: ProxyRequest, behind: Behind, *, ends: bool) -> bool:
        """It gave the request away, or is gone: the target has it. Or it had kept it, and the answer is the request's."""
        if ends:
            self._drop_target(shared, behind)
            return True
        behind.wait.close()
        self._placement.release(behind.seat, shared)
        behind.over.set_result(True)
        return False

    def _target_answered(self, shared: ProxyRequest, target: EngineSeat, behind: Behind, *, ends: bool) -> bool:
        """It ended the request, or dropped out: then the source has it."""
        if ends:
            behind.over.set_result(True)
            behind.wait.close()
            behind.asking.cancel()
            return True
        shared.wait.close()
        self._stand_on(shared, behind)
        self._placement.release(target, shared)
        behind.over.set_result(False)
        call_off = self._call_off(behind.seat, shared.request.request_id, behind.epoch)
        self._actor.spawn(call_off, name=f"{self._actor.name}.call_off.{behind.seat.name}")
        return False

    def _drop_target(self, shared: ProxyRequest, behind: Behind) -> None:
        if shared.asking is not None:
            shared.asking.cancel()
        shared.wait.close()
        self._stand_on(shared, behind)
        behind.over.set_result(False)

    def _stand_on(self, shared: ProxyRequest, behind: Behind) -> None:
        shared.asking, shared.taken_away, shared.wait = behind.asking, behind.taken_away, behind.wait
        shared.engine, shared.seat = behind.seat.name, behind.seat


def _ends(asking: "asyncio.Future[Any]") -> bool:
    """Whether this is an answer to whoever asked for the request; else the other engine has it."""
    if asking.cancelled():
        return False
    found = asking.exception() or asking.result()
    if isinstance(found, Aborted):
        return not found.moved_to and found.reason != HANDED_BACK
    return isinstance(found, Completion) or not isinstance(found, NotSent | Refused | Unknown)
