"""The built-in engine: continuous batching in plain torch on one thread, for models that fit one device."""

import asyncio
import contextlib
import threading
from collections import abc, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import torch

from rubato.actors import plugins
from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import CAPABILITIES, Chunk, EngineDead, EngineError, EngineLoad, StepSeen, Work
from rubato.actors.engines.model import Weights
from rubato.actors.engines.runner import ModelRunner
from rubato.actors.engines.scheduler import WHOLE, RealTime, Row, Scheduler, Sequence, check, contents
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.weights import WeightsDigest
from rubato.runtime.observe.log import logger

STOP_S = 30.0
"""Longer than any step: `stop` waits so long for the step in progress."""

SAMPLE, SAMPLES = 8, 4096
"""One step in eight is timed by itself, and the newest 4,096 of these are kept: minutes of steps in some 100 kB."""

Say = Callable[[Any], None]
"""Called on the event loop with a chunk, or with the error that ended the engine."""

Command = tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any] | None]
"""A method of the loop, its arguments, and the future that gets what it returns, where one waits."""


class TorchEngine:
    """Lives on one event loop; the step loop is a thread of its own and hears of everything between two steps."""

    capabilities = frozenset(CAPABILITIES)
    runner_class: type[ModelRunner] = ModelRunner

    @property
    def loop_class(self) -> type["StepLoop"]:
        """Class of the thread that takes its steps."""
        return StepLoop

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self._folder = folder
        self._model = model
        self._section = section
        self._steps: StepLoop | None = None
        self._inboxes: dict[str, asyncio.Queue[Chunk | EngineDead]] = {}
        self._updates = 0
        self._update_cpu_s = 0.0
        self._cpu_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """A verb that only some configs ask for: these lie in a file of their own."""
        if name not in plugins.ENGINE_VERBS:
            raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
        return partial(plugins.load(plugins.TORCH_VERBS)[name], self)

    @property
    def holds(self) -> abc.Container[str]:
        """The names of weights that a request may ask for."""
        return WHOLE

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        runner = await asyncio.to_thread(self.runner_class.load, self._folder, self._model, self._section)
        self._steps = self.loop_class(runner, self._section, self._model.torch_threads, loop)
        self._steps.start()
        self._cpu_s = process_time()

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        steps = self.started()
        check(work, self._section.max_len, steps.runner.config.vocab_size, self._inboxes, self.holds)
        inbox = self._inboxes[work.request_id] = asyncio.Queue[Chunk | EngineDead]()
        over = False
        try:
            steps.runner.check_cache(work.request_id, work.cache)
            steps.post(steps.add, Sequence(work, self._section.max_len), inbox.put_nowait)
            while not over:
                heard = await inbox.get()
                if isinstance(heard, EngineDead):
                    over = True
                    raise heard
                over = bool(heard.finish_reason)
                yield heard
        finally:
            del self._inboxes[work.request_id]
            if not over:
                with contextlib.suppress(EngineDead):
                    steps.post(steps.discard, work.request_id)

    async def abort(self, request_id: str) -> None:
        await self.command(StepLoop.abort, request_id)

    async def suspend(self) -> None:
        await self.command(StepLoop.suspend)

    async def resume(self) -> None:
        await self.command(StepLoop.resume)

    async def update(self, version: int, weights: memoryview) -> float:
        """The new weights are laid out beside the old ones while steps go on; only the swap itself is a pause."""
        steps = self.started()
        prepared = await asyncio.to_thread(self.prepare, weights, f"weights version {version}")
        pause_s = await self.command(StepLoop.swap, version, prepared)
        await asyncio.to_thread(steps.free_replaced)
        return pause_s

    def prepare(self, *what: Any) -> Any:
        """`ModelRunner.prepare`, and note what it costs."""
        began = thread_time()
        prepared = self.started().runner.prepare(*what)
        self._updates += 1
        self._update_cpu_s += thread_time() - began
        return prepared

    async def digest(self, slices: abc.Sequence[Slice]) -> WeightsDigest | None:
        return await asyncio.to_thread(self.started().runner.digest, slices)

    def load(self) -> EngineLoad:
        steps = self.started()
        scheduler, timing = steps.scheduler, steps.timing
        return EngineLoad(
            self._section.num_slots, scheduler.num_waiting, scheduler.num_running, steps.version, steps.suspended,
            bool(steps.rest_level), timing.degree, steps.prompt_tokens_s, gauges=timing.gauges,
        )  # fmt: skip

    def observe(self, step: StepSeen) -> None:
        """It is called in the thread of the steps."""
        self.started().seen = step

    async def stop(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.stopping.set()
            with contextlib.suppress(EngineDead):
                steps.post(steps.stop)
            await asyncio.to_thread(steps.join, STOP_S)
            self._tell_times(steps.times)

    def _tell_times(self, times: "StepCpuTimes") -> None:
        """For calibration: what steps and weight updates cost, and what this process spent since the engine started."""
        logger("engines").info(
            "step_times", steps=times.num, rows=times.rows, tokens=times.tokens, cpu_s=times.cpu_s,
            updates=self._updates, update_cpu_s=self._update_cpu_s, process_cpu_s=process_time() - self._cpu_s,
            sampled=[(rows, tokens, round(cpu_s, 6)) for rows, tokens, cpu_s in times.sampled],
        )  # fmt: skip

    async def command(self, command: Callable[..., Any], *args: Any) -> Any:
        steps, reply = self.started(), asyncio.get_running_loop().create_future()
        steps.post(command, steps, *args, reply=reply)
        return await reply

    def started(self) -> "StepLoop":
        if self._steps is None:
            raise EngineDead("the engine is not running: start it first")
        return self._steps


@dataclass
class StepCpuTimes:
    """Costs of the steps so far in this thread, in CPU seconds; GPUs' time and further torch threads are not in it."""

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

    def __init__(self, runner: ModelRunner, section: EngineSection, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="rubato.engine", daemon=True)
        self.scheduler = Scheduler(section.num_slots, section.max_batch_tokens, prefix_cache=section.prefix_cache)
        self.version = 0
        self.suspended = False
        self.rest_level = 0
        """Above 0 its weights are in host memory, and nothing is computed."""
        self.prompt_tokens_s = 0.0
        self.dead: EngineDead | None = None
        """Why the loop ended, when it did not end by `stop`."""
        self.times = StepCpuTimes()
        self.seen: StepSeen | None = None
        self.timing: RealTime = plugins.timing(section)
        self.stopping = threading.Event()
        """Set: nothing is waited for any more that only modelled time asks for."""
        self.runner = runner
        self._recompute = section.kv_on_update == "recompute"
        self._stream_every = section.stream_every
        self._gather_s = section.gather_s
        self._num_threads = threads
        self._loop = loop
        self._sequences: dict[str, tuple[Sequence, Say]] = {}
        self._changed = threading.Condition()
        self._listening = False
        """The thread waits for the next command, whatever it is."""
        self._commands: list[Command] = []
        self._taken = deque[Command]()
        """Commands that this thread took, and has not begun."""
        self._outbox: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._ended = False
        self._replaced: Weights | None = None

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
        if sequence.cache is not None and sequence.cache.version != self.version_of(sequence):
            sequence.cache = None
        if sequence.finish_reason:
            self._hand_out(sequence)
        else:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Hand out what was sampled, as the last chunk."""
        if (sequence := self.sequence(request_id)) is not None:
            self.take_out(sequence, "aborted")

    def discard(self, request_id: str) -> None:
        """Drop a request whose caller is gone."""
        found = self._sequences.pop(request_id, None)
        if found is not None:
            self.scheduler.remove(found[0])

    def sequence(self, request_id: str) -> Sequence | None:
        """That of a request which runs or waits here."""
        found = self._sequences.get(request_id)
        return None if found is None else found[0]

    def take_out(self, sequence: Sequence, reason: str) -> None:
        """End it here, with what was sampled as its last chunk."""
        self.scheduler.remove(sequence)
        sequence.finish_reason = reason
        self._hand_out(sequence)

    def version_of(self, sequence: Sequence) -> int:
        """The version of the weights under which its next token is sampled."""
        return self.version

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False

    def swap(self, version: int, weights: Any) -> float:
        """Returns the pause in seconds. The old weights wait for `free_replaced`."""
        began, due_from = perf_counter(), self._loop.time()
        self._replaced = self.runner.weights
        self.runner.swap(weights)
        self.version = version
        if self._recompute:
            self.scheduler.forget_caches()
        if not self.rest_level:  # else they come to the device later, in place of its own
            self.last(self.timing.swap_s(), due_from)
        return perf_counter() - began

    def free_replaced(self) -> None:
        """From any other thread: giving 100 MB back takes longer than a step."""
        self._replaced = None

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
                    self._run_commands()
                    self._flush()
                    if not self._held and not self._ended:
                        self._step()
                        self._flush()
        except Exception as error:  # noqa: BLE001 - whatever fails a step ends the engine, and all callers hear it
            self._close(EngineDead(f"the engine's step failed: {type(error).__name__}: {error}"))
        self._flush()

    def _run_commands(self) -> None:
        with self._changed:
            idle = not self._has_work()
            self._listening = True
            while not self._commands and (self._held or idle):
                self.timing.idle()
                self._changed.wait()
            self._listening = False
            if idle and self._gather_s:
                # A command does not wake this wait: the first request waits for company, and commands with it.
                self._changed.wait(self._gather_s)
            self._taken.extend(self._commands)
            self._commands.clear()
        while self._taken:
            command, args, reply = self._taken.popleft()
            try:
                result = command(*args)
            except EngineError as error:
                self._reply(reply, error)
            except Exception:
                self._taken.appendleft((command, args, reply))  # for `_close`, which answers it
                raise
            else:
                self._reply(reply, result)

    @property
    def _held(self) -> bool:
        return self.suspended or bool(self.rest_level)

    def _has_work(self) -> bool:
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    def _step(self) -> None:
        began = thread_time()
        rows = self.scheduler.schedule()
        if not rows:
            return
        started = self._loop.time()
        for sequence, cache in self.scheduler.to_load():
            self.runner.put_cache(sequence, cache)
        rows, ids, logprobs = self.runner.step(rows)
        self.last(self.timing.step_s(rows), started)
        content, took_s = contents(rows), self._loop.time() - started
        if self.seen is not None:
            self.seen(*content, took_s)
        if content[0]:
            self.prompt_tokens_s = content[0] / max(took_s, 1e-6)
        ended: list[Sequence] = []
        for sequence, token, logprob in zip(self.scheduler.computed(rows), ids, logprobs, strict=True):
            sequence.sampled(token, logprob, self.version_of(sequence))
            if sequence.finish_reason:
                ended.append(sequence)
            elif sequence.has_chunk(self._stream_every):
                self._outbox.append((self._sequences[sequence.work.request_id][1], (sequence.chunk(),)))
        self.scheduler.retire(ended)
        for sequence in ended:
            self._hand_out(sequence)
        self.times.add(rows, thread_time() - began)

    def now(self) -> float:
        return self._loop.time()

    def last(self, duration_s: float, began: float) -> float:
        """Wait until what began at `began` has lasted `duration_s`, where that is to be waited for; returns the seconds since."""
        now = self._loop.time()
        if (due := self.timing.due(duration_s, began, now)) > now:
            self.stopping.wait(due - now)
        return self._loop.time() - began

    def _hand_out(self, sequence: Sequence) -> None:
        _, say = self._sequences.pop(sequence.work.request_id)
        self._outbox.append((say, (sequence.chunk(),)))

    def _reply(self, reply: asyncio.Future[Any] | None, result: Any) -> None:
        if reply is not None:
            self._outbox.append((_resolve, (reply, result)))

    def _close(self, dead: EngineDead | None) -> None:
        with self._changed:
            self._ended = True
            self.dead = dead
            commands = [*self._taken, *self._commands]
            self._taken.clear()
            self._commands.clear()
        error = dead or EngineDead("the engine was stopped")
        for command, args, reply in commands:
            self._reply(reply, error)
            if command == self.add:
                self._outbox.append((args[1], (error,)))
        self._outbox += [(say, (error,)) for _, say in self._sequences.values()]
        self._sequences.clear()

    def _flush(self) -> None:
        if not self._outbox:
            return
        outbox = self._outbox
        self._outbox = []
        try:
            self._loop.call_soon_threadsafe(_deliver, outbox)
        except RuntimeError:
            # The event loop is closed: no caller is left to generate for.
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
