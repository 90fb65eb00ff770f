"""One request inside an engine: its tokens, the number that draws each of them, and the packed form in which they travel."""

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from actors.engines.engine import Chunk, EngineError, Work
from actors.messages.generation import Tokens, VersionSpan
from bus.message import pack_f32, pack_i32, unpack_i32

if TYPE_CHECKING:
    import numpy as np


class Sequence:
    """Prompt, resumed and sampled tokens in a row. Belongs to whoever runs the step loop."""

    __slots__ = (
        "finish_reason",
        "key",
        "max_tokens",
        "num_cached",
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
        self.work = work
        self.session = work.session
        self.tokens = [*work.prompt, *unpack_i32(work.resumed.ids)]
        self.max_tokens = min(max_len, len(work.prompt) + work.sampling.max_new_tokens)
        self.stop_ids = frozenset(work.sampling.stop_token_ids)
        self.temperature_top_p = (work.sampling.temperature, work.sampling.top_p)
        self.key = key_of(work.sampling.seed, work.session or work.request_id)
        self.slot = -1
        self.num_cached = 0
        """Tokens whose keys and values are in the slot."""
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

    def chunk(self) -> Chunk:
        """What was sampled since the last chunk."""
        ends = [start for _, start in self.unsent_versions[1:]] + [len(self.unsent_ids)]
        spans = [
            VersionSpan(version, start, end) for (version, start), end in zip(self.unsent_versions, ends, strict=False)
        ]
        tokens = Tokens(pack_i32(self.unsent_ids), pack_f32(self.unsent_logprobs), tuple(spans))
        self.unsent_ids = []
        self.unsent_logprobs = []
        self.unsent_versions = []
        return Chunk(tokens, self.finish_reason)

    def _finish_after(self, token: int) -> None:
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


def check(work: Work, max_len: int, vocab_size: int) -> None:
    """Raises EngineError when `work` could never run: better refused than failing a step that serves others too."""
    prompt, sampling = work.prompt, work.sampling
    if not prompt:
        raise EngineError(f"request {work.request_id} has an empty prompt")
    if len(prompt) >= max_len:
        raise EngineError(
            f"request {work.request_id}: a prompt of {len(prompt)} tokens leaves no room in engine.max_len={max_len}"
        )
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


# -- completions that are put together from parts -----------------------------------------------------


def shifted(tokens: Tokens, by: int) -> Tokens:
    """The same tokens, `by` positions later in the completion."""
    if not by:
        return tokens
    return Tokens(
        tokens.ids, tokens.logprobs, tuple(VersionSpan(s.version, s.start + by, s.end + by) for s in tokens.spans)
    )


def joined(tokens: Tokens, more: Tokens) -> Tokens:
    """`tokens` followed by `more`, whose spans start at 0; neighbouring spans of one version become one."""
    if not tokens.ids:
        return more
    spans = list(tokens.spans)
    for span in shifted(more, len(tokens.ids) // 4).spans:
        if spans and spans[-1].version == span.version and spans[-1].end == span.start:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
        else:
            spans.append(span)
    return Tokens(tokens.ids + more.ids, tokens.logprobs + more.logprobs, tuple(spans))
