"""How long each call of a reward function may take, from how long correct responses to the same task took (`planning.reward_deadline`).

Kept in memory alone: after a restart calls have all of `reward.timeout_s` again, until something correct was seen.
"""

from collections.abc import Sequence

from actors.config import RewardSection
from actors.messages.samples import NotScored, Score
from planning.reward_deadline import DeadlineRule, anchored, deadline_s


class Deadlines:
    """`reward.timeout_s` for every call, or less where `reward.deadline_factor` is set: calls are of single trajectories then."""

    def __init__(self, section: RewardSection) -> None:
        self._most_s = section.timeout_s
        factor, least_s = section.deadline_factor, min(section.deadline_least_s, section.timeout_s)
        self._rule = None if factor is None else DeadlineRule(factor, least_s, section.timeout_s).checked()
        self._anchors: dict[str, float] = {}

    @property
    def are_anchored(self) -> bool:
        """Whether they depend on what was seen before."""
        return self._rule is not None

    def of(self, function: str, requests: Sequence[Score]) -> float:
        """Seconds for a call of `function` over `requests`."""
        if self._rule is None or not requests:
            return self._most_s
        return deadline_s(self._rule, self._anchors.get(_key(function, requests[0])))

    def took(
        self, function: str, requests: Sequence[Score], scores: Sequence[float | NotScored], seconds: float
    ) -> None:
        """A call ended in time. A score above 0 is a correct response's."""
        for request, score in zip(requests, scores, strict=True) if self._rule is not None else ():
            correct = not isinstance(score, NotScored) and score > 0
            self._anchors = anchored(self._anchors, _key(function, request), seconds, correct=correct)


def _key(function: str, request: Score) -> str:
    return f"{request.task} {function}"
