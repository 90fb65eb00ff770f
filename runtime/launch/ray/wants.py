"""What a kind of host needs of a Ray node, in Ray's terms, and why no node has it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Self

from rubato.runtime.launch.placer import HostSpec

LEAST_CPU = 0.001
"""A bundle needs something: without a need of cores it goes to any node that has one."""

NAMED = 5
"""Labels of the cluster that a sentence lists."""


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
