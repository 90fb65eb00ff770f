"""The built-in engine: continuous batching in plain torch on one thread, for models that fit one device."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from actors.config import ModelSection
from actors.engines.engine import Capabilities, Chunk, EngineDead, EngineError, Load, Work
from actors.engines.rate import Rate
from actors.engines.runner import ModelRunner
from actors.engines.section import EngineSection
from actors.engines.sequence import Sequence, check
from actors.engines.step_loop import StepLoop

STOP_S = 30.0
"""Longer than any step: `stop` waits so long for the step in progress."""


class TorchEngine:
    """Lives on one event loop; the step loop is a thread of its own and hears of everything between two steps."""

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self.capabilities = Capabilities(
            "torch",
            keeps_kv_on_update=section.kv_on_update == "keep",
            prefix_cache=section.prefix_cache,
        )
        self._folder, self._model, self._section = folder, model, section
        self._steps: StepLoop | None = None
        self._runner: ModelRunner | None = None
        self._inboxes: dict[str, asyncio.Queue[Chunk | EngineDead]] = {}
        self._rate = Rate()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        device, dtype, threads = self._model.device, self._model.dtype, self._model.torch_threads
        self._runner = await asyncio.to_thread(
            ModelRunner.load, self._folder, self._section, device=device, dtype=dtype, threads=threads
        )
        self._steps = StepLoop(self._runner, self._section, threads, loop)
        self._steps.start()

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
        prepared = await asyncio.to_thread(runner.prepare, weights, f"weights version {version}")
        return await self._command(steps.swap, version, prepared)

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

    async def _command(self, command: Callable[..., Any], *args: Any) -> Any:
        steps, _ = self._started()
        reply = asyncio.get_running_loop().create_future()
        steps.post(command, *args, reply=reply)
        return await reply

    def _started(self) -> tuple[StepLoop, ModelRunner]:
        if self._steps is None or self._runner is None:
            raise EngineDead("the engine is not running: start it first")
        return self._steps, self._runner
