"""What the keys `sandbox…` of a section mean: the sandbox in which the workers of its user code are started."""

from collections.abc import Mapping

from rubato.actors.config import RewardSection
from rubato.actors.data.datasets import place_of
from rubato.actors.data.tasks import TaskSection
from rubato.actors.envs.section import EnvSection
from rubato.runtime import bubblewrap
from rubato.runtime.bubblewrap import Bounds, Sandbox, SandboxWall


def sandbox_of(section: RewardSection | EnvSection) -> Sandbox:
    """With the bounds that the section sets for its workers."""
    bounds = Bounds(memory_mb=section.memory_mb, max_processes=section.max_processes, tmp_mb=section.sandbox_tmp_mb)
    return Sandbox(section.sandbox_network, section.sandbox_read, section.sandbox_env, bounds)


def wall_of(section: RewardSection | EnvSection) -> SandboxWall:
    """What a WorkerPool starts its workers behind."""
    return SandboxWall(sandbox_of(section))


def showing_rows(env: EnvSection, tasks: Mapping[str, TaskSection]) -> EnvSection:
    """The section with the rows that graders' environments read among what is shown; tasks share their workers."""
    rows = (path for task in tasks.values() if task.data for path in (task.data.source, task.data.eval_source) if path)
    return env.model_copy(update={"sandbox_read": (*env.sandbox_read, *(str(place_of(path)) for path in rows))})


def check(section: RewardSection | EnvSection, key: str) -> None:
    """Raises ConfigError where such a sandbox can't be had on this host, found by starting one. `key` is the section's name."""
    bubblewrap.check(sandbox_of(section), f"{key}.sandbox")
