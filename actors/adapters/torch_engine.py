"""The built-in engine where what is published is an adapter: its model stays, and adapters over it are swapped."""

import asyncio
from collections import abc
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rubato.actors.adapters import shapes
from rubato.actors.adapters.low_rank import Stack, lay_out
from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import ADAPTERS, EngineError
from rubato.actors.engines.model import Linear, PackedBatch
from rubato.actors.engines.runner import ModelRunner
from rubato.actors.engines.scheduler import Row, Sequence
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.torch_engine import Say, StepLoop, TorchEngine

MOST = 64
"""Adapters that an engine holds beside that of the run; each makes every step a little wider."""


class AdapterRunner(ModelRunner):
    """Its weights are the base model's; what is swapped is the stack of adapters over it."""

    stack = Stack({})
    _base = ""

    @classmethod
    def load(cls, folder: Path, model: ModelSection, section: EngineSection) -> "AdapterRunner":
        runner = super().load(folder, model, section)
        assert isinstance(runner, AdapterRunner)
        runner._base = shapes.base_of(folder)
        return runner

    def prepare(self, image: memoryview, source: str, adapter: str = "") -> Stack:
        laid_out = lay_out(self.config, image, source, self._base, self._home, self._shape.dtype)
        return Stack({**self.stack.adapters, adapter: laid_out})

    def swap(self, weights: Stack) -> None:
        self.stack = weights.to(self._home)

    def move_to(self, device: Any, *, with_cache: bool) -> None:
        super().move_to(device, with_cache=with_cache)
        self.stack = self.stack.to(self._home)

    def stored(self, slices: abc.Sequence[Slice]) -> list[Tensor | None]:
        """What it does not hold adds nothing, as zeros would."""
        stack = self.stack
        found = [stack.stored(self.config, "", cut) for cut in slices]
        return [self._zeros(cut) if values is None else values for cut, values in zip(slices, found, strict=True)]

    def _zeros(self, cut: Slice) -> Tensor:
        return torch.zeros(cut.bottom - cut.top, cut.right - cut.left, dtype=self._shape.dtype, device=self._home)

    def linear_of(self, rows: list[Row], batch: PackedBatch) -> Linear:
        names = {row.sequence.work.adapter for row in rows}
        if len(names) == 1:
            return self.stack.of_one(*names)
        return self.stack.of_rows([row.sequence.work.adapter for row in rows for _ in range(row.end - row.start)], batch.last)


class AdapterLoop(StepLoop):
    """Each adapter has versions of its own."""

    runner: AdapterRunner

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._versions: dict[str, int] = {}

    def version_of(self, sequence: Sequence) -> int:
        adapter = sequence.work.adapter
        return self._versions[adapter] if adapter else self.version

    def take(self, version: int, stack: Stack, adapter: str) -> float:
        """Returns the pause in seconds."""
        if not adapter:
            return self.swap(version, stack)
        began = perf_counter()
        self.runner.swap(stack)
        self._versions[adapter] = version
        if self._recompute:
            self.scheduler.forget_caches()
        return perf_counter() - began

    def add(self, sequence: Sequence, say: Say) -> None:
        if sequence.work.adapter and sequence.work.adapter not in self._versions:
            sequence.finish_reason = "aborted"  # it was dropped since
        super().add(sequence, say)

    def leave(self, adapter: str, stack: Stack) -> None:
        """Compute with `stack`, which is without it. Raises EngineError while a request under it is under way."""
        if any(sequence.work.adapter == adapter for sequence, _ in self._sequences.values()):
            raise EngineError(f"requests under the adapter {adapter} are under way")
        self.scheduler.forget_idle(f"{adapter}\0")
        self.runner.swap(stack)
        self._versions.pop(adapter, None)


class AdaptedTorchEngine(TorchEngine):
    """`update` takes adapters, which it applies beside the model's own products: the model is never written."""

    capabilities = TorchEngine.capabilities | {ADAPTERS}
    runner_class = AdapterRunner
    most_adapters = MOST

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        super().__init__(folder, model, section)
        self._updating = asyncio.Lock()

    @property
    def loop_class(self) -> type[StepLoop]:
        return AdapterLoop

    @property
    def holds(self) -> abc.Container[str]:
        """The one of the run, which adds nothing before its first version came, and those that were given."""
        return {"", *self._stack.adapters}

    @property
    def _stack(self) -> Stack:
        runner = self.started().runner
        assert isinstance(runner, AdapterRunner)
        return runner.stack

    async def update(self, version: int, weights: memoryview, adapter: str = "") -> float:
        """One at a time: each is laid out beside those that are held."""
        source = f"version {version} of the adapter{adapter and f' {adapter}'}"
        async with self._updating:
            others = self._stack.adapters.keys() - {"", adapter}
            if adapter and len(others) >= self.most_adapters:
                raise EngineError(f"{source}: the engine holds {len(others)} adapters already, and takes no more")
            prepared = await asyncio.to_thread(self.prepare, weights, source, adapter)
            return await self.command(AdapterLoop.take, version, prepared, adapter)

    async def drop(self, adapter: str) -> None:
        """Raises EngineError, and keeps it, while a request under it is under way; drops nothing where there is none of that name."""
        async with self._updating:
            await self.command(AdapterLoop.leave, adapter, await asyncio.to_thread(self._stack.without, adapter))
