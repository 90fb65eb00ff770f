"""Decides when tries fail so often that no further one can be expected to succeed. A try is whatever fails or not by itself: a task, a score."""

from collections.abc import Collection

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
