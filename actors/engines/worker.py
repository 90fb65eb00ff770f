"""EngineWorker: hosts one engine; requests are joined by id, weights pulled when published, progress told to the proxy."""

import asyncio
import contextlib
import importlib.util
from pathlib import Path
from typing import Any

from actors.config import ModelSection, WeightsSection
from actors.device import check_device
from actors.engines.engine import ENGINES, VLLM_MISSING, Chunk, Engine, EngineDead, EngineError, Work
from actors.engines.flights import EngineRequest, Flights
from actors.engines.section import EngineSection
from actors.engines.weights_hosts import WeightsHosts
from actors.engines.weights_puller import WeightsPuller
from actors.messages.generation import (
    HANDED_BACK,
    Abort,
    Aborted,
    Completion,
    EngineStatus,
    Generate,
    Inspect,
    Resume,
    Suspend,
    TokensSampled,
)
from actors.messages.weights import WeightsPublished, WeightsTaken
from actors.model_folder import check_model_folder
from bus.errors import AskFailed, NotSent
from bus.message import Ack
from runtime.actor import Actor, Context, handler
from runtime.blobs.blob import BlobInfo
from runtime.config import ActorConfig
from runtime.errors import ConfigError
from runtime.importer import check_module, load_object

GAUGES_S = 0.5
"""Period of the load gauges: twice per status snapshot."""


class EngineWorker(Actor):
    """One engine per worker. A second ask with the same request id joins the first, or gets its result."""

    role = "engine"
    least = 1

    class Config(ActorConfig):
        model: ModelSection = ModelSection()
        engine: EngineSection = EngineSection()
        weights: WeightsSection = WeightsSection()

    config: Config

    @classmethod
    def check_host(cls, config: Any) -> None:
        """The engine's package, the device, and a class of the user's."""
        kind = config.engine.kind
        if kind not in ENGINES:
            check_module(kind, key="engine.kind")
        elif kind == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"{VLLM_MISSING}.")
        elif kind != "scripted":
            check_device(config.model.device)

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        """An engine with a model needs its weights."""
        if config.engine.kind in ENGINES and config.engine.kind != "scripted":
            check_model_folder(folder / config.model.path)

    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        self._flights = Flights(config.engine.results_kept)
        self._reports: set[str] = set()
        self._report_due = asyncio.Event()
        self._draining = False
        self._engine: Engine | None = None
        self._weights: WeightsPuller | None = None
        self._gauging: asyncio.Task[None] | None = None

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Load the base model, then go to the newest published weights, if any: a late joiner takes the same path."""
        section = self.config.engine
        build: Any = await self.offload(load_object, ENGINES.get(section.kind, section.kind))
        by_rings = self.config.weights.broadcast == "rings"
        blobs = WeightsHosts(
            self.blobs, self._context.node, self._context.find, self.peers, self.ref, by_rings=by_rings
        )
        self._engine = engine = build(self._model_folder(), self.config.model, section)
        await engine.start()
        self._weights = weights = WeightsPuller(engine, blobs, self.metrics, self.waits, self.log, self._swapped)
        await weights.pull()
        self.metrics.gauge("weights/version", weights.version)
        self.spawn(weights.keep_up(section.check_s), name=f"{self.name}.weights")
        self.spawn(self._report(), name=f"{self.name}.progress")
        self._gauging = self.spawn(self._gauge(), name=f"{self.name}.load")
        self.log.info("engine_started", engine=engine.capabilities.name, version=weights.version)

    async def on_drain(self) -> None:
        """Hand every request back, with its tokens, and wait until the askers have them."""
        self._draining = True
        for request_id in list(self._flights.running):
            await self._abort(request_id, HANDED_BACK)
        await self._flights.idle.wait()

    async def on_stop(self) -> None:
        if self._gauging is not None:
            self._gauging.cancel()  # an engine that is being stopped has no load to tell
        if self._engine is not None:
            await self._engine.stop()

    # -- requests ---------------------------------------------------------------------------------------------------

    @handler(concurrency=1024, outlives_asker=True)
    async def generate(self, request: Generate) -> Completion | Aborted:
        """Bounded by `concurrency`; of these `num_slots` decode and the rest wait in the engine."""
        result = self._flights.result(request.request_id)
        if result is not None:
            return result
        while (flight := self._flights.running.get(request.request_id)) is not None and flight.ending:
            await asyncio.wait([flight.task])
        if flight is None:
            if self._draining:
                return Aborted(request.request_id, request.resumed, HANDED_BACK)
            flight = self._take_off(request)
        self._flights.join(flight)
        try:
            return await asyncio.shield(flight.result)
        finally:
            self._flights.leave(flight)
            if not flight.askers and not flight.result.done():
                # Nobody wants the tokens any more.
                flight.abandoned = True
                flight.task.cancel()

    def _take_off(self, request: Generate) -> EngineRequest:
        flight = self._flights.open(request)
        flight.task = self.spawn(self._fly(flight), name=f"{self.name}.{request.request_id}")
        flight.task.add_done_callback(lambda _: self._flights.forget(flight))
        return flight

    async def _fly(self, flight: EngineRequest) -> None:
        """Run one request to its end; what goes wrong with it is its askers' to hear."""
        result: Completion | Aborted | Exception | None = None
        try:
            result = await self._run(flight)
        except EngineDead as error:
            result = error
            raise
        except (EngineError, ValueError) as error:
            result = error
        finally:
            self._reports.discard(flight.request.request_id)
            self._flights.close(flight, result, keep=isinstance(result, Completion))

    async def _run(self, flight: EngineRequest) -> Completion | Aborted:
        _, weights = self._started()
        request, finish_reason = flight.request, "aborted"
        work = flight.work()
        while weights.version < request.min_version and not flight.abort_reason:
            await weights.wait_for(request.min_version, request.request_id)
        if not flight.abort_reason:
            with self.metrics.busy():
                finish_reason = await self._generate(flight, work)
        if finish_reason in ("stop", "length"):
            return Completion(request.request_id, flight.tokens, finish_reason, self.name)
        return Aborted(request.request_id, flight.tokens, flight.abort_reason or "the engine was stopped")

    async def _generate(self, flight: EngineRequest, work: Work) -> str:
        engine, _ = self._started()
        finish_reason = "aborted"
        flight.generating = True
        with self.waits.on(work.request_id, stage="decode") as wait:
            async with contextlib.aclosing(engine.generate(work)) as chunks:
                async for chunk in chunks:
                    wait.moved()
                    self._heard(flight, chunk)
                    finish_reason = chunk.finish_reason
        return finish_reason

    def _heard(self, flight: EngineRequest, chunk: Chunk) -> None:
        flight.heard(chunk)
        self.metrics.count("engine/tokens", len(chunk.tokens.ids) // 4)
        if not chunk.finish_reason and len(flight.unreported.ids) >= 4 * self.config.engine.stream_every:
            self._reports.add(flight.request.request_id)
            self._report_due.set()

    async def _abort(self, request_id: str, reason: str) -> None:
        engine, weights = self._started()
        flight = self._flights.running.get(request_id)
        if flight is None or flight.abort_reason:
            return
        flight.abort_reason = reason
        if flight.generating:
            await engine.abort(request_id)
        else:
            weights.look_again()

    # -- commands ---------------------------------------------------------------------------------------------------

    @handler(concurrency=256)
    async def abort(self, request: Abort) -> Ack:
        await self._abort(request.request_id, request.reason)
        return Ack()

    @handler(concurrency=4)
    async def suspend(self, request: Suspend) -> Ack:
        await self._started()[0].suspend()
        self.log.info("suspended")
        return Ack()

    @handler(concurrency=4)
    async def resume(self, request: Resume) -> Ack:
        await self._started()[0].resume()
        self.log.info("resumed")
        return Ack()

    @handler
    async def inspect(self, request: Inspect) -> EngineStatus:
        engine, weights = self._started()
        load = engine.load()
        running, finished = tuple(self._flights.running), self._flights.finished()
        return EngineStatus(
            self.name, weights.version, load.num_slots, running, finished, load.tokens_s, load.suspended
        )

    @handler
    async def weights_published(self, message: WeightsPublished) -> None:
        self._started()[1].hint(message)

    def _swapped(self, info: BlobInfo) -> None:
        self.spawn(self._tell_taken(WeightsTaken(self.name, info.version, info.epoch)), name=f"{self.name}.taken")

    async def _tell_taken(self, message: WeightsTaken) -> None:
        for trainer in self.peers("trainer"):
            with contextlib.suppress(AskFailed):
                await self.ref(trainer).tell(message)

    # -- what others see --------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Tell the proxies how far long requests are: all that are due in one message."""
        while True:
            await self._report_due.wait()
            self._report_due.clear()
            due, self._reports = self._reports, set()
            flights = [flight for i in sorted(due) if (flight := self._flights.running.get(i)) is not None]
            message = TokensSampled(self.name, tuple((f.request.request_id, f.report()) for f in flights))
            for proxy in self.peers("llm_proxy") if flights else ():
                try:
                    await self.ref(proxy).tell(message)
                except NotSent:
                    self.log.debug("progress_not_told", proxy=proxy)

    async def _gauge(self) -> None:
        engine, _ = self._started()
        while True:
            load = engine.load()
            self.metrics.gauge("engine/running", load.running)
            self.metrics.gauge("engine/waiting", load.waiting)
            self.metrics.gauge("engine/tokens_s", load.tokens_s)
            await asyncio.sleep(GAUGES_S)

    def _started(self) -> tuple[Engine, WeightsPuller]:
        if self._engine is None or self._weights is None:
            raise EngineDead(f"{self.name} has not started its engine yet")
        return self._engine, self._weights

    def _model_folder(self) -> Path:
        return self.run.folder / self.config.model.path
