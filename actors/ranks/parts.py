"""Weights of ranks on several hosts: each host keeps the rows of its ranks as a part of a version, and the trainer keeps an index of the parts."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from rubato.actors import plugins
from rubato.actors.checkpoints.model_folder import TensorPlace, read_header, rows_of_slice, sampled_slices, slice_of
from rubato.actors.messages.ranks import DraftPart, PartShown
from rubato.actors.ranks.copies import CopiedRows
from rubato.actors.weights.transport import WeightsSample
from rubato.runtime.blobs.blob import BlobInfo, BlobStore, Draft, join_digests, piece_digests_beside
from rubato.runtime.blobs.parts import Found, Part, cut, part_name, pieces_in, place_of
from rubato.runtime.registry import ActorRecord

if TYPE_CHECKING:
    from rubato.runtime.actor import Actor


class HostPart:
    """What one host's ranks write of a version, held by the rank that drafted it."""

    def __init__(self, draft: Draft, info: BlobInfo) -> None:
        self.draft, self._info = draft, info

    @classmethod
    async def drafted(cls, actor: "Actor", request: DraftPart) -> "HostPart":
        info = BlobInfo(request.name, request.version, request.trainer_term, "", request.size_bytes)
        return cls(await actor.blobs.draft(info.name, info.version, info.term, info.size_bytes), info)

    @cached_property
    def pieces(self) -> list[Found]:
        """Of the image, once all is written, sorted."""
        return sorted(pieces_in(self.draft.memory), key=place_of)

    @cached_property
    def rows(self) -> CopiedRows:
        """The same, to be read from the first byte to the last."""
        return CopiedRows.of({"": self.pieces})

    def ranges(self, wanted: memoryview) -> bytes:
        """What it has of these ranges; both in MessagePack, see ReadRanges. Blocks."""
        found = [
            piece for begin, end in msgspec.msgpack.decode(wanted, type=list[tuple[int, int]]) for piece in cut(self.pieces, begin, end)
        ]
        return msgspec.msgpack.encode(found)

    async def shown(self, blobs: BlobStore, *, leaves: bool) -> PartShown:
        digest = join_digests(await piece_digests_beside(self.draft.memory))
        info = self._info._replace(digest=digest)
        delta = await plugins.load(plugins.DELTAS)(blobs, info, self.draft.memory) if leaves else None
        await self.draft.publish(digest)
        return PartShown(digest, info.size_bytes, delta.digest if delta else "", delta.size_bytes if delta else 0)


class HostShare(NamedTuple):
    """One host's ranks that write rows of a version, as the trainer knows them."""

    node: str
    number: int
    begins: Mapping[str, int]
    """Rank → where its section begins in the host's part; the first rank drafts it."""
    size_bytes: int
    num_bytes: int
    """Of the rows alone."""

    @property
    def first(self) -> str:
        return next(iter(self.begins))

    def part(self, name: str, shown: PartShown) -> Part:
        """Its part of the blob `name`."""
        return Part(self.node, part_name(name, self.number), shown.digest, shown.size_bytes, shown.delta, shown.delta_bytes)


def shares_of(members: Mapping[str, ActorRecord], sizes: Mapping[str, tuple[int, int]]) -> list[HostShare]:
    """By rank, in order, the bytes of its rows and of its section."""
    found = list[HostShare]()
    nodes = dict.fromkeys(members[name].node for name, (num, _) in sizes.items() if num)
    for number, node in enumerate(nodes):
        begins, at, num_bytes = dict[str, int](), 0, 0
        for name, (num, section) in sizes.items():
            if num and members[name].node == node:
                begins[name], at, num_bytes = at, at + section, num_bytes + num
        found.append(HostShare(node, number, begins, at, num_bytes))
    return found


class SparseImage:
    """Those bytes of an image that were read of its parts."""

    def __init__(self, size_bytes: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """No two of them overlap."""
        self._size_bytes = size_bytes
        self._pieces = sorted(((begin, memoryview(piece)) for begin, piece in pieces), key=place_of)

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, wanted: slice) -> bytes:
        """Raises KeyError for bytes that are not there."""
        begin, end, _ = wanted.indices(self._size_bytes)
        found = b"".join(part for _, part in cut(self._pieces, begin, end))
        if len(found) != max(0, end - begin):
            raise KeyError(f"bytes {begin} to {end} of the image were not read")
        return found


Read = Callable[[Sequence[tuple[int, int]]], Awaitable[SparseImage]]
"""Reads ranges of an image, its head among them."""


class Sampler:
    """Takes the sample of versions of one term, whose images all have one header."""

    def __init__(self, read: Read, seed: int) -> None:
        self._read, self._seed = read, seed
        self._header: Mapping[str, TensorPlace] | None = None

    async def sample(self, version: int) -> WeightsSample:
        header = await self._read_header(version)
        slices = sampled_slices(header, self._seed, version)
        places = [(header[each.name], each) for each in slices]
        image = cast("memoryview", await self._read(union(rows for cut in places for rows in rows_of_slice(*cut))))
        return WeightsSample(slices, [(place.dtype, slice_of(image, place, each)) for place, each in places])

    async def _read_header(self, version: int) -> Mapping[str, TensorPlace]:
        if self._header is None:
            size = int.from_bytes((await self._read([(0, 8)]))[:8], "little")
            image = await self._read([(0, 8 + size)])
            self._header = read_header(cast("memoryview", image), f"weights version {version}")
        return self._header


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in ranges that are sorted, and do not overlap."""
    found = list[tuple[int, int]]()
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
