"""A job over pods of racks whose links follow the circuits, for test_fabric_testbed: `PLAY` prints what crossed them, as JSON.

    PYTHONPATH=. python tests/integration/pod_bed.py moves --json FILE

An orchestrator moves requests with their caches from one rack to those of both pods, and a trainer's weights come to all racks, both under
circuits that the live controller plans by pods. Control, trainer and the first engine are in rack-0. Ends with 77 and a sentence where this
machine, or this user, can't have it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from rubato.actors.config import ModelSection, TrainSection
from rubato.actors.fabric.controller import FabricController
from rubato.actors.fabric.emulated import Dialect, EmulatedSwitch
from rubato.actors.messages.fabric import AskCircuits, AwaitCircuits, CircuitsPromised, CircuitsReady, NoCircuits, ReleaseCircuits
from rubato.actors.messages.generation import GENERATION, Generate, Sampling
from rubato.actors.messages.samples import Advance, PolicyState
from rubato.actors.messages.weights import HoldWeights, WeightsTaken
from rubato.actors.orchestrator.orchestrator import Orchestrator
from rubato.actors.orchestrator.section import OrchestratorSection
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.scripted.train_engine import ScriptedTrainEngine
from rubato.actors.traffic.intents import FabricIntents
from rubato.actors.training.publishing import Publisher
from rubato.actors.weights.transport import BlobSender
from rubato.bus.keys import new_keys
from rubato.bus.message import pack_i32
from rubato.planning.demand import Demand
from rubato.planning.engine_info import WeightsNeed
from rubato.planning.pods import plan_pods
from rubato.runtime.actor import Actor, handler
from rubato.runtime.store.embedded import EmbeddedRedis
from tests.faulty_switch import FaultySwitch
from tests.integration.pod_hosts import ADDRESSES, ENGINES, FABRIC, KV_BYTES, PODS, TRICKLE_MBPS, AskCaches, Host, host
from tests.jobs import clean_environment
from tools.fabric_namespaces import NoNamespaces, Racks, enter

STOP = 1
NUM, SHOWN, SAMPLED = 8, 64, 400
"""Requests, the tokens of their prompts, and those of their answers."""
SOURCE = "engine-2"
"""Has all requests at first: in rack-1, so that moves go to its own pod and to the other."""
WEIGHTS_MIB = 6
AHEAD_S = 2.0
"""The fabric hears so early of weights: in time for its change, on a busy machine too."""
PATIENCE_S = 120.0


class Asked(NamedTuple):
    """One ask of the orchestrator, and what came of it."""

    number: int
    traffic: tuple[Demand, ...]
    """By racks."""
    promised: bool
    why: str


class Controller(FabricController):
    """Remembers what it was asked."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.asked: list[Asked] = []
        self.lit: dict[int, dict[str, int]] = {}
        """The circuits of each number that had some, by the racks that they join."""
        self.look = self.sent = dict
        self.released: dict[int, dict[str, int]] = {}
        """What had passed when the circuits of each number were given back."""

    @handler(concurrency=16)
    async def ask_circuits(self, request: AskCircuits) -> CircuitsPromised | NoCircuits:
        reply = await super().ask_circuits(request)
        racks = tuple((ENGINES[a], ENGINES[b], size) for a, b, size in request.traffic)
        self.asked.append(Asked(request.number, racks, isinstance(reply, CircuitsPromised), reply.why))
        return reply

    @handler(concurrency=16)
    async def await_circuits(self, request: AwaitCircuits) -> CircuitsReady | NoCircuits:
        reply = await super().await_circuits(request)
        if isinstance(reply, CircuitsReady):
            self.lit[request.number] = self.look()
        return reply

    @handler
    async def release_circuits(self, message: ReleaseCircuits) -> None:
        self.released[message.number] = self.sent()
        await super().release_circuits(message)


class Switch(EmulatedSwitch):
    """Its mirrors do as they are told, until a test says otherwise."""

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.device = FaultySwitch(config.fabric.ports, config.fabric.reconfiguration_s)
        self._dialect = Dialect(self.device, self._login)


class Buffer(Actor):
    """The part of a sample buffer that publishing weights needs."""

    role = "sample_buffer"

    @handler
    async def advance(self, request: Advance) -> PolicyState:
        return PolicyState(request.step, 1)


class Trainer(Actor):
    """Publishes weights as the Trainer does, and asks for completions as environments do."""

    role = "trainer"

    def __init__(self, config, kernel):
        super().__init__(config, kernel)
        self.out = Publisher(self, BlobSender(self))
        self.intents = FabricIntents(self)
        self._weights = ScriptedTrainEngine(
            ModelSection(), TrainSection(kind="scripted", scripted={"weights_mib": WEIGHTS_MIB}), steps=9, seed=1
        )
        self._everywhere = asyncio.Event()

    @handler
    async def weights_taken(self, message: WeightsTaken) -> None:
        if self.out.taken(message):
            self._everywhere.set()

    async def publish(self, version: int) -> None:
        """Returns once every engine has them."""
        self._everywhere.clear()
        self._weights.train(version, ())
        await self.intents.before_publish(version)
        await self.out.publish(version, 1, self._weights)
        await self._everywhere.wait()

    def ask(self, number: int):
        name, prompt = f"r{number}", pack_i32([SAMPLED, number, *[7] * (SHOWN - 2)])
        request = Generate(name, name, prompt, Sampling(2 * SAMPLED, stop_token_ids=(STOP,)), WeightsNeed(2))
        return self.spawn(self._answered(request), name=name)

    async def _answered(self, request: Generate) -> bool:
        """Whether it has all of its tokens, each once."""
        found = await self.ref("llm_proxy").ask(request, timeout=PATIENCE_S)
        ends = [(span.start, span.end) for span in found.tokens.spans]
        return (len(found.tokens.ids), ends[0][0], ends[-1][1]) == (4 * SAMPLED, 0, SAMPLED)


class Bed:
    """The job, seen from its first rack."""

    def __init__(self, racks: Racks, made: Host) -> None:
        self._racks, self._host = racks, made
        self._before: dict[tuple[str, str], int] = {}

    async def start(self) -> None:
        host = self._host
        self.switch = await host.start(Switch, "optical_switch-1", fabric=FABRIC)
        self.controller = await host.start(Controller, "fabric_controller-1", fabric=FABRIC)
        self.controller.look, self.controller.sent = self.lit, self.sent
        await host.start(Buffer, "sample_buffer-1")
        self.proxy = await host.start(LLMProxy, "llm_proxy-1")
        self.trainer = await host.start(Trainer, "trainer-1")
        await host.engine()
        await until(lambda: len(self.trainer.peers(GENERATION)) == len(ENGINES) == len(self.proxy.placement.seats))

    def lit(self) -> dict[str, int]:
        """Circuits that carry light, by the racks that they join."""
        names, ports = self._racks.names, FABRIC.ports_per_endpoint
        found = Counter(_pair(names[c.ingress // ports], names[c.egress // ports]) for c in self.switch.device.lit())
        return dict(sorted(found.items()))

    def mark(self) -> None:
        self._before = self._racks.sent_bytes()

    def sent(self) -> dict[str, int]:
        """Bytes from rack to rack since the mark."""
        now = self._racks.sent_bytes()
        return {_pair(*pair): size - self._before[pair] for pair, size in sorted(now.items())}

    async def weights(self) -> dict[str, object]:
        """The second version, whose circuits are there before it: the first one shows who pulls from whom. The requests wait for it on
        one engine, as the others are held on the first version while they are asked."""
        await self.trainer.publish(1)
        others = [name for name in ENGINES if name != SOURCE]
        await self._hold(others, 1, PATIENCE_S)
        self.asked = [self.trainer.ask(number) for number in range(NUM)]
        running = self.proxy.requests.running
        await until(lambda: [each.engine for each in running.values()] == NUM * [SOURCE])
        await self._hold(others, 1, 0)
        await self.trainer.intents.intend("weight_sync", 2, AHEAD_S)
        await until(lambda: "weight_sync" in self.controller._templates.book.phases)
        planned = self.controller._templates.book.phases["weight_sync"].traffic
        await until(lambda: self.lit() == by_pods(_matrix(planned)))
        self.mark()
        lit = self.lit()
        await self.trainer.publish(2)
        await self.trainer.intents.intend(
            "rollout", 2
        )  # the first one: nobody knows yet how long it lasts, so no phase is expected to follow
        return {"announced": _matrix(planned), "lit": lit, "sent": self.sent(), "weights_bytes": self.trainer.out.size_bytes}

    async def _hold(self, engines: list[str], version: int, for_s: float) -> None:
        asks = [self.trainer.ref(name).ask(HoldWeights(version, 1, for_s), timeout=PATIENCE_S) for name in engines]
        await asyncio.gather(*asks)

    async def moves(self, stalled: bool) -> dict[str, object]:
        """The orchestrator finds all requests on one engine, which decodes slower the more it has."""
        running = self.proxy.requests.running
        await until(lambda: len(running) == NUM and all(each.tokens.ids for each in running.values()))
        await until(lambda: self.controller._stage == "idle" and self.controller._rhythm.phase == "rollout")
        for for_s in (PATIENCE_S, 0):  # of engines that sample nothing the proxy hears only so which weights they have
            await self._hold([name for name in ENGINES if name != SOURCE], 2, for_s)
        before = self.lit()
        self.switch.device.stalled = stalled
        self.mark()
        section = OrchestratorSection(enabled=True, planners=("rebalance",))
        orchestrator = await self._host.start(Orchestrator, "orchestrator-1", orchestrator=section)
        await until(lambda: {"orchestrator/circuits", "orchestrator/electrical"} & orchestrator.metrics.snapshot().keys())
        during = next(iter(self.controller.lit.values()), self.lit())
        whole = await asyncio.gather(*self.asked)
        counted = orchestrator.metrics.snapshot()
        return {
            "asked": [
                each._asdict() | {"lit": each.number in self.controller.lit, "passed": self.controller.released.get(each.number)}
                for each in self.controller.asked
            ],
            "lit_before": before,
            "lit": during,
            "lit_after": self.lit(),
            "caches": await self._caches(),
            "sent": self.sent(),
            "whole": sum(whole),
            **{name: counted.get(f"orchestrator/{name}", 0.0) for name in ("moves", "circuits", "electrical")},
        }

    async def _caches(self) -> dict[str, int]:
        """Bytes of the caches that came from rack to rack."""
        asks = [self.trainer.ref(name).ask(AskCaches(), timeout=PATIENCE_S) for name in ENGINES]
        found = zip(ENGINES, await asyncio.gather(*asks), strict=True)
        return _matrix((ENGINES[source], ENGINES[name], size) for name, seen in found for source, size in seen.sizes)


def by_pods(announced: Mapping[str, int]) -> dict[str, int]:
    """The circuits that the planner of pods gives this traffic, both ways, by the racks that they join."""
    names = list(ADDRESSES)
    pod_of = [at for rack in names for at, pod in enumerate(PODS.values()) if rack in pod]
    directed = {(names.index(a), names.index(b)): size for (a, b), size in _pairs(announced)}
    planned = plan_pods(directed, pod_of, FABRIC.ports_per_endpoint)
    links = [(names[a], names[b]) for a, b in (*planned.pod, *planned.core)]
    return dict(Counter(_pair(a, b) for link in links for a, b in (link, link[::-1])))


async def until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not found():  # noqa: ASYNC110 - what others have heard sends this process no event
            await asyncio.sleep(0.02)


def _pair(a: str, b: str) -> str:
    return f"{a} {b}"


def _pairs(matrix: Mapping[str, int]) -> list[tuple[tuple[str, str], int]]:
    return [((a, b), size) for pair, size in matrix.items() for a, _, b in [pair.partition(" ")]]


def _matrix(traffic: Iterable[Demand]) -> dict[str, int]:
    found = Counter[str]()
    for a, b, size in traffic:
        found[_pair(a, b)] += size
    return dict(sorted(found.items()))


async def job(play: str, url: str, keys: str) -> dict[str, object]:
    async with host("rack-0", url, keys) as made:
        bed = Bed(Racks(FABRIC.testbed, ADDRESSES), made)
        await bed.start()
        weights = await bed.weights()
        return {"weights": weights, "moves": await bed.moves(play == "stalled"), "kv_bytes_per_token": KV_BYTES}


async def bed(play: str, folder: Path) -> dict[str, object]:
    """The racks, their hosts and the Store; the job is run by a process in the first rack."""
    racks = Racks(FABRIC.testbed, ADDRESSES)
    racks.make(TRICKLE_MBPS)
    keys = folder / "keys.json"
    keys.write_bytes(msgspec.json.encode(new_keys()))
    async with AsyncExitStack() as stack:
        store = EmbeddedRedis(folder, sockets=folder)
        url = await store.start()
        stack.push_async_callback(store.stop)
        for rack in list(ADDRESSES)[1:]:
            await started(stack, racks, rack, Path(__file__).with_name("pod_hosts.py"), rack, url, keys)
        first = await started(stack, racks, "rack-0", __file__, play, "--job", url, str(keys))
        said, _ = await first.communicate()
        if first.returncode:
            sys.exit(first.returncode)
        return json.loads(said)


async def started(stack, racks, rack, *words):
    process = await asyncio.create_subprocess_exec(
        *racks.command(rack, [sys.executable, *map(str, words)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**clean_environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    async def end():
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process


def main() -> int:
    parser = argparse.ArgumentParser("pod_bed", description=__doc__)
    parser.add_argument("play", choices=("moves", "stalled"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(asyncio.run(job(given.play, *given.job))))
        return 0
    try:
        if not given.inside:
            enter([sys.executable, __file__, *sys.argv[1:], "--inside"])
        with TemporaryDirectory() as folder:
            found = asyncio.run(bed(given.play, Path(folder)))
    except NoNamespaces as error:
        print(error)
        return 77
    print(json.dumps(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
