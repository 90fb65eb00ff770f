"""Ids, seeds, payload files, groups and the journal, each alone."""

import asyncio

import msgspec
import pytest

from actors.messages.samples import Trajectory
from actors.samples.groups import Group, Member
from actors.samples.journal import Journal
from actors.samples.sample import (
    PayloadLost,
    file_payload,
    group_id,
    is_filed,
    read_payload,
    remove_payloads,
    seed_of,
    split_id,
    trajectory_id,
)
from runtime.observe.log import logger
from runtime.store.errors import Fenced, StoreUnavailable
from runtime.store.memory import MemoryStore
from runtime.store.store import Fence


def test_the_order_of_group_names_is_the_order_of_age():
    names = [group_id(n) for n in (0, 9, 10, 99, 100, 12_345)]

    assert names == sorted(names)
    assert split_id(trajectory_id(names[2], 7)) == (names[2], 7)


@pytest.mark.parametrize("text", ["", "g1", "g1.", "g1.x", "g1.-1"])
def test_other_texts_are_no_trajectory_ids(text):
    with pytest.raises(ValueError, match="no trajectory id"):
        split_id(text)


def test_seeds_follow_run_and_task_and_fit_31_bits():
    seeds = {(run, task): seed_of("train", run, task) for run in range(3) for task in range(50)}

    assert len(set(seeds.values())) == len(seeds)
    assert max(seeds.values()) < 2**31
    assert seed_of("train", 1, 1) == seeds[1, 1]
    assert seed_of("eval", 1, 5) == seed_of("eval", 2, 5) != seed_of("train", 1, 5)


def test_a_filed_payload_comes_back_and_is_told_from_a_trajectory(tmp_path, trajectory):
    payload = bytes(range(256)) * 300

    stored = file_payload(tmp_path / "samples", "g1.0", payload)

    assert is_filed(stored)
    assert read_payload(tmp_path / "samples", stored) == payload
    assert not is_filed(msgspec.msgpack.encode(trajectory(None, version_first=0)))
    assert len(Trajectory.__struct_fields__) < 16
    remove_payloads(tmp_path / "samples", ["g1.0", "g1.1"])
    assert list((tmp_path / "samples").iterdir()) == []


def test_a_damaged_or_missing_payload_is_said_to_be_lost(tmp_path):
    stored = file_payload(tmp_path, "g1.0", b"x" * 100)
    (tmp_path / "g1.0").write_bytes(b"y" * 100)

    with pytest.raises(PayloadLost, match="does not match its digest"):
        read_payload(tmp_path, stored)
    (tmp_path / "g1.0").unlink()
    with pytest.raises(PayloadLost, match="can't be read"):
        read_payload(tmp_path, stored)


@pytest.mark.parametrize(
    ("rewards", "fate"),
    [((0.0, 1.0, None), "trained"), ((1.0, 1.0, None), "zero_spread"), ((1.0, None, None), "group_too_small")],
)
def test_a_complete_group_has_one_verdict(rewards, fate):
    members = [Member(state="failed") if r is None else Member(state="scored", reward=r) for r in rewards]

    group = Group("g", 0, members)

    assert group.complete
    assert group.verdict() == fate


def test_the_version_of_a_group_is_the_oldest_that_any_member_may_have():
    running = Member(state="running", version=4)
    scored = Member(state="scored", version=3, version_first=5)
    failed = Member(state="failed", version=1)

    assert Group("g", 0, [running, scored, failed]).version(7) == 4
    assert Group("g", 0, [running, scored, failed]).version_known(7) == 5
    assert Group("g", 0, [Member(), failed]).version(7) == 7


async def test_flushes_at_the_same_time_share_a_write():
    store = MemoryStore()
    writes = []

    class Counted:
        async def write(self, changes, *, fence=None):
            writes.append(dict(changes))
            await asyncio.sleep(0)
            await store.write(changes, fence=fence)

    journal = Journal(Counted(), Fence("x", 1), logger("test"), on_outage=lambda away: None)

    async def change(n):
        journal.mark(f"k{n}", lambda: b"%d" % n)
        await journal.flush()
        assert await store.get(f"k{n}") == b"%d" % n

    async with asyncio.TaskGroup() as tasks:
        for n in range(50):
            tasks.create_task(change(n))

    assert len(writes) == 2
    assert await journal.flush() is None
    assert len(writes) == 2


async def test_a_write_outlasts_an_outage_and_a_fenced_one_does_not():
    store = MemoryStore()
    outages = []
    away = [StoreUnavailable("away")]

    class Flaky:
        async def write(self, changes, *, fence=None):
            if away:
                raise away.pop()
            await store.write(changes, fence=fence)

    journal = Journal(Flaky(), Fence("x", 1), logger("test"), on_outage=outages.append)
    journal.mark("k", lambda: b"1")
    await journal.flush()
    await store.write({}, fence=Fence("x", 2))
    journal.mark("k", lambda: b"2")

    with pytest.raises(Fenced):
        await journal.flush()

    assert outages == [True, False]
    assert await store.get("k") == b"1"
