"""Says when a rollout phase begins, once per weight version, with the bytes that the engines exchanged since the last one."""

from collections.abc import Iterable

from actors.messages.fabric import PhaseIntent
from actors.proxy.placement import EngineSeat


class RolloutPhases:
    """The first token under a new version, on any engine, begins its phase."""

    def __init__(self, proxy: str) -> None:
        self._proxy = proxy
        self._announced = -1

    def begins(self, version: int, seats: Iterable[EngineSeat]) -> PhaseIntent | None:
        """The intent to send, the first time `version` is seen; the traffic counters start anew."""
        if version <= self._announced:
            return None
        self._announced = version
        traffic: list[tuple[str, str, int]] = []
        for seat in seats:
            traffic += [(self._proxy, seat.name, seat.bytes_in), (seat.name, self._proxy, seat.bytes_out)]
            seat.bytes_in = seat.bytes_out = 0
        return PhaseIntent("rollout", version, 0.0, tuple(t for t in traffic if t[2]))
