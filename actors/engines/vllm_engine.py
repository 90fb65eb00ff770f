"""The production engine: vLLM's AsyncLLM behind the Engine seam, its model in processes of vLLM's own."""

import asyncio
import importlib
from collections import abc
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from rubato.actors.checkpoints.model_folder import Slice
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import (
    CACHE,
    EXPORT,
    RECONFIGURE,
    SLEEP,
    Chunk,
    EngineDead,
    EngineError,
    EngineLoad,
    Work,
    check_level,
    require,
)
from rubato.actors.engines.scheduler import WHOLE, Sequence, bits, check
from rubato.actors.engines.section import EngineSection
from rubato.actors.engines.vllm_launch import STOP_S, check_degree, end, first_line, launch, of_degree, prepare_environment
from rubato.actors.engines.vllm_weights import DIGESTS, ImagePlace, check_tensors, digest_in, lent, shapes_of, update_of
from rubato.actors.messages.weights import WeightsDigest
from rubato.runtime.observe.log import logger

PARTS = ("export", "stop", "start", "weights")
"""Of the end of one vLLM and the start of the next."""

UNNAMED = "default"
"""What vLLM calls the weights that it began with."""


class _Stream:
    """One request: what vLLM collects for it, and under which version each token was sampled."""

    def __init__(self, sequence: Sequence, version: int) -> None:
        self.sequence = sequence
        self.collector: Any = None
        """vLLM's RequestOutputCollector, once it was added."""
        self.num_taken = 0
        self.marks = [(0, version)]
        """(number of the first token, version), ascending."""
        self.aborted = False
        self.goes_on = False
        """Its vLLM let go of it, and another one takes it."""
        self.told = asyncio.Event()
        """Set where one that waits for a vLLM has to look again: there is one, or it was taken out."""
        self.export: asyncio.Future[Work] | None = None
        """Who waits for what was sampled, once vLLM let go of it."""

    def mark(self, version: int) -> None:
        """What was not sampled yet comes under `version`. Tokens that are still in the collector count as sampled."""
        output: Any = getattr(self.collector, "output", None)
        waiting = len(output.outputs[0].token_ids) if hasattr(output, "outputs") else 0
        self.marks.append((self.num_taken + waiting, version))

    def take(self, output: Any, told: abc.Sequence[tuple[str, int]] | None) -> None:
        """Add one of vLLM's outputs to the sequence. `told`: which versions vLLM counts from which token on, as far as it says so before the
        request is over; None where its versions are not those of these tokens.
        """
        completion = output.outputs[0]
        if told is not None and (spans := getattr(completion, "weight_versions", None)):
            told = [(span.version, span.start) for span in spans]
        if told:
            self.marks = [(start, 0 if label == UNNAMED else int(label)) for label, start in told]
        for token, candidates in zip(completion.token_ids, completion.logprobs or (), strict=True):
            while len(self.marks) > 1 and self.marks[1][0] <= self.num_taken:
                del self.marks[0]
            self.sequence.sampled(token, candidates[token].logprob, self.marks[0][1])
            self.num_taken += 1
        if output.finished and not self.sequence.finish_reason:
            if completion.finish_reason == "error":
                raise EngineError(f"request {self.sequence.work.request_id} failed inside vLLM; its log says why")
            if self.goes_on and not self.aborted:
                self.collector = None
            else:
                self.sequence.finish_reason = self.how_taken_out

    @property
    def how_taken_out(self) -> str:
        return "aborted" if self.export is None else "exported"

    def last_chunk(self) -> Chunk:
        """The chunk that ends it; who exports it hears of it."""
        chunk = self.sequence.chunk()
        if self.export is not None and not self.export.done():
            if self.sequence.finish_reason == "exported":
                self.export.set_result(self.sequence.moved(None))
            else:
                self.export.set_exception(_not_here(self.sequence.work.request_id))
        return chunk


def _by_part(parts: tuple[str, ...], times: list[float]) -> dict[str, float]:
    return {part: later - earlier for part, (earlier, later) in zip(parts, pairwise(times), strict=True)}


def _not_here(request_id: str) -> EngineError:
    return EngineError(f"request {request_id} does not run here: there is nothing to export")


class VllmEngine:
    """Lives on one event loop. Commands go to vLLM's engine-core process, which heeds them between two steps.

    A request that it exports is computed again elsewhere: vLLM gives no cache away. One that goes on here is drawn by a seed of its
    position, which gives other tokens than one run without a break. So does one that was under way when the degree changed or the engine
    slept: vLLM's processes end then, and others start later. For that the newest weights stay in host memory.
    """

    capabilities = frozenset({EXPORT, SLEEP, RECONFIGURE})

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self._folder = folder
        self._model = model
        self._section = section
        self._llm: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._vocab_size = 0
        self._heads = 0
        self._requests: dict[str, _Stream] = {}
        self._version = 0
        self._suspended = False
        self._asleep = False
        self._resting = False
        """There is no vLLM, and one will be started: the engine sleeps, or changes its degree."""
        self._newest = ExitStack()
        self._newest_at: ImagePlace | None = None
        """Where the weights of `_version` are; None for those of the folder."""
        self.switch_s: dict[str, float] = {}
        """What the last end and start of vLLM took, by part."""
        self._boundary = asyncio.Lock()
        """Held while a request is added or the weights change, so that each token's version is certain."""

    async def start(self) -> None:
        section, loop = self._section, asyncio.get_running_loop()
        prepare_environment(self._model.torch_threads, section.num_slots)
        self._shapes = await asyncio.to_thread(self.shapes)
        began = loop.time()
        self._llm = await asyncio.to_thread(launch, self._folder, self._model, section)
        self.switch_s = {"start": loop.time() - began}
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._heads = self._llm.model_config.hf_text_config.num_attention_heads

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        self._started()
        check(work, self._section.max_len, self._vocab_size, self._requests, self.holds)
        sequence = Sequence(work, self._section.max_len)
        if sequence.finish_reason:
            yield sequence.chunk()
            return
        request = self._requests[work.request_id] = _Stream(sequence, self.version_of(work))
        over = False
        try:
            await self._add(request)
            while not over:
                if request.collector is None:
                    sequence.finish_reason, over = request.how_taken_out, True
                else:
                    output = await self._next(request)
                    request.take(output, self.told_of(request.collector))
                    over = output.finished and bool(sequence.finish_reason)
                yield request.last_chunk() if over else sequence.chunk()
                if request.collector is None and not over:
                    await self._add(request)
        finally:
            del self._requests[work.request_id]
            request.last_chunk()
            if not over:
                await self._take_out(work.request_id)

    async def abort(self, request_id: str) -> None:
        self._started()
        request = self._requests.get(request_id)
        if request is not None:
            request.aborted = True
            request.told.set()
            await self._take_out(request_id)

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        if with_cache:
            require(self, CACHE)
        self._started()
        request = self._requests.get(request_id)
        if request is None or request.aborted:
            raise _not_here(request_id)
        request.aborted, request.export = True, asyncio.get_running_loop().create_future()
        request.told.set()
        await self._take_out(request_id)
        return await request.export

    async def suspend(self) -> None:
        async with self._boundary:
            self._started()
            if not self._suspended and not self._resting:
                await self._pause(self._llm)
            self._suspended = True

    async def resume(self) -> None:
        async with self._boundary:
            self._started()
            if self._suspended and not self._resting:
                await self._llm.resume_generation()
            self._suspended = False

    async def update(self, version: int, weights: memoryview) -> float:
        """The image is checked while vLLM goes on, and read where it lies; the pause is the reload itself, and stopping between two steps.

        While the engine sleeps it is kept: the next vLLM begins with it.
        """
        self._started()
        await asyncio.to_thread(self.checked, weights, f"weights version {version}")
        with ExitStack() as stack:
            place = await asyncio.to_thread(stack.enter_context, self.lend(weights))
            async with self._boundary:
                self._started()
                began = asyncio.get_running_loop().time()
                if not self._resting:
                    await self._swap(version, place)
                self._version = version
                for request in self._requests.values():
                    if not request.sequence.work.adapter:
                        request.mark(version)
                self._newest.close()
                self._newest, self._newest_at = stack.pop_all(), place
                if not self._suspended and not self._resting:
                    await self._llm.resume_generation()
                return asyncio.get_running_loop().time() - began

    async def digest(self, slices: abc.Sequence[Slice]) -> WeightsDigest | None:
        """By its layers, between two steps; None while it rests, and where several ranks share them out."""
        async with self._boundary:
            self._started()
            if self._resting:
                return None
            try:
                return digest_in(await self._llm.collective_rpc(DIGESTS, args=([list(cut) for cut in slices],)))
            except Exception as error:  # vLLM raises what its many parts raise
                raise self._failed("the digest of its weights", error) from error

    def load(self) -> EngineLoad:
        self._started()
        running = min(len(self._requests), self._section.num_slots)
        waiting = len(self._requests) - running
        restart_s = self.switch_s.get("stop", STOP_S) + self.switch_s.get("start", 0.0)
        return EngineLoad(
            self._section.num_slots, waiting, running, self._version, self._suspended,
            asleep=self._asleep, degree=self._section.degree, restart_s=restart_s,
        )  # fmt: skip

    async def stop(self) -> None:
        llm, self._llm, self._resting = self._llm, None, False
        for request in self._requests.values():
            request.aborted = True
            request.told.set()
        if llm is not None:
            await llm.abort(list(self._requests))
            await end(llm)
        self._newest.close()

    async def sleep(self, level: int = 1) -> float:
        """vLLM ends, whatever the level: it gives no cache away. The newest weights stay in host memory."""
        check_level(level)
        async with self._boundary:
            self._started()
            if self._asleep:
                return 0.0
            parts = await self._end()
            self._asleep = True
        return self._took("asleep", parts)

    async def wake(self) -> float:
        """vLLM starts with the newest weights. Raises EngineDead where it does not."""
        async with self._boundary:
            self._started()
            if not self._asleep:
                return 0.0
            parts = await self._begin()
            self._asleep = False
        return self._took("awake", parts)

    async def reconfigure(self, degree: int) -> float:
        """vLLM is started anew with other GPUs and the newest weights; requests keep what they sampled, and wait meanwhile.

        One that sleeps wakes with that degree. Raises EngineDead where the new one does not start.
        """
        self._started()
        check_degree(degree, self._heads)
        async with self._boundary:
            self._started()
            self._section = of_degree(self._section, degree)
            if self._asleep:
                return 0.0
            parts = await self._end() | await self._begin()
        return self._took("reconfigured", parts)

    # -- what is swapped ----------------------------------------------------------------------------------------------

    @property
    def holds(self) -> abc.Container[str]:
        """The names of weights that a request may ask for."""
        return WHOLE

    def version_of(self, work: Work) -> int:
        """Of the weights that it is sampled under."""
        return self._version

    def told_of(self, collector: Any) -> abc.Sequence[tuple[str, int]] | None:
        """What vLLM says so far of the versions of a request's tokens; None where it counts no versions of the weights that change here."""
        states: Any = getattr(getattr(self._llm, "output_processor", None), "request_states", {})
        state = states.get(getattr(collector, "request_id", None))
        return tuple(getattr(state, "weight_version_starts", ()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that an image has. Blocks."""
        return shapes_of(self._folder)

    def checked(self, weights: memoryview, source: str) -> None:
        """Raises EngineError, naming `source`, for what vLLM could not swap in. Blocks."""
        check_tensors(self._shapes, weights, source)

    def lend(self, weights: memoryview) -> AbstractContextManager[ImagePlace]:
        """Where vLLM finds `weights` while the block runs."""
        return lent(weights)

    async def bring(self, version: int, place: ImagePlace) -> None:
        """Let vLLM swap in what is there, by its weight transfer; it is paused."""
        library: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
        await self._llm.start_weight_update()
        await self._llm.update_weights(library.WeightTransferUpdateRequest(update_info=update_of([place], self._shapes)))
        await self._llm.finish_weight_update(str(version))

    def asked_with(self, work: Work) -> dict[str, Any]:
        """What vLLM's add_request is given besides."""
        return {}

    # -- vLLM -------------------------------------------------------------------------------------------------------

    async def _end(self) -> dict[str, float]:
        """Take every request out with all that it sampled, and end vLLM; what is not over goes on at the next one. Returns seconds by part."""
        old, loop = self._llm, asyncio.get_running_loop()
        times = [loop.time()]
        try:
            if not self._suspended:
                await self._pause(old)
            self._llm, self._resting = None, True
            for request in self._requests.values():
                request.goes_on = request.collector is not None
            await old.abort(list(self._requests))
            times.append(loop.time())
            await end(old)
        except Exception as error:  # vLLM raises what its many parts raise
            self._llm, self._resting = None, False
            raise EngineDead(f"vLLM broke as it was to end: {first_line(error)}") from error
        times.append(loop.time())
        return _by_part(PARTS[:2], times)

    async def _begin(self) -> dict[str, float]:
        """Start a vLLM with the newest weights, suspended where the one before was. Returns seconds by part."""
        loop, degree = asyncio.get_running_loop(), self._section.degree
        times = [loop.time()]
        try:
            new = await asyncio.to_thread(launch, self._folder, self._model, self._section)
            times.append(loop.time())
            if not self._resting:
                await end(new)
                raise EngineDead("it was stopped meanwhile")
            self._llm, self._resting = new, False
            if self._newest_at is not None:
                await self._load(self._version, self._newest_at)
            if self._suspended:
                await self._pause(new)
            times.append(loop.time())
        except EngineError as error:
            self._llm, self._resting = None, False
            raise EngineDead(f"the engine did not come back with degree={degree}: {error}") from error
        finally:
            for request in self._requests.values():
                request.told.set()
        return _by_part(PARTS[2:], times)

    def _took(self, what: str, parts: dict[str, float]) -> float:
        known = self.switch_s | parts
        self.switch_s = {part: known[part] for part in PARTS if part in known}
        told = {f"{part}_s": round(seconds, 3) for part, seconds in parts.items()}
        logger("engines").info(what, degree=self._section.degree, requests=len(self._requests), **told)
        return sum(parts.values())

    async def _take_out(self, request_id: str) -> None:
        if self._llm is not None and not self._llm.errored:
            await self._llm.abort(request_id)

    async def _add(self, request: _Stream) -> None:
        """Give vLLM the request, once there is one, unless it was taken out meanwhile."""
        while not request.aborted and not await self._taken(request):
            await request.told.wait()
        if request.aborted and request.collector is not None:
            await self._take_out(request.sequence.work.request_id)

    async def _taken(self, request: _Stream) -> bool:
        """False where there is no vLLM, and one will be started."""
        sequence, work = request.sequence, request.sequence.work
        async with self._boundary:
            if request.aborted:
                return True
            self._started()
            if self._resting:
                request.told.clear()
                return False
            version = self.version_of(work)
            request.marks, request.num_taken, request.goes_on = [(0, version)], 0, False
            try:
                prompt = {"type": "token", "prompt_token_ids": sequence.tokens.copy()}
                if self._section.kv_on_update == "keep":
                    # Blocks of requests that go on can't be forgotten, but only requests of the same salt share them.
                    prompt["cache_salt"] = str(version)
                request.collector = await self._llm.add_request(work.request_id, prompt, self._params(sequence), **self.asked_with(work))
            except Exception as error:  # vLLM raises what its many parts raise
                raise self._failed(f"request {work.request_id}", error) from error
        return True

    async def _next(self, request: _Stream) -> Any:
        try:
            return request.collector.get_nowait() or await request.collector.get()
        except Exception as error:  # vLLM raises what its many parts raise
            raise self._failed(f"request {request.sequence.work.request_id}", error) from error

    def _params(self, sequence: Sequence) -> Any:
        library: Any = importlib.import_module("vllm.sampling_params")
        sampling = sequence.work.sampling
        return library.SamplingParams(
            max_tokens=sequence.max_tokens - len(sequence.tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=bits(sequence.key, len(sequence.tokens)) >> 2,
            stop_token_ids=sorted(sequence.stop_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=library.RequestOutputKind.DELTA,
        )

    async def _pause(self, llm: Any) -> None:
        """Returns once no step runs and every token sampled before has reached its collector."""
        await llm.pause_generation(mode="keep", clear_cache=False)
        outputs = llm.engine_core.outputs_queue
        while not outputs.empty():  # noqa: ASYNC110 - vLLM's queue has nothing to wait on
            await asyncio.sleep(0)

    async def _swap(self, version: int, place: ImagePlace) -> None:
        """Between two steps; vLLM is paused then."""
        if not self._suspended:
            await self._pause(self._llm)
        try:
            await self._load(version, place)
        except EngineError as error:
            text = f"vLLM broke while it loaded weights version {version}, and can't go on: {error}"
            raise EngineDead(text) from error

    async def _load(self, version: int, place: ImagePlace) -> None:
        try:
            await self.bring(version, place)
            recompute = self._section.kv_on_update == "recompute"
            if recompute and not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("it refused to reset its prefix cache")
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(first_line(error)) from error

    def _failed(self, what: str, error: Exception) -> EngineError:
        if not self._resting and (self._llm is None or self._llm.errored):
            return EngineDead(f"{what}: the vLLM engine is not running any more ({first_line(error)})")
        return EngineError(f"{what} was refused by vLLM: {first_line(error)}")

    def _started(self) -> None:
        """Raises EngineDead where there is no vLLM, and none will be started."""
        if self._llm is None and not self._resting:
            raise EngineDead("the engine is not running: start it first")
        if self._llm is not None and self._llm.errored:
            raise EngineDead("the vLLM engine-core process ended; its log says why")
