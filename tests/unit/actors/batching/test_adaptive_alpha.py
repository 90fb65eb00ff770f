"""`staleness.alpha: auto` in the buffer: α moves by what steps show, is told, survives restarts, and drops nothing on its way down."""

import asyncio

import msgspec
import pytest

from rubato.actors.messages.samples import Advance, Batch, Claim, DrawTerm, Evaluate
from rubato.actors.samples.group import Training
from rubato.actors.samples.journal import TRAINING
from rubato.planning.adaptive_alpha import AlphaState


class LittleJob:
    """A trainer and rollout places around a buffer; each takes its time. `ess` and `kl` are what training shows.

    A version is told beside the next step, as the trainer does it.
    """

    def __init__(self, stage, *, places=16, rollout_s=5.0, train_s=1.0, publish_s=0.2):
        self.stage, self.places, self.rollout_s = stage, places, rollout_s
        self.train_s, self.publish_s = train_s, publish_s
        self.ess, self.kl, self.term, self.step = 1.0, 0.0, 0, 0
        self.told, self.ages, self.publishing = [], [], None
        """α as the buffer told it after each step; the largest age in each."""
        self.work = [stage.tasks.create_task(self._place(f"env_manager-{n}")) for n in range(1, places + 1)]

    async def run(self, steps):
        """A trainer of a new term goes on for so many steps."""
        reply = await self.stage.buffer.draw_term(DrawTerm(self.term + 1, self.step))
        self.term = reply.term
        for _ in range(steps):
            await self._train()
        await self.publishing

    def stop(self):
        for task in (*self.work, self.publishing):
            task.cancel()

    async def _place(self, name):
        while True:
            for ticket in await self.stage.admit(1, holder=name, wait_s=1000.0):
                await asyncio.sleep(self.rollout_s)
                await self.stage.put(ticket, reward=float(ticket.trajectory_id[-1] == "0"))

    async def _train(self):
        self.step += 1
        batch = await self.stage.buffer.claim(Claim(self.step, self.term, 2, 1000.0, self.ess, self.kl))
        assert isinstance(batch, Batch)
        groups = self.stage.buffer._groups.steps[self.step]
        self.ages.append(max(self.step - 1 - m.outcome.version_first for group in groups for m in group.members))
        await asyncio.sleep(self.train_s)
        if self.publishing is not None:
            await self.publishing
        self.publishing = self.stage.tasks.create_task(self._publish(self.step))

    async def _publish(self, step):
        await asyncio.sleep(self.publish_s)
        self.told.append((await self.stage.buffer.advance(Advance(step, self.term))).alpha)


@pytest.fixture
def stage(make_stage):
    return make_stage(alpha="auto", ticket_ttl_s=1e6)


def test_alpha_goes_up_where_both_sides_wait_and_the_change_is_told(stage):
    async def scene():
        await stage.start()
        job = LittleJob(stage)
        await job.run(30)

        assert job.told[0] == 1
        assert job.told[-1] >= 2
        assert stage.notices[0].startswith("staleness.alpha goes from 1 to 2: trainer idle ")
        assert "rollout places without a slot" in stage.notices[0]
        assert max(job.ages) <= max(job.told)
        job.stop()

    stage.run(scene)


def test_a_restart_goes_on_with_alpha_from_the_store(stage):
    async def scene():
        await stage.start()
        job = LittleJob(stage)
        await job.run(30)
        (plugin,) = stage.buffer._groups.plugins
        before = plugin.state()

        stored = msgspec.msgpack.decode(await stage.store.get(TRAINING), type=Training)
        assert msgspec.msgpack.decode(stored.policies["adaptive_alpha"].state, type=AlphaState) == before
        await stage.start()

        (plugin,) = stage.buffer._groups.plugins
        assert plugin.state() == before
        assert plugin.admits == before.alpha >= 2
        job.stop()

    stage.run(scene)


def test_on_its_way_down_alpha_drops_nothing_and_the_bound_follows(stage):
    async def scene():
        await stage.start()
        job = LittleJob(stage)
        await job.run(40)
        highest = job.told[-1]
        job.ess = 0.1
        await job.run(60)

        assert highest >= 2
        assert job.told[-1] == 0
        assert job.ages[-1] == 0
        assert "stale" not in (await stage.fates()).values()
        assert any("of the samples are effective" in notice for notice in stage.notices)
        job.stop()

    stage.run(scene)


def test_the_divergence_alone_brings_alpha_down_too(stage):
    async def scene():
        await stage.start()
        job = LittleJob(stage)
        job.kl = 2.0
        await job.run(20)

        assert job.told[-1] == 0
        job.stop()

    stage.run(scene)


def test_a_fixed_alpha_stays_and_nothing_is_remembered(make_stage):
    stage = make_stage(alpha=1, ticket_ttl_s=1e6)

    async def scene():
        await stage.start()
        job = LittleJob(stage)
        await job.run(30)

        assert set(job.told) == {1}
        assert stage.buffer._groups.record().policies == {}
        assert stage.notices == []
        job.stop()

    stage.run(scene)


def test_a_step_in_which_a_trainer_began_again_is_no_evidence(stage):
    async def scene():
        await stage.start()
        job = LittleJob(stage)
        for _ in range(30):
            await job.run(1)

        assert set(job.told) == {1}
        job.stop()

    stage.run(scene)


def test_a_step_in_which_an_evaluation_ran_is_no_evidence(stage):
    async def scene():
        await stage.start()
        job = LittleJob(stage)
        for number in range(30):
            await stage.buffer.evaluate(Evaluate(str(number), 1, 0.0, version=job.step))
            await job.run(1) if number == 0 else await job._train()

        assert set(job.told) == {1}
        job.stop()

    stage.run(scene)


def test_alpha_adapts_where_stragglers_are_dropped_too_and_the_bound_holds(make_stage):
    stage = make_stage(alpha="auto", stragglers="drop", ticket_ttl_s=1e6)

    async def scene():
        await stage.start()
        job = LittleJob(stage)
        await job.run(30)

        assert {type(plugin).__name__ for plugin in stage.buffer._groups.plugins} == {"AdaptiveAlpha", "DropStragglers"}
        assert job.told[-1] >= 2
        assert max(job.ages) <= max(job.told)
        job.stop()

    stage.run(scene)
