"""The buffer dies before or after any of its writes: nothing acknowledged is lost, nothing trained twice, one fate each."""

import asyncio
import json
import random
from collections import Counter

import msgspec
import pytest

from rubato.actors.messages.samples import Admit, Advance, Batch, Claim, Close, Commit, DrawTerm, GiveUp, Put, Trajectory

STEPS, BATCH_GROUPS, GROUP_SIZE, ALPHA = 5, 2, 3, 1
ENOUGH = 400
"""More writes than a run makes."""


class Job:
    """Environment managers and a trainer who ask again whenever the buffer dies under them."""

    def __init__(self, stage, trajectory, seed):
        self.stage, self.trajectory, self.seed = stage, trajectory, seed
        self.acknowledged: dict[str, str] = {}
        self.trained: dict[int, list[str]] = {}

    async def play(self, **fault):
        await self.stage.lives("env_manager-2")
        await self.stage.start(**fault)
        async with asyncio.TaskGroup() as tasks:
            for n in (1, 2):
                tasks.create_task(self.manage(f"env_manager-{n}", random.Random(self.seed + n)))
            tasks.create_task(self.train(random.Random(self.seed)))
        await asyncio.sleep(10.0)

    async def manage(self, name, rng):
        while True:
            reply = await self.stage.ask("admit", Admit(3, name, 1, 5.0))
            if reply.closed:
                return
            async with asyncio.TaskGroup() as tasks:
                for ticket in reply.tickets:
                    tasks.create_task(self.roll_out(ticket, rng.random(), rng.random()))

    async def roll_out(self, ticket, chance, reward):
        await asyncio.sleep(0.01 + chance)
        if chance < 0.06:
            stored = await self.stage.ask("give_up", GiveUp(ticket, "env_timeout", retry=chance < 0.04))
        else:
            stored = await self.stage.ask("put", Put(self.trajectory(ticket, reward)))
            if stored.fate != "superseded":
                self.acknowledged[ticket.trajectory_id] = stored.fate

    async def train(self, rng):
        """Checkpoints every second step, and crashes back to one on the way."""
        saved, step = 0, 1
        term = (await self.stage.ask("draw_term", DrawTerm(0, 0))).term
        crashes = {3: rng.random() < 0.5, 5: True}
        while step <= STEPS:
            batch = await self.stage.ask("claim", Claim(step, term, BATCH_GROUPS, 5.0))
            if not isinstance(batch, Batch):
                continue
            self.trained[step] = [name_of(sample) for group in batch.groups for sample in group]
            await asyncio.sleep(0.2)
            if crashes.pop(step, False):
                term = (await self.stage.ask("draw_term", DrawTerm(0, saved))).term
                step = saved + 1
                continue
            await self.stage.ask("advance", Advance(step, term))
            if step % 2 == 0 or step == STEPS:
                saved = step
                await self.stage.ask("commit", Commit(step, term))
            step += 1
        await self.stage.ask("close", Close())

    async def check(self):
        fates = await self.stage.fates()
        trained = [name for names in self.trained.values() for name in names]
        assert len(trained) == len(set(trained))
        assert {name for name, fate in fates.items() if fate in ("trained", "zero_spread")} == set(trained)
        for name, fate in self.acknowledged.items():
            assert name in fates
            assert fate in ("", fates[name])
        lines = [json.loads(line) for line in (self.stage.folder / "samples.jsonl").read_text().splitlines()]
        assert {line["trajectory_id"]: line["fate"] for line in lines} == fates
        assert Counter(line["fate"] for line in lines)["stale"] == 0
        ages = [line["age"] for line in lines if line["step"]]
        assert max(ages) <= ALPHA
        assert not await self.stage.store.scan("samples/group/")


def name_of(sample):
    return msgspec.msgpack.decode(sample, type=Trajectory).ticket.trajectory_id


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("spread", range(8))
def test_a_death_at_any_write_loses_and_doubles_nothing(make_stage, trajectory, tmp_path, before, spread):
    died = True
    spare = spread
    while died and spare < ENOUGH:
        stage = make_stage(alpha=ALPHA, batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, steps=STEPS, ticket_ttl_s=4.0, max_attempts=5)
        (tmp_path / "samples.jsonl").unlink(missing_ok=True)
        job = Job(stage, trajectory, seed=spare)

        async def scene(stage=stage, job=job, spare=spare):
            await job.play(spare=spare, before=before)
            await job.check()

        stage.run(scene)

        died = stage.incarnation > 1
        spare += 8
    assert not died


@pytest.mark.parametrize("seed", range(12))
def test_deaths_again_and_again_lose_and_double_nothing(make_stage, trajectory, seed):
    stage = make_stage(alpha=ALPHA, batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, steps=STEPS, ticket_ttl_s=4.0, max_attempts=99)
    stage.faults = random.Random(seed)
    job = Job(stage, trajectory, seed)

    async def scene():
        await job.play()
        await job.check()

    stage.run(scene)

    assert stage.incarnation > 5
