"""The Store contract, over every implementation."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from runtime.store.errors import Fenced
from runtime.store.store import Fence, Store
from tests.stores import STORE_KINDS, state_url_of, store_at


@pytest.fixture(params=STORE_KINDS)
def state_url(request: pytest.FixtureRequest) -> str:
    return state_url_of(request.param, request)


@pytest.fixture
async def store(state_url: str) -> AsyncGenerator[Store]:
    async with store_at(state_url) as store:
        yield store


async def test_a_written_key_is_read_back_and_a_deleted_one_is_gone(store: Store):
    await store.write({"a": b"\x00\xff", "b": b"", "c": b"3"})

    await store.write({"a": None, "never": None, "c": b"4"})

    assert await store.get("a") is None
    assert await store.get("b") == b""
    assert await store.get("c") == b"4"


async def test_scan_finds_exactly_the_keys_with_the_prefix_sorted_by_their_bytes(store: Store):
    keys = ["p/b", "p/a", "p/ä", "p/Z", "p/*", "p", "p0", "q/a", "p/\U0001f600", "p/�"]
    await store.write({key: key.encode() for key in keys})

    found = await store.scan("p/")

    assert list(found) == sorted(key for key in keys if key.startswith("p/"))
    assert found["p/ä"] == "p/ä".encode()
    assert list(await store.scan("")) == sorted(keys)
    assert await store.scan("p/[") == {}


async def test_streams_leases_and_worksets_are_not_keys(store: Store):
    await store.append("s", b"1")
    await store.lease("l", 1, b"", 10.0)
    await store.workset("w").end("i", "g", "lost")

    found = await store.scan("")

    assert found == {}


async def test_a_zombie_can_not_write_and_changes_nothing(store: Store):
    await store.write({"k": b"new"}, fence=Fence("trainer", 2))

    with pytest.raises(Fenced, match=r"'trainer' writes with token 1, but 2 was seen"):
        await store.write({"k": b"old", "other": b"old"}, fence=Fence("trainer", 1))
    with pytest.raises(Fenced):
        await store.compare_and_set("k", b"new", b"old", fence=Fence("trainer", 1))

    assert await store.scan("") == {"k": b"new"}
    await store.write({"k": b"newer"}, fence=Fence("trainer", 2))
    await store.write({"k": b"free"})
    await store.write({"k": b"else"}, fence=Fence("another", 1))


async def test_a_fence_is_raised_by_a_write_that_changes_nothing(store: Store):
    await store.write({}, fence=Fence("buffer", 5))

    with pytest.raises(Fenced):
        await store.write({"k": b""}, fence=Fence("buffer", 4))


async def test_compare_and_set_writes_only_over_what_is_expected(store: Store):
    took = await store.compare_and_set("k", None, b"1")
    again = await store.compare_and_set("k", None, b"2")
    wrong = await store.compare_and_set("k", b"0", b"2")
    right = await store.compare_and_set("k", b"1", b"")
    empty = await store.compare_and_set("k", b"", b"3")

    assert (took, again, wrong, right, empty) == (True, False, False, True, True)
    assert await store.get("k") == b"3"
    assert list(await store.scan("")) == ["k"]


async def test_of_many_that_compare_and_set_at_once_one_wins(store: Store):
    wins = await asyncio.gather(*(store.compare_and_set("k", None, b"%d" % i) for i in range(40)))

    assert sum(wins) == 1
    assert await store.get("k") == b"%d" % wins.index(True)


async def test_increment_counts_from_one_and_never_below_at_least(store: Store):
    numbers = [await store.increment("n"), await store.increment("n", at_least=10), await store.increment("n")]
    backwards = await store.increment("n", at_least=3)

    assert numbers == [1, 10, 11]
    assert backwards == 12
    assert await store.get("n") == b"12"


async def test_increments_at_once_all_differ_and_are_exact_for_large_numbers(store: Store):
    await store.increment("n", at_least=2**52)

    numbers = await asyncio.gather(*(store.increment("n") for _ in range(40)))

    assert sorted(numbers) == [2**52 + 1 + i for i in range(40)]


async def test_a_key_that_is_no_number_is_not_incremented(store: Store):
    await store.write({"n": b"word"})

    with pytest.raises(ValueError, match="holds something else"):
        await store.increment("n")

    assert await store.get("n") == b"word"


async def test_a_stream_numbers_its_entries_from_one_without_gaps(store: Store):
    indices = [await store.append("s", b"%d" % i) for i in range(5)]

    assert indices == [1, 2, 3, 4, 5]
    assert await store.read("s", 0) == [(i, b"%d" % (i - 1)) for i in indices]
    assert await store.read("s", 3) == [(4, b"3"), (5, b"4")]
    assert await store.read("s", 5) == []
    assert await store.read("s", 99) == []
    assert await store.read("another", 0) == []


async def test_a_stream_keeps_its_newest_entries_and_goes_on_counting(store: Store):
    for i in range(1, 8):
        await store.append("s", b"%d" % i, limit=3)

    kept = await store.read("s", 0)

    assert kept == [(5, b"5"), (6, b"6"), (7, b"7")]
    assert await store.append("s", b"8", limit=1) == 8
    assert await store.read("s", 0) == [(8, b"8")]


async def test_a_read_gives_a_thousand_entries_at_most(store: Store):
    for _ in range(3):
        await asyncio.gather(*(store.append("s", b"") for _ in range(400)))

    first = await store.read("s", 0)
    rest = await store.read("s", first[-1][0])

    assert [index for index, _ in first + rest] == list(range(1, 1201))
    assert len(first) == 1000


async def test_a_waiting_read_returns_as_soon_as_an_entry_is_there(store: Store):
    await store.append("s", b"old")

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(store.read("s", 1, wait_s=60.0)) for _ in range(3)]
        await asyncio.sleep(0.05)  # most likely they wait by now; the outcome is the same if they do not
        await store.append("other", b"no")
        await store.append("s", b"new")

    assert [reader.result() for reader in readers] == [[(2, b"new")]] * 3


async def test_a_waiting_read_ends_empty_after_its_time(store: Store):
    loop = asyncio.get_running_loop()
    began = loop.time()

    found = await store.read("s", 0, wait_s=0.2)

    assert found == []
    assert loop.time() - began >= 0.19


async def test_a_cancelled_read_harms_nobody(store: Store):
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(store.read("s", 0, wait_s=60.0))
        await asyncio.sleep(0.05)
        reader.cancel()

    assert await store.append("s", b"1") == 1
    assert await store.read("s", 0, wait_s=1.0) == [(1, b"1")]


async def test_a_caller_that_is_cancelled_ends_at_any_moment(store: Store):
    async def use(n: int) -> None:
        while True:
            await store.get("k")
            await store.append("s", b"%d" % n, limit=5)
            await store.read("s", 10**9, wait_s=0.002)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await store.get("k")
        for n in range(200):
            users = [tasks.create_task(use(n)) for _ in range(3)]
            for _ in range(n % 40):
                await asyncio.sleep(0)
            await asyncio.sleep(n % 7 / 2000)
            for user in users:
                user.cancel()
            await asyncio.wait(users)

    assert await store.increment("n") == 1


async def test_a_lease_is_renewed_by_its_holder_and_taken_by_a_higher_token_only(store: Store):
    first = await store.lease("a/x", 3, b"one", 30.0)
    renewed = await store.lease("a/x", 3, b"two", 60.0)
    lower = await store.lease("a/x", 2, b"zombie", 60.0)
    higher = await store.lease("a/x", 4, b"three", 60.0)
    old = await store.lease("a/x", 3, b"zombie", 60.0)

    assert (first, renewed, lower, higher, old) == (True, True, False, True, False)
    held = (await store.leases("a/"))["a/x"]
    assert (held.token, held.value) == (4, b"three")
    assert 50 < held.remaining_s <= 60


async def test_leases_are_listed_by_prefix_in_order(store: Store):
    for name in ("actor/b", "actor/a", "actors", "run"):
        await store.lease(name, 1, name.encode(), 30.0)

    found = await store.leases("actor/")

    assert [(name, lease.value) for name, lease in found.items()] == [("actor/a", b"actor/a"), ("actor/b", b"actor/b")]


async def test_a_lease_lapses_and_its_token_stays_known(store: Store):
    await store.lease("x", 5, b"", 0.05)
    await asyncio.sleep(0.1)

    assert await store.leases("") == {}
    assert not await store.release("x", 5)
    assert not await store.lease("x", 4, b"zombie", 10.0)
    assert await store.lease("x", 5, b"back", 10.0)
    assert (await store.leases(""))["x"].value == b"back"


async def test_a_released_lease_is_gone_for_lower_tokens_and_free_for_others(store: Store):
    await store.lease("x", 5, b"", 10.0)

    assert not await store.release("x", 4)
    assert not await store.release("x", 6)
    assert await store.release("x", 5)
    assert not await store.release("x", 5)
    assert await store.leases("") == {}
    assert not await store.lease("x", 4, b"zombie", 10.0)
    assert await store.lease("x", 6, b"next", 10.0)


async def test_what_makes_no_sense_is_refused_before_anything_happens(store: Store):
    with pytest.raises(ValueError, match="time to live"):
        await store.lease("x", 1, b"", 0.0)
    with pytest.raises(ValueError, match="token"):
        await store.lease("x", -1, b"", 1.0)
    with pytest.raises(ValueError, match="fence token"):
        await store.write({}, fence=Fence("x", 2**60))
    with pytest.raises(ValueError, match="limit"):
        await store.append("s", b"", limit=0)
    with pytest.raises(ValueError, match="after"):
        await store.read("s", -1)

    assert await store.append("s", b"") == 1
