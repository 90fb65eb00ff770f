"""Tells the proxies how many rollouts of this manager are between their first and their last turn, where a job shares its rollout pool."""

import asyncio

from actors.messages.phases import Generating
from bus.errors import AskFailed
from runtime.actor import Actor

ASK_S = 5.0
PAUSE_S = 0.5
"""Before a proxy that did not answer is told again."""


class GeneratingCount:
    """A context manager around the turns of each rollout. The newest number is told, one message at a time, until it is acknowledged."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._num = 0
        self._changed = asyncio.Event()

    def __enter__(self) -> None:
        self._num += 1
        self._changed.set()

    def __exit__(self, *_: object) -> None:
        self._num -= 1
        self._changed.set()

    def again(self) -> None:
        """A proxy is new."""
        self._changed.set()

    async def tell(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for proxy in self._actor.peers("llm_proxy"):
                try:
                    await self._actor.ref(proxy).ask(Generating(self._actor.name, self._num), timeout=ASK_S)
                except AskFailed as error:
                    self._actor.log.warning("generating_not_told", proxy=proxy, error=str(error))
                    await asyncio.sleep(PAUSE_S)
                    self._changed.set()
