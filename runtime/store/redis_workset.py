"""RedisWorkSet: the WorkSet as one Lua script per act; see scripts/workset.lua for the keys."""

from typing import Any, Literal

import msgpack

from runtime.store.errors import OutOfOrder, StaleEpoch
from runtime.store.limits import check_integer, check_item, check_note
from runtime.store.redis_client import Client
from runtime.store.workset import Claimed, Counts, Ended, Item

STALE_EPOCH, OUT_OF_ORDER = -1, -2


class RedisWorkSet:
    """A `WorkSet` on Redis. A repeated `put` answers `duplicate`, a repeated `seal` or `end` False: the first one counted."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def put(self, item: Item) -> Literal["stored", "duplicate"]:
        check_item(item)
        stored = await self._run("put", item.id, item.group, item.score, item.payload, item.note)
        return "stored" if stored else "duplicate"

    async def end(self, id: str, group: str, fate: str, note: bytes = b"") -> bool:  # noqa: A002
        check_note(id, note)
        return bool(await self._run("end", id, group, fate, note))

    async def seal(self, group: str, fate: str) -> bool:
        return bool(await self._run("seal", group, fate))

    async def discard(self, group: str, fate: str) -> int:
        return int(await self._run("discard", group, fate))

    async def claim(self, num: int, min_score: int, step: int, epoch: int) -> Claimed:
        check_integer("num", num, least=1)
        check_integer("step", step, least=1)
        check_integer("min_score", min_score)
        check_integer("epoch", epoch, least=0)
        reply = self._checked(await self._run("claim", num, min_score, step, epoch), step, epoch)
        _, groups, dropped, ready = reply
        return Claimed(
            tuple((group.decode(), tuple(_item(group, row) for row in rows)) for group, rows in groups),
            tuple(name.decode() for name in dropped),
            int(ready),
        )

    async def commit(self, step: int, epoch: int) -> int:
        check_integer("step", step, least=1)
        check_integer("epoch", epoch, least=0)
        reply = await self._run("commit", step, epoch)
        return int(self._checked(reply, step, epoch)) if not isinstance(reply, int) else reply

    async def new_epoch(self, at_least: int = 0) -> int:
        check_integer("at_least", at_least)
        return int(await self._run("new_epoch", at_least))

    async def members(self, group: str) -> tuple[str, ...]:
        return tuple(name.decode() for name in await self._run("members", group))

    async def ended(self, after: int, *, limit: int = 1000) -> list[Ended]:
        check_integer("limit", limit, least=1)
        return [_ended(packed) for packed in await self._run("ended", after, limit)]

    async def trim(self, through: int) -> None:
        await self._run("trim", through)

    async def counts(self) -> Counts:
        *numbers, steps = await self._run("counts")
        return Counts(*map(int, numbers), bound_steps=tuple(sorted(int(step) for step in steps)))

    async def _run(self, verb: str, *arguments: object) -> Any:
        return await self._client.script("workset", [self._prefix], [verb, *arguments])

    def _checked(self, reply: Any, step: int, epoch: int) -> Any:
        if reply[0] == STALE_EPOCH:
            raise StaleEpoch(f"epoch {epoch} acts, but {reply[1]} is the newest: another claimer took over")
        if reply[0] == OUT_OF_ORDER:
            raise OutOfOrder(f"step {step} was asked for, but {reply[1]} is the last committed one")
        return reply


def _item(group: bytes, row: list[bytes]) -> Item:
    item_id, score, payload, note = row
    return Item(item_id.decode(), group.decode(), int(score), payload, note)


def _ended(packed: bytes) -> Ended:
    index, item_id, group, fate, step, epoch, note = msgpack.unpackb(packed, raw=True)
    return Ended(int(index), item_id.decode(), group.decode(), fate.decode(), int(step), int(epoch), note)
