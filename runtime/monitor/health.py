"""Says of one actor whether its process does what a process should: from its heartbeats, and from what its node agent saw of it."""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.monitor.views import ActorView, Kind, WaitRow

SILENT_S = 2.5
"""Two heartbeats and a half: one may be late by a second and no more in a process that runs."""

LATE_MS = 250.0
"""An event loop that runs so late holds up everybody who talks to it; a healthy one stays under 20."""

NODE_ROLE = "node"

LATE = "loop/late"
"""Metric: the worst lag of the last seconds, in ms."""


class Health(NamedTuple):
    """What is wrong with a process, since when; `limit` is the knob, where there is one."""

    kind: Kind
    reason: str
    age_s: float = 0.0
    limit: str = ""


class Processes:
    """The actors of one snapshot and what is known of their processes."""

    def __init__(self, actors: Sequence[ActorView], waits: Sequence[WaitRow]) -> None:
        self._actors = {actor["name"]: actor for actor in actors}
        nodes = {actor["name"] for actor in actors if actor["role"] == NODE_ROLE}
        self._seen = {wait["what"]: wait for wait in waits if wait["actor"] in nodes and wait["stage"] in PROCESS}

    def names(self) -> list[str]:
        """Everybody who is registered, or whose process somebody watches."""
        return sorted({*self._actors, *self._seen})

    def instances(self, holder: str) -> list[str]:
        """The actor of that name, or all of that role, dead ones included."""
        if holder in self._actors or holder in self._seen:
            return [holder]
        return [name for name in self.names() if name.rpartition("-")[0] == holder]

    def unfit(self, name: str) -> Health | None:
        """What is wrong with the process of `name`; None where it runs as it should."""
        seen, actor = self._seen.get(name), self._actors.get(name)
        if seen is not None and seen["stage"] != "starting":
            return Health(*PROCESS[seen["stage"]].of(seen))
        if actor is None:
            return Health(*PROCESS["starting"].of(seen)) if seen else Health("dead", "no such actor is up")
        if actor["silent_s"] > SILENT_S:
            why = f"no heartbeat for {actor['silent_s']:.1f} s: its event loop is stuck"
            return Health(
                "stalled", why if self._watched(actor) else f"{why}, or its host is cut off", actor["silent_s"]
            )
        if seen is not None or actor["state"] == "starting":
            return Health(*PROCESS["starting"].of(seen)) if seen else Health("starting", "it is not ready yet")
        if actor["state"] == "draining":
            return Health("refused", "it is draining")
        late = actor["metrics"].get(LATE, 0.0)
        if late > LATE_MS:
            return Health(
                "starved", f"its event loop runs {late:.0f} ms late: too little processor time, or work that blocks it"
            )
        return None

    def _watched(self, actor: ActorView) -> bool:
        """A node agent on its host would have said if it were dead or stopped."""
        return any(
            other["role"] == NODE_ROLE and other["host"] == actor["host"] and other["silent_s"] <= SILENT_S
            for other in self._actors.values()
        )


class _Told(NamedTuple):
    kind: Kind
    text: str

    def of(self, seen: WaitRow) -> tuple[Kind, str, float, str]:
        reason = self.text + (f" ({seen['detail']})" if seen["detail"] else "")
        return self.kind, reason, seen["age_s"], seen["limit"]


PROCESS = {
    "dead": _Told("dead", "its process ended"),
    "stopped": _Told("stalled", "its process is stopped"),
    "starting": _Told("starting", "its process starts"),
}
"""Stages in which a node agent waits for an actor whose process is not as it should be."""
