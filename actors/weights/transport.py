"""The WeightTransport seam: how a version of the weights gets from the trainer's ranks into the engines; and its default.

A transport is a pair of classes: a WeightsSender at each rank of the trainer, a WeightsReceiver at each engine. What travels is named by
(adapter, version) and the trainer's term; the adapter "" is the whole model. The contract allows for versions that come in parts, and for
collective transports that have no image of one anywhere, since tensors go from each rank straight to the engines.

The default are blobs of the host: the trainer writes one image into shared memory, and each engine's host brings it once.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from rubato.actors import plugins
from rubato.actors.checkpoints.model_folder import DIGEST_BYTES, Slice, read_header, sampled_slices, slice_digest, slice_of
from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.weights import WeightsDigest, WeightsPublished, WeightsTaken
from rubato.runtime.actor import Actor
from rubato.runtime.blobs.blob import INDEX_MARK, BlobCorrupt, BlobInfo, BlobMissing, Draft, join_digests, piece_digests_beside
from rubato.runtime.errors import RubatoError
from rubato.runtime.kernel import NODE

SAMPLES_KEPT = 8
"""Versions whose sample stays, 256 KiB each: an engine may take one while the next are published."""


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


# -- blobs of the host -----------------------------------------------------------------------------------------------


class WeightsSample(NamedTuple):
    """Slices of a published image, against which engines' digests are compared. The image's floats in `dtype`, slice by slice."""

    slices: list[Slice]
    parts: list[tuple[str, bytes]]
    """Type and bytes of each."""

    @classmethod
    def of(cls, image: memoryview, seed: int, version: int) -> "WeightsSample":
        header = read_header(image, f"weights version {version}")
        slices = sampled_slices(header, seed, version)
        return cls(slices, [(header[cut.name].dtype, slice_of(image, header[cut.name], cut)) for cut in slices])

    def differing(self, digest: WeightsDigest) -> list[str]:
        """The tensors that an engine computes with otherwise, one for each slice that differs."""
        size, found = DIGEST_BYTES, list[str]()
        for index, (cut, (dtype, values)) in enumerate(zip(self.slices, self.parts, strict=True)):
            told = digest.slices[index * size : (index + 1) * size]
            if any(told) and told != slice_digest(as_computed(values, dtype, digest.dtype)):
                found.append(cut.name)
        return found


def as_computed(values: bytes, stored: str, dtype: str) -> bytes:
    """Stored values as an engine has them that computes in `dtype`, float32 or bfloat16."""
    if (stored, dtype) in (("F32", "float32"), ("BF16", "bfloat16")):
        return values
    return plugins.load(plugins.ROUNDED)(values, stored, dtype)


class BlobSender:
    """The WeightsSender of a trainer of one rank: a version is one blob."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._samples: dict[tuple[str, int, int], WeightsSample] = {}
        """By adapter, term and version, oldest first."""

    async def send(self, version: WeightsVersion, source: WeightsSource) -> Announce:
        actor = self._actor
        size = source.image_bytes()
        draft = await actor.blobs.draft(blob_of(version.adapter), version.version, version.term, size)
        whole = await actor.offload(source.export, draft.memory)
        return partial(self._announce, version, draft, whole)

    async def _announce(self, sent: WeightsVersion, draft: Draft, whole: Callable[[], None]) -> WeightsPublished | None:
        actor, (adapter, version, term) = self._actor, sent
        await actor.offload(whole)
        self._keep(sent, await actor.offload(WeightsSample.of, draft.memory, actor.run.seed, version))
        digest = join_digests(await piece_digests_beside(draft.memory))
        shown = BlobInfo(blob_of(adapter), version, term, digest, len(draft.memory))
        delta = await plugins.load(plugins.DELTAS)(actor.blobs, shown, draft.memory) if self._leave_host() else None
        info = await draft.publish(digest)
        return WeightsPublished(version, term, info.digest, info.size_bytes, adapter, delta_bytes=delta.size_bytes if delta else 0)

    def _keep(self, sent: WeightsVersion, sample: WeightsSample) -> None:
        self._samples[sent.adapter, sent.term, sent.version] = sample
        while len(self._samples) > SAMPLES_KEPT:
            del self._samples[next(iter(self._samples))]

    def _leave_host(self, node: str = "") -> bool:
        """Whether weights go from this host, or that one, to another: on their own, engines map them whole."""
        actor = self._actor
        records = (actor.directory.find(name) for name in actor.peers(GENERATION))
        return any(record is not None and record.node != (node or actor.node) for record in records)

    def disagreement(self, taken: WeightsTaken) -> str:
        sample = self._samples.get((taken.adapter, taken.term, taken.version))
        if sample is None or taken.digest is None or not (others := sample.differing(taken.digest)):
            return ""
        return (
            f"trainer and engine disagree: {taken.engine} says that it has weights version {taken.version}, but the tensors that it "
            f"computes with are others: {len(others)} of {len(sample.slices)} sampled slices differ, {others[0]} first. What was published "
            "never reached them, or not whole: look at its engine's update, and resume once that is mended"
        )


class BlobReceiver:
    """The WeightsReceiver of an engine. Where the trainer lives on another host, a blob is brought to this one first, by a relay tree.

    Where the others are is read from the registry: no actor hands out the tree.
    """

    def __init__(self, actor: Actor, *, by_rings: bool = False) -> None:
        self._actor, self._by_rings = actor, by_rings

    async def newest(self, adapter: str) -> WeightsPublished | None:
        """The newest on the trainer's host; on this one where that is the trainer's, or where that one does not answer."""
        far = self._far()
        found = (await far.newest(blob_of(adapter)) if far else None) or await self._actor.blobs.newest(blob_of(adapter))
        if found is None:
            return None
        return WeightsPublished(found.version, found.term, found.digest, found.size_bytes, adapter)

    async def receive(self, wanted: WeightsPublished) -> AsyncGenerator[WeightsPart]:
        """One part."""
        adapter = wanted.adapter
        try:
            if far := self._far():
                await far.bring(blob_of(adapter), wanted.version)
            info, image = await self._actor.blobs.get(blob_of(adapter), wanted.version)
            if image[: len(INDEX_MARK)] == INDEX_MARK:
                info, image = await plugins.load(plugins.PARTED)(self._actor, info, image, by_rings=self._by_rings)
        except (BlobMissing, BlobCorrupt) as error:
            raise WeightsMissing(str(error)) from error
        yield WeightsPart(WeightsPublished(info.version, info.term, info.digest, info.size_bytes, adapter), image)

    def _far(self) -> Any:
        """The mechanism that brings blobs of the trainer's host, or of the launcher's while the trainer is away, where that is another."""
        records = (self._actor.directory.find(name) for name in self._actor.peers("trainer"))
        home = next((record.node for record in records if record is not None), NODE)
        return None if home == self._actor.node else plugins.load(plugins.RELAYED)(self._actor, home, by_rings=self._by_rings)


def blob_of(adapter: str) -> str:
    """Name of the blob whose versions are those of `adapter`."""
    return f"weights.{adapter}" if adapter else "weights"
