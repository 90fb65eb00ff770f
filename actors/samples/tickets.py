"""Leases of tickets: a rollout whose holder falls silent goes to somebody else."""


class Leases:
    """Loop time at which each running trajectory's ticket lapses."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._expires: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._expires)

    def grant(self, trajectory: str, now: float) -> None:
        """Start or renew."""
        self._expires[trajectory] = now + self._ttl_s

    def release(self, trajectory: str) -> None:
        self._expires.pop(trajectory, None)

    def age(self, trajectory: str, now: float) -> float:
        """Seconds since it was granted or renewed; 0 where there is no lease."""
        return now + self._ttl_s - self._expires[trajectory] if trajectory in self._expires else 0.0

    def earliest(self) -> float | None:
        """When the next one lapses unless it is renewed; None while nothing runs."""
        return min(self._expires.values(), default=None)

    def lapsed(self, now: float) -> list[str]:
        """Remove and return what lapsed by `now`, oldest trajectory first."""
        over = sorted(trajectory for trajectory, expires in self._expires.items() if expires <= now)
        for trajectory in over:
            del self._expires[trajectory]
        return over
