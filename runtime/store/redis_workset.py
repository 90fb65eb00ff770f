"""RedisWorkSet: the WorkSet as Lua scripts, one per method, so that each is atomic and can be sent again."""

from collections.abc import Sequence
from typing import Literal, cast

from runtime.store.errors import StoreError, claimed_early, claimed_late, fenced, skipped, stale_epoch
from runtime.store.limits import check_integer, check_item, check_note
from runtime.store.redis_link import CLAIM, Argument, RedisLink, Rejected, Reply, Script, script
from runtime.store.store import Fence
from runtime.store.workset import Claimed, Counts, Ended, Item


class RedisWorkSet:
    """A `WorkSet` whose keys start with `key`, fenced by the hash `fences`; scripts/workset.lua lists them."""

    def __init__(self, link: RedisLink, key: str, fences: str, fence: Fence | None) -> None:
        self._link = link
        self._key = key
        self._fences = fences
        self._fence = fence

    async def put(self, item: Item) -> Literal["stored", "duplicate"]:
        check_item(item)
        packed = b"%d:%b" % (item.score, item.payload)
        stored = await self._once("put", item.id, item.group, item.score, packed, item.note)
        return "stored" if stored else "duplicate"

    async def end(self, id: str, group: str, fate: str, note: bytes = b"") -> bool:  # noqa: A002
        check_note(id, note)
        return bool(await self._once("end", id, group, fate, note))

    async def seal(self, group: str, fate: str, num: int = 1) -> bool:
        return bool(await self._once("seal", group, fate, num))

    async def discard(self, group: str, fate: str) -> int:
        return int(await self._once("discard", group, fate))

    async def claim(self, num: int, min_score: int, step: int, epoch: int) -> Claimed:
        check_integer("num", num, least=1)
        check_integer("step", step, least=1)
        check_integer("min_score", min_score)
        check_integer("epoch", epoch, least=0)
        try:
            reply = await self._change(CLAIM, num, min_score, step, epoch)
        except Rejected as error:
            raise _refusal(error, step, epoch) from None
        ready, dropped, flat = cast("tuple[int, list[bytes], list[Reply]]", reply)
        bound = [(_text(flat[at]), flat[at + 1], flat[at + 2]) for at in range(0, len(flat), 3)]
        contents = await self._link.fields([(f"{self._key}:group:{group}", ids) for group, ids, _ in bound])
        try:
            groups = tuple(
                (group, _items(group, ids, notes, content))
                for (group, ids, notes), content in zip(bound, contents, strict=True)
            )
        except _Gone:
            raise claimed_late(step, step) from None  # a claimer that replaced this one has committed it
        return Claimed(groups, tuple(map(_text, dropped)), ready)

    async def commit(self, step: int, epoch: int) -> int:
        check_integer("step", step, least=1)
        check_integer("epoch", epoch, least=0)
        try:
            return int(await self._once("commit", step, epoch))
        except Rejected as error:
            raise _refusal(error, step, epoch) from None

    async def new_epoch(self, at_least: int = 0) -> int:
        check_integer("at_least", at_least)
        what = script("once", "fence", "workset", "above", "new_epoch")
        return int(await self._change(what, at_least, keys=(self._link.key("marks"),)))

    async def members(self, group: str) -> tuple[str, ...]:
        ids = cast("list[bytes]", await self._link.ask(script("members"), (f"{self._key}:group:{group}",)))
        return tuple(sorted(map(_text, ids)))

    async def ended(self, after: int, *, limit: int = 1000) -> list[Ended]:
        check_integer("limit", limit, least=1)
        first = f"0-{max(after, 0) + 1}"
        entries = cast(
            "list[tuple[bytes, list[bytes]]]", await self._link.ask(script("ended"), (self._log,), first, limit)
        )
        return [_ended(entry, fields) for entry, fields in entries]

    async def trim(self, through: int) -> None:
        last = max(through, 0)
        await self._link.ask(script("trim"), (self._log, f"{self._key}:seen"), f"0-{last}", f"0-{last + 1}")

    async def counts(self) -> Counts:
        reply = await self._link.ask(script("once", "workset", "counts"), (self._key, self._key))
        *sizes, steps = cast("tuple[int, int, int, int, int, int, list[bytes]]", tuple(reply))
        return Counts(*sizes, bound_steps=tuple(map(int, steps)))

    @property
    def _log(self) -> str:
        return f"{self._key}:log"

    async def _once(self, name: str, *args: Argument) -> Reply:
        return await self._change(script("once", "fence", "workset", name), *args)

    async def _change(self, what: Script, *args: Argument, keys: tuple[str, ...] = ()) -> Reply:
        """Raises Fenced, and Rejected for what only the caller can tell."""
        name, token = ("", "") if self._fence is None else self._fence
        try:
            return await self._link.once(what, (self._key, self._fences, *keys), name, token, *args)
        except Rejected as error:
            if self._fence is None or error.code != "FENCED":
                raise
            raise fenced(self._fence.name, self._fence.token, error.number) from None


def _refusal(error: Rejected, step: int, epoch: int) -> StoreError:
    if error.code == "STALE_EPOCH":
        return stale_epoch(epoch, error.number)
    if error.code == "CLAIMED_EARLY":
        return claimed_early(step, error.number)
    return claimed_late(step, error.number) if error.code == "CLAIMED_LATE" else skipped(step, error.number)


def _text(name: bytes) -> str:
    return name.decode()


class _Gone(Exception):
    """An item that was bound is there no more."""


def _items(
    group: str, ids: Sequence[bytes], notes: Sequence[bytes], content: Sequence[bytes | None]
) -> tuple[Item, ...]:
    """`content` has "<score>:<payload>" of each id."""
    items: list[Item] = []
    for name, note, packed in zip(ids, notes, content, strict=True):
        if packed is None:
            raise _Gone
        score, _, payload = packed.partition(b":")
        items.append(Item(_text(name), group, int(score), payload, note))
    return tuple(items)


def _ended(entry: bytes, fields: list[bytes]) -> Ended:
    _, item_id, _, group, _, fate, _, step, _, epoch, _, note = fields
    index = int(entry.partition(b"-")[2])
    return Ended(index, _text(item_id), _text(group), _text(fate), int(step), int(epoch), note)
