"""The cluster whose pools a job shares: what the job's config says of it, and the way to its permits."""

import difflib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.config import ClusterSection
from actors.permits import Permits
from runtime.errors import ConfigError, LaunchError
from runtime.launch.shared import open_shared

ROLLOUT, TRAINING, WEIGHT_SYNC = "rollout", "training", "weight_sync"
"""The phases of a job, each of which has its permit."""


def rollout_pool(node: int) -> str:
    """The pool of that node: what a job rolls out on there needs its permit."""
    return f"rollout-{node}"


def training_pool(group: int) -> str:
    """The same of that group's training node."""
    return f"training-{group}"


def pools_of(cluster: Path) -> tuple[str, ...]:
    """Names of the pools that the cluster in this folder has. Empty without a scheduler: there a pool is whatever is asked for."""
    from runtime.config.variables import fill_tree
    from runtime.monitor.source import read_config  # YAML, which engines and trainers do without

    section = fill_tree(read_config(cluster / "config.yaml").get("scheduler"), "scheduler")[0]
    if not isinstance(section, dict):
        return ()
    counts: dict[str, dict[str, int]] = section
    rollout, training = (counts.get(kind, {}).get("nodes", 1) for kind in (ROLLOUT, TRAINING))
    return (*map(rollout_pool, range(rollout)), *map(training_pool, range(training)))


def check_pool(cluster: Path, pool: str, whose: str) -> None:
    """Raises ConfigError, one sentence, where the cluster has no `pool`: nobody else would ever wait for it."""
    known = pools_of(cluster)
    if known and pool not in known:
        near = difflib.get_close_matches(pool, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"{whose}={pool}: the cluster in {cluster} has no such pool. Did you mean {near[0]}? It has {', '.join(known)}."
        )


def check_pools(config: Any) -> None:
    """The same for both pools of a job, whose config has the section `cluster`."""
    section: ClusterSection = config.cluster
    for key in ("rollout_pool", "training_pool"):
        check_pool(Path(section.dir), getattr(section, key), f"cluster.{key}")


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
