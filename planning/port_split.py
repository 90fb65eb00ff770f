"""Divides the uplinks of a rack's switch between its own pod and the core (RFabric, Figure 5), per phase."""

from typing import NamedTuple


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
        raise ValueError(
            f"{ports} uplinks can't be split into {least_core} or more to the core and {least_pod} or more in the pod"
        )
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
