"""The Store contract, over every implementation."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from rubato.runtime.store.store import MAX_VALUE_BYTES, Append, Fence, Fenced, Forgotten, Store, WriteNumber
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


async def test_streams_fences_and_leases_are_not_keys(store: Store):
    await store.append("s", b"1")
    await store.lease("l", 1, b"", 10.0)
    await store.write({}, fence=Fence("x", 1), turn=WriteNumber(1, after=(0, 0)), append=Append("t", 1, [b"1"]))

    found = await store.scan("")

    assert found == {}


async def test_a_zombie_can_not_write_and_changes_nothing(store: Store):
    await store.write({"k": b"new"}, fence=Fence("trainer", 2))

    with pytest.raises(Fenced, match=r"'trainer' writes with token 1, but 2 was seen"):
        await store.write({"k": b"old", "other": b"old"}, fence=Fence("trainer", 1))

    assert await store.scan("") == {"k": b"new"}
    await store.write({"k": b"newer"}, fence=Fence("trainer", 2))
    await store.write({"k": b"free"})
    await store.write({"k": b"else"}, fence=Fence("another", 1))


async def test_a_fence_is_raised_by_a_write_that_changes_nothing(store: Store):
    await store.write({}, fence=Fence("buffer", 5))

    with pytest.raises(Fenced):
        await store.write({"k": b""}, fence=Fence("buffer", 4))


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


async def test_values_are_fetched_in_the_order_of_their_keys(store: Store):
    await store.write({"a": b"1", "b": b"", "c": b"\x00\xff"})

    found = await store.fetch(["c", "never", "a", "b", "a"])

    assert found == [b"\x00\xff", None, b"1", b"", b"1"]
    assert await store.fetch([]) == []


NEVER = (0, 0)
"""What is known of a fence under which nobody wrote."""


async def take(store: Store, name: str, token: int, *, writes: int = 1) -> None:
    """Take a fence over, and make so many writes in all."""
    await store.write({}, fence=Fence(name, token), turn=WriteNumber(1, after=await store.fenced(name)))
    for number in range(2, writes + 1):
        await store.write({}, fence=Fence(name, token), turn=WriteNumber(number))


async def test_a_fence_tells_its_newest_token_and_the_number_of_its_newest_write(store: Store):
    told = [await store.fenced("x")]
    await take(store, "x", 4, writes=3)
    told.append(await store.fenced("x"))
    await store.write({}, fence=Fence("x", 4))
    told.append(await store.fenced("x"))
    await store.write({}, fence=Fence("x", 6))
    told.append(await store.fenced("x"))

    assert told == [(0, 0), (4, 3), (4, 3), (6, 0)]
    assert await store.fenced("y") == (0, 0)


async def test_numbered_writes_pass_one_after_the_other(store: Store):
    await take(store, "x", 4)
    for number in (2, 3, 4):
        await store.write({f"k{number}": b"%d" % number}, fence=Fence("x", 4), turn=WriteNumber(number))

    assert await store.scan("") == {"k2": b"2", "k3": b"3", "k4": b"4"}


@pytest.mark.parametrize("after", [None, NEVER, (4, 1), (4, 2), (9, 9)])
async def test_a_write_whose_number_comes_again_changes_nothing(store: Store, after: tuple[int, int] | None):
    await take(store, "x", 4)
    await store.write({"k": b"1"}, fence=Fence("x", 4), turn=WriteNumber(2), append=Append("s", 1, [b"1"]))
    await store.write({"k": b"2"})

    await store.write({"k": b"3"}, fence=Fence("x", 4), turn=WriteNumber(2, after), append=Append("s", 1, [b"3"]))

    assert await store.get("k") == b"2"
    assert await store.read("s", 0) == [(1, b"1")]
    await store.write({"k": b"4"}, fence=Fence("x", 4), turn=WriteNumber(3))
    assert await store.get("k") == b"4"


@pytest.mark.parametrize("number", [1, 4, 5, 2**40])
async def test_a_write_after_a_gap_is_forgotten_and_changes_nothing(store: Store, number: int):
    await take(store, "x", 4, writes=2)

    with pytest.raises(Forgotten, match=rf"'x' makes write {number} with token 4, but the store lost the one"):
        await store.write({"k": b""}, fence=Fence("x", 4), turn=WriteNumber(number), append=Append("s", 1, [b"1"]))

    assert await store.scan("") == {}
    assert await store.read("s", 0) == []
    assert await store.fenced("x") == (4, 2)
    await store.write({"k": b""}, fence=Fence("x", 4), turn=WriteNumber(3))


async def test_a_write_that_knows_where_the_fence_stands_passes_after_a_gap_and_is_counted_from(store: Store):
    await take(store, "x", 4)

    await store.write({"k": b"9"}, fence=Fence("x", 4), turn=WriteNumber(9, after=(4, 1)))

    assert await store.get("k") == b"9"
    with pytest.raises(Forgotten):
        await store.write({"k": b"2"}, fence=Fence("x", 4), turn=WriteNumber(2))
    await store.write({"k": b"10"}, fence=Fence("x", 4), turn=WriteNumber(10))
    assert await store.get("k") == b"10"


@pytest.mark.parametrize("after", [NEVER, (4, 2), (4, 4), (3, 3), (5, 3)])
async def test_a_write_that_takes_the_fence_for_another_value_is_forgotten(store: Store, after: tuple[int, int]):
    await take(store, "x", 4, writes=3)

    for token in (4, 5):
        with pytest.raises(Forgotten):
            await store.write({"k": b""}, fence=Fence("x", token), turn=WriteNumber(9, after), append=Append("s", 1, [b""]))

    assert await store.scan("") == {}
    assert await store.read("s", 0) == []
    assert await store.fenced("x") == (4, 3)


@pytest.mark.parametrize("number", [1, 4, 99])
@pytest.mark.parametrize("after", [None, NEVER, (4, 3), (5, 1)])
async def test_a_zombie_is_told_that_it_is_fenced_whatever_its_number(store: Store, number: int, after: tuple[int, int] | None):
    await take(store, "x", 4, writes=3)
    await take(store, "x", 5)
    await store.write({"k": b"new"}, fence=Fence("x", 5), turn=WriteNumber(2))

    with pytest.raises(Fenced, match=r"'x' writes with token 4, but 5 was seen"):
        await store.write({"k": b"old"}, fence=Fence("x", 4), turn=WriteNumber(number, after), append=Append("s", 1, [b"1"]))

    assert await store.get("k") == b"new"
    assert await store.read("s", 0) == []
    await store.write({}, fence=Fence("x", 5), turn=WriteNumber(3))


async def test_a_new_token_begins_only_where_it_knows_what_was_written_before_it(store: Store):
    await take(store, "x", 4, writes=3)
    known = await store.fenced("x")
    await store.write({"k": b"4"}, fence=Fence("x", 4), turn=WriteNumber(4))

    for turn in (WriteNumber(1), WriteNumber(4), WriteNumber(5), WriteNumber(1, known)):
        with pytest.raises(Forgotten):
            await store.write({"k": b"early"}, fence=Fence("x", 5), turn=turn)
    await store.write({"k": b"still"}, fence=Fence("x", 4), turn=WriteNumber(5))
    await store.write({"k": b"one"}, fence=Fence("x", 5), turn=WriteNumber(1, after=(4, 5)))
    await store.write({"next": b""}, fence=Fence("x", 5), turn=WriteNumber(2))

    assert await store.scan("") == {"k": b"one", "next": b""}


async def test_each_fence_counts_for_itself_and_a_fenced_write_without_a_turn_is_not_counted(store: Store):
    await take(store, "x", 4)
    await take(store, "y", 4)

    await store.write({}, fence=Fence("x", 4))
    await store.write({}, fence=Fence("x", 4), turn=WriteNumber(2))
    await store.write({}, fence=Fence("x", 5))

    with pytest.raises(Forgotten):
        await store.write({}, fence=Fence("x", 5), turn=WriteNumber(3))
    await store.write({}, fence=Fence("x", 5), turn=WriteNumber(1))
    await store.write({}, fence=Fence("y", 4), turn=WriteNumber(2))


async def test_writes_of_one_number_at_the_same_time_are_made_once(store: Store):
    async def write(n: int) -> None:
        changes, append = {f"k{n}": b""}, Append("s", 1, [b"%d" % n])
        await store.write(changes, fence=Fence("x", 1), turn=WriteNumber(1, after=NEVER), append=append)

    await asyncio.gather(*(write(n) for n in range(20)))

    (key,) = await store.scan("")
    assert await store.read("s", 0) == [(1, key[1:].encode())]


async def test_what_is_appended_is_read_back_under_its_index(store: Store):
    await store.write({"k": b"1"}, append=Append("s", 1, [b"one", b"", b"\x00\xff"]))
    await store.write({}, append=Append("s", 4, [b"four"]))
    await store.write({}, append=Append("other", 1, []))

    assert await store.read("s", 0) == [(1, b"one"), (2, b""), (3, b"\x00\xff"), (4, b"four")]
    assert await store.read("s", 2) == [(3, b"\x00\xff"), (4, b"four")]
    assert await store.read("s", 4) == []
    assert await store.read("other", 0) == []
    assert await store.get("k") == b"1"


async def test_appended_entries_replace_the_tail_from_their_first_index_on(store: Store):
    await store.write({}, append=Append("s", 1, [b"1", b"2", b"3", b"4", b"5"]))

    await store.write({}, append=Append("s", 3, [b"three"]))
    shorter = await store.read("s", 0)
    await store.write({}, append=Append("s", 2, [b"two", b"drei", b"vier"]))

    assert shorter == [(1, b"1"), (2, b"2"), (3, b"three")]
    assert await store.read("s", 0) == [(1, b"1"), (2, b"two"), (3, b"drei"), (4, b"vier")]
    assert await store.append("s", b"next") == 5


async def test_an_append_without_entries_cuts_the_tail(store: Store):
    await store.write({}, append=Append("s", 1, [b"1", b"2", b"3"]))

    await store.write({}, append=Append("s", 2, []))
    cut = await store.read("s", 0)
    await store.write({}, append=Append("s", 1, []))

    assert cut == [(1, b"1")]
    assert await store.read("s", 0) == []
    assert await store.append("s", b"again") == 1
    assert await store.read("s", 0) == [(1, b"again")]


async def test_the_whole_stream_is_replaced_from_its_first_index(store: Store):
    await store.write({}, append=Append("s", 1, [b"1", b"2", b"3"]))

    await store.write({}, append=Append("s", 1, [b"one"]))

    assert await store.read("s", 0) == [(1, b"one")]


async def test_entries_up_to_an_index_are_forgotten(store: Store):
    await store.write({}, append=Append("s", 1, [b"%d" % n for n in range(1, 6)]))

    await store.write({}, append=Append("s", 6, [b"6"], forget=3))
    kept = await store.read("s", 0)
    await store.write({}, append=Append("s", 7, [b"7"], forget=2))
    same = await store.read("s", 0)
    await store.write({}, append=Append("s", 8, [b"8"], forget=8))

    assert kept == [(4, b"4"), (5, b"5"), (6, b"6")]
    assert same == [*kept, (7, b"7")]
    assert await store.read("s", 0) == []
    await store.write({}, append=Append("s", 9, [b"9"], forget=8))
    assert await store.read("s", 0) == [(9, b"9")]


async def test_what_was_forgotten_may_be_said_anew_under_its_index(store: Store):
    await store.write({}, append=Append("s", 1, [b"1", b"2", b"3", b"4"], forget=3))

    await store.write({}, append=Append("s", 2, [b"two", b"three"]))

    assert await store.read("s", 0) == [(2, b"two"), (3, b"three")]


async def test_a_first_index_beyond_the_end_leaves_a_gap(store: Store):
    await store.write({}, append=Append("s", 1, [b"1", b"2"]))

    await store.write({}, append=Append("s", 5, [b"5", b"6"]))
    await store.write({}, append=Append("new", 9, [b"9"]))

    assert await store.read("s", 0) == [(1, b"1"), (2, b"2"), (5, b"5"), (6, b"6")]
    assert await store.read("s", 3) == [(5, b"5"), (6, b"6")]
    assert await store.read("new", 0) == [(9, b"9")]
    assert (await store.append("s", b"7"), await store.append("new", b"10")) == (7, 10)


async def test_a_refused_write_appends_nothing(store: Store):
    await store.write({}, fence=Fence("x", 2), turn=WriteNumber(1, after=NEVER), append=Append("s", 1, [b"1"]))

    with pytest.raises(Fenced):
        await store.write({}, fence=Fence("x", 1), append=Append("s", 1, [b"old"], forget=1))
    with pytest.raises(Forgotten):
        await store.write({}, fence=Fence("x", 2), turn=WriteNumber(5), append=Append("s", 1, [], forget=1))

    assert await store.read("s", 0) == [(1, b"1")]


async def test_both_ways_to_append_count_on_from_each_other(store: Store):
    first = await store.append("s", b"1")
    await store.write({}, append=Append("s", 2, [b"2", b"3"]))
    fourth = await store.append("s", b"4")
    await store.write({}, append=Append("s", 4, [b"four"]))

    assert (first, fourth) == (1, 4)
    assert await store.append("s", b"5", limit=2) == 5
    assert await store.read("s", 0) == [(4, b"four"), (5, b"5")]


async def test_a_waiting_read_returns_at_an_append_within_a_write(store: Store):
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(store.read("s", 0, wait_s=60.0))
        await asyncio.sleep(0.05)
        await store.write({}, append=Append("s", 1, [b"new"]))

    assert reader.result() == [(1, b"new")]


async def test_a_thousand_entries_and_changes_fit_into_one_write(store: Store):
    changes = {f"k{n}": b"%d" % n for n in range(2500)}
    entries = [b"%d" % n for n in range(2500)]

    await store.write(changes, fence=Fence("x", 1), turn=WriteNumber(1, after=NEVER), append=Append("s", 1, entries))

    assert len(await store.scan("k")) == 2500
    assert await store.fetch(list(changes)) == list(changes.values())
    assert await store.read("s", 2000) == [(n, b"%d" % (n - 1)) for n in range(2001, 2501)]


async def test_a_turn_needs_a_fence(store: Store):
    with pytest.raises(ValueError, match="a turn only behind a fence"):
        await store.write({"k": b""}, turn=WriteNumber(1))

    assert await store.scan("") == {}


async def test_numbers_that_make_no_sense_are_refused(store: Store):
    with pytest.raises(ValueError, match="turn is 0"):
        await store.write({"k": b""}, fence=Fence("x", 1), turn=WriteNumber(0))
    with pytest.raises(ValueError, match="turn"):
        await store.write({"k": b""}, fence=Fence("x", 1), turn=WriteNumber(2**60))
    with pytest.raises(ValueError, match="first index is 0"):
        await store.write({"k": b""}, append=Append("s", 0, [b""]))

    assert await store.scan("") == {}


async def test_a_value_above_the_limit_is_refused_and_one_at_the_limit_is_kept(store: Store):
    largest = b"x" * MAX_VALUE_BYTES

    with pytest.raises(ValueError, match=f"'k' gets {MAX_VALUE_BYTES + 1} bytes"):
        await store.write({"other": b"", "k": largest + b"x"})
    with pytest.raises(ValueError, match=f"'s' gets {MAX_VALUE_BYTES + 1} bytes"):
        await store.write({"other": b""}, append=Append("s", 1, [b"", largest + b"x"]))

    assert await store.scan("") == {}
    assert await store.read("s", 0) == []
    await store.write({"k": largest})
    assert await store.fetch(["k"]) == [largest]


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


async def test_holders_are_the_tokens_of_live_leases_by_name(store: Store):
    await store.lease("actor/b", 3, b"long", 30.0)
    await store.lease("actor/a", 2**53 - 1, b"", 30.0)
    await store.lease("actor/lapsed", 4, b"", 0.05)
    await store.lease("actor/released", 5, b"", 30.0)
    await store.release("actor/released", 5)
    await store.lease("other", 6, b"", 30.0)
    await asyncio.sleep(0.1)

    found = await store.holders("actor/")

    assert [*found.items()] == [("actor/a", 2**53 - 1), ("actor/b", 3)]


async def test_one_lease_is_asked_for_by_its_whole_name(store: Store):
    await store.lease("node-1", 2**53 - 1, b"one", 30.0)
    await store.lease("node-10", 2, b"ten", 0.05)

    found = await store.held("node-1")

    assert found is not None
    assert (found.token, found.value) == (2**53 - 1, b"one")
    assert 0.0 < found.remaining_s <= 30.0
    assert await store.held("node") is None
    await asyncio.sleep(0.1)
    assert await store.held("node-10") is None
    await store.release("node-1", 2**53 - 1)
    assert await store.held("node-1") is None


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
