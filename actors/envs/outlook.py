"""What a manager tells an orchestrator of its rollouts: how far each is, its environment included, and those that ended."""

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice

from actors.envs.rollout import Rollout
from actors.messages.orchestration import RequestEnded, Survey, Surveyed, TrajectorySeen

ENDED_KEPT = 8192
"""Rollouts that wait for the next survey; the oldest is forgotten first."""


class RolloutOutlook:
    """Of one manager, from the first survey on. Held-out rollouts are left out, as they are of no step."""

    def __init__(self) -> None:
        self._ended: deque[RequestEnded] = deque(maxlen=ENDED_KEPT)
        self._num_ended = 0

    def ended(self, rollout: Rollout, *, whole: bool) -> None:
        """It plays no more."""
        if rollout.ticket.purpose == "eval":
            return
        ticket, generate_s, env_s = rollout.ticket, rollout.generate_s, rollout.env_s(_now())
        ended = RequestEnded(ticket.task, ticket.row, rollout.sampled, ticket.version, env_s, generate_s, whole)
        self._ended.append(ended)
        self._num_ended += 1

    def look(self, survey: Survey, playing: Iterable[Rollout]) -> Surveyed:
        """Everything as it is now."""
        now = _now()
        known = survey.after if survey.after <= self._num_ended else 0  # a manager that was restarted counts anew
        new = min(self._num_ended - known, len(self._ended))
        ended = tuple(islice(self._ended, len(self._ended) - new, None))
        seen = tuple(_seen(each, now) for each in playing if each.ticket.purpose != "eval")
        return Surveyed((), (), ended, self._num_ended, seen)


def _seen(rollout: Rollout, now: float) -> TrajectorySeen:
    ticket = rollout.ticket
    return TrajectorySeen(
        ticket.trajectory_id, ticket.task, ticket.row, rollout.sampled, rollout.env_s(now), rollout.most, ticket.version,
        rollout.away,
    )  # fmt: skip


def _now() -> float:
    return asyncio.get_running_loop().time()
