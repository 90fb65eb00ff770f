"""Dynamic sampling (DAPO), `train.dynamic_sampling`: groups without reward spread end as `filtered`, and others take their place."""

from typing import Any

import msgspec

from rubato.actors.messages.samples import has_spread
from rubato.actors.samples.group import Group
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.policy import BatchPolicy, Ending, PolicyPlugin

NO_SPREAD = "had no reward spread: every rollout of a task earns the same. Try other tasks or rewards, or train.dynamic_sampling=false."


class Filtered(msgspec.Struct, array_like=True):
    """What was left out: samples and the sum of their rewards since the newest step was bound, and those of bound steps."""

    num: int = 0
    reward: float = 0.0
    bound: dict[int, tuple[int, float]] = {}
    """Step → samples and reward: its batch says so whenever it is claimed."""


class DynamicSampling(PolicyPlugin):
    """Refuses groups whose members all earned the same."""

    key = "dynamic_sampling"

    def __init__(self, below: BatchPolicy, groups: Groups) -> None:
        super().__init__(below, groups)
        self._left_out = Filtered()

    def complete(self, group: Group) -> Ending | None:
        """As `BatchPolicy`."""
        rewards = group.rewards()
        if (ending := super().complete(group)) is not None or has_spread(rewards):
            return ending
        self._left_out.num += len(rewards)
        self._left_out.reward += sum(rewards)
        self.groups.changes.training = True
        return Ending("filtered", NO_SPREAD)

    def bound(self, step: int) -> None:
        """`step` gets its groups, maybe others than before."""
        left_out = self._left_out
        num, reward = left_out.bound.get(step, (0, 0.0))
        left_out.bound[step] = (num + left_out.num, reward + left_out.reward)
        left_out.num, left_out.reward = 0, 0.0

    def figures(self, step: int) -> dict[str, float]:
        """`reward/mean` knows only groups with spread; `reward/unconditioned` is that of all that finished for the step."""
        num, total = self._left_out.bound.get(step, (0, 0.0))
        rewards = [reward for group in self.groups.steps.get(step, ()) for reward in group.rewards()]
        count = max(1, num + len(rewards))
        return {"reward/unconditioned": (total + sum(rewards)) / count, "reward/filtered_frac": num / count}

    def committed(self, step: int) -> None:
        """Forget what was left out of steps up to `step`."""
        for each in [each for each in self._left_out.bound if each <= step]:
            del self._left_out.bound[each]

    def state(self) -> Any:
        """As `PolicyPlugin`."""
        return self._left_out

    def restored(self, state: msgspec.Raw | None) -> None:
        """As `PolicyPlugin`."""
        self._left_out = msgspec.msgpack.decode(state, type=Filtered) if state else Filtered()
