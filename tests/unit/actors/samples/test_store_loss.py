"""A Store that comes back without its newest second: what it forgot of claims and seals, and what the buffer makes of it."""

import copy

import pytest

from actors.messages.samples import Advance, Batch, Claim, Commit, Confirm, DrawEpoch
from runtime.store.errors import OutOfOrder


@pytest.fixture
def stage(make_stage):
    return make_stage(batch_groups=1, alpha=1)


async def begin(stage):
    """Two ready groups, of one batch each."""
    await stage.start()
    await stage.buffer.draw_epoch(DrawEpoch(0, 0))
    for ticket in await stage.admit():
        await stage.put(ticket, reward=float(ticket.trajectory_id[-1]))


def remember(stage):
    """What the Store forgets when the returned function is called."""
    held = stage.store._worksets["samples"]
    before = copy.deepcopy(held.__dict__)
    return lambda: held.__dict__.update(before)


def names(batch):
    assert isinstance(batch, Batch)
    return batch.groups


def test_a_step_whose_claim_was_forgotten_is_neither_confirmed_nor_followed(stage):
    async def scene():
        await begin(stage)
        forget = remember(stage)
        await stage.buffer.claim(Claim(1, 1, 1, 0.0))
        await stage.buffer.confirm(Confirm(1, 1))
        await stage.buffer.advance(Advance(1, 1))
        forget()

        with pytest.raises(OutOfOrder, match="forgot the samples of step 1"):
            await stage.buffer.confirm(Confirm(1, 1))
        with pytest.raises(OutOfOrder, match="step 2 was claimed, but step 1 is not bound"):
            await stage.buffer.claim(Claim(2, 1, 1, 0.0))

    stage.run(scene)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_trainer_that_begins_again_gets_the_samples_of_a_forgotten_claim_once(stage, restarts):
    async def scene():
        await begin(stage)
        forget = remember(stage)
        first = names(await stage.buffer.claim(Claim(1, 1, 1, 0.0)))
        await stage.buffer.advance(Advance(1, 1))
        forget()
        if restarts:
            await stage.start()

        epoch = (await stage.buffer.draw_epoch(DrawEpoch(2, 0))).epoch
        again = names(await stage.buffer.claim(Claim(1, epoch, 1, 0.0)))
        second = names(await stage.buffer.claim(Claim(2, epoch, 1, 0.0)))
        await stage.buffer.confirm(Confirm(2, epoch))
        await stage.buffer.commit(Commit(2, epoch))

        assert again == first
        assert second != first
        assert sorted((await stage.fates()).values()) == ["trained"] * 4
        assert not stage.buffer._book.trained

    stage.run(scene)


def test_a_forgotten_seal_is_made_again(stage):
    async def scene():
        await stage.start()
        await stage.buffer.draw_epoch(DrawEpoch(0, 0))
        tickets = await stage.admit(2)
        await stage.put(tickets[0], 0.0)
        workset = stage.store._worksets["samples"]
        await stage.put(tickets[1], 1.0)
        workset._groups[tickets[0].group_id].fate = None

        await stage.buffer.claim(Claim(1, 1, 1, 0.0))

        assert len(names(await stage.buffer.claim(Claim(1, 1, 1, 0.0)))) == 1

    stage.run(scene)


def test_the_record_of_a_trained_group_stays_until_its_step_is_committed(stage):
    async def scene():
        await begin(stage)
        await stage.buffer.claim(Claim(1, 1, 1, 0.0))
        await stage.buffer.advance(Advance(1, 1))
        assert len(await stage.store.scan("samples/group/")) == 2

        await stage.start()
        assert list(stage.buffer._book.trained) == ["g00000000"]
        assert "g00000000" not in stage.buffer._book.groups
        await stage.buffer.commit(Commit(1, 1))

        assert list(await stage.store.scan("samples/group/")) == ["samples/group/g00000001"]

    stage.run(scene)
