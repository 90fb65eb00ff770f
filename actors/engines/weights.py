"""Keeps an engine on the newest published weights, which come over the network once per host."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from actors.engines.engine import Engine
from actors.messages.engines import GENERATION
from actors.messages.weights import WeightsPublished
from bus.errors import AskFailed
from planning.relay import plan, ring_sources, sources
from runtime.actor import Actor
from runtime.blobs.blob import BlobCorrupt, BlobInfo, BlobMissing
from runtime.blobs.messages import FindNewest, Newest, NotPulled, PullBlob
from runtime.kernel import NODE
from runtime.observe.figures import ITSELF, Wait

BLOB = "weights"
"""Where weights are published when no hint said otherwise."""

TRAINER, BLOBS = "trainer", "node"
"""Roles that requests wait for: who publishes weights, and who owns the host's blobs."""

RETRY_S, RETRY_MAX_S = 0.25, 2.0
"""Pause after a pull that failed while requests wait for it, and what it grows to: a link that was cut is often back at once."""

FIND_S = 10.0
PULL_S = 1800.0
"""Longer than the largest weights take on a slow link; dead sources are left after seconds."""


def unshared() -> AbstractAsyncContextManager[Callable[[], bool]]:
    """The permit of who has the link for weights to itself."""
    return nullcontext(lambda: True)


async def unseen(info: BlobInfo, image: memoryview) -> None:
    """Nobody looks at what was swapped in."""


class WeightsPuller:
    """One per engine: hints wake it, a slow check covers lost hints, and only the newest version is pulled.

    A higher epoch always wins: it is a restarted trainer, whose predecessor's versions no longer count.
    """

    def __init__(
        self,
        engine: Engine,
        blobs: "HostWeights",
        actor: Actor,
        swapped: Callable[[BlobInfo], None] = lambda info: None,
        permit: Callable[[], AbstractAsyncContextManager[Callable[[], bool]]] = unshared,
        looked_at: Callable[[BlobInfo, memoryview], Awaitable[None]] = unseen,
    ) -> None:
        """`swapped` hears of each version, and then `looked_at` may look before the next is swapped in; each is brought and swapped in within `permit`, which tells whether it is held for certain."""
        self._engine = engine
        self._blobs = blobs
        self._tell, self._permit, self._looked_at = swapped, permit, looked_at
        self._metrics, self._waits, self._log = actor.metrics, actor.waits, actor.log
        self._blob = BLOB
        self._held = (0, 0)
        """(epoch, version) that the engine has."""
        self._source = TRAINER
        self._waiting: dict[Wait, int] = {}
        """Requests that are held up, and the version that each needs."""
        self._wake = asyncio.Event()
        self._swapped = asyncio.Event()
        self._hold = (-1, -1)
        """(epoch, version) that an evaluation wants to be kept, and until when."""
        self._hold_until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether the engine stays on what it has, for an evaluation."""
        return self._held == self._hold and asyncio.get_running_loop().time() < self._hold_until

    async def hold(self, version: int, epoch: int, for_s: float) -> bool:
        """Take nothing newer of `epoch` than `version` for `for_s` from now; 0 lets go of that version, and of no other that was asked for
        since. True once it is in place, False where the engine is past it."""
        if not for_s and self._hold != (epoch, version):
            return False
        self._hold, self._hold_until = (epoch, version), asyncio.get_running_loop().time() + for_s
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
        self._blob = message.blob or self._blob
        if (message.epoch, message.version) > self._held:
            self._wake.set()

    def retry(self) -> None:
        """What made a pull fail may be over: if requests wait for it, pull now."""
        if self._wanted:
            self._wake.set()

    def wake_waiters(self) -> None:
        """Let whoever is in `wait_for` look at what it waits for."""
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

        Nothing is swapped in under a permit that was lost meanwhile: it is asked for anew.
        """
        while not await self._pulled():
            self._log.warning("weights_permit_lost")

    async def _pulled(self) -> bool:
        """False where the permit was lost before the swap."""
        newest = await self._blobs.newest(self._blob)
        if newest is None or (newest.epoch, newest.version) <= self._held:
            return True
        if self.is_held and newest.epoch == self._held[0]:
            return True
        began = asyncio.get_running_loop().time()
        with self._waits.on(f"weights {newest.version}", stage="pull", holder=BLOBS) as wait:
            self._blame(ITSELF)
            try:
                async with self._permit() as is_held:
                    info, image = await self._fetch(newest)
                    if image is not None and not is_held():
                        return False
                    if image is not None:
                        wait.update(detail="swapping them in", holder="")
                        pause_s = await self._engine.update(info.version, image)
                        self._took(info, pause_s, asyncio.get_running_loop().time() - began)
                        await self._looked_at(info, image)
            finally:
                self._metrics.gauge("weights/pulled", 1.0)
                self._blame(TRAINER)
        return True

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
        for wait in self._waiting:
            wait.update(holder=source)

    def _took(self, info: BlobInfo, pause_s: float, pull_s: float) -> None:
        self._held = (info.epoch, info.version)
        self._metrics.gauge("weights/version", info.version)
        self._metrics.gauge("weights/bytes", info.size_bytes)
        self._metrics.observe("weights/pause_s", pause_s)
        self._metrics.observe("weights/pull_s", pull_s)
        told = {"pause_s": round(pause_s, 6), "pull_s": round(pull_s, 6)}
        self._log.info("weights_swapped", version=info.version, epoch=info.epoch, **told)
        self._tell(info)
        self._swapped.set()


class HostWeights:
    """The blobs of an engine's host. Where the trainer lives on another one, weights are brought here first, by a relay tree.

    Where the others are is read from the registry: nobody hands out the tree.
    """

    def __init__(self, actor: Actor, *, by_rings: bool = False) -> None:
        self._blobs, self._node, self._ref = actor.blobs, actor.node, actor.ref
        self._find, self._peers = actor.directory.find, actor.peers
        self._by_rings = by_rings

    async def newest(self, name: str) -> BlobInfo | None:
        """What the trainer's host has; where that is ours, or does not answer, what we have."""
        found = await self._elsewhere(name)
        if found is not None:
            return BlobInfo(name, found.version, found.epoch, found.digest, found.size_bytes)
        return await self._blobs.newest(name)

    async def get(self, name: str, version: int) -> tuple[BlobInfo, memoryview]:
        """Brings it here first, where the trainer's host has it and ours has not. Raises BlobMissing when no host gave it."""
        newest = await self._elsewhere(name)
        if newest is not None and newest.version == version:
            await self._bring(name, newest, self._home())
        return await self._blobs.get(name, version)

    async def _elsewhere(self, name: str) -> Newest | None:
        """What the trainer's host has; None where that is ours, or does not answer."""
        home = self._home()
        if home == self._node or self._find(home) is None:
            return None
        try:
            reply = await self._ref(home).ask(FindNewest(name), timeout=FIND_S)
        except AskFailed:
            return None
        return reply if isinstance(reply, Newest) else None

    async def _bring(self, name: str, found: Newest, home: str) -> None:
        """Along a relay tree or a ring; as what changed, where it may be had so. Raises BlobMissing."""
        readers = {record.node for name in self._peers(GENERATION) if (record := self._find(name)) is not None}
        hosts = {self._node} | (readers & set(self._peers("node")))
        where = ring_sources(home, hosts, self._node) if self._by_rings else sources(plan(home, hosts), self._node)
        ways = 2 if self._by_rings and len(where) > 1 else 1
        try:
            request = PullBlob(
                name,
                found.version,
                found.epoch,
                found.digest,
                found.size_bytes,
                where,
                ways,
                found.delta,
                found.delta_bytes,
            )
            reply = await self._ref(self._node).ask(request, timeout=PULL_S)
        except AskFailed as error:
            raise BlobMissing(str(error)) from error
        if isinstance(reply, NotPulled):
            raise BlobMissing(reply.why)

    def _home(self) -> str:
        """The agent of the trainer's host; while the trainer is away, the launcher's."""
        for name in self._peers("trainer"):
            record = self._find(name)
            if record is not None:
                return record.node
        return NODE
