"""What an orchestrator knows of a manager's rollouts: how far each is, its environment included, and those that ended."""

import asyncio
from collections.abc import Callable, Iterable

from rubato.actors.envs.recorder import Recorder
from rubato.actors.envs.rollout import Rollout, RolloutHook
from rubato.actors.messages.orchestration import OutOfDate, RequestEnded, Survey, Surveyed, TrajectorySeen
from rubato.actors.survey.ended import EndedLog
from rubato.runtime.actor import Actor, handler


class RolloutOutlook(RolloutHook):
    """Of one manager, from the first survey on. Held-out rollouts are left out, as they are of no step."""

    def __init__(self, manager: Actor, playing: Callable[[], Iterable[Rollout]]) -> None:
        super().__init__(manager, playing)
        self._ended = EndedLog()

    def ended(self, rollout: Rollout, *, whole: bool) -> None:
        """It plays no more."""
        recorder, ticket = rollout.recorder, rollout.recorder.ticket
        if ticket.purpose == "eval":
            return
        env_s, generate_s = recorder.env_s(_now()), recorder.generate_s
        self._ended.add(RequestEnded(ticket.task, ticket.row, recorder.sampled, ticket.version, env_s, generate_s, whole))

    @handler
    async def survey(self, request: Survey) -> Surveyed | OutOfDate:
        """Everything as it is now."""
        now = _now()
        ended = self._ended.since(request.after)
        playing = [each.recorder for each in self.playing() if each.recorder.ticket.purpose != "eval"]
        return Surveyed((), (), ended, self._ended.num, tuple(_seen(each, now) for each in playing))


def _seen(recorder: Recorder, now: float) -> TrajectorySeen:
    ticket = recorder.ticket
    return TrajectorySeen(
        ticket.trajectory_id, ticket.task, ticket.row, recorder.sampled, recorder.env_s(now), recorder.most, ticket.version,
        recorder.away,
    )  # fmt: skip


def _now() -> float:
    return asyncio.get_running_loop().time()
