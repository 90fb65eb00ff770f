"""Owns what must outlive the controller: the circuits that are good, the change under way, and who may write to the switch."""

from collections.abc import Callable
from typing import Literal

import msgspec

from actors.fabric.errors import FabricError, NotTheWriter
from planning.circuits import Cross
from runtime.store.errors import StoreUnavailable
from runtime.store.store import Fence, Store

KEY = "fabric/circuits"
LEASE = "fabric/switch"


class LedgerUnavailable(FabricError):
    """The store can't be reached: what can't be recorded is not changed, and the circuits stay."""


class CircuitRecord(msgspec.Struct, frozen=True):
    """The record that all may read. While `stage` is `changing`, nothing may be sent over `draining`."""

    epoch: int = 0
    stage: Literal["committed", "changing"] = "committed"
    phase: str = ""
    good: tuple[Cross, ...] = ()
    """Committed last: known to have been tuned, together."""
    target: tuple[Cross, ...] = ()
    draining: tuple[Cross, ...] = ()


class CircuitLedger:
    """One writer: each write is fenced by the controller's incarnation, each attempt at the switch begins with its lease.

    `fence` is asked at each write: a controller whose own lease lapsed goes on as a newer incarnation. `lease_s` outlasts one attempt; a
    dead controller's successor has a higher token and need not wait for it.
    """

    def __init__(self, store: Store, fence: Callable[[], Fence], *, lease_s: float) -> None:
        self._store, self._fence, self._lease_s = store, fence, lease_s
        self.entry = CircuitRecord()

    async def load(self) -> None:
        """Take up what the last controller left. A record that can't be read is as none: the switch itself is read anyway."""
        value = await self._store.get(KEY)
        if value is not None:
            try:
                self.entry = msgspec.msgpack.decode(value, type=CircuitRecord)
            except msgspec.MsgspecError:
                self.entry = CircuitRecord()

    async def begin(self, target: tuple[Cross, ...], phase: str, draining: tuple[Cross, ...]) -> None:
        """Fence: from here on nobody uses what will go dark. Raises NotTheWriter, LedgerUnavailable, or Fenced for a zombie."""
        await self.hold()
        good = self.entry.good
        await self._write(CircuitRecord(self.entry.epoch + 1, "changing", phase, good, target, draining))

    async def hold(self) -> None:
        """Take or renew the lease of the switch. Raises NotTheWriter or LedgerUnavailable: the switch must be left alone then."""
        name, token = self._fence()
        try:
            if not await self._store.lease(LEASE, token, name.encode(), self._lease_s):
                raise NotTheWriter(f"another controller than {name} holds the lease of the switch")
        except StoreUnavailable as error:
            raise LedgerUnavailable(f"the store is away, circuits stay: {error}") from error

    async def commit(self, lit: tuple[Cross, ...], phase: str) -> None:
        """Undrain: `lit` is good, and may be used."""
        await self._write(CircuitRecord(self.entry.epoch, "committed", phase, lit, lit))

    async def _write(self, entry: CircuitRecord) -> None:
        try:
            await self._store.write({KEY: msgspec.msgpack.encode(entry)}, fence=self._fence())
        except StoreUnavailable as error:
            raise LedgerUnavailable(f"the store is away, circuits stay: {error}") from error
        self.entry = entry
