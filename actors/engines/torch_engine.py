"""The built-in engine: continuous batching in plain torch on one thread, for models that fit one device."""

import asyncio
import contextlib
import threading
from collections import abc, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.config import ModelSection
from actors.engines.engine import Chunk, EngineDead, EngineError, Load, Work
from actors.engines.hf_files import ModelConfig, folder_images, read_config
from actors.engines.model import AttentionShape, KVCache, Weights, arrange, build, forward, fuse, rotations, tensors_of
from actors.engines.pace import Pace
from actors.engines.scheduler import Row, Scheduler, Sequence, check, uniform
from actors.engines.section import EngineSection
from actors.model_folder import pick_device
from runtime.observe.log import logger

_LARGEST = 1 - 2.0**-23
"""Times any total, this is less than the total in float32: the largest number still names a token that has a probability."""


class ModelRunner:
    """Built and fed by different threads, one at a time; `step` and `weights` belong to the step loop once it runs."""

    def __init__(self, config: ModelConfig, weights: Weights, section: EngineSection, shape: AttentionShape) -> None:
        self.config = config
        self.weights = weights
        self._shape = shape
        self._rotary = rotations(config.rope, config.head_dim, section.max_len, shape.device)
        self._cache = KVCache(config, section.num_slots, section.max_len, shape.device, shape.dtype)

    @classmethod
    def load(cls, folder: Path, model: ModelSection, section: EngineSection) -> "ModelRunner":
        """Read an HF model folder. Raises EngineError with one sentence when files are missing or do not fit."""
        torch.set_num_threads(model.torch_threads)
        config = read_config(folder)
        device = torch.device(pick_device(model.device, torch.cuda.device_count()))
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        tensors = {n: t for source, image in folder_images(folder) for n, t in tensors_of(image, source).items()}
        weights = fuse(config, tensors, str(folder), device, dtype)
        kv_width, folded = config.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
        shape = AttentionShape(section.max_len, kv_width, folded, model.torch_threads, device, dtype)
        return cls(config, weights, section, shape)

    def prepare(self, image: memoryview, source: str) -> Weights:
        """New weights beside the old ones: from any thread, while steps go on. Raises EngineError when they do not fit."""
        return fuse(self.config, tensors_of(image, source), source, self._shape.device, self._shape.dtype)

    def step(self, rows: list[Row]) -> tuple[list[Row], list[int], list[float]]:
        """Compute `rows`; returns them as packed, and a token id and log-probability per row that reached its end."""
        rows = arrange(rows)
        batch = build(rows, self._shape)
        ends = [row.sequence for row in rows if row.end == len(row.sequence.tokens)]
        logits = forward(self.config, self.weights, self._rotary, self._cache, batch)
        if not ends:
            return rows, [], []
        return rows, *sample(logits, draws_of(ends))


def draws_of(sequences: abc.Sequence[Sequence]) -> np.ndarray:
    """[R, 3] float32, how each row's next token is drawn: temperature (0 is greedy), top_p, and the number that picks it."""
    keys = np.array([sequence.key for sequence in sequences], np.uint64)
    positions = np.array([len(sequence.tokens) for sequence in sequences], np.uint64)
    draws = np.empty((len(sequences), 3), np.float32)
    draws[:, :2] = [sequence.temperature_top_p for sequence in sequences]
    draws[:, 2] = uniform(keys, positions)
    return draws


def sample(logits_RV: Tensor, draws_R3: np.ndarray) -> tuple[list[int], list[float]]:
    """Token id and log-probability per row of float32 `logits_RV`, drawn as `draws_of` says.

    Log-probabilities are of the distribution that was drawn from: at the row's temperature, and over what its top_p keeps. A greedy
    row has them at temperature 1, over the whole vocabulary.
    """
    greedy = draws_R3[:, 0] == 0.0
    temperature, top_p, number = torch.from_numpy(draws_R3).to(logits_RV.device).split(1, -1)
    if not np.isin(draws_R3[:, 0], (0.0, 1.0)).all():
        logits_RV = logits_RV / temperature.masked_fill(temperature == 0.0, 1.0)
    logprobs_RV = logits_RV.log_softmax(-1)
    if greedy.all():
        chosen = logits_RV.argmax(-1, keepdim=True)
    else:
        if (draws_R3[~greedy, 1] < 1.0).any():
            logprobs_RV = _nucleus(logprobs_RV, top_p.masked_fill(temperature == 0.0, 1.0))
        chosen = _drawn(logprobs_RV.exp(), number)
        if greedy.any():
            rows = torch.from_numpy(greedy).to(logits_RV.device).unsqueeze(-1)
            chosen = torch.where(rows, logits_RV.argmax(-1, keepdim=True), chosen)
    return chosen.squeeze(-1).tolist(), logprobs_RV.gather(-1, chosen).squeeze(-1).tolist()


def _drawn(probs_RV: Tensor, number_R1: Tensor) -> Tensor:
    """[R, 1] the first token whose cumulative probability exceeds `number` of the total: never one of probability 0."""
    cumulative = probs_RV.cumsum(-1)
    return torch.searchsorted(cumulative, number_R1.clamp(max=_LARGEST) * cumulative[:, -1:], right=True)


def _nucleus(logprobs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Log-probabilities within the smallest set of most probable tokens that reaches top_p, -inf outside; rows with top_p 1 stay."""
    ordered, order = logprobs_RV.exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_p_R1
    outside[:, 0] = False
    cut = logprobs_RV.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), -torch.inf)
    return torch.where(top_p_R1 < 1.0, cut.log_softmax(-1), logprobs_RV)


STOP_S = 30.0
"""Longer than any step: `stop` waits so long for the step in progress."""

SAMPLE, SAMPLES = 8, 4096
"""One step in eight is timed by itself, and the newest 4,096 of these are kept: minutes of steps in some 100 kB."""

Say = Callable[[Any], None]
"""Called on the event loop with a chunk, or with the error that ended the engine."""


class TorchEngine:
    """Lives on one event loop; the step loop is a thread of its own and hears of everything between two steps."""

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self._folder = folder
        self._model = model
        self._section = section
        self._steps: StepLoop | None = None
        self._inboxes: dict[str, asyncio.Queue[Chunk | EngineDead]] = {}
        self._updates = 0
        self._update_cpu_s = 0.0
        self._cpu_s = 0.0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        runner = await asyncio.to_thread(ModelRunner.load, self._folder, self._model, self._section)
        self._steps = StepLoop(runner, self._section, self._model.torch_threads, loop)
        self._steps.start()
        self._cpu_s = process_time()

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        steps = self._started()
        check(work, self._section.max_len, steps.runner.config.vocab_size, self._inboxes)
        inbox = self._inboxes[work.request_id] = asyncio.Queue[Chunk | EngineDead]()
        over = False
        try:
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
        await self._command(StepLoop.abort, request_id)

    async def suspend(self) -> None:
        await self._command(StepLoop.suspend)

    async def resume(self) -> None:
        await self._command(StepLoop.resume)

    async def update(self, version: int, weights: memoryview) -> float:
        """The new weights are laid out beside the old ones while steps go on; only the swap itself is a pause."""
        prepared = await asyncio.to_thread(self._prepare, self._started().runner, weights, version)
        return await self._command(StepLoop.swap, version, prepared)

    def _prepare(self, runner: ModelRunner, weights: memoryview, version: int) -> Weights:
        began = thread_time()
        prepared = runner.prepare(weights, f"weights version {version}")
        self._updates += 1
        self._update_cpu_s += thread_time() - began
        return prepared

    def load(self) -> Load:
        steps = self._started()
        waiting, running = steps.scheduler.num_waiting, steps.scheduler.num_running
        paced, outlasted = (steps.pace.num, steps.pace.outlasted) if steps.pace is not None else (0, 0)
        return Load(self._section.num_slots, waiting, running, steps.version, steps.suspended, paced, outlasted)

    async def stop(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.stopping.set()
            with contextlib.suppress(EngineDead):
                steps.post(steps.stop)
            await asyncio.to_thread(steps.join, STOP_S)
            self._tell_times(steps.times)

    def _tell_times(self, times: "StepTimes") -> None:
        """For calibration: what steps and weight updates cost, and what this process spent since the engine started."""
        logger("engines").info(
            "step_times", steps=times.num, rows=times.rows, tokens=times.tokens, cpu_s=times.cpu_s,
            updates=self._updates, update_cpu_s=self._update_cpu_s, process_cpu_s=process_time() - self._cpu_s,
            sampled=[(rows, tokens, round(cpu_s, 6)) for rows, tokens, cpu_s in times.sampled],
        )  # fmt: skip

    async def _command(self, command: Callable[..., Any], *args: Any) -> Any:
        steps, reply = self._started(), asyncio.get_running_loop().create_future()
        steps.post(command, steps, *args, reply=reply)
        return await reply

    def _started(self) -> "StepLoop":
        if self._steps is None:
            raise EngineDead("the engine is not running: start it first")
        return self._steps


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
        self.pace = None if section.pace is None else Pace(section.pace)
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
        self.runner.weights = weights
        self.version = version
        if self._recompute:
            self.scheduler.forget_caches()
        if self.pace is not None:
            self._last(self.pace, self.pace.swap_s(), began)
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
                    self._run_commands()
                    self._flush()
                    if not self.suspended and not self._ended:
                        self._step()
                        self._flush()
        except Exception as error:  # noqa: BLE001 - whatever fails a step ends the engine, and everybody hears it
            self._close(EngineDead(f"the engine's step failed: {type(error).__name__}: {error}"))
        self._flush()

    def _run_commands(self) -> None:
        with self._changed:
            idle = not self._has_work()
            self._listening = True
            while not self._commands and (self.suspended or idle):
                if self.pace is not None:
                    self.pace.idle()
                self._changed.wait()
            self._listening = False
            if idle and self._gather_s:
                # Nobody is notified of a command now: the first request waits for company, and commands with it.
                self._changed.wait(self._gather_s)
            commands = self._commands
            self._commands = []
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
        started = self._loop.time()
        rows, ids, logprobs = self.runner.step(rows)
        if self.pace is not None:
            self._last(self.pace, self.pace.step_s(rows), started)
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

    def _last(self, pace: Pace, duration_s: float, began: float) -> None:
        """Wait until what began at `began` has lasted `duration_s`."""
        due = pace.due(duration_s, began, self._loop.time())
        self.stopping.wait(max(0.0, due - self._loop.time()))

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
            commands = self._commands
            self._commands = []
        error = dead or EngineDead("the engine was stopped")
        for _, _, reply in commands:
            self._reply(reply, error)
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
