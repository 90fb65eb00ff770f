"""Keeps an engine on the newest published weights: hints wake it, a slow check covers lost hints, only the newest is pulled."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.engines.engine import Engine
from actors.messages.weights import WeightsPublished
from runtime.blobs.blob import BlobCorrupt, BlobInfo, BlobMissing, BlobStore
from runtime.observe.waits import ITSELF, Wait

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from runtime.observe.metrics import Metrics
    from runtime.observe.waits import Waits

TRAINER = "trainer"
NODE = "node"
"""The role whose actor owns the host's blobs."""

BLOB = "weights"
"""Where weights are published when no hint said otherwise."""


class WeightsPuller:
    """One per engine. A higher epoch always wins: it is a restarted trainer, whose predecessor's versions no longer count."""

    def __init__(
        self,
        engine: Engine,
        blobs: BlobStore,
        metrics: "Metrics",
        waits: "Waits",
        log: "FilteringBoundLogger",
        swapped: Callable[[BlobInfo], None] = lambda info: None,
    ) -> None:
        self._engine, self._blobs, self._tell = engine, blobs, swapped
        self._metrics, self._waits, self._log = metrics, waits, log
        self._blob = BLOB
        self._held = (0, 0)
        self._source = TRAINER
        self._held_up: set[Wait] = set()
        self._wake = asyncio.Event()
        self._swapped = asyncio.Event()

    @property
    def version(self) -> int:
        """The version the engine samples under."""
        return self._held[1]

    def hint(self, message: WeightsPublished) -> None:
        """Something newer may be there."""
        self._blob = message.blob or self._blob
        if (message.epoch, message.version) > self._held:
            self._wake.set()

    def look_again(self) -> None:
        """Wake whoever holds a request back: what it waits for may be over."""
        self._swapped.set()

    async def wait_for(self, version: int, who: str = "weights") -> None:
        """Pull now; returns once `version` or a newer one is in place, or after `look_again`. `who` is held up by it."""
        self._wake.set()
        self._swapped.clear()
        if self.version < version:
            detail = f"version {version}, has {self.version}"
            with self._waits.on(who, stage="weights", detail=detail, holder=self._source) as wait:
                self._held_up.add(wait)
                try:
                    await self._swapped.wait()
                finally:
                    self._held_up.discard(wait)

    async def keep_up(self, check_s: float) -> None:
        """Pull whenever there is something newer, until cancelled. Raises EngineError when weights do not fit the model."""
        while True:
            try:
                async with asyncio.timeout(check_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.pull()

    async def pull(self) -> None:
        """Bring the engine to the newest version, if it isn't there. A damaged or vanished blob is left for the next time."""
        newest = await self._blobs.newest(self._blob)
        if newest is None or (newest.epoch, newest.version) <= self._held:
            return
        with self._waits.on(f"weights {newest.version}", stage="pull", holder=NODE) as wait:
            self._blame(ITSELF)
            try:
                info, image = await self._fetch(newest)
                if image is not None:
                    wait.update(detail="swapping them in", holder="")
                    self._took(info, await self._engine.update(info.version, image))
            finally:
                self._metrics.gauge("weights/pulled", 1.0)
                self._blame(TRAINER)

    async def _fetch(self, newest: BlobInfo) -> tuple[BlobInfo, memoryview | None]:
        began = asyncio.get_running_loop().time()
        self._metrics.gauge("weights/pulled", 0.0)
        try:
            info, image = await self._blobs.get(self._blob, newest.version)
        except (BlobMissing, BlobCorrupt) as error:
            self._log.warning("weights_not_pulled", version=newest.version, error=str(error))
            return newest, None
        self._metrics.observe("weights/transfer_s", asyncio.get_running_loop().time() - began)
        return info, image

    def _blame(self, source: str) -> None:
        """Whom requests wait for that need newer weights: the trainer until it published them, then this pull."""
        self._source = source
        for wait in self._held_up:
            wait.update(holder=source)

    def _took(self, info: BlobInfo, pause_s: float) -> None:
        self._held = (info.epoch, info.version)
        self._metrics.gauge("weights/version", info.version)
        self._metrics.gauge("weights/bytes", info.size_bytes)
        self._metrics.observe("weights/pause_s", pause_s)
        self._log.info("weights_swapped", version=info.version, epoch=info.epoch, pause_s=round(pause_s, 6))
        self._tell(info)
        self._swapped.set()
