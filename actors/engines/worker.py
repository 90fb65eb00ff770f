"""EngineWorker: hosts one engine; weights are pulled when published, proxies get its progress."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

from rubato.actors import plugins
from rubato.actors.checkpoints.hf_files import read_header
from rubato.actors.checkpoints.model_folder import sampled_slices
from rubato.actors.cluster.lease import lease_of
from rubato.actors.engines.engine import ENGINES, Chunk, Engine, EngineDead, EngineError, EngineHook, Work, require
from rubato.actors.engines.section import EngineConfig, EngineSection
from rubato.actors.engines.weights import WeightsPuller
from rubato.actors.messages.generation import (
    GENERATION,
    Abort,
    Aborted,
    Completion,
    EngineStatus,
    Generate,
    GenerateReply,
    HandedBack,
    InfoChanged,
    Inspect,
    Resume,
    Suspend,
    Tokens,
    TokensSampled,
    VersionSpan,
)
from rubato.actors.messages.weights import WeightsDigest, WeightsPublished, WeightsTaken
from rubato.actors.requests import SharedRequest, SharedRequests, in_task
from rubato.actors.weights.transport import BlobReceiver
from rubato.bus.errors import AskFailed, NotSent
from rubato.bus.message import Ack, unpack_i32
from rubato.planning.engine_info import EngineInfo, WeightsId
from rubato.runtime.actor import Actor, Handles, handler
from rubato.runtime.config import Config as Job
from rubato.runtime.errors import ConfigError, said_by
from rubato.runtime.importer import load_object
from rubato.runtime.kernel import Kernel

Decode = Callable[[Sequence[int]], str]

MARGIN = 8
"""Tokens before the first that may belong to a text: the bytes of a character are decoded together."""

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
        """Wait that it is in now: for weights that are new enough, or in the engine, which has it."""
        self.is_handed_back = False
        """The engine drains: others go on with the request."""

    @property
    def gives_up(self) -> bool:
        """It is to end as soon as it can."""
        return self.is_handed_back or bool(self.abort_reason)

    def given_up(self) -> Aborted | HandedBack:
        """The answer of one that ended early."""
        request_id = self.request.request_id
        if self.is_handed_back and not self.abort_reason:
            return HandedBack(request_id, self.tokens)
        return Aborted(request_id, self.tokens, self.abort_reason or "the engine was stopped")

    def keeps(self, result: GenerateReply) -> bool:
        """An aborted one may come back, from an engine that it went on to, and then goes on here."""
        return isinstance(result, Completion)

    def work(self, *, first_at_once: bool) -> Work:
        """The request as the engine sees it. Raises BadFrame when its prompt is malformed."""
        request = self.request
        prompt = tuple(unpack_i32(request.prompt))
        adapter = request.weights.adapter
        return Work(request.request_id, request.session, prompt, request.sampling, request.resumed, None, first_at_once, adapter)

    def sampled(self, chunk: Chunk) -> None:
        """Add what the engine sampled."""
        self.tokens += chunk.tokens
        self.unreported += chunk.tokens

    def report(self) -> Tokens:
        """The tokens since the last report, at their positions in the whole completion."""
        tokens = self.unreported
        self.unreported = Tokens()
        return tokens.shifted((len(self.tokens.ids) - len(tokens.ids)) // 4)


class EngineWorker(plugins.Hooked[EngineHook], Actor):
    """One engine per worker. A second ask with the same request id joins the first, or gets its result."""

    role = "engine"
    provides = frozenset({GENERATION})
    least = 1
    hook_messages = plugins.ENGINE_MESSAGES

    class Config(EngineConfig):
        pass

    config: Config

    @classmethod
    def check(cls, job: Job) -> None:
        plugins.load(plugins.ENGINE_JOB)(job)

    @classmethod
    def check_host(cls, config: Any) -> None:
        plugins.load(plugins.ENGINE_HOST)(config)

    @classmethod
    def preflight(cls, config: Any, folder: Path) -> None:
        plugins.load(plugins.ENGINE_FOLDER)(config, folder)

    @classmethod
    def preload(cls, config: Any) -> tuple[str, ...] | None:
        return plugins.load(plugins.ENGINE_PRELOAD)(config)

    @classmethod
    def plugin_classes(cls, job: Job) -> tuple[type[Handles], ...]:
        return tuple(plugins.load(path) for path in plugins.engine_hooks_of(job))

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.requests = SharedRequests(
            EngineRequest, in_task(self._run, self.spawn, fatal=(EngineDead,)), max_results=config.engine.results_kept
        )
        self._reports: set[str] = set()
        self._report_due = asyncio.Event()
        self._draining = False
        self._engine: Engine | None = None
        self._weights: WeightsPuller | None = None
        self._telling = asyncio.Lock()
        self._digest: WeightsDigest | None = None
        self._using: list[asyncio.Task[Any]] = []
        """Cancelled before the engine stops; see `spawn_using`."""
        self._num_tokens = 0
        self._decode: Decode | None = None
        """By the model's tokenizer; read for the first request that a text ends."""
        self.lease = lease_of(self)
        self.begin_hooks(plugins.chosen(plugins.ENGINE_HOOKS, config))
        self.plugins = self.hooks

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Load the base model, then go to the newest published weights, if any: a late joiner takes the same path."""
        section = self.config.engine
        by_rings = self.config.weights.broadcast == "rings"
        receiver = BlobReceiver(self, by_rings=by_rings)
        engine = await self._loaded(section)
        for hook in self.hooks:
            await hook.begin(engine)
        await self.lease.begin()
        self._weights = weights = WeightsPuller(engine, receiver, self, self._swapped, self.lease, self._look_at)
        await weights.pull()
        self.metrics.gauge("weights/version", weights.version)
        self.spawn_using(weights.keep_up(section.check_s), name=f"{self.name}.weights")
        self.spawn(self._report(), name=f"{self.name}.progress")
        self.spawn_using(self._gauge(), name=f"{self.name}.load")
        self.log.info("engine_started", engine=section.kind, version=weights.version, **section.told)

    async def _loaded(self, section: EngineSection) -> Engine:
        """The engine, with the base model. Raises ConfigError for what its next start would meet again: it is not started again then."""
        kind, options = plugins.engine_kind(self.config)
        build: Any = await self.offload(load_object, ENGINES.get(kind, kind))
        try:
            self._engine = engine = build(self.run.folder / self.config.model.path, self.config.model, section, **options)
        except Exception as error:
            raise ConfigError(f"engine.kind={section.kind} raised in its constructor: {said_by(error)}") from error
        try:
            for capability in plugins.capabilities(self.config):
                require(engine, capability)
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
        """A source of the weights may be back."""
        if joined and self._weights is not None:
            self._weights.retry()

    async def on_drain(self) -> None:
        """Hand every request back, with its tokens, and wait until the askers have them."""
        self._draining = True
        # All at once: the engine ends requests between two steps, and a proxy waits for their tokens for a moment only.
        await asyncio.gather(*(self._end(request_id, "") for request_id in list(self.requests.running)))
        await self.requests.idle.wait()

    async def on_stop(self) -> None:
        for task in self._using:
            task.cancel()
        if self._engine is not None:
            await self._engine.stop()

    def spawn_using(self, work: Coroutine[Any, Any, Any], *, name: str) -> None:
        """Spawn `work`, which asks the engine by itself: it is cancelled before the engine stops."""
        self._using.append(self.spawn(work, name=name))

    # -- requests ---------------------------------------------------------------------------------------------------

    @handler(concurrency=1024, outlives_asker=True)
    def generate(self, request: Generate) -> asyncio.Future[GenerateReply]:
        """Bounded by `concurrency`; of these `num_slots` decode and the rest wait in the engine."""
        return self.requests.ask(request)

    async def _run(self, shared: EngineRequest) -> GenerateReply:
        """Run one request to its end, under weights that are new enough."""
        _, weights = self.started()
        need, request_id = shared.request.weights, shared.request.request_id
        shared.is_handed_back = self._draining  # a drain hands back what it finds running, and this one may have come after
        if (path := plugins.engine_hook_of(shared.request.route)) is not None:
            self.hook(path)  # before the loops over hooks: the mechanism may come with this request
        try:
            # `arrive` comes before the wait for weights, which may be long: a hook may have the answer, and what another engine keeps
            # for the request until it is here is gone with that one's next weights.
            work = shared.work(first_at_once=self.config.engine.first_at_once)
            for hook in self.hooks:
                arrived = await hook.arrive(shared, work)
                if not isinstance(arrived, Work):
                    return arrived
                work = arrived
            # A loop, since the wait also ends for an abort, and for a version that is newer and still too old. No wake-up is missed:
            # nothing is awaited between this look at the version and the wait's own.
            while not need.adapter and weights.version < need.version and not shared.gives_up:
                shared.stage = "weights"
                await weights.wait_for(need.version, request_id)
                shared.stage = ""
                if (reply := await self._stopped(shared, "")) is not None and not isinstance(reply, Work):
                    return reply
            # An exact version must be held, not only be the one of now: a swap while a hook is `ready` would put another one's tokens
            # into an evaluation. An abort in any wait so far is seen here, before hooks fetch what only a running request needs.
            if need.exact and not (weights.is_held and weights.version == need.version):
                shared.abort_reason = shared.abort_reason or f"{self.name} does not hold version {need.version} any more"
            if shared.gives_up:
                return shared.given_up()
            with self.metrics.busy():
                for hook in self.hooks:
                    work = await hook.ready(shared, work)
                return await self._generated(shared, work)
        finally:
            # After an answer, an error or a cancellation alike: else hooks would keep what they hold for the request.
            self._reports.discard(request_id)
            for hook in self.hooks:
                hook.ended(shared)

    async def _stopped(self, shared: EngineRequest, finish_reason: str) -> Work | GenerateReply | None:
        """The answer or Work of the first hook that has one."""
        for hook in self.hooks:
            if (found := await hook.stopped(shared, finish_reason)) is not None:
                return found
        return None

    async def _generated(self, shared: EngineRequest, work: Work) -> GenerateReply:
        """Generate, as often as a mechanism that took the request out gives it back."""
        while not shared.gives_up:  # also set while hooks decide: the engine does not have the request then, and sends no last chunk
            try:
                finish_reason = await self._generate(shared, work)
            except EngineError as error:
                # A cache from elsewhere only saves time: where it does not fit, the prompt is computed. Once a token was sampled
                # (`tokens` is another object then) the error has another cause, and a new start would sample that token twice.
                if work.cache is None or shared.tokens is not shared.request.resumed:
                    raise
                self.log.warning("cache_not_taken", request=work.request_id, error=str(error))
                work = work._replace(cache=None)
                continue
            finally:
                shared.stage = ""  # before hooks are asked: an abort from now on must not go to the engine, which is through
            # Hooks come before the finish reason: one that is taking the request out must be done before its askers have an answer.
            found = await self._stopped(shared, finish_reason)
            if isinstance(found, Work):
                work = found
            elif found is not None:
                return found
            elif finish_reason in ("stop", "length"):
                return Completion(work.request_id, shared.tokens, finish_reason, self.name)
            else:
                break  # aborted in the engine
        return shared.given_up()

    async def _generate(self, shared: EngineRequest, work: Work) -> str:
        engine, _ = self.started()
        finish_reason = "aborted"
        if (ended := await self._ended_by_text(shared, work.resumed, Tokens())) is not None:
            shared.tokens = ended
            return "stop"
        shared.stage = "engine"
        with self.waits.on(work.request_id, stage="decode") as wait:
            async with contextlib.aclosing(engine.generate(work)) as chunks:
                async for chunk in chunks:
                    wait.moved()
                    if chunk.finish_reason in ("", "stop", "length"):  # who goes on with another looks at its tokens
                        ended = await self._ended_by_text(shared, chunk.tokens, shared.tokens)
                    self._sampled(shared, chunk if ended is None else Chunk(ended, "stop"))
                    if ended is not None:
                        finish_reason = "stop"
                        break
                    finish_reason = chunk.finish_reason
                    if not finish_reason:
                        for hook in self.hooks:
                            hook.sampled(shared)
        return finish_reason

    async def _ended_by_text(self, shared: EngineRequest, tokens: Tokens, before: Tokens) -> Tokens | None:
        """The part of `tokens`, which come after those `before`, up to a text that ends the request; None where there is no such text."""
        stop, since = shared.request.sampling.stop, len(before.ids) // 4
        if not stop or not tokens.ids:
            return None
        if self._decode is None:
            self._decode = await self.offload(decoder, self.run.folder / self.config.model.path)
        end = end_of(before + tokens, since, stop, self._decode)
        return None if end is None else first_of(tokens, end - since)

    def _sampled(self, shared: EngineRequest, chunk: Chunk) -> None:
        first = self.config.engine.first_at_once and shared.tokens is shared.request.resumed
        shared.sampled(chunk)
        num_tokens = len(chunk.tokens.ids) // 4
        self._num_tokens += num_tokens
        self.metrics.count("engine/tokens", num_tokens)
        if not chunk.finish_reason and (first or len(shared.unreported.ids) >= 4 * self.config.engine.stream_every):
            self._reports.add(shared.request.request_id)
            self._report_due.set()

    async def _end(self, request_id: str, reason: str) -> None:
        """End a request early: for this `reason`; without one, by handing it back with its tokens, to go on elsewhere."""
        engine, weights = self.started()
        shared = self.requests.running.get(request_id)
        if shared is None or shared.gives_up:
            return
        shared.abort_reason, shared.is_handed_back = reason, not reason
        shared.ending = shared.ending or bool(reason)
        for hook in self.hooks:
            hook.aborted(shared)
        if shared.stage == "engine":
            await engine.abort(request_id)
        else:
            weights.wake_waiters()

    # -- commands ---------------------------------------------------------------------------------------------------

    @handler(concurrency=256)
    async def abort(self, request: Abort) -> Ack:
        await self._end(request.request_id, request.reason or "asked")
        return Ack()

    @handler(concurrency=4)
    async def suspend(self, request: Suspend) -> Ack:
        await self.started()[0].suspend()
        self.log.info("suspended")
        return Ack()

    @handler(concurrency=4)
    async def resume(self, request: Resume) -> Ack:
        await self.started()[0].resume()
        self.log.info("resumed")
        return Ack()

    @handler
    async def inspect(self, request: Inspect) -> EngineStatus:
        return EngineStatus(self.info(), tuple(self.requests.running), self.requests.finished(), self._digest)

    def info(self) -> EngineInfo:
        """How the engine is now."""
        engine, weights = self.started()
        section = self.config.engine
        info = engine.load().info(self.name, WeightsId(weights.version), section.serves, section.profile)
        for hook in self.hooks:
            info = hook.told(info)
        return info

    @handler
    async def weights_published(self, message: WeightsPublished) -> None:
        self.started()[1].hint(message)
        for hook in self.hooks:
            hook.published(message)

    async def tell_proxies(self) -> None:
        """How it is now: one after the other, so that no old word comes last, and until each has it or is gone."""
        async with self._telling:
            message = InfoChanged(self.info())
            for proxy in self.peers("llm_proxy"):
                while proxy in self.peers("llm_proxy"):
                    try:
                        await self.ref(proxy).ask(message, timeout=TELL_S)
                        break
                    except AskFailed as error:
                        self.log.warning("state_not_told", proxy=proxy, error=str(error))

    def _swapped(self, info: WeightsPublished) -> None:
        for hook in self.hooks:
            hook.swapped()

    async def _look_at(self, info: WeightsPublished, image: memoryview) -> None:
        """The trainer hears what the engine computes with now, and compares it with what it published."""
        engine, _ = self.started()
        slices = sampled_slices(read_header(image, f"weights version {info.version}"), self.run.seed, info.version)
        digest = getattr(engine, "digest", None)
        self._digest = None if digest is None else await digest(slices)
        message = WeightsTaken(self.name, info.version, info.term, self._digest)
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
            progress = [(i, shared.report()) for i in due if (shared := self.requests.running.get(i)) is not None]
            names = {i: name for i, _ in progress if (name := self.requests.running[i].request.weights.adapter)}
            message = TokensSampled(self.name, tuple(progress), names)
            for proxy in self.peers("llm_proxy") if progress else ():
                try:
                    await self.ref(proxy).tell(message)
                except NotSent:
                    self.log.debug("progress_not_told", proxy=proxy)

    async def _gauge(self) -> None:
        engine, _ = self.started()
        loop = asyncio.get_running_loop()
        marks = deque([(loop.time(), self._num_tokens)], maxlen=RATE_PERIODS)
        while True:
            now = loop.time()
            since, before = marks[0]
            self.metrics.gauge("engine/tokens_s", (self._num_tokens - before) / max(now - since, GAUGES_S))
            marks.append((now, self._num_tokens))
            for name, value in engine.load().metrics.items():
                self.metrics.gauge(name, value)
            await asyncio.sleep(GAUGES_S)

    def started(self) -> tuple[Engine, WeightsPuller]:
        """The engine, and what keeps its weights new. Raises EngineDead before both are there."""
        if self._engine is None or self._weights is None:
            raise EngineDead(f"{self.name} has not started its engine yet")
        return self._engine, self._weights


def decoder(folder: Path) -> Decode:
    """Decodes by the model folder's tokenizer. Blocks."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: tokenizer.decode([*ids], skip_special_tokens=False)


def end_of(tokens: Tokens, since: int, stop: Sequence[str], decode: Decode) -> int | None:
    """How many of `tokens` there are up to the one that completes a text of `stop`, looked for from token `since` on; None without one."""
    first = max(0, since - max(len(text.encode()) for text in stop) - MARGIN)
    ids = unpack_i32(tokens.ids[4 * first :])

    def is_over(num: int) -> bool:
        told = decode(ids[:num])
        return any(text in told for text in stop)

    if not is_over(len(ids)):
        return None
    return first + next(num for num in range(max(1, since - first), len(ids) + 1) if is_over(num))


def first_of(tokens: Tokens, num: int) -> Tokens:
    """The first `num` of `tokens`."""
    spans = tuple(VersionSpan(span.version, span.start, min(span.end, num)) for span in tokens.spans if span.start < num)
    return Tokens(tokens.ids[: 4 * num], tokens.logprobs[: 4 * num], spans)
