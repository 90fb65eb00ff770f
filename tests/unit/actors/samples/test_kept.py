"""Which trajectories stay on disk, and how many."""

import asyncio
from collections import Counter
from contextlib import suppress

import msgspec
import pytest

from rubato.actors.messages.samples import Ticket
from rubato.actors.samples import run_files as kept_module
from rubato.actors.samples.run_files import EVAL_ROLLOUTS, KeptTrajectories, read_kept


class FakeLog:
    def __init__(self):
        self.warnings = []

    def warning(self, event, **fields):
        self.warnings.append((event, fields))


async def inline(work):
    return work()


@pytest.fixture
def make_kept(tmp_path):
    return lambda most, group_size=2, log=None: KeptTrajectories(tmp_path, most, group_size, inline, log or FakeLog())


async def keep(kept, tickets, trajectory):
    for ticket in tickets:
        kept.offer(trajectory(ticket))
    await kept.catch_up()


def tickets_of(group, size=2):
    return [Ticket(f"g{group:08d}.{at}", f"g{group:08d}", 1, group, 0, 0) for at in range(size)]


def round_of(version, size):
    name = f"eval-1.{version}.0"
    return [Ticket(f"{name}.{at}", name, 1, at, 0, version, "eval") for at in range(size)]


def groups_in(folder):
    return Counter(t.ticket.group_id for t in read_kept(folder))


async def test_what_is_kept_is_spread_over_the_run_and_bounded(make_kept, tmp_path, trajectory):
    kept = make_kept(32)

    for group in range(200):
        await keep(kept, tickets_of(group), trajectory)

    found = groups_in(tmp_path)
    assert sorted(found) == [f"g{number:08d}" for number in range(0, 200, 32)]
    assert set(found.values()) == {2}


async def test_a_restart_goes_on_with_what_is_there(make_kept, tmp_path, trajectory):
    for group in range(100):
        await keep(make_kept(1000), tickets_of(group), trajectory)

    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await make_kept(32).follow()

    assert sorted(groups_in(tmp_path)) == [f"g{number:08d}" for number in range(0, 100, 16)]


async def test_of_an_evaluation_the_same_tasks_are_kept_each_time_and_the_newest_never_goes(make_kept, tmp_path, trajectory):
    kept = make_kept(4 * 4 * EVAL_ROLLOUTS)

    for version in range(0, 100, 10):
        await keep(kept, round_of(version, EVAL_ROLLOUTS + 5), trajectory)

    found = groups_in(tmp_path)
    assert len(found) <= 4
    assert "eval-1.90.0" in found
    assert set(found.values()) == {EVAL_ROLLOUTS}


async def test_nothing_is_kept_where_nothing_shall_be(make_kept, tmp_path, trajectory):
    await keep(make_kept(0), [*tickets_of(0), *round_of(0, 2)], trajectory)

    assert list(tmp_path.iterdir()) == []


async def test_a_disk_that_refuses_is_told_once_and_stops_nothing(make_kept, tmp_path, trajectory):
    log = FakeLog()
    kept = make_kept(32, log=log)
    (tmp_path / "trajectories").write_text("in the way")

    await keep(kept, tickets_of(0), trajectory)
    await keep(kept, tickets_of(1), trajectory)

    assert [event for event, _ in log.warnings] == ["trajectories_not_kept"]


async def test_a_disk_that_is_too_slow_loses_trajectories_and_not_memory(make_kept, tmp_path, trajectory, monkeypatch):
    monkeypatch.setattr(kept_module, "WAITING", 3)
    kept = make_kept(32)

    await keep(kept, [*tickets_of(0), *tickets_of(1)], trajectory)

    assert len(list(read_kept(tmp_path))) == 3


async def test_a_file_that_is_half_written_is_passed_over(make_kept, tmp_path, trajectory):
    await keep(make_kept(32), tickets_of(0), trajectory)
    file = tmp_path / "trajectories" / "g00000000.0.1"
    file.write_bytes(file.read_bytes()[:-9])

    assert [t.ticket.trajectory_id for t in read_kept(tmp_path)] == ["g00000000.1"]


async def test_the_newest_rollouts_that_failed_are_kept_beside_the_others_and_bounded(make_kept, tmp_path, trajectory):
    def failed(ticket):
        return msgspec.structs.replace(trajectory(ticket), reason="reward_failed: it raised")

    kept = make_kept(32)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await kept.follow()
    await keep(kept, tickets_of(0), trajectory)
    for group in range(1, 101):
        await keep(kept, tickets_of(group), failed)
    again = make_kept(32)
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await again.follow()
    await keep(again, tickets_of(101), failed)

    found = groups_in(tmp_path)
    assert sorted(found) == ["g00000000", *(f"g{number:08d}" for number in range(86, 102))]
    assert {t.reason for t in read_kept(tmp_path)} == {"", "reward_failed: it raised"}


async def test_a_burst_of_failed_rollouts_waits_in_bounded_memory_and_the_newest_of_it_are_kept(make_kept, tmp_path, trajectory):
    kept = make_kept(4)
    for ticket in (ticket for group in range(1000) for ticket in tickets_of(group)):
        kept.offer(msgspec.structs.replace(trajectory(ticket), reason="env_timeout"))
    await kept.catch_up()

    assert sorted(groups_in(tmp_path)) == ["g00000998", "g00000999"]
