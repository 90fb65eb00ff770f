"""The scripted engine at the pace of modelled hardware (`engine.pace`): its tokens, the torch engine's batching, a roofline's time.

Where an unpaced one has a latency per request, this one has steps: a batch is put together as the torch engine does it, lasts what
the hardware would take for it, and then all its tokens are there. Steps are timers of the event loop, so that a step does not block it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.checkpoints.hf_files import read_header
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import Chunk, Engine, EngineError, EngineLoad, StepSeen, Work, check_level
from rubato.actors.engines.pace import EnginePace
from rubato.actors.engines.scheduler import Row, Scheduler, contents
from rubato.actors.engines.section import EngineSection, PaceSection
from rubato.actors.scripted.engine import ScriptedEngine, ScriptedSequence

Command = Callable[[], None]


def scripted_engine(folder: Path, model: ModelSection, section: EngineSection) -> Engine:
    """The engine of `engine.kind=scripted`."""
    if section.pace is None:
        return ScriptedEngine(folder, model, section)
    return PacedScriptedEngine(folder, model, section, section.pace)


class PacedScriptedEngine(ScriptedEngine):
    """Every token is what the unpaced engine gives for the same request and version. `engine.scripted` sets no times here."""

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection, pace: PaceSection) -> None:
        super().__init__(folder, model, section)
        self._pace = EnginePace(pace)
        self._scheduler = Scheduler(section.num_slots, section.max_batch_tokens, prefix_cache=section.prefix_cache)
        self._seen: StepSeen | None = None
        self._inboxes: dict[str, asyncio.Queue[Chunk]] = {}
        self._commands: deque[Command] = deque()
        self._prefill_tokens_s = 0.0
        self._busy: asyncio.TimerHandle | None = None
        """Ends the step or the swap in progress."""
        self._then: Command = _nothing
        """What that is to do."""

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        sequence = self._accept(work)
        inbox = self._inboxes[work.request_id] = asyncio.Queue[Chunk]()
        over = False
        try:
            self._between_steps(partial(self._add, sequence))
            while not over:
                chunk = await inbox.get()
                over = bool(chunk.finish_reason)
                yield chunk
        finally:
            del self._inboxes[work.request_id], self._requests[work.request_id]
            if not over:
                self._between_steps(partial(self._scheduler.remove, sequence))

    async def abort(self, request_id: str) -> None:
        await self._done(partial(self._abort, request_id))

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        """It lasts what the cache takes to the other engine, while steps go on."""
        work: Work = await self._done(partial(self._export, request_id, with_cache))
        if work.cache is not None:
            await asyncio.sleep(self._pace.kv_move_s(work.cache.num_tokens))
        return work

    async def sleep(self, level: int = 1) -> float:
        check_level(level)
        return await self._lasting(partial(self._fall_asleep, level))

    async def wake(self) -> float:
        return await self._lasting(self._wake_up)

    async def reconfigure(self, degree: int) -> float:
        return await self._lasting(lambda: self._pace.reconfigure(degree, self._scheduler.num_cached))

    async def suspend(self) -> None:
        await self._done(partial(setattr, self, "_suspended", True))

    async def resume(self) -> None:
        await self._done(partial(setattr, self, "_suspended", False))

    async def update(self, version: int, weights: memoryview) -> float:
        read_header(weights, f"weights version {version}")
        return await self._lasting(self._swap_s, partial(self._swap, version))

    def load(self) -> EngineLoad:
        running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
        pace = self._pace
        return EngineLoad(
            self._section.num_slots, waiting, running, self._version, self._suspended, self._asleep, pace.degree,
            self._prefill_tokens_s, gauges=pace.gauges,
        )  # fmt: skip

    def observe(self, step: StepSeen) -> None:
        self._seen = step

    async def stop(self) -> None:
        """What is in progress ends now."""
        self._alive = False
        while self._busy is not None:
            self._busy.cancel()
            self._end()
        for request_id in list(self._requests):
            self._abort(request_id)

    # -- between two steps ----------------------------------------------------------------------------------------

    def _between_steps(self, command: Command) -> None:
        """Run `command` now, before any step begins, or once the step in progress is over."""
        self._commands.append(command)
        if self._busy is None:
            self._next()

    async def _done(self, command: Callable[[], Any]) -> Any:
        """What `command` returns between two steps. Raises its EngineError."""
        done = asyncio.get_running_loop().create_future()
        self._between_steps(partial(_run, command, done))
        return await done

    async def _lasting(self, begin: Callable[[], float], then: Command | None = None) -> float:
        """Run `begin` between two steps, last as many seconds as it returns, then run `then`; returns the seconds."""
        over = asyncio.get_running_loop().create_future()

        def begun() -> None:
            try:
                duration_s = begin()
            except EngineError as error:
                over.set_exception(error)
            else:
                if duration_s:
                    self._last(duration_s, partial(ended, duration_s))
                else:
                    ended(duration_s)

        def ended(duration_s: float) -> None:
            if then is not None:
                then()
            if not over.done():
                over.set_result(duration_s)

        self._between_steps(begun)
        return await over

    def _add(self, sequence: ScriptedSequence) -> None:
        if not self._is_cached(sequence):
            sequence.cache = None
        if sequence.finish_reason:
            self._hand_out(sequence)
        else:
            self._scheduler.add(sequence)

    def _abort(self, request_id: str) -> None:
        sequence = self._requests.get(request_id)
        if sequence is not None and not sequence.finish_reason:
            self._scheduler.remove(sequence)
            sequence.finish_reason = "aborted"
            self._hand_out(sequence)

    def _export(self, request_id: str, with_cache: bool) -> Work:
        sequence = self._exported(request_id)
        num_cached = sequence.num_cached
        self._scheduler.remove(sequence)
        sequence.finish_reason = "exported"
        self._hand_out(sequence)
        return sequence.moved(self._cache_of(sequence, num_cached) if with_cache and num_cached else None)

    def _swap_s(self) -> float:
        """New weights come to an engine that sleeps as it wakes, in place of its own."""
        return 0.0 if self._asleep else self._pace.swap_s()

    def _swap(self, version: int) -> None:
        self._version = version
        if self._section.kv_on_update == "recompute":
            self._scheduler.forget_caches()

    def _fall_asleep(self, level: int) -> float:
        if self._asleep:
            return 0.0
        self._asleep = True
        if level > 1:
            self._scheduler.forget_caches()
        return self._pace.sleep_s(self._scheduler.num_cached)

    def _wake_up(self) -> float:
        if not self._asleep:
            return 0.0
        self._asleep = False
        return self._pace.sleep_s(self._scheduler.num_cached)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Run what waits for the end of a step, then begin the next one, if there is any to be done."""
        while self._commands and self._busy is None:
            self._commands.popleft()()
        if self._busy is not None:
            return
        rows = self._scheduler.schedule() if self._alive and not self._held else []
        self._scheduler.to_load()
        if rows:
            content, duration_s = contents(rows), self._pace.step_s(rows)
            self._prefill_tokens_s = content[0] / duration_s or self._prefill_tokens_s
            self._last(duration_s, partial(self._sample, rows))
            if self._seen is not None:
                self._seen(*content, duration_s)
        else:
            self._pace.idle()

    def _last(self, duration_s: float, then: Command) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._then = then
        self._busy = loop.call_at(self._pace.due(duration_s, now, now), self._end)

    def _end(self) -> None:
        self._busy = None
        self._then()
        if self._busy is None:
            self._next()

    def _sample(self, rows: list[Row]) -> None:
        ended: list[ScriptedSequence] = []
        for computed in self._scheduler.computed(rows):
            sequence = self._requests.get(computed.work.request_id)
            if sequence is not computed or sequence is None:
                continue  # its caller is gone: it is taken out before the next step
            sequence.sampled(*self._token(sequence), self._version)
            if sequence.finish_reason:
                ended.append(sequence)
            elif sequence.has_chunk(self._section.stream_every):
                self._inboxes[sequence.work.request_id].put_nowait(sequence.chunk())
        self._scheduler.retire(ended)
        for sequence in ended:
            self._hand_out(sequence)

    def _hand_out(self, sequence: ScriptedSequence) -> None:
        self._inboxes[sequence.work.request_id].put_nowait(sequence.chunk())


def _nothing() -> None:
    pass


def _run(command: Callable[[], Any], done: "asyncio.Future[Any]") -> None:
    try:
        result = command()
    except EngineError as error:
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(result)
