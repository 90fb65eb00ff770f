"""The environment's section of the config."""

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
    """Arguments that replace those above for held-out tasks; empty takes what the class declares as `held_out`."""
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
