"""Blobs in parts: what is written by several hosts comes out as the one content, and what is not all of it does not."""

import pytest

from rubato.runtime.blobs.blob import INDEX_MARK, BlobCorrupt, BlobMissing
from rubato.runtime.blobs.blob_messages import NotPulled, Pulled
from rubato.runtime.blobs.parts import (
    Index,
    JoinParts,
    Joins,
    Part,
    cut,
    index_in,
    join,
    joined,
    part_name,
    pieces_in,
    section_bytes,
    section_head,
    whole_name,
)
from rubato.runtime.memory import MemoryBlobStore

CONTENT = bytes(range(256)) * 5 + b"the end"


def section(*pieces):
    """Of CONTENT's pieces, (begin, bytes) each."""
    data = section_head(pieces) + b"".join(CONTENT[begin : begin + num] for begin, num in pieces)
    return data + bytes(section_bytes(pieces) - len(data))


EVEN = section((0, 100), (300, 7)) + section((400, len(CONTENT) - 400))
ODD = section((100, 200), (307, 93))


async def put(blobs, version, parts, *, term=1):
    """Parts and index, all on one host."""
    told = []
    for number, content in enumerate(parts):
        info = await blobs.put(part_name("w", number), version, term, [content])
        told.append(Part("node-1", info.name, info.digest, info.size_bytes))
    await blobs.put("w", version, term, [Index(len(CONTENT), tuple(told)).encoded()])


class Drafts(MemoryBlobStore):
    def __init__(self):
        super().__init__()
        self.made = []

    async def draft(self, name, version, term, size_bytes):
        self.made.append(name)
        return await super().draft(name, version, term, size_bytes)


async def whole(blobs, version):
    return bytes((await blobs.get(whole_name("w"), version))[1])


def test_pieces_that_follow_each_other_are_one_and_empty_ones_none():
    assert joined([(0, 4), (4, 2), (6, 0), (9, 1), (10, 5), (20, 0)]) == [(0, 6), (9, 6)]


def test_an_index_is_known_by_its_first_bytes_and_reads_back():
    index = Index(10, (Part("node-1", "w.part0", "d", 4), Part("node-2", "w.part1", "e", 6, "f", 2)))

    content = memoryview(index.encoded())

    assert content[: len(INDEX_MARK)] == INDEX_MARK
    assert index_in(content) == index
    assert index.delta_bytes == 4 + 2
    with pytest.raises(BlobCorrupt):
        index_in(content[:-1])


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (90, 110), (95, 310), (299, 301), (0, len(CONTENT)), (307, 307), (1000, 1010)])
def test_ranges_of_two_parts_together_are_those_of_the_content(begin, end):
    found = []
    for part in (EVEN, ODD):
        found += cut(sorted(pieces_in(memoryview(part)), key=lambda piece: piece[0]), begin, end)

    assert b"".join(bytes(piece) for _, piece in sorted((at, bytes(piece)) for at, piece in found)) == CONTENT[begin:end]


@pytest.mark.parametrize("part", [ODD[:-8], ODD[:4], b"\xff" * 16, section_head([(0, 8)])])
def test_a_part_that_is_cut_off_is_told(part):
    with pytest.raises(BlobCorrupt):
        pieces_in(memoryview(part))


async def test_a_blob_is_made_whole_of_its_parts_once_and_replaces_the_one_before():
    blobs = Drafts()
    joins = Joins(blobs)
    for version in (1, 2):
        await put(blobs, version, [EVEN, ODD])
        assert await joins.join(JoinParts("w", version, 1)) == Pulled(())
        assert await joins.join(JoinParts("w", version, 1)) == Pulled(())
        assert await whole(blobs, version) == CONTENT

    assert blobs.made == [whole_name("w")] * 2
    with pytest.raises(BlobMissing):
        await whole(blobs, 1)
    assert isinstance(await joins.join(JoinParts("w", 1, 1)), NotPulled)


@pytest.mark.parametrize(
    "parts", [[EVEN], [ODD], [EVEN, ODD, ODD], [EVEN, section((100, 200))], [EVEN, section((100, 201), (307, 93))], [EVEN, ODD[:-8]]]
)
async def test_parts_that_are_not_all_of_the_content_once_make_no_blob(parts):
    blobs = MemoryBlobStore()
    await put(blobs, 1, parts)

    reply = await Joins(blobs).join(JoinParts("w", 1, 1))

    assert isinstance(reply, NotPulled)
    assert "could not be made of its parts" in reply.why
    assert await blobs.newest(whole_name("w")) is None


async def test_a_part_of_another_term_or_of_another_digest_is_none_of_the_version():
    blobs = MemoryBlobStore()
    await put(blobs, 1, [EVEN, ODD])
    await blobs.put(part_name("w", 1), 1, 2, [ODD])

    with pytest.raises(BlobMissing):
        await join(blobs, "w", 1, 1)

    await put(blobs, 1, [EVEN, ODD], term=2)
    await blobs.put(part_name("w", 1), 1, 2, [ODD + section()])
    with pytest.raises(BlobMissing):
        await join(blobs, "w", 1, 2)


async def test_parts_of_a_time_when_there_were_more_are_freed():
    blobs = MemoryBlobStore()
    await put(blobs, 1, [EVEN, section((100, 200)), section((307, 93))])
    await put(blobs, 2, [EVEN, ODD])

    await join(blobs, "w", 2, 1)

    assert await blobs.newest(part_name("w", 1)) is not None
    assert await blobs.newest(part_name("w", 2)) is None
