"""Orders to an engine to sleep, wake or change its degree, one at a time; proxies hear its new state before the sender has its answer."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from rubato.actors.engines.engine import RECONFIGURE, SLEEP, Engine, EngineDead, EngineError, EngineHook, require
from rubato.actors.messages.engines import Obeyed, Reconfigure, SleepEngine, WakeEngine
from rubato.bus.errors import Failed
from rubato.planning.engine_info import EngineInfo
from rubato.runtime.actor import handler

if TYPE_CHECKING:
    from rubato.actors.engines.worker import EngineWorker


class Orders(EngineHook):
    """Of one engine."""

    def __init__(self, worker: "EngineWorker") -> None:
        super().__init__(worker)
        self._turn = asyncio.Lock()
        self._term = -1
        """The latest of all orders that were carried out."""
        self._falls_asleep = False
        """It is to take no new request from now on, though it may still compute."""

    def told(self, info: EngineInfo) -> EngineInfo:
        return msgspec.structs.replace(info, asleep=info.asleep or self._falls_asleep)

    @handler(concurrency=4, outlives_asker=True)
    async def sleep_engine(self, order: SleepEngine) -> Obeyed:
        return await self.carry_out(order)

    @handler(concurrency=4, outlives_asker=True)
    async def wake_engine(self, order: WakeEngine) -> Obeyed:
        return await self.carry_out(order)

    @handler(concurrency=4, outlives_asker=True)
    async def reconfigure(self, order: Reconfigure) -> Obeyed:
        return await self.carry_out(order)

    async def carry_out(self, order: SleepEngine | WakeEngine | Reconfigure) -> Obeyed:
        """Raises Failed, one sentence, for an order that can't be or is older than the last one: nothing has changed then."""
        engine, _ = self.worker.started()
        async with self._turn:
            try:
                match order:
                    case SleepEngine(level, term):
                        self._check(term or self._term)
                        seconds = await self._sleep(engine, level)
                    case WakeEngine(term):
                        seconds = await self._wake(engine, term)
                    case Reconfigure(degree, term):
                        seconds = await self._reconfigure(engine, degree, term)
            except EngineDead:
                raise
            except EngineError as error:
                raise Failed(str(error)) from error
            finally:
                self._falls_asleep = False
                await self.worker.tell_proxies()
            self._term = max(self._term, order.term)
            return Obeyed(self.worker.info(), seconds)

    async def _sleep(self, engine: Engine, level: int) -> float:
        require(engine, SLEEP)
        self._falls_asleep = True
        await self.worker.tell_proxies()
        return await engine.sleep(level)

    async def _wake(self, engine: Engine, term: int) -> float:
        self._check(term or self._term)
        require(engine, SLEEP)
        return await engine.wake()

    async def _reconfigure(self, engine: Engine, degree: int, term: int) -> float:
        require(engine, RECONFIGURE)
        self._check(term)
        return 0.0 if degree == engine.load().degree else await engine.reconfigure(degree)

    def _check(self, term: int) -> None:
        if term < self._term:
            raise EngineError(f"refused an order of term {term}: {self.worker.name} has carried out one of term {self._term}")
