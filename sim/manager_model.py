"""An environment manager in virtual time: reset, then turn by turn generate and step, then the score, as actors/envs/rollout.py does."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rubato.actors.envs.section import EnvSection
from rubato.sim.timeline import Timeline
from rubato.sim.workload import Episode

Scores = Callable[[str, Episode], Awaitable[None]]
"""Takes its time to score a trajectory."""


def drawn_scores(timeline: Timeline) -> Scores:
    """A reward that takes what the episode says: `reward_s` of its task."""

    async def score(session: str, episode: Episode) -> None:
        await timeline.sleep(episode.reward_s)

    return score


class TurnRequest(NamedTuple):
    """A turn that asks for tokens, sampled under `min_version` or newer weights."""

    session: str
    min_version: int = 0


class GeneratesTokens(Protocol):
    """What a rollout asks for tokens: see ModelledProxy."""

    async def generate(self, request: TurnRequest, context: int, new_tokens: int, task: str = "") -> int: ...
    def forget(self, session: str) -> None: ...


class RolloutFailed(Exception):
    """The rollout came to nothing: `reason` as the live manager names it, and whether the buffer may issue it again."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.reason, self.retry = reason, retry


@dataclass(slots=True)
class Played:
    """Where a trajectory's time went, in seconds, and the version of its first token."""

    version_first: int = -1
    reset_s: float = 0.0
    generate_s: float = 0.0
    step_s: float = 0.0
    score_s: float = 0.0

    @property
    def env_s(self) -> float:
        """In its environment."""
        return self.reset_s + self.step_s

    @property
    def wall_s(self) -> float:
        return self.env_s + self.generate_s + self.score_s


async def always() -> None:
    """Of a manager that is never away."""


@dataclass(frozen=True, slots=True)
class ModelledManager:
    """Plays rollouts, any number at once."""

    timeline: Timeline
    proxy: GeneratesTokens
    score: Scores
    reset_tries: int = field(default_factory=lambda: EnvSection().reset_tries)
    awaits_version: bool = True
    """A rollout begins under weights no older than its ticket; else under those that engines have."""
    up: Callable[[], Awaitable[None]] = always
    """Returns once it may ask for tickets."""

    async def play(
        self, session: str, episode: Episode, min_version: int = 0, still_useful: Callable[[int], bool] = lambda _: True
    ) -> Played:
        """Raises RolloutFailed where resets or the reward fail, and at the turn at which no update can use it any more.

        `still_useful` is asked at every turn with the version of the first token.
        """
        played, timeline, context = Played(), self.timeline, 0
        oldest = min_version if self.awaits_version else 0
        try:
            await self._reset(episode, played)
            for turn in episode.turns:
                if played.version_first >= 0 and not still_useful(played.version_first):
                    raise RolloutFailed("stale", retry=True)
                context += turn.shown
                began = timeline.now
                request = TurnRequest(session, max(oldest, played.version_first))
                version = await self.proxy.generate(request, context, turn.sampled, episode.task)
                if played.version_first < 0:
                    played.version_first = version
                context += turn.sampled
                played.generate_s += timeline.now - began
                await timeline.sleep(turn.step_s)
                played.step_s += turn.step_s
        finally:
            self.proxy.forget(session)
        began = timeline.now
        await self.score(session, episode)
        if not episode.scored:
            raise RolloutFailed("reward_failed", retry=False)
        played.score_s = timeline.now - began
        return played

    async def _reset(self, episode: Episode, played: Played) -> None:
        for reset_s in episode.resets_s[: self.reset_tries]:
            await self.timeline.sleep(reset_s)
            played.reset_s += reset_s
        if len(episode.resets_s) > self.reset_tries:
            raise RolloutFailed("env_reset_failed", retry=False)
