"""FabricController: gives each phase of the job its circuits, ahead of time once it knows the rhythm of the phases."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

from rubato.actors.config import WeightsSection
from rubato.actors.fabric.connect import check_driver, device, emulated
from rubato.actors.fabric.driver import FabricError, NotTheWriter, SwitchState
from rubato.actors.fabric.reconciler import CircuitLedger, LedgerUnavailable, PortsFailed, Reconciler, Stage
from rubato.actors.fabric.rhythm import Accounts, Aim, Aims, Rhythm
from rubato.actors.fabric.section import FabricSection
from rubato.actors.fabric.templates import Templates, Windows, choose
from rubato.actors.fabric.traffic import Meter, Racks
from rubato.actors.messages.fabric import (
    AskCircuits,
    AwaitCircuits,
    Circuit,
    CircuitsPromised,
    CircuitsReady,
    FabricReport,
    InspectFabric,
    NoCircuits,
    PhaseWindows,
    ReleaseCircuits,
)
from rubato.actors.messages.phases import PhaseIntent
from rubato.planning.circuits import CircuitPlan, Cross, FabricSnapshot, Verdict, plan
from rubato.planning.demand import Links
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.importer import check_module
from rubato.runtime.kernel import Kernel
from rubato.runtime.store.store import Fence, StoreUnavailable

RESHARD = "reshard"
"""Stands for the phase where circuits are asked for."""

LEAD = 2.0
"""A change ahead of time begins this many delays before the phase is expected: a healthy job's phases jitter by less."""

UNDISTURBED = 0.5
"""Share of the running phase that a change for the next one never touches."""

BUSY = 1.25
"""Nor the time in which its bytes are under way, by its template: transfers reach four fifths of a link's rate, or more."""

RETRY_S = 0.5
"""First pause before asking a switch that failed again; doubles up to `RETRY_MAX_S`."""

RETRY_MAX_S = 30.0

ASKER = "orchestrator"
"""What it asked for between two phases is over when it goes away."""

NO_SWITCH = "no optical switch is ready"


class FabricController(Actor):
    """Handlers only note what is wanted; one loop makes it so. Without a switch the electrical path carries everything."""

    role = "fabric_controller"
    drain_order = 90

    class Config(ActorConfig):
        fabric: FabricSection = FabricSection()
        weights: WeightsSection = WeightsSection()

    config: Config

    @classmethod
    def check_host(cls, config: Any) -> None:
        """The files by which the switch and the controller know each other, and a planner of the user's."""
        check_driver(config.fabric)
        if ":" in config.fabric.planner:
            check_module(config.fabric.planner, key="fabric.planner")

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = section = config.fabric
        by_rings = config.weights.broadcast == "rings"
        self._racks = Racks(section.racks, self.directory.find, self.peers, by_rings=by_rings)
        self._templates = Templates(section, self._racks.names)
        self._meter = Meter(self)
        self._gone: set[str] = set()
        """Endpoints that left, and keep their ports until the phase is over: one that is started again is there by then."""
        self._windows = Windows(self._templates)
        self._unsaved = False
        self._rhythm = Rhythm()
        self._begun: dict[str, int] = {}
        self._aims = Aims()
        self._asked = AskedCircuits()
        self._ledger = CircuitLedger(self.store, self._fence, lease_s=section.attempt_s)
        self._reconciler: Reconciler | None = None
        self._at_switch = asyncio.Lock()
        """Held by who talks to the switch."""
        self._stage: Stage = "idle"
        self._circuits: tuple[Cross, ...] = ()
        self._accounts = Accounts(self.metrics, section.reconfiguration_s)
        self._failures = 0
        self._electrical = False

    async def on_start(self) -> None:
        await self._templates.load(self.store)
        self._gone = {name for name in self._templates.book.endpoints if not self._racks.names and self.directory.find(name) is None}
        await self._ledger.load()
        if self._section.enabled:
            if self._ledger.entry.stage == "changing":
                self._aim_at_present(self._ledger.entry.phase, restore=True)
            elif self._racks.names:
                self._aim_at_present("", restore=True)
            self.spawn(self._reconcile(), name=f"{self.name}.reconcile")

    async def on_stop(self) -> None:
        await self._disconnect()

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        self._gone = self._gone.union(left).difference(joined)
        if any(name.rpartition("-")[0] == ASKER for name in left):
            self._take_back()
        if any(name.rpartition("-")[0] == "optical_switch" for name in (*joined, *left)):
            await self._disconnect()
            self._templates.without(frozenset())
            self._aim_at_present(self._rhythm.phase or self._ledger.entry.phase, restore=True)

    @handler
    async def phase_intent(self, message: PhaseIntent) -> None:
        """Never waits for the switch. A phase that was said to begin under this number, or a later one, is not begun again."""
        if not self._section.enabled:
            return
        now = asyncio.get_running_loop().time()
        traffic = self._racks.traffic(message.phase, message.traffic)
        self._gone.difference_update(name for source, target, _ in traffic for name in (source, target))
        if self._templates.learn(message.phase, traffic, whole=message.phase == "weight_sync"):
            self._planned_anew(message.phase)
        if message.in_s > 0:
            running = self._rhythm.phase
            if message.phase == running or not self._templates.ends_with_traffic(running):
                self._aim_at_coming(message.phase, now + message.in_s, not_before=now)
        elif message.number > self._begun.get(message.phase, -1):
            self._begun[message.phase] = message.number
            if message.phase != self._rhythm.phase:  # its next round may as well be the same one, as told by another actor
                self._is_over(self._rhythm.phase)
            self.metrics.gauge(f"fabric/phase/{message.phase}", 1)
            self._rhythm.began(message.phase, now)
            self._aims.coming = None
            self._aim_at_present(message.phase)
            self._aims.within(self._windows.aims(message.phase, now, self._accounts.delay_s))

    @handler
    async def phase_windows(self, message: PhaseWindows) -> None:
        """Circuits change between them from the next round of the phase on."""
        try:
            if self._section.enabled and self._windows.note(message, self._racks.traffic):
                self._unsaved = True
        except ValueError as error:
            self.log.warning("windows_refused", phase=message.phase, why=str(error))

    @handler(concurrency=16)
    async def ask_circuits(self, request: AskCircuits) -> CircuitsPromised | NoCircuits:
        """Promised unless the electrical path carries everything, or a phase is expected before they could be lit.

        That they are lit already is said by the switch, not by what the controller remembers of it.
        """
        links = self._templates.links_for(self._racks.traffic(RESHARD, request.traffic))
        now, delay_s = asyncio.get_running_loop().time(), self._accounts.delay_s
        aim = Aim(RESHARD, now, now, restore=True, links=links, asked=request.number)
        if self._seems_lit(aim) and (why_not := await self._looked()):
            return NoCircuits(why_not)
        now, coming = asyncio.get_running_loop().time(), self._aims.coming
        if request.number <= self._asked.number:
            return NoCircuits(f"ask {request.number} comes after ask {self._asked.number}")
        if not self._section.enabled or self._electrical:
            return NoCircuits("the electrical path carries everything")
        if links is None:
            return NoCircuits("no circuit would serve this traffic")
        planned = self._plan(aim, links, restore=True)
        if self._seems_lit(aim):
            self._asked.begin(request.number)
            self._asked.settle()
            return CircuitsPromised(request.number, 0.0, planned.verdict)
        ready_in_s = delay_s * (1 + (self._stage != "idle"))
        busy = f"those of {coming.phase} begin to change in {coming.due - now:.3g} s" if coming else ""
        if ready_in_s > request.within_s or (coming is not None and coming.due < now + ready_in_s):
            late = f"they would be ready in {ready_in_s:.3g} s"
            return NoCircuits(f"{late}, {busy}" if busy else f"{late}, wanted within {request.within_s:.3g} s")
        self._asked.begin(request.number)
        self._aims.now(aim)
        return CircuitsPromised(request.number, ready_in_s, planned.verdict)

    def _seems_lit(self, aim: Aim) -> bool:
        """As far as is known since the switch was last read, and nothing is about to change that."""
        idle = self._section.enabled and not self._electrical and self._stage == "idle" and self._aims.present is None
        return idle and aim.links is not None and not self._plan(aim, aim.links, restore=True).reconfigure

    async def _looked(self) -> str:
        """Read the switch, once no change is under way; why it can't be read, else empty."""
        async with self._at_switch:
            if self._switch() and not self.peers(self._switch()):
                return NO_SWITCH
            try:
                await self._read()
            except FabricError as error:
                return str(error)
        return ""

    @handler(concurrency=16)
    async def await_circuits(self, request: AwaitCircuits) -> CircuitsReady | NoCircuits:
        return await self._asked.outcome(request.number)

    @handler
    async def release_circuits(self, message: ReleaseCircuits) -> None:
        if message.number == self._asked.number:
            self._take_back()

    @handler
    async def inspect_fabric(self, request: InspectFabric) -> FabricReport:
        totals = self.metrics.snapshot()
        return FabricReport(
            phase=self._rhythm.phase,
            change=self._ledger.entry.change,
            stage=self._stage,
            electrical=self._electrical,
            reconfigurations=int(totals.get("fabric/reconfigurations", 0)),
            hidden_s=totals.get("fabric/hidden_s", 0.0),
            exposed_s=totals.get("fabric/exposed_s", 0.0),
            circuits=tuple(Circuit(*cross) for cross in self._circuits),
        )

    # -- what the job shows ----------------------------------------------------------------------------------------

    def _is_over(self, phase: str) -> None:
        """What left during it gives its ports back, and what was sent in it is counted."""
        if phase:
            self.metrics.gauge(f"fabric/phase/{phase}", 0)
            if self._templates.leave(self._gone):
                self.log.info("endpoints_left", names=sorted(self._gone))
                self._planned_anew(phase)
            self._gone.clear()
        if phase != "weight_sync":  # of which the trainer tells: messages meanwhile are of the rollouts that begin
            self.spawn(self._count(phase), name=f"{self.name}.count")

    async def _count(self, phase: str) -> None:
        counted = await self._meter.since()
        if phase and counted is not None and self._templates.observe(phase, self._racks.between(counted)):
            self._planned_anew(phase)

    def _planned_anew(self, phase: str) -> None:
        self._unsaved = True
        self.log.info("phase_profiled", phase=phase, endpoints=sum(map(bool, self._templates.book.endpoints)))

    # -- what is wanted ---------------------------------------------------------------------------------------------

    def _aim_at_present(self, phase: str, *, restore: bool = False, pause_s: float = 0.0) -> None:
        self._asked.settle(f"those of {phase} are wanted now")
        due = asyncio.get_running_loop().time() + pause_s
        self._aims.now(Aim(phase, due, due, restore))

    def _take_back(self) -> None:
        """Circuits that were lent: the phase gets its own, unless those of the next one are about to come."""
        coming, now = self._aims.coming, asyncio.get_running_loop().time()
        if self._asked.lent and (coming is None or coming.due > now + self._accounts.delay_s):
            self._aim_at_present(self._rhythm.phase)

    def _aim_at_coming(self, phase: str, starts_at: float, *, not_before: float) -> None:
        self._aims.later(Aim(phase, max(not_before, starts_at - LEAD * self._accounts.delay_s), starts_at))

    def _look_ahead(self) -> None:
        """Aim at the phase that should follow, unless it was announced already, should have begun, or the one that runs ends with its traffic.

        What is taken from that a moment too soon goes by the electrical path for the rest of it.
        """
        if self._templates.ends_with_traffic(self._rhythm.phase):
            return
        expected, lasts = self._rhythm.next(), self._rhythm.lasts(self._rhythm.phase)
        if self._aims.coming is None and expected and lasts and expected.at > asyncio.get_running_loop().time():
            busy_s = BUSY * self._templates.busy_s(self._rhythm.phase, self._rhythm.phase)
            not_before = self._rhythm.since + max(UNDISTURBED * lasts, busy_s)
            if not_before + self._accounts.delay_s <= expected.at:
                self._aim_at_coming(expected.phase, expected.at, not_before=not_before)

    # -- making it so -----------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            aim = await self._aims.next()
            if aim.phase != RESHARD:
                self._asked.lent = False
            await self._save()
            try:
                with self._asked.told(aim.asked) if aim.phase == RESHARD else nullcontext():
                    async with self._at_switch:
                        await self._carry_out(aim)
            except PortsFailed as error:
                self._leave_out(error)
            except (LedgerUnavailable, NotTheWriter) as error:
                self.log.warning("circuits_stay", phase=aim.phase, why=str(error))
                self._try_later()
            except FabricError as error:
                self._fall_back(str(error))
                await self._disconnect()
                self._try_later()
            if aim.phase == self._rhythm.phase and self._aims.present is None:
                self._look_ahead()

    async def _carry_out(self, aim: Aim) -> None:
        """Read, plan, reach, account. Raises FabricError when the switch does not do its part."""
        links, scheduled = self._links(aim.phase) if aim.links is None else (aim.links, True)
        # Circuits that were asked for have no template: one that a dead controller was changing to must not stay half dark.
        if links is None and (self._racks.names or self._ledger.entry.stage == "changing") and self._templates.book.endpoints:
            links = self._templates.even()
        if links is None:
            return
        if self._switch() and not self.peers(self._switch()):
            self._fall_back(NO_SWITCH)
            self._asked.settle(NO_SWITCH)
            return
        reconciler, state = await self._read()
        unfinished = self._ledger.entry.stage == "changing" or len(state.circuits) > len(state.lit)
        planned = self._plan(aim, links, restore=aim.restore or unfinished or scheduled or not state.lit)
        if planned.reconfigure or (planned.verdict is Verdict.FITS and unfinished):
            began, ahead_of = asyncio.get_running_loop().time(), self._rhythm.since
            with self.waits.on(f"circuits of {aim.phase}", stage="reconfigure", holder=self._switch()):
                await reconciler.reach(planned.circuits, aim.phase, state)
            self._circuits = planned.circuits
            self.log.info("circuits_changed", phase=aim.phase, why=planned.verdict, num=len(planned.circuits))
            since = aim.starts_at if aim.window else self._began_since(aim.phase, ahead_of)
            self._accounts.changed(aim.starts_at, began, since)
        elif planned.verdict is Verdict.KEPT:
            self.metrics.count("fabric/kept")
        self._show()
        if self._electrical:
            self._electrical, self._failures = False, 0
            self.log.info("optical_path_again", phase=aim.phase)

    def _links(self, phase: str) -> tuple[Links | None, bool]:
        """The circuits of its first window, the template of the phase, or the one that the whole period is shortest with, and whether that was
        found out: a change then pays off, however short the phase."""
        chosen = choose(self._rhythm, self._templates, delay_s=self._accounts.delay_s)
        windows = {name: self._windows.first(name, self._accounts.delay_s) for name in {phase, chosen.get(phase, phase)}}
        instead = phase if windows[phase] else chosen.get(phase, phase)
        if instead != phase and self._templates.links(phase) is not None:
            self.metrics.count("fabric/kept")
        return windows[instead] or self._templates.links(instead), phase in chosen or windows[phase] is not None

    def _plan(self, aim: Aim, links: Links, *, restore: bool) -> CircuitPlan:
        now = asyncio.get_running_loop().time()
        return plan(
            FabricSnapshot(
                ports_per_endpoint=self._section.ports_per_endpoint,
                links=links,
                current=self._circuits,
                starts_in_s=0.0 if aim.window else aim.starts_at - now,
                lasts_s=None if restore else self._rhythm.lasts(aim.phase),
                reconfiguration_s=self._accounts.delay_s,
                dead=self._templates.dead,
            )
        )

    def _began_since(self, phase: str, ahead_of: float) -> float | None:
        """When `phase` began, if another ran at `ahead_of` and it is the one that runs now."""
        return self._rhythm.since if self._rhythm.since > ahead_of and self._rhythm.phase == phase else None

    # -- the switch -------------------------------------------------------------------------------------------------

    def _switch(self) -> str:
        """The actor that stands for the switch; none for a real one."""
        return "" if self._section.switch_url else "optical_switch"

    async def _connect(self) -> Reconciler:
        section = self._section
        driver = device(section) if section.switch_url else await emulated(section, self.ref("optical_switch"))
        times = {"drain_s": section.drain_s, "tune_timeout_s": section.tune_timeout_s}
        return Reconciler(driver, self._ledger, self.log, self._enter, **times)

    async def _read(self) -> tuple[Reconciler, SwitchState]:
        """What the switch holds now."""
        reconciler = self._reconciler = self._reconciler or await self._connect()
        state = await reconciler.driver.read()
        self._circuits = state.lit
        return reconciler, state

    async def _disconnect(self) -> None:
        reconciler, self._reconciler = self._reconciler, None
        if reconciler is not None:
            await reconciler.driver.close()

    def _enter(self, stage: Stage) -> None:
        self._stage = stage

    def _leave_out(self, failed: PortsFailed) -> None:
        """Plan without the ports that failed. Where the rest can't connect all actors, the electrical path does, and all ports are tried again later."""
        self.log.warning("ports_failed", ports=sorted(failed.ports), why=str(failed))
        self.metrics.gauge("fabric/dead_ports", len(self._templates.dead | failed.ports))
        try:
            self._templates.without(self._templates.dead | failed.ports)
            self._aim_at_present(self._rhythm.phase, restore=True)
        except ValueError as error:
            self._templates.without(frozenset())
            self._fall_back(str(error))
            self._try_later()

    def _try_later(self) -> None:
        pause_s = min(RETRY_MAX_S, RETRY_S * 2 ** min(self._failures, 10))
        self._failures += 1
        if self._aims.present is None:
            self._aim_at_present(self._rhythm.phase or self._ledger.entry.phase, restore=True, pause_s=pause_s)

    def _show(self) -> None:
        self.metrics.gauge("fabric/circuits", len(self._circuits))
        self.metrics.gauge("fabric/change", self._ledger.entry.change)
        self.metrics.gauge("fabric/electrical", 0)

    def _fall_back(self, why: str) -> None:
        """Say once that the electrical path carries everything, until the switch does its part again."""
        if not self._electrical:
            self._electrical = True
            self.metrics.gauge("fabric/electrical", 1)
            self.log.warning("electrical_path_only", why=why)

    def _fence(self) -> Fence:
        return Fence(self.name, self.incarnation)

    async def _save(self) -> None:
        """Keep the templates; without a store they are kept at the next occasion. Raises Fenced for a zombie, which ends it."""
        if self._unsaved:
            try:
                await self._templates.save(self.store, self._fence())
                self._unsaved = False
            except StoreUnavailable as error:
                self.log.warning("templates_not_saved", error=str(error))


class AskedCircuits:
    """The newest ask for circuits; older ones are over."""

    def __init__(self) -> None:
        self.number = -1
        self.lent = False
        """Whether the asker has them, or is about to, in place of the phase's own."""
        self._answer: asyncio.Future[str] | None = None

    def begin(self, number: int) -> None:
        self.settle(f"those of ask {number} are wanted instead")
        self.number, self.lent, self._answer = number, True, asyncio.get_running_loop().create_future()

    def settle(self, why_not: str = "") -> None:
        """They are lit, or `why_not`; the first word counts."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(why_not)

    @contextmanager
    def told(self, number: int) -> Generator[None]:
        """The block's outcome is that of the circuits of `number`, unless others were asked for meanwhile."""
        try:
            yield
        except Exception as error:
            if number == self.number:
                self.settle(str(error) or type(error).__name__)
            raise
        if number == self.number:
            self.settle()

    async def outcome(self, number: int) -> CircuitsReady | NoCircuits:
        if number != self.number or self._answer is None:
            return NoCircuits(f"ask {number} is not the last one, which is {self.number}")
        why_not = await asyncio.shield(self._answer)
        return NoCircuits(why_not) if why_not else CircuitsReady(number)
