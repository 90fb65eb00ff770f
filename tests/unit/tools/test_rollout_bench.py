"""The benchmark of batch-level stepping gives both arms the same latencies, times what lies in the middle, and knows the ideal."""

import asyncio
import random
import statistics
from itertools import count

import pytest
import yaml

from rubato.actors.envs.section import EnvSection
from rubato.runtime.config.compose import load
from tools.bench import rollout
from tools.bench.peers import lock_step
from tools.bench.peers.lock_step import ENVIRONMENTS, TURNS, LockStepEnv, LockStepHost, PacedSteps, latency

COUNTING = "tests/unit/tools/test_rollout_bench.py:Counting"


class Counting:
    """An environment that steps at once."""

    async def reset(self, *, seed):
        return "go", {}

    async def step(self, action):
        return "go", 0.0, False, False, {}

    def close(self):
        pass


def rows_of(seconds, *, failed=0.0):
    """A row every `seconds`, and a core used by two actors of a host that uses more."""
    return [
        {"time/unix_s": at * seconds, "rollout/error_frac": failed, "cpu/engine-1": at * seconds / 4}
        | {"cpu/trainer-1": at * seconds / 4, "cpu/host": at * 1000.0, "cpu/cores": 2.0}
        for at in range(8)
    ]


@pytest.mark.parametrize("sigma", [0.1, 1.0])
def test_latencies_are_normal_and_cut_at_0(sigma):
    chance = random.Random(1)

    drawn = [latency(sigma, chance) for _ in range(50_000)]

    assert statistics.median(drawn) == pytest.approx(1.0, abs=0.02)
    assert statistics.quantiles(drawn, n=100)[83] == pytest.approx(1 + sigma, abs=0.03)
    assert min(drawn) == (0.0 if sigma == 1.0 else pytest.approx(1 - 4 * sigma, abs=0.1))


def test_the_tail_has_the_same_mean_and_an_end():
    chance = random.Random(1)

    drawn = [latency(None, chance) for _ in range(50_000)]

    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.03)
    assert max(drawn) == lock_step.PARETO_MOST


async def played(env, *, seed, row, trajectory, monkeypatch):
    """What each step of a trajectory waited."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(lock_step.asyncio, "sleep", sleep)
    await env.reset(seed=seed, row=row, trajectory=trajectory)
    while not (await env.step("any"))[2]:
        pass
    return slept


async def test_a_trajectory_takes_the_same_steps_in_either_arm_and_no_two_are_alike(monkeypatch):
    arms = [PacedSteps(mu_s=2.0, sigma_over_mu=1.0, spread=spread) for spread in (False, True)]
    mates = ["g00000040.0", "g00000040.1"]

    found = [[await played(env, seed=7, row=40, trajectory=t, monkeypatch=monkeypatch) for t in mates] for env in arms]

    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert [len(steps) for steps in found[0]] == [TURNS, TURNS]


async def test_the_first_trajectories_of_ours_are_of_every_length_so_that_the_others_begin_one_by_one(monkeypatch):
    env = PacedSteps(mu_s=1.0, sigma_over_mu=0.1, spread=True)

    lengths = [len(await played(env, seed=1, row=row, trajectory="t", monkeypatch=monkeypatch)) for row in range(34)]

    assert set(lengths[:32]) == set(range(1, TURNS + 1))
    assert lengths[32:] == [TURNS, TURNS]


async def test_in_lock_step_a_step_ends_when_those_of_all_environments_do():
    ended = count()
    host = LockStepHost(EnvSection(**{"class": COUNTING, "isolation": "inline"}), turn=asyncio.Barrier(3))
    await host.start()
    environments = [await host.borrow("train") for _ in range(3)]

    async def step(env):
        await env.step("any")
        return next(ended)

    async with asyncio.TaskGroup() as tasks:
        first = [tasks.create_task(step(env)) for env in environments[:2]]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in first)
        tasks.create_task(step(environments[2]))
    assert next(ended) == 3


async def test_an_environment_that_comes_back_waits_once_in_its_next_trajectory():
    host = LockStepHost(EnvSection(**{"class": COUNTING, "isolation": "inline"}), turn=asyncio.Barrier(1))
    await host.start()
    env = await host.borrow("train")
    host.give_back(env, "train")

    assert await host.borrow("train") is env
    assert not isinstance(env._env, LockStepEnv)


@pytest.mark.parametrize("arm", rollout.MANAGERS)
def test_both_arms_are_jobs_of_one_config_but_for_the_manager(arm, tmp_path):
    settings = rollout.config(arm, 0.3, mu_s=0.4, batches=2, model=tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))

    job = load(tmp_path / "job.yaml")

    assert job.section("engine").scripted.token_s == 0.2
    assert job.section("engine").num_slots == job.section("env").concurrency == ENVIRONMENTS
    train = job.section("train")
    assert train.batch_groups * train.group_size == ENVIRONMENTS
    assert job.run.steps == {"batch": 3, "trajectory": 5}[arm]


def test_seconds_count_from_the_first_row_and_cores_are_those_of_the_jobs_own_processes():
    assert rollout.seconds_of(rows_of(5.0), 4) == (5.0, 0.5)


def test_figures_of_rollouts_that_failed_are_refused():
    with pytest.raises(RuntimeError, match=r"25\.0% of the rollouts failed"):
        rollout.seconds_of(rows_of(5.0, failed=0.25), 4)


@pytest.mark.parametrize(("sigma", "speedup"), [(0.0, 1.0), (0.1, 1.156), (1.0, 2.43)])
def test_the_ideal_is_the_longest_of_64_against_the_mean(sigma, speedup, monkeypatch):
    monkeypatch.setattr(rollout, "DRAWN", 2000)

    found = rollout.ideal(sigma, 0.4)

    assert found["ideal_speedup"] == pytest.approx(speedup, rel=0.01)
    if not sigma:
        assert found["ideal_batch_s"] == pytest.approx(15 * 1.5 * 0.4)


def test_the_plot_has_a_point_per_spread(tmp_path):
    rollout.plot([{"sigma_over_mu": at, "speedup": at, "ideal_speedup": at} for at in (0.1, 1.0)], 0.4, tmp_path / "p")

    assert (tmp_path / "p").read_bytes().startswith(b"\x89PNG")


MISTAKES = [
    pytest.param(["--batches", "0"], "--batches must be at least 1", id="no batches"),
    pytest.param(["--mu", "nan"], "--mu must be a finite number of seconds above 0", id="mu nan"),
    pytest.param(["--mu", "0"], "--mu must be a finite number of seconds above 0", id="no time"),
    pytest.param(["--sigma", "0.5", "-1"], "--sigma must be finite numbers of at least 0", id="negative sigma"),
    pytest.param(["--json", "/nonexistent/x"], "No such file or directory: '/nonexistent/x'", id="json nowhere"),
    pytest.param(["--plot", "/tmp"], "Is a directory: '/tmp'", id="plot a folder"),
]


@pytest.mark.parametrize(("given", "sentence"), MISTAKES)
def test_a_mistake_is_told_before_anything_runs(given, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        rollout.main(given)

    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
