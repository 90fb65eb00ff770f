"""Brings the switch to the circuits that are wanted, from whatever it has: it goes by what it reads, never by what it remembers.

validate → fence → drain → apply → tune → verify → commit, which also undrains. Each stage may be the last of this process: the next controller
finds the ledger at `changing`, reads the switch and goes through all stages again.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import msgspec
from structlog.typing import FilteringBoundLogger

from rubato.actors.fabric.driver import FabricError, NotTheWriter, NotTuned, OcsDriver, Status, SwitchState, check, text
from rubato.planning.circuits import Cross
from rubato.runtime.store.store import Fence, Store, StoreUnavailable

KEY = "fabric/circuits"
LEASE = "fabric/switch"


class LedgerUnavailable(FabricError):
    """The store can't be reached: what can't be recorded is not changed, and the circuits stay."""


class CircuitRecord(msgspec.Struct, frozen=True):
    """The record that all may read. While `stage` is `changing`, nothing may be sent over `draining`."""

    change: int = msgspec.field(default=0, name="epoch")
    """Its number, by the name under which it is stored."""
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
        """Fence: from here on no traffic takes what will go dark. Raises NotTheWriter, LedgerUnavailable, or Fenced for a zombie."""
        await self.hold()
        good = self.entry.good
        await self._write(CircuitRecord(self.entry.change + 1, "changing", phase, good, target, draining))

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
        await self._write(CircuitRecord(self.entry.change, "committed", phase, lit, lit))

    async def _write(self, entry: CircuitRecord) -> None:
        try:
            await self._store.write({KEY: msgspec.msgpack.encode(entry)}, fence=self._fence())
        except StoreUnavailable as error:
            raise LedgerUnavailable(f"the store is away, circuits stay: {error}") from error
        self.entry = entry


Stage = Literal["idle", "validate", "fence", "drain", "apply", "tune", "verify", "commit", "rollback"]

FIRST_PAUSE: Final = 0.25
MOST_PAUSE_S: Final = 0.5
"""Between two looks at mirrors that move: a quarter of the reconfiguration time at first, then twice as long each time."""


class CircuitOutcome(NamedTuple):
    """What became of each circuit that was wanted."""

    circuits: dict[Cross, Status | Literal["missing"]]

    @property
    def dark(self) -> tuple[Cross, ...]:
        return tuple(sorted(cross for cross, status in self.circuits.items() if status != "tuned"))


class PortsFailed(NotTuned):
    """Some circuits failed for good, the rest carry light: plan again without their ports."""

    def __init__(self, outcome: CircuitOutcome) -> None:
        self.ports = frozenset(port for c, s in outcome.circuits.items() if s == "failed" for port in c)
        super().__init__(f"circuits {', '.join(map(text, outcome.dark))} failed; their ports are left out from now on")


class Reconciler:
    """One change at a time. `entered` is called with every stage, when it begins."""

    def __init__(
        self,
        driver: OcsDriver,
        ledger: CircuitLedger,
        log: FilteringBoundLogger,
        entered: Callable[[Stage], None],
        *,
        drain_s: float,
        tune_timeout_s: float,
    ) -> None:
        self.driver = driver
        self._ledger = ledger
        self._log = log
        self._entered = entered
        self._drain_s = drain_s
        self._tune_timeout_s = tune_timeout_s

    async def reach(self, wanted: tuple[Cross, ...], phase: str, observed: SwitchState | None = None) -> CircuitOutcome:
        """Make the switch hold exactly `wanted`, all tuned, and commit it. `observed` is what was just read from it, if it was.

        A change that was applied in part, or lied about, is made once more. Otherwise the last good circuits are restored as
        far as the switch goes along, and the FabricError says why. Raises PortsFailed, without a rollback, where only dead
        ports stand in the way.
        """
        try:
            return await self._change(wanted, phase, observed)
        except (PortsFailed, NotTheWriter, LedgerUnavailable):
            raise
        except FabricError as error:
            await self._roll_back(wanted, phase, error)
            raise
        finally:
            self._entered("idle")

    async def _change(self, wanted: tuple[Cross, ...], phase: str, observed: SwitchState | None) -> CircuitOutcome:
        self._entered("validate")
        check(wanted, self.driver.capabilities.num_ports)
        state = observed or await self.driver.read()
        draining = tuple(sorted(set(state.lit) - set(wanted)))
        self._entered("fence")
        await self._ledger.begin(wanted, phase, draining)
        self._entered("drain")
        if draining:
            await asyncio.sleep(self._drain_s)
        try:
            outcome = await self._attempt(wanted, state)
        except PortsFailed:
            raise
        except FabricError as error:
            self._log.warning("circuits_tried_again", phase=phase, why=str(error))
            await self._ledger.hold()
            outcome = await self._attempt(wanted, await self.driver.read(), anew=True)
        self._entered("commit")
        await self._ledger.commit(wanted, phase)
        return outcome

    async def _attempt(self, wanted: tuple[Cross, ...], state: SwitchState, *, anew: bool = False) -> CircuitOutcome:
        """What is there and lit stays; what is wanted and not lit is deleted and added anew, since adding alone changes nothing.

        Mirrors that still move are waited for, but with `anew` given another push.
        """
        usable = ("tuned",) if anew else ("tuned", "tuning")
        keep = {cross for cross in wanted if state.circuits.get(cross) in usable}
        delete = tuple(sorted(set(state.circuits) - keep))
        add = tuple(sorted(set(wanted) - keep))
        self._entered("apply")
        if delete or add:
            await self.driver.apply(delete, add)
        self._entered("tune")
        outcome = await self._tuned(wanted, changed=bool(add))
        self._entered("verify")
        held = set((await self.driver.read()).circuits)
        if any(status == "failed" for status in outcome.circuits.values()):
            raise PortsFailed(outcome)
        if outcome.dark or held != set(wanted):
            extra = len(held - set(wanted))
            raise NotTuned(f"{len(outcome.dark)} of {len(wanted)} circuits carry no light, {extra} others are there")
        return outcome

    async def _tuned(self, wanted: tuple[Cross, ...], *, changed: bool) -> CircuitOutcome:
        """Look until every circuit is tuned or beyond hope, or until the time is up."""
        loop, delay_s = asyncio.get_running_loop(), self.driver.capabilities.reconfiguration_s
        give_up = loop.time() + delay_s + self._tune_timeout_s
        pause_s = delay_s if changed else 0.0
        again_s = max(1e-3, FIRST_PAUSE * delay_s)
        while True:
            await asyncio.sleep(pause_s)
            found = (await self.driver.read()).circuits
            outcome = CircuitOutcome({cross: found.get(cross, "missing") for cross in wanted})
            if "tuning" not in outcome.circuits.values() or loop.time() >= give_up:
                return outcome
            pause_s, again_s = again_s, min(MOST_PAUSE_S, 2 * again_s)

    async def _roll_back(self, wanted: tuple[Cross, ...], phase: str, why: FabricError) -> None:
        """Restore the last good circuits; that this fails too is only logged, since `why` is about to be raised."""
        good = self._ledger.entry.good
        if not good or good == wanted:
            return
        self._entered("rollback")
        try:
            await self._ledger.hold()
            await self._attempt(good, await self.driver.read(), anew=True)
            await self._ledger.commit(good, phase)
            self._log.warning("circuits_rolled_back", phase=phase, num=len(good), why=str(why))
        except FabricError as error:
            self._log.warning("rollback_failed", phase=phase, why=str(error))
