"""SampleBuffer: tickets, slots, groups, hand-over and the one fate of every sample."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rubato.actors.config import SamplesSection, TrainSection
from rubato.actors.data.prompts import Mixture
from rubato.actors.messages.samples import (
    Admit,
    Advance,
    Batch,
    Claim,
    Close,
    Commit,
    DrawTerm,
    EvalResult,
    Evaluate,
    GiveUp,
    NotReady,
    PolicyState,
    Put,
    RenewLeases,
    Term,
    Trajectory,
)
from rubato.actors.samples import run_files as kept_module
from rubato.actors.samples.group import limits_of
from rubato.actors.samples.run_files import read_kept
from rubato.actors.samples.sample import OutOfOrder, StaleTerm, seed_of
from rubato.runtime.actor import RunInfo
from rubato.runtime.store.store import Fence


@dataclass
class Trainer:
    """Speaks for the trainer, with its term."""

    stage: object
    term: int = 0

    async def start(self, *, step=0, at_least=0):
        reply = await self.stage.buffer.draw_term(DrawTerm(at_least=at_least, step=step))
        self.term = reply.term
        return reply

    async def claim(self, step, *, groups=2, wait_s=0.0):
        return await self.stage.buffer.claim(Claim(step, self.term, groups, wait_s))

    async def advance(self, step):
        return await self.stage.buffer.advance(Advance(step, self.term))

    async def commit(self, step):
        return await self.stage.buffer.commit(Commit(step, self.term))


def ids(batch):
    return [msgspec.msgpack.decode(sample, type=Trajectory).ticket.trajectory_id for group in batch.groups for sample in group]


async def fill(stage, tickets):
    """Put every ticket with a reward of its own, so that each group has spread."""
    for reward, ticket in enumerate(tickets):
        await stage.put(ticket, float(reward))


def test_tickets_come_oldest_group_first_up_to_the_slots(stage):
    async def scene():
        await stage.start()

        tickets = await stage.admit(num=100)
        more = await stage.admit(num=100)

        assert [t.trajectory_id for t in tickets] == [f"g{g:08d}.{m}" for g in range(4) for m in range(2)]
        assert [(t.attempt, t.version, t.purpose) for t in tickets] == [(1, 0, "train")] * 8
        assert more == []

    stage.run(scene)


def test_members_of_a_group_share_row_and_seed_and_groups_do_not(stage):
    async def scene():
        await stage.start()

        tickets = await stage.admit()

        assert len({(t.group_id, t.row, t.seed) for t in tickets}) == 4
        assert len({t.seed for t in tickets}) == 4
        assert [t.row for t in tickets] == [0, 0, 1, 1, 2, 2, 3, 3]

    stage.run(scene)


def test_an_admit_is_held_back_until_a_step_frees_slots(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        await fill(stage, await stage.admit())
        waiting = stage.tasks.create_task(stage.admit(num=1, wait_s=60.0))
        await trainer.claim(1)
        assert not waiting.done()

        standing = await trainer.advance(1)

        assert standing == PolicyState(1, 1, newest=1)
        assert [(t.group_id, t.version) for t in await waiting] == [("g00000004", 1)]

    stage.run(scene)


def test_with_alpha_0_nothing_starts_for_a_step_before_the_one_before_was_trained(make_stage):
    stage = make_stage(alpha=0)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        await fill(stage, await stage.admit())
        await trainer.claim(1)

        during = await stage.admit()
        await trainer.advance(1)
        after = await stage.admit()

        assert during == []
        assert [t.version for t in after] == [1] * 4

    stage.run(scene)


def test_the_job_starts_no_group_that_it_will_not_train(make_stage):
    stage = make_stage(steps=3)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        started = 0
        for step in (1, 2, 3):
            tickets = await stage.admit()
            started += len(tickets)
            await fill(stage, tickets)
            assert isinstance(await trainer.claim(step), Batch)
            await trainer.advance(step)

        assert started == 3 * 2 * 2

    stage.run(scene)


def test_a_batch_holds_the_oldest_groups_and_is_the_same_when_asked_again(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit()
        await fill(stage, reversed(tickets))

        batch = await trainer.claim(1)
        again = await trainer.claim(1)

        assert ids(batch) == [t.trajectory_id for t in tickets[:4]]
        assert again == batch

    stage.run(scene)


def test_a_claim_says_what_is_missing(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit(num=4)
        await fill(stage, tickets[:3])
        waiting = stage.tasks.create_task(trainer.claim(1, wait_s=5.0))
        await asyncio.sleep(1.0)
        (wait,) = stage.buffer.waits.snapshot(asyncio.get_running_loop().time())

        reply = await waiting

        assert reply == NotReady(ready=1, wanted=2, why="1 of 2 groups", version=0)
        assert wait.what == "batch 1"
        assert wait.detail == "1 of 2 groups; oldest group g00000001 has 1 of 2 members, the rest at env_manager-1"
        assert wait.holder == "env_manager-1"

    stage.run(scene)


def test_two_claims_of_a_step_that_wait_together_do_not_keep_each_other_awake(stage):
    """A Claim whose link broke is asked again while the first one still waits."""

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit(num=4)
        waiting = [stage.tasks.create_task(trainer.claim(1, wait_s=5.0)) for _ in range(2)]
        await asyncio.sleep(1.0)

        await fill(stage, tickets)

        batch, again = [await claim for claim in waiting]
        assert again == batch

    stage.run(scene)


def test_a_straggler_is_waited_for_rather_than_dropped(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit()
        straggler = tickets.pop(0)
        await fill(stage, tickets)
        await trainer.claim(1)
        await trainer.advance(1)
        await fill(stage, await stage.admit())

        waiting = stage.tasks.create_task(trainer.claim(2, wait_s=60.0))
        await asyncio.sleep(1.0)
        waits = not waiting.done()
        fate = await stage.put(straggler)

        assert waits
        assert fate == ""
        assert straggler.trajectory_id in ids(await waiting)

    stage.run(scene)


def test_a_put_is_answered_as_before_when_it_comes_again(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit()

        first = await stage.put(tickets[0])
        second = await stage.put(tickets[0], reward=9.0)
        await fill(stage, tickets[1:])
        await trainer.claim(1)
        await trainer.advance(1)
        late = await stage.put(tickets[0])

        assert (first, second, late) == ("", "", "")
        assert len(await stage.fates()) == 0

    stage.run(scene)


def test_two_puts_of_one_sample_at_once_store_it_once(stage, trajectory):
    async def scene():
        await stage.start()
        tickets = await stage.admit()

        async with asyncio.TaskGroup() as tasks:
            puts = [tasks.create_task(stage.buffer.put(Put(trajectory(tickets[0])))) for _ in range(3)]

        assert {put.result().fate for put in puts} == {""}
        assert list(await stage.store.scan("samples/payload/")) == ["samples/payload/g00000000.0"]

    stage.run(scene)


def test_a_lapsed_ticket_goes_to_another_attempt_and_the_old_one_is_refused(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        await stage.start()
        (lost,) = await stage.admit(num=1)
        await stage.admit()
        (again,) = await stage.admit(num=1, wait_s=60.0)

        late = await stage.put(lost)
        fate = await stage.put(again)

        assert asyncio.get_running_loop().time() == pytest.approx(10.0)
        assert (again.trajectory_id, again.attempt) == (lost.trajectory_id, 2)
        assert (late, fate) == ("superseded", "")
        assert stage.buffer.metrics.snapshot()["tickets/refused"] == 1

    stage.run(scene)


def test_a_held_ticket_does_not_lapse(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        await stage.start()
        tickets = await stage.admit()
        held = tuple((t.trajectory_id, t.attempt) for t in tickets)

        for _ in range(5):
            await asyncio.sleep(6.0)
            standing = await stage.buffer.renew_leases(RenewLeases(held, "env_manager-1", 1))
        fate = await stage.put(tickets[0])

        assert standing == PolicyState(0, 1, newest=0)
        assert fate == ""

    stage.run(scene)


def test_a_ticket_that_its_holder_does_not_know_of_is_issued_again(stage):
    async def scene():
        await stage.start()
        known, astray = await stage.admit(num=2)
        held = ((known.trajectory_id, known.attempt),)

        await stage.buffer.renew_leases(RenewLeases(held, "env_manager-1", 1))
        (other,) = await stage.admit(num=1)
        await asyncio.sleep(4.0)
        await stage.buffer.renew_leases(RenewLeases((*held, (other.trajectory_id, 1)), "env_manager-1", 1))
        (again,) = await stage.admit(num=1)

        assert other.trajectory_id != astray.trajectory_id
        assert (again.trajectory_id, again.attempt) == (astray.trajectory_id, 2)

    stage.run(scene)


def test_a_lapsed_ticket_still_counts_while_nobody_took_it(make_stage):
    stage = make_stage(ticket_ttl_s=10.0)

    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)
        await asyncio.sleep(11.0)

        assert await stage.put(ticket) == ""
        assert ticket.trajectory_id not in [t.trajectory_id for t in await stage.admit()]

    stage.run(scene)


def test_the_rollouts_of_a_manager_that_left_are_issued_again_at_once(stage):
    async def scene():
        await stage.start()
        gone = await stage.admit(num=2, holder="env_manager-2")
        kept = await stage.admit()

        await stage.buffer.on_peers((), ("env_manager-2",))
        again = await stage.admit()

        assert [(t.trajectory_id, t.attempt) for t in again] == [(t.trajectory_id, 2) for t in gone]
        assert await stage.put(kept[0]) == ""

    stage.run(scene)


@pytest.mark.parametrize("drains", [True, False])
def test_one_that_left_is_given_nothing_more_though_it_still_asks_and_a_drain_costs_its_rollouts_no_try(make_stage, drains):
    stage = make_stage(alpha=0, max_attempts=1)

    async def scene():
        await stage.start()
        held = await stage.admit(holder="env_manager-2")
        asking = stage.tasks.create_task(stage.admit(num=4, holder="env_manager-2", wait_s=60.0))
        await asyncio.sleep(1.0)
        if drains:
            await stage.lives("env_manager-2", state="draining")

        await stage.buffer.on_peers((), ("env_manager-2",))
        await asyncio.sleep(1.0)
        others = await stage.admit()

        assert not asking.done()
        assert {t.trajectory_id for t in held} & {t.trajectory_id for t in others} == ({t.trajectory_id for t in held} if drains else set())
        asking.cancel()

    stage.run(scene)


def test_one_that_is_seen_again_is_given_tickets_again(stage):
    async def scene():
        await stage.start()
        await stage.admit(num=2, holder="env_manager-2")
        await stage.buffer.on_peers((), ("env_manager-2",))
        asking = stage.tasks.create_task(stage.admit(num=2, holder="env_manager-2", wait_s=60.0))
        await asyncio.sleep(1.0)
        waited = not asking.done()

        await stage.buffer.on_peers(("env_manager-2",), ())

        assert waited
        assert len(await asking) == 2

    stage.run(scene)


def test_a_restarted_manager_keeps_what_its_new_incarnation_took(stage):
    async def scene():
        await stage.start()
        old = await stage.admit(num=2, holder="env_manager-2", incarnation=5)
        new = await stage.admit(num=2, holder="env_manager-2", incarnation=6)
        stage.present.add("env_manager-2")
        await stage.lives("env_manager-2", 6)

        await stage.buffer.on_peers(("env_manager-2",), ("env_manager-2",))
        others = await stage.admit(num=2)

        assert [(t.trajectory_id, t.attempt) for t in new] == [(t.trajectory_id, 2) for t in old]
        assert not {t.trajectory_id for t in others} & {t.trajectory_id for t in new}
        assert [await stage.put(t) for t in new] == ["", ""]

    stage.run(scene)


def test_a_rollout_that_fails_every_attempt_is_failed_and_its_group_shrinks(make_stage):
    stage = make_stage(group_size=3, max_attempts=2)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        bad, *good = await stage.admit(num=3)
        retried = await stage.buffer.give_up(GiveUp(bad, "env_timeout", "reset", retry=True))
        (bad,) = await stage.admit(num=1)
        ended = await stage.buffer.give_up(GiveUp(bad, "env_timeout", "reset", retry=True))
        await fill(stage, good)

        batch = await trainer.claim(1, groups=1)

        assert (retried.fate, bad.attempt, ended.fate) == ("", 2, "failed")
        assert ids(batch) == [t.trajectory_id for t in good]
        assert await stage.fates() == {bad.trajectory_id: "failed"}

    stage.run(scene)


@pytest.mark.parametrize("reason", ["drained", "env_lost"])
def test_what_ends_an_attempt_through_no_fault_of_its_own_costs_no_try(make_stage, reason):
    stage = make_stage(max_attempts=1)

    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)

        reply = await stage.buffer.give_up(GiveUp(ticket, reason, retry=True))
        (again,) = await stage.admit(num=1)

        assert reply.fate == ""
        assert (again.trajectory_id, again.attempt) == (ticket.trajectory_id, 2)

    stage.run(scene)


def test_a_group_with_one_score_is_too_small_and_its_slot_is_free(stage):
    async def scene():
        await stage.start()
        tickets = await stage.admit()
        await stage.put(tickets[0])

        reply = await stage.buffer.give_up(GiveUp(tickets[1], "env_step_failed"))
        fresh = await stage.admit()

        assert reply.fate == "failed"
        assert await stage.fates() == {"g00000000.0": "group_too_small", "g00000000.1": "failed"}
        assert await stage.put(tickets[0]) == "group_too_small"
        assert {t.group_id for t in fresh} == {"g00000004"}

    stage.run(scene)


def test_a_group_without_spread_is_trained_under_its_own_name(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit(num=4)
        for ticket, reward in zip(tickets, (1.0, 1.0, 0.0, 1.0), strict=True):
            await stage.put(ticket, reward)

        await trainer.claim(1)
        await trainer.commit(1)

        assert list((await stage.fates()).values()) == ["zero_spread", "zero_spread", "trained", "trained"]

    stage.run(scene)


def test_a_trajectory_that_began_too_long_ago_is_stale(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        old = (await stage.admit(num=1))[0]
        await trainer.advance(2)
        young = (await stage.admit(num=1))[0]

        first = await stage.put(old)
        second = await stage.put(young)

        assert (first, second) == ("stale", "group_too_small")
        assert await stage.fates() == {old.trajectory_id: "stale", young.trajectory_id: "group_too_small"}

    stage.run(scene)


def test_a_running_group_that_can_no_longer_train_is_ended_early(make_stage):
    stage = make_stage(alpha=0, batch_groups=1, group_size=2)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit()
        await stage.put(tickets[0])

        await trainer.advance(1)

        assert await stage.fates() == {tickets[0].trajectory_id: "stale", tickets[1].trajectory_id: "stale"}
        assert await stage.put(tickets[1]) == "stale"
        assert stage.buffer.metrics.snapshot()["staleness/dropped"] == 2
        assert len(await stage.admit()) == 2

    stage.run(scene)


@pytest.mark.parametrize("turns", range(20))
def test_a_group_that_completes_as_its_last_step_ends_frees_its_slot(make_stage, turns):
    stage = make_stage(alpha=0, batch_groups=1, group_size=2)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        first, last = await stage.admit()
        await stage.put(first)

        putting = stage.tasks.create_task(stage.put(last))
        for _ in range(turns):
            await asyncio.sleep(0)
        await trainer.advance(1)
        await putting

        assert await stage.fates() == {first.trajectory_id: "stale", last.trajectory_id: "stale"}
        assert [ticket.group_id for ticket in await stage.admit()] == ["g00000001"] * 2

    stage.run(scene)


@pytest.mark.parametrize("turns", range(20))
def test_a_group_that_completes_as_the_job_closes_is_unused_and_not_lost(make_stage, turns):
    stage = make_stage(batch_groups=1, group_size=2)

    async def scene():
        await stage.start()
        first, last = await stage.admit(num=2)
        await stage.put(first)

        putting = stage.tasks.create_task(stage.put(last))
        for _ in range(turns):
            await asyncio.sleep(0)
        await stage.buffer.close(Close())
        await putting

        assert await stage.fates() == {first.trajectory_id: "unused", last.trajectory_id: "unused"}
        assert await stage.put(last) == "unused"

    stage.run(scene)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e200])
def test_a_reward_that_training_can_not_compute_with_is_a_failed_rollout(stage, reward):
    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)

        fate = await stage.put(ticket, reward)

        assert fate == "failed"

    stage.run(scene)


def test_a_restarted_trainer_replays_bound_steps_then_goes_on(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        first = await trainer.start()
        batches = {}
        for step in (1, 2, 3):
            await fill(stage, await stage.admit())
            batches[step] = ids(await trainer.claim(step))
            await trainer.advance(step)
        await trainer.commit(1)

        again = Trainer(stage)
        reply = await again.start(step=2)
        replayed = ids(await again.claim(3))
        await again.advance(3)
        await fill(stage, await stage.admit())
        onward = ids(await again.claim(4))

        assert first == Term(1, 0, ())
        assert reply == Term(2, 2, (3,))
        assert replayed == batches[3]
        assert not set(onward) & {name for batch in batches.values() for name in batch}
        with pytest.raises(StaleTerm):
            await trainer.claim(4)
        with pytest.raises(StaleTerm):
            await trainer.advance(4)
        with pytest.raises(StaleTerm):
            await trainer.commit(3)
        with pytest.raises(OutOfOrder):
            await again.claim(2)

    stage.run(scene)


def test_an_evaluation_goes_before_training_and_takes_no_slots(stage):
    async def scene():
        await stage.start()
        stage.tasks.create_task(stage.buffer.evaluate(Evaluate("step-0", 3, wait_s=0.0)))
        await asyncio.sleep(0)

        tickets = await stage.admit(num=5)
        exam, train = tickets[:3], tickets[3:]
        early = await stage.buffer.evaluate(Evaluate("step-0", 3, wait_s=1.0))
        await stage.put(exam[0], 1.0)
        await stage.put(exam[1], 0.0)
        await stage.buffer.give_up(GiveUp(exam[2], "env_step_failed"))
        result = await stage.buffer.evaluate(Evaluate("step-0", 3))

        assert [(t.purpose, t.row) for t in exam] == [("eval", n) for n in range(3)]
        assert [t.purpose for t in train] == ["train"] * 2
        assert early == NotReady(0, 3, "0 of 3 held-out rollouts have an outcome")
        figures = {"reward/env": 0.375, "reward/exact": 0.125}
        assert result == EvalResult(version=0, rewards=((1.0,), (0.0,), ()), failed=1, figures=figures)
        assert len(await stage.admit()) == 6
        assert await stage.fates() == {}

    stage.run(scene)


def test_the_samples_of_a_held_out_row_share_its_seed_and_come_back_together(stage):
    async def scene():
        await stage.start()
        await stage.buffer.evaluate(Evaluate("a", 2, wait_s=0.0, samples=2))

        tickets = await stage.admit(num=4)
        for ticket, reward in zip(tickets, (1.0, 0.0, 0.5, 0.25), strict=True):
            await stage.put(ticket, reward)
        result = await stage.buffer.evaluate(Evaluate("a", 2, samples=2))

        assert [t.row for t in tickets] == [0, 0, 1, 1]
        assert tickets[0].seed == tickets[1].seed != tickets[2].seed
        assert result.rewards == ((1.0, 0.0), (0.5, 0.25))

    stage.run(scene)


def held_out_rows(stage, version):
    return [json.loads(line) for line in (stage.folder / "evals" / f"{version}.jsonl").read_text().splitlines()]


def test_every_sample_of_an_evaluation_is_kept_with_its_text_once_it_is_over_and_once_whatever_dies(stage, trajectory):
    async def evaluate(key, rewards):
        await stage.buffer.evaluate(Evaluate(key, 2, wait_s=0.0, samples=2))
        for ticket, reward in zip(await stage.admit(num=4), rewards, strict=True):
            told = msgspec.structs.replace(trajectory(ticket, reward or 0.0), text=f"{key} {ticket.trajectory_id[-1]}")
            if reward is None:
                await stage.buffer.give_up(GiveUp(ticket, "reward_failed", "it raised", played=told))
            else:
                await stage.buffer.put(Put(told))
        assert not (stage.folder / "evals" / "0.jsonl").exists() or key == "b"
        return await stage.buffer.evaluate(Evaluate(key, 2, samples=2))

    async def scene():
        await stage.start()
        await evaluate("a", (1.0, None, 0.5, 0.25))
        first = held_out_rows(stage, 0)
        again = await stage.buffer.evaluate(Evaluate("a", 2, samples=2))
        assert held_out_rows(stage, 0) == first
        await stage.start()
        await evaluate("b", (1.0, 1.0, 1.0, 1.0))

        ended = {"turns": 3, "finish": "stop"}
        assert first == [
            {"task": "", "row": 0, "sample": 0, "reward": 1.0, "text": "a 0", **ended},
            {"task": "", "row": 0, "sample": 1, "reward": None, "text": "a 1", "turns": 0, "finish": "reward_failed"},
            {"task": "", "row": 1, "sample": 0, "reward": 0.5, "text": "a 2", **ended},
            {"task": "", "row": 1, "sample": 1, "reward": 0.25, "text": "a 3", **ended},
        ]
        assert list(first[0]) == ["task", "row", "sample", "reward", "finish", "text", "turns"]
        assert again.rewards == ((1.0,), (0.5, 0.25))
        assert [row["text"] for row in held_out_rows(stage, 0)] == ["b 0", "b 1", "b 2", "b 3"]
        assert [path.name for path in (stage.folder / "evals").iterdir()] == ["0.jsonl"]

    stage.run(scene)


def test_the_text_of_an_evaluation_is_bounded_for_each_sample_and_as_a_whole(stage, trajectory, monkeypatch):
    monkeypatch.setattr(kept_module, "MOST_ROUND_TEXT", 200)

    async def scene():
        await stage.start()
        await stage.buffer.evaluate(Evaluate("a", 2, wait_s=0.0))
        for ticket in await stage.admit(num=2):
            await stage.buffer.put(Put(msgspec.structs.replace(trajectory(ticket), text="x" * 60 + "y" * 600)))
        await stage.buffer.evaluate(Evaluate("a", 2))

        (text, _) = [row["text"] for row in held_out_rows(stage, 0)]
        assert text.startswith("x" * 50)
        assert text.endswith("y" * 50)
        assert "560 characters left out" in text

    stage.run(scene)


def test_a_disk_that_takes_no_held_out_samples_costs_no_evaluation(stage):
    async def scene():
        await stage.start()
        (stage.folder / "evals").write_text("in the way")
        await stage.buffer.evaluate(Evaluate("a", 1, wait_s=0.0))
        for ticket in await stage.admit(num=1):
            await stage.put(ticket, 1.0)

        assert (await stage.buffer.evaluate(Evaluate("a", 1))).rewards == ((1.0,),)

    stage.run(scene)


def test_what_a_rollout_that_failed_had_played_stays_readable(stage, trajectory):
    async def scene():
        await stage.start()
        one, other, *_ = await stage.admit()
        played = msgspec.structs.replace(trajectory(one), reason="env_step_failed: it raised")
        await stage.buffer.give_up(GiveUp(one, "env_step_failed", played=played))
        tried = msgspec.structs.replace(trajectory(other), reason="crashed")
        await stage.buffer.give_up(GiveUp(other, "crashed", retry=True, played=tried))
        await stage.buffer.on_drain()

        assert {t.ticket.trajectory_id: t.reason for t in read_kept(stage.folder)} == {one.trajectory_id: "env_step_failed: it raised"}

    stage.run(scene)


def test_a_held_out_rollout_keeps_its_version_while_training_goes_on(stage):
    async def scene():
        await stage.start()
        await stage.buffer.evaluate(Evaluate("a", 1, wait_s=0.0))
        (ticket,) = await stage.admit(num=1)
        await stage.buffer.advance(Advance(1, 1))
        await stage.buffer.give_up(GiveUp(ticket, "drained", retry=True))

        (again,) = await stage.admit(num=1)

        assert (again.purpose, again.version) == ("eval", 0)

    stage.run(scene)


def test_held_out_rows_have_the_same_seeds_in_every_run(make_stage):
    stage = make_stage()
    seeds = []

    async def scene():
        await stage.start()
        await stage.buffer.evaluate(Evaluate("a", 4, wait_s=0.0))
        seeds.append([t.seed for t in await stage.admit(num=4)])
        stage.process.kill()
        stage.process = None

    stage.run(scene)
    stage.run_info = stage.run_info._replace(seed=99)
    stage.run(scene)

    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


def test_closing_ends_what_no_step_is_bound_to_and_admits_nothing(stage):
    async def scene():
        await stage.start()
        tickets = await stage.admit()
        await stage.put(tickets[0])
        waiting = stage.tasks.create_task(stage.buffer.admit(Admit(1, "env_manager-1", 1, 60.0)))
        await asyncio.sleep(0)

        await stage.buffer.close(Close())

        assert (await waiting).closed
        assert set((await stage.fates()).values()) == {"unused"}
        assert len(await stage.fates()) == 8

    stage.run(scene)


def test_the_ledger_tells_what_became_of_each_sample(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit()
        await fill(stage, tickets[:4])
        await stage.buffer.give_up(GiveUp(tickets[4], "env_step_failed", tokens=40, turns=2))
        await trainer.claim(1)
        await trainer.advance(1)
        await trainer.commit(1)
        await asyncio.sleep(0.1)

        lines = [json.loads(line) for line in (stage.folder / "samples.jsonl").read_text().splitlines()]

        assert [line["fate"] for line in lines] == ["failed", "group_too_small"] + ["trained"] * 4
        assert lines[0] == {
            "trajectory_id": "g00000002.0",
            "group_id": "g00000002",
            "attempt": 1,
            "row": 2,
            "task": "",
            "fate": "failed",
            "step": None,
            "epoch": None,
            "version_first": None,
            "version_from": None,
            "age": None,
            "reward": None,
            "tokens": 40,
            "turns": 2,
            "wall_s": 0.0,
            "finish_reasons": [],
            "cut": False,
            "env_s": 0.0,
            "scores": {},
            "reason": "env_step_failed",
            "purpose": "train",
            "seed": seed_of("train", 7, 2),
        }
        assert lines[3] == {
            "trajectory_id": "g00000000.1",
            "group_id": "g00000000",
            "attempt": 1,
            "row": 0,
            "task": "",
            "fate": "trained",
            "step": 1,
            "epoch": 1,
            "version_first": 0,
            "version_from": 0,
            "age": 0,
            "reward": 1.0,
            "tokens": 3,
            "turns": 3,
            "wall_s": 0.25,
            "finish_reasons": ["stop", "length", "stop"],
            "cut": True,
            "env_s": 0.0,
            "reason": "",
            "scores": {"env": 0.75, "exact": 0.25},
            "purpose": "train",
            "seed": seed_of("train", 7, 0),
        }

    stage.run(scene)


def test_every_sampled_token_is_held_or_has_its_fate(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit()
        await stage.buffer.give_up(GiveUp(tickets[0], "env_timeout", retry=True, tokens=100, turns=1))
        (again,) = await stage.admit(num=1)
        await fill(stage, [again, *tickets[1:6]])
        await stage.put(again)
        await stage.put(tickets[0])
        await stage.buffer.give_up(GiveUp(tickets[6], "env_step_failed", tokens=40, turns=2))
        await trainer.claim(1)
        await trainer.advance(1)
        await trainer.commit(1)
        figures = stage.buffer.metrics.snapshot()
        await stage.buffer.close(Close())
        await stage.put(tickets[7])
        tally = stage.buffer._groups.training.tally

        tokens = {name: value for name, value in figures.items() if name.startswith("tokens/")}
        assert tokens == {
            "tokens/generated": 158.0, "tokens/trained": 12.0, "tokens/retried": 100.0, "tokens/failed": 40.0, "tokens/held": 6.0,
            "tokens/group_too_small": 0.0
        }  # fmt: skip
        assert figures["tickets/refused_tokens"] == 3.0
        assert {name: value for name, value in figures.items() if name.startswith("length/")} == {
            "length/4/ended": 4.0, "length/4/trained_frac": 1.0, "length/64/ended": 1.0, "length/64/trained_frac": 0.0,
            "length/0/ended": 1.0, "length/0/trained_frac": 0.0
        }  # fmt: skip
        assert tally.generated == 161 == sum(tally.tokens.values())
        assert (tally.tokens["unused"], tally.tokens["group_too_small"]) == (6, 3)

    stage.run(scene)


def test_a_large_trajectory_lies_in_a_file_until_it_ended(stage, trajectory):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit(num=4)
        for reward, ticket in enumerate(tickets):
            await stage.buffer.put(Put(trajectory(ticket, float(reward), num_tokens=20_000)))
        files = sorted(path.name for path in (stage.folder / "samples").iterdir())

        batch = await trainer.claim(1)
        await trainer.commit(1)
        await asyncio.sleep(0.1)

        assert files == [f"{t.trajectory_id}.1" for t in tickets]
        assert [len(sample) > 64 * 1024 for group in batch.groups for sample in group] == [True] * 4
        assert ids(batch) == [t.trajectory_id for t in tickets]
        assert list((stage.folder / "samples").iterdir()) == []

    stage.run(scene)


def test_managers_are_told_of_a_new_version(stage):
    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()

        await trainer.advance(1)
        await asyncio.sleep(0.1)

        assert stage.process.told == [("env_manager-1", PolicyState(1, 1, newest=1))]

    stage.run(scene)


def test_while_the_store_is_away_nobody_is_admitted_and_every_answer_waits_for_it(stage):
    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)
        stage.away = True
        putting = stage.tasks.create_task(stage.put(ticket))
        await asyncio.sleep(5.0)

        admitting = stage.tasks.create_task(stage.admit(wait_s=5.0))
        await asyncio.sleep(10.0)
        answered = putting.done() or admitting.done()
        stage.away = False
        fate, during = await putting, await admitting
        after = await stage.admit(wait_s=5.0)

        assert (during, answered) == ([], False)
        assert fate == ""
        assert len(after) == 7

    stage.run(scene)


def test_tickets_of_an_asker_that_gave_up_before_they_were_durable_are_not_lost(stage):
    async def scene():
        await stage.start()
        stage.away = True
        asking = stage.tasks.create_task(stage.admit(num=3))
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.sleep(1.0)
        stage.away = False

        tickets = await stage.admit(wait_s=10.0)

        assert [(t.trajectory_id, t.attempt) for t in tickets[:3]] == [(f"g{g:08d}.{m}", 1) for g, m in ((0, 0), (0, 1), (1, 0))]

    stage.run(scene)


def test_a_buffer_that_was_replaced_answers_nothing_and_dies(stage, trajectory):
    async def scene():
        old = await stage.start()
        tickets = await stage.admit()
        process = stage.process
        stage.process = None
        await stage.start()

        late = stage.tasks.create_task(old.put(Put(trajectory(tickets[0]))))
        await process.dead.wait()
        late.cancel()

        assert not await stage.store.scan("samples/payload/")
        assert await stage.put(tickets[0]) == ""

    stage.run(scene)


@pytest.mark.parametrize("again", ["put", "claim", "draw_term"])
def test_an_answer_from_memory_is_not_given_by_a_buffer_that_was_replaced(stage, again, trajectory):
    async def scene():
        old = await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        tickets = await stage.admit(num=4)
        await fill(stage, tickets)
        await trainer.claim(1)
        process = stage.process
        stage.process = None
        await stage.start()
        asked = {
            "put": old.put(Put(trajectory(tickets[0]))),
            "claim": old.claim(Claim(1, trainer.term, 2, 0.0)),
            "draw_term": old.draw_term(DrawTerm(at_least=0, step=0)),
        }

        late = stage.tasks.create_task(asked.pop(again))
        await process.dead.wait()

        assert not late.done()
        late.cancel()
        for work in asked.values():
            work.close()

    stage.run(scene)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(lambda buffer: buffer.admit(Admit(1, "env_manager-1", 1, 0.0)), id="no ticket"),
        pytest.param(lambda buffer: buffer.claim(Claim(1, 1, 2, 0.0)), id="no batch"),
        pytest.param(lambda buffer: buffer.evaluate(Evaluate("step-0", 2, wait_s=0.0)), id="no result"),
        pytest.param(lambda buffer: buffer.evaluate(Evaluate("done", 0, wait_s=0.0)), id="a result"),
    ],
)
def test_a_buffer_that_was_replaced_answers_nothing_from_memory(stage, asked):
    async def scene():
        buffer = await stage.start()
        await stage.admit()
        await stage.store.write({}, fence=Fence("sample_buffer", 2))

        asking = stage.tasks.create_task(asked(buffer))
        await asyncio.wait({asking}, timeout=60.0)

        assert not asking.done()
        assert stage.process.dead.is_set()
        asking.cancel()

    stage.run(scene)


# -- dynamic sampling ------------------------------------------------------------------------------------------------


def test_with_dynamic_sampling_others_take_the_place_of_groups_without_spread(make_stage):
    stage = make_stage(alpha=0, dynamic_sampling=True)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        first = await stage.admit()
        for ticket, reward in zip(first, (1.0, 1.0, 0.0, 1.0), strict=True):
            await stage.put(ticket, reward)

        short = await trainer.claim(1)
        fresh = await stage.admit()
        await fill(stage, fresh)
        batch = await trainer.claim(1)

        assert isinstance(short, NotReady)
        assert {t.group_id for t in fresh} == {"g00000002"}
        assert ids(batch) == ["g00000001.0", "g00000001.1", "g00000002.0", "g00000002.1"]
        assert batch.figures == {"reward/filtered_frac": 2 / 6, "reward/unconditioned": pytest.approx(4.0 / 6)}
        assert await stage.fates() == {"g00000000.0": "filtered", "g00000000.1": "filtered"}
        assert stage.finished == []

    stage.run(scene)


def test_what_was_left_out_is_told_with_the_batch_that_it_was_left_out_of(make_stage):
    stage = make_stage(alpha=1, batch_groups=1, dynamic_sampling=True)

    async def scene():
        await stage.start()
        trainer = Trainer(stage)
        await trainer.start()
        for ticket, reward in zip(await stage.admit(), (1.0, 1.0, 0.0, 1.0), strict=True):
            await stage.put(ticket, reward)
        first = await trainer.claim(1, groups=1)
        await fill(stage, await stage.admit())
        second = await trainer.claim(2, groups=1)

        assert [batch.figures["reward/filtered_frac"] for batch in (first, second)] == [0.5, 0.0]

    stage.run(scene)


def test_a_job_without_any_spread_ends_with_a_sentence_instead_of_never(make_stage):
    stage = make_stage(batch_groups=1, alpha=0, dynamic_sampling=True, max_barren_groups=10)

    async def scene():
        await stage.start()
        for _ in range(10):
            for ticket in await stage.admit():
                await stage.put(ticket, 0.5)

        assert [(reason[:42], failed) for reason, failed in stage.finished] == [("10 groups in a row had no reward spread: e", True)]
        assert [text[:41] for text in stage.notices] == ["8 groups in a row had no reward spread: e"]

    stage.run(scene)


def test_a_job_whose_groups_never_have_two_rewards_is_told_of_it_and_ends_with_the_cause(make_stage):
    stage = make_stage(batch_groups=1, alpha=0, group_size=4, max_barren_groups=12)

    async def scene():
        await stage.start()
        for _ in range(12):
            first, *others = await stage.admit()
            await stage.put(first, 1.0)
            for ticket in others:
                await stage.buffer.give_up(GiveUp(ticket, "reward_failed", "wrong_type: it returned a NoneType"))
            told = list(stage.notices)

        few = "groups in a row had fewer than two rollouts with a reward (failed: reward_failed"
        assert [text.startswith(f"8 {few} 24), ") for text in told] == [True]
        assert told[0].endswith("The run ends after 12 in a row (samples.max_barren_groups)")
        ((reason, failed),) = stage.finished
        assert failed
        assert reason.startswith(f"12 {few} 36), ")
        assert "rubato samples RUN --fate failed" in reason

    stage.run(scene)


def test_a_group_that_may_train_begins_the_count_of_those_that_came_to_nothing_anew(make_stage):
    stage = make_stage(batch_groups=8, alpha=0, group_size=2, max_barren_groups=4, dynamic_sampling=True)

    async def scene():
        await stage.start()
        for kind in ("small", "flat", "small", "good", "small", "flat", "small"):
            one, other = await stage.admit(2)
            await stage.put(one, 1.0)
            if kind == "small":
                await stage.buffer.give_up(GiveUp(other, "env_step_failed", "it raised"))
            else:
                await stage.put(other, float(kind == "flat"))
        assert stage.finished == []
        one, other = await stage.admit(2)
        for ticket in (one, other):
            await stage.put(ticket, 1.0)

        ((reason, _),) = stage.finished
        assert reason.startswith("4 groups in a row came to nothing: 2 had fewer than two rollouts")
        assert ", 2 had no reward spread: every rollout of a task earns the same." in reason

    stage.run(scene)


def test_an_empty_limit_is_ten_batches_of_groups_and_at_least_128():
    def limit(batch_groups, given=None):
        train, samples = TrainSection(batch_groups=batch_groups), SamplesSection(max_barren_groups=given)
        return limits_of(train, samples, RunInfo("run", Path("run"), 7, 100, 0.0), Mixture()).max_barren_groups

    assert (limit(4), limit(64), limit(64, 7)) == (128, 640, 7)


def test_what_is_put_stays_readable_in_the_run_folder_and_what_is_flawed_does_not(stage, trajectory):
    async def scene():
        await stage.start()
        tickets = await stage.admit()
        await fill(stage, tickets[:2])
        flawed = trajectory(tickets[2], reward=float("nan"))
        await stage.buffer.put(Put(flawed))
        await stage.buffer.on_drain()

        kept = {t.ticket.trajectory_id: t for t in read_kept(stage.folder)}

        assert sorted(kept) == ["g00000000.0", "g00000000.1"]
        assert kept["g00000000.0"].segments[0].tokens == trajectory(tickets[0]).segments[0].tokens
        assert kept["g00000000.0"].segments[0].logprobs == b""

    stage.run(scene)


def test_where_nothing_is_to_be_kept_nothing_is(make_stage):
    async def scene():
        await stage.start()
        await fill(stage, (await stage.admit())[:2])
        await stage.buffer.on_drain()

        assert not (stage.folder / "trajectories").exists()

    stage = make_stage(keep=0)
    stage.run(scene)
