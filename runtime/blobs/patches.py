"""Delta blobs: beside a version lies what changed since the one before it, for hosts that have that one."""

from itertools import accumulate, pairwise

import msgspec

from rubato.runtime.blobs.blob import PIECE_BYTES, BlobCorrupt, BlobInfo, BlobMissing, BlobStore, piece_digest, spread

FULL_EVERY = 16
"""So often a version travels whole, whatever changed: what goes wrong with a chain of deltas does not outlive it."""

MOST_CHANGED = 0.25
"""Of all words. Above, a delta is not worth making: it has up to three bytes for each."""

HEAD_BYTES = 4
"""In front of the sizes of the pieces: their own size, little-endian."""


def delta_name(name: str) -> str:
    """Of the blob that has what changed in blob `name`: version n has what changed since n − 1 of the same term."""
    return f"{name}.delta"


async def forget(blobs: BlobStore, name: str) -> None:
    """Free what this host has of the blob `name`, and of what changed in it."""
    for each in (name, delta_name(name)):
        await blobs.forget(each)


async def put_delta(blobs: BlobStore, info: BlobInfo, memory: memoryview) -> BlobInfo | None:
    """Put what changed in `memory`, which is about to be shown as `info`, since the version before. None where `info` is to travel whole:
    that version is not here, too much changed, or a whole one is due."""
    from rubato.runtime.blobs.delta import changes, num_changed

    before = await _before(blobs, info)
    if before is None or info.version % FULL_EVERY == 0:
        return None
    cut, num, size = slices(info.size_bytes), -(-info.size_bytes // PIECE_BYTES), info.size_bytes
    counts = await spread(num, lambda index: num_changed(before[cut[index]], memory[cut[index]]), size)
    if sum(counts) > MOST_CHANGED * size / 2:
        return None
    found = await spread(num, lambda index: changes(before[cut[index]], memory[cut[index]]), size)
    head = msgspec.msgpack.encode([len(each) for each in found])
    if len(head) + sum(map(len, found)) >= size:
        return None
    parts = [len(head).to_bytes(HEAD_BYTES, "little"), head, *found]
    return await blobs.put(delta_name(info.name), info.version, info.term, parts)


async def patch(blobs: BlobStore, info: BlobInfo, delta: memoryview, memory: memoryview) -> list[bytes]:
    """Write `info` into `memory`, out of the version before and what changed; returns its pieces' digests, which are still to be checked.

    Raises BlobMissing where that version is not here, BlobCorrupt where `delta` is of another size.
    """
    from rubato.runtime.blobs.delta import apply

    before, cut, pieces = await _before(blobs, info), slices(info.size_bytes), _pieces(delta)
    if before is None:
        raise BlobMissing(f"blob {info.name} version {info.version - 1} is not here")
    if len(pieces) != len(cut):
        raise BlobCorrupt(f"the delta of blob {info.name} version {info.version} is of another blob")

    def one(index: int) -> bytes:
        memory[cut[index]] = before[cut[index]]
        try:
            apply(pieces[index], memory[cut[index]])
        except ValueError as error:
            raise BlobCorrupt(f"the delta of blob {info.name} version {info.version}: {error}") from None
        return piece_digest(memory[cut[index]])

    return await spread(len(cut), one, info.size_bytes)


async def has_before(blobs: BlobStore, info: BlobInfo) -> bool:
    """Whether the version is here that a delta of `info` changes."""
    return await _before(blobs, info) is not None


async def _before(blobs: BlobStore, info: BlobInfo) -> memoryview | None:
    try:
        found, content = await blobs.get(info.name, info.version - 1, check=False)
    except BlobMissing:
        return None
    return content if (found.term, found.size_bytes) == (info.term, info.size_bytes) else None


def slices(size_bytes: int) -> list[slice]:
    """Where the pieces of a blob lie."""
    return [slice(at, min(at + PIECE_BYTES, size_bytes)) for at in range(0, size_bytes, PIECE_BYTES)]


def _pieces(delta: memoryview) -> list[memoryview]:
    """Raises BlobCorrupt for what is no delta."""
    begin = HEAD_BYTES + int.from_bytes(delta[:HEAD_BYTES], "little")
    try:
        sizes = msgspec.msgpack.decode(delta[HEAD_BYTES:begin], type=list[int])
    except msgspec.MsgspecError as error:
        raise BlobCorrupt(f"a delta's head can't be read: {error}") from None
    ends = list(accumulate(sizes, initial=begin))
    if min(sizes, default=0) < 0 or ends[-1] != len(delta):
        raise BlobCorrupt(f"a delta has {len(delta)} bytes, and should have {ends[-1]}")
    return [delta[a:b] for a, b in pairwise(ends)]
