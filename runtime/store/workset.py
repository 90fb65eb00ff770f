"""The WorkSet: items that arrive in groups, are claimed by group for a numbered step, and end exactly once.

held --seal--> ready --claim(step)--> bound to step --commit(step)--> ended
  |                |
  +--- discard ----+---------------------------------------------->  ended

It knows no RL word: `score` is any integer that grows with freshness, `step` any gapless counter, `fate` any name.
Each method is one atomic Lua script on Redis, or its twin in memory.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class Item(NamedTuple):
    """`payload` is what the claimer gets; `note` is kept for the ended log. At most 64 KiB of payload: larger ones are blobs."""

    id: str
    group: str
    score: int
    payload: bytes
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class Ended:
    """One item's end. `step` and `epoch` are 0 where it never was committed. `index` counts from 1, gapless."""

    index: int
    id: str
    group: str
    fate: str
    step: int
    epoch: int
    note: bytes


class Claimed(NamedTuple):
    """`groups` is empty when fewer than asked were ready (nothing is bound then). `dropped` groups were below `min_score` and ended `stale`."""

    groups: tuple[tuple[str, tuple[Item, ...]], ...]
    dropped: tuple[str, ...]
    ready: int
    """Ready groups left."""


class Counts(NamedTuple):
    """Sizes now: items held, groups ready, items bound, items ended; last committed step, newest epoch, bound steps."""

    held: int
    ready: int
    bound: int
    ended: int
    committed: int
    epoch: int
    bound_steps: tuple[int, ...]


class WorkSet(Protocol):
    """Raises `StaleEpoch` for a claim or commit under an older epoch than the newest, and `OutOfOrder` for one that skips a step."""

    async def put(self, item: Item) -> Literal["stored", "duplicate"]:
        """Hold `item` in its group; acknowledged. An id that was put or ended, and not trimmed since, is a duplicate and changes nothing."""
        ...

    async def end(self, id: str, group: str, fate: str, note: bytes = b"") -> bool:  # noqa: A002
        """Log an item that ends without ever being held (it failed). False, and no change, when the id was seen before."""
        ...

    async def seal(self, group: str, fate: str, num: int = 1) -> bool:
        """Make a held group claimable: its score is its lowest member's, and its items end as `fate` when committed.

        False, and no change, when it is not held or has fewer than `num` items: a store that was lost may have forgotten some.
        """
        ...

    async def discard(self, group: str, fate: str) -> int:
        """End every item of a held or ready group as `fate`; returns how many. Bound groups are left alone (0)."""
        ...

    async def claim(self, num: int, min_score: int, step: int, epoch: int) -> Claimed:
        """Bind the `num` oldest ready groups (lowest score, then lowest group id) to `step`.

        Groups below `min_score` end `stale` first. A step that is bound already returns its groups again, whatever
        `num` and `min_score` say: this is how a restarted claimer replays. A new step is bound only while the one before it is
        bound or committed: a store that forgot a claim would hand its groups out once more.
        """
        ...

    async def commit(self, step: int, epoch: int) -> int:
        """End every item bound to `step`; returns how many. A step at or below the last committed one changes nothing (0)."""
        ...

    async def new_epoch(self, at_least: int = 0) -> int:
        """max(the next number, at_least), as `Store.increment` counts: every older epoch is refused from now on."""
        ...

    async def members(self, group: str) -> tuple[str, ...]:
        """Ids held, ready or bound in `group`, sorted."""
        ...

    async def ended(self, after: int, *, limit: int = 1000) -> list[Ended]:
        """The ended log with index > `after`, oldest first."""
        ...

    async def trim(self, through: int) -> None:
        """Forget log entries up to index `through` and their ids: what is put again under one of these is new. Bounds the memory."""
        ...

    async def counts(self) -> Counts: ...
