"""The Ray cluster of the helper's driver, and what a kind of host needs of a node there: why none has it."""

import importlib
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Self

from rubato.bus.address import bare
from rubato.runtime.errors import RubatoError
from rubato.runtime.launch.placer import HostSpec
from rubato.runtime.launch.ray.lines import Connect, Place

LEAST_CPU = 0.001
"""A bundle needs something: without a need of cores it goes to any node that has one."""

NAMED = 5
"""Labels of the cluster that a sentence lists."""

REACH_S = 5.0
"""For the address of a cluster to take a connection."""

LONGEST_WHY = 500

# -- what a host needs -------------------------------------------------------------------------------------------


class RayNode(NamedTuple):
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Of a row of `ray.nodes()`."""
        return cls(row["NodeManagerAddress"], row["Resources"], row["Labels"])

    def has(self, label: str) -> bool:
        key, value = _pair(label)
        return self.labels.get(key) == value


def bundle_of(spec: HostSpec) -> dict[str, float]:
    """The resources that Ray sets aside for one host of `spec`."""
    return {"CPU": spec.cpus or LEAST_CPU, **({"GPU": float(spec.gpus)} if spec.gpus else {})}


def selector_of(spec: HostSpec) -> dict[str, str]:
    """The labels that a node must have: `h20` is Ray's h20=true, and `rack=b` stays what it is."""
    return dict(map(_pair, spec.labels))


def why_none(spec: HostSpec, nodes: Collection[RayNode]) -> str:
    """The sentence where none of `nodes` could hold a host of `spec`, were it idle; empty where one could."""
    able = [node for node in nodes if all(map(node.has, spec.labels))]
    bundle = bundle_of(spec)
    if any(all(node.resources.get(kind, 0.0) >= num for kind, num in bundle.items()) for node in able):
        return ""
    change = f"Change launch.hosts.{spec.name} or its pools, or start such a node."
    if not able:
        wanted = ",".join("=".join(_pair(label)) for label in spec.labels)
        alone = [label for label in spec.labels if not any(node.has(label) for node in nodes)]
        what = f"the label {', '.join(alone)}" if alone else f"the labels {', '.join(spec.labels)} together"
        return f"no node of the Ray cluster has {what} ({_labels(nodes)}). {change} A node has it by: ray start --labels={wanted}"
    most = {kind: max(node.resources.get(kind, 0.0) for node in able) for kind in bundle}
    needs = [f"{num:g} {kind}s" for kind, num in bundle.items() if num != LEAST_CPU] or ["a CPU"]
    together = " together" if all(most[kind] >= num for kind, num in bundle.items()) else ""
    has = ", ".join(f"{num:g} {kind}s" for kind, num in most.items())
    those = f" of those labelled {', '.join(spec.labels)}" if spec.labels else ""
    return f"no node of the Ray cluster has {' and '.join(needs)}{together}: the most that one{those} has is {has}. {change}"


def _labels(nodes: Iterable[RayNode]) -> str:
    found = sorted({f"{key}={value}" for node in nodes for key, value in node.labels.items() if not key.startswith("ray.io/node")})
    more = ", …" if len(found) > NAMED else ""
    return f"its labels are {', '.join(found[:NAMED])}{more}" if found else "it has none"


def _pair(label: str) -> tuple[str, str]:
    key, equals, value = label.partition("=")
    return key, value if equals else "true"


# -- the cluster --------------------------------------------------------------------------------------------------


class Unusable(RubatoError):
    """The cluster can't be used; the sentence says why."""


class Cluster:
    """The Ray cluster of this process's driver. Its methods block, and are for threads beside the loop."""

    def __init__(self, order: Connect) -> None:
        """Raises Unusable."""
        self.ray: Any = importlib.import_module("ray")
        self._namespace = order.namespace
        self._seen: dict[str, RayNode] = {}
        address = _address(order.address)
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            self.ray.init(address, namespace=order.namespace, log_to_driver=False, logging_level="ERROR", **options)
        except (Exception, SystemExit) as error:
            raise Unusable(f"the Ray cluster at {_told(order.address, address)} can't be used: {line_of_error(error)}") from error

    def nodes(self) -> dict[str, RayNode]:
        """Those that are alive, by id."""
        found = {row["NodeID"]: RayNode.of(row) for row in self.ray.nodes() if row["Alive"]}
        self._seen |= found
        return found

    def why_none(self, order: Place) -> str:
        """Of a node that was there before another may come in its place, so it counts."""
        self.nodes()
        return why_none(order.spec, list(self._seen.values()))

    def left(self) -> tuple[list[str], list[str]]:
        """Names of the actors and of the placement groups of this run."""
        actors = [str(name) for name in self.ray.util.list_named_actors()]
        table = self.ray.util.placement_group_table()
        prefix = f"{self._namespace}/"
        return actors, [row["name"] for row in table.values() if row["state"] != "REMOVED" and row["name"].startswith(prefix)]

    def clear(self) -> None:
        """End by name what is left of this run."""
        actors, groups = self.left()
        for name in actors:
            with suppress(ValueError):  # it is gone
                self.ray.kill(self.ray.get_actor(name))
        for name in groups:
            with suppress(ValueError):
                self.ray.util.remove_placement_group(self.ray.util.get_placement_group(name))

    def ask(self, order: Place, made: list[Any]) -> None:
        """A placement group for the host, and its actor, which is pending until the group has a node. Both are put into `made`."""
        from rubato.runtime.launch.ray.actor import HostActor

        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        selector = selector_of(order.spec)
        group = self.ray.util.placement_group(
            [bundle_of(order.spec)], name=f"{self._namespace}/{order.name}", bundle_label_selector=[selector] if selector else None
        )
        made.append(group)
        made.append(
            self.ray.remote(HostActor)
            .options(
                name=order.name, max_restarts=0, max_task_retries=0, num_cpus=0, num_gpus=order.spec.gpus,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            ).remote()
        )  # fmt: skip

    def end(self, made: list[Any]) -> None:
        for actor in made[1:]:
            self.ray.kill(actor)
        for group in made[:1]:
            self.ray.util.remove_placement_group(group)


def _address(given: str) -> str:
    """The one for ray.init, where something listens. Raises Unusable."""
    address = os.environ.get("RAY_ADDRESS", "") or "auto" if given == "auto" else given
    if address in ("auto", "local"):
        return address
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("", "ray") or not host or not port.isdigit():
        what = f"{_told(given, address)} is no address of a Ray cluster"
        raise Unusable(f"{what}. Use HOST:PORT on one of its nodes, ray://HOST:10001 elsewhere, auto or local.")
    try:
        socket.create_connection((bare(host), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Unusable(f"no Ray cluster answers at {_told(given, address)} ({reason}). Is it up, and is this its address?") from error
    return address


def _told(given: str, address: str) -> str:
    """The address with where it comes from."""
    return f"launch.address={given}" if given == address else f"RAY_ADDRESS={address}"


def line_of_error(error: BaseException) -> str:
    """What Ray says, in one line."""
    return " ".join(str(error).split())[:LONGEST_WHY] or type(error).__name__
