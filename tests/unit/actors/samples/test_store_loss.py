"""A Store that comes back without its newest seconds: the living buffer says all of it anew, a checkpoint makes up for a dead one."""

import asyncio
import json

import msgspec
import pytest

from rubato.actors.checkpoints import checkpoint
from rubato.actors.messages.samples import Admit, Advance, Batch, Claim, Commit, DrawTerm, GiveUp, NotReady, Put, StepRaised, Trajectory
from rubato.actors.samples.journal import ENDS, GROUP, PAYLOAD, read_records
from rubato.actors.samples.sample import OutOfOrder, StaleTerm


@pytest.fixture
def stage(make_stage):
    """One group per batch, two slots; the Store may forget a minute."""
    return make_stage(batch_groups=1, alpha=1, window_s=60.0)


async def begin(stage, *, step=0, at_least=0):
    await stage.start()
    return (await stage.buffer.draw_term(DrawTerm(at_least, step))).term


async def fill(stage, tickets=None):
    """Put all that may be admitted, with spread in each group."""
    tickets = await stage.admit() if tickets is None else tickets
    for ticket in tickets:
        await stage.put(ticket, reward=float(ticket.trajectory_id[-1]))
    return tickets


async def train(stage, step, term):
    """Claim and advance; returns the batch."""
    batch = await stage.buffer.claim(Claim(step, term, 1, 0.0))
    assert isinstance(batch, Batch)
    await stage.buffer.advance(Advance(step, term))
    return batch


def names(batch):
    assert isinstance(batch, Batch)
    return [msgspec.msgpack.decode(each, type=Trajectory).ticket.trajectory_id for group in batch.groups for each in group]


def save(stage, step, *batches):
    """A checkpoint that covers these steps."""
    receipts = [batch.receipt for batch in batches]
    checkpoint.write(stage.folder / "checkpoints" / f"step_{step}", {}, step=step, term=1, receipts=receipts)


async def whole(store):
    """All that the Store has of a run but its counters: keys, and the log of ends with its indices."""
    return await store.scan("samples/group/"), await store.scan("samples/payload/"), await log_of(store)


async def log_of(store):
    entries, after = [], 0
    while found := await store.read(ENDS, after):
        entries += found
        after = found[-1][0]
    return entries


async def told(stage):
    """Trajectory ids in samples.jsonl, once the buffer has written it."""
    await asyncio.sleep(1.0)
    await stage.buffer._ledger.check()
    return [json.loads(line)["trajectory_id"] for line in (stage.folder / "samples.jsonl").read_text().splitlines()]


# -- while the buffer lives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_living_buffer_writes_anew_what_the_store_forgot_under_the_same_indices(stage, remember, times):
    async def scene():
        term = await begin(stage)
        forget = remember(stage.store)
        bad, *_ = tickets = await stage.admit()
        await stage.buffer.give_up(GiveUp(bad, "env_step_failed"))  # its group is too small, and another takes its slot
        await fill(stage, tickets[1:])
        first = await train(stage, 1, term)
        await stage.buffer.commit(Commit(1, term))
        (more, *_) = await fill(stage)
        before = await whole(stage.store)
        training = (await read_records(stage.store))[0]

        for _ in range(times):
            forget()
            assert not await stage.store.scan(GROUP)
            assert await stage.put(more, reward=float(more.trajectory_id[-1])) == ""  # any request shows the loss

        assert await whole(stage.store) == before
        assert (await read_records(stage.store))[0] == training
        assert [index for index, _ in before[2]] == list(range(1, len(before[2]) + 1))
        assert await told(stage) == list(await stage.fates())
        assert not (stage.folder / "samples.lost.jsonl").exists()
        assert set(names(first)) <= set(await stage.fates())

    stage.run(scene)


def test_a_delete_that_was_forgotten_is_made_again(stage, remember):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        forget = remember(stage.store)
        await train(stage, 1, term)
        await stage.buffer.commit(Commit(1, term))
        forget()
        assert list(await stage.store.scan(PAYLOAD + "g00000000"))
        assert list(await stage.store.scan(GROUP + "g00000000"))

        await stage.buffer.claim(Claim(2, term, 1, 0.0))

        assert list(await stage.store.scan(GROUP)) == [GROUP + "g00000001"]
        assert list(await stage.store.scan(PAYLOAD)) == [PAYLOAD + "g00000001.0", PAYLOAD + "g00000001.1"]

    stage.run(scene)


def test_a_group_that_the_store_never_should_have_again_goes_when_everything_is_written_anew(stage, remember):
    """The Store goes back behind an end whose group's record it then has once more."""

    async def scene():
        await begin(stage)
        one, two, *_ = await stage.admit()
        await stage.put(one)
        forget = remember(stage.store)
        await stage.buffer.give_up(GiveUp(two, "env_step_failed"))
        forget()

        await stage.admit(num=1)

        assert GROUP + one.group_id not in await stage.store.scan(GROUP)
        assert await stage.store.scan(PAYLOAD) == {}
        assert await stage.fates() == {one.trajectory_id: "group_too_small", two.trajectory_id: "failed"}
        await stage.start()
        assert await stage.fates() == {one.trajectory_id: "group_too_small", two.trajectory_id: "failed"}

    stage.run(scene)


def test_a_loss_right_after_a_loss_and_the_next_buffer_know_everything(stage, remember):
    async def scene():
        term = await begin(stage)
        forget = remember(stage.store)
        tickets = await fill(stage)
        forget()
        await stage.admit(num=1)
        await stage.put(tickets[0])
        again = remember(stage.store)
        await train(stage, 1, term)
        again()
        await stage.buffer.claim(Claim(2, term, 1, 0.0))
        forget()
        await stage.buffer.commit(Commit(1, term))

        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 1))).term
        second = await stage.buffer.claim(Claim(2, term, 1, 0.0))

        assert names(second) == [t.trajectory_id for t in tickets[2:]]
        assert await stage.fates() == {t.trajectory_id: "trained" for t in tickets[:2]}

    stage.run(scene)


def test_a_claim_that_was_forgotten_is_still_the_same(stage, remember):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        forget = remember(stage.store)
        first = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        forget()

        again = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        forget()
        await stage.start()

        assert again == first
        assert isinstance(await stage.buffer.claim(Claim(1, term, 1, 0.0)), Batch)

    stage.run(scene)


def test_commits_that_the_store_forgot_are_made_again(stage, remember):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        await train(stage, 1, term)
        forget = remember(stage.store)
        await stage.buffer.commit(Commit(1, term))
        forget()

        await train(stage, 2, term)
        await stage.buffer.commit(Commit(2, term))

        assert (await read_records(stage.store))[0].committed == 2
        assert list(await stage.fates()) == [f"g0000000{g}.{m}" for g in range(2) for m in range(2)]

    stage.run(scene)


def test_what_was_acknowledged_is_not_lost_although_the_loss_shows_late(make_stage, remember):
    """The Store forgets at once, and nobody asks it for longer than it may forget anything."""
    stage = make_stage(batch_groups=1, alpha=1, window_s=2.0)

    async def scene():
        term = await begin(stage)
        tickets = await stage.admit()
        forget = remember(stage.store)
        assert [await stage.put(ticket, float(n)) for n, ticket in enumerate(tickets[:3])] == [""] * 3
        forget()
        await asyncio.sleep(10.0)

        await stage.put(tickets[3])
        batch = await stage.buffer.claim(Claim(1, term, 1, 0.0))

        assert names(batch) == [t.trajectory_id for t in tickets[:2]]
        assert list(await stage.store.scan(PAYLOAD)) == [PAYLOAD + t.trajectory_id for t in tickets]

    stage.run(scene)


def test_what_was_acknowledged_is_not_lost_in_an_outage_longer_than_what_the_store_may_forget(make_stage, remember):
    stage = make_stage(batch_groups=1, alpha=1, window_s=2.0)

    async def scene():
        term = await begin(stage)
        tickets = await stage.admit()
        forget = remember(stage.store)
        assert [await stage.put(ticket, float(n)) for n, ticket in enumerate(tickets[:2])] == [""] * 2
        stage.away = True
        forget()
        putting = [stage.tasks.create_task(stage.put(ticket, float(n))) for n, ticket in enumerate(tickets[2:])]
        await asyncio.sleep(10.0)
        late = stage.tasks.create_task(stage.put(tickets[3]))
        await asyncio.sleep(1.0)
        stage.away = False

        assert [await work for work in (*putting, late)] == [""] * 3
        assert names(await stage.buffer.claim(Claim(1, term, 1, 0.0))) == [t.trajectory_id for t in tickets[:2]]
        assert names(await stage.buffer.claim(Claim(2, term, 1, 0.0))) == [t.trajectory_id for t in tickets[2:]]
        assert await stage.fates() == {}

    stage.run(scene)


@pytest.mark.parametrize("what", ["commit", "give_up", "put"])
@pytest.mark.parametrize("spare", [0, 1])
def test_what_happens_while_everything_is_written_anew_is_whole_after_a_death(stage, remember, slow, trajectory, what, spare):
    """A change comes while the buffer reads what the Store still has; then it dies at a later write. Either all of it is there or none."""
    chosen = []
    slow("scan", before=1.0, when=lambda n, args: bool(chosen))

    async def scene():
        term = await begin(stage)
        tickets = await stage.admit()
        await fill(stage, tickets[:2])
        await train(stage, 1, term)
        forget = remember(stage.store)
        await stage.put(tickets[2], 0.0)
        forget()
        chosen.append(1)
        process = stage.process
        stage.tasks.create_task(stage.ask("admit", Admit(1, "env_manager-1", 1, 0.0)))  # its write shows the loss
        await asyncio.sleep(0.5)
        process.spare = 1 + spare  # what is written anew, and what came meanwhile
        process.before = True
        request = {"commit": Commit(1, term), "give_up": GiveUp(tickets[3], "env_step_failed"), "put": Put(trajectory(tickets[3], 1.0))}[
            what
        ]
        asking = stage.tasks.create_task(stage.ask(what, request))
        await asyncio.sleep(30.0)
        await asking
        chosen.clear()
        if stage.process is process:
            await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 1))).term

        fates = await stage.fates()
        assert {name: fate for name, fate in fates.items() if name.startswith("g00000000")} == {
            "g00000000.0": "trained",
            "g00000000.1": "trained",
        }
        if what == "give_up":
            assert (fates["g00000001.0"], fates["g00000001.1"]) == ("group_too_small", "failed")
        else:
            if what == "commit":
                await stage.put(tickets[3], 1.0)
            batch = await stage.buffer.claim(Claim(2, term, 1, 0.0))
            assert names(batch) == [t.trajectory_id for t in tickets[2:]]
        assert len(await told(stage)) == len(fates)

    stage.run(scene)


@pytest.mark.parametrize("successors", [1, 2])
@pytest.mark.parametrize("wakes", [False, True])
def test_a_frozen_buffer_whose_successors_the_store_forgot(stage, remember, trajectory, wakes, successors):
    """Where it wakes and answers, that stands, and the successor gives way to another; where it does not, all is written anew."""

    async def scene():
        term = await begin(stage)
        old, frozen = stage.buffer, stage.process
        one, two, three, four = await stage.admit()
        await fill(stage, [one])
        forget = remember(stage.store)
        stage.process = None
        for _ in range(successors):
            new = await stage.start()
        await fill(stage, [two])
        first = await train(stage, 1, term)
        save(stage, 1, first)
        await stage.buffer.commit(Commit(1, term))
        forget()

        if wakes:
            assert (await old.put(Put(trajectory(three, 0.0)))).fate == ""  # nothing tells it that it was replaced
            assert list(await stage.store.scan(PAYLOAD)) == [PAYLOAD + t.trajectory_id for t in (one, three)]
        await stage.ask("put", Put(trajectory(two, 1.0)))
        term = (await stage.ask("draw_term", DrawTerm(term + 1, 1))).term
        late = stage.tasks.create_task(old.put(Put(trajectory(four))))
        await frozen.dead.wait()
        late.cancel()
        for ticket in (four,) if wakes else (three, four):
            await stage.ask("put", Put(trajectory(ticket, float(ticket.trajectory_id[-1]))))
        batch = await stage.buffer.claim(Claim(2, term, 1, 0.0))

        assert (stage.buffer is new) == (not wakes)
        assert names(batch) == [three.trajectory_id, four.trajectory_id]
        assert {name: end[:2] for name, end in (await stage.trained()).items()} == dict.fromkeys(names(first), ("trained", 1))

    stage.run(scene)


def test_a_loss_soon_after_a_restart_costs_no_acknowledged_sample_and_no_end(stage, remember):
    """The buffer before it acknowledged them within the time that the Store may forget."""

    async def scene():
        term = await begin(stage)
        tickets = await stage.admit()
        forget = remember(stage.store)
        await stage.buffer.give_up(GiveUp(tickets[3], "env_step_failed"))
        assert [await stage.put(ticket, float(n)) for n, ticket in enumerate(tickets[:2])] == [""] * 2
        await stage.start()
        forget()

        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        batch = await stage.buffer.claim(Claim(1, term, 1, 0.0))

        assert names(batch) == [t.trajectory_id for t in tickets[:2]]
        assert await stage.fates() == {tickets[3].trajectory_id: "failed", tickets[2].trajectory_id: "group_too_small"}
        assert await told(stage) == [tickets[3].trajectory_id, tickets[2].trajectory_id]

    stage.run(scene)


# -- when the buffer dies in the same tick -------------------------------------------------------------------------


def test_a_step_that_was_trained_is_known_from_the_checkpoint(stage, remember):
    async def scene():
        term = await begin(stage)
        tickets = await fill(stage)
        forget = remember(stage.store)
        first = await train(stage, 1, term)
        save(stage, 1, first)
        forget()

        await stage.start()
        rest = await stage.buffer.claim(Claim(2, term, 1, 0.0))
        await stage.buffer.commit(Commit(1, term))

        assert names(rest) == [t.trajectory_id for t in tickets[2:]]
        ends = await stage.trained()
        assert ends == dict.fromkeys(names(first), ("trained", 1, term))

    stage.run(scene)


@pytest.mark.parametrize("since", ["start", "admitted", "half", "put"])
@pytest.mark.parametrize("asks", ["commit", "draw_term"])
def test_samples_that_were_trained_end_once_and_never_train_again_however_much_was_forgotten(stage, remember, since, asks):
    async def scene():
        term = await begin(stage)
        forgets = {"start": remember(stage.store)}
        tickets = await stage.admit()
        forgets["admitted"] = remember(stage.store)
        await fill(stage, tickets[:1])
        forgets["half"] = remember(stage.store)
        await fill(stage, tickets[1:2])
        forgets["put"] = remember(stage.store)
        first = await train(stage, 1, term)
        await fill(stage, tickets[2:])
        await fill(stage)
        second = await train(stage, 2, term)
        save(stage, 2, first, second)
        forgets[since]()

        await stage.start()
        if asks == "commit":
            await stage.buffer.commit(Commit(2, term))
        else:
            term = (await stage.buffer.draw_term(DrawTerm(term + 1, 2))).term
        ended = await stage.trained()
        await stage.buffer.on_peers((), ("env_manager-1",))
        more = await stage.admit()
        for ticket in more:
            await stage.put(ticket, reward=float(ticket.trajectory_id[-1]), version_first=2)
        third = await stage.buffer.claim(Claim(3, term, 1, 0.0))

        trained = {*names(first), *names(second)}
        assert ended == {name: ("trained", 1 if name in names(first) else 2, term) for name in trained}
        assert not trained & {t.trajectory_id for t in more}
        assert not trained & set(names(third))
        assert names(third) == ["g00000002.0", "g00000002.1"]
        assert sorted(await told(stage)) == sorted(trained)

    stage.run(scene)


def test_groups_up_to_the_cursor_of_a_checkpoint_run_again(stage, remember):
    async def scene():
        term = await begin(stage)
        forget = remember(stage.store)
        await fill(stage)
        first = await train(stage, 1, term)
        await stage.admit()
        save(stage, 1, await stage.buffer.claim(Claim(1, term, 1, 0.0)))
        forget()

        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(term + 1, 1))).term
        again = await stage.admit()
        fresh = await stage.admit()

        assert {t.group_id for t in again} == {"g00000001", "g00000002"}
        assert fresh == []
        assert stage.buffer._groups.training.cursor == 3
        assert {t.version for t in again} == {1}
        assert set(await stage.fates()) == set(names(first))

    stage.run(scene)


def test_the_version_is_never_behind_what_is_committed(stage, remember):
    async def scene():
        term = await begin(stage)
        forget = remember(stage.store)
        await fill(stage)
        save(stage, 1, await train(stage, 1, term))
        forget()
        await stage.start()
        await stage.buffer.commit(Commit(1, term))

        (ticket, *_) = await stage.admit()

        assert stage.buffer._groups.policy.version == 1
        assert ticket.version == 1

    stage.run(scene)


@pytest.mark.parametrize("forgets_end", [False, True])
def test_a_failed_member_of_a_trained_group_has_its_end_once(make_stage, remember, forgets_end):
    stage = make_stage(batch_groups=1, group_size=3, alpha=1, window_s=60.0)

    async def scene():
        term = await begin(stage)
        bad, *good = await stage.admit(num=3)
        early = remember(stage.store)
        await stage.buffer.give_up(GiveUp(bad, "env_step_failed"))
        late = remember(stage.store)
        for reward, ticket in enumerate(good):
            await stage.put(ticket, float(reward))
        save(stage, 1, await train(stage, 1, term))
        (early if forgets_end else late)()
        await stage.start()
        await stage.buffer.commit(Commit(1, term))

        assert await stage.trained() == {bad.trajectory_id: ("failed", 0, 0)} | {t.trajectory_id: ("trained", 1, term) for t in good}

    stage.run(scene)


def test_a_buffer_that_bound_others_meanwhile_learns_from_the_checkpoint_at_its_start(stage, remember):
    """The Store forgot step 1; a buffer without that knowledge bound another group to it, and died; then the checkpoint was named."""

    async def scene():
        term = await begin(stage)
        tickets = await stage.admit()
        forget = remember(stage.store)
        await fill(stage, tickets[:2])
        first = await train(stage, 1, term)
        forget()
        await stage.start()
        await fill(stage, tickets[2:])
        other = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        save(stage, 1, first)

        await stage.start()
        second = await stage.buffer.claim(Claim(2, term, 1, 0.0))
        await stage.buffer.commit(Commit(1, term))

        assert names(other) == names(second) == [t.trajectory_id for t in tickets[2:]]
        assert await stage.trained() == dict.fromkeys(names(first), ("trained", 1, term))

    stage.run(scene)


def test_a_commit_of_a_step_whose_groups_are_unknown_reads_the_checkpoint(stage, remember):
    """The checkpoint is named only after the new buffer has started."""

    async def scene():
        term = await begin(stage)
        tickets = await fill(stage)
        forget = remember(stage.store)
        first = await train(stage, 1, term)
        forget()
        await stage.start()
        assert stage.buffer._groups.steps == {}
        save(stage, 1, first)

        await stage.buffer.commit(Commit(1, term))

        assert await stage.trained() == dict.fromkeys(names(first), ("trained", 1, term))
        assert names(await stage.buffer.claim(Claim(2, term, 1, 0.0))) == [t.trajectory_id for t in tickets[2:]]
        assert list(await stage.store.scan(PAYLOAD)) == [PAYLOAD + t.trajectory_id for t in tickets[2:]]

    stage.run(scene)


def test_without_a_checkpoint_the_step_after_a_forgotten_one_is_refused(stage, remember):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        forget = remember(stage.store)
        await train(stage, 1, term)
        forget()
        await stage.start()

        with pytest.raises(OutOfOrder, match="step 2 was claimed, but 0 is the last that has groups"):
            await stage.buffer.claim(Claim(2, term, 1, 0.0))
        term = (await stage.buffer.draw_term(DrawTerm(term + 1, 0))).term
        assert await train(stage, 1, term)
        assert await train(stage, 2, term)
        await stage.buffer.commit(Commit(2, term))

        assert sorted(set((await stage.fates()).values())) == ["trained"]
        assert len(await stage.fates()) == 4

    stage.run(scene)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_trainer_that_begins_again_gets_the_samples_of_a_forgotten_claim_once(stage, remember, restarts):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        forget = remember(stage.store)
        first = await train(stage, 1, term)
        forget()
        if restarts:
            await stage.start()

        term = (await stage.buffer.draw_term(DrawTerm(term + 1, 0))).term
        again = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        second = await stage.buffer.claim(Claim(2, term, 1, 0.0))
        await stage.buffer.commit(Commit(2, term))

        assert again.groups == first.groups
        assert not set(names(second)) & set(names(first))
        assert sorted((await stage.fates()).values()) == ["trained"] * 4
        assert not stage.buffer._groups.trained

    stage.run(scene)


def test_a_step_may_be_claimed_behind_a_bound_one_and_behind_a_trained_one(stage):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        await stage.buffer.claim(Claim(1, term, 1, 0.0))

        with pytest.raises(OutOfOrder, match="step 3 was claimed, but 1 is the last"):
            await stage.buffer.claim(Claim(3, term, 1, 0.0))
        assert isinstance(await stage.buffer.claim(Claim(2, term, 1, 0.0)), Batch)
        await stage.buffer.advance(Advance(2, term))
        assert isinstance(await stage.buffer.claim(Claim(3, term, 1, 0.0)), NotReady)
        await stage.buffer.commit(Commit(2, term))
        assert isinstance(await stage.buffer.claim(Claim(3, term, 1, 0.0)), NotReady)
        with pytest.raises(OutOfOrder, match="2 is committed already"):
            await stage.buffer.claim(Claim(2, term, 1, 0.0))

    stage.run(scene)


def test_a_term_is_never_drawn_twice_although_the_store_forgot_it(stage, remember):
    async def scene():
        forget = None
        drawn = [await begin(stage)]
        forget = remember(stage.store)
        for restarts in (False, True, True, False):
            await asyncio.sleep(1.0)
            drawn.append((await stage.buffer.draw_term(DrawTerm(0, 0))).term)
            forget()
            if restarts:
                await stage.start()
        drawn.append((await stage.buffer.draw_term(DrawTerm(0, 0))).term)

        assert drawn == sorted(set(drawn))

    stage.run(scene)


def test_the_record_of_a_trained_group_stays_until_its_step_is_committed(stage):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        await train(stage, 1, term)
        assert len(await stage.store.scan(GROUP)) == 2

        await stage.start()
        assert list(stage.buffer._groups.trained) == ["g00000000"]
        assert "g00000000" not in stage.buffer._groups.live
        await stage.buffer.commit(Commit(1, term))

        assert list(await stage.store.scan(GROUP)) == [GROUP + "g00000001"]
        assert list(await stage.store.scan(PAYLOAD)) == [PAYLOAD + "g00000001.0", PAYLOAD + "g00000001.1"]

    stage.run(scene)


# -- a trainer that falls back, and one that a batch kills ---------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
def test_trained_steps_are_trained_again_with_the_same_groups_in_the_same_order(make_stage, restarts):
    stage = make_stage(batch_groups=2, alpha=2)

    async def scene():
        term = await begin(stage)
        batches = {}
        for step in (1, 2, 3):
            await fill(stage)
            batches[step] = await stage.buffer.claim(Claim(step, term, 2, 0.0))
            await stage.buffer.advance(Advance(step, term))
        await stage.buffer.commit(Commit(1, term))
        if restarts:
            await stage.start()
        assert {group.state for step in (2, 3) for group in stage.buffer._groups.steps[step]} == {"trained"}

        reply = await stage.buffer.draw_term(DrawTerm(0, 1))
        states = {group.state for step in (2, 3) for group in stage.buffer._groups.steps[step]}
        again = {step: await stage.buffer.claim(Claim(step, reply.term, 2, 0.0)) for step in (2, 3)}
        await stage.buffer.advance(Advance(3, reply.term))
        await stage.buffer.commit(Commit(3, reply.term))

        assert reply.bound == (2, 3)
        assert states == {"bound"}
        assert {step: batch.groups for step, batch in again.items()} == {step: batches[step].groups for step in (2, 3)}
        assert {name: step for name, (fate, step, _) in (await stage.trained()).items() if fate == "trained"} == {
            name: step for step, batch in batches.items() for name in names(batch)
        }

    stage.run(scene)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_step_that_raises_twice_ends_its_groups_as_poisoned_and_is_bound_anew(stage, restarts):
    async def scene():
        term = await begin(stage)
        tickets = await fill(stage)
        first = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        await stage.buffer.step_raised(StepRaised(1, term, "ValueError: bad token"))
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        again = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        if restarts:
            await stage.start()

        await stage.buffer.step_raised(StepRaised(1, term, "ValueError: bad token"))
        other = await stage.buffer.claim(Claim(1, term, 1, 0.0))

        assert stage.notices == [
            "training on step 1 raised twice (ValueError: bad token): its 1 groups end as poisoned, and the step gets others"
        ]
        assert again.groups == first.groups
        assert names(other) == [t.trajectory_id for t in tickets[2:]]
        assert await stage.trained() == dict.fromkeys(names(first), ("poisoned", 0, 0))
        assert await stage.put(tickets[0]) == "poisoned"
        assert {t.group_id for t in await stage.admit()} == {"g00000002"}
        assert not await stage.store.scan(PAYLOAD + "g00000000")
        assert await told(stage) == names(first)

    stage.run(scene)


def test_a_step_that_raises_once_and_then_another_are_not_poisoned(stage):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        await train(stage, 1, term)
        await stage.buffer.claim(Claim(2, term, 1, 0.0))

        for step in (2, 1, 2, 1):
            term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
            await stage.buffer.step_raised(StepRaised(step, term, "boom"))

        assert stage.notices == []
        assert await stage.fates() == {}

    stage.run(scene)


def test_what_is_bound_after_a_poisoned_batch_may_raise_once_itself(stage):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        poisoned = []
        for _ in range(4):
            assert isinstance(await stage.buffer.claim(Claim(1, term, 1, 0.0)), Batch)
            await stage.buffer.step_raised(StepRaised(1, term, "boom"))
            poisoned.append(len(await stage.fates()))
            term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term

        assert poisoned == [0, 2, 2, 4]
        assert list((await stage.fates()).values()) == ["poisoned"] * 4

    stage.run(scene)


def test_a_poisoned_step_leaves_the_bound_one_behind_it_as_it_was(stage):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        await train(stage, 1, term)
        second = await stage.buffer.claim(Claim(2, term, 1, 0.0))
        for _ in range(2):
            term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
            await stage.buffer.step_raised(StepRaised(1, term, "boom"))
        tickets = await fill(stage)

        anew = await train(stage, 1, term)
        again = await train(stage, 2, term)
        await stage.buffer.commit(Commit(2, term))

        assert names(anew) == [t.trajectory_id for t in tickets]
        assert again.groups == second.groups
        fates = await stage.trained()
        assert {fates[name][:2] for name in names(anew)} == {("trained", 1)}
        assert {fates[name][:2] for name in names(second)} == {("trained", 2)}

    stage.run(scene)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_raise_that_is_told_again_because_its_reply_was_lost_counts_once(stage, restarts):
    async def scene():
        term = await begin(stage)
        await fill(stage)
        first = await stage.buffer.claim(Claim(1, term, 1, 0.0))
        await stage.buffer.step_raised(StepRaised(1, term, "boom"))
        if restarts:
            await stage.start()

        await stage.buffer.step_raised(StepRaised(1, term, "boom"))
        again = await stage.buffer.claim(Claim(1, term, 1, 0.0))

        assert StepRaised.idempotent
        assert (again.groups, stage.notices) == (first.groups, [])

    stage.run(scene)


def test_the_user_is_told_of_a_poisoned_step_though_its_trainer_gave_up_waiting(stage, slow):
    chosen = []
    calls = slow("write", before=5.0, when=lambda n, args: n in chosen)

    async def scene():
        term = await begin(stage)
        await fill(stage)
        await stage.buffer.claim(Claim(1, term, 1, 0.0))
        await stage.buffer.step_raised(StepRaised(1, term, "boom"))
        term = (await stage.buffer.draw_term(DrawTerm(0, 0))).term
        chosen.append(len(calls) + 1)
        telling = stage.tasks.create_task(stage.buffer.step_raised(StepRaised(1, term, "boom")))
        await asyncio.sleep(1.0)
        telling.cancel()
        early = list(stage.notices)
        await asyncio.sleep(10.0)

        assert (early, len(stage.notices)) == ([], 1)

    stage.run(scene)


def test_a_trainer_that_was_replaced_poisons_nothing(stage):
    async def scene():
        old = await begin(stage)
        await fill(stage)
        await stage.buffer.claim(Claim(1, old, 1, 0.0))
        await stage.buffer.draw_term(DrawTerm(0, 0))

        for _ in range(3):
            with pytest.raises(StaleTerm):
                await stage.buffer.step_raised(StepRaised(1, old, "boom"))

        assert await stage.fates() == {}

    stage.run(scene)
