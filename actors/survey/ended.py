"""What has ended, for an orchestrator that asks from time to time."""

from collections import deque
from itertools import islice

from rubato.actors.messages.orchestration import RequestEnded

ENDED_KEPT = 8192
"""Of those that wait for the next survey the oldest is forgotten first."""


class EndedLog:
    """Requests of one proxy, or rollouts of one manager."""

    def __init__(self) -> None:
        self._ended: deque[RequestEnded] = deque(maxlen=ENDED_KEPT)
        self.num = 0
        """Of all that ended."""

    def add(self, ended: RequestEnded) -> None:
        self._ended.append(ended)
        self.num += 1

    def since(self, after: int) -> tuple[RequestEnded, ...]:
        """Those behind the first `after`; all that are kept where `after` is a number of an actor before this one."""
        known = after if after <= self.num else 0
        new = min(self.num - known, len(self._ended))
        return tuple(islice(self._ended, len(self._ended) - new, None))
