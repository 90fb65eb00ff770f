"""An `Engine` whose times are the modelled engine's: real workers, proxies and managers meet the roofline."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from pydantic import Field

from actors.config import ModelSection
from actors.engines.engine import Chunk, EngineError, Load, Work
from actors.engines.scheduler import Sequence, check
from actors.engines.section import EngineSection
from planning.roofline import EngineSpec, Roofline
from sim.engine_model import ModelledEngine
from sim.timeline import SimProcess, Timeline

TOKEN = 2
"""What it samples, always: no stop token, so every turn has its full length."""


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

    spec: EngineSpec
    load_s: float = Field(default=0.0, ge=0)
    """Pause of a weight update."""
    vocab_size: int = Field(default=8, ge=TOKEN + 1)


class RooflineEngine:
    """Every turn is `max_new_tokens` long. An aborted request yields what it had before; its steps are charged to their end."""

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        if not isinstance(section, RooflineSection):
            raise EngineError("the modelled engine needs a RooflineSection")
        self._section = section
        self._requests: dict[str, tuple[Sequence, asyncio.Event]] = {}

    async def start(self) -> None:
        self._timeline = LoopTimeline()
        self._engine = ModelledEngine(self._timeline, "engine", Roofline(self._section.spec))

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        check(work, self._section.max_len, self._section.vocab_size, self._requests)
        sequence, ended = Sequence(work, self._section.max_len), asyncio.Event()
        if work.request_id in self._requests:
            raise EngineError(f"request {work.request_id} runs already; a request id is used once at a time")
        self._requests[work.request_id] = (sequence, ended)
        try:
            left = sequence.max_tokens - len(sequence.tokens)
            computed = self._timeline.start(self._compute(work, len(sequence.tokens), left, ended))
            await ended.wait()
            if not sequence.finish_reason:
                self._sample(sequence, left, computed)
            yield sequence.chunk()
        finally:
            del self._requests[work.request_id]

    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            sequence, ended = self._requests[request_id]
            sequence.finish_reason = sequence.finish_reason or "aborted"
            ended.set()

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

    def load(self) -> Load:
        running, slots = self._engine.in_flight, self._section.num_slots
        version, suspended = self._engine.version, self._engine.suspended
        return Load(slots, max(0, running - slots), min(running, slots), version, suspended)

    async def stop(self) -> None:
        for request_id in list(self._requests):
            await self.abort(request_id)

    async def _compute(self, work: Work, context: int, new_tokens: int, ended: asyncio.Event) -> int:
        version = await self._engine.generate(work.session or work.request_id, context, new_tokens)
        ended.set()
        return version

    def _sample(self, sequence: Sequence, left: int, computed: SimProcess) -> None:
        # Set in the same step of the loop, before the process has ended where nothing had to be waited for.
        version = computed.ended.value if computed.ended.happened else self._engine.version
        for _ in range(left):
            sequence.sampled(TOKEN, -1.0, version)
