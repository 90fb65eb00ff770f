"""EnginePicker: a request goes to engines that hold the newest weights there are, and waits where these have no room.

rubato launch CONFIG proxy.picker=rubato_plugins.picker:NewestWeights
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from rubato.actors.proxy.picker import LeastLoaded

if TYPE_CHECKING:
    from rubato.actors.proxy.placement import EngineSeat, ProxyRequest


class NewestWeights(LeastLoaded):
    """Samples are as young as can be, and engines that are slow to take weights get fewer of them. Evaluations ask for their own version."""

    def usable(self, request: "ProxyRequest") -> "Collection[EngineSeat]":
        engines, need = super().usable(request), request.request.weights
        if need.exact:
            return engines
        newest = max((engine.info.version_of(need.adapter) for engine in engines), default=0)
        found = [engine for engine in engines if engine.info.version_of(need.adapter) == newest]
        self.host.actor.metrics.gauge("queue/newest/engines", len(found))
        return found
