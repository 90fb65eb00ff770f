"""When to give up: a job in which nothing gets through any more, and, for a while, one worker that fails where others do not.

A try is whatever fails or not by itself: a task, a score.
"""

from collections.abc import Collection
from dataclasses import dataclass

FIRST = 32
"""When this many ended and none got through, none ever will."""

RECENT = 64
"""Window of the share below."""

MAX_SHARE = 0.95
"""Above this share of failures nothing is left to learn from."""


HUNG = 8
"""Where nothing got through yet, so many that hung are enough: each held a process for as long as it may, and all that work are quicker."""


def is_hopeless(failed: Collection[float], *, ever_good: bool, hung: int = 0) -> bool:
    """`failed` says of each of the newest `RECENT` tries, or fewer, how much of it failed, 0 to 1; `ever_good` whether anything ever got
    through; `hung` how many tries did not come back, among them such as are not over yet."""
    num = len(failed)
    if hung >= HUNG and not ever_good:
        return True
    if num < FIRST:
        return False
    return not ever_good or (num == RECENT and sum(failed) > MAX_SHARE * num)


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
