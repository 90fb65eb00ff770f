"""The environment's section of the config."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from runtime.config import Section

FIRST_WORKERS, PER_CORE = 2, 4
"""Of `workers: auto`: those that start with the first environment, and the most for each core. Steps that compute gain up to one per core;
those that wait for something else gain beyond."""


def _workers(value: Any) -> Any:
    value = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value  # of ${NAME}
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"{value!r} is neither a whole number from 1 on nor auto")


Workers = Annotated[int | Literal["auto"], PlainValidator(_workers)]


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
    workers: Workers = "auto"
    """Worker processes per environment manager, where isolation needs them: each plays one step at a time. auto: from 2, one more whenever steps wait, up to `concurrency`, four per core, and what half of the free memory holds."""
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

    def sizes(self, cores: int) -> tuple[int, int]:
        """(first, most) workers of a manager that may use so many cores."""
        if self.workers != "auto":
            return self.workers, self.workers
        most = min(self.concurrency, PER_CORE * cores)
        return min(FIRST_WORKERS, most), most
