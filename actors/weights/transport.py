"""The WeightTransport seam: how a version of the weights gets from the trainer's ranks into the engines.

A transport is a pair of classes: a WeightsSender at each rank of the trainer, a WeightsReceiver at each engine. What travels is named by
(adapter, version) and the trainer's term; the adapter "" is the whole model. Blobs of the host are the transport that is built in
(`rubato.actors.weights.blobs`): there a version is one image. The contract allows for others: a version may come in parts, and a collective
transport may have no image of it anywhere, since tensors go from each rank straight to the engines.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple, Protocol

from rubato.actors.messages.weights import WeightsPublished, WeightsTaken
from rubato.runtime.errors import RubatoError


class WeightsVersion(NamedTuple):
    """Name of what is sent. Of one adapter the higher term is newer, and within a term the higher version."""

    adapter: str
    version: int
    term: int
    """Term of the trainer: one that was started again has a higher one, and its versions replace those of the same number."""


class WeightsSource(Protocol):
    """One rank's part of the weights; a TrainEngine is one, and says what its methods do."""

    def image_bytes(self) -> int: ...
    def export(self, memory: memoryview) -> Callable[[], None]: ...


Announce = Callable[[], Awaitable[WeightsPublished | None]]
"""Completes a version: engines can have it once this returns. The first rank's returns the announcement for engines, the others' None."""


class WeightsSender(Protocol):
    """A rank's end. All ranks call `send` for the same versions in the same order, and one version at a time.

    A transport in which every rank waits for the others, or for the engines, may rely on that order: its `send` or its Announce returns at
    no rank before all have called it.
    """

    async def send(self, version: WeightsVersion, source: WeightsSource) -> Announce:
        """Take the version out of `source`, which may train on when this returns. What is left to do goes on in the Announce that this
        returns, beside training; it is called before the next `send`.
        """
        ...

    def disagreement(self, taken: WeightsTaken) -> str:
        """A sentence where `taken` shows that an engine computes with other tensors than were sent; empty where it shows none."""
        ...


class WeightsPart(NamedTuple):
    """One safetensors image with some of a version's tensors, or all of them."""

    of: WeightsPublished
    image: memoryview
    """Stays as it is for as long as it, or anything made from it without a copy, lives."""


class WeightsReceiver(Protocol):
    """An engine's end."""

    async def newest(self, adapter: str) -> WeightsPublished | None:
        """The newest version that can be received now, as far as this end can know; None where there is none."""
        ...

    def receive(self, wanted: WeightsPublished) -> AsyncGenerator[WeightsPart]:
        """The parts of `wanted`, or of one that replaced it under a higher term, as they come: each tensor is in one of them.

        Raises WeightsMissing where it can't be had now; the caller asks for the newest again. What was received of it until then
        belongs to no version. In a collective transport all engines receive the same versions in the same order.
        """
        ...


class WeightsMissing(RubatoError):
    """A version can't be received now: it was replaced, its holder is away, or it arrived damaged."""
