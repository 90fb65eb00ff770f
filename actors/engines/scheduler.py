"""Continuous batching: which requests have a slot of the KV cache, which of their tokens go into the next step, and what its results mean.

A request inside an engine is a Sequence: its tokens, and the number that draws each of them.
"""

import heapq
from collections import OrderedDict, abc, deque
from collections.abc import Container, Iterable, Mapping
from functools import reduce
from hashlib import blake2b
from itertools import takewhile
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rubato.actors.engines.engine import Cache, Chunk, EngineError, Work
from rubato.actors.messages.generation import Tokens, VersionSpan
from rubato.bus.message import pack_f32, pack_i32, unpack_i32

if TYPE_CHECKING:
    import numpy as np


class Sequence:
    """Prompt, resumed and sampled tokens in a row. Belongs to the step loop."""

    __slots__ = (
        "cache",
        "finish_reason",
        "key",
        "max_tokens",
        "num_cached",
        "sent",
        "session",
        "slot",
        "stop_ids",
        "temperature_top_p",
        "tokens",
        "unsent_ids",
        "unsent_logprobs",
        "unsent_versions",
        "work",
    )

    def __init__(self, work: Work, max_len: int) -> None:
        self.work = work._replace(cache=None)
        self.tokens = [*work.prompt, *unpack_i32(work.resumed.ids)]
        self.max_tokens = min(max_len, len(work.prompt) + work.sampling.max_new_tokens)
        self.stop_ids = frozenset(work.sampling.stop_token_ids)
        self.temperature_top_p = (work.sampling.temperature, work.sampling.top_p)
        self.key = key_of(work.sampling.seed, work.session or work.request_id)
        self.session = f"{work.adapter}\0{work.session}" if work.session else ""
        """Whose keys and values may be its own: those of another adapter never are."""
        self.slot = -1
        self.num_cached = 0
        """Tokens whose keys and values are in the slot."""
        self.cache = work.cache
        """What came with it, until that is in a slot or good for nothing any more."""
        self.sent: list[Tokens] = []
        """What was sampled here, chunk by chunk."""
        self.unsent_ids: list[int] = []
        self.unsent_logprobs: list[float] = []
        self.unsent_versions: list[tuple[int, int]] = []
        """(version, index of the first unsent token it sampled)"""
        self.finish_reason = ""
        if len(self.tokens) > len(work.prompt):
            self._finish_after(self.tokens[-1])
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def sampled(self, token: int, logprob: float, version: int) -> None:
        """Append one token; sets `finish_reason` when it is the last."""
        self.tokens.append(token)
        self.unsent_ids.append(token)
        self.unsent_logprobs.append(logprob)
        if not self.unsent_versions or self.unsent_versions[-1][0] != version:
            self.unsent_versions.append((version, len(self.unsent_ids) - 1))
        self._finish_after(token)

    def has_chunk(self, every: int) -> bool:
        """Whether a chunk is due: of so many tokens, or of the first one where that is wanted at once."""
        return len(self.unsent_ids) >= (1 if self.work.first_at_once and not self.sent else every)

    def chunk(self) -> Chunk:
        """What was sampled since the last chunk."""
        ends = [start for _, start in self.unsent_versions[1:]] + [len(self.unsent_ids)]
        spans = [VersionSpan(version, start, end) for (version, start), end in zip(self.unsent_versions, ends, strict=False)]
        tokens = Tokens(pack_i32(self.unsent_ids), pack_f32(self.unsent_logprobs), tuple(spans))
        self.unsent_ids = []
        self.unsent_logprobs = []
        self.unsent_versions = []
        if tokens.ids:
            self.sent.append(tokens)
        return Chunk(tokens, self.finish_reason)

    def moved(self, cache: Cache | None) -> Work:
        """The request as another engine goes on with it, after its last chunk was taken here."""
        return self.work._replace(resumed=reduce(add, self.sent, self.work.resumed), cache=cache)

    def _finish_after(self, token: int) -> None:
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


WHOLE = ("",)
"""What an engine holds that knows nothing of adapters."""


def check(work: Work, max_len: int, vocab_size: int, running: Container[str], adapters: Container[str] = WHOLE) -> None:
    """Raises EngineError when `work` could never run, or is `running`: better refused than failing a step that serves others too."""
    prompt, sampling = work.prompt, work.sampling
    if work.adapter not in adapters:
        raise EngineError(f"request {work.request_id} is for the adapter {work.adapter}, which this engine does not hold")
    if work.request_id in running:
        raise EngineError(f"request {work.request_id} runs already; a request id is used once at a time")
    if not prompt:
        raise EngineError(f"request {work.request_id} has an empty prompt")
    if len(prompt) >= max_len:
        raise EngineError(f"request {work.request_id}: a prompt of {len(prompt)} tokens leaves no room in engine.max_len={max_len}")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(f"request {work.request_id} has token ids outside the model's vocabulary of {vocab_size}")
    if not (sampling.temperature >= 0.0 and 0.0 < sampling.top_p <= 1.0):
        text = f"temperature {sampling.temperature} and top_p {sampling.top_p}"
        raise EngineError(f"request {work.request_id} asks for {text}: they must be at least 0, and in (0, 1]")


# -- the draw: a function of a request's seed and a token's position, and of nothing else ---------------------------------

Whole = TypeVar("Whole", "int", "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]")
"""One number, or a uint64 array of them: the same operations serve both."""

_MASK = (1 << 64) - 1


def key_of(seed: int, session: str) -> int:
    """64 bits that start a request's random sequence: members of a group share a prompt and seed, but not a session."""
    return int.from_bytes(blake2b(f"{seed}/{session}".encode(), digest_size=8).digest(), "little")


def bits(key: Whole, position: Whole) -> Whole:
    """64 bits for the token at absolute `position` (SplitMix64).

    They depend on nothing else, so a request that goes on elsewhere draws on as it would have here.
    """
    z: Any = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(key: Whole, position: Whole) -> "float | np.ndarray":
    """A number in [0, 1), a multiple of 2^-24 and so exact in float32."""
    return (bits(key, position) >> 40) * 2.0**-24


class Row(NamedTuple):
    """Tokens [start, end) of one sequence. One is sampled after them when they reach the sequence's end."""

    sequence: Sequence
    start: int
    end: int


def contents(rows: abc.Iterable[Row]) -> tuple[int, int, int]:
    """What a step computes: tokens of prompts, requests that it decodes for, tokens that these hold already."""
    prefill, batch, context = 0, 0, 0
    for _, start, end in rows:
        if end - start == 1:
            batch += 1
            context += start
        else:
            prefill += end - start
    return prefill, batch, context


class Scheduler:
    """First come, first served: a request waits for a slot, is prefilled in pieces that fit a step, then decodes token by token.

    Prefill and decode share a step of at most `max_batch_tokens` tokens; decode comes first, so no running request is starved.
    """

    def __init__(self, num_slots: int, max_batch_tokens: int, *, prefix_cache: bool = True) -> None:
        self._slots = SlotTable(num_slots, prefix_cache=prefix_cache)
        self._max_batch_tokens = max(max_batch_tokens, num_slots)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._to_load: list[Sequence] = []

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in slots, idle ones included."""
        return self._slots.num_idle_cached + sum(sequence.num_cached for sequence in self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is not finished."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its slot is free for others, or kept for its session."""
        if self._running.pop(sequence.work.request_id, None) is not None:
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def schedule(self) -> list[Row]:
        """The next step's rows; empty when nothing can run. Before it, `to_load` says whose caches go into their slots."""
        self._admit()
        left = self._max_batch_tokens
        rows: list[Row] = []
        prefilling: list[Sequence] = []
        for sequence in self._running.values():
            if len(sequence.tokens) - sequence.num_cached == 1:
                rows.append(Row(sequence, sequence.num_cached, sequence.num_cached + 1))
                left -= 1
            else:
                prefilling.append(sequence)
        for sequence in prefilling:
            if left <= 0:
                break
            end = min(len(sequence.tokens), sequence.num_cached + left)
            rows.append(Row(sequence, sequence.num_cached, end))
            left -= end - sequence.num_cached
        return rows

    def to_load(self) -> list[tuple[Sequence, Cache]]:
        """Sequences that got a slot in `schedule` and brought their keys and values, which the slot lacks."""
        loads: list[tuple[Sequence, Cache]] = []
        while self._to_load:
            sequence = self._to_load.pop()
            if sequence.cache is not None:
                loads.append((sequence, sequence.cache))
            sequence.cache = None
        return loads

    def computed(self, rows: abc.Sequence[Row]) -> list[Sequence]:
        """Note that the step cached `rows`; returns the sequences a token is sampled for, in the rows' order."""
        for sequence, _, end in rows:
            sequence.num_cached = end
        return [sequence for sequence, _, end in rows if end == len(sequence.tokens)]

    def retire(self, sequences: abc.Iterable[Sequence]) -> None:
        """Free the slots of sequences that finished."""
        for sequence in sequences:
            del self._running[sequence.work.request_id]
            self._release(sequence)

    def forget_caches(self) -> None:
        """The weights changed: idle histories are dropped, running sequences are computed again from their first token."""
        self._slots.drop_idle()
        for sequence in self._running.values():
            sequence.num_cached = 0
        for sequence in self._waiting:
            sequence.cache = None

    def forget_idle(self, begin: str) -> None:
        """Idle histories of sessions that begin so are dropped."""
        self._slots.drop_idle(begin)

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            found = self._slots.take(sequence.session, sequence.tokens)
            if found is None:
                return
            sequence.slot, sequence.num_cached = found
            self._running[sequence.work.request_id] = self._waiting.popleft()
            if sequence.cache is not None and sequence.num_cached < sequence.cache.num_tokens:
                sequence.num_cached = min(sequence.cache.num_tokens, len(sequence.tokens) - 1)
                self._to_load.append(sequence)
            else:
                sequence.cache = None

    def _release(self, sequence: Sequence) -> None:
        self._slots.give_back(sequence.slot, sequence.session, sequence.tokens[: sequence.num_cached])
        sequence.slot = -1


class SlotTable:
    """`num_slots` slots: free, busy, or idle with a session's tokens. Idle ones are reused, oldest first, when none is free."""

    def __init__(self, num_slots: int, *, prefix_cache: bool) -> None:
        self._free = list(range(num_slots))
        self._idle: OrderedDict[str, tuple[int, list[int]]] = OrderedDict()
        self._prefix_cache = prefix_cache

    @property
    def num_idle_cached(self) -> int:
        return sum(len(cached) for _, cached in self._idle.values())

    def take(self, session: str, tokens: abc.Sequence[int]) -> tuple[int, int] | None:
        """(slot, how many of `tokens` its cache already holds), or None when every slot is busy.

        At least the last token is left to compute: sampling needs its logits.
        """
        if session in self._idle:
            slot, cached = self._idle.pop(session)
            return slot, min(_common(cached, tokens), len(tokens) - 1)
        if self._free:
            # Lowest first: busy slots stay close together, and attention reads them as one range.
            return heapq.heappop(self._free), 0
        if self._idle:
            return self._idle.popitem(last=False)[1][0], 0
        return None

    def give_back(self, slot: int, session: str, cached: list[int]) -> None:
        """The request ended; `cached` is what the slot holds, and is kept for the session's next turn if it can be."""
        if not (self._prefix_cache and session and cached):
            heapq.heappush(self._free, slot)
            return
        if session in self._idle:
            heapq.heappush(self._free, self._idle.pop(session)[0])
        self._idle[session] = (slot, cached)

    def drop_idle(self, begin: str = "") -> None:
        """Forget the kept histories of sessions that begin so, as when the weights that made them are replaced."""
        for session in [each for each in self._idle if each.startswith(begin)]:
            heapq.heappush(self._free, self._idle.pop(session)[0])


def _common(cached: list[int], tokens: abc.Sequence[int]) -> int:
    """Length of the longest common prefix; the usual case, that `tokens` extend `cached`, is one comparison."""
    if list(tokens[: len(cached)]) == cached:
        return len(cached)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(cached, tokens, strict=False)))


class RealTime:
    """Durations are in seconds, and 0 stands for the time that the work takes anyway. Derive another timing from it."""

    @property
    def degree(self) -> int:
        """GPUs that share each layer."""
        return 1

    @property
    def gauges(self) -> Mapping[str, float]:
        """Metrics of its own."""
        return MappingProxyType({})

    def step_s(self, rows: Iterable[Row]) -> float:
        """One step."""
        return 0.0

    def swap_s(self) -> float:
        """A weight swap."""
        return 0.0

    def kv_move_s(self, tokens: int) -> float:
        """The way of the KV of `tokens` to another engine."""
        return 0.0

    def sleep_s(self, tokens: int) -> float:
        """The way of weights and the KV of `tokens` to host memory, or back."""
        return 0.0

    def reconfigure(self, degree: int, tokens: int) -> float:
        """Last like `degree` GPUs from now on; returns what the change takes an engine that holds the KV of `tokens`.

        Raises EngineError, and changes nothing, for a degree that can't be.
        """
        if degree != 1:
            raise EngineError(f"degree={degree} needs engine.pace: without it this engine computes on one device")
        return 0.0

    def due(self, duration_s: float, began: float, now: float) -> float:
        """When something is over that began at `began`, is computed by `now`, and is to last `duration_s`."""
        return now

    def idle(self) -> None:
        """Nothing runs: what comes next begins when it does."""
