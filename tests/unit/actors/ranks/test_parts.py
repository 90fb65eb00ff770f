"""Parts of a version, as the trainer and the ranks that draft them see them."""

import itertools
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from rubato.actors.messages.ranks import DraftPart
from rubato.actors.ranks.parts import HostPart, Sampler, SparseImage, shares_of, union
from rubato.actors.weights.transport import WeightsSample
from rubato.runtime.blobs.parts import pieces_in, section_head
from rubato.runtime.memory import MemoryBlobStore

IMAGE = safetensors.numpy.save({
    "wide": np.arange(40 * 600, dtype="<f4").reshape(40, 600), "narrow": np.arange(7, dtype="<f4"), "tall": np.ones((900, 3), "<f4"),
})  # fmt: skip


class Host:
    def __init__(self):
        self.blobs = MemoryBlobStore()


async def parts_of(image, cuts):
    """The parts of two hosts, which have every other piece between these cuts."""
    pieces = [(a, b - a) for a, b in zip([0, *cuts], [*cuts, len(image)], strict=True)]
    found = []
    for number in range(2):
        ours = pieces[number::2]
        content = section_head(ours) + b"".join(image[at : at + num] for at, num in ours)
        host = Host()
        part = await HostPart.drafted(host, DraftPart(1, f"weights.part{number}", 3, 2, len(content)))
        part.draft.memory[:] = content
        found.append((host, part))
    return found


async def test_the_sample_that_is_read_of_parts_is_that_of_the_whole_image():
    size = 8 + struct.unpack("<Q", IMAGE[:8])[0]
    parts = await parts_of(IMAGE, [3, size - 5, size + 1001, size + 50_000, size + 96_100])
    asked = []

    async def read(ranges):
        asked.append(ranges)
        packed = memoryview(msgspec.msgpack.encode(ranges))
        told = [piece for _, part in parts for piece in msgspec.msgpack.decode(part.ranges(packed), type=list[tuple[int, bytes]])]
        return SparseImage(len(IMAGE), told)

    sampler = Sampler(read, seed=7)
    for version in (3, 4):
        assert await sampler.sample(version) == WeightsSample.of(memoryview(IMAGE), 7, version)

    assert len(asked) == 4  # the header once
    assert all(a[1] < b[0] for ranges in asked for a, b in itertools.pairwise(ranges))


async def test_a_part_is_shown_under_the_term_of_its_version_with_what_changed_where_it_leaves():
    (host, part), _ = await parts_of(IMAGE, [100])
    content = bytes(part.draft.memory)

    first = await part.shown(host.blobs, leaves=True)
    second = await HostPart.drafted(host, DraftPart(1, "weights.part0", 4, 2, len(content)))
    second.draft.memory[:] = content
    then = await second.shown(host.blobs, leaves=True)
    info, found = await host.blobs.get("weights.part0", 4)

    assert (first.delta, bool(then.delta)) == ("", True)
    assert (info.term, info.digest, info.size_bytes) == (2, then.digest, len(content))
    assert b"".join(bytes(piece) for _, piece in pieces_in(found)) == IMAGE[:100]


def test_ranges_that_overlap_or_touch_are_read_once():
    assert union([(5, 7), (0, 2), (6, 9), (2, 3), (20, 21)]) == [(0, 3), (5, 9), (20, 21)]


def test_bytes_that_were_not_read_are_missed():
    image = SparseImage(10, [(2, b"abc"), (5, b"d")])

    assert image[2:6] == b"abcd"
    with pytest.raises(KeyError):
        image[1:3]


def test_ranks_of_one_host_write_one_part_one_after_another_and_those_without_rows_none():
    members: Any = {name: SimpleNamespace(node=node) for name, node in (("r-1", "a"), ("r-2", "b"), ("r-3", "a"), ("r-4", "c"))}

    shares = shares_of(members, {"r-1": (10, 32), "r-2": (20, 48), "r-3": (5, 24), "r-4": (0, 0)})

    assert [(share.node, share.first, dict(share.begins), share.size_bytes, share.num_bytes) for share in shares] == [
        ("a", "r-1", {"r-1": 0, "r-3": 32}, 56, 15),
        ("b", "r-2", {"r-2": 0}, 48, 20),
    ]
