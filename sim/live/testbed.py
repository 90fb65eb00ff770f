"""The test-bed of circuits (tools/fabric_testbed.py) on virtual time: the real controller, planners and emulated switch, modelled bytes.

Read from the job's own config are racks, ports, rates, sizes and times; what is modelled is the way of the bytes. A link carries what the
circuits allow, less the headers, shared evenly; weights travel in pieces, which relays pass on when they have them whole.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from rubato.actors.config import TrainSection, WeightsSection
from rubato.actors.fabric.controller import FabricController
from rubato.actors.fabric.emulated import EmulatedSwitch
from rubato.actors.fabric.links import rates_mbps
from rubato.actors.fabric.section import FabricSection
from rubato.actors.messages.fabric import InspectFabric
from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.phases import Phase, PhaseIntent
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.planning.circuits import Cross
from rubato.planning.demand import Pair
from rubato.planning.relay import plan, ring_sources, sources
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.blobs.blob import PIECE_BYTES
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.sim.outcome import Cell, LaneSpan, RunProgress, RunResult, Table
from rubato.sim.scenario import LiveJob, Scenario, ScenarioKind
from rubato.sim.virtual import run_virtual

PAYLOAD = 1448 / 1514
"""Of an Ethernet frame that carries TCP with time stamps over IPv4, at an MTU of 1,500: what htb counts, and what arrives."""

Mode = Literal["static", "proactive"]
Broadcast = Literal["tree", "rings"]
MODES: tuple[Mode, ...] = ("static", "proactive")
WAYS: tuple[Broadcast, ...] = ("tree", "rings")
LEARNED = 4
"""Versions in which phases are profiled and their rhythm is learned, as in the live runs."""


class TestbedScenario(Scenario):
    """`job` is the live config, which the claims' figures were measured with. Both ways of broadcast are simulated."""

    job: LiveJob
    kv_bytes: int = Field(ge=0)
    """What each engine outside the first rack fetches in a rollout: the profile of the live run."""
    decode_s: float = Field(default=0.0, ge=0)
    """What of a rollout is not transfer."""
    versions: int = Field(default=8, ge=1)


class RackLinks:
    """The links between racks. Stands for `tc`: rates follow the light at once."""

    def __init__(self, section: FabricSection) -> None:
        self._section = section
        self._rates = rates_mbps((), section)
        self._shared = dict.fromkeys(self._rates, 0)
        self._news = asyncio.Event()

    def set(self, lit: Sequence[Cross]) -> None:
        self._rates = rates_mbps(lit, self._section)
        self._tell()

    async def carry(self, pair: Pair, size_bytes: float) -> None:
        """Returns when all has arrived; transfers over one link have equal shares of it."""
        loop, left = asyncio.get_running_loop(), float(size_bytes)
        self._shared[pair] += 1
        self._tell()
        try:
            while left > 1e-3:
                news, since = self._news, loop.time()
                bytes_s = self._rates[pair] * 1e6 / 8 * PAYLOAD / self._shared[pair]
                with suppress(TimeoutError):
                    async with asyncio.timeout(left / bytes_s):
                        await news.wait()
                left -= (loop.time() - since) * bytes_s
        finally:
            self._shared[pair] -= 1
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class SimulatedSwitch(EmulatedSwitch):
    """Sets the rates of `wires` where the live one runs `tc`."""

    wires: RackLinks

    async def _light_links(self) -> None:
        async for lit in self.device.light():
            self.wires.set(lit)


class _Node(Actor):
    role: ClassVar[str] = "node"


class _Trainer(Actor):
    role: ClassVar[str] = "trainer"


class _Engine(Actor):
    role: ClassVar[str] = "engine"
    provides: ClassVar[frozenset[str]] = frozenset({GENERATION})


class ModeFigures(NamedTuple):
    """Of one mode; per step are means over the versions that count."""

    syncs_s: tuple[float, ...]
    exposed_s: float
    hidden_s: float
    changes: float
    spans: tuple[LaneSpan, ...]


class SimulatedTestbed:
    """One job: its phases in their order, its bytes over the wires. Host i, from 1, is in rack i - 1."""

    def __init__(self, scenario: TestbedScenario, way: Broadcast, mode: Mode, controller: FabricController, wires: RackLinks) -> None:
        self._scenario, self._by_rings, self._name = scenario, way == "rings", f"{way}, {mode}"
        self._controller, self._wires = controller, wires
        train = TrainSection(**(scenario.job.get("train") or {})).scripted
        self._size_bytes, self._step_s = int(train.weights_mib * 2**20), train.step_s
        self._hosts = tuple(f"node-{i + 1}" for i in range(len(scenario.job["fabric"]["racks"])))
        self._spans: list[LaneSpan] = []

    async def run(self) -> ModeFigures:
        num = self._scenario.versions
        for version in range(LEARNED):
            await self._iterate(version)
        before = await self._controller.inspect_fabric(InspectFabric())
        syncs = [await self._iterate(LEARNED + n) for n in range(num)]
        after = await self._controller.inspect_fabric(InspectFabric())
        return ModeFigures(
            tuple(syncs),
            (after.exposed_s - before.exposed_s) / num,
            (after.hidden_s - before.hidden_s) / num,
            (after.reconfigurations - before.reconfigurations) / num,
            tuple(self._spans),
        )

    async def _iterate(self, version: int) -> float:
        """Publish `version`, roll out under it, train the next. Returns the seconds until the last host had it."""
        loop = asyncio.get_running_loop()
        weights = tuple(("trainer-1", f"engine-{i + 1}", self._size_bytes) for i in range(len(self._hosts)))
        await self._intend("weight_sync", version, traffic=weights)
        published = loop.time()
        there = {host: asyncio.Event() for host in self._hosts}
        there[self._hosts[0]].set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._roll_out(there))
            await self._sync(there)
            synced = loop.time()
            await self._intend("rollout", version + 1)
        await asyncio.sleep(self._scenario.decode_s)
        kv = tuple((a, b, self._scenario.kv_bytes) for a, b in self._prefills())
        await self._intend("rollout", -1, traffic=kv)
        rolled = loop.time()
        await self._intend("train_step", version + 1)
        await self._intend("weight_sync", version + 1, in_s=self._step_s, traffic=weights)
        await asyncio.sleep(self._step_s)
        for name, start, end in (
            ("weight_sync", published, synced), ("rollout", synced, rolled), ("train_step", rolled, loop.time())
        ):  # fmt: skip
            self._spans.append(LaneSpan(self._name, "phases", name, start, end - start, {"version": version}))
        return synced - published

    async def _intend(self, phase: Phase, number: int, *, in_s: float = 0.0, traffic: tuple[tuple[str, str, int], ...] = ()) -> None:
        await self._controller.phase_intent(PhaseIntent(phase, number, in_s, traffic))

    async def _sync(self, there: Mapping[str, asyncio.Event]) -> None:
        """Each host pulls every piece from where planning/relay.py says, as soon as that one has it."""
        home, *others = self._hosts
        sizes = [min(PIECE_BYTES, self._size_bytes - at) for at in range(0, self._size_bytes, PIECE_BYTES)]
        have = {host: [asyncio.Event() for _ in sizes] for host in self._hosts}
        for piece in have[home]:
            piece.set()

        async def pull(host: str, source: str, pieces: Sequence[int]) -> None:
            for index in pieces:
                await have[source][index].wait()
                await self._wires.carry(self._link(source, host), sizes[index])
                have[host][index].set()
            if all(piece.is_set() for piece in have[host]):
                there[host].set()

        async with asyncio.TaskGroup() as tasks:
            for host in others:
                ways = self._sources(home, host)
                for n, source in enumerate(ways):
                    tasks.create_task(pull(host, source, range(n, len(sizes), len(ways))))

    def _sources(self, home: str, host: str) -> tuple[str, ...]:
        if self._by_rings:
            return ring_sources(home, self._hosts, host)[:2]
        return sources(plan(home, self._hosts, size_bytes=self._size_bytes), host)[:1]

    async def _roll_out(self, there: Mapping[str, asyncio.Event]) -> None:
        """Caches come from the next engine once both ends have the weights."""

        async def fetch(source: str, target: str) -> None:
            here, away = target.replace("engine", "node"), source.replace("engine", "node")
            await there[here].wait()
            await there[away].wait()
            await self._wires.carry(self._link(away, here), self._scenario.kv_bytes)

        async with asyncio.TaskGroup() as tasks:
            for source, target in self._prefills():
                tasks.create_task(fetch(source, target))

    def _prefills(self) -> list[tuple[str, str]]:
        """Which engine prefills for which: the next one for each outside the first rack."""
        engines = [f"engine-{i + 1}" for i in range(1, len(self._hosts))]
        return [(engines[(i + 1) % len(engines)], name) for i, name in enumerate(engines) if len(engines) > 1]

    def _link(self, source: str, target: str) -> Pair:
        return self._hosts.index(source), self._hosts.index(target)


@asynccontextmanager
async def _bed(scenario: TestbedScenario, way: Broadcast, mode: Mode):  # noqa: ANN202 - an async generator of SimulatedTestbed
    stated, weights = scenario.job.get("fabric") or {}, WeightsSection(broadcast=way)
    fabric = FabricSection(**(stated | {"static": mode == "static", "testbed": "simulated"}))
    wires, network, store = RackLinks(fabric), MemoryNetwork(), MemoryStore()
    async with asyncio.TaskGroup() as tasks:

        async def start(cls: type[Actor], config: ActorConfig, name: str, node: str, address: str) -> Any:
            transport = MemoryTransport(Identity("sim", name, 1), network)
            transport.public_address = f"tcp://{address}:1"
            kernel = Kernel(
                cls, config, name=name, incarnation=1, run=RunInfo("sim", Path("run"), scenario.seed, 1), transport=transport,
                store=store, blobs=MemoryBlobStore(), log=logger("rubato.sim"), node=node,
            )  # fmt: skip
            actor = kernel.build()
            if isinstance(actor, SimulatedSwitch):
                actor.wires = wires
            serving.append(tasks.create_task(kernel.serve(), name=name))
            await kernel.ready.wait()
            return actor

        serving: list[asyncio.Task[None]] = []
        first = next(iter(fabric.racks.values()))[0]
        for i, (address, *_) in enumerate(fabric.racks.values()):
            await start(_Node, ActorConfig(), f"node-{i + 1}", f"node-{i + 1}", address)
            await start(_Engine, ActorConfig(), f"engine-{i + 1}", f"node-{i + 1}", address)
        await start(_Trainer, ActorConfig(), "trainer-1", "node-1", first)
        await start(SimulatedSwitch, SimulatedSwitch.Config(fabric=fabric), "optical_switch-1", "node-1", first)
        config = FabricController.Config(fabric=fabric, weights=weights)
        controller = await start(FabricController, config, "fabric_controller-1", "node-1", first)
        yield SimulatedTestbed(scenario, way, mode, controller, wires)
        for task in serving:
            task.cancel()


def run(scenario: TestbedScenario, progress: RunProgress) -> RunResult:
    found: dict[str, ModeFigures] = {}

    async def play(way: Broadcast, mode: Mode) -> ModeFigures:
        async with _bed(scenario, way, mode) as bed:
            return await bed.run()

    cases: list[tuple[Broadcast, Mode]] = [(way, mode) for way in WAYS for mode in MODES]
    for done, (way, mode) in enumerate(cases):
        progress(done, len(cases), f"{way}, {mode}")
        found[f"{way}_{mode}"] = run_virtual(partial(play, way, mode))
    medians = {name: median(figures.syncs_s) for name, figures in found.items()}
    rows: list[tuple[Cell, ...]] = [(*name.split("_"), medians[name], f.exposed_s, f.hidden_s, f.changes) for name, f in found.items()]
    columns = ("broadcast", "circuits", "sync_s", "exposed_s_per_step", "hidden_s_per_step", "changes_per_step")
    return RunResult(
        {f"{name}_sync_s": value for name, value in medians.items()}
        | {f"{name}_exposed_s": figures.exposed_s for name, figures in found.items()}
        | {f"{way}_speedup": medians[f"{way}_static"] / medians[f"{way}_proactive"] for way in WAYS},
        {"modes": Table(columns, rows)},
        spans=[span for figures in found.values() for span in figures.spans],
        notes=("hashing, encryption and the actors' own processing take no time",),
    )


KIND = ScenarioKind(TestbedScenario, run)
