"""Decides when one of several workers fails so often, while the others do not, that it gets nothing to do for a while.

What fails everywhere is no reason: see planning/hopeless.py for that.
"""

from dataclasses import dataclass

STREAK = 6
"""Tasks in a row that failed, after which a worker is set aside: fewer than make a whole job hopeless."""

PAUSE_S = 10.0
PAUSE_MAX_S = 600.0
"""Its first pause, in seconds; each one that ends in another failure is followed by one of twice the length, up to this."""


@dataclass(frozen=True, slots=True)
class QuarantineView:
    """One worker beside the others."""

    failed: int
    """Tasks that failed on it in a row."""
    others_good: bool
    """Whether there is another worker that got through before and does not fail like this itself."""
    pauses: int = 0
    """How often it was set aside without getting through once since."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How long the worker gets nothing to do, in seconds; 0 for not at all."""

    pause_s: float
    why: str


def quarantine(view: QuarantineView) -> Quarantine:
    """Whether the worker is set aside now. After a pause it is tried with one task, whose failure is enough."""
    enough = 1 if view.pauses else STREAK
    if view.failed < enough:
        return Quarantine(0.0, f"{view.failed} tasks in a row failed, of {enough}")
    if not view.others_good:
        return Quarantine(0.0, "no other one gets through either")
    doublings = min(view.pauses, 32)
    pause_s = min(PAUSE_S * 2**doublings, PAUSE_MAX_S)
    again = f"again, after {view.pauses} pauses" if view.pauses else f"on {view.failed} tasks in a row"
    return Quarantine(pause_s, f"its environments failed {again}, while those of others did not")
