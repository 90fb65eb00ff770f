"""What an evaluation leaves in evals.jsonl and for the next row, and what the user is told of failed tasks."""

import asyncio
import json
from itertools import product
from types import SimpleNamespace

import pytest

from rubato.actors.config import EvalSection
from rubato.actors.messages.samples import EvalResult, Evaluate, NotReady
from rubato.actors.messages.weights import WeightsHeld
from rubato.actors.report.summary import Run, summary
from rubato.actors.training.evaluation import HeldOut, figures, pass_at
from rubato.bus.errors import Unknown
from rubato.runtime.observe.log import logger


class Fake:
    """A trainer, whose sample buffer gives `replies` in turn, and whose engines hold what they are asked to unless they are `dead`."""

    def __init__(self, folder, *replies, engines=("engine-1", "engine-2"), dead=()):
        self.run, self.name, self.log = SimpleNamespace(folder=folder), "trainer-1", logger("test")
        self.replies, self.engines, self.dead = list(replies), engines, set(dead)
        self.told, self.held, self.asked = [], [], []

    def peers(self, role):
        return self.engines

    def ref(self, target):
        return SimpleNamespace(ask=lambda request, **_: self.ask(target, request))

    async def ask(self, target, request):
        if isinstance(request, Evaluate):
            self.asked.append(request.key)
            return self.replies.pop(0)
        if target in self.dead:
            raise Unknown(f"{target} died")
        self.held.append((target, request.version, request.for_s > 0))
        return WeightsHeld(target, request.for_s > 0)

    def spawn(self, work, name):
        return asyncio.get_running_loop().create_task(work, name=name)

    async def offload(self, fn, *args):
        return fn(*args)

    async def on_disk(self, path, write, *args):
        return write(*args)

    def notice(self, text):
        self.told.append(text)


def rewards(num):
    return ((1.0,),) * num


def evaluated(folder, num, failed):
    trainer = Fake(folder, EvalResult(4, rewards(num), failed))
    held_out = HeldOut(trainer, EvalSection())
    held_out.take_over(0)
    asyncio.run(held_out.evaluate(4, 1, num + failed))
    return held_out.take(), trainer.told


def rows(folder):
    return [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]


def test_a_failed_task_is_counted_beside_the_reward_of_the_others(tmp_path):
    row, told = evaluated(tmp_path, 1, 199)

    assert row.items() >= {"eval/reward": 1.0, "eval/num": 1, "eval/failed": 199, "eval/version": 4}.items()
    assert told == ["evaluation of version 4: 199 of 200 rollouts failed, and eval/reward leaves them out"]
    (line,) = rows(tmp_path)
    assert list(line)[:4] == ["version", "reward", "num", "failed"]
    assert line.items() >= {"version": 4, "reward": 1.0, "num": 1, "failed": 199}.items()


@pytest.mark.parametrize(("failed", "notices"), [(0, 0), (2, 0), (3, 1)])
def test_more_than_one_task_in_a_hundred_that_failed_is_worth_a_notice(failed, notices, tmp_path):
    assert len(evaluated(tmp_path, 200 - failed, failed)[1]) == notices


def test_where_every_task_failed_there_is_no_reward(tmp_path):
    assert "eval/reward" not in evaluated(tmp_path, 0, 8)[0]


@pytest.mark.parametrize(
    ("num", "failed", "words"),
    [
        (200, 0, "(held-out 1.00)"),
        (1, 199, "(held-out 1.00 over 1 of 200 rollouts; 199 failed)"),
        (0, 8, "(held-out: no reward over 0 of 8 rollouts; 8 failed)"),
    ],
)
def test_the_summary_says_of_how_many_tasks_the_reward_is(num, failed, words, tmp_path):
    evaluated(tmp_path, num, failed)
    evals = [(0.0, row) for row in rows(tmp_path)]

    assert words in summary(Run(tmp_path, [{"step": 1.0, "reward/mean": 0.5}], {}, 1, 1, "model", "Env", [], evals=evals))[0]


def test_one_engine_in_eight_holds_the_version_while_training_goes_on_and_is_let_go(tmp_path):
    names = tuple(f"engine-{n}" for n in range(16))

    async def play(share):
        trainer = Fake(tmp_path, NotReady(0, 1, "wait"), EvalResult(4, rewards(1), 0), engines=names)
        await HeldOut(trainer, EvalSection()).evaluate(4, 1, 1, **share)
        await asyncio.sleep(0)
        return trainer

    few, every = asyncio.run(play({})), asyncio.run(play({"share": 1}))

    assert sorted(few.held) == sorted((n, 4, held) for n in names[-2:] for held in (True, True, False))
    assert {name for name, *_ in every.held} == set(names)
    assert few.told == []


def test_an_evaluation_whose_engine_died_is_given_to_the_next_version_and_the_last_one_begun_again(tmp_path):
    async def play(share):
        lost = EvalResult(4, rewards(1), 1)
        trainer = Fake(tmp_path, NotReady(0, 2, "wait"), lost, EvalResult(4, rewards(2), 0))
        ask = trainer.ask

        async def dying(target, request):
            if isinstance(request, Evaluate):
                trainer.dead = {"engine-2"}
            return await ask(target, request)

        trainer.ask = dying
        held_out = HeldOut(trainer, EvalSection(every=10))
        await held_out.evaluate(4, 1, 2, **share)
        return held_out, trainer

    held_out, trainer = asyncio.run(play({}))
    assert held_out.take() == {}
    assert trainer.asked == ["1.4.0"]
    assert held_out.due(5, 100) == 64

    held_out, trainer = asyncio.run(play({"share": 1}))
    found = {"eval/version": 4, "eval/reward": 1.0, "eval/num": 2, "eval/failed": 0}
    assert held_out.take().items() >= found.items()
    assert trainer.asked == ["1.4.0", "1.4.0", "1.4.1"]


def test_evaluations_are_due_at_the_start_at_every_nth_version_and_at_the_end_and_once_each(tmp_path):
    def due(last_row, **section):
        (tmp_path / "evals.jsonl").write_text("".join(f'{{"version": {v}, "num": 1}}\n' for v in last_row))
        held_out = HeldOut(Fake(tmp_path), EvalSection(**section))
        held_out.take_over(100)
        return [step for step in range(26) if held_out.due(step, 25)]

    assert due((), every=10) == [0, 10, 20, 25]
    assert due((0, 10), every=10) == [20, 25]
    assert due((), every=0) == [25]
    assert due((), every=10, final_num_tasks=0) == [0, 10, 20]


def test_rows_behind_the_checkpoint_and_torn_ones_go_when_a_trainer_takes_over(tmp_path):
    (tmp_path / "evals.jsonl").write_text('{"version": 0}\n{"version": 10}\nnonsense\n{"version": 20}\n{"versi')

    held_out = HeldOut(Fake(tmp_path), EvalSection(every=10))

    assert held_out.take_over(15) == 1
    assert rows(tmp_path) == [{"version": 0}, {"version": 10}]


def test_an_evaluation_that_is_due_while_another_runs_waits_for_the_version_after_its_end(tmp_path):
    async def play():
        trainer = Fake(tmp_path, EvalResult(10, rewards(1), 0), EvalResult(21, rewards(1), 0))
        held_out = HeldOut(trainer, EvalSection(every=10))
        held_out.begin(10, 1, 1)
        held_out.begin(20, 1, 1)
        await held_out.settled()
        await asyncio.sleep(0.1)
        assert held_out.due(21, 100)
        held_out.begin(21, 1, 1)
        await asyncio.sleep(0.1)
        assert not held_out.due(22, 100)

    asyncio.run(play())
    assert [row["version"] for row in rows(tmp_path)] == [10, 21]


def test_an_engine_that_goes_away_or_a_trainer_that_leaves_keeps_no_version_from_being_published(tmp_path):
    async def play(end):
        trainer = Fake(tmp_path)
        held_out = HeldOut(trainer, EvalSection(every=10))

        async def silent(target, request):
            await asyncio.get_running_loop().create_future()

        trainer.ask = silent
        held_out.begin(10, 1, 1)
        waiting = trainer.spawn(held_out.settled(), "settled")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        end(held_out)
        await waiting
        await asyncio.sleep(0.01)
        return held_out

    assert asyncio.run(play(lambda held_out: held_out.left(("engine-2",)))).due(11, 100)
    asyncio.run(play(HeldOut.settle))


def test_several_samples_give_avg_and_pass_at_k():
    found = EvalResult(7, ((1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)), 0)

    row = figures(found, EvalSection(samples=4))

    assert row.items() >= {"version": 7, "reward": 5 / 12, "num": 12, "failed": 0}.items()
    assert row["avg@4"] == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert row["pass@1"] == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert row["pass@2"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert row["pass@4"] == pytest.approx(2 / 3)
    assert figures(found, EvalSection(samples=4, pass_reward=1.5))["pass@4"] == 0.0


def test_a_rollout_that_failed_solved_nothing_and_is_no_reward_of_0():
    found = EvalResult(7, ((1.0, 1.0), (), (1.0, 0.0, 1.0, 1.0)), 6)

    row = figures(found, EvalSection(samples=4))

    assert row["pass@1"] == pytest.approx((2 / 4 + 0 + 3 / 4) / 3)
    assert row["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert row["pass@4"] == pytest.approx(2 / 3)
    assert row["avg@4"] == pytest.approx((1.0 + 0.75) / 2)
    assert figures(EvalResult(7, ((), ()), 8), EvalSection(samples=4))["pass@4"] == 0.0


def test_a_row_says_how_its_prompts_were_sampled():
    found = EvalResult(7, ((1.0,),), 0)
    section = EvalSection(samples=2, temperature=0.6, top_p=0.95)

    several, greedy = figures(found, section), figures(found, EvalSection(temperature=0.6, top_p=0.95))

    assert several.items() >= {"samples": 2, "temperature": 0.6, "top_p": 0.95}.items()
    assert greedy.items() >= {"samples": 1, "temperature": 0.0, "top_p": 1.0}.items()


def test_a_row_has_what_the_rewards_consist_of_and_what_the_environment_told():
    found = EvalResult(7, ((1.0,),), 0, {"reward/exact": 0.5, "env/moves": 3.0})

    row = figures(found, EvalSection())

    told = {"version": 7, "reward": 1.0, "reward/exact": 0.5, "env/moves": 3.0, "num": 1, "failed": 0}
    assert row.items() >= told.items()


@pytest.mark.parametrize(("num", "passed", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (6, 4, 3), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_rollouts_with_one_that_passes(num, passed, k):
    rollouts = [True] * passed + [False] * (num - passed)
    chosen = [c for c in product(range(num), repeat=k) if len(set(c)) == k]

    assert pass_at(k, num, passed) == pytest.approx(sum(any(rollouts[i] for i in c) for c in chosen) / len(chosen))


def test_each_task_has_its_figures_in_an_evaluation():
    found = EvalResult(7, ((1.0, 0.5), (0.0,), (), ()), 5, tasks=("sums", "sums", "walk", "walk"))

    row = figures(found, EvalSection(samples=2))

    own = {name: value for name, value in row.items() if name.startswith("task/")}
    assert own == {
        "task/sums/reward": 0.5,
        "task/sums/avg@2": 0.375,
        "task/sums/pass@1": 0.25,
        "task/sums/pass@2": 0.5,
        "task/walk/pass@1": 0.0,
        "task/walk/pass@2": 0.0,
    }


def test_the_task_of_a_job_without_tasks_is_called_env_and_has_its_figures_where_it_is_greedy_too():
    row = figures(EvalResult(7, ((1.0,), (0.5,)), 0), EvalSection())

    own = {name: value for name, value in row.items() if name.startswith("task/")}
    assert own == {"task/env/reward": 0.75, "task/env/avg@1": 0.75, "task/env/pass@1": 0.5}
