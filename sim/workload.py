"""What the rollouts of a job do: turns, tokens, latencies and failures of each task's environments, drawn by name.

A trajectory's draws depend on the seed and on its name alone, never on when it runs or in what company: two policies that are
compared meet the same trajectories.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from pydantic import Field

from rubato.runtime.config import Section
from rubato.sim.distribution import Constant, Distribution

RESETS_DRAWN = 16
"""More than any policy tries: where every reset hangs, the draw ends."""


class ResetFailure(Section):
    """A reset that hangs: it is known to have failed after `hang_s`, and is tried again on another instance."""

    probability: float = Field(ge=0, le=1)
    hang_s: float = Field(ge=0)


class TaskSpec(Section):
    """One domain of tasks. Tokens are per turn; a trajectory ends where `max_context` would be passed."""

    name: str
    turns: Distribution
    prompt_tokens: Distribution
    """Of the first prompt."""
    observation_tokens: Distribution
    """Of each later one, behind what is there already."""
    action_tokens: Distribution
    """Sampled per turn."""
    max_action_tokens: int = Field(default=1 << 20, ge=1)
    max_context: int = Field(default=32768, ge=1)
    reset_s: Distribution = Constant(value=0.0)
    step_s: Distribution = Constant(value=0.0)
    reset_failure: ResetFailure = ResetFailure(probability=0.0, hang_s=0.0)
    reward_s: Distribution = Constant(value=0.0)
    reward_failure: float = Field(default=0.0, ge=0, le=1)
    """Share of trajectories that the reward service can't score."""
    share: float = Field(default=1.0, gt=0)
    """Of the job's groups, relative to the other tasks'."""


class Turn(NamedTuple):
    """`shown` tokens come in, `sampled` come out, then the environment takes `step_s`."""

    shown: int
    sampled: int
    step_s: float


class Episode(NamedTuple):
    """All that chance decides of one attempt at a trajectory."""

    task: str
    resets_s: tuple[float, ...]
    """Each try of the reset; all but the last failed."""
    turns: tuple[Turn, ...]
    reward_s: float = 0.0
    scored: bool = True

    @property
    def tokens(self) -> int:
        """What the trainer sees of it."""
        return sum(turn.shown + turn.sampled for turn in self.turns)

    @property
    def sampled(self) -> int:
        return sum(turn.sampled for turn in self.turns)


def chance_of(seed: int, name: str) -> Random:
    """The chance of one named thing."""
    return Random(f"{seed}/{name}")


def task_of(tasks: Sequence[TaskSpec], seed: int, group: str) -> TaskSpec:
    """The task of a group: all its members share it."""
    return chance_of(seed, f"{group}/task").choices(tasks, [task.share for task in tasks])[0]


def episode(task: TaskSpec, seed: int, trajectory: str, attempt: int = 1) -> Episode:
    """What happens in one attempt at `trajectory`."""
    chance = chance_of(seed, f"{trajectory}/{attempt}")
    resets = []
    while len(resets) < RESETS_DRAWN and chance.random() < task.reset_failure.probability:
        resets.append(task.reset_failure.hang_s)
    resets.append(task.reset_s.draw(chance))
    turns: list[Turn] = []
    context = 0
    for number in range(max(1, round(task.turns.draw(chance)))):
        tokens = task.observation_tokens if number else task.prompt_tokens
        shown = min(max(1, round(tokens.draw(chance))), task.max_context // 2)
        sampled = min(max(1, round(task.action_tokens.draw(chance))), task.max_action_tokens)
        step_s = task.step_s.draw(chance)
        if turns and context + shown + sampled > task.max_context:
            break
        sampled = min(sampled, task.max_context - shown)
        turns.append(Turn(shown, sampled, step_s))
        context += shown + sampled
    scored = chance.random() >= task.reward_failure
    return Episode(task.name, tuple(resets), tuple(turns), task.reward_s.draw(chance), scored)
