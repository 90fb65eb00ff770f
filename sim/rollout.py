"""Plays one modelled trajectory: reset, then turn by turn generate and step, then the score, as actors/envs/rollout.py does."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from actors.envs.section import EnvSection
from planning.snapshot import RequestView
from planning.staleness import is_stale
from sim.timeline import Timeline
from sim.workload import Episode

Scores = Callable[[str, Episode], Awaitable[None]]
"""Takes its time to score a trajectory."""


def drawn_scores(timeline: Timeline) -> Scores:
    """A reward that takes what the episode says: `reward_s` of its task."""

    async def score(session: str, episode: Episode) -> None:
        await timeline.sleep(episode.reward_s)

    return score


class Generates(Protocol):
    """What a rollout asks for tokens: see ModelledProxy."""

    async def generate(
        self, request: RequestView, context: int, new_tokens: int, allowed: Collection[str] = ()
    ) -> int: ...
    def forget(self, session: str) -> None: ...


class SimGaveUp(Exception):
    """The rollout came to nothing: `reason` as the live manager names it, and whether the buffer may issue it again."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.reason, self.retry = reason, retry


@dataclass(frozen=True, slots=True)
class SimRolloutContext:
    """What all rollouts share. `version` tells where training stands; `allowed` the engines of a task, none meaning all."""

    timeline: Timeline
    proxy: Generates
    score: Scores
    version: Callable[[], int]
    allowed: Callable[[str], Collection[str]]
    alpha: int = -1
    reset_tries: int = field(default_factory=lambda: EnvSection().reset_tries)


@dataclass(slots=True)
class Played:
    """Where a trajectory's time went, in seconds, and the version of its first token."""

    version_first: int = -1
    reset_s: float = 0.0
    generate_s: float = 0.0
    step_s: float = 0.0
    score_s: float = 0.0


async def play(stage: SimRolloutContext, session: str, episode: Episode, min_version: int = 0) -> Played:
    """Raises GaveUp where resets or the reward fail, and at the turn at which no update can use it any more."""
    played, timeline, context = Played(), stage.timeline, 0
    try:
        for reset_s in episode.resets_s[: stage.reset_tries]:
            await timeline.sleep(reset_s)
            played.reset_s += reset_s
        if len(episode.resets_s) > stage.reset_tries:
            raise SimGaveUp("env_reset_failed", retry=False)
        for turn in episode.turns:
            _check_age(stage, played)
            context += turn.shown
            began = timeline.now
            request = RequestView(session, max(min_version, played.version_first))
            version = await stage.proxy.generate(request, context, turn.sampled, stage.allowed(episode.task))
            if played.version_first < 0:
                played.version_first = version
            context += turn.sampled
            played.generate_s += timeline.now - began
            await timeline.sleep(turn.step_s)
            played.step_s += turn.step_s
    finally:
        stage.proxy.forget(session)
    began = timeline.now
    await stage.score(session, episode)
    if not episode.scored:
        raise SimGaveUp("reward_failed", retry=False)
    played.score_s = timeline.now - began
    return played


def _check_age(stage: SimRolloutContext, played: Played) -> None:
    if played.version_first >= 0 and is_stale(played.version_first, stage.version(), stage.alpha):
        raise SimGaveUp("stale", retry=True)
