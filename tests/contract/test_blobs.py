"""The BlobStore contract, over every implementation."""

import asyncio
import os
from array import array
from collections.abc import AsyncGenerator, Callable
from hashlib import sha256
from pathlib import Path

import pytest

from rubato.runtime.blobs.blob import BlobError, BlobInfo, BlobMissing, BlobStore, digest_of
from rubato.runtime.blobs.client import BlobClient
from rubato.runtime.blobs.server import BlobServer
from rubato.runtime.memory import MemoryBlobStore


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncGenerator[Path]:
    """The socket of a server."""
    path = tmp_path / "blobs.sock"
    server = BlobServer(path)
    await server.start()
    yield path
    await server.close()


@pytest.fixture(params=["memory", "agent"])
async def connect(request: pytest.FixtureRequest, agent: Path) -> AsyncGenerator[Callable[[], BlobStore]]:
    """A function that gives each user of the same blobs its own handle."""
    shared = MemoryBlobStore()
    clients: list[BlobStore] = []

    def handle() -> BlobStore:
        clients.append(shared if request.param == "memory" else BlobClient(agent))
        return clients[-1]

    yield handle
    for client in clients:
        await client.close()


@pytest.fixture
def blobs(connect: Callable[[], BlobStore]) -> BlobStore:
    return connect()


async def test_what_was_put_is_got_back_with_its_digest_and_can_not_be_changed(blobs: BlobStore):
    info = await blobs.put("w", 3, 1, [b"ab", memoryview(b"cd"), b""])

    found, content = await blobs.get("w", 3)

    assert info == found == BlobInfo("w", 3, 1, sha256(sha256(b"abcd").digest()).hexdigest(), 4)
    assert content == b"abcd"
    assert content.readonly


async def test_an_empty_blob_is_a_blob(blobs: BlobStore):
    info = await blobs.put("w", 0, 0, [])

    found, content = await blobs.get("w", 0)

    assert found == info
    assert (info.size_bytes, bytes(content)) == (0, b"")


async def test_parts_of_any_shape_are_taken_by_their_bytes(blobs: BlobStore):
    floats = memoryview(array("f", [1.0, 2.0, 3.0, 4.0]))
    square = floats.cast("B").cast("f", (2, 2))

    info = await blobs.put("w", 1, 0, [floats, square, memoryview(array("d"))])

    assert info.size_bytes == 32
    assert (await blobs.get("w", 1))[1] == floats.tobytes() * 2


async def test_a_blob_of_many_chunks_arrives_whole(blobs: BlobStore):
    part = os.urandom(9 << 20)

    await blobs.put("w", 1, 0, [part, b"x", part])

    assert (await blobs.get("w", 1))[1] == part + b"x" + part


async def test_what_was_never_put_is_missing(blobs: BlobStore):
    await blobs.put("w", 1, 0, [b"x"])

    for name, version in (("w", 2), ("w", 0), ("w", -1), ("other", 1)):
        with pytest.raises(BlobMissing, match=f"blob {name} version {version} was never put, or is freed already"):
            await blobs.get(name, version)
    assert await blobs.newest("other") is None


async def test_the_newest_two_versions_are_kept_and_an_old_mapping_lives_on(blobs: BlobStore):
    await blobs.put("w", 1, 0, [b"one"])
    _, first = await blobs.get("w", 1)

    await blobs.put("w", 2, 0, [b"two"])
    await blobs.put("w", 3, 0, [b"three"])

    assert first == b"one"
    assert [bytes((await blobs.get("w", version))[1]) for version in (2, 3)] == [b"two", b"three"]
    with pytest.raises(BlobMissing):
        await blobs.get("w", 1)
    newest = await blobs.newest("w")
    assert newest is not None
    assert newest.version == 3


async def test_a_version_older_than_those_kept_is_freed_at_once(blobs: BlobStore):
    await blobs.put("w", 5, 0, [b"five"])
    await blobs.put("w", 6, 0, [b"six"])

    await blobs.put("w", 4, 0, [b"four"])

    with pytest.raises(BlobMissing):
        await blobs.get("w", 4)
    assert (await blobs.get("w", 5))[1] == b"five"


async def test_names_do_not_push_each_other_out(blobs: BlobStore):
    for name in ("a", "b", "c"):
        await blobs.put(name, 1, 0, [name.encode()])

    assert [bytes((await blobs.get(name, 1))[1]) for name in ("a", "b", "c")] == [b"a", b"b", b"c"]


async def test_a_version_is_replaced_under_a_higher_term_and_stands_under_a_lower_one(blobs: BlobStore):
    await blobs.put("w", 1, 2, [b"second"])
    _, mapped = await blobs.get("w", 1)

    ignored = await blobs.put("w", 1, 1, [b"zombie"])
    after_zombie = bytes((await blobs.get("w", 1))[1])
    replaced = await blobs.put("w", 1, 3, [b"third!"])

    assert (ignored.term, ignored.size_bytes, after_zombie) == (2, 6, b"second")
    assert await blobs.get("w", 1) == (replaced, b"third!")
    assert mapped == b"second"


async def test_what_a_later_term_put_is_newest_although_its_version_is_lower(blobs: BlobStore):
    for version, term in ((18, 1), (19, 1), (18, 2)):
        await blobs.put("w", version, term, [b"x"])
    first = await blobs.newest("w")

    await blobs.put("w", 20, 1, [b"late"])
    await blobs.put("w", 19, 2, [b"y"])
    last = await blobs.newest("w")

    assert first is not None
    assert (first.version, first.term) == (18, 2)
    assert last is not None
    assert (last.version, last.term) == (19, 2)
    with pytest.raises(BlobMissing):
        await blobs.get("w", 20)


async def test_what_is_no_blob_is_refused(blobs: BlobStore):
    for name, version in (("", 1), ("w", -1)):
        with pytest.raises(BlobError, match="needs a name and a version"):
            await blobs.put(name, version, 0, [b"x"])

    assert await blobs.newest("w") is None


async def test_strange_names_are_names(blobs: BlobStore):
    for name in ("a/b", "ä\0\n", "n" * 1000):
        await blobs.put(name, 1, 0, [name.encode()])

        assert (await blobs.get(name, 1))[1] == name.encode()


async def test_a_blob_outlives_the_handle_of_its_writer(connect: Callable[[], BlobStore]):
    writer, reader = connect(), connect()
    await writer.put("w", 1, 0, [b"x"])

    await writer.close()

    assert (await reader.get("w", 1))[1] == b"x"


async def test_many_users_at_once_each_get_their_own_answer(connect: Callable[[], BlobStore]):
    handles = [connect() for _ in range(4)]

    async def work(number: int) -> bool:
        handle = handles[number % 4]
        await handle.put(f"w{number}", number, 0, [b"%d" % number] * number)
        info, content = await handle.get(f"w{number}", number)
        return info.name == f"w{number}" and content == b"%d" % number * number

    assert all(await asyncio.gather(*(work(number) for number in range(40))))


async def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(blobs: BlobStore):
    await blobs.put("a", 1, 0, [b"a" * 100_000])
    await blobs.put("b", 1, 0, [b"b" * 100_000])

    for yields in range(6):
        call = asyncio.get_running_loop().create_task(blobs.get("a", 1))
        for _ in range(yields):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        assert (await blobs.get("b", 1))[1] == b"b" * 100_000


async def test_a_draft_is_written_where_it_will_be_read_and_shown_only_when_published(blobs: BlobStore):
    draft = await blobs.draft("w", 1, 0, 6)
    draft.memory[:] = b"abcdef"

    before = await blobs.newest("w")
    info = await draft.publish(digest_of(draft.memory))

    assert before is None
    assert await blobs.get("w", 1) == (info, b"abcdef")


async def test_a_blob_without_a_digest_says_so(blobs: BlobStore):
    info = await blobs.put("w", 1, 0, [b"fast"], checked=False)

    assert info.digest == ""
    assert (await blobs.get("w", 1))[1] == b"fast"


async def test_what_is_read_stays_as_it_is_through_any_number_of_later_versions(blobs: BlobStore):
    held = {}
    for version in range(1, 9):
        await blobs.put("w", version, 0, [bytes([version]) * 5_000_000])
        held[version] = (await blobs.get("w", version))[1][1000:1010]  # a slice alone keeps it

    assert {version: bytes(view) for version, view in held.items()} == {v: bytes([v]) * 10 for v in range(1, 9)}


async def test_another_process_writes_into_a_draft_until_it_is_published(connect: Callable[[], BlobStore]):
    writer, other = connect(), connect()
    for version in (1, 2):  # the second lies where both have written before
        draft = await writer.draft("w", version, 1, 4)
        draft.memory[:2] = b"ab"

        shared = await other.shared(draft.segment, 4)
        shared[2:] = b"cd"
        del shared
        info = await draft.publish(digest_of(draft.memory))

        assert bytes((await other.get("w", version))[1]) == b"abcd"
        assert info.digest == digest_of(b"abcd")


async def test_what_is_no_draft_is_not_shared(connect: Callable[[], BlobStore]):
    blobs = connect()

    with pytest.raises(BlobError, match="segment 77 is no draft of 4 bytes"):
        await blobs.shared(77, 4)


async def test_a_name_that_is_forgotten_is_gone_and_what_was_got_stays(connect: Callable[[], BlobStore]):
    writer, reader = connect(), connect()
    for version in (1, 2):
        await writer.put("w", version, 1, [b"old" * 1000])
    await writer.put("other", 1, 1, [b"kept"])
    _, held = await reader.get("w", 2)

    await writer.forget("w")
    await writer.forget("w")
    again = await writer.put("w", 0, 1, [b"new" * 1000])

    assert await reader.newest("w") == again
    assert bytes(held) == b"old" * 1000
    assert bytes((await reader.get("w", 0))[1]) == b"new" * 1000
    assert bytes((await reader.get("other", 1))[1]) == b"kept"
    with pytest.raises(BlobMissing):
        await reader.get("w", 2)
