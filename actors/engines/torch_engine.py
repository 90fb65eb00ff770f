"""The built-in engine: continuous batching in plain torch on one thread, for models that fit one device."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from actors.config import ModelSection
from actors.engines.engine import Chunk, EngineCapabilities, EngineDead, EngineError, Load, Work
from actors.engines.model_weights import Weights
from actors.engines.rate import Rate
from actors.engines.runner import ModelRunner
from actors.engines.section import EngineSection
from actors.engines.sequence import Sequence, check
from actors.engines.step_loop import StepLoop, StepTimes
from runtime.observe.log import logger

STOP_S = 30.0
"""Longer than any step: `stop` waits so long for the step in progress."""


class TorchEngine:
    """Lives on one event loop; the step loop is a thread of its own and hears of everything between two steps."""

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self.capabilities = EngineCapabilities(
            "torch",
            keeps_kv_on_update=section.kv_on_update == "keep",
            prefix_cache=section.prefix_cache,
        )
        self._folder, self._model, self._section = folder, model, section
        self._steps: StepLoop | None = None
        self._runner: ModelRunner | None = None
        self._inboxes: dict[str, asyncio.Queue[Chunk | EngineDead]] = {}
        self._rate = Rate()
        self._updates, self._update_cpu_s, self._cpu_s = 0, 0.0, 0.0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        device, dtype, threads = self._model.device, self._model.dtype, self._model.torch_threads
        self._runner = await asyncio.to_thread(
            ModelRunner.load, self._folder, self._section, device=device, dtype=dtype, threads=threads
        )
        self._steps = StepLoop(self._runner, self._section, threads, loop)
        self._steps.start()
        self._cpu_s = process_time()

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        steps, runner = self._started()
        check(work, self._section.max_len, runner.config.vocab_size)
        if work.request_id in self._inboxes:
            raise EngineError(f"request {work.request_id} runs already; a request id is used once at a time")
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
                self._rate.add(asyncio.get_running_loop().time(), len(heard.tokens.ids) // 4)
                yield heard
        finally:
            del self._inboxes[work.request_id]
            if not over:
                with contextlib.suppress(EngineDead):
                    steps.post(steps.discard, work.request_id)

    async def abort(self, request_id: str) -> None:
        steps, _ = self._started()
        await self._command(steps.abort, request_id)

    async def suspend(self) -> None:
        steps, _ = self._started()
        await self._command(steps.suspend)

    async def resume(self) -> None:
        steps, _ = self._started()
        await self._command(steps.resume)

    async def update(self, version: int, weights: memoryview) -> float:
        """The new weights are laid out beside the old ones while steps go on; only the swap itself is a pause."""
        steps, runner = self._started()
        prepared = await asyncio.to_thread(self._prepare, runner, weights, version)
        return await self._command(steps.swap, version, prepared)

    def _prepare(self, runner: ModelRunner, weights: memoryview, version: int) -> Weights:
        began = thread_time()
        prepared = runner.prepare(weights, f"weights version {version}")
        self._updates += 1
        self._update_cpu_s += thread_time() - began
        return prepared

    def load(self) -> Load:
        steps, _ = self._started()
        waiting, running = steps.scheduler.num_waiting, steps.scheduler.num_running
        speed = self._rate.per_second(asyncio.get_running_loop().time())
        return Load(self._section.num_slots, waiting, running, speed, steps.version, steps.suspended)

    async def stop(self) -> None:
        steps, self._steps, self._runner = self._steps, None, None
        if steps is not None:
            with contextlib.suppress(EngineDead):
                steps.post(steps.stop)
            await asyncio.to_thread(steps.join, STOP_S)
            self._tell_times(steps.times)

    def _tell_times(self, times: StepTimes) -> None:
        """For calibration: what steps and weight updates cost, and what this process spent since the engine started."""
        logger("engines").info(
            "step_times", steps=times.num, rows=times.rows, tokens=times.tokens, cpu_s=times.cpu_s,
            updates=self._updates, update_cpu_s=self._update_cpu_s, process_cpu_s=process_time() - self._cpu_s,
            sampled=[(rows, tokens, round(cpu_s, 6)) for rows, tokens, cpu_s in times.sampled],
        )  # fmt: skip

    async def _command(self, command: Callable[..., Any], *args: Any) -> Any:
        steps, _ = self._started()
        reply = asyncio.get_running_loop().create_future()
        steps.post(command, *args, reply=reply)
        return await reply

    def _started(self) -> tuple[StepLoop, ModelRunner]:
        if self._steps is None or self._runner is None:
            raise EngineDead("the engine is not running: start it first")
        return self._steps, self._runner
