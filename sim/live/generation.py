"""The second mode of a step of generation (sim/orchestrrl/generation.py): the real orchestrator, proxy and paced engines in virtual time.

Requests, their lengths and the roofline are those of the first mode; moves and switches are what the actors make of them by messages.
Degrees are not planned for the step as a whole: it begins with engines that are alike.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from actors.config import ProxySection
from actors.engines.section import EngineSection, PaceSection, ScriptedSection
from actors.engines.worker import EngineWorker
from actors.messages.generation import Completion, Generate, Sampling
from actors.messages.orchestration import RequestEnded, RequestSeen, Surveyed
from actors.proxy.proxy import LLMProxy
from actors.scheduling.fleet import Server
from actors.scheduling.lengths import Lengths
from actors.scheduling.orchestrator import Orchestrator
from actors.scheduling.section import REBALANCE, SWITCH, OrchestratorSection
from bus.link import Identity
from bus.message import pack_i32
from bus.transport import MemoryNetwork, MemoryTransport
from planning.routing import EngineView, RequestView, choose
from runtime.actor import Actor, RunInfo
from runtime.config import ActorConfig
from runtime.kernel import Kernel
from runtime.observe.log import logger
from runtime.store.store import MemoryStore
from sim.live.configs import LONG_S
from sim.orchestrrl.generation import Arm, Pace
from sim.orchestrrl.pool import Response
from sim.virtual import run_virtual

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
    why: tuple[str, ...]
    """Of each switch, as a user is told when it is through."""


class LiveStep:
    """As StepRun, of the real actors. `history`: the steps before, the oldest first, of which the orchestrator has seen the lengths."""

    def __init__(
        self, fleet: LiveFleet, arm: Arm, pace: Pace, limit: int, history: Sequence[Sequence[Response]] = ()
    ) -> None:
        """`limit` of a response, in tokens. Raises ValueError where degrees are to be planned across steps."""
        if arm.across:
            raise ValueError(
                f"the arm {arm.name} plans degrees across steps, which the second mode does not: leave it out"
            )
        self._fleet = fleet
        self._arm = arm
        self._pace = pace
        self._sampling = Sampling(limit, stop_token_ids=(STOP,))
        self._history = history
        self._why: list[str] = []

    def run(self, responses: Sequence[Response]) -> StepFacts:
        """All of them, asked for at once and dealt as in the first mode. Raises AssertionError where one has not exactly its tokens."""
        return run_virtual(partial(self._run, responses))

    async def _run(self, responses: Sequence[Response]) -> StepFacts:
        loop = asyncio.get_running_loop()
        async with _job(self._fleet) as start:
            asker = await start(StepAsker, ActorConfig(), "env_manager-1")
            await asyncio.sleep(1.0)  # until all have met
            began = loop.time()
            orchestrator = await self._orchestrator(start, responses, began)
            await self._ask(asker, responses)
            found = orchestrator.metrics.snapshot()
            moves, switches = (int(found.get(f"orchestrator/{name}", 0)) for name in ("moves", "switches"))
            return StepFacts(loop.time() - began, moves, switches, tuple(self._why))

    async def _orchestrator(self, start: Start, responses: Sequence[Response], began: float) -> Any:
        pace, arm, loop = self._pace, self._arm, asyncio.get_running_loop()
        section = OrchestratorSection(
            enabled=True, planners=(REBALANCE,) * arm.rebalance + (SWITCH,) * arm.within, degrees=self._fleet.degrees,
            interval_s=pace.interval_s, switch_s=pace.switch_s,
        )  # fmt: skip
        config = Orchestrator.Config(orchestrator=section)
        made = await start(WithinOrchestrator, config, "orchestrator-1")
        if arm.knows:
            made._lengths = KnownLengths({each.name: each.tokens for each in responses})
        made.notice = lambda text: self._why.append(f"{loop.time() - began:.1f} s: {text}")
        for step in self._history:
            made._lengths.note([RequestEnded("", n, each.tokens, 0) for n, each in enumerate(step)], ())
        return made

    async def _ask(self, asker: Actor, responses: Sequence[Response]) -> None:
        engines, asked = list(self._fleet.servers), list[asyncio.Task[Any]]()
        async with asyncio.TaskGroup() as tasks:
            for number, each in enumerate(responses):
                prompt = pack_i32([each.tokens, number, *[STOP + 1] * (each.shown - 2)])
                session = _session(each.name, engines[number % len(engines) :])
                request = Generate(each.name, session, prompt, self._sampling)
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


class WithinOrchestrator(Orchestrator):
    """Changes degrees within a step only."""

    async def _begin_step(self, found: Sequence[Server], surveyed: Surveyed) -> bool:
        return False

    def _pool(self, engine: str) -> str:
        """One for all: the pools in which `_job` starts engines stand for their servers."""
        return ""


class KnownLengths(Lengths):
    """Of requests that sample as many `tokens` as is told by their names."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        super().__init__()
        self._tokens = tokens

    def left(self, requests: Iterable[RequestSeen]) -> Mapping[str, float]:
        """Exactly."""
        return self.drawn(requests)

    def drawn(self, requests: Iterable[RequestSeen]) -> Mapping[str, float]:
        """Exactly."""
        return {each.request_id: float(self._tokens[each.request_id] - each.sampled) for each in requests}


class NoWeights:
    """Blobs, of which none was published."""

    async def newest(self, name: str) -> None:
        """There is none."""


def _session(name: str, engines: Sequence[str]) -> str:
    """A session with which the router takes the first of `engines` while these have the fewest requests, all as many."""
    views = [EngineView(engine, 0, 1, 0) for engine in engines]
    sessions = (f"{name} {number}" for number in count())
    return next(session for session in sessions if choose(RequestView(session), views).engine == engines[0])


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
