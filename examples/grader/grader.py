"""An actor of one's own: it grades answers, so that a model or a service behind it is loaded once and not in every environment."""

import difflib
from typing import ClassVar

from messages import Grade, Graded
from pydantic import Field

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig, Section


class GraderSection(Section):
    """The section `grader` of the config."""

    strictness: float = Field(default=1.0, gt=0)
    """Above 1, half right is worth less than half."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest a caller waits for one grade."""


class GraderConfig(ActorConfig):
    """The sections that the grader reads: a field is called as its section is."""

    grader: GraderSection = GraderSection()


class Grader(Actor):
    """Grades up to 16 answers at once."""

    role: ClassVar[str] = "grader"
    Config: ClassVar[type[ActorConfig] | None] = GraderConfig

    async def on_start(self) -> None:
        """Load what is needed. No text comes before this returns."""
        self._matcher = difflib.SequenceMatcher

    @handler(concurrency=16)
    async def grade(self, request: Grade) -> Graded:
        """The similarity of the answer to what was wanted."""
        with self.waits.on(request.wanted, stage="grade"), self.metrics.busy():
            likeness = await self.offload(self._likeness, request.answer, request.wanted)
        self.metrics.count("grader/graded")
        self.metrics.observe("grader/score", likeness)
        return Graded(likeness**self.config.grader.strictness)

    def _likeness(self, answer: str, wanted: str) -> float:
        """Slow work runs in a thread: the actor goes on taking messages meanwhile."""
        return self._matcher(None, answer.strip().lower(), wanted).ratio()


class GradedRewardConfig(ActorConfig):
    """`reward.functions` must name something: with none, no reward is asked for."""

    reward: RewardSection = RewardSection()
    grader: GraderSection = GraderSection()


class GradedReward(Actor):
    """A reward that asks another actor: it takes the role of the reward service."""

    role: ClassVar[str] = "reward_service"
    Config: ClassVar[type[ActorConfig] | None] = GradedRewardConfig
    needs: ClassVar[tuple[str, ...]] = ("grader",)

    @handler(concurrency=64)
    async def score(self, request: Score) -> Scores | NotScored:
        """A little more for a last answer that is a word we like."""
        if not request.completions:
            return NotScored("no_answer", "the trajectory has no turn")
        grade = Grade(request.completions[-1], wanted="left")
        graded = await self.ref("grader").ask(grade, timeout=self.config.grader.timeout_s)
        return Scores((0.1 * graded.score,))
