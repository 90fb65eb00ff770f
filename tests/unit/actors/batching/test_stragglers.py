"""`staleness.stragglers: drop` in the buffer: no step waits for a straggler, and what no step may train any more ends, told by task and length."""

import pytest

from rubato.actors.messages.samples import Advance, Batch, Cancel, Claim, DrawTerm, GiveUp, NotReady
from rubato.actors.plugins import batch_policies


@pytest.fixture
def stage(make_stage):
    return make_stage(alpha=1, stragglers="drop", ticket_ttl_s=1e6)


async def begun(stage):
    """Term of a trainer of a job whose four slots are all taken: tickets by group."""
    await stage.start()
    term = (await stage.buffer.draw_term(DrawTerm(1, 0))).term
    tickets = await stage.admit()
    groups = {name: [t for t in tickets if t.group_id == name] for name in sorted({t.group_id for t in tickets})}
    assert len(groups) == 4
    return term, list(groups.values())


async def put(stage, *groups):
    for ticket in (ticket for group in groups for ticket in group):
        assert await stage.put(ticket, reward=float(ticket.trajectory_id[-1] == "0")) == ""


async def trained(stage, term, step):
    assert isinstance(await stage.buffer.claim(Claim(step, term, 2, 10.0)), Batch)
    await stage.buffer.advance(Advance(step, term))


def test_no_step_waits_for_a_straggler_and_it_ends_as_soon_as_no_step_may_train_it(stage):
    async def scene():
        term, (straggler, *others) = await begun(stage)
        await put(stage, *others)
        await trained(stage, term, 1)
        assert "stale" not in (await stage.fates()).values()  # step 2 may train it

        later = [await stage.admit(2), await stage.admit(2)]
        await put(stage, *later)
        await trained(stage, term, 2)

        fates = await stage.fates()
        assert {fates[t.trajectory_id] for t in straggler} == {"stale"}
        assert await stage.put(straggler[0]) == "stale"
        assert [m.rollouts for _, m in stage.process.told if isinstance(m, Cancel)] == [
            tuple((t.trajectory_id, t.attempt) for t in straggler)
        ]

    stage.run(scene)


def test_where_it_waits_the_same_straggler_holds_the_step_and_is_trained(make_stage):
    stage = make_stage(alpha=1, stragglers="wait", ticket_ttl_s=1e6)

    async def scene():
        term, (straggler, *others) = await begun(stage)
        await put(stage, *others)
        await trained(stage, term, 1)
        await put(stage, await stage.admit(2), await stage.admit(2))

        assert isinstance(await stage.buffer.claim(Claim(2, term, 2, 10.0)), NotReady)
        await put(stage, straggler)
        await trained(stage, term, 2)
        assert "stale" not in (await stage.fates()).values()

    stage.run(scene)


def test_its_slot_goes_to_another_prompt_at_once(stage):
    async def scene():
        term, (straggler, *others) = await begun(stage)
        await put(stage, *others)
        await trained(stage, term, 1)
        await put(stage, await stage.admit(2), await stage.admit(2))
        waiting = stage.tasks.create_task(stage.admit(2, wait_s=100.0))

        assert isinstance(await stage.buffer.claim(Claim(2, term, 2, 10.0)), Batch)  # it is not told as trained yet
        tickets = await waiting

        assert len({t.group_id for t in tickets}) == 1
        assert tickets[0].row not in {t.row for t in straggler}

    stage.run(scene)


def test_what_was_dropped_counts_by_what_it_had_sampled(stage):
    async def scene():
        term, (straggler, *others) = await begun(stage)
        await put(stage, *others)
        await trained(stage, term, 1)
        await put(stage, await stage.admit(2), await stage.admit(2))
        await trained(stage, term, 2)
        for ticket in straggler:
            await stage.buffer.give_up(GiveUp(ticket, "cancelled", retry=True, tokens=100))

        found = dict(stage.buffer._groups.training.tally.figures(0, []))

        assert (found["length/128/ended"], found["length/128/stale_frac"]) == (2, 1.0)
        assert found["tokens/stale"] == 200
        assert "length/0/ended" not in found

    stage.run(scene)


def test_a_restart_keeps_what_was_dropped_and_drops_on(stage):
    async def scene():
        term, (straggler, *others) = await begun(stage)
        await put(stage, *others)
        await trained(stage, term, 1)
        await put(stage, await stage.admit(2), await stage.admit(2))
        await trained(stage, term, 2)
        await stage.start()

        assert {(await stage.fates())[t.trajectory_id] for t in straggler} == {"stale"}
        assert [type(plugin).__name__ for plugin in stage.buffer._groups.plugins] == ["DropStragglers"]

    stage.run(scene)


def test_a_job_that_waits_loads_no_policy_for_it(make_stage):
    assert list(batch_policies(make_stage(alpha=1).config)) == []
