"""Weights: announced as a hint, pulled by the actors that need them."""

from typing import ClassVar

import msgspec

from rubato.bus.message import Message, Request


class WeightsPublished(Message, frozen=True):
    """Version `version` of an adapter's weights can be received; a higher `term` replaces the same version."""

    version: int
    term: int
    digest: str
    """Of the whole version; empty where its transport has none."""
    size_bytes: int
    adapter: str = ""
    """Empty: of the whole model."""
    delta_bytes: int = 0
    """Of what changed in it, where that travels in its place."""


class WeightsDigest(msgspec.Struct, frozen=True, array_like=True):
    """Of tensors that an engine computes with, at `rubato.actors.checkpoints.model_folder.sampled_slices` of the version that it says it has."""

    dtype: str
    """float32 or bfloat16: what it computes in."""
    slices: bytes
    """8 bytes of BLAKE2b for each slice, all zero for a tensor that it does not compute with."""


class WeightsTaken(Message, frozen=True):
    """`engine` has swapped in this version: when all have, the phase in which weights travel is over."""

    engine: str
    version: int
    term: int
    digest: WeightsDigest | None = None
    """None: its class can't tell."""
    adapter: str = ""


class WeightsHeld(Message, frozen=True):
    """Reply to HoldWeights: whether `engine` samples under that version, and will for as long as was asked."""

    engine: str
    held: bool


class HoldWeights(Request[WeightsHeld], frozen=True):
    """Swap in nothing newer than `version` of `term` for `for_s` from now: an evaluation runs under it. 0 lets go.

    Answered once the version is in place, and the proxies know. A higher term ends the hold.
    """

    idempotent: ClassVar[bool] = True
    version: int
    term: int
    for_s: float
