"""The WorkSet contract, over every implementation."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from runtime.store.errors import Fenced, OutOfOrder, StaleEpoch
from runtime.store.store import Fence
from runtime.store.workset import Claimed, Counts, Ended, Item, WorkSet
from tests.stores import STORE_KINDS, state_url_of, store_at


@pytest.fixture(params=STORE_KINDS)
def state_url(request: pytest.FixtureRequest) -> str:
    return state_url_of(request.param, request)


@pytest.fixture
async def workset(state_url: str) -> AsyncGenerator[WorkSet]:
    async with store_at(state_url) as store:
        yield store.workset("samples")


async def sealed(workset: WorkSet, group: str, *scores: int) -> tuple[Item, ...]:
    """A ready group with one item per score."""
    items = tuple(Item(f"{group}.{i}", group, score, b"p%d" % i, b"n%d" % i) for i, score in enumerate(scores))
    for item in items:
        assert await workset.put(item) == "stored"
    assert await workset.seal(group, "trained")
    return items


async def test_an_item_is_stored_once_whatever_became_of_it(workset: WorkSet):
    item = Item("a", "g", 1, b"payload")
    assert await workset.put(item) == "stored"
    assert await workset.put(item) == "duplicate"
    assert not await workset.end("a", "g", "failed")

    await workset.discard("g", "dropped")

    assert await workset.put(item) == "duplicate"
    assert not await workset.end("a", "g", "failed")
    assert await workset.members("g") == ()


async def test_an_item_that_failed_is_logged_once_and_can_not_be_put(workset: WorkSet):
    ended = [await workset.end("a", "g", "failed", b"why"), await workset.end("a", "g", "failed")]

    assert ended == [True, False]
    assert await workset.put(Item("a", "g", 1, b"")) == "duplicate"
    assert await workset.ended(0) == [Ended(1, "a", "g", "failed", 0, 0, b"why")]


async def test_a_held_group_can_not_be_claimed_and_a_sealed_one_once(workset: WorkSet):
    await workset.put(Item("a", "g", 1, b""))
    before = await workset.claim(1, 0, 1, 0)

    took = [await workset.seal("g", "trained"), await workset.seal("g", "trained"), await workset.seal("no", "trained")]

    assert before == Claimed((), (), 0)
    assert took == [True, False, False]
    claimed = await workset.claim(1, 0, 1, 0)
    assert [name for name, _ in claimed.groups] == ["g"]
    assert not await workset.seal("g", "trained")
    assert await workset.claim(1, 0, 2, 0) == Claimed((), (), 0)


async def test_a_group_of_which_items_are_missing_is_not_sealed(workset: WorkSet):
    for name in "ab":
        await workset.put(Item(name, "g", 1, b""))

    took = [await workset.seal("g", "trained", num) for num in (3, 2, 2)]

    assert took == [False, True, False]
    assert (await workset.counts()).ready == 1


async def test_a_claim_takes_the_oldest_groups_with_their_items_by_id(workset: WorkSet):
    second = await sealed(workset, "b", 5, 3)
    await sealed(workset, "newest", 4)
    third = await sealed(workset, "c", 9, 3)
    first = await sealed(workset, "z", 2)

    claimed = await workset.claim(3, 0, 1, 0)

    assert claimed == Claimed((("z", first), ("b", second), ("c", third)), (), 1)


async def test_ids_and_groups_are_ordered_by_their_bytes(workset: WorkSet):
    names = ["b", "B", "ä", "a-b", "a_b", "ab", "a", "_"]
    for name in names:
        await workset.put(Item(f"{name}2", name, 1, b""))
        await workset.put(Item(f"{name}1", name, 1, b""))
        await workset.put(Item(f"x{name}", "ids", 7, b""))
        await workset.seal(name, "trained")
    await workset.seal("ids", "trained")

    claimed = await workset.claim(len(names) + 1, 0, 1, 0)

    assert [name for name, _ in claimed.groups] == [*sorted(names), "ids"]
    assert [item.id for item in claimed.groups[-1][1]] == sorted(f"x{name}" for name in names)
    assert await workset.members("ids") == tuple(sorted(f"x{name}" for name in names))


async def test_too_few_ready_groups_bind_nothing_but_the_stale_ones_end(workset: WorkSet):
    await sealed(workset, "old2", 1)
    await sealed(workset, "old1", 1, 9)
    await sealed(workset, "fresh", 2)

    claimed = await workset.claim(2, 2, 1, 0)

    assert claimed == Claimed((), ("old1", "old2"), 1)
    assert [(e.index, e.id, e.fate, e.step) for e in await workset.ended(0)] == [
        (1, "old1.0", "stale", 0),
        (2, "old1.1", "stale", 0),
        (3, "old2.0", "stale", 0),
    ]
    assert (await workset.counts()).bound_steps == ()


async def test_a_bound_step_is_handed_out_again_whatever_is_asked(workset: WorkSet):
    await sealed(workset, "a", 1)
    await sealed(workset, "b", 2)
    first = await workset.claim(2, 0, 1, 0)
    await sealed(workset, "c", 0)

    again = await workset.claim(7, 99, 1, 3)

    assert again == first._replace(ready=1)
    assert (await workset.counts()).epoch == 3


async def test_several_steps_are_bound_at_once_and_committed_in_order(workset: WorkSet):
    await sealed(workset, "a", 1)
    await sealed(workset, "b", 2)
    await workset.claim(1, 0, 1, 0)
    await workset.claim(1, 0, 2, 0)

    with pytest.raises(OutOfOrder, match="step 2 was committed, but 1 comes next"):
        await workset.commit(2, 0)

    assert (await workset.counts()).bound_steps == (1, 2)
    assert [await workset.commit(1, 0), await workset.commit(2, 0)] == [1, 1]


async def test_a_commit_ends_its_items_once_with_step_epoch_and_note(workset: WorkSet):
    await sealed(workset, "a", 1, 2)
    await workset.new_epoch()
    await workset.claim(1, 0, 1, 1)

    committed = [await workset.commit(1, 1), await workset.commit(1, 1)]

    assert committed == [2, 0]
    assert await workset.ended(0) == [
        Ended(1, "a.0", "a", "trained", 1, 1, b"n0"),
        Ended(2, "a.1", "a", "trained", 1, 1, b"n1"),
    ]
    with pytest.raises(OutOfOrder, match="step 1 was claimed, but 1 is committed already"):
        await workset.claim(1, 0, 1, 1)


async def test_a_step_is_bound_only_behind_one_that_is_bound_or_committed(workset: WorkSet):
    for name in "abc":
        await sealed(workset, name, 1)

    with pytest.raises(OutOfOrder, match="step 2 was claimed, but step 1 is not bound and 0 is the last"):
        await workset.claim(1, 9, 2, 0)

    assert (await workset.counts()).ready == 3
    assert len((await workset.claim(1, 0, 1, 0)).groups) == 1
    assert len((await workset.claim(1, 0, 2, 0)).groups) == 1
    await workset.commit(1, 0)
    await workset.commit(2, 0)
    assert len((await workset.claim(1, 0, 3, 0)).groups) == 1


async def test_a_step_that_bound_nothing_is_committed_all_the_same(workset: WorkSet):
    committed = await workset.commit(1, 0)

    assert committed == 0
    assert (await workset.counts()).committed == 1


async def test_a_replaced_claimer_is_refused_and_changes_nothing(workset: WorkSet):
    await sealed(workset, "a", 1)
    await workset.claim(1, 0, 1, 0)
    epoch = await workset.new_epoch(at_least=7)

    with pytest.raises(StaleEpoch, match="epoch 0 acts, but 7 is the newest"):
        await workset.claim(1, 0, 2, 0)
    with pytest.raises(StaleEpoch):
        await workset.commit(1, 6)

    assert epoch == 7
    assert await workset.new_epoch(at_least=3) == 8
    assert await workset.commit(1, 8) == 1


async def test_a_refused_commit_does_not_raise_the_epoch(workset: WorkSet):
    with pytest.raises(OutOfOrder):
        await workset.commit(3, 9)

    assert (await workset.counts()).epoch == 0


async def test_discard_ends_held_and_ready_groups_and_leaves_bound_ones(workset: WorkSet):
    await workset.put(Item("h", "held", 1, b"", b"note"))
    await sealed(workset, "ready", 5, 5)
    await sealed(workset, "bound", 1)
    await workset.claim(1, 0, 1, 0)

    ended = [await workset.discard(group, "dropped") for group in ("held", "ready", "bound", "no")]

    assert ended == [1, 2, 0, 0]
    assert await workset.ended(0) == [
        Ended(1, "h", "held", "dropped", 0, 0, b"note"),
        Ended(2, "ready.0", "ready", "dropped", 0, 0, b"n0"),
        Ended(3, "ready.1", "ready", "dropped", 0, 0, b"n1"),
    ]
    assert await workset.commit(1, 0) == 1


async def test_an_item_for_a_sealed_group_ends_late_and_the_group_stays_as_it_was(workset: WorkSet):
    items = await sealed(workset, "g", 1)
    await workset.put(Item("late1", "g", 0, b"", b"1"))
    claimed = await workset.claim(1, 0, 1, 0)
    await workset.put(Item("late2", "g", 0, b"", b"2"))

    assert claimed.groups == (("g", items),)
    assert [(e.id, e.fate, e.note) for e in await workset.ended(0)] == [
        ("late1", "late", b"1"),
        ("late2", "late", b"2"),
    ]
    assert await workset.members("g") == ("g.0",)


async def test_a_name_may_be_used_by_a_new_group_once_the_old_one_ended(workset: WorkSet):
    await workset.put(Item("a", "g", 9, b"", b"old"))
    await workset.discard("g", "dropped")

    await workset.put(Item("b", "g", 4, b"new"))
    await workset.seal("g", "kept")

    assert (await workset.claim(1, 4, 1, 0)).groups == (("g", (Item("b", "g", 4, b"new"),)),)


async def test_the_log_is_read_in_pieces_and_trimmed_without_renumbering(workset: WorkSet):
    for i in range(1, 7):
        await workset.end(f"i{i}", "g", "failed")

    await workset.trim(2)

    assert [e.index for e in await workset.ended(0, limit=3)] == [3, 4, 5]
    assert [e.index for e in await workset.ended(4)] == [5, 6]
    await workset.trim(100)
    assert await workset.ended(0) == []
    await workset.end("i7", "g", "failed")
    assert [e.index for e in await workset.ended(0)] == [7]
    assert (await workset.counts()).ended == 7


async def test_ids_are_forgotten_with_their_log_entries_and_no_earlier(workset: WorkSet):
    for i in (1, 2, 3):
        await workset.put(Item(f"i{i}", f"g{i}", 1, b""))
    await workset.discard("g1", "dropped")
    await workset.discard("g2", "dropped")

    await workset.trim(1)

    assert await workset.put(Item("i1", "g1", 1, b"")) == "stored"
    assert await workset.put(Item("i2", "g2", 1, b"")) == "duplicate"
    assert await workset.put(Item("i3", "g3", 1, b"")) == "duplicate"


async def test_counts_tell_where_everything_is(workset: WorkSet):
    assert await workset.counts() == Counts(0, 0, 0, 0, 0, 0, ())
    await workset.put(Item("h1", "held", 1, b""))
    await workset.put(Item("h2", "held", 1, b""))
    for group in ("a", "b", "c"):
        await sealed(workset, group, 1, 2, 3)
    await workset.claim(1, 0, 1, 2)
    await workset.claim(1, 0, 2, 2)
    await workset.commit(1, 2)

    counts = await workset.counts()

    assert counts == Counts(held=2, ready=1, bound=3, ended=3, committed=1, epoch=2, bound_steps=(2,))


async def test_worksets_of_one_store_do_not_share_anything(state_url: str):
    async with store_at(state_url) as store:
        await store.workset("one").put(Item("a", "g", 1, b""))

        assert await store.workset("two").put(Item("a", "g", 1, b"")) == "stored"
        assert await store.workset("one").members("g") == ("a",)


async def test_a_zombie_changes_nothing_behind_its_fence_and_still_reads(state_url: str):
    async with store_at(state_url) as store:
        zombie = store.workset("samples", fence=Fence("buffer", 1))
        await sealed(zombie, "ready", 1)
        await zombie.put(Item("a", "held", 1, b""))
        before = await zombie.counts()
        await store.write({}, fence=Fence("buffer", 2))

        for change in (
            zombie.put(Item("b", "held", 1, b"")), zombie.end("c", "held", "failed"), zombie.seal("held", "trained"),
            zombie.discard("held", "stale"), zombie.claim(1, 0, 1, 1), zombie.commit(1, 1), zombie.new_epoch(),
        ):  # fmt: skip
            with pytest.raises(Fenced, match=r"'buffer' writes with token 1, but 2 was seen"):
                await change

        assert (await zombie.counts(), await zombie.members("held")) == (before, ("a",))
        assert await store.workset("samples", fence=Fence("buffer", 2)).put(Item("b", "held", 1, b"")) == "stored"
        with pytest.raises(ValueError, match="fence token"):
            store.workset("samples", fence=Fence("buffer", -1))


async def test_a_change_behind_a_newer_fence_turns_the_older_one_into_a_zombie(state_url: str):
    async with store_at(state_url) as store:
        older, newer = (store.workset("samples", fence=Fence("buffer", token)) for token in (1, 2))
        await older.put(Item("a", "g", 1, b""))
        await newer.put(Item("b", "g", 1, b""))

        with pytest.raises(Fenced):
            await older.put(Item("c", "g", 1, b""))
        with pytest.raises(Fenced):
            await store.write({"k": b""}, fence=Fence("buffer", 1))


async def test_payload_and_scores_of_any_content_come_back(workset: WorkSet):
    payload = bytes(range(256)) * 256
    item = Item("a:b", "g:1", -(2**53), payload, b"\x00:\r\n")
    await workset.put(item)
    await workset.seal("g:1", "trained")

    claimed = await workset.claim(1, -(2**53), 1, 0)

    assert claimed.groups == (("g:1", (item,)),)


async def test_what_does_not_fit_is_refused_before_anything_happens(workset: WorkSet):
    with pytest.raises(ValueError, match="payload"):
        await workset.put(Item("a", "g", 0, b"x" * 65_537))
    with pytest.raises(ValueError, match="note"):
        await workset.end("a", "g", "failed", b"x" * 16_385)
    with pytest.raises(ValueError, match="score"):
        await workset.put(Item("a", "g", 2**53 + 1, b""))
    with pytest.raises(ValueError, match="num"):
        await workset.claim(0, 0, 1, 0)
    with pytest.raises(ValueError, match="step"):
        await workset.claim(1, 0, 0, 0)
    with pytest.raises(ValueError, match="epoch"):
        await workset.commit(1, -1)

    assert await workset.put(Item("a", "g", 0, b"")) == "stored"


async def test_many_at_once_store_each_id_once(workset: WorkSet):
    async def put_all() -> int:
        return sum([await workset.put(Item(f"i{i}", f"g{i % 4}", i, b"")) == "stored" for i in range(40)])

    stored = await asyncio.gather(*(put_all() for _ in range(6)))

    assert sum(stored) == 40
    assert (await workset.counts()).held == 40
