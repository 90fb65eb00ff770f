"""The environment manager's sections of the config."""

from typing import Any, Literal

from pydantic import Field

from runtime.config import Section


class EnvSection(Section):
    """The environment: which class, with which arguments, and where its code runs."""

    target: str = Field(default="actors.envs.frozen_lake:FrozenLakeText", alias="class")
    """Import path: package.module:Class or path/to/file.py:Class."""
    kwargs: dict[str, Any] = {}
    """Arguments of the constructor."""
    eval_kwargs: dict[str, Any] = {}
    """Arguments that replace those above for held-out tasks; empty takes what a class of ours declares for them."""
    concurrency: int = Field(default=64, ge=1)
    """Rollouts in flight per environment manager."""
    isolation: Literal["auto", "inline", "process"] = "auto"
    """inline: in the manager's process; process: in workers that are killed when they hang; auto: inline for async classes only."""
    workers: int = Field(default=2, ge=1)
    """Worker processes per environment manager, where isolation needs them."""
    memory_mb: int = Field(default=0, ge=0)
    """Private memory of each worker in MiB; 0 leaves it unbounded."""
    max_processes: int = Field(default=1024, ge=1)
    """Processes and threads that each worker may have, itself included."""
    build_timeout_s: float = Field(default=60.0, gt=0)
    """Longest the import and the constructor may take."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    """Longest one reset may take."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Longest one step may take."""
    reset_tries: int = Field(default=3, ge=1)
    """Tries per rollout, each on a fresh instance."""


class RolloutSection(Section):
    """How one trajectory is played."""

    max_turns: int = Field(default=14, ge=1)
    """Turns after which a trajectory is cut (truncated)."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Tokens the model may sample per turn; less than max_len."""
    max_len: int = Field(default=512, ge=2)
    """Tokens of a whole trajectory; it is cut when the next turn may not fit. At most engine.max_len."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of training rollouts; held-out tasks are greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of training rollouts."""
    system_prompt: str = ""
    """First message of every trajectory, where set."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for one completion, engine restarts included."""
    generate_tries: int = Field(default=3, ge=1)
    """Tries per turn where the engine aborts a request; sampled tokens are kept."""
    reward_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a score, restarts of the reward service included."""
    put_timeout_s: float = Field(default=600.0, gt=0)
    """Longest a finished trajectory is offered to the sample buffer while that is away."""
    hold_s: float = Field(default=8.0, gt=0)
    """Period at which the tickets of running trajectories are renewed; at most a third of samples.ticket_ttl_s."""
