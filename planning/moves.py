"""Decides how a request moves: with its keys and values, or by its tokens alone, which the target then prefills."""

from collections import deque
from typing import NamedTuple

TRANSFERS = 16
"""That a way's rate is of."""

FEW = 4
"""Transfers from which a way's rate is known: one alone may have waited."""


class Transfer(NamedTuple):
    """A request that is to move, and the rates between its two engines; 0 is a rate that is not known."""

    num_tokens: int
    """Prompt and sampled ones: what the target prefills where no cache comes."""
    num_cached: int
    """Of these, the first ones whose keys and values the source has."""
    bytes_per_token: float
    """Keys and values of one token."""
    link_bytes_s: float
    prefill_tokens_s: float
    """Of the target; a source of the same class knows it."""
    same_weights: bool = True
    """Both engines have the weights that the cache goes with."""
    num_passed_over: int = 0
    """How many requests left the source without their KV cache since the last one that took it along."""


class Carry(NamedTuple):
    """Whether the cache travels, and what each way takes in seconds (0: unknown)."""

    with_cache: bool
    cache_s: float
    recompute_s: float
    why: str


class Rate:
    """Bytes per second of a way, of the last transfers on it.

    The fastest of them counts: what else a transfer waits for, such as the end of a decode step, makes it slower and never faster. So a small
    one that waited does not speak for large ones.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=TRANSFERS)

    def saw(self, num_bytes: int, seconds: float) -> None:
        """One transfer."""
        self._seen.append(num_bytes / max(seconds, 1e-6))

    @property
    def bytes_s(self) -> float:
        """0: not known."""
        return max(self._seen) if len(self._seen) >= FEW else 0.0


def carry(moving: Transfer) -> Carry:
    """The cheaper way. Decoding costs the same either way, so a cache takes its bytes over the link, and the prefill of what it lacks.

    Of a rate that is not known the cache's way is taken: it leaves the target's time to others, and measures the link's rate. So it is after
    TRANSFERS requests that passed it over: the link may be fast again.
    """
    if not moving.num_cached:
        return Carry(False, 0.0, _prefill_s(moving, moving.num_tokens), "it has no cache yet")
    if not moving.same_weights:
        return Carry(False, 0.0, _prefill_s(moving, moving.num_tokens), "its cache is of other weights")
    recompute_s = _prefill_s(moving, moving.num_tokens)
    missing_s = _prefill_s(moving, moving.num_tokens - moving.num_cached)
    bytes_ = moving.num_cached * moving.bytes_per_token
    if not (moving.link_bytes_s and moving.prefill_tokens_s):
        return Carry(True, 0.0, recompute_s, f"{bytes_ / 1e6:.1f} MB of cache, over a link or to an engine of unknown rate")
    if moving.num_passed_over >= TRANSFERS:
        return Carry(True, 0.0, recompute_s, f"{bytes_ / 1e6:.1f} MB of cache, over a link that was slow: is it still?")
    cache_s = bytes_ / moving.link_bytes_s + missing_s
    ways = f"{bytes_ / 1e6:.1f} MB of cache take {cache_s:.3f} s, prefilling {moving.num_tokens} tokens {recompute_s:.3f} s"
    return Carry(cache_s < recompute_s, cache_s, recompute_s, ways)


def _prefill_s(moving: Transfer, num_tokens: int) -> float:
    return num_tokens / moving.prefill_tokens_s if moving.prefill_tokens_s else 0.0
