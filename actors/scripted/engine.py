"""An engine without a model: tokens and log-probs are a function of seed, prompt and version, latencies are loop time. For tests and
simulation."""

import asyncio
from collections import abc, deque
from collections.abc import AsyncGenerator
from pathlib import Path
from zlib import crc32

from rubato.actors.checkpoints.hf_files import read_header
from rubato.actors.checkpoints.model_folder import Slice, vocab_size_of
from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import CAPABILITIES, Cache, Chunk, EngineDead, EngineError, EngineLoad, Work, check_level
from rubato.actors.engines.scheduler import RealTime, Sequence, bits, check, key_of
from rubato.actors.engines.section import EngineSection
from rubato.actors.messages.weights import WeightsDigest
from rubato.bus.message import pack_i32


class ScriptedSequence(Sequence):
    """A request, and what wakes it."""

    def __init__(self, work: Work, max_len: int) -> None:
        super().__init__(work, max_len)
        seed = 0 if work.sampling.temperature == 0.0 else self.key
        self.draws = key_of(seed, str(crc32(repr(work.prompt).encode())))
        """What its tokens are drawn by."""
        self.changed = asyncio.Event()
        """Set when it got a sequence, was aborted, or the engine was resumed or stopped."""
        self.runs = False
        self.prefilled = False
        self.last: Chunk | None = None
        """Of one that was exported, with what was sampled before."""


class ScriptedEngine:
    """Keeps the whole contract, slots and first-come order included. Every request runs in the task that iterates it.

    A cache is the ids of the tokens that it stands for, so that one which belongs to another request is refused.
    """

    capabilities = frozenset(CAPABILITIES)

    def __init__(self, folder: Path, model: ModelSection, section: EngineSection) -> None:
        self._folder = folder
        self._section = section
        self._script = section.scripted
        self._vocab_size = section.scripted.vocab_size
        self._requests: dict[str, ScriptedSequence] = {}
        self._waiting: deque[ScriptedSequence] = deque()
        self._free = section.num_slots
        self._version = 0
        self._suspended = False
        self._asleep = False
        self._alive = False
        self._updating = asyncio.Lock()

    async def start(self) -> None:
        self._vocab_size = vocab_size_of(self._folder) or self._vocab_size
        self._alive = True

    async def generate(self, work: Work) -> AsyncGenerator[Chunk, None]:
        sequence = self._accept(work)
        self._waiting.append(sequence)
        self._admit()
        try:
            await self._pass(sequence, 0.0 if self._is_cached(sequence) else self._script.prefill_s)
            sequence.prefilled = True
            while not sequence.finish_reason:
                await self._pass(sequence, self._script.token_s)
                if not sequence.finish_reason:
                    sequence.sampled(*self._token(sequence), self._version)
                    if not sequence.finish_reason:
                        yield sequence.chunk()
            yield sequence.last or sequence.chunk()
        finally:
            self._leave(sequence)

    async def abort(self, request_id: str) -> None:
        sequence = self._requests.get(request_id)
        if sequence is not None and not sequence.finish_reason:
            sequence.finish_reason = "aborted"
            sequence.changed.set()

    async def export(self, request_id: str, *, with_cache: bool = False) -> Work:
        sequence = self._exported(request_id)
        sequence.finish_reason = "exported"
        sequence.last = sequence.chunk()
        sequence.changed.set()
        cached = with_cache and sequence.prefilled
        return sequence.moved(self._cache_of(sequence, len(sequence.tokens) - 1) if cached else None)

    async def sleep(self, level: int = 1) -> float:
        """There is nothing to move: it takes no time."""
        check_level(level)
        self._asleep = True
        return 0.0

    async def wake(self) -> float:
        self._asleep = False
        self._look()
        return 0.0

    async def reconfigure(self, degree: int) -> float:
        return RealTime().reconfigure(degree, 0)

    async def suspend(self) -> None:
        self._suspended = True

    async def resume(self) -> None:
        self._suspended = False
        self._look()

    async def update(self, version: int, weights: memoryview) -> float:
        read_header(weights, f"weights version {version}")
        async with self._updating:
            await asyncio.sleep(self._script.update_s)
            self._version = version
        return self._script.update_s

    async def digest(self, slices: abc.Sequence[Slice]) -> WeightsDigest | None:
        """There are no tensors."""
        return None

    def load(self) -> EngineLoad:
        running = sum(sequence.runs for sequence in self._requests.values())
        waiting = len(self._requests) - running
        return EngineLoad(self._section.num_slots, waiting, running, self._version, self._suspended, asleep=self._asleep)

    async def stop(self) -> None:
        self._alive = False
        for request_id in list(self._requests):
            await self.abort(request_id)

    def _accept(self, work: Work) -> ScriptedSequence:
        """Raises EngineError for what can never run."""
        if not self._alive:
            raise EngineDead("the engine is not running: start it first")
        check(work, self._section.max_len, self._vocab_size, self._requests)
        if work.sampling.top_p < 1.0:
            raise EngineError(
                f"request {work.request_id} asks for top_p {work.sampling.top_p}, which the scripted engine has not: "
                "set top_p=1, or engine.kind=torch"
            )
        sequence = ScriptedSequence(work, self._section.max_len)
        cache = sequence.cache
        if cache is not None and cache != self._cache_of(sequence, cache.num_tokens)._replace(version=cache.version):
            raise EngineError(f"request {work.request_id} brought a cache of other tokens than its own")
        self._requests[work.request_id] = sequence
        return sequence

    def _exported(self, request_id: str) -> ScriptedSequence:
        """Raises EngineError where it has nothing to export."""
        sequence = self._requests.get(request_id)
        if sequence is None or sequence.finish_reason:
            raise EngineError(f"request {request_id} does not run here: there is nothing to export")
        return sequence

    def _cache_of(self, sequence: Sequence, num_tokens: int) -> Cache:
        """Of its first tokens."""
        size_bytes = self._script.kv_bytes_per_token
        data = pack_i32(sequence.tokens[:num_tokens]).ljust(num_tokens * size_bytes, b"\0")
        return Cache(self._version, (1, 1, num_tokens, size_bytes // 4), "int32", memoryview(data))

    def _is_cached(self, sequence: Sequence) -> bool:
        return sequence.cache is not None and sequence.cache.version == self._version

    @property
    def _held(self) -> bool:
        return self._suspended or self._asleep

    def _look(self) -> None:
        """Wake all that wait, to look again."""
        for sequence in self._requests.values():
            sequence.changed.set()

    def _admit(self) -> None:
        while self._free and self._waiting:
            sequence = self._waiting.popleft()
            sequence.runs = True
            self._free -= 1
            sequence.changed.set()

    def _leave(self, sequence: ScriptedSequence) -> None:
        del self._requests[sequence.work.request_id]
        if sequence.runs:
            self._free += 1
            self._admit()
        else:
            self._waiting.remove(sequence)

    async def _ready(self, sequence: ScriptedSequence) -> None:
        """Wait for a sequence, and while suspended or asleep."""
        while not sequence.finish_reason and (not sequence.runs or self._held):
            sequence.changed.clear()
            await sequence.changed.wait()

    async def _pass(self, sequence: ScriptedSequence, delay_s: float) -> None:
        """Spend `delay_s` in the slot; returns at once when the request is finished."""
        await self._ready(sequence)
        try:
            async with asyncio.timeout(delay_s):
                while not sequence.finish_reason:
                    sequence.changed.clear()
                    await sequence.changed.wait()
        except TimeoutError:
            await self._ready(sequence)

    def _token(self, sequence: ScriptedSequence) -> tuple[int, float]:
        number = bits(sequence.draws + self._version * 0x9E3779B1, len(sequence.tokens))
        stops = sorted(sequence.stop_ids)
        logprob = -(1 + (number >> 8) % 1024) / 256
        if stops and self._script.told_lengths:
            tokens, shown = sequence.tokens, len(sequence.work.prompt)
            if len(tokens) + 1 - shown >= tokens[0]:
                return stops[0], logprob
            token = number % (self._vocab_size - len(stops))
            return token + sum(stop <= token + place for place, stop in enumerate(stops)), logprob
        if stops and (number >> 20) % 1024 < self._script.stop_share * 1024:
            return stops[number % len(stops)], logprob
        return number % self._vocab_size, logprob
