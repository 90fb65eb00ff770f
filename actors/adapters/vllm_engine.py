"""vLLM where what is published is an adapter: its base model is loaded once and never touched, adapters are swapped in place."""

import asyncio
import importlib
import os
import shutil
import tempfile
from collections import abc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rubato.actors.adapters import shapes
from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.config import LoraSection, ModelSection
from rubato.actors.engines.engine import ADAPTERS, EngineDead, EngineError, Work
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_engine import VllmEngine
from rubato.actors.engines.vllm_launch import first_line
from rubato.actors.engines.vllm_weights import ImagePlace, check_tensors, handed_over
from rubato.actors.messages.weights import WeightsDigest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has kernels for."""

MOST = 4
"""Adapters of one step, where engine.vllm.max_loras does not say: vLLM keeps memory for so many."""

HELD = 64
"""Adapters that are held beside that of the run; vLLM reads those of a step again that it has no room for."""

RUN = "policy"
"""What vLLM calls the adapter of the run, which is "" here."""


class Named(NamedTuple):
    """The newest version of an adapter beside that of the run."""

    place: ExitStack
    path: str
    """Where it is, until `place` is closed."""
    lora: LoraSection


class AdaptedVllmEngine(VllmEngine):
    """Requests name an adapter, by a folder in peft's format whose file is a link to the memory with its newest version.

    Until a first version came the run's own adapter adds nothing: a request that begins under it is to go on under the next.
    """

    capabilities = VllmEngine.capabilities | {ADAPTERS}
    most_adapters = HELD

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection, *, lora: LoraSection) -> None:
        rank = next((each for each in RANKS if each >= lora.rank), RANKS[-1])
        ours = {"enable_lora": True, "max_lora_rank": rank, "max_loras": MOST, **section.vllm}
        super().__init__(folder, model, section.model_copy(update={"vllm": ours}))
        self._lora, self._max_rank = lora, rank
        self._base = ""
        self._root = Path()
        self._numbers: dict[str, int] = {}
        """vLLM's, of which none is used again."""
        self._last_number = 0
        self._versions: dict[str, int] = {}
        self._named: dict[str, Named] = {}

    async def start(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="rubato-adapters-"))
        self._base = await asyncio.to_thread(shapes.base_of, self._folder)
        try:
            await super().start()
            nothing = await asyncio.to_thread(self._nothing)
            self._newest_at = ImagePlace(self._newest.enter_context(handed_over(nothing)))
            await self._load(0, self._newest_at)
        except shapes.AdapterError as error:
            raise EngineError(str(error)) from error

    async def stop(self) -> None:
        await super().stop()
        for named in self._named.values():
            named.place.close()
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def update(self, version: int, weights: memoryview, adapter: str = "") -> float:
        """Requests wait only for an adapter of the run's own name: any other is there once this returns."""
        if not adapter:
            return await super().update(version, weights)
        self._started()
        source = f"version {version} of the adapter {adapter}"
        if adapter not in self._named and len(self._named) >= self.most_adapters:
            raise EngineError(f"{source}: the engine holds {len(self._named)} adapters already, and takes no more")
        lora = await asyncio.to_thread(self._checked_named, weights, source)
        with ExitStack() as stack:
            path = await asyncio.to_thread(stack.enter_context, handed_over(weights))
            async with self._boundary:
                self._started()
                began = asyncio.get_running_loop().time()
                if not self._resting:
                    await self._swap_named(adapter, path, lora)
                self._versions[adapter] = version
                for request in self._requests.values():
                    if request.sequence.work.adapter == adapter:
                        request.mark(version)
                if adapter in self._named:
                    self._named[adapter].place.close()
                self._named[adapter] = Named(stack.pop_all(), path, lora)
                if not self._suspended and not self._resting:
                    await self._llm.resume_generation()
                return asyncio.get_running_loop().time() - began

    async def drop(self, adapter: str) -> None:
        """Raises EngineError, and keeps it, while a request under it is under way; drops nothing where there is none of that name."""
        async with self._boundary:
            self._started()
            if any(request.sequence.work.adapter == adapter for request in self._requests.values()):
                raise EngineError(f"requests under the adapter {adapter} are under way")
            if adapter not in self._named:
                return
            if not self._resting:
                await self._llm.remove_lora(self._number(adapter))
            await asyncio.to_thread(shutil.rmtree, self._folder_of(adapter), ignore_errors=True)
            self._named.pop(adapter).place.close()
            del self._versions[adapter], self._numbers[adapter]

    async def _swap_named(self, adapter: str, path: str, lora: LoraSection) -> None:
        """Between two steps; a version that vLLM refuses leaves the one before in place."""
        if not self._suspended:
            await self._pause(self._llm)
        try:
            await self._put(adapter, path, lora)
            if self._section.kv_on_update == "recompute":
                await self._llm.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:  # vLLM raises what its many parts raise
            raise EngineDead(f"vLLM broke while it loaded the adapter {adapter}: {first_line(error)}") from error

    # -- what is swapped ----------------------------------------------------------------------------------------------

    @property
    def holds(self) -> abc.Container[str]:
        return {"", *self._versions}

    def version_of(self, work: Work) -> int:
        return self._versions[work.adapter] if work.adapter else super().version_of(work)

    def told_of(self, collector: Any) -> None:
        """vLLM's versions are of the base model, which stays."""
        return

    async def digest(self, slices: abc.Sequence[Slice]) -> WeightsDigest | None:
        """vLLM stacks the adapters of a layer; none is told."""
        return None

    @contextmanager
    def lend(self, weights: memoryview) -> Iterator[ImagePlace]:
        """A file that ends where the image does: peft's format is read whole."""
        with handed_over(weights) as path:
            yield ImagePlace(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        modules = shapes.target_modules(shapes.shapes_in(self._folder), self._lora.targets)
        return dict(shapes.adapter_shapes(modules, self._lora.rank))

    def checked(self, weights: memoryview, source: str) -> None:
        try:
            scaled = shapes.scaled_by(weights, source)
            shapes.require_base(shapes.told_of(weights), self._base, source)
        except shapes.AdapterError as error:
            raise EngineError(str(error)) from None
        if scaled != (self._lora.rank, self._lora.alpha):
            raise EngineError(f"{source} has rank {scaled.rank} and alpha {scaled.alpha:g}, other than train.lora says")
        super().checked(weights, source)

    def _checked_named(self, weights: memoryview, source: str) -> LoraSection:
        """How an adapter beside that of the run is made: of any targets, and a rank that vLLM has room for. Raises EngineError. Blocks."""
        try:
            scaled = shapes.scaled_by(weights, source)
            shapes.require_base(shapes.told_of(weights), self._base, source)
            if scaled.rank > self._max_rank:
                raise EngineError(f"{source} has rank {scaled.rank}; train.lora.rank={self._lora.rank} leaves room for {self._max_rank}")
            expected = shapes.shapes_of_image(weights, shapes.shapes_in(self._folder), scaled.rank, source)
        except shapes.AdapterError as error:
            raise EngineError(str(error)) from None
        check_tensors(expected, weights, source)
        targets = sorted({told[0].rpartition(".")[2] for name in expected if (told := shapes.module_of(name)) is not None})
        return self._lora.model_copy(update={"rank": scaled.rank, "alpha": scaled.alpha, "targets": tuple(targets)})

    async def bring(self, version: int, place: ImagePlace) -> None:
        """The run's own; a vLLM that was just started gets all others too."""
        held = await self._llm.list_loras()
        await self._put("", place.path, self._lora)
        for adapter, named in self._named.items():
            if self._number(adapter) not in held:
                await self._put(adapter, named.path, named.lora)

    def asked_with(self, work: Work) -> dict[str, Any]:
        return {"lora_request": self._request(work.adapter)}

    async def _put(self, adapter: str, path: str, lora: LoraSection) -> None:
        """Point the adapter's folder to `path`, and let vLLM read it anew."""
        await asyncio.to_thread(self._point, self._folder_of(adapter), path, lora)
        if not await self._llm.add_lora(self._request(adapter, load_inplace=True)):
            raise EngineError(f"it refused the adapter {adapter or RUN}")

    def _point(self, folder: Path, path: str, lora: LoraSection) -> None:
        folder.mkdir(exist_ok=True)
        (folder / shapes.ADAPTER_CONFIG).write_bytes(shapes.config_image(lora, self._folder))
        link, new = folder / shapes.WEIGHTS, folder / "new"
        new.unlink(missing_ok=True)
        new.symlink_to(path)
        os.replace(new, link)

    def _request(self, adapter: str, *, load_inplace: bool = False) -> Any:
        """By a name that no other had before: vLLM's caches of prompts go by it."""
        kind: Any = importlib.import_module("vllm.lora.request").LoRARequest
        number = self._number(adapter)
        return kind(f"{adapter or RUN}#{number}", number, str(self._folder_of(adapter)), load_inplace=load_inplace)

    def _number(self, adapter: str) -> int:
        if adapter not in self._numbers:
            self._last_number += 1
            self._numbers[adapter] = self._last_number
        return self._numbers[adapter]

    def _folder_of(self, adapter: str) -> Path:
        return self._root / str(self._number(adapter))

    def _nothing(self) -> memoryview:
        """An adapter that adds nothing."""
        torch: Any = importlib.import_module("torch")
        save: Any = importlib.import_module("safetensors.torch").save
        tensors = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        return memoryview(save(tensors, shapes.telling(shapes.Scaled(self._lora.rank, self._lora.alpha), self._base)))
