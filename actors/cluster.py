"""The cluster whose pools a job shares: what the job's config says of it, and the way to its permits."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from actors.permits import Permits
from runtime.config import Section
from runtime.errors import ConfigError, LaunchError
from runtime.launch.shared import open_shared

ROLLOUT, TRAINING, WEIGHT_SYNC = "rollout", "training", "weight_sync"
"""The phases of a job, each of which has its permit."""


class ClusterSection(Section):
    """The cluster that the job shares pools with others of; a job that is submitted to one gets this section from there."""

    dir: str = ""
    """Folder of the cluster; empty where the job has its engines and its trainer to itself."""
    job: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    """What the job is called there."""
    rollout_pool: str = "rollout"
    """The pool on which its engines run, in turns with those of other jobs."""
    training_pool: str = "training"
    """The pool on which its trainer runs, in turns with those of other jobs."""


def place_of(engine: str) -> int:
    """Its place on the pool: engines of all jobs there share the places by their number."""
    return int(engine.rpartition("-")[2])


@asynccontextmanager
async def permits_of(section: ClusterSection) -> AsyncGenerator[Permits]:
    """The permits of the job's cluster. Raises ConfigError where there is none."""
    try:
        store = open_shared(Path(section.dir))
    except LaunchError as error:
        raise ConfigError(
            f"cluster.dir={section.dir} has no cluster that is up. Start it with: rubato cluster start CONFIG, or leave cluster.dir out. {error}"
        ) from None
    try:
        yield Permits(store)
    finally:
        await store.close()
