"""What of this host each of its actors has: its pool, GPUs and cores. They stay an actor's for as long as it is to run, restarts included."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rubato.planning.devices import HostResources, ProcessNeeds, ProcessPlace, place
from rubato.runtime.config import ActorSpec, Config
from rubato.runtime.config.sections import DEVICES, PoolSection
from rubato.runtime.errors import ConfigError

GPU = re.compile(r"^nvidia\d+$")
"""What a GPU is called in /dev."""


class ActorPlace(NamedTuple):
    """`environment` is what its process has beyond this one's, and `cores` those to which it is pinned, if any."""

    pool: str = ""
    environment: Mapping[str, str] = {}
    cores: tuple[int, ...] = ()
    own_process: bool = False
    """Its process differs from others of the job from its very start."""


def this_host(labels: Iterable[str]) -> HostResources:
    """What this process may use: the GPUs that CUDA_VISIBLE_DEVICES leaves it, or all, and the cores that the system does."""
    visible = os.environ.get(DEVICES)
    if visible is None:
        found = [entry for entry in os.listdir("/dev") if GPU.match(entry)] if Path("/dev").is_dir() else []
        devices = [str(index) for index in range(len(found))]
    else:
        named = [name.strip() for name in visible.split(",")]
        devices = named[: named.index("-1")] if "-1" in named else [name for name in named if name]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return HostResources(frozenset(labels), tuple(devices), tuple(cores))


class HostRoom(NamedTuple):
    """`num` of the processes that were asked for have a place; where others don't, `why_not` is the part of a sentence that says so."""

    num: int
    why_not: str = ""


class HostPlaces:
    """Places on `host` for the job that has `roles`. GPUs that the environment of a pool names are that pool's alone."""

    def __init__(self, roles: Mapping[str, ActorSpec], host: HostResources) -> None:
        self._roles, self._host = roles, host
        self._named: dict[str, ActorPlace] = {}
        pools = [pool for spec in roles.values() for pool in spec.pools.values()]
        given = [pool.env[DEVICES] for pool in pools if DEVICES in pool.env and host.labels.issuperset(pool.labels)]
        self._taken = {"": ProcessPlace(tuple(name.strip() for each in given for name in each.split(",")))}

    def of(self, name: str) -> ActorPlace:
        """That of the actor `name`; one of no pool where it has none."""
        return self._named.get(name, ActorPlace())

    def room(self, role: str, pool: str, num: int) -> HostRoom:
        """Of `num` more of `role` in `pool`, how many have a place here."""
        found = self._roles[role].pools.get(pool)
        if found is None:
            return HostRoom(num)
        taken = [*self._taken.values()]
        for index in range(num):
            placed = place(self._host, taken, _needs(found))
            if placed.why_not:
                return HostRoom(index, f"this host {placed.why_not}")
            taken.append(placed)
        return HostRoom(num)

    def why_not(self, role: str, pool: str, num: int) -> str:
        """The sentence where `num` more of `role` have no place here in `pool`; empty where they do."""
        found = self.room(role, pool, num)
        only = f", only {found.num}" if found.num else ""
        return f"can't add {num} {role} to the pool {pool}{only}: {found.why_not}." if found.why_not else ""

    def take(self, name: str, role: str, pool: str) -> None:
        """Give the actor `name` its place. Raises ConfigError where there is none."""
        found = self._roles[role].pools.get(pool) if role in self._roles else None
        if found is None:
            return
        placed = place(self._host, self._taken.values(), _needs(found))
        if placed.why_not:
            raise ConfigError(f"{name} of the pool {pool} has no place: this host {placed.why_not}.")
        self._taken[name] = placed
        devices = {DEVICES: ",".join(placed.devices)} if found.gpus else {}
        self._named[name] = ActorPlace(pool, {**found.env, **devices}, placed.cores, found.own_process)

    def leave(self, name: str) -> None:
        """What the actor `name` had is free for others."""
        self._named.pop(name, None)
        self._taken.pop(name, None)

    @classmethod
    def here(cls, job: Config) -> "HostPlaces":
        """Those of this host for `job`."""
        return cls(job.actors, this_host(job.host.labels))

    def problems(self) -> list[str]:
        """A sentence for each pool of which a launch would start more here than have a place. It takes their places."""
        wrong: list[str] = []
        for role, spec in self._roles.items():
            for name, pool in spec.pools.items():
                found = self.room(role, name, pool.count)
                for index in range(found.num):
                    self.take(f"{name}-{index}", role, name)
                if found.why_not:
                    key = f"actors.{role}.pools.{name}.count"
                    others = f"rubato add {role} --pool {name} --join TOKEN"
                    advice = f"Set it to {found.num}, and let other hosts bring the rest: {others}"
                    wrong.append(f"{key} is {pool.count}, but {found.why_not}. {advice}")
        return wrong


def _needs(pool: PoolSection) -> ProcessNeeds:
    return ProcessNeeds(pool.labels, pool.gpus, pool.cores)
