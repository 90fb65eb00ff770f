"""Which groups of nodes a run asks Slurm for: those of one group are alike, and a heterogeneous job has one for each kind."""

from typing import NamedTuple

from rubato.runtime.config import Config
from rubato.runtime.launch.placer import HostSpec, specs_of


class NodeGroup(NamedTuple):
    """`num` nodes with what a host of it needs; the first group's first node has the launcher."""

    num: int
    needs: HostSpec


def node_groups(config: Config) -> list[NodeGroup]:
    """The launcher's group, and one for each need that hosts have beside it."""
    numbers, kinds = groups_of(config), [launching_host(config), *specs_of(config).values()]
    found = [[kind for kind in kinds if numbers.get(kind.name, 0) == group] for group in range(max(numbers.values(), default=0) + 1)]
    return [NodeGroup(sum(kind.count for kind in group), group[0]) for group in found]


def groups_of(config: Config) -> dict[str, int]:
    """Kind of hosts → the group of its nodes: who needs the same of a node has the same."""
    kinds = specs_of(config)
    needs = list(dict.fromkeys(map(_need, [launching_host(config), *kinds.values()])))
    return {name: needs.index(_need(kind)) for name, kind in kinds.items()}


def launching_host(config: Config) -> HostSpec:
    """What the launcher's own actors need together; its name is none. It has all cores of its node."""
    sections = [pool for role in config.actors.values() for pool in role.pools.values() if pool.count]
    labels = dict.fromkeys(label for section in sections for label in section.labels)
    return HostSpec("", 1, gpus=sum(section.gpus * section.count for section in sections), labels=tuple(labels))


def _need(spec: HostSpec) -> tuple[int, int, tuple[str, ...]]:
    return spec.gpus, spec.cpus, tuple(sorted(spec.labels))
