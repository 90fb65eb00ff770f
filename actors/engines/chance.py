"""The number that picks each token: a function of the request's seed and the token's position, and of nothing else."""

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np

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
