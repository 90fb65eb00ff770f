"""Weights: announced as a hint, pulled by whoever needs them."""

from bus.message import Message


class WeightsPublished(Message, frozen=True):
    """Version `version` of the weights lies in the blob store under `blob`; a higher `epoch` replaces the same version."""

    version: int
    epoch: int
    blob: str
    digest: str
    size_bytes: int


class WeightsTaken(Message, frozen=True):
    """`engine` has swapped in this version: when all have, the phase in which weights travel is over."""

    engine: str
    version: int
    epoch: int
