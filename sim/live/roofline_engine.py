"""An `Engine` whose times are the modelled engine's: real workers, proxies and managers meet the roofline."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import CACHE, EXPORT, Cache, Chunk, EngineError, EngineLoad, StepSeen, Work
from rubato.actors.engines.scheduler import Sequence, check
from rubato.actors.engines.section import EngineSection
from rubato.planning.roofline import Deployment, Roofline
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.live.environment import asked
from rubato.sim.moves_model import PROMPT_TOKENS
from rubato.sim.timeline import SimProcess, Timeline

TOKEN, STOP = 2, 1
"""What it samples: so many of the first, and one of the second at the end of a turn."""


class LoopTimeline(Timeline):
    """The modelled engine's timeline on an asyncio loop: virtual time is the loop's, what is due is a timer of it. `run` is the loop's business."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def now(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] - the loop alone moves it
        return self._loop.time()

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self._loop.call_at(max(self.now, when_s), call)


class RooflineSection(EngineSection):
    """What is modelled; `kind` names RooflineEngine."""

    spec: Deployment
    load_s: float = Field(default=0.0, ge=0)
    """Pause of a weight update."""
    vocab_size: int = Field(default=8, ge=TOKEN + 1)


@dataclass(eq=False, slots=True)
class LiveRequest:
    """One request under way."""

    sequence: Sequence
    session: str
    total: int
    """Tokens of the whole completion, as its prompt says."""
    why: str = ""
    """The finish reason of one that is to end before its last token."""
    to_end: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more is sampled for it here."""
    computing: bool = False
    taken_off: SimProcess | None = None
    """Ends with the tokens that the modelled engine did not come to."""

    @property
    def left(self) -> int:
        return self.total - (len(self.sequence.tokens) - len(self.sequence.work.prompt))

    def sampled(self, num: int, version: int) -> None:
        for _ in range(num):
            self.sequence.sampled(STOP if self.left == 1 else TOKEN, -1.0, version)


class RooflineEngine:
    """Every turn samples as many tokens as its prompt says."""

    capabilities = frozenset({EXPORT, CACHE})

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        if not isinstance(section, RooflineSection):
            raise EngineError("the modelled engine needs a RooflineSection")
        self._section = section
        self._requests: dict[str, LiveRequest] = {}

    async def start(self) -> None:
        self._timeline = LoopTimeline()
        self._engine = ModelledEngine(self._timeline, "engine", Roofline(self._section.spec))

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        check(work, self._section.max_len, self._section.vocab_size, self._requests)
        sequence = Sequence(work, self._section.max_len)
        request = LiveRequest(sequence, work.session or work.request_id, asked(work.prompt))
        self._requests[work.request_id] = request
        try:
            if work.cache is not None and work.cache.version == self._engine.version:
                self._engine.adopt(request.session, len(sequence.tokens))
            await self._compute(request, 1 if work.first_at_once else request.left)
            if request.left and not request.why:
                yield sequence.chunk()
                await request.to_end.wait()  # another engine goes on with it
            sequence.finish_reason = sequence.finish_reason or request.why
            last = sequence.chunk()
            request.over.set()
            yield last
        finally:
            self._end(request, "aborted")
            del self._requests[work.request_id]

    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._end(self._requests[request_id], "aborted")

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        """It lasts what the cache takes to the other engine, while steps go on."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "exported")
            await request.over.wait()
        if request is None or request.sequence.finish_reason != "exported":
            raise EngineError(f"request {request_id} does not run here: there is nothing to export")
        if not with_cache:
            return request.sequence.moved(None)
        num, version = len(request.sequence.tokens) - 1, self._engine.version
        await asyncio.sleep(self._engine.model.kv_move_s(num))
        return request.sequence.moved(Cache(version, (2, 1, num, 1), "modelled", memoryview(bytes(num))))

    async def suspend(self) -> None:
        self._engine.suspend()

    async def resume(self) -> None:
        self._engine.resume(self._engine.version)

    async def update(self, version: int, weights: memoryview) -> float:
        was_suspended = self._engine.suspended
        self._engine.suspend()
        await asyncio.sleep(self._section.load_s)
        self._engine.resume(version)
        if was_suspended:
            self._engine.suspend()
        return self._section.load_s

    def load(self) -> EngineLoad:
        running, slots = self._engine.in_flight, self._section.num_slots
        return EngineLoad(
            slots, max(0, running - slots), min(running, slots), self._engine.version, self._engine.suspended,
            prefill_tokens_s=PROMPT_TOKENS / self._engine.model.prefill_s(PROMPT_TOKENS),
        )  # fmt: skip

    def observe(self, step: StepSeen) -> None:
        self._engine.usage.seen = step

    async def stop(self) -> None:
        for request_id in list(self._requests):
            await self.abort(request_id)

    def _end(self, request: LiveRequest, why: str) -> None:
        """At the next step's boundary, unless it is complete by then, or ends already."""
        if request.why:
            return
        request.why = why
        request.to_end.set()
        if request.computing:
            request.taken_off = self._timeline.start(self._engine.abort(request.session))

    async def _compute(self, request: LiveRequest, num: int) -> None:
        request.computing = True
        asking = self._engine.generate(request.session, len(request.sequence.tokens), num)
        version = await self._until(self._timeline.start(asking))
        request.computing = False
        lacks = 0 if request.taken_off is None else await self._until(request.taken_off)
        request.sampled(num - lacks, max(version, 0))

    async def _until(self, process: SimProcess) -> Any:
        """What it ends with."""
        ended = asyncio.Event()

        async def wait() -> None:
            await process.ended
            ended.set()

        self._timeline.start(wait())
        await ended.wait()
        return process.ended.value
