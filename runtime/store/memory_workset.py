"""MemoryWorkSet: the WorkSet's rules in plain Python; the Lua scripts are its twins and must give equal results."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Literal

from runtime.store.errors import claimed_early, claimed_late, skipped, stale_epoch
from runtime.store.limits import check_integer, check_item, check_note
from runtime.store.workset import Claimed, Counts, Ended, Item


class _Group:
    """The live items of one group. Held while `fate` is None, then ready while `step` is 0, then bound to `step`."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.fate: str | None = None
        self.step = 0

    @property
    def score(self) -> int:
        return min(item.score for item in self.items.values())


class MemoryWorkSet:
    """A `WorkSet` in this process. Items of a group come and end in the order of their ids, groups by (score, id)."""

    def __init__(self, next_epoch: Callable[[int], int]) -> None:
        self._next_epoch = next_epoch
        self._seen: set[str] = set()
        self._groups: dict[str, _Group] = {}
        self._log: list[Ended] = []
        self._num_ended = 0
        self._committed = 0
        self._epoch = 0

    async def put(self, item: Item) -> Literal["stored", "duplicate"]:
        check_item(item)
        if item.id in self._seen:
            return "duplicate"
        self._seen.add(item.id)
        group = self._groups.setdefault(item.group, _Group())
        if group.fate is None:
            group.items[item.id] = item
        else:
            self._log_end(item.id, item.group, "late", item.note)
        return "stored"

    async def end(self, id: str, group: str, fate: str, note: bytes = b"") -> bool:  # noqa: A002
        check_note(id, note)
        if id in self._seen:
            return False
        self._seen.add(id)
        self._log_end(id, group, fate, note)
        return True

    async def seal(self, group: str, fate: str, num: int = 1) -> bool:
        found = self._groups.get(group)
        if found is None or found.fate is not None or len(found.items) < num:
            return False
        found.fate = fate
        return True

    async def discard(self, group: str, fate: str) -> int:
        found = self._groups.get(group)
        return 0 if found is None or found.step else self._end_group(group, fate)

    async def claim(self, num: int, min_score: int, step: int, epoch: int) -> Claimed:
        check_integer("num", num, least=1)
        check_integer("step", step, least=1)
        check_integer("min_score", min_score)
        self._refuse_old(epoch)
        if step <= self._committed:
            raise claimed_late(step, self._committed)
        if step != self._committed + 1 and not self._bound_to(step) and not self._bound_to(step - 1):
            raise claimed_early(step, self._committed)
        self._epoch = epoch
        if self._bound_to(step):
            return self._claimed(step, ())
        ready = self._ready()
        dropped = tuple(name for name in ready if self._groups[name].score < min_score)
        for name in dropped:
            self._end_group(name, "stale")
        fresh = ready[len(dropped) :]
        if len(fresh) >= num:
            for name in fresh[:num]:
                self._groups[name].step = step
        return self._claimed(step, dropped)

    async def commit(self, step: int, epoch: int) -> int:
        check_integer("step", step, least=1)
        self._refuse_old(epoch)
        if step <= self._committed:
            return 0
        if step != self._committed + 1:
            raise skipped(step, self._committed)
        self._epoch, self._committed = epoch, step
        return sum(
            self._end_group(name, self._groups[name].fate or "", step=step, epoch=epoch)
            for name in self._bound_to(step)
        )

    async def new_epoch(self, at_least: int = 0) -> int:
        check_integer("at_least", at_least)
        self._epoch = max(self._next_epoch(self._epoch), at_least)
        return self._epoch

    async def members(self, group: str) -> tuple[str, ...]:
        found = self._groups.get(group)
        return () if found is None else tuple(sorted(found.items))

    async def ended(self, after: int, *, limit: int = 1000) -> list[Ended]:
        check_integer("limit", limit, least=1)
        start = bisect_right(self._log, after, key=lambda entry: entry.index)
        return self._log[start : start + limit]

    async def trim(self, through: int) -> None:
        num = bisect_right(self._log, through, key=lambda entry: entry.index)
        self._seen.difference_update(entry.id for entry in self._log[:num])
        del self._log[:num]

    async def counts(self) -> Counts:
        groups = self._groups.values()
        return Counts(
            held=sum(len(group.items) for group in groups if group.fate is None),
            ready=len(self._ready()),
            bound=sum(len(group.items) for group in groups if group.step),
            ended=self._num_ended,
            committed=self._committed,
            epoch=self._epoch,
            bound_steps=tuple(sorted({group.step for group in groups if group.step})),
        )

    def _refuse_old(self, epoch: int) -> None:
        """A newer epoch than any handed out passes, and is adopted: a store that was lost no longer remembers it."""
        check_integer("epoch", epoch, least=0)
        if epoch < self._epoch:
            raise stale_epoch(epoch, self._epoch)

    def _ready(self) -> list[str]:
        return self._oldest(name for name, group in self._groups.items() if group.fate is not None and not group.step)

    def _bound_to(self, step: int) -> list[str]:
        return self._oldest(name for name, group in self._groups.items() if group.step == step)

    def _oldest(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (self._groups[name].score, name))

    def _claimed(self, step: int, dropped: tuple[str, ...]) -> Claimed:
        groups = tuple(
            (name, tuple(item for _, item in sorted(self._groups[name].items.items()))) for name in self._bound_to(step)
        )
        return Claimed(groups, dropped, len(self._ready()))

    def _end_group(self, name: str, fate: str, *, step: int = 0, epoch: int = 0) -> int:
        items = self._groups.pop(name).items
        for item_id in sorted(items):
            self._log_end(item_id, name, fate, items[item_id].note, step=step, epoch=epoch)
        return len(items)

    def _log_end(self, item_id: str, group: str, fate: str, note: bytes, *, step: int = 0, epoch: int = 0) -> None:
        self._num_ended += 1
        self._log.append(Ended(self._num_ended, item_id, group, fate, step, epoch, note))
