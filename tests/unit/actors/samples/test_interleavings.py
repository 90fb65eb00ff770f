"""Answers that come late and ends that cross: what the buffer promises holds in every order."""

import asyncio

import pytest

from actors.messages.samples import (
    Advance,
    Batch,
    Claim,
    Close,
    Commit,
    DrawEpoch,
    GiveUp,
    Hold,
    Put,
)
from actors.samples import sample
from runtime.store.errors import StoreError
from runtime.store.memory_workset import MemoryWorkSet


def slow(monkeypatch, name, *, before=0.0, after=0.0, when=lambda n, args: True):
    """The n-th call of a WorkSet's method for which `when(n, args)` takes effect, or is answered, late."""
    inner, calls = getattr(MemoryWorkSet, name), []

    async def late(self, *args, **options):
        calls.append(args)
        chosen = when(len(calls), args)
        if chosen and before:
            await asyncio.sleep(before)
        result = await inner(self, *args, **options)
        if chosen and after:
            await asyncio.sleep(after)
        return result

    monkeypatch.setattr(MemoryWorkSet, name, late)
    return calls


def test_a_revived_ticket_lapses_too(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        await stage.start()
        tickets = await stage.admit()  # every slot
        await asyncio.sleep(11.0)  # all lapsed: the holder was frozen
        await stage.buffer.hold(Hold(tuple((t.trajectory_id, t.attempt) for t in tickets), "env_manager-1"))

        again = await stage.admit(wait_s=60.0)  # and now it hangs for good

        assert [t.attempt for t in again] == [2] * 8

    stage.run(scene)


def test_a_sample_put_while_its_group_is_dropped_has_a_fate_after_a_crash(make_stage, monkeypatch, trajectory):
    """workset.discard; workset.put takes effect, its reply is late; end() finds it seen; the record goes; crash."""
    stage = make_stage(alpha=0, batch_groups=1, group_size=2)
    slow(monkeypatch, "put", before=0.05, after=5.0, when=lambda n, args: n == 2)
    slow(monkeypatch, "discard", after=0.1)

    async def scene():
        await stage.start()
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        first, last = await stage.admit()
        await stage.put(first)
        stage.tasks.create_task(stage.ask("put", Put(trajectory(last)))).add_done_callback(lambda t: t.exception())
        await asyncio.sleep(0.01)
        await stage.buffer.advance(Advance(1, epoch))  # drop_old: the group is stale
        await stage.admit(num=1)  # anything that flushes
        await stage.start()  # killed before the put was answered
        await asyncio.sleep(10.0)
        held = await stage.store.workset("samples").counts()

        assert set(await stage.fates()) >= {first.trajectory_id, last.trajectory_id}, held

    stage.run(scene)


def test_a_failed_member_has_a_fate_after_a_crash(make_stage, monkeypatch):
    """end() is on its way to the Store when the group is completed by another put, sealed and claimed; crash."""
    stage = make_stage(batch_groups=1, group_size=3)
    slow(monkeypatch, "end", before=5.0)

    async def scene():
        await stage.start()
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        bad, one, two = await stage.admit(num=3)
        await stage.put(one, 0.0)
        asking = stage.tasks.create_task(stage.buffer.give_up(GiveUp(bad, "env_step_failed")))
        await asyncio.sleep(0.01)
        await stage.put(two, 1.0)
        assert isinstance(await stage.buffer.claim(Claim(1, epoch, 1, 0.0)), Batch)
        asking.cancel()
        await stage.start()  # killed
        await stage.buffer.advance(Advance(1, epoch))
        await stage.buffer.commit(Commit(1, epoch))
        told = (await stage.buffer.give_up(GiveUp(bad, "env_step_failed"))).fate
        await asyncio.sleep(20.0)

        assert bad.trajectory_id in await stage.fates(), told

    stage.run(scene)


def test_a_slow_draw_of_an_epoch_does_not_unbind_what_a_newer_trainer_claimed(make_stage, monkeypatch):
    """Both asks were in the mailbox of a buffer that was stopped; the counts of the older one are answered late."""
    stage = make_stage(alpha=0, batch_groups=1)
    chosen = []
    calls = slow(monkeypatch, "counts", after=1.0, when=lambda n, args: n in chosen)

    async def scene():
        await stage.start()
        for reward, ticket in enumerate(tickets := await stage.admit()):
            await stage.put(ticket, float(reward))
        chosen.append(len(calls) + 2)
        older = stage.tasks.create_task(stage.buffer.draw_epoch(DrawEpoch(0, 0)))
        await asyncio.sleep(0.1)
        assert len(calls) == chosen[0]
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        assert isinstance(await stage.buffer.claim(Claim(1, epoch, 1, 0.0)), Batch)
        await asyncio.wait([older])
        await stage.buffer.advance(Advance(1, epoch))
        await stage.buffer.commit(Commit(1, epoch))

        (trained,) = set((await stage.fates()).values())
        assert (trained, await stage.put(tickets[0])) == ("trained", "")

    stage.run(scene)


def test_the_book_keeps_the_newest_epoch(stage, monkeypatch):
    slow(monkeypatch, "new_epoch", after=1.0, when=lambda n, args: n == 2)

    async def scene():
        await stage.start()
        await stage.buffer.draw_epoch(DrawEpoch(0, 0))
        older = stage.tasks.create_task(stage.buffer.draw_epoch(DrawEpoch(0, 0)))
        await asyncio.sleep(0.1)
        newer = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        await asyncio.wait([older])

        assert stage.buffer._book.epoch == newer

    stage.run(scene)


def test_a_group_dropped_for_its_age_is_not_reported_lost(make_stage, monkeypatch):
    """The Store is back: find_lost asks what it holds of a ready group while that group is discarded as stale."""
    stage = make_stage(alpha=0, batch_groups=1)
    late = []
    slow(monkeypatch, "members", before=0.5, when=lambda n, args: bool(late))

    async def scene():
        await stage.start()
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        tickets = await stage.admit()
        for reward, ticket in enumerate(tickets):
            await stage.put(ticket, float(reward))
        late.append(1)
        stage.buffer._store_forgot()  # as after any outage
        await asyncio.sleep(0.1)
        lost = []
        monkeypatch.setattr(stage.buffer._intake, "lost", logged(lost, stage.buffer._intake.lost))
        await stage.buffer.advance(Advance(1, epoch))
        await asyncio.sleep(2.0)

        assert set((await stage.fates()).values()) == {"stale"}
        assert not lost

    stage.run(scene)


def logged(kept, inner):
    async def call(group):
        kept.append(group.id)
        return await inner(group)

    return call


@pytest.mark.parametrize("ends", ["close", "advance"])
@pytest.mark.parametrize("turns", range(12))
def test_a_group_ended_while_it_is_sealed_again_keeps_its_fate(make_stage, monkeypatch, ends, turns):
    """find_lost -> seal_again -> (seal: False) -> _missing asks for members; meanwhile the group is ended."""
    stage = make_stage(alpha=0, batch_groups=1)
    slow(monkeypatch, "discard", before=0.01)
    late = []
    slow(monkeypatch, "members", before=0.02, when=lambda n, args: bool(late))

    async def scene():
        await stage.start()
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        tickets = await stage.admit()
        for reward, ticket in enumerate(tickets):
            await stage.put(ticket, float(reward))
        late.append(1)
        stage.buffer._store_forgot()
        await asyncio.sleep(0.005 * turns)
        await (stage.buffer.close(Close()) if ends == "close" else stage.buffer.advance(Advance(1, epoch)))
        await asyncio.sleep(1.0)
        fate = "unused" if ends == "close" else "stale"

        if ends == "advance":  # a group that was being sealed is dropped by the next claim
            await stage.buffer.claim(Claim(2, epoch, 1, 0.0))
        assert set((await stage.fates()).values()) == {fate}
        assert "samples/lost_by_store" not in stage.buffer.metrics.snapshot()
        assert await stage.put(tickets[0]) == fate

    stage.run(scene)


@pytest.mark.parametrize("turns", range(12))
def test_a_group_ends_under_one_name(make_stage, monkeypatch, turns):
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
        await asking
        await asyncio.sleep(1.0)

        assert await stage.put(one) == (await stage.fates())[one.trajectory_id]

    stage.run(scene)


def slow_files(stage, seconds):
    """Payload files of the first put are written that late."""
    inner, first = stage.process.offload, []

    async def offload(fn, *args, cost_s=0.0):
        if fn.__name__ == "file_payload" and not first:
            first.append(1)
            await asyncio.sleep(seconds)
        return await inner(fn, *args, cost_s=cost_s)

    stage.process.offload = offload


def test_a_late_file_of_an_older_attempt_neither_is_welcome_nor_damages_the_newer_one(make_stage, trajectory):
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        slow_files(stage, 1.0)
        one, _ = await stage.admit(num=2, holder="env_manager-2")
        late = stage.tasks.create_task(stage.buffer.put(Put(trajectory(one, 0.25, num_tokens=20_000))))
        await asyncio.sleep(0.1)
        await stage.buffer.on_peers((), ("env_manager-2",))  # its holder was killed
        again = await stage.admit(num=2)
        for reward, ticket in enumerate(again):
            await stage.buffer.put(Put(trajectory(ticket, float(reward), num_tokens=20_000)))
        old = (await late).fate
        batch = await stage.buffer.claim(Claim(1, epoch, 1, 0.0))

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


def test_tickets_that_waited_for_the_store_are_not_given_to_two(stage):
    """Admit waits for the Store for four seconds; a Hold meanwhile takes its tickets for lost on the way."""

    async def scene():
        await stage.start()
        (running,) = await stage.admit(num=1)
        stage.away = True
        admitting = stage.tasks.create_task(stage.admit(num=3))
        await asyncio.sleep(4.0)
        held = ((running.trajectory_id, running.attempt),)
        holding = stage.tasks.create_task(stage.buffer.hold(Hold(held, "env_manager-1")))
        await asyncio.sleep(0.1)
        stage.away = False
        sent = await admitting
        await holding
        others = await stage.admit(num=3)

        assert not {t.trajectory_id for t in sent} & {t.trajectory_id for t in others}

    stage.run(scene)


def test_a_group_whose_claim_is_not_answered_yet_is_not_dropped(make_stage, monkeypatch):
    """A killed trainer's claim of step 3 took effect; its reply is late. The next trainer, back at step 2, advances."""
    stage = make_stage(batch_groups=1, alpha=0)
    slow(monkeypatch, "claim", after=5.0, when=lambda n, args: args[2:] == (2, 1))

    async def scene():
        await stage.start()
        epoch = (await stage.buffer.draw_epoch(DrawEpoch(0, 0))).epoch
        for reward, ticket in enumerate(await stage.admit()):
            await stage.put(ticket, float(reward))
        await stage.buffer.claim(Claim(1, epoch, 1, 0.0))
        await stage.buffer.advance(Advance(1, epoch))
        for reward, ticket in enumerate(tickets := await stage.admit()):
            await stage.put(ticket, float(reward))
        late = stage.tasks.create_task(stage.buffer.claim(Claim(2, epoch, 1, 0.0)))
        await asyncio.sleep(0.1)
        drawn = await stage.buffer.draw_epoch(DrawEpoch(0, 0))
        assert drawn.bound == (1, 2)
        await stage.buffer.claim(Claim(1, drawn.epoch, 1, 0.0))
        await stage.buffer.advance(Advance(1, drawn.epoch))
        assert isinstance(await stage.buffer.claim(Claim(2, drawn.epoch, 1, 0.0)), Batch)
        await stage.buffer.advance(Advance(2, drawn.epoch))
        await stage.buffer.commit(Commit(1, drawn.epoch))
        await stage.buffer.commit(Commit(2, drawn.epoch))
        await late

        assert await stage.put(tickets[0]) == ""
        assert (await stage.fates())[tickets[0].trajectory_id] == "trained"

    stage.run(scene)


def test_the_store_is_back_also_where_it_refuses(stage):
    """The only call that is retried during an outage is one that the Store then refuses."""

    async def scene():
        await stage.start()
        await stage.buffer.draw_epoch(DrawEpoch(0, 0))
        for reward, ticket in enumerate(await stage.admit(num=7)):
            await stage.put(ticket, float(reward))
        with pytest.raises(StoreError, match="is not bound"):
            await stage.buffer.claim(Claim(2, 1, 2, 0.0))  # so that nothing is left to be flushed
        await stage.buffer._journal.flush()
        stage.away = True
        asking = asyncio.gather(stage.buffer.claim(Claim(2, 1, 2, 0.0)), return_exceptions=True)
        await asyncio.sleep(3.0)
        stage.away = False
        (refused,) = await asking

        assert "is not bound" in str(refused)
        assert len(await stage.admit(wait_s=10.0)) >= 1  # nobody else asks the Store for anything

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
                sample.file_payload(tmp_path, "g.0", b"y" * 100_000)
            monkeypatch.setattr(sample.os, "fsync", fsync)

    def killed(fd):
        raise OSError("killed")

    monkeypatch.setattr(sample.os, "fsync", second_begins)
    stored = sample.file_payload(tmp_path, "g.0", b"x" * 100_000)

    assert sample.read_payload(tmp_path, stored) == b"x" * 100_000
