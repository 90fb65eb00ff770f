"""What the parts of a job cost, in CPU seconds, and what its rollouts are like: fitted to one recorded run by tools/calibrate.py."""

from typing import Self

from pydantic import Field, model_validator

from rubato.runtime.config import Section
from rubato.sim.distribution import Histogram


class EngineCosts(Section):
    """One engine process: its step is linear in its rows (requests) and in the tokens that it computes."""

    step_s: float = Field(ge=0)
    row_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    request_s: float = Field(ge=0)
    """Messages of one request, beside the steps."""
    update_s: float = Field(ge=0)
    """New weights laid out."""


class TrainerCosts(Section):
    """The trainer process, per training step."""

    step_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    """Per token of a trajectory that has an advantage."""
    publish_s: float = Field(ge=0)
    """Weights exported and put where engines pull them."""
    publish_wait_s: float = Field(ge=0)
    """Of publishing, what it waits for others."""
    rest_s: float = Field(ge=0)
    """The step's row."""
    rest_wait_s: float = Field(ge=0)
    checkpoint_s: float = Field(ge=0)
    checkpoint_wait_s: float = Field(ge=0)
    """The disk."""


class Costs(Section):
    """CPU seconds of all parts."""

    env_manager_turn_s: float = Field(ge=0)
    llm_proxy_turn_s: float = Field(ge=0)
    reward_service_trajectory_s: float = Field(ge=0)
    sample_buffer_trajectory_s: float = Field(ge=0)
    node_trajectory_s: float = Field(ge=0)
    """The node agent with the store that it started."""
    engine: EngineCosts
    trainer: TrainerCosts
    background_cores: float = Field(ge=0)
    """Cores that the job's other actors take all the time."""


class LearningStage(Section):
    """Rollouts that begin under versions below `until_version`, while the policy learns."""

    until_version: int = Field(ge=1)
    turns: Histogram
    trained_share: float = Field(ge=0, le=1)
    """Of a batch's tokens, those in trajectories that have an advantage."""


class Rollouts(Section):
    """What trajectories look like. Tokens of a prompt and per turn are those of the environment's text."""

    prompt_tokens: float = Field(ge=1)
    observation_tokens: float = Field(ge=0)
    action_tokens: float = Field(ge=1)
    stages: tuple[LearningStage, ...] = Field(min_length=1)

    def stage(self, version: int) -> LearningStage:
        """The one that `version` falls into; the last one goes on."""
        return next((stage for stage in self.stages if version < stage.until_version), self.stages[-1])


class Fit(Section):
    """Where a figure of this file comes from."""

    figure: str
    source: str
    samples: int
    residual: str
    """How far the fitted figure is from what it was fitted to."""


class Recorded(Section):
    """Which run a calibration comes from."""

    job: str
    seed: int
    steps: int
    engines: int
    env_managers: int
    window: tuple[int, int]
    """First and last training step that the figures come from."""
    host: str


class Calibration(Section):
    """A file that tools/calibrate.py writes."""

    recorded: Recorded
    cores: int = Field(ge=1)
    foreign_cores: float = Field(ge=0)
    """Cores that others on the host took meanwhile. Not in the model: calibrate where it is small, or where they yield."""
    costs: Costs
    rollouts: Rollouts
    fits: tuple[Fit, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.costs.background_cores >= self.cores:
            raise ValueError("costs.background_cores leaves no core to the job")
        return self
