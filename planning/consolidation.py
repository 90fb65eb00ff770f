"""Which engines keep the last requests of a rollout, so that the others are free for the next job (RollMux, section 4.3: tail migration). Pure."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

TAIL = 0.2
"""Share of a step's rollouts that is its tail: at 80 % the rest is moved together."""


class RolloutTail(NamedTuple):
    """What a job's last responses are beside its whole rollout, once another job waits for its nodes."""

    begins: float = 1.0
    """Share of the rollout after which they move together and the other engines are the next job's; 1 where nothing moves."""
    kept: float = 0.0
    """Share of the nodes' engines that they keep."""
    slower: float = 1.0
    """Their time on those engines over their time where they were."""

    @property
    def held(self) -> float:
        """Share of its own time that the rollout takes of its nodes."""
        return self.begins + (1 - self.begins) * self.slower * self.kept


class Consolidation(NamedTuple):
    """`kept` engines run on; each request of the others goes to one of them."""

    kept: frozenset[str]
    moves: Mapping[str, str]
    """Request → the engine that takes it."""
    why: str


def is_tail(num_left: int, num_most: int) -> bool:
    """Whether so few rollouts are left of those that were under way at once that the rest is moved together."""
    return 0 < num_left <= TAIL * num_most


def consolidate(requests: Mapping[str, Sequence[str]], num_slots: int) -> Consolidation:
    """The fewest engines that decode all requests at once; those stay that have the most. `requests` are by engine, and each engine
    decodes `num_slots` of them."""
    total = sum(map(len, requests.values()))
    num = min(len(requests), max(1, ceil(total / num_slots)))
    order = sorted(requests, key=lambda engine: (-len(requests[engine]), engine))
    loads = {engine: len(requests[engine]) for engine in order[:num]}
    moves: dict[str, str] = {}
    for engine in order[num:]:
        for request in requests[engine]:
            target = min(loads, key=lambda each: (loads[each], each))
            moves[request] = target
            loads[target] += 1
    why = f"{total} requests fit {num} of {len(requests)} engines of {num_slots} slots"
    return Consolidation(frozenset(loads), moves, why)
