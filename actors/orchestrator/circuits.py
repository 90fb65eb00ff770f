"""A switch of parallelism, or a rebalancing, agrees with the optical fabric first: its traffic gets circuits, or is known to go without."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager

from rubato.actors.messages.fabric import AskCircuits, AwaitCircuits, CircuitsPromised, NoCircuits, ReleaseCircuits
from rubato.actors.messages.moves import AwaitCaches
from rubato.bus.errors import AskFailed
from rubato.planning.demand import Demand
from rubato.runtime.actor import Actor

CONTROLLER = "fabric_controller"

MOST_WAIT_S = 1.0
"""For circuits: a switch that waits longer loses more than they gain."""

ANSWER_S = 2.0
"""Of the controller, beyond what was promised. One that is gone or stands still costs a switch no more."""


CARRIED_S = 20.0
"""For caches to travel: as long as the move of a request may take. Then the circuits go back to their phase all the same."""


class SwitchCircuits:
    """Of one orchestrator. Each ask has a number of its own, above those of every orchestrator before."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._num = 0

    @asynccontextmanager
    async def lit(self, switches: Sequence[str], traffic: Sequence[Demand]) -> AsyncGenerator[None]:
        """The block runs once circuits for `traffic` (bytes between actors) are lit, or it is clear that the electrical path carries it.

        `switches` (or moves) that are made under them are named in the wait that others see. The circuits are given back afterwards.
        """
        number = await self._agree(switches, tuple(traffic)) if traffic and self._actor.peers(CONTROLLER) else 0
        try:
            yield
            if number:
                await self._carried({source for source, _, _ in traffic})
                await self._carried({target for _, target, _ in traffic})
        finally:
            if number:
                await self._release(number)

    async def _carried(self, engines: Collection[str]) -> None:
        """A request is its target's before its cache is there: waits for the caches, as long as they may be expected to need circuits."""
        asks = (self._actor.ref(name).ask(AwaitCaches(), timeout=CARRIED_S) for name in sorted(engines))
        found = await asyncio.gather(*asks, return_exceptions=True)
        failed = [each for each in found if isinstance(each, BaseException)]
        for error in failed:
            if not isinstance(error, AskFailed):
                raise error
            self._actor.log.info("caches_not_awaited", error=str(error))

    async def _agree(self, switches: Sequence[str], traffic: tuple[Demand, ...]) -> int:
        """The number of the ask, once its circuits are lit; 0 where there are none."""
        self._num += 1
        switch = "; ".join(switches)
        number = (self._actor.incarnation << 24) + self._num
        controller = self._actor.ref(CONTROLLER)
        try:
            promised = await controller.ask(AskCircuits(number, traffic, MOST_WAIT_S), timeout=ANSWER_S, retry=False)
            if isinstance(promised, CircuitsPromised):
                detail = f"{switch} waits for circuits, ready in {1e3 * promised.ready_in_s:.0f} ms"
                with self._actor.waits.on("circuits", holder=CONTROLLER, detail=detail):
                    async with asyncio.timeout(promised.ready_in_s + ANSWER_S):
                        lit = await controller.ask(AwaitCircuits(number), timeout=MOST_WAIT_S + ANSWER_S, retry=False)
                why_not = lit.why if isinstance(lit, NoCircuits) else ""
            else:
                why_not = promised.why
        except (AskFailed, TimeoutError) as error:
            why_not = str(error) or f"{CONTROLLER} did not light them in time"
            await self._release(number)
        except asyncio.CancelledError:
            await self._release(number)
            raise
        circuits = "electrical path" if why_not else "lit"
        self._actor.log.info("switch_agreed", switch=switch, number=number, circuits=circuits, why=why_not, traffic=traffic)
        self._actor.metrics.count("orchestrator/electrical" if why_not else "orchestrator/circuits", len(switches))
        if why_not:
            return 0
        self._actor.metrics.gauge("orchestrator/agreed", number)
        return number

    async def _release(self, number: int) -> None:
        """Where the controller can't be told, the next phase brings its own circuits."""
        try:
            await self._actor.ref(CONTROLLER).tell(ReleaseCircuits(number))
        except AskFailed as error:
            self._actor.log.info("circuits_not_released", number=number, error=str(error))
