"""Makes the buffer's records durable: changes of many handlers share one fenced write, and writes outlast an outage of the Store."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from runtime.store.errors import StoreError, StoreUnavailable
from runtime.store.store import Fence, Store

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

ResultT = TypeVar("ResultT")

PAUSE_S = 0.1
PAUSE_MAX_S = 2.0
"""A Store that restarts is back within seconds; asking it more often helps nobody."""


class Journal:
    """Records by key. What is written is the state at the time of the write, so later changes may ride along."""

    def __init__(
        self, store: Store, fence: Fence, log: "FilteringBoundLogger", *, on_outage: Callable[[bool], None]
    ) -> None:
        self._store = store
        self._fence = fence
        self._log = log
        self._on_outage = on_outage
        self._dirty: dict[str, Callable[[], bytes | None]] = {}
        self._marked = 0
        self._saved = 0
        self._turn = asyncio.Lock()
        self.healthy = True
        """Whether the Store answered last time. While not, some call is being retried, and says so when it succeeds."""

    def mark(self, key: str, encode: Callable[[], bytes | None]) -> None:
        """`key` changed; `encode` gives its value (None: delete) when the write is made."""
        self._dirty[key] = encode
        self._marked += 1

    async def flush(self) -> None:
        """Return once every change marked before this call is durable. Callers at the same time share a write. Raises Fenced."""
        until = self._marked
        async with self._turn:
            if self._saved >= until:
                return
            marked, dirty, self._dirty = self._marked, self._dirty, {}
            try:
                await self.steadily(lambda: self._write(dirty))
                self._saved = marked
            finally:
                if self._saved != marked:
                    self._dirty = dirty | self._dirty

    async def prove(self) -> None:
        """Raises Fenced where a newer buffer has written."""
        await self.steadily(lambda: self._write({}))

    async def steadily(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The result of `call`, retried for as long as the Store is away; any other error is raised."""
        pause_s = PAUSE_S
        while True:
            try:
                result = await call()
            except StoreUnavailable as error:
                self._turned(False, str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            except StoreError:
                self._turned(True)
                raise
            else:
                self._turned(True)
                return result

    async def _write(self, dirty: dict[str, Callable[[], bytes | None]]) -> None:
        await self._store.write({key: encode() for key, encode in dirty.items()}, fence=self._fence)

    def _turned(self, healthy: bool, error: str = "") -> None:
        if healthy == self.healthy:
            return
        self.healthy = healthy
        if healthy:
            self._log.info("store_back")
        else:
            self._log.warning("store_unavailable", error=error, effect="nothing new is admitted until it is back")
        self._on_outage(not healthy)
