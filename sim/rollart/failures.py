"""RollArt, section 2: a step on SWE-bench while environments are healthy, and while one reset in the batch hangs.

The hang is fitted to the share of rollout time that resets take, which the paper gives too; the steps' lengths are outcomes.
"""

from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from rubato.actors.envs.section import EnvSection
from rubato.planning.tail import TailRound
from rubato.sim.cluster import PoolSpec
from rubato.sim.distribution import Constant, Quantiles
from rubato.sim.outcome import Cell, RunProgress, RunResult, Table
from rubato.sim.rollart.batch import BatchDone, BatchRun
from rubato.sim.rollpacker.rollout import LengthModel, RoundCount
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.training_model import TrainerSpec
from rubato.sim.workload import Episode, TaskSpec, Turn, episode

LONG_S = 1e4
"""A hang that outlasts every other trajectory: what is left of the batch then runs alone."""


class Failures(Scenario):
    """Synchronous steps: a batch is rolled out, then trained."""

    pools: tuple[PoolSpec, ...] = Field(min_length=1)
    task: TaskSpec
    """Its environments take no time to step, and its scores none, here: `rest_s` holds that."""
    redundancy_task: TaskSpec
    """The task on which redundancy is held against the paper."""
    trainer: TrainerSpec
    trajectories: int = Field(ge=2)
    batches: int = Field(ge=1)
    """Averaged over."""
    rest_s: float = Field(ge=0)
    """Of a step, beside resets, generation and training."""
    reset_share: float = Field(gt=0, lt=1)
    """Of rollout time while a reset hangs: the hang is fitted to it."""
    redundancy: float = Field(ge=1)
    """Environments launched per trajectory that is wanted."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories of a prompt; a batch is of whole groups."""
    redundancy_batches: int = Field(ge=1)
    """Averaged over, of that task: chance is larger there."""
    correlation: float = Field(ge=0, lt=1)
    """Of the lengths within a prompt, on the task of redundancy, as `LengthModel` has it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.redundancy_task.action_tokens, Quantiles) or self.redundancy_task.turns != Constant(value=1):
            raise ValueError("redundancy_task must have one turn, and action_tokens of the law quantiles")
        if self.trajectories % self.group_size:
            raise ValueError(f"trajectories={self.trajectories} are no whole groups of group_size={self.group_size}")
        return self

    @property
    def lengths(self) -> LengthModel:
        """Of the task of redundancy."""
        task = self.redundancy_task
        assert isinstance(task.action_tokens, Quantiles)
        return LengthModel(tasks=(task.action_tokens,), most=task.max_action_tokens, correlation=self.correlation)


@dataclass(frozen=True, slots=True)
class FailureArm:
    """One way to run the same batches."""

    scenario: Failures
    task: TaskSpec
    hang_s: float = 0.0
    launched: float = 1.0

    def rollouts(self) -> list[BatchDone]:
        return [self._rollout(number) for number in range(self.scenario.batches)]

    def _rollout(self, number: int) -> BatchDone:
        wanted = self.scenario.trajectories
        episodes = drawn(self.scenario, self.task, number, round(wanted * self.launched))
        if self.hang_s:
            hangs = Random(f"{self.scenario.seed}/{number}/hangs").randrange(wanted)
            episodes[hangs] = episodes[hangs]._replace(resets_s=(self.hang_s, *episodes[hangs].resets_s))
        return BatchRun(self.scenario.pools).trajectories(episodes, enough=wanted)


@dataclass(frozen=True, slots=True)
class RedundancyArm:
    """The same batch from more than it needs: the first whole groups of more prompts, or the first members of larger groups, are kept."""

    scenario: Failures
    prompts: int
    members: int
    whole: bool = True
    """False: the first trajectories are kept, whatever groups they are of."""

    def rollout_s(self) -> float:
        return fmean(self._rollout(batch).seconds for batch in range(self.scenario.redundancy_batches))

    def _rollout(self, batch: int) -> BatchDone:
        scenario = self.scenario
        names = [(prompt, member) for prompt in range(self.prompts) for member in range(self.members)]
        episodes = [self._episode(batch, *name) for name in names]
        groups, size = scenario.trajectories // scenario.group_size, scenario.group_size
        if not self.whole:
            return BatchRun(scenario.pools).trajectories(episodes, enough=scenario.trajectories)
        count = RoundCount(TailRound(0, "short", tuple(range(self.prompts)), self.members, groups, size, 0, ""))

        def over(number: int) -> bool:
            prompt, member = names[number]
            count.finished(prompt, str(member))
            return count.over

        return BatchRun(scenario.pools).trajectories(episodes, over=over)

    def _episode(self, batch: int, prompt: int, member: int) -> Episode:
        """That of `drawn`, but for its length."""
        scenario, task = self.scenario, self.scenario.redundancy_task
        plain = episode(task, scenario.seed, f"{batch}/p{prompt}.{member}")
        tokens = scenario.lengths.tokens(scenario.seed, 1000 * batch + prompt, member)
        return plain._replace(turns=(Turn(plain.turns[0].shown, tokens, plain.turns[0].step_s),))


def _redundancy(scenario: Failures) -> dict[str, RedundancyArm]:
    prompts, size = scenario.trajectories // scenario.group_size, scenario.group_size
    more = round(scenario.redundancy * prompts)
    return {
        "gem_math": RedundancyArm(scenario, prompts, size),
        "gem_math_redundant": RedundancyArm(scenario, more, size),
        "gem_math_members": RedundancyArm(scenario, prompts, round(scenario.redundancy * size)),
        "gem_math_trajectories": RedundancyArm(scenario, more, size, whole=False),
    }


def run(scenario: Failures, progress: RunProgress) -> RunResult:
    still = Constant(value=0.0)
    task = scenario.task.model_copy(update={"step_s": still, "reward_s": still})
    alone = fmean(done.seconds - LONG_S for done in FailureArm(scenario, task, LONG_S).rollouts())
    reset_s = fmean(drawn(scenario, task, number, 1)[0].resets_s[-1] for number in range(scenario.batches))
    # The hanging trajectory alone decides: its resets are the share, the rest of it runs by itself.
    hang_s = max(0.0, (alone - reset_s) * scenario.reset_share / (1 - scenario.reset_share) - reset_s)
    deadline_s = EnvSection().reset_timeout_s
    arms = {
        "healthy": FailureArm(scenario, task),
        "failing": FailureArm(scenario, task, hang_s),
        "redundant": FailureArm(scenario, task, hang_s, scenario.redundancy),
        "deadline": FailureArm(scenario, task, min(hang_s, deadline_s)),
    }
    redundancy = _redundancy(scenario)
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {"hang": hang_s}
    for name, arm in arms.items():
        rollout_s, train_s = fmean(done.seconds for done in arm.rollouts()), _train_s(arm)
        figures[f"{name}_training"], figures[f"{name}_step"] = train_s, rollout_s + train_s + scenario.rest_s
        rows.append((name, rollout_s, train_s, scenario.rest_s, figures[f"{name}_step"]))
        progress(len(rows), len(arms) + len(redundancy), name)
    math_train_s = _train_s(FailureArm(scenario, scenario.redundancy_task))
    for name, kept in redundancy.items():
        rollout_s = kept.rollout_s()
        figures[f"{name}_step"] = rollout_s + math_train_s + scenario.rest_s
        rows.append((name, rollout_s, math_train_s, scenario.rest_s, figures[f"{name}_step"]))
        progress(len(rows), len(arms) + len(redundancy), name)
    figures["healthy_generation"] = float(rows[0][1]) - reset_s
    figures["failing_over_healthy"] = figures["failing_step"] / figures["healthy_step"]
    figures["gem_math_redundancy_gain"] = figures["gem_math_step"] / figures["gem_math_redundant_step"]
    figures |= {
        f"gem_math_{what}_gain": figures["gem_math_step"] / figures[f"gem_math_{what}_step"] for what in ("members", "trajectories")
    }
    return RunResult(
        figures=figures,
        tables={"phases": Table(("arm", "rollout_s", "train_s", "rest_s", "step_s"), rows)},
        notes=(
            f"A reset that hangs for {hang_s:.0f} s makes resets {scenario.reset_share:.0%} of its rollout; one hangs in every batch.",
            f"deadline: a reset is given up after {deadline_s:g} s and tried again, the default of env.reset_timeout_s.",
        ),
    )


def drawn(scenario: Failures, task: TaskSpec, batch: int, num: int) -> list[Episode]:
    """The episodes of one batch; every arm meets the same."""
    return [episode(task, scenario.seed, f"{batch}/t{number}") for number in range(num)]


def _train_s(arm: FailureArm) -> float:
    scenario = arm.scenario
    batches = [drawn(scenario, arm.task, n, scenario.trajectories) for n in range(scenario.batches)]
    return fmean(scenario.trainer.step_s(sum(e.tokens for e in batch), len(batch)) for batch in batches)


KIND = ScenarioKind(Failures, run)
