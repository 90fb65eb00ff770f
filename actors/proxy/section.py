"""The sections of the config that a proxy reads."""

from typing import Annotated

from pydantic import BeforeValidator

from rubato.actors.config import ClusterSection, ProxySection, one_of
from rubato.runtime.config import ActorConfig

LEARNED = "learned"


def _given(value: object) -> object:
    if isinstance(value, str) and value:
        return one_of(value, (LEARNED,), ", and no map of tasks to hardware classes")
    if value and not (isinstance(value, dict) and all(isinstance(part, str) for part in (*value, *value.values()))):
        raise ValueError(f"{value!r} is neither {LEARNED} nor a map of tasks to hardware classes, such as {{math: h20}}")
    return value or {}


AffinityMap = Annotated[str | dict[str, str], BeforeValidator(_given)]
"""`learned`, or task → hardware class; empty where every engine may serve every task."""


class ProxyConfig(ActorConfig):
    """All that a proxy and its mechanisms read."""

    proxy: ProxySection = ProxySection()
    cluster: ClusterSection = ClusterSection()
    affinity: AffinityMap = {}
    """Which class of hardware serves which task: `learned`, or task → class of a pool, `default` for the others; see docs/affinity.md."""
