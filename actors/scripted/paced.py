"""The scripted engine at the pace of modelled hardware (`engine.pace`): its tokens, the torch engine's batching, a roofline's time.

Where an unpaced one has a latency per request, this one has steps: a batch is put together as the torch engine does it, lasts what
the hardware would take for it, and then all its tokens are there. Steps are timers of the event loop, so that nobody waits in it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

from actors.config import ModelSection
from actors.engines.engine import Chunk, Engine, Load, Work
from actors.engines.hf_files import read_header
from actors.engines.pace import Pace
from actors.engines.scheduler import Row, Scheduler
from actors.engines.section import EngineSection, PaceSection
from actors.scripted.engine import ScriptedEngine, Slot

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
        self._pace = Pace(pace)
        self._scheduler = Scheduler(section.num_slots, section.max_batch_tokens, prefix_cache=section.prefix_cache)
        self._inboxes: dict[str, asyncio.Queue[Chunk]] = {}
        self._commands: deque[Command] = deque()
        self._busy: asyncio.TimerHandle | None = None
        """Ends the step or the swap in progress."""
        self._then: Command = _nothing
        """What that is to do."""

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        slot = self._accept(work)
        inbox = self._inboxes[work.request_id] = asyncio.Queue[Chunk]()
        over = False
        try:
            self._between_steps(partial(self._add, slot))
            while not over:
                chunk = await inbox.get()
                over = bool(chunk.finish_reason)
                yield chunk
        finally:
            del self._inboxes[work.request_id], self._requests[work.request_id]
            if not over:
                self._between_steps(partial(self._scheduler.remove, slot.sequence))

    async def abort(self, request_id: str) -> None:
        await self._done(partial(self._abort, request_id))

    async def suspend(self) -> None:
        await self._done(partial(setattr, self, "_suspended", True))

    async def resume(self) -> None:
        await self._done(partial(setattr, self, "_suspended", False))

    async def update(self, version: int, weights: memoryview) -> float:
        read_header(weights, f"weights version {version}")
        swap_s, swapped = self._pace.swap_s(), asyncio.get_running_loop().create_future()
        self._between_steps(partial(self._last, swap_s, partial(self._swap, version, swapped)))
        await swapped
        return swap_s

    def load(self) -> Load:
        running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
        pace = self._pace
        return Load(self._section.num_slots, waiting, running, self._version, self._suspended, pace.num, pace.outlasted)

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

    async def _done(self, command: Command) -> None:
        done = asyncio.get_running_loop().create_future()
        self._between_steps(partial(_run, command, done))
        await done

    def _add(self, slot: Slot) -> None:
        if slot.sequence.finish_reason:
            self._hand_out(slot)
        else:
            self._scheduler.add(slot.sequence)

    def _abort(self, request_id: str) -> None:
        slot = self._requests.get(request_id)
        if slot is not None and not slot.sequence.finish_reason:
            self._scheduler.remove(slot.sequence)
            slot.sequence.finish_reason = "aborted"
            self._hand_out(slot)

    def _swap(self, version: int, swapped: "asyncio.Future[None]") -> None:
        self._version = version
        if self._section.kv_on_update == "recompute":
            self._scheduler.forget_caches()
        _resolve(swapped)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Run what waits for the end of a step, then begin the next one, if there is any to be done."""
        while self._commands and self._busy is None:
            self._commands.popleft()()
        if self._busy is not None:
            return
        rows = self._scheduler.schedule() if self._alive and not self._suspended else []
        if rows:
            self._last(self._pace.step_s(rows), partial(self._sample, rows))
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
        ended: list[Slot] = []
        for sequence in self._scheduler.computed(rows):
            slot = self._requests.get(sequence.work.request_id)
            if slot is None or slot.sequence is not sequence:
                continue  # nobody listens any more: it is taken out before the next step
            sequence.sampled(*self._token(slot), self._version)
            if sequence.finish_reason:
                ended.append(slot)
            elif len(sequence.unsent_ids) >= self._section.stream_every:
                self._inboxes[sequence.work.request_id].put_nowait(sequence.chunk())
        self._scheduler.retire(slot.sequence for slot in ended)
        for slot in ended:
            self._hand_out(slot)

    def _hand_out(self, slot: Slot) -> None:
        self._inboxes[slot.sequence.work.request_id].put_nowait(slot.sequence.chunk())


def _nothing() -> None:
    pass


def _run(command: Command, done: "asyncio.Future[None]") -> None:
    command()
    _resolve(done)


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)
