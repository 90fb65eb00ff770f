"""Keeps count of changes: how long they take, how much of that was hidden before a phase, how much a phase waited for."""

import asyncio
from collections import deque

from runtime.observe.figures import Metrics

REMEMBERED = 5
"""Changes that the expected delay is the longest of: one slow change makes the next ones begin early, for five rounds."""


class Accounts:
    """Totals since start, also counted as metrics. Times are loop times."""

    def __init__(self, metrics: Metrics, reconfiguration_s: float) -> None:
        self.reconfigurations = 0
        self.hidden_s = self.exposed_s = 0.0
        self._metrics = metrics
        self._delays: deque[float] = deque([reconfiguration_s], maxlen=REMEMBERED)

    @property
    def delay_s(self) -> float:
        """What a change is expected to take."""
        return max(self._delays)

    def changed(self, starts_at: float, began: float, began_meanwhile: float | None) -> None:
        """A change that began at `began` is done, for a phase that was expected at `starts_at` or began during the change.

        What passed before its phase began was hidden; what the phase then waited for is exposed.
        """
        ended = asyncio.get_running_loop().time()
        phase_began = starts_at if starts_at <= began else began_meanwhile if began_meanwhile is not None else ended
        hidden_s, exposed_s = max(0.0, phase_began - began), max(0.0, ended - phase_began)
        self._delays.append(ended - began)
        self.reconfigurations += 1
        self.hidden_s += hidden_s
        self.exposed_s += exposed_s
        self._metrics.count("fabric/reconfigurations")
        self._metrics.count("fabric/hidden_s", hidden_s)
        self._metrics.count("fabric/exposed_s", exposed_s)
