"""A restarted buffer goes on where it stood."""

import asyncio

import pytest

from rubato.actors.messages.samples import Advance, Batch, Claim, Commit, DrawTerm, GiveUp, Put


async def begin(stage):
    """Two groups ready, one half done, one issued; term 1."""
    await stage.start()
    await stage.buffer.draw_term(DrawTerm(0, 0))
    tickets = await stage.admit()
    for reward, ticket in enumerate(tickets[:5]):
        await stage.put(ticket, float(reward))
    return tickets


def test_running_tickets_keep_their_attempt_so_that_their_holders_may_still_put(stage):
    async def scene():
        tickets = await begin(stage)

        await stage.start()
        none = await stage.admit()
        fates = [await stage.put(ticket, 9.0) for ticket in tickets[5:]]

        assert none == []
        assert fates == [""] * 3

    stage.run(scene)


@pytest.mark.parametrize("before", [True, False])
def test_a_put_whose_answer_died_with_the_buffer_may_be_asked_again(stage, trajectory, before):
    async def scene():
        tickets = await begin(stage)
        await stage.start(spare=2, before=before)  # taking over and proving it are two writes
        putting = stage.tasks.create_task(stage.ask("put", Put(trajectory(tickets[6]))))

        stored = await putting

        assert stage.incarnation == 3
        assert stored.fate == ""
        assert list(await stage.store.scan("samples/payload/g00000003")) == ["samples/payload/g00000003.0"]

    stage.run(scene)


def test_unanswered_tickets_lapse_after_a_restart_too(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        tickets = await begin(stage)
        await asyncio.sleep(9.0)

        await stage.start()
        early = await stage.admit(wait_s=9.0)
        again = await stage.admit(wait_s=2.0)

        assert early == []
        assert [(t.trajectory_id, t.attempt) for t in again] == [(t.trajectory_id, 2) for t in tickets[5:]]

    stage.run(scene)


def test_ready_and_bound_groups_still_hold_their_slots(stage):
    async def scene():
        tickets = await begin(stage)
        batch = await stage.buffer.claim(Claim(1, 1, 2, 0.0))

        await stage.start()
        none = await stage.admit()
        again = await stage.buffer.claim(Claim(1, 1, 2, 0.0))
        await stage.buffer.advance(Advance(1, 1))
        fresh = await stage.admit()

        assert isinstance(batch, Batch)
        assert again == batch
        assert none == []
        assert [t.group_id for t in fresh] == ["g00000004"] * 2 + ["g00000005"] * 2
        assert await stage.put(tickets[0]) == ""

    stage.run(scene)


def test_the_groups_of_a_bound_step_keep_their_order_where_the_younger_one_began_earlier(make_stage):
    stage = make_stage(alpha=2, batch_groups=2)

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        tickets = await stage.admit(num=4)
        await stage.buffer.advance(Advance(1, term))
        versions = (1, 1, 0, 0)
        for ticket, version in zip(tickets, versions, strict=True):
            await stage.put(ticket, float(ticket.trajectory_id[-1]), version_first=version)
        batch = await stage.buffer.claim(Claim(1, term, 2, 0.0))
        order = [group.id for group in stage.buffer._groups.steps[1]]

        await stage.start()
        again = await stage.buffer.claim(Claim(1, term, 2, 0.0))

        assert order == ["g00000001", "g00000000"]
        assert [group.id for group in stage.buffer._groups.steps[1]] == order
        assert again == batch

    stage.run(scene)


def test_version_and_cursor_survive(stage):
    async def scene():
        await begin(stage)
        await stage.buffer.claim(Claim(1, 1, 2, 0.0))
        await stage.buffer.advance(Advance(1, 1))

        await stage.start()
        tickets = await stage.admit()

        assert [(t.group_id, t.row, t.version) for t in tickets[::2]] == [("g00000004", 4, 1), ("g00000005", 5, 1)]

    stage.run(scene)


def test_attempts_are_counted_across_restarts(make_stage):
    stage = make_stage(max_attempts=2)

    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)
        await stage.buffer.give_up(GiveUp(ticket, "env_timeout", retry=True))

        await stage.start()
        (again,) = await stage.admit(num=1)
        ended = await stage.buffer.give_up(GiveUp(again, "env_timeout", retry=True))

        assert again.attempt == 2
        assert ended.fate == "failed"

    stage.run(scene)


def test_tickets_of_a_manager_that_went_away_meanwhile_are_issued_again_at_once(stage):
    async def scene():
        await stage.start()
        gone = await stage.admit(num=2, holder="env_manager-2")

        await stage.start()
        again = await stage.admit(num=2, wait_s=1.0)

        assert [(t.trajectory_id, t.attempt) for t in again] == [(t.trajectory_id, 2) for t in gone]

    stage.run(scene)


def test_a_resumed_jobs_managers_take_over_the_rollouts_of_their_former_incarnations(stage):
    async def scene():
        await stage.start()
        old = await stage.admit()
        await stage.start()
        await asyncio.sleep(0.1)

        again = await stage.admit(incarnation=2, wait_s=1.0)

        assert [(t.trajectory_id, t.attempt) for t in again] == [(t.trajectory_id, 2) for t in old]

    stage.run(scene)


def test_a_trainer_whose_store_was_emptied_goes_on_from_its_checkpoint(stage):
    async def scene():
        await stage.start()

        term = await stage.buffer.draw_term(DrawTerm(at_least=4, step=10))
        tickets = await stage.admit()
        for reward, ticket in enumerate(tickets):
            await stage.put(ticket, float(reward))
        batch = await stage.buffer.claim(Claim(11, term.term, 2, 0.0))

        assert (term.term, term.committed, term.bound) == (4, 10, ())
        assert {t.version for t in tickets} == {10}
        assert isinstance(batch, Batch)

    stage.run(scene)


def test_groups_that_a_lower_bound_leaves_too_old_free_their_slots(make_stage):
    async def scene(stage, lower):
        await begin(stage)
        lower.store, lower.tasks, lower.incarnation = stage.store, stage.tasks, stage.incarnation
        await lower.start()
        await lower.buffer.draw_term(DrawTerm(0, 0))
        await lower.buffer.advance(Advance(1, 2))

        fates = await stage.fates()
        fresh = await lower.admit()
        stage.process.kill()
        stage.process = lower.process

        assert set(fates.values()) == {"stale"}
        assert {t.group_id for t in fresh} == {"g00000004"}  # of two slots, one is held by a group that still runs

    stage, lower = make_stage(alpha=1), make_stage(alpha=0)
    stage.run(lambda: scene(stage, lower))


def test_a_late_put_of_an_older_attempt_is_superseded_although_its_group_trained(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        await stage.start()
        await stage.buffer.draw_term(DrawTerm(0, 0))
        tickets = await stage.admit()
        await asyncio.sleep(11.0)
        again = await stage.admit()
        for reward, ticket in enumerate(again):
            await stage.put(ticket, float(reward))
        await stage.buffer.claim(Claim(1, 1, 2, 0.0))
        await stage.buffer.advance(Advance(1, 1))

        assert await stage.put(tickets[0], 1.0) == "superseded"
        assert await stage.put(again[0], 0.0) == ""

    stage.run(scene)


def test_files_that_nobody_waits_for_are_gone_after_a_restart_and_those_of_samples_that_may_train_are_not(stage, trajectory):
    async def scene():
        tickets = await begin(stage)
        folder = stage.folder / "samples"
        await stage.buffer.put(Put(trajectory(tickets[5], num_tokens=20_000)))
        kept = f"{tickets[5].trajectory_id}.1"
        (folder / f"{tickets[6].trajectory_id}.1").write_bytes(b"killed before it was told of")
        (folder / f"{kept}.0a0b0c0d.partial").write_bytes(b"half")
        (folder / "g00000009.0.1").write_bytes(b"of a group that the Store forgot")

        await stage.start()

        assert [path.name for path in folder.iterdir()] == [kept]

    stage.run(scene)


def test_what_a_killed_or_drained_holder_and_a_resumed_run_draw_is_the_same_and_a_failed_attempt_draws_anew(make_stage):
    stage = make_stage(group_size=4, batch_groups=1, alpha=0)

    async def scene():
        await stage.start()
        first = {t.trajectory_id: t for t in await stage.admit()}
        drained, failed, killed, kept = first.values()
        await stage.buffer.give_up(GiveUp(drained, "drained", retry=True))
        await stage.buffer.give_up(GiveUp(failed, "generation_failed", retry=True))
        await stage.put(kept)

        await stage.start()
        again = {t.trajectory_id: t for t in await stage.admit(holder="env_manager-1", incarnation=2)}

        assert set(again) == {t.trajectory_id for t in (drained, failed, killed)}
        assert again[drained.trajectory_id].noise == drained.noise
        assert again[killed.trajectory_id].noise == killed.noise
        assert again[failed.trajectory_id].noise != failed.noise

    stage.run(scene)


def large_ones(stage, tickets, trajectory):
    """Puts that lie in files; returns their paths."""
    folder = stage.folder / "samples"

    async def put():
        for reward, ticket in enumerate(tickets):
            await stage.buffer.put(Put(trajectory(ticket, float(reward), num_tokens=20_000)))
        return [folder / f"{ticket.trajectory_id}.{ticket.attempt}" for ticket in tickets]

    return put()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"half")], ids=["gone", "damaged"])
def test_a_damaged_payload_is_told_and_counted_when_a_group_shrinks_by_it(make_stage, trajectory, damage):
    stage = make_stage(group_size=4, batch_groups=1, alpha=0)

    async def scene():
        await stage.start()
        await stage.buffer.draw_term(DrawTerm(0, 0))
        paths = await large_ones(stage, await stage.admit(), trajectory)
        damage(paths[1])

        batch = await stage.buffer.claim(Claim(1, 1, 1, 0.0))

        assert [len(group) for group in batch.groups] == [3]
        assert stage.notices == [
            "1 sample is gone or damaged (g00000000.1): its group trains without it, and ends where fewer than 2 are left"
        ]
        assert stage.process.metrics.snapshot()["samples/damaged"] == 1
        assert await stage.fates() == {"g00000000.1": "lost"}

    stage.run(scene)


def test_payloads_of_a_bound_step_that_were_damaged_since_are_told_too_and_an_empty_group_is_none(make_stage, trajectory):
    stage = make_stage(group_size=2, batch_groups=2, alpha=0)

    async def scene():
        await stage.start()
        await stage.buffer.draw_term(DrawTerm(0, 0))
        paths = await large_ones(stage, await stage.admit(), trajectory)
        await stage.buffer.claim(Claim(1, 1, 2, 0.0))
        for path in (paths[0], paths[1], paths[3]):
            path.unlink()

        await stage.start()
        await stage.buffer.draw_term(DrawTerm(2, 0))
        batch = await stage.buffer.claim(Claim(1, 2, 2, 0.0))

        assert [len(group) for group in batch.groups] == [1]
        assert stage.notices == [
            "3 samples are gone or damaged (g00000000.0 first): their groups train without them, and end where fewer than 2 are left"
        ]
        assert stage.process.metrics.snapshot()["samples/damaged"] == 3

        await stage.buffer.commit(Commit(1, 2))
        fates = await stage.fates()
        assert [fates[f"g0000000{n // 2}.{n % 2}"] for n in range(4)] == ["lost", "lost", "zero_spread", "lost"]

    stage.run(scene)


def test_what_dynamic_sampling_left_out_outlives_a_restart_and_is_told_whenever_the_step_is_claimed(make_stage):
    stage = make_stage(alpha=1, batch_groups=1, dynamic_sampling=True)

    async def scene():
        await stage.start()
        await stage.buffer.draw_term(DrawTerm(0, 0))
        for ticket, reward in zip(await stage.admit(), (1.0, 1.0, 0.0, 1.0), strict=True):
            await stage.put(ticket, reward)

        await stage.start()
        first = await stage.buffer.claim(Claim(1, 1, 1, 0.0))
        await stage.start()
        again = await stage.buffer.claim(Claim(1, 1, 1, 0.0))

        assert first.figures == again.figures == {"reward/unconditioned": 0.75, "reward/filtered_frac": 0.5}

    stage.run(scene)
