"""Carries out what an engine is told to be, one order at a time; the proxies know before the asker does."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from actors.engines.engine import RECONFIGURE, SLEEP, Engine, EngineDead, EngineError, require
from actors.engines.weights import unshared
from actors.messages.engines import EngineChanged, Reconfigure, SleepEngine, WakeEngine
from bus.errors import Failed


class Orders:
    """Of one engine."""

    def __init__(self, name: str, tell: Callable[[], Awaitable[None]]) -> None:
        """`tell` has the proxies know how the engine is."""
        self._name = name
        self._tell = tell
        self._turn = asyncio.Lock()
        self._epoch = -1
        """The latest of all orders that were carried out."""
        self.falls_asleep = False
        """It takes no new request from now on, though it may still compute."""

    async def begin(self, engine: Engine) -> None:
        """The engine has started."""

    def weight_sync(self) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Around the pull and the swap of new weights; tells whether they may go on."""
        return unshared()

    async def carry_out(self, engine: Engine, order: SleepEngine | WakeEngine | Reconfigure) -> EngineChanged:
        """Raises Failed, one sentence, for an order that can't be or is older than the last one: nothing has changed then."""
        async with self._turn:
            try:
                match order:
                    case SleepEngine(level, epoch):
                        self._check(epoch or self._epoch)
                        seconds = await self._sleep(engine, level)
                    case WakeEngine(epoch):
                        seconds = await self._wake(engine, epoch)
                    case Reconfigure(degree, epoch):
                        seconds = await self._reconfigure(engine, degree, epoch)
            except EngineDead:
                raise
            except EngineError as error:
                raise Failed(str(error)) from error
            finally:
                self.falls_asleep = False
                await self._tell()
            self._epoch = max(self._epoch, order.epoch)
            load = engine.load()
            return EngineChanged(self._name, seconds, load.degree, load.asleep)

    async def _sleep(self, engine: Engine, level: int) -> float:
        require(engine, SLEEP)
        self.falls_asleep = True
        await self._tell()
        return await engine.sleep(level)

    async def _wake(self, engine: Engine, epoch: int) -> float:
        self._check(epoch or self._epoch)
        require(engine, SLEEP)
        return await engine.wake()

    async def _reconfigure(self, engine: Engine, degree: int, epoch: int) -> float:
        require(engine, RECONFIGURE)
        self._check(epoch)
        return 0.0 if degree == engine.load().degree else await engine.reconfigure(degree)

    def _check(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise EngineError(
                f"epoch={epoch} is an order of before: {self._name} has carried out one of epoch {self._epoch}"
            )
