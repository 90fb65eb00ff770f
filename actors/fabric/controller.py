"""FabricController: gives each phase of the job its circuits, ahead of time once it knows the rhythm of the phases."""

import asyncio
from collections import deque
from typing import NamedTuple

from actors.fabric.driver import BusDriver, Capabilities, OcsDriver
from actors.fabric.errors import FabricError
from actors.fabric.rhythm import Rhythm
from actors.fabric.section import FabricSection
from actors.fabric.templates import Templates
from actors.messages.fabric import Circuit, CircuitState, FabricReport, InspectFabric, PhaseIntent
from planning.circuits import KEPT, CircuitPlan, Cross, FabricSnapshot, plan
from planning.demand import Pair
from runtime.actor import Actor, ActorConfig, Context, handler
from runtime.store.errors import StoreUnavailable
from runtime.store.store import Fence

LEAD = 2.0
"""A change ahead of time begins this many delays before the phase is expected: a healthy job's phases jitter by less."""

UNDISTURBED = 0.5
"""Share of the running phase that a change for the next one never touches."""

RETRY_S = 0.5
"""First pause before asking a switch that failed again; doubles up to `RETRY_MAX_S`."""

RETRY_MAX_S = 30.0


class Aim(NamedTuple):
    """Circuits to work towards: those of `phase`, beginning the change at `due` (times are loop times)."""

    phase: str
    due: float
    starts_at: float
    """When the phase began, or is expected to."""
    restore: bool = False
    """The switch lost its circuits: however short the phase, it needs a connected fabric."""


class FabricController(Actor):
    """Handlers only note what is wanted; one loop makes it so. Without a switch the electrical path carries everything."""

    role = "fabric_controller"
    drain_order = 90

    class Config(ActorConfig):
        fabric: FabricSection = FabricSection()

    config: Config

    def __init__(self, config: Config, context: Context) -> None:
        super().__init__(config, context)
        self._section = section = config.fabric
        capabilities = Capabilities(section.ports, section.reconfiguration_s)
        switch, timeout_s = self.ref("optical_switch"), section.switch_timeout_s
        self._driver: OcsDriver = BusDriver(switch, capabilities, timeout_s=timeout_s)
        self._templates = Templates(section.ports // section.ports_per_endpoint, section.ports_per_endpoint)
        self._unsaved = False
        self._rhythm = Rhythm()
        self._epochs: dict[str, int] = {}
        self._present: Aim | None = None
        self._coming: Aim | None = None
        self._aimed = asyncio.Event()
        self._observed: CircuitState | None = None
        self._delays: deque[float] = deque([section.reconfiguration_s], maxlen=5)
        self._failures = 0
        self._electrical = False
        self._reconfigurations = 0
        self._hidden_s = self._exposed_s = 0.0

    async def on_start(self) -> None:
        await self._templates.load(self.store)
        if self._section.enabled:
            self.spawn(self._reconcile(), name=f"{self.name}.reconcile")

    async def on_peers(self, joined: tuple[str, ...], left: tuple[str, ...]) -> None:
        if any(name.rpartition("-")[0] == "optical_switch" for name in (*joined, *left)):
            self._observed = None
            self._aim_at_present(self._rhythm.phase, restore=True)

    @handler
    async def phase_intent(self, message: PhaseIntent) -> None:
        """Never waits for the switch. A phase that was said to begin under this epoch, or a later one, is not begun again."""
        if not self._section.enabled:
            return
        now = asyncio.get_running_loop().time()
        if self._templates.learn(message.phase, message.traffic):
            self._unsaved = True
            self.log.info("phase_profiled", phase=message.phase, endpoints=len(self._templates.book.endpoints))
        if message.in_s > 0:
            self._aim_at_coming(message.phase, now + message.in_s, not_before=now)
        elif message.epoch > self._epochs.get(message.phase, -1):
            self._epochs[message.phase] = message.epoch
            self._rhythm.began(message.phase, now)
            self._coming = None
            self._aim_at_present(message.phase)

    @handler
    async def inspect_fabric(self, request: InspectFabric) -> FabricReport:
        circuits = self._observed.circuits if self._observed else ()
        return FabricReport(self._rhythm.phase, self._reconfigurations, self._hidden_s, self._exposed_s, circuits)

    # -- what is wanted ---------------------------------------------------------------------------------------------

    def _aim_at_present(self, phase: str, *, restore: bool = False, pause_s: float = 0.0) -> None:
        due = asyncio.get_running_loop().time() + pause_s
        self._present = Aim(phase, due, due, restore)
        self._aimed.set()

    def _aim_at_coming(self, phase: str, starts_at: float, *, not_before: float) -> None:
        due = max(not_before, starts_at - LEAD * max(self._delays))
        self._coming = Aim(phase, due, starts_at)
        self._aimed.set()

    def _look_ahead(self) -> None:
        """Aim at the phase that should follow, unless it was announced already or should have begun."""
        expected, lasts = self._rhythm.next(), self._rhythm.lasts(self._rhythm.phase)
        if self._coming is None and expected and lasts and expected.at > asyncio.get_running_loop().time():
            not_before = self._rhythm.since + UNDISTURBED * lasts
            self._aim_at_coming(expected.phase, expected.at, not_before=not_before)

    async def _next_aim(self) -> Aim:
        """The aim that is due first, once it is due."""
        while True:
            self._aimed.clear()
            aim = min((a for a in (self._present, self._coming) if a), key=lambda a: a.due, default=None)
            try:
                async with asyncio.timeout_at(aim.due if aim else None):
                    await self._aimed.wait()
            except TimeoutError:
                if aim is not None and aim is self._present:
                    self._present = None
                    return aim
                if aim is not None and aim is self._coming:
                    self._coming = None
                    return aim

    # -- making it so -----------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            aim = await self._next_aim()
            await self._save()
            try:
                await self._carry_out(aim)
            except FabricError as error:
                self._observed = None
                self._fall_back(str(error))
                pause_s = min(RETRY_MAX_S, RETRY_S * 2 ** min(self._failures, 10))
                self._failures += 1
                if self._present is None:
                    self._aim_at_present(self._rhythm.phase, restore=True, pause_s=pause_s)
            if aim.phase == self._rhythm.phase and self._present is None:
                self._look_ahead()

    async def _carry_out(self, aim: Aim) -> None:
        """Read, plan, apply, account. Raises FabricError when the switch does not do its part."""
        links = self._templates.links(aim.phase)
        if links is None:
            return
        if not self.peers("optical_switch"):
            self._fall_back("no optical switch is ready")
            return
        if self._observed is None:
            self._observed = await self._driver.read()
        planned = self._plan(aim, links, self._observed)
        if planned.reconfigure:
            began, phase = asyncio.get_running_loop().time(), self._rhythm.since
            self._observed = None
            self._observed = await self._driver.apply(tuple(Circuit(*cross) for cross in planned.circuits))
            self._account(aim, began, ahead_of=phase)
        elif planned.why == KEPT:
            self.metrics.count("fabric/kept")
        if self._electrical:
            self._electrical, self._failures = False, 0
            self.log.info("optical_path_again", phase=aim.phase)

    def _plan(self, aim: Aim, links: tuple[Pair, ...], observed: CircuitState) -> CircuitPlan:
        now = asyncio.get_running_loop().time()
        return plan(
            FabricSnapshot(
                endpoints=self._templates.book.endpoints,
                ports_per_endpoint=self._section.ports_per_endpoint,
                traffic=(),
                template=links,
                current=tuple(Cross(c.ingress, c.egress) for c in observed.circuits),
                starts_in_s=aim.starts_at - now,
                lasts_s=None if aim.restore else self._rhythm.lasts(aim.phase),
                reconfiguration_s=max(self._delays),
            )
        )

    def _account(self, aim: Aim, began: float, *, ahead_of: float) -> None:
        """What passed of the change before its phase began was hidden; what the phase then waited for is exposed.

        `ahead_of` is when the phase began that ran as the change began: with another one since, that one may be `aim`'s.
        """
        ended = asyncio.get_running_loop().time()
        phase_began = ended
        if aim.starts_at <= began:
            phase_began = aim.starts_at
        elif self._rhythm.since > ahead_of and self._rhythm.phase == aim.phase:
            phase_began = self._rhythm.since
        hidden_s, exposed_s = max(0.0, phase_began - began), max(0.0, ended - phase_began)
        self._delays.append(ended - began)
        self._reconfigurations += 1
        self._hidden_s += hidden_s
        self._exposed_s += exposed_s
        self.metrics.count("fabric/reconfigurations")
        self.metrics.count("fabric/hidden_s", hidden_s)
        self.metrics.count("fabric/exposed_s", exposed_s)

    def _fall_back(self, why: str) -> None:
        """Say once that the electrical path carries everything, until the switch does its part again."""
        if not self._electrical:
            self._electrical = True
            self.log.warning("electrical_path_only", why=why)

    async def _save(self) -> None:
        """Keep the templates; without a store they are kept at the next occasion. Raises Fenced for a zombie, which ends it."""
        if self._unsaved:
            try:
                await self._templates.save(self.store, Fence(self.name, self.incarnation))
                self._unsaved = False
            except StoreUnavailable as error:
                self.log.warning("templates_not_saved", error=str(error))
