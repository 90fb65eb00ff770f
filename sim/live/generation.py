"""The second mode of generation (sim/orchestrrl/drift.py): the real orchestrator, proxy and paced engines in virtual time, step after step.

Requests, their lengths and the roofline are those of the first mode; plans, moves and switches are what the actors make of them by messages.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rubato.actors.config import ProxySection
from rubato.actors.engines.section import EngineSection, PaceSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.messages.generation import Completion, Generate, Sampling
from rubato.actors.messages.orchestration import RequestEnded, Surveyed
from rubato.actors.orchestrator.fleet import GpuGroup, servers
from rubato.actors.orchestrator.lengths import Expected, Lengths, Underway
from rubato.actors.orchestrator.orchestrator import Orchestrator
from rubato.actors.orchestrator.section import REBALANCE, SWITCH, OrchestratorSection
from rubato.actors.orchestrator.switches import Shape
from rubato.actors.proxy.proxy import LLMProxy
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.bus.message import pack_i32
from rubato.planning.engine_info import EngineInfo, WeightsNeed
from rubato.planning.forecast import Remaining
from rubato.planning.routing import Choice, EngineView, choose
from rubato.runtime.actor import Actor, RunInfo
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.log import logger
from rubato.sim.live.configs import LONG_S
from rubato.sim.orchestrrl.drift import PAST
from rubato.sim.orchestrrl.generation import Arm, Pace
from rubato.sim.orchestrrl.pool import Response
from rubato.sim.virtual import run_virtual

VOCABULARY, STOP = 65536, 1

STREAM_EVERY = 32
"""Tokens between two reports of a request: less than a second, where planners are asked every few."""

AT_ONCE = 64
"""Requests that are asked for in the same moment; the next ones a millisecond later."""

Start = Callable[..., Awaitable[Any]]


class LiveFleet(NamedTuple):
    """Engines of one class of hardware and one model, named as in `engine.pace`; each has `degree` GPUs to begin with."""

    hardware: str
    model: str
    gpus: int
    degree: int
    degrees: tuple[int, ...]
    """That an engine may have."""
    num_slots: int = 256
    gpus_per_server: int = 8

    @property
    def servers(self) -> dict[str, str]:
        """Of each engine, by its name."""
        places = range(self.gpus // self.degree)
        return {f"engine-{n + 1:03d}": f"server-{n * self.degree // self.gpus_per_server}" for n in places}

    @property
    def section(self) -> EngineSection:
        return EngineSection(
            kind="scripted", num_slots=self.num_slots, max_len=VOCABULARY, max_batch_tokens=8192, stream_every=STREAM_EVERY,
            prefix_cache=False, results_kept=0, scripted=ScriptedSection(told_lengths=True, vocab_size=VOCABULARY),
            pace=PaceSection(hardware=self.hardware, model=self.model, degree=self.degree),
        )  # fmt: skip


class StepFacts(NamedTuple):
    """What the actors made of a step."""

    seconds: float
    moves: int
    switches: int
    degrees: tuple[int, ...]
    """Of the engines that are awake at its end."""
    why: tuple[str, ...]
    """Of each switch, as a user is told when it is through."""


Batch = Callable[[int], Sequence[Response]]


class LiveSteps:
    """As `planned` of sim/orchestrrl/drift.py, of the real actors: one job plays steps one after another."""

    def __init__(self, fleet: LiveFleet, arm: Arm, pace: Pace, batch: Batch, limit: Callable[[int], int]) -> None:
        """The responses of a step, by its number, and their limit in tokens. Raises ValueError for an arm that the orchestrator can't play."""
        if arm.across and not arm.within:
            raise ValueError(
                f"the arm {arm.name} plans degrees across steps and not within: the real orchestrator does both, so set within"
            )
        self._fleet = fleet
        self._arm = arm
        self._pace = pace
        self._batch = batch
        self._limit = limit
        self._why: list[str] = []

    def run(self, steps: Sequence[int], degree: int) -> tuple[StepFacts, ...]:
        """Engines begin with `degree`, and with it again in each step where none is planned across steps.

        The responses of a step are asked for at once, right after a look of the orchestrator. It has seen the PAST steps before: those that it
        played, and of the others the lengths that it is told. Raises AssertionError where a response has not exactly its tokens.
        """
        return run_virtual(partial(self._run, steps, degree))

    async def _run(self, steps: Sequence[int], degree: int) -> tuple[StepFacts, ...]:
        async with _job(self._fleet) as start:
            asker = await start(StepAsker, ActorConfig(), "env_manager-1")
            await asyncio.sleep(1.0)  # until all have met
            orchestrator = await self._orchestrator(start)
            found, seen = list[StepFacts](), min(steps) - PAST
            for step in steps:
                if step == steps[0] or not self._arm.across:
                    await orchestrator.begin_with(degree)
                for past in range(max(seen, step - PAST), step):
                    orchestrator.tell(self._batch(past))
                found.append(await self._play(asker, orchestrator, step))
                seen = step + 1
            return tuple(found)

    async def _orchestrator(self, start: Start) -> "SteppedOrchestrator":
        pace, arm = self._pace, self._arm
        section = OrchestratorSection(
            enabled=True, planners=(REBALANCE,) * arm.rebalance + (SWITCH,) * arm.within, degrees=self._fleet.degrees,
            interval_s=pace.interval_s, switch_s=pace.switch_s,
        )  # fmt: skip
        made = await start(SteppedOrchestrator, Orchestrator.Config(orchestrator=section), "orchestrator-1")
        made.across = arm.across
        made.notice = self._why.append
        return made

    async def _play(self, asker: Actor, orchestrator: "SteppedOrchestrator", step: int) -> StepFacts:
        loop, responses = asyncio.get_running_loop(), self._batch(step)
        if self._arm.knows:
            orchestrator.know(responses)
        await orchestrator.look()
        before, engines, began = orchestrator.counts, list(await orchestrator.awake()), loop.time()
        await self._ask(asker, responses, self._limit(step), engines)
        seconds = loop.time() - began
        await orchestrator.look()  # what is under way comes to its end
        moves, switches = (now - then for now, then in zip(orchestrator.counts, before, strict=True))
        why, degrees = tuple(self._why), tuple(sorted((await orchestrator.awake()).values()))
        self._why.clear()
        return StepFacts(seconds, moves, switches, degrees, why)

    async def _ask(self, asker: Actor, responses: Sequence[Response], limit: int, engines: Sequence[str]) -> None:
        asked = list[asyncio.Task[Any]]()
        sampling = Sampling(limit, stop_token_ids=(STOP,))
        async with asyncio.TaskGroup() as tasks:
            for number, each in enumerate(responses):
                prompt = pack_i32([each.tokens, number, *[STOP + 1] * (each.shown - 2)])
                session = _session(each.name, engines[number % len(engines) :])
                request = Generate(each.name, session, prompt, sampling)
                asked.append(tasks.create_task(asker.ref("llm_proxy").ask(request, timeout=LONG_S)))
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(1e-3)
        for each, task in zip(responses, asked, strict=True):
            reply = task.result()
            if not isinstance(reply, Completion) or len(reply.tokens.ids) != 4 * each.tokens:
                raise AssertionError(f"{each.name} was not answered by its {each.tokens} tokens: {reply}")


class StepAsker(Actor):
    """Asks in place of the managers of environments."""

    role = "env_manager"


class SteppedOrchestrator(Orchestrator):
    """Says when it has looked, and can be told what it did not see."""

    across = True
    """It plans degrees for the coming step."""

    def __init__(self, config: Orchestrator.Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._looked = asyncio.Event()

    @property
    def counts(self) -> tuple[int, int]:
        """Moves and switches so far."""
        found = self.metrics.snapshot()
        return int(found.get("orchestrator/moves", 0)), int(found.get("orchestrator/switches", 0))

    async def look(self) -> None:
        """Returns with the end of the look that comes next, or is under way; at once where nothing is planned."""
        if not self._planners:
            return
        self._looked.clear()
        await self._looked.wait()

    async def awake(self) -> dict[str, int]:
        """The degree of each engine that is awake."""
        surveyed, _ = await self._commands.look()
        return {each.name: each.degree for each in surveyed.engines if not each.asleep}

    async def begin_with(self, degree: int) -> None:
        """Engines of `degree` alone, on all GPUs of each server."""
        async with self._turn:
            surveyed, _ = await self._commands.look()
            for server in servers(surveyed.engines, self._place):
                before = {each.name: Shape(each.degree, each.asleep) for each in server.engines}
                stay = sorted(before)[: server.gpus // degree]
                asleep = Shape(server.profile.degree, True)
                await self._commands.shape({name: Shape(degree) if name in stay else asleep for name in before}, before)

    def tell(self, responses: Sequence[Response]) -> None:
        """Lengths of a step that was played elsewhere."""
        self._lengths.note([RequestEnded("", n, each.tokens, 0) for n, each in enumerate(responses)], ())

    def know(self, responses: Sequence[Response]) -> None:
        """Each request's length from now on."""
        self._lengths = KnownLengths({each.name: each.tokens for each in responses})

    async def _tend(self) -> None:
        await super()._tend()
        self._looked.set()

    async def _begin_step(self, found: Sequence[GpuGroup], surveyed: Surveyed, running: Sequence[Underway]) -> bool:
        return self.across and await super()._begin_step(found, surveyed, running)

    def _pool(self, engine: str) -> str:
        """One for all: the pools in which `_job` starts engines stand for their servers."""
        return ""


class KnownLengths(Lengths):
    """Of requests that sample as many `tokens` as is told by their names."""

    known = True

    def __init__(self, tokens: Mapping[str, int]) -> None:
        super().__init__()
        self._tokens = tokens

    def left(self, running: Sequence[Underway]) -> Expected:
        """Exactly."""
        return Expected(self.drawn(running))

    def drawn(self, running: Sequence[Underway]) -> Mapping[str, Remaining]:
        """Exactly."""
        return {each.request: Remaining(self._tokens[each.request] - each.seen.tokens) for each in running}


class NoWeights:
    """Blobs, of which none was published."""

    async def newest(self, name: str) -> None:
        """There is none."""


def _session(name: str, engines: Sequence[str]) -> str:
    """A session with which the router takes the first of `engines` while these have the fewest requests, all as many."""
    views = [EngineView(EngineInfo(engine, 1)) for engine in engines]
    sessions, taken = (f"{name} {number}" for number in count()), Choice(engines[0], "least loaded")
    return next(session for session in sessions if choose(views, session, WeightsNeed()) == taken)


@asynccontextmanager
async def _job(fleet: LiveFleet) -> AsyncGenerator[Start]:
    """Engines and a proxy that run. Gives what starts another actor beside them."""
    network, store = MemoryNetwork(), MemoryStore()
    with TemporaryDirectory(prefix="rubato-generation-") as folder:

        async def start(actor: type[Actor], config: ActorConfig, name: str, pool: str = "") -> Any:
            incarnation = await store.increment("incarnation")
            kernel = Kernel(
                actor, config, name=name, incarnation=incarnation, run=RunInfo("sim", Path(folder), 1, 1), pool=pool,
                transport=MemoryTransport(Identity("sim", name, incarnation), network), store=store,
                blobs=NoWeights(), log=logger("rubato.sim"),  # pyright: ignore[reportArgumentType] - engines ask for the newest only
            )  # fmt: skip
            built = kernel.build()
            serving.append(tasks.create_task(kernel.serve(), name=name))
            await kernel.ready.wait()
            return built

        serving: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as tasks:
            for name, server in fleet.servers.items():
                await start(EngineWorker, EngineWorker.Config(engine=fleet.section), name, server)
            proxy = ProxySection(request_timeout_s=LONG_S, max_waiting=1 << 20, results_kept=0)
            await start(LLMProxy, LLMProxy.Config(proxy=proxy), "llm_proxy-1")
            yield start
            for task in serving:
                task.cancel()
