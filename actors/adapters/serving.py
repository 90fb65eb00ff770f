"""Adapters beside the run's own in one engine: brought when a request asks for one, kept new, and let go of when others need the place."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rubato.actors.adapters import shapes
from rubato.actors.cluster.lease import WEIGHT_SYNC
from rubato.actors.engines.engine import ADAPTERS, Engine, EngineDead, EngineError, EngineHook, Work, require
from rubato.actors.engines.weights import BLOBS, RETRY_S, TRAINER
from rubato.actors.messages.adapters import WithdrawWeights
from rubato.actors.messages.generation import Abort, Aborted, GenerateReply
from rubato.actors.messages.weights import WeightsPublished
from rubato.actors.weights.transport import BlobReceiver, WeightsMissing, blob_of
from rubato.bus.errors import Failed
from rubato.bus.message import Ack
from rubato.planning.engine_info import EngineInfo, WeightsId, WeightsNeed
from rubato.runtime.actor import handler
from rubato.runtime.blobs.patches import forget

if TYPE_CHECKING:
    from rubato.actors.engines.worker import EngineRequest, EngineWorker


class NamedAdapters(EngineHook):
    """A request whose WeightsNeed names an adapter waits here until the engine holds it, new enough. A newer version is swapped in place, and
    requests under way go on under it. Where the engine holds as many as it can, the one used longest ago that no request is under is dropped.
    """

    def __init__(self, worker: "EngineWorker") -> None:
        super().__init__(worker)
        self._receiver = BlobReceiver(worker, by_rings=worker.config.weights.broadcast == "rings")
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """(term, version) by name, least recently used first."""
        self._users: dict[str, dict[str, asyncio.Event]] = {}
        """By name and id, the requests that are here, and what wakes each that waits."""
        self._leaving: set[str] = set()
        """Names that are being withdrawn."""
        self._turn = asyncio.Lock()
        self._due, self._freed = asyncio.Event(), asyncio.Event()

    async def begin(self, engine: Engine) -> None:
        self.worker.spawn_using(self._keep_up(), name=f"{self.worker.name}.adapters")

    def told(self, info: EngineInfo) -> EngineInfo:
        held = (WeightsId(version, name) for name, (_, version) in self._held.items())
        return msgspec.structs.replace(info, holds=(*info.holds, *held))

    # -- requests -----------------------------------------------------------------------------------------------------

    async def arrive(self, shared: "EngineRequest", work: Work) -> Work | GenerateReply:
        """Aborted with one sentence where there is no such adapter, or the engine can't take it."""
        if not work.adapter:
            return work
        try:
            await self._wait_for(shared, work.adapter, shared.request.weights)
        except EngineDead:
            raise
        except EngineError as error:
            return Aborted(work.request_id, shared.tokens, str(error))
        return shared.given_up() if shared.gives_up else work

    async def _wait_for(self, shared: "EngineRequest", name: str, need: WeightsNeed) -> None:
        """Return once the engine holds it, new enough, or the request gives up. Raises EngineError where it is not to come."""
        request_id = shared.request.request_id
        self._check(name)
        if need.exact:
            raise EngineError(f"request {request_id} is for version {need.version} of the adapter {name} alone: only the run's own is held")
        woken = self._users.setdefault(name, {})[request_id] = asyncio.Event()
        while not shared.gives_up:
            if name in self._leaving:
                raise EngineError(f"there is no adapter {name} any more: it was withdrawn")
            if name in self._held and self._held[name][1] >= need.version:
                self._held.move_to_end(name)
                return
            woken.clear()  # before the look: what comes during it is not missed
            limit_s = None
            try:
                await self._bring(name)
            except WeightsMissing as error:
                self.worker.log.warning("weights_not_pulled", adapter=name, error=str(error))
                limit_s = RETRY_S
            await self._wait(request_id, name, need.version, woken, limit_s)

    def aborted(self, shared: "EngineRequest") -> None:
        request = shared.request
        if (woken := self._users.get(request.weights.adapter, {}).get(request.request_id)) is not None:
            woken.set()

    def ended(self, shared: "EngineRequest") -> None:
        name = shared.request.weights.adapter
        users = self._users.get(name, {})
        if users.pop(shared.request.request_id, None) is not None and not users:
            del self._users[name]
            self._freed.set()
            self._wake()

    async def _wait(self, request_id: str, name: str, version: int, woken: asyncio.Event, limit_s: float | None) -> None:
        """Until something changed; at once where it has."""
        full = name not in self._held and not self._has_place()
        detail = f"a place for the adapter {name}" if full else f"version {version} of the adapter {name}"
        holder = self.worker.name if full else BLOBS if limit_s else TRAINER
        with self.worker.waits.on(request_id, stage="weights", detail=detail, holder=holder), suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await woken.wait()

    def _wake(self) -> None:
        """Let requests that wait look again."""
        for users in self._users.values():
            for woken in users.values():
                woken.set()

    # -- weights ------------------------------------------------------------------------------------------------------

    def published(self, message: WeightsPublished) -> None:
        if message.adapter in self._held or message.adapter in self._users:
            self._due.set()

    @handler(concurrency=16, outlives_asker=True)
    async def withdraw_weights(self, request: WithdrawWeights) -> Ack:
        """Raises Failed where the engine takes no adapters."""
        name = request.adapter
        try:
            self._check(name)
        except EngineDead:
            raise
        except EngineError as error:
            raise Failed(str(error)) from error
        self._leaving.add(name)
        try:
            for request_id in list(self._users.get(name, ())):
                await self.worker.abort(Abort(request_id, f"the adapter {name} was withdrawn"))
            while name in self._users:
                self._freed.clear()
                await self._freed.wait()
            async with self._turn:
                if name in self._held:
                    await self._drop(name)
                await forget(self.worker.blobs, blob_of(name))
        finally:
            self._leaving.discard(name)
        return Ack()

    async def _keep_up(self) -> None:
        """Take newer versions of what is held as they are published; a slow check covers lost hints."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.worker.config.engine.check_s):
                    await self._due.wait()
            self._due.clear()
            for name in list(self._held):
                try:
                    await self._bring(name)
                except EngineDead:
                    raise
                except (EngineError, WeightsMissing) as error:
                    self.worker.log.warning("adapter_not_taken", adapter=name, error=str(error))
            self._wake()

    async def _bring(self, name: str) -> None:
        """Take the newest version, where it is newer than what is held, and there is a place. Raises EngineError where there is none or the
        engine refuses it, WeightsMissing where it can't be had now."""
        async with self._turn:
            newest, held = await self._receiver.newest(name), self._held.get(name)
            if newest is None and held is None:
                raise EngineError(f"there is no adapter {name}: none of that name is published")
            if newest is None or name in self._leaving or (held is not None and (newest.term, newest.version) <= held):
                return
            if held is None and not await self._made_place():
                return
            async with self.worker.lease(WEIGHT_SYNC) as lease:
                (whole,) = [part async for part in self._receiver.receive(newest)]  # engines are updated from one image
                if not lease.is_held:
                    raise WeightsMissing("the right to swap weights in was lost meanwhile")
                await self._take(whole.of, whole.image)

    async def _take(self, info: WeightsPublished, image: memoryview) -> None:
        pause_s = await self._engine.update(info.version, image, info.adapter)
        self._held[info.adapter] = (info.term, info.version)
        self.worker.log.info("adapter_swapped", adapter=info.adapter, version=info.version, term=info.term, pause_s=round(pause_s, 6))
        self._changed()

    def _has_place(self) -> bool:
        return len(self._held) < self._engine.most_adapters

    async def _made_place(self) -> bool:
        """False where all that are held are in use."""
        while not self._has_place():
            idle = next((name for name in self._held if name not in self._users), None)
            if idle is None:
                return False
            await self._drop(idle)
        return True

    async def _drop(self, name: str) -> None:
        del self._held[name]  # at once: a request for it waits from now on until it is back
        await self._engine.drop(name)
        self.worker.log.info("adapter_dropped", adapter=name)
        self._changed()

    def _changed(self) -> None:
        self._wake()
        self.worker.spawn(self.worker.tell_proxies(), name=f"{self.worker.name}.adapters_told")

    def _check(self, name: str) -> None:
        """Raises EngineError for what no adapter can be called, and where the engine takes none."""
        require(self._engine, ADAPTERS)
        try:
            shapes.require_name(name)
        except shapes.AdapterError as error:
            raise EngineError(str(error)) from None

    @property
    def _engine(self) -> Any:
        """Raises EngineDead before it is there."""
        return self.worker.started()[0]
