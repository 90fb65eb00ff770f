"""Keeps an engine on the newest published weights, which come over the network once per host."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from rubato.actors.cluster.lease import WEIGHT_SYNC, AlwaysHeld, ComputeLease
from rubato.actors.engines.engine import Engine, EngineHook
from rubato.actors.messages.weights import HoldWeights, WeightsHeld, WeightsPublished
from rubato.actors.weights.transport import WeightsMissing, WeightsPart, WeightsReceiver
from rubato.planning.engine_info import EngineInfo
from rubato.runtime.actor import Actor, handler
from rubato.runtime.observe.figures import ITSELF, Wait

ADAPTER = ""
"""What an engine takes: the whole model."""

TRAINER, BLOBS = "trainer", "node"
"""Roles that requests wait for: who publishes weights, and who owns the host's blobs."""

RETRY_S, RETRY_MAX_S = 0.25, 2.0
"""Pause after a pull that failed while requests wait for it, and what it grows to: a link that was cut is often back at once."""


async def unseen(info: WeightsPublished, image: memoryview) -> None:
    """No look at the image that was swapped in."""


class WeightsPuller:
    """One per engine: hints wake it, a slow check covers lost hints, and only the newest version is pulled.

    A higher term always wins: it is a restarted trainer, whose predecessor's versions no longer count.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: WeightsReceiver,
        actor: Actor,
        swapped: Callable[[WeightsPublished], None] = lambda info: None,
        lease: ComputeLease | None = None,
        looked_at: Callable[[WeightsPublished, memoryview], Awaitable[None]] = unseen,
    ) -> None:
        """`swapped` hears of each version, and then `looked_at` may look before the next is swapped in; each is brought and swapped in under `lease`."""
        self._engine = engine
        self._receiver = receiver
        self._tell, self._lease, self._looked_at = swapped, lease or AlwaysHeld(actor), looked_at
        self._metrics, self._waits, self._log = actor.metrics, actor.waits, actor.log
        self._held = (0, 0)
        """(term, version) that the engine has."""
        self._source = TRAINER
        self._waiting: dict[Wait, int] = {}
        """Requests that are held up, and the version that each needs."""
        self._wake = asyncio.Event()
        self._swapped = asyncio.Event()
        self._hold = (-1, -1)
        """(term, version) that an evaluation wants to be kept, and until when."""
        self._hold_until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether the engine stays on what it has, for an evaluation."""
        return self._held == self._hold and asyncio.get_running_loop().time() < self._hold_until

    async def hold(self, version: int, term: int, for_s: float) -> bool:
        """Take nothing newer of `term` than `version` for `for_s` from now; 0 lets go of that version, and of no other that was asked for
        since. True once it is in place, False where the engine is past it."""
        if not for_s and self._hold != (term, version):
            return False
        self._hold, self._hold_until = (term, version), asyncio.get_running_loop().time() + for_s
        self._wake.set()
        while for_s and self._held < self._hold:
            self._swapped.clear()
            await self._swapped.wait()
        return self.is_held

    @property
    def version(self) -> int:
        """The version the engine samples under."""
        return self._held[1]

    def hint(self, message: WeightsPublished) -> None:
        """Something newer may be there."""
        if message.adapter == ADAPTER and (message.term, message.version) > self._held:
            self._wake.set()

    def retry(self) -> None:
        """What made a pull fail may be over: if requests wait for it, pull now."""
        if self._wanted:
            self._wake.set()

    def wake_waiters(self) -> None:
        """Let callers of `wait_for` check again what they wait for."""
        self._swapped.set()

    async def wait_for(self, version: int, who: str = "weights") -> None:
        """Pull now; returns once `version` or a newer one is in place, or after `wake_waiters`. `who` is held up by it."""
        self._wake.set()
        self._swapped.clear()
        if self.version < version:
            detail = f"version {version}, has {self.version}"
            with self._waits.on(who, stage="weights", detail=detail, holder=self._source) as wait:
                self._waiting[wait] = version
                try:
                    await self._swapped.wait()
                finally:
                    del self._waiting[wait]

    async def keep_up(self, check_s: float) -> None:
        """Pull whenever there is something newer, until cancelled. Raises EngineError when weights do not fit the model."""
        retry_s = RETRY_S
        while True:
            if not self._wanted:
                retry_s = RETRY_S
            try:
                async with asyncio.timeout(min(check_s, retry_s) if self._wanted else check_s):
                    await self._wake.wait()
            except TimeoutError:
                retry_s = min(2 * retry_s, RETRY_MAX_S)
            self._wake.clear()
            await self.pull()

    @property
    def _wanted(self) -> bool:
        """Some request waits for a version that is not in place."""
        return any(version > self.version for version in self._waiting.values())

    async def pull(self) -> None:
        """Bring the engine to the newest version, if it isn't there. A damaged or vanished blob is left for the next time.

        Nothing is swapped in where the lease was lost meanwhile: it is asked for anew.
        """
        while not await self._pulled():
            self._log.warning("weights_lease_lost")

    async def _pulled(self) -> bool:
        """False where the lease was lost before the swap."""
        newest = await self._receiver.newest(ADAPTER)
        if newest is None or (newest.term, newest.version) <= self._held:
            return True
        if self.is_held and newest.term == self._held[0]:
            return True
        began = asyncio.get_running_loop().time()
        with self._waits.on(f"weights {newest.version}", stage="pull", holder=BLOBS) as wait:
            self._blame(ITSELF)
            try:
                async with self._lease(WEIGHT_SYNC) as held:
                    part = await self._fetch(newest)
                    if part is not None and not held.is_held:
                        return False
                    if part is not None:
                        info, image = part
                        wait.update(detail="swapping them in", holder="")
                        pause_s = await self._engine.update(info.version, image)
                        self._took(info, pause_s, asyncio.get_running_loop().time() - began)
                        await self._looked_at(info, image)
            finally:
                self._metrics.gauge("weights/pulled", 1.0)
                self._blame(TRAINER)
        return True

    async def _fetch(self, newest: WeightsPublished) -> WeightsPart | None:
        began = asyncio.get_running_loop().time()
        self._metrics.gauge("weights/pulled", 0.0)
        try:
            parts = [part async for part in self._receiver.receive(newest)]
        except WeightsMissing as error:
            self._log.warning("weights_not_pulled", version=newest.version, error=str(error))
            return None
        self._metrics.observe("weights/transfer_s", asyncio.get_running_loop().time() - began)
        (whole,) = parts  # engines are updated from one image
        return whole

    def _blame(self, source: str) -> None:
        """Whom requests wait for that need newer weights: the trainer until it published them, then this pull."""
        self._source = source
        for wait in self._waiting:
            wait.update(holder=source)

    def _took(self, info: WeightsPublished, pause_s: float, pull_s: float) -> None:
        self._held = (info.term, info.version)
        self._metrics.gauge("weights/version", info.version)
        self._metrics.gauge("weights/bytes", info.size_bytes)
        self._metrics.observe("weights/pause_s", pause_s)
        self._metrics.observe("weights/pull_s", pull_s)
        told = {"pause_s": round(pause_s, 6), "pull_s": round(pull_s, 6)}
        self._log.info("weights_swapped", version=info.version, term=info.term, **told)
        self._tell(info)
        self._swapped.set()


class Pins(EngineHook):
    """Of one engine, whose WeightsPuller stays on a version for as long as is asked."""

    _is_told = False
    """The proxies take the engine for pinned."""

    @handler(concurrency=16)
    async def hold_weights(self, request: HoldWeights) -> WeightsHeld:
        """The proxies know before the asker does: they give this engine no request that needs newer weights, nor another one an exact one."""
        _, weights = self.worker.started()
        held = await weights.hold(request.version, request.term, request.for_s)
        await self._tell()
        return WeightsHeld(self.worker.name, held)

    def told(self, info: EngineInfo) -> EngineInfo:
        return msgspec.structs.replace(info, pinned=self.worker.started()[1].is_held)

    def swapped(self) -> None:
        if self._is_told:
            self.worker.spawn(self._tell(), name=f"{self.worker.name}.let_go")

    async def _tell(self) -> None:
        self._is_told = self.worker.started()[1].is_held
        await self.worker.tell_proxies()
