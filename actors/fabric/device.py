"""OcsDevice: the mirrors and the database of an emulated SONiC optical switch, traps included.

What the database acknowledges and what the mirrors do are two things. Adding a circuit whose port is taken: one alone becomes
`invalid` itself, of several at once the *old* holders become invalid. An existing id added again is passed over, even if invalid.
"""

import asyncio
from collections.abc import Collection, Sequence

from actors.fabric.driver import Status
from planning.circuits import Cross


class OcsDevice:
    """Circuits that change are dark for `delay_s`; one change is carried out after another. Holds nothing after a restart."""

    def __init__(self, num_ports: int, delay_s: float) -> None:
        self.num_ports = num_ports
        self.delay_s = delay_s
        self.dead_ports: set[int] = set()
        """Ports whose mirrors don't move any more: circuits over them fail."""
        self.num_changes = 0
        self.changed = asyncio.Event()
        """Set with every update; for whoever follows the light, who clears it."""
        self._tuned_at: dict[Cross, float | None] = {}
        """Loop time from which each configured circuit carries light; None for an invalid one."""
        self._busy_until = 0.0

    def update(self, delete: Collection[Cross], add: Sequence[Cross]) -> tuple[int, int]:
        """Deletes first. The numbers acknowledge the database: of circuits that were there, and that are there now."""
        gone = [cross for cross in dict.fromkeys(delete) if cross in self._tuned_at]
        for cross in gone:
            del self._tuned_at[cross]
        new = [cross for cross in dict.fromkeys(add) if cross not in self._tuned_at]
        for cross in new:
            holders = [held for held, at in self._tuned_at.items() if at is not None and _clash(held, cross)]
            loser = [cross] if len(add) == 1 and holders else holders
            self._tuned_at[cross] = self._done_at(asyncio.get_running_loop().time())
            for each in loser:
                self._tuned_at[each] = None
        if new or gone:
            self._busy_until = self._done_at(asyncio.get_running_loop().time())
            self.num_changes += 1
            self.changed.set()
        return len(gone), len(add)

    def status(self) -> dict[Cross, Status]:
        """Every configured circuit, sorted."""
        return {cross: self._status(cross) for cross in sorted(self._tuned_at)}

    def lit(self) -> tuple[Cross, ...]:
        """The circuits that carry light now, sorted."""
        return tuple(cross for cross, status in self.status().items() if status == "tuned")

    def next_light_at(self) -> float | None:
        """Loop time at which the next circuit will carry light; None while no mirror moves."""
        now = asyncio.get_running_loop().time()
        return min((at for at in self._tuned_at.values() if at is not None and at > now), default=None)

    def _status(self, cross: Cross) -> Status:
        at = self._tuned_at[cross]
        if at is None:
            return "invalid"
        if self.dead_ports & set(cross):
            return "failed"
        return "tuned" if asyncio.get_running_loop().time() >= at else "tuning"

    def _done_at(self, now: float) -> float:
        return max(now, self._busy_until) + self.delay_s


def _clash(a: Cross, b: Cross) -> bool:
    return a.ingress == b.ingress or a.egress == b.egress
