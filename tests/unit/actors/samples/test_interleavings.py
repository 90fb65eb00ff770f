"""Answers that come late and ends that cross: what the buffer promises holds in every order."""

import asyncio

import pytest

from rubato.actors.messages.samples import Advance, Batch, Claim, Close, Commit, DrawTerm, GiveUp, Put, RenewLeases
from rubato.actors.samples import sample
from rubato.actors.samples.sample import StaleTerm
from rubato.bus.message import Ack


async def fill(stage, tickets):
    """Put every ticket with a reward of its own."""
    for reward, ticket in enumerate(tickets):
        await stage.put(ticket, float(reward))


def test_a_revived_ticket_lapses_too(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        await stage.start()
        tickets = await stage.admit()  # every slot
        await asyncio.sleep(11.0)  # all lapsed: the holder was frozen
        held = tuple((t.trajectory_id, t.attempt) for t in tickets)
        await stage.buffer.renew_leases(RenewLeases(held, "env_manager-1", 1))

        again = await stage.admit(wait_s=60.0)  # and now it hangs for good

        assert [t.attempt for t in again] == [2] * 8

    stage.run(scene)


@pytest.mark.parametrize("late", ["before", "after"])
def test_a_sample_put_while_its_group_is_dropped_has_a_fate_after_a_crash(make_stage, slow, trajectory, late):
    """The put's write takes effect, or is answered, late; meanwhile its group is too old; crash."""
    stage = make_stage(alpha=0, batch_groups=1, group_size=2)
    chosen = []
    calls = slow("write", **{late: 5.0}, when=lambda n, args: n in chosen)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        first, last = await stage.admit()
        await stage.put(first)
        chosen.append(len(calls) + 1)
        putting = stage.tasks.create_task(stage.ask("put", Put(trajectory(last))))
        await asyncio.sleep(0.01)
        advancing = stage.tasks.create_task(stage.ask("advance", Advance(1, term)))
        await asyncio.sleep(1.0)
        await stage.start()  # killed before either was answered
        await putting
        await advancing
        await asyncio.sleep(10.0)

        assert await stage.fates() == {first.trajectory_id: "stale", last.trajectory_id: "stale"}

    stage.run(scene)


@pytest.mark.parametrize("late", ["before", "after"])
def test_a_failed_member_has_a_fate_after_a_crash(make_stage, slow, late):
    """Its end is on its way to the Store when the group is completed by another put and claimed; crash."""
    stage = make_stage(batch_groups=1, group_size=3)
    chosen = []
    calls = slow("write", **{late: 5.0}, when=lambda n, args: n in chosen)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        bad, one, two = await stage.admit(num=3)
        await stage.put(one, 0.0)
        chosen.append(len(calls) + 1)
        asking = stage.tasks.create_task(stage.buffer.give_up(GiveUp(bad, "env_step_failed")))
        await asyncio.sleep(0.01)
        await stage.put(two, 1.0)
        assert isinstance(await stage.buffer.claim(Claim(1, term, 1, 0.0)), Batch)
        asking.cancel()
        await stage.start()  # killed
        await stage.buffer.advance(Advance(1, term))
        await stage.buffer.commit(Commit(1, term))
        told = (await stage.buffer.give_up(GiveUp(bad, "env_step_failed"))).fate

        assert told == "failed"
        assert await stage.fates() == {bad.trajectory_id: "failed", one.trajectory_id: "trained", two.trajectory_id: "trained"}

    stage.run(scene)


@pytest.mark.parametrize("name", ["increment", "write"])
@pytest.mark.parametrize("late", ["before", "after"])
def test_a_slow_draw_of_a_term_does_not_unbind_what_a_newer_trainer_claimed(make_stage, slow, name, late):
    """Both asks were in the mailbox of a buffer that was stopped; the older one is slow at the Store."""
    stage = make_stage(alpha=0, batch_groups=1)
    chosen = []
    calls = slow(name, **{late: 1.0}, when=lambda n, args: n in chosen)

    async def scene():
        await stage.start()
        await fill(stage, tickets := await stage.admit())
        chosen.append(len(calls) + 1)
        older = stage.tasks.create_task(stage.buffer.draw_term(DrawTerm(0, 0)))
        await asyncio.sleep(0.1)
        assert len(calls) == chosen[0]
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        assert isinstance(await stage.buffer.claim(Claim(1, term, 1, 0.0)), Batch)
        assert (await older).term < term
        await stage.buffer.advance(Advance(1, term))
        await stage.buffer.commit(Commit(1, term))

        (trained,) = set((await stage.fates()).values())
        assert (trained, await stage.put(tickets[0])) == ("trained", "")

    stage.run(scene)


def test_the_newest_term_counts_although_an_older_one_is_answered_later(stage, slow):
    slow("increment", after=1.0, when=lambda n, args: n == 2)

    async def scene():
        await stage.start()
        await stage.buffer.draw_term(DrawTerm(0, 0))
        older = stage.tasks.create_task(stage.buffer.draw_term(DrawTerm(0, 0)))
        await asyncio.sleep(0.1)
        newer = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        passed = (await older).term

        assert passed < newer
        assert stage.buffer._groups.training.term == newer
        with pytest.raises(StaleTerm):
            await stage.buffer.claim(Claim(1, passed, 2, 0.0))

    stage.run(scene)


def test_two_trainers_that_begin_at_once_have_different_terms(stage):
    async def scene():
        await stage.start()

        drawn = await asyncio.gather(*(stage.buffer.draw_term(DrawTerm(0, 0)) for _ in range(5)))

        assert sorted(each.term for each in drawn) == [1, 2, 3, 4, 5]
        assert stage.buffer._groups.training.term == 5

    stage.run(scene)


@pytest.mark.parametrize("ends", ["close", "advance"])
@pytest.mark.parametrize("turns", range(12))
def test_a_group_that_ends_while_a_claim_reads_its_samples_keeps_its_fate(make_stage, slow, ends, turns):
    stage = make_stage(alpha=0, batch_groups=1)
    slow("fetch", before=0.03, after=0.03)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        await fill(stage, tickets := await stage.admit())
        claiming = stage.tasks.create_task(stage.buffer.claim(Claim(1, term, 1, 0.0)))
        await asyncio.sleep(0.005 * turns + 0.001)
        assert not claiming.done()
        await (stage.buffer.close(Close()) if ends == "close" else stage.buffer.advance(Advance(1, term)))
        found = await claiming
        fate = "unused" if ends == "close" else "stale"

        assert not isinstance(found, Batch)
        assert set((await stage.fates()).values()) == {fate}
        assert "samples/lost" not in stage.buffer.metrics.snapshot()
        assert await stage.put(tickets[0]) == fate

    stage.run(scene)


@pytest.mark.parametrize("turns", range(12))
def test_a_group_ends_under_one_name(make_stage, turns):
    """A group turns out too small as the job closes: what is answered is what the ledger says."""
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        one, bad = await stage.admit(num=2)
        await stage.put(one)
        asking = stage.tasks.create_task(stage.buffer.give_up(GiveUp(bad, "env_step_failed")))
        for _ in range(turns):
            await asyncio.sleep(0)
        await stage.buffer.close(Close())
        told = (await asking).fate
        await asyncio.sleep(1.0)
        fates = await stage.fates()

        assert await stage.put(one) == fates[one.trajectory_id]
        assert told == fates[bad.trajectory_id]

    stage.run(scene)


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("waits", [False, True])
def test_a_group_is_claimed_whole_at_the_very_moment_of_its_last_put(make_stage, turns, waits):
    """The Store answers at once: a claim that asks it before the put was written finds nothing there."""
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        stage.buffer._journal.store = stage.store
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        first, last = await stage.admit(num=2)
        await stage.put(first, 0.0)

        if waits:
            claiming = stage.tasks.create_task(stage.buffer.claim(Claim(1, term, 1, 60.0)))
            await asyncio.sleep(1.0)
        putting = stage.tasks.create_task(stage.put(last, 1.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not waits:
            claiming = stage.tasks.create_task(stage.buffer.claim(Claim(1, term, 1, 60.0)))
        batch = await claiming

        assert await putting == ""
        assert [len(group) for group in batch.groups] == [2]
        assert await stage.fates() == {}

    stage.run(scene)


def test_samples_are_there_for_a_claim_that_reads_while_the_store_can_forget_them_no_longer(make_stage, slow):
    """Some are still kept in memory when the claim begins, and let go of while it reads the others."""
    stage = make_stage(batch_groups=2, window_s=10.0)
    slow("fetch", before=5.0)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        tickets = await stage.admit(num=4)
        await fill(stage, tickets[:2])
        await asyncio.sleep(8.0)
        await fill(stage, tickets[2:])
        await asyncio.sleep(4.0)
        more = await stage.admit(num=1)
        claiming = stage.tasks.create_task(stage.buffer.claim(Claim(1, term, 2, 0.0)))
        for _ in range(4):
            await asyncio.sleep(2.0)
            await stage.buffer.renew_leases(RenewLeases(((more[0].trajectory_id, 1),), "env_manager-1", 1))

        assert [len(group) for group in (await claiming).groups] == [2, 2]
        assert await stage.fates() == {}

    stage.run(scene)


def slow_files(stage, seconds):
    """Payload files of the first put are written that late."""
    inner, first = stage.process.in_thread, []

    async def offload(fn, *args, cost_s=0.0):
        if fn.__name__ == "file_payload" and not first:
            first.append(1)
            await asyncio.sleep(seconds)
        return await inner(fn, *args, cost_s=cost_s)

    stage.process.in_thread = offload


def test_a_late_file_of_an_older_attempt_neither_is_welcome_nor_damages_the_newer_one(make_stage, trajectory):
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        slow_files(stage, 1.0)
        one, _ = await stage.admit(num=2, holder="env_manager-2")
        late = stage.tasks.create_task(stage.buffer.put(Put(trajectory(one, 0.25, num_tokens=20_000))))
        await asyncio.sleep(0.1)
        await stage.buffer.on_peers((), ("env_manager-2",))  # its holder was killed
        again = await stage.admit(num=2)
        for reward, ticket in enumerate(again):
            await stage.buffer.put(Put(trajectory(ticket, float(reward), num_tokens=20_000)))
        old = (await late).fate
        batch = await stage.buffer.claim(Claim(1, term, 1, 0.0))

        assert [len(group) for group in batch.groups] == [2], "an acknowledged sample is unreadable"
        assert old == "superseded"

    stage.run(scene)


def test_the_put_of_an_attempt_that_was_replaced_during_its_file_write_is_superseded(make_stage, trajectory):
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        slow_files(stage, 1.0)
        one, _ = await stage.admit(num=2, holder="env_manager-2")
        late = stage.tasks.create_task(stage.buffer.put(Put(trajectory(one, 0.25, num_tokens=20_000))))
        await asyncio.sleep(0.1)
        await stage.buffer.on_peers((), ("env_manager-2",))
        await stage.admit(num=2)

        assert (await late).fate == "superseded"

    stage.run(scene)


@pytest.mark.parametrize("ends", ["close", "give_up", "replaced"])
def test_a_payload_file_that_comes_too_late_does_not_stay(make_stage, trajectory, ends):
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        slow_files(stage, 10.0)
        one, _ = await stage.admit(num=2, holder="env_manager-2")
        late = stage.tasks.create_task(stage.buffer.put(Put(trajectory(one, 0.25, num_tokens=20_000))))
        await asyncio.sleep(0.1)
        if ends == "close":
            await stage.buffer.close(Close())
        elif ends == "give_up":
            await stage.buffer.give_up(GiveUp(one, "env_step_failed"))
        else:
            await stage.buffer.on_peers((), ("env_manager-2",))
            await stage.admit(num=2)
        await asyncio.sleep(1.0)  # the ledger is done with what ended

        fate = (await late).fate

        assert fate == {"close": "unused", "give_up": "failed", "replaced": "superseded"}[ends]
        assert list((stage.folder / "samples").iterdir()) == []

    stage.run(scene)


def test_one_file_put_twice_at_once_stays(make_stage, trajectory):
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        slow_files(stage, 1.0)
        first, last = await stage.admit(num=2)
        puts = [Put(trajectory(first, 0.0, num_tokens=20_000))] * 2 + [Put(trajectory(last, 1.0, num_tokens=20_000))]

        replies = await asyncio.gather(*(stage.buffer.put(put) for put in puts))
        batch = await stage.buffer.claim(Claim(1, term, 1, 0.0))

        assert [reply.fate for reply in replies] == [""] * 3
        assert [len(group) for group in batch.groups] == [2]

    stage.run(scene)


def test_tickets_that_waited_for_the_store_are_not_given_to_two(stage):
    """Admit waits for the Store for four seconds; a renewal meanwhile takes its tickets for lost on the way."""

    async def scene():
        await stage.start()
        (running,) = await stage.admit(num=1)
        stage.away = True
        admitting = stage.tasks.create_task(stage.admit(num=3))
        await asyncio.sleep(4.0)
        held = ((running.trajectory_id, running.attempt),)
        holding = stage.tasks.create_task(stage.buffer.renew_leases(RenewLeases(held, "env_manager-1", 1)))
        await asyncio.sleep(0.1)
        stage.away = False
        sent = await admitting
        await holding
        others = await stage.admit(num=3)

        assert not {t.trajectory_id for t in sent} & {t.trajectory_id for t in others}

    stage.run(scene)


@pytest.mark.parametrize("late", ["before", "after"])
def test_a_group_whose_claim_is_not_answered_yet_is_not_dropped(make_stage, slow, late):
    """A killed trainer's claim of step 2 is slow at the Store. The next trainer, back at step 1, advances."""
    stage = make_stage(batch_groups=1, alpha=0)
    chosen = []
    calls = slow("write", **{late: 5.0}, when=lambda n, args: n in chosen)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        await fill(stage, await stage.admit())
        await stage.buffer.claim(Claim(1, term, 1, 0.0))
        await stage.buffer.advance(Advance(1, term))
        await fill(stage, tickets := await stage.admit())
        chosen.append(len(calls) + 1)
        claiming = stage.tasks.create_task(stage.buffer.claim(Claim(2, term, 1, 0.0)))
        await asyncio.sleep(0.1)
        drawn = await stage.buffer.draw_term(DrawTerm(0, 0))
        assert drawn.bound == (1, 2)
        await stage.buffer.claim(Claim(1, drawn.term, 1, 0.0))
        await stage.buffer.advance(Advance(1, drawn.term))
        assert isinstance(await stage.buffer.claim(Claim(2, drawn.term, 1, 0.0)), Batch)
        await stage.buffer.advance(Advance(2, drawn.term))
        assert await stage.buffer.commit(Commit(2, drawn.term)) == Ack()
        await asyncio.wait([claiming])

        assert await stage.put(tickets[0]) == ""
        assert (await stage.fates())[tickets[0].trajectory_id] == "trained"

    stage.run(scene)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("late", ["before", "after"])
def test_whichever_write_is_slow_every_sample_of_a_step_ends_once(make_stage, slow, n, late):
    stage = make_stage(batch_groups=1, group_size=3, alpha=1)
    slow("write", **{late: 3.0}, when=lambda number, args: number == n + 2)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        bad, *good = await stage.admit(num=3)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.buffer.give_up(GiveUp(bad, "env_step_failed")))
            for reward, ticket in enumerate(good):
                tasks.create_task(stage.put(ticket, float(reward)))
            claiming = tasks.create_task(stage.buffer.claim(Claim(1, term, 1, 30.0)))
        await stage.buffer.advance(Advance(1, term))
        await stage.buffer.commit(Commit(1, term))

        assert [len(group) for group in claiming.result().groups] == [2]
        assert await stage.fates() == {bad.trajectory_id: "failed"} | {t.trajectory_id: "trained" for t in good}

    stage.run(scene)


def test_two_puts_of_one_attempt_do_not_share_a_half_written_file(tmp_path, monkeypatch):
    """The link broke and the holder asks again; the buffer is killed as the second writer begins."""
    fsync, begun = sample.os.fsync, []

    def second_begins(fd):
        fsync(fd)
        if not begun:
            begun.append(fd)
            monkeypatch.setattr(sample.os, "fsync", killed)
            with pytest.raises(OSError, match="killed"):
                sample.file_payload(tmp_path, "g.0.1", b"y" * 100_000)
            monkeypatch.setattr(sample.os, "fsync", fsync)

    def killed(fd):
        raise OSError("killed")

    monkeypatch.setattr(sample.os, "fsync", second_begins)
    digest = sample.file_payload(tmp_path, "g.0.1", b"x" * 100_000)

    assert sample.read_payload(tmp_path, "g.0.1", digest) == b"x" * 100_000
