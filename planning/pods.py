"""Plans a phase on the two optical layers of RFabric: circuits between the racks of a pod, and between racks of different pods."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from rubato.planning.demand import Flows, Links, Pair, per_link
from rubato.planning.topology import direct


class PortSplit(NamedTuple):
    """Uplinks of one rack switch."""

    core: int
    pod: int


def split(core_bytes: int, pod_bytes: int, ports: int, *, least_core: int, least_pod: int) -> PortSplit:
    """The split that minimises max(core_bytes / core, pod_bytes / pod), each side keeping its least number of ports.

    The paper keeps one port (0.4 of 12.8 Tb/s) on the side that a phase does not need. On a tie the core gets the port.
    Raises ValueError when the least numbers don't fit.
    """
    if least_core + least_pod > ports:
        raise ValueError(f"{ports} uplinks can't be split into {least_core} or more to the core and {least_pod} or more in the pod")
    highest = ports - least_pod
    total = core_bytes + pod_bytes
    fair = core_bytes * ports // total if total else least_core
    nearby = {max(least_core, min(highest, core)) for core in (fair, fair + 1)}

    def slowest(core: int) -> tuple[float, int]:
        return max(_per_port(core_bytes, core), _per_port(pod_bytes, ports - core)), -core

    core = min(nearby, key=slowest)
    return PortSplit(core, ports - core)


def _per_port(size_bytes: int, ports: int) -> float:
    if not size_bytes:
        return 0.0
    return size_bytes / ports if ports else float("inf")


class PodPlan(NamedTuple):
    """Circuits of one phase. Racks are numbered over all pods; every rack reaches every other."""

    splits: tuple[PortSplit, ...]
    """Uplinks of each rack's switch."""
    pod: Links
    """Between racks of one pod, over the aggregation switches."""
    core: Links
    """Between racks of different pods, over the core switches."""


def plan_pods(directed: Mapping[Pair, int], pod_of: Sequence[int], uplinks: int, most_core: int | None = None) -> PodPlan:
    """`directed` is bytes between racks; rack i is in pod `pod_of[i]`, pods numbered from 0 without gaps.

    Each rack splits its uplinks by what it sends to, or gets from, each side; at most `most_core` of them reach the core, where
    the fabric was built with fewer core ports than uplinks. Inside a pod the circuits join racks; between pods their number is
    decided per pair of pods, since racks reach the core through their pod. Raises ValueError where the uplinks can't
    connect the racks of a pod (two each on average) or the pods.
    """
    racks: dict[int, list[int]] = defaultdict(list)
    for rack, pod in enumerate(pod_of):
        racks[pod].append(rack)
    splits = _splits(directed, pod_of, racks, uplinks, uplinks if most_core is None else most_core)
    local: dict[int, Flows] = defaultdict(dict)
    for (a, b), size_bytes in directed.items():
        if pod_of[a] == pod_of[b]:
            local[pod_of[a]][a, b] = size_bytes
    inside: list[Pair] = []
    for pod, members in racks.items():
        index = {rack: i for i, rack in enumerate(members)}
        demand = {(index[a], index[b]): v for (a, b), v in local[pod].items()}
        found = direct(per_link(demand), [splits[rack].pod for rack in members])
        inside += [(members[a], members[b]) for a, b in found]
    return PodPlan(splits, tuple(sorted(inside)), _core(directed, pod_of, racks, splits))


def pod_links(directed: Mapping[Pair, int], ports: Sequence[int], pod_of: Sequence[int], most_core: int | None = None) -> Links:
    """The circuits of `plan_pods` in one: a planner as others are. Every rack is planned for as if it had the fewest ports of all."""
    planned = plan_pods(directed, pod_of, min(ports), most_core)
    return tuple(sorted((*planned.pod, *planned.core)))


def _splits(
    directed: Mapping[Pair, int], pod_of: Sequence[int], racks: Mapping[int, list[int]], uplinks: int, most_core: int
) -> tuple[PortSplit, ...]:
    """Each rack's fuller direction counts, to either side."""
    sides: dict[tuple[int, bool, bool], int] = defaultdict(int)
    """Bytes by (rack, inside its pod, incoming)."""
    for (a, b), size_bytes in directed.items():
        inside = pod_of[a] == pod_of[b]
        sides[a, inside, False] += size_bytes
        sides[b, inside, True] += size_bytes

    def of(rack: int, num_racks: int) -> PortSplit:
        core, pod = (max(sides[rack, inside, way] for way in (False, True)) for inside in (False, True))
        least_core = 0 if len(racks) == 1 else 1 if num_racks > 1 or len(racks) == 2 else 2
        return split(core, pod, uplinks, least_core=least_core, least_pod=max(min(2, num_racks - 1), uplinks - most_core))

    return tuple(of(rack, len(racks[pod])) for rack, pod in enumerate(pod_of))


def _core(directed: Mapping[Pair, int], pod_of: Sequence[int], racks: Mapping[int, list[int]], splits: Sequence[PortSplit]) -> Links:
    """Links per pair of pods; the next one of all joins the two racks with free ports that have most bytes for each other per link they have.

    Racks of two pods that have nothing for each other are joined last: by what each has for the other's pod.
    """
    between: Flows = defaultdict(int)
    beyond: dict[tuple[int, int], int] = defaultdict(int)
    """Bytes between a rack and another pod."""
    for (a, b), size_bytes in directed.items():
        if pod_of[a] != pod_of[b]:
            between[pod_of[a], pod_of[b]] += size_bytes
            beyond[a, pod_of[b]] += size_bytes
            beyond[b, pod_of[a]] += size_bytes
    wants = per_link({pair: v for pair, v in directed.items() if pod_of[pair[0]] != pod_of[pair[1]]})
    free = [each.core for each in splits]
    left = Counter(direct(per_link(between), [sum(free[rack] for rack in racks[pod]) for pod in range(len(racks))]))
    given: Counter[Pair] = Counter()
    found: list[Pair] = []

    def join(pair: Pair, pods: Pair) -> None:
        given[pair] += 1
        left[pods] -= 1
        free[pair[0]], free[pair[1]] = free[pair[0]] - 1, free[pair[1]] - 1
        found.append(pair)

    def end(pod: int, other: int) -> int:
        rack = max((r for r in racks[pod] if free[r]), key=lambda r: (beyond[r, other] / (given[r, -1] + 1), free[r], -r))
        given[rack, -1] += 1
        return rack

    fullest: list[tuple[float, Pair]] = [(-size_bytes, pair) for pair, size_bytes in wants.items()]
    heapify(fullest)
    while fullest:
        _, pair = heappop(fullest)
        pods = _sorted(pod_of[pair[0]], pod_of[pair[1]])
        if left[pods] and free[pair[0]] and free[pair[1]]:
            join(pair, pods)
            heappush(fullest, (-wants[pair] / (given[pair] + 1), pair))
    for pods in sorted(left.elements()):
        join(_sorted(end(*pods), end(pods[1], pods[0])), pods)
    return tuple(sorted(found))


def _sorted(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
