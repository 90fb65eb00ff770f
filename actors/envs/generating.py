"""How many rollouts of a manager are between their first and their last turn: the proxies of a job that shares its rollout pool ask."""

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from actors.envs.hooks import RolloutHook
from actors.envs.rollout import Rollout
from actors.messages.phases import Generating
from bus.errors import AskFailed
from runtime.actor import Actor

ASK_S = 5.0
PAUSE_S = 0.5
"""Before a proxy that did not answer is asked again."""


class GeneratingCount(RolloutHook):
    """The count, sent to every proxy, one message at a time, until the newest number is acknowledged."""

    def __init__(self, manager: Actor, playing: Callable[[], Iterable[Rollout]]) -> None:
        super().__init__(manager, playing)
        self._num = 0
        self._changed = asyncio.Event()

    @contextmanager
    def turns(self) -> Generator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def peers_changed(self) -> None:
        """A new proxy has no number yet."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for proxy in self.manager.peers("llm_proxy"):
                try:
                    await self.manager.ref(proxy).ask(Generating(self.manager.name, self._num), timeout=ASK_S)
                except AskFailed as error:
                    self.manager.log.warning("generating_not_told", proxy=proxy, error=str(error))
                    await asyncio.sleep(PAUSE_S)
                    self._changed.set()

    def _change(self, by: int) -> None:
        self._num += by
        self._changed.set()
