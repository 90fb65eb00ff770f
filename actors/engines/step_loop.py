"""The thread that steps the model: commands between steps, and one wake-up of the event loop per step for all it has to say."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import torch

from actors.engines.engine import EngineDead, EngineError
from actors.engines.model_weights import Weights
from actors.engines.runner import ModelRunner
from actors.engines.scheduler import Row, Scheduler
from actors.engines.section import EngineSection
from actors.engines.sequence import Sequence

SAMPLE, SAMPLES = 8, 4096
"""One step in eight is timed by itself, and the newest 4,096 of these are kept: minutes of steps in some 100 kB."""

Say = Callable[[Any], None]
"""Called on the event loop with a chunk, or with the error that ended the engine."""


@dataclass
class StepTimes:
    """What the steps so far cost this thread, in CPU seconds; GPUs' time and further torch threads are not in it."""

    num: int = 0
    rows: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    sampled: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(rows, tokens, CPU seconds) of single steps."""

    def add(self, rows: list[Row], cpu_s: float) -> None:
        """One step computed `rows`."""
        tokens = sum(row.end - row.start for row in rows)
        self.num += 1
        self.rows += len(rows)
        self.tokens += tokens
        self.cpu_s += cpu_s
        if self.num % SAMPLE == 0:
            self.sampled.append((len(rows), tokens, cpu_s))


class StepLoop(threading.Thread):
    """Everything but `post` runs on this thread; an idle loop waits on a condition and costs nothing."""

    def __init__(
        self, runner: ModelRunner, section: EngineSection, threads: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(name="rubato.engine", daemon=True)
        self.scheduler = Scheduler(section.num_slots, section.max_batch_tokens, prefix_cache=section.prefix_cache)
        self.version = 0
        self.suspended = False
        self.dead: EngineDead | None = None
        """Why the loop ended, when it did not end by `stop`."""
        self.times = StepTimes()
        self._runner = runner
        self._recompute = section.kv_on_update == "recompute"
        self._stream_every = section.stream_every
        self._gather_s = section.gather_s
        self._num_threads = threads
        self._loop = loop
        self._sequences: dict[str, tuple[Sequence, Say]] = {}
        self._changed = threading.Condition()
        self._listening = False
        """The thread waits for the next command, whatever it is."""
        self._commands: list[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any] | None]] = []
        self._outbox: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._ended = False

    # -- from the event loop ------------------------------------------------------------------------------------

    def post(self, command: Callable[..., Any], *args: Any, reply: asyncio.Future[Any] | None = None) -> None:
        """Run `command` between two steps; `reply` gets what it returns or raises. Raises EngineDead after the end."""
        with self._changed:
            if self._ended:
                raise self.dead or EngineDead("the engine was stopped")
            self._commands.append((command, args, reply))
            if self._listening:
                self._changed.notify()

    # -- commands -----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, say: Say) -> None:
        self._sequences[sequence.work.request_id] = (sequence, say)
        if sequence.finish_reason:
            self._hand_out(sequence)
        else:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Hand out what was sampled, as the last chunk."""
        if request_id in self._sequences:
            sequence, _ = self._sequences[request_id]
            self.scheduler.remove(sequence)
            sequence.finish_reason = "aborted"
            self._hand_out(sequence)

    def discard(self, request_id: str) -> None:
        """Nobody listens any more."""
        found = self._sequences.pop(request_id, None)
        if found is not None:
            self.scheduler.remove(found[0])

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False

    def swap(self, version: int, weights: Weights) -> float:
        """Returns the pause in seconds."""
        began = self._loop.time()
        self._runner.weights = weights
        self.version = version
        if self._recompute:
            self.scheduler.forget_caches()
        return self._loop.time() - began

    def stop(self) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._close(None)

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self._ended:
                    self._obey()
                    self._flush()
                    if not self.suspended and not self._ended:
                        self._step()
                        self._flush()
        except Exception as error:  # noqa: BLE001 - whatever fails a step ends the engine, and everybody hears it
            self._close(EngineDead(f"the engine's step failed: {type(error).__name__}: {error}"))
        self._flush()

    def _obey(self) -> None:
        with self._changed:
            idle = not self._has_work()
            self._listening = True
            while not self._commands and (self.suspended or idle):
                self._changed.wait()
            self._listening = False
            if idle and self._gather_s:
                # Nobody is notified of a command now: the first request waits for company, and commands with it.
                self._changed.wait(self._gather_s)
            commands, self._commands = self._commands, []
        for command, args, reply in commands:
            try:
                result = command(*args)
            except EngineError as error:
                self._reply(reply, error)
            else:
                self._reply(reply, result)

    def _has_work(self) -> bool:
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    def _step(self) -> None:
        began = thread_time()
        rows = self.scheduler.schedule()
        if not rows:
            return
        rows, ids, logprobs = self._runner.step(rows)
        ended: list[Sequence] = []
        for sequence, token, logprob in zip(self.scheduler.computed(rows), ids, logprobs, strict=True):
            sequence.sampled(token, logprob, self.version)
            if sequence.finish_reason:
                ended.append(sequence)
            elif len(sequence.unsent_ids) >= self._stream_every:
                self._outbox.append((self._sequences[sequence.work.request_id][1], (sequence.chunk(),)))
        self.scheduler.retire(ended)
        for sequence in ended:
            self._hand_out(sequence)
        self.times.add(rows, thread_time() - began)

    def _hand_out(self, sequence: Sequence) -> None:
        _, say = self._sequences.pop(sequence.work.request_id)
        self._outbox.append((say, (sequence.chunk(),)))

    def _reply(self, reply: asyncio.Future[Any] | None, result: Any) -> None:
        if reply is not None:
            self._outbox.append((_resolve, (reply, result)))

    def _close(self, dead: EngineDead | None) -> None:
        with self._changed:
            self._ended, self.dead = True, dead
            commands, self._commands = self._commands, []
        error = dead or EngineDead("the engine was stopped")
        for _, _, reply in commands:
            self._reply(reply, error)
        self._outbox += [(say, (error,)) for _, say in self._sequences.values()]
        self._sequences.clear()

    def _flush(self) -> None:
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(_deliver, outbox)
        except RuntimeError:
            # The event loop is closed: nobody is left to generate for.
            self._ended = True


def _deliver(outbox: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    for say, args in outbox:
        say(*args)


def _resolve(reply: asyncio.Future[Any], result: Any) -> None:
    if reply.done():
        return
    if isinstance(result, Exception):
        reply.set_exception(result)
    else:
        reply.set_result(result)
