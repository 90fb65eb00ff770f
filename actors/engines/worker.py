"""EngineWorker: hosts one engine; weights are pulled when published, progress is told to the proxy."""

import asyncio
import contextlib
import importlib.util
import os
from collections import deque
from pathlib import Path
from typing import Any, Literal

from actors.cluster import ClusterSection
from actors.config import CUDA, ModelSection, WeightsSection
from actors.engines.caches import Caches
from actors.engines.engine import (
    CACHE,
    ENGINES,
    VLLM_MISSING,
    Chunk,
    Engine,
    EngineDead,
    EngineError,
    Work,
    require,
)
from actors.engines.hf_files import check_fits, check_positions, read_header
from actors.engines.moves import CacheSource, Departures, Parked
from actors.engines.orders import Orders
from actors.engines.pace import modelled
from actors.engines.permitted import PermittedOrders
from actors.engines.section import EngineSection, check_sampling
from actors.engines.stop_strings import Decode, decoder, end_of, first_of
from actors.engines.tokens import joined, shifted
from actors.engines.weights import WeightsPuller
from actors.messages.engines import GENERATION, EngineChanged, EngineState, Reconfigure, SleepEngine, WakeEngine
from actors.messages.generation import (
    HANDED_BACK,
    HANDED_OVER,
    Abort,
    Aborted,
    CachePart,
    Completion,
    EngineStatus,
    FetchCache,
    Generate,
    Inspect,
    Measure,
    Resume,
    StepsMeasured,
    Suspend,
    Tokens,
    TokensSampled,
)
from actors.messages.moves import AbortMove, MovePrepared, NotMoved, PrepareMove, TakeMove
from actors.messages.weights import HoldWeights, WeightsDigest, WeightsHeld, WeightsPublished, WeightsTaken
from actors.model_folder import (
    check_device,
    check_model_folder,
    may_use_cuda,
    most_positions,
    read_description,
    sampled_slices,
)
from actors.requests import SharedRequest, SharedRequests, in_task
from actors.weights.blobs import BlobReceiver
from bus.errors import AskFailed, NotSent
from bus.message import Ack, unpack_i32
from runtime.actor import handler
from runtime.config import ActorConfig
from runtime.config import Config as Job
from runtime.errors import ConfigError, said_by
from runtime.importer import check_module, load_object
from runtime.kernel import Kernel

GAUGES_S = 0.5
"""Period of the load gauges: twice per status snapshot."""

TELL_S = 5.0
"""Limit of one ask of a proxy, which is asked again while it is there."""

RATE_PERIODS = 10
"""Tokens per second are over so many of these: several steps of a slow engine, and yet a stall shows soon."""


class EngineRequest(SharedRequest):
    """One request in this engine."""

    def __init__(self, request: Generate) -> None:
        super().__init__(request)
        self.unreported = Tokens()
        self.stage: Literal["", "weights", "engine"] = ""
        """What it waits for now: weights that are new enough, or the engine, which has it."""
        self.parked: Parked | None = None
        """Its last move away from here, to `moved_to`."""
        self.moved_to = ""
        self.exported: asyncio.Future[Work | None]
        """What the engine gives for that move, without its cache; None where it has not got the request any more."""

    def keeps(self, result: Completion | Aborted) -> bool:
        """An aborted one may come back, from an engine that it went on to, and then goes on here."""
        return isinstance(result, Completion)

    def work(self, first_at_once: bool) -> Work:
        """The request as the engine sees it. Raises BadFrame when its prompt is malformed."""
        request = self.request
        prompt, at_once = tuple(unpack_i32(request.prompt)), first_at_once or request.hand_over
        return Work(request.request_id, request.session, prompt, request.sampling, request.resumed, None, at_once)

    async def has_left(self) -> bool:
        """Whether it moved while it waited for weights. Where it was parked, its fate is known first."""
        self.stage = ""
        if self.parked is not None and await asyncio.shield(self.parked.taken):
            return True
        self.parked = None
        return False

    def sampled(self, chunk: Chunk) -> None:
        """Add what the engine sampled."""
        self.tokens = joined(self.tokens, chunk.tokens)
        self.unreported = joined(self.unreported, chunk.tokens)

    def report(self) -> Tokens:
        """The tokens since the last report, at their positions in the whole completion."""
        tokens = self.unreported
        self.unreported = Tokens()
        return shifted(tokens, (len(self.tokens.ids) - len(tokens.ids)) // 4)


class EngineWorker(CacheSource):
    """One engine per worker. A second ask with the same request id joins the first, or gets its result."""

    role = "engine"
    provides = frozenset({GENERATION})
    least = 1

    class Config(ActorConfig):
        model: ModelSection = ModelSection()
        engine: EngineSection = EngineSection()
        weights: WeightsSection = WeightsSection()
        cluster: ClusterSection = ClusterSection()

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        check_sampling(job)

    @classmethod
    def check_host(cls, config: Any) -> None:
        """The engine's package, the device, and a class of the user's."""
        kind = config.engine.kind
        if kind not in ENGINES:
            check_module(kind, key="engine.kind")
        elif kind == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"{VLLM_MISSING}.")
        elif kind == "vllm" and CUDA.match(config.model.device):
            raise ConfigError(
                f"model.device is {config.model.device}, but engine.kind=vllm takes the first GPUs that its process sees: "
                "give each engine its own with actors.engine.pools.NAME.gpus=1, see docs/pools.md."
            )
        elif kind != "scripted":
            check_device(config.model.device)

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        """An engine with a model needs its weights, and must compute it as the folder says. One of the user's own knows what it takes."""
        section, model = config.engine, folder / config.model.path
        if section.kind not in ("torch", "vllm"):
            return
        check_model_folder(model)
        try:
            if section.kind == "torch":
                check_fits(model, section.max_len)
            elif "hf_overrides" not in section.vllm and "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ:
                check_positions(most_positions(read_description(model)), section.max_len, model)
        except (EngineError, ValueError) as error:
            raise ConfigError(f"{error}.") from None

    @classmethod
    def preload(cls, config: Any) -> tuple[str, ...] | None:
        """A user's engine and vLLM may start threads or CUDA as they are imported."""
        kind = config.engine.kind
        if kind == "scripted":
            return ()
        return (
            None if kind != "torch" or may_use_cuda(config.model.device) else ("torch", ENGINES[kind].partition(":")[0])
        )

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._requests = SharedRequests(
            EngineRequest, in_task(self._run, self.spawn, fatal=(EngineDead,)), max_results=config.engine.results_kept
        )
        self._caches = Caches(2 * config.engine.num_slots)
        self._reports: set[str] = set()
        self._report_due = asyncio.Event()
        self._departures = Departures(self, self._caches)
        self._orders = (
            PermittedOrders(self, config.cluster, self._tell_proxies)
            if config.cluster.dir
            else Orders(self.name, self._tell_proxies)
        )
        self._draining = False
        self._engine: Engine | None = None
        self._weights: WeightsPuller | None = None
        self._telling = asyncio.Lock()
        self._told_held = False
        self._digest: WeightsDigest | None = None
        self._gauging: asyncio.Task[None] | None = None
        self._num_tokens = 0
        self._decode: Decode | None = None
        """By the model's tokenizer; read for the first request that a text ends."""

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Load the base model, then go to the newest published weights, if any: a late joiner takes the same path."""
        section = self.config.engine
        by_rings = self.config.weights.broadcast == "rings"
        receiver = BlobReceiver(self, by_rings=by_rings)
        engine = await self._loaded(section)
        await self._orders.begin(engine)
        self._weights = weights = WeightsPuller(
            engine, receiver, self, self._swapped, self._orders.weight_sync, self._look_at
        )
        await weights.pull()
        self.metrics.gauge("weights/version", weights.version)
        self.spawn(weights.keep_up(section.check_s), name=f"{self.name}.weights")
        self.spawn(self._report(), name=f"{self.name}.progress")
        self._gauging = self.spawn(self._gauge(), name=f"{self.name}.load")
        paced = {} if section.pace is None else {"pace": section.pace.model_dump()}
        self.log.info("engine_started", engine=section.kind, version=weights.version, **paced)

    async def _loaded(self, section: EngineSection) -> Engine:
        """The engine, with the base model. Raises ConfigError for what its next start would meet again: it is not started again then."""
        build: Any = await self.offload(load_object, ENGINES.get(section.kind, section.kind))
        try:
            self._engine = engine = build(self.run.folder / self.config.model.path, self.config.model, section)
        except Exception as error:
            raise ConfigError(f"engine.kind={section.kind} raised in its constructor: {said_by(error)}") from error
        try:
            if section.serves != "both":
                require(engine, CACHE)
            self.log.info("model_loads")
            await engine.start()
        except Exception as error:
            self._engine = None
            with contextlib.suppress(Exception):  # why it did not start is what counts
                await engine.stop()
            if isinstance(error, EngineError) and not isinstance(error, EngineDead):
                raise ConfigError(str(error)) from error
            raise
        return engine

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Somebody who has the weights may be back."""
        if joined and self._weights is not None:
            self._weights.retry()

    async def on_drain(self) -> None:
        """Hand every request back, with its tokens, and wait until the askers have them."""
        self._draining = True
        for request_id in list(self._requests.running):
            await self._abort(request_id, HANDED_BACK)
        await self._requests.idle.wait()

    async def on_stop(self) -> None:
        if self._gauging is not None:
            self._gauging.cancel()  # an engine that is being stopped has no load to tell
        if self._engine is not None:
            await self._engine.stop()

    # -- requests ---------------------------------------------------------------------------------------------------

    @handler(concurrency=1024, outlives_asker=True)
    def generate(self, request: Generate) -> asyncio.Future[Completion | Aborted]:
        """Bounded by `concurrency`; of these `num_slots` decode and the rest wait in the engine."""
        return self._requests.ask(request)

    async def _run(self, shared: EngineRequest) -> Completion | Aborted:
        """Run one request to its end, under weights that are new enough."""
        _, weights = self._started()
        request = shared.request
        work: Work | None = shared.work(self.config.engine.pace is not None)  # orchestrators count with its prefill
        finish_reason = "aborted"
        if self._draining:
            shared.abort_reason = HANDED_BACK
        try:
            if request.moved is not None and (work := await self._departures.arrive(work, request.moved)) is None:
                return Aborted(request.request_id, shared.tokens, "it stays where it was", request.moved.source)
            while weights.version < request.min_version and not shared.abort_reason:
                shared.stage = "weights"
                await weights.wait_for(request.min_version, request.request_id)
                if await shared.has_left():
                    return Aborted(request.request_id, shared.tokens, "it moved", shared.moved_to)
            if request.exact and not (weights.is_held and weights.version == request.min_version):
                shared.abort_reason = f"{self.name} does not hold version {request.min_version} any more"
            if not shared.abort_reason:
                with self.metrics.busy():
                    finish_reason = await self._generated(shared, await self._with_cache(request, work))
        finally:
            self._reports.discard(request.request_id)
            if shared.parked is not None and not shared.parked.settle(False):
                self._caches.take(request.request_id, shared.parked.epoch)
        if finish_reason in ("stop", "length"):
            return Completion(request.request_id, shared.tokens, finish_reason, self.name)
        if finish_reason == "moved":
            return Aborted(request.request_id, shared.tokens, "it moved", shared.moved_to)
        reason = HANDED_OVER if finish_reason == "exported" else "the engine was stopped"
        return Aborted(request.request_id, shared.tokens, shared.abort_reason or reason)

    async def _with_cache(self, request: Generate, work: Work) -> Work:
        """What was prefilled elsewhere comes along, if it is still there."""
        if not request.cache_at:
            return work
        if request.cache_at == self.name:
            return work._replace(cache=self._caches.take(request.request_id))
        with self.waits.on(request.request_id, stage="kv", holder=request.cache_at):
            return work._replace(cache=await self._caches.fetch(self.ref(request.cache_at), request.request_id))

    async def _generated(self, shared: EngineRequest, work: Work) -> str:
        """Generate, and go on with what was parked and then kept; returns why it ended here."""
        while not shared.abort_reason:
            try:
                finish_reason = await self._generate(shared, work)
            except EngineError as error:
                if work.cache is None or shared.tokens is not shared.request.resumed:
                    raise
                self.log.warning("cache_not_taken", request=work.request_id, error=str(error))
                work = work._replace(cache=None)
                continue
            finally:
                shared.stage = ""
            if finish_reason != "exported" or shared.parked is None:
                return finish_reason
            parked, exported = shared.parked, await asyncio.shield(shared.exported)
            if exported is None:
                return finish_reason
            if await asyncio.shield(parked.taken):
                return "moved"
            work = exported._replace(cache=self._caches.take(work.request_id, parked.epoch))
            shared.parked = None
        return "aborted"

    async def _generate(self, shared: EngineRequest, work: Work) -> str:
        engine, _ = self._started()
        finish_reason = "aborted"
        exported: asyncio.Task[None] | None = None
        if (ended := await self._ended_by_text(shared, work.resumed, Tokens())) is not None:
            shared.tokens = ended
            return "stop"
        shared.stage = "engine"
        with self.waits.on(work.request_id, stage="decode") as wait:
            async with contextlib.aclosing(engine.generate(work)) as chunks:
                async for chunk in chunks:
                    wait.moved()
                    if chunk.finish_reason not in ("aborted", "exported"):  # whoever goes on with it looks at these
                        ended = await self._ended_by_text(shared, chunk.tokens, shared.tokens)
                    self._sampled(shared, chunk if ended is None else Chunk(ended, "stop"))
                    if ended is not None:
                        finish_reason = "stop"
                        break
                    finish_reason = chunk.finish_reason
                    if shared.request.hand_over and exported is None and not finish_reason:
                        exported = self.spawn(self._keep_cache(work.request_id), name=f"{self.name}.hand_over")
        if exported is not None:
            await exported
        return finish_reason

    async def _ended_by_text(self, shared: EngineRequest, tokens: Tokens, before: Tokens) -> Tokens | None:
        """Of `tokens`, which come after those `before`, the ones up to a text that ends the request; None where there is no such text."""
        stop, since = shared.request.sampling.stop, len(before.ids) // 4
        if not stop or not tokens.ids:
            return None
        if self._decode is None:
            self._decode = await self.offload(decoder, self.run.folder / self.config.model.path)
        end = end_of(joined(before, tokens), since, stop, self._decode)
        return None if end is None else first_of(tokens, end - since)

    async def _keep_cache(self, request_id: str) -> None:
        """Take the request out between two steps; one that ended meanwhile needs it no more."""
        with contextlib.suppress(EngineError):
            cache = (await self._started()[0].export(request_id, with_cache=True)).cache
            if cache is not None:
                self._caches.keep(request_id, cache)

    def _sampled(self, shared: EngineRequest, chunk: Chunk) -> None:
        first = self.config.engine.pace is not None and shared.tokens is shared.request.resumed
        shared.sampled(chunk)
        num_tokens = len(chunk.tokens.ids) // 4
        self._num_tokens += num_tokens
        self.metrics.count("engine/tokens", num_tokens)
        if not chunk.finish_reason and (first or len(shared.unreported.ids) >= 4 * self.config.engine.stream_every):
            self._reports.add(shared.request.request_id)
            self._report_due.set()

    async def _abort(self, request_id: str, reason: str) -> None:
        engine, weights = self._started()
        shared = self._requests.running.get(request_id)
        if shared is None or shared.abort_reason:
            return
        shared.abort_reason = reason
        # One that is handed back has its tokens for whoever asks.
        shared.ending = shared.ending or reason != HANDED_BACK
        if shared.parked is not None:
            shared.parked.settle(False)
        if shared.stage == "engine":
            await engine.abort(request_id)
        else:
            weights.wake_waiters()

    # -- commands ---------------------------------------------------------------------------------------------------

    @handler(concurrency=256)
    async def abort(self, request: Abort) -> Ack:
        await self._abort(request.request_id, request.reason)
        return Ack()

    @handler(concurrency=64, outlives_asker=True)
    async def prepare_move(self, request: PrepareMove) -> MovePrepared | NotMoved:
        """Goes on where the proxy died meanwhile: then nobody comes for the request, and it is kept."""
        engine, weights = self._started()
        shared = self._requests.running.get(request.request_id)
        if shared is None or not shared.stage or shared.ending or shared.abort_reason:
            return NotMoved(f"{request.request_id} is not generated by {self.name}")
        shared.moved_to = request.target
        return await self._departures.prepare(engine, shared, request, weights)

    @handler(concurrency=64)
    async def abort_move(self, request: AbortMove) -> Ack:
        self._departures.keep(request.request_id, request.epoch)
        return Ack()

    @handler(concurrency=64)
    async def take_move(self, request: TakeMove) -> Ack | NotMoved:
        return self._departures.take(request)

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

    @handler(concurrency=4, outlives_asker=True)
    async def sleep_engine(self, order: SleepEngine) -> EngineChanged:
        return await self._orders.carry_out(self._started()[0], order)

    @handler(concurrency=4, outlives_asker=True)
    async def wake_engine(self, order: WakeEngine) -> EngineChanged:
        return await self._orders.carry_out(self._started()[0], order)

    @handler(concurrency=4, outlives_asker=True)
    async def reconfigure(self, order: Reconfigure) -> EngineChanged:
        return await self._orders.carry_out(self._started()[0], order)

    @handler
    async def inspect(self, request: Inspect) -> EngineStatus:
        engine, weights = self._started()
        load, section = engine.load(), self.config.engine
        return EngineStatus(
            self.name, weights.version, load.num_slots, tuple(self._requests.running), self._requests.finished(),
            load.suspended, weights.is_held, section.serves, self._is_asleep, load.degree,
            modelled(section) if section.pace or section.hardware else None, load.restart_s, self._digest,
        )  # fmt: skip

    @handler(concurrency=256)
    async def fetch_cache(self, request: FetchCache) -> CachePart:
        return self._caches.give(request)

    @handler
    async def measure(self, request: Measure) -> StepsMeasured:
        return StepsMeasured(self.name, self._started()[0].load().steps)

    @handler
    async def weights_published(self, message: WeightsPublished) -> None:
        self._started()[1].hint(message)

    @handler(concurrency=16)
    async def hold_weights(self, request: HoldWeights) -> WeightsHeld:
        """The proxies know before the asker does: they give this engine no request that needs newer weights, nor another one an exact one."""
        held = await self._started()[1].hold(request.version, request.epoch, request.for_s)
        await self._tell_proxies()
        return WeightsHeld(self.name, held)

    async def _tell_proxies(self) -> None:
        """How it is now: one after the other, so that no old word comes last, and until each has it or is gone."""
        async with self._telling:
            engine, weights = self._started()
            self._told_held = weights.is_held
            held, load = self._told_held, engine.load()
            message = EngineState(self.name, weights.version, held, self._is_asleep, load.degree, load.restart_s)
            for proxy in self.peers("llm_proxy"):
                while proxy in self.peers("llm_proxy"):
                    try:
                        await self.ref(proxy).ask(message, timeout=TELL_S)
                        break
                    except AskFailed as error:
                        self.log.warning("state_not_told", proxy=proxy, error=str(error))

    def _swapped(self, info: WeightsPublished) -> None:
        self._caches.forget()
        if self._told_held:
            self.spawn(self._tell_proxies(), name=f"{self.name}.let_go")

    async def _look_at(self, info: WeightsPublished, image: memoryview) -> None:
        """The trainer hears what the engine computes with now, and compares it with what it published."""
        engine, _ = self._started()
        slices = sampled_slices(read_header(image, f"weights version {info.version}"), self.run.seed, info.version)
        digest = getattr(engine, "digest", None)
        self._digest = None if digest is None else await digest(slices)
        message = WeightsTaken(self.name, info.version, info.epoch, self._digest)
        self.spawn(self._tell_taken(message), name=f"{self.name}.taken")

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
            due = sorted(self._reports)
            self._reports.clear()
            progress = [(i, shared.report()) for i in due if (shared := self._requests.running.get(i)) is not None]
            message = TokensSampled(self.name, tuple(progress))
            for proxy in self.peers("llm_proxy") if progress else ():
                try:
                    await self.ref(proxy).tell(message)
                except NotSent:
                    self.log.debug("progress_not_told", proxy=proxy)

    async def _gauge(self) -> None:
        engine, _ = self._started()
        loop = asyncio.get_running_loop()
        marks = deque([(loop.time(), self._num_tokens)], maxlen=RATE_PERIODS)
        while True:
            now = loop.time()
            since, before = marks[0]
            self.metrics.gauge("engine/tokens_s", (self._num_tokens - before) / max(now - since, GAUGES_S))
            marks.append((now, self._num_tokens))
            load = engine.load()
            self.metrics.gauge("rollout/slots", load.num_slots)
            self.metrics.gauge("engine/running", load.running)
            self.metrics.gauge("engine/waiting", load.waiting)
            self.metrics.gauge("engine/degree", load.degree)
            self.metrics.gauge("engine/asleep", float(load.asleep))
            if self.config.engine.pace is not None:
                self.metrics.gauge("paced/engines", 1)
                self.metrics.gauge("paced/steps", load.paced)
                self.metrics.gauge("paced/busy_s", load.paced_s)
                self.metrics.gauge("paced/outlasted_frac", load.outlasted / max(1, load.paced))
            await asyncio.sleep(GAUGES_S)

    @property
    def _is_asleep(self) -> bool:
        return self._orders.falls_asleep or self._started()[0].load().asleep

    def _started(self) -> tuple[Engine, WeightsPuller]:
        if self._engine is None or self._weights is None:
            raise EngineDead(f"{self.name} has not started its engine yet")
        return self._engine, self._weights
