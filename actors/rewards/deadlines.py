"""Reward deadlines, `reward.deadline_factor`: how long a call of a reward function may take, from how long correct responses to the same task
took (RollPacker, section 4.3).

Kept in memory alone: after a restart calls have all of `reward.timeout_s` again, until something correct was seen.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score
from rubato.actors.rewards.backend import CallLimit


class DeadlineRule(NamedTuple):
    """Defaults: RollPacker, section 4.3."""

    factor: float = 1.5
    least_s: float = 2.0
    most_s: float = 30.0

    def checked(self) -> "DeadlineRule":
        """Itself. Raises ValueError for a factor below 1, or bounds that cross."""
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor is {self.factor:g}; below 1 it would fail rewards as slow as correct ones were")
        if not 0 < self.least_s <= self.most_s < math.inf:
            raise ValueError(f"least_s is {self.least_s:g} and most_s {self.most_s:g}; 0 < least_s <= most_s must hold")
        return self


def deadline_s(rule: DeadlineRule, anchor_s: float | None) -> float:
    """Seconds: min(max(T_min, lambda * T_anchor), T_max) (RollPacker, section 4.3); T_max while nothing correct was seen."""
    if anchor_s is None:
        return rule.most_s
    return min(max(rule.least_s, rule.factor * anchor_s), rule.most_s)


def anchored(anchors: Mapping[str, float], task: str, took_s: float, *, correct: bool) -> dict[str, float]:
    """The anchors after a reward of `task` took `took_s`: the longest time, seconds, of a correct response by task (or test case)."""
    if not correct:
        return dict(anchors)
    return {**anchors, task: max(took_s, anchors.get(task, 0.0))}


class AnchoredLimit(CallLimit):
    """At most `reward.timeout_s`; calls are of single trajectories."""

    per_task = True

    def __init__(self, section: RewardSection) -> None:
        super().__init__(section)
        factor = section.deadline_factor or 1.0
        self._rule = DeadlineRule(factor, min(section.deadline_least_s, self.most_s), self.most_s).checked()
        self._anchors: dict[str, float] = {}

    def of(self, function: str, requests: Sequence[Score]) -> float:
        """As `CallLimit`."""
        return deadline_s(self._rule, self._anchors.get(_key(function, requests[0]))) if requests else self.most_s

    def took(self, function: str, requests: Sequence[Score], scores: Sequence[float | NotScored], seconds: float) -> None:
        """As `CallLimit`. A score above 0 is a correct response's."""
        for request, score in zip(requests, scores, strict=True):
            correct = not isinstance(score, NotScored) and score > 0
            self._anchors = anchored(self._anchors, _key(function, request), seconds, correct=correct)


def _key(function: str, request: Score) -> str:
    return f"{request.task} {function}"
