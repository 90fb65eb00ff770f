"""Decides when attempts fail so often that no further one can be expected to succeed."""

from collections.abc import Collection

FIRST = 32
"""When this many attempts ended and none got through, none ever will."""

RECENT = 64
"""Window of the share below: eight groups of eight."""

MAX_SHARE = 0.95
"""Above this share of failures nothing is left to learn from."""


def is_hopeless(failed: Collection[bool], *, ever_good: bool) -> bool:
    """`failed` says of each of the newest `RECENT` attempts, or fewer, whether it failed; `ever_good` whether any attempt ever got through."""
    num = len(failed)
    if num < FIRST:
        return False
    return not ever_good or (num == RECENT and sum(failed) > MAX_SHARE * num)
