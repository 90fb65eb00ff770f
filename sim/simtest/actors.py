"""The real actors, with toys where a model or a worker process would be, and with the monitor listening."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from rubato.actors import plugins
from rubato.actors.checkpoints.checkpoint import name
from rubato.actors.engines.engine import Chunk, Engine, EngineHook
from rubato.actors.engines.weights import WeightsPuller
from rubato.actors.engines.worker import EngineRequest, EngineWorker
from rubato.actors.gateway.gateway import Address, Gateway
from rubato.actors.gateway.server import SessionServer
from rubato.actors.gateway.session import Session
from rubato.actors.messages.moves import MovePrepared, NotMoved, PrepareMove, TakeMove
from rubato.actors.messages.samples import Batch, Claim, Commit, DrawTerm, NotReady, Put, Stored, Term
from rubato.actors.moves.departures import Departures, EngineMoves, Leaving
from rubato.actors.rewards.service import RewardService
from rubato.actors.samples.buffer import SampleBuffer
from rubato.actors.training.train_engine import TrainEngine
from rubato.actors.training.trainer import Trainer
from rubato.bus.message import Ack
from rubato.runtime.actor import handler
from rubato.runtime.kernel import Kernel
from rubato.sim.simtest.checks import InvariantChecks
from rubato.sim.simtest.http import HttpTasks
from rubato.sim.simtest.process import ActorProcess
from rubato.sim.simtest.toys import ToyScorer, ToyTrainEngine

ResultT = TypeVar("ResultT")

COSTS_S: Mapping[str, float] = {
    "train": 0.15,
    "snapshot": 0.02,
    "write_toy": 0.06,
    "export": 0.01,
    "toy_whole": 0.01,
    "read_tail": 0.005,
    "take_file": 0.01,
    "write_lines": 0.01,
    "append": 0.005,
    "newest": 0.02,
    "renderer": 0.03,
    "_read_address": 0.01,
    "_write_address": 0.01,
}
"""Virtual seconds of blocking calls, by the function's name."""


class SimKernel(Kernel):
    """Blocking calls take time, and have no effect once the process is dead."""

    process: ActorProcess

    async def offload(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT:
        await asyncio.sleep(cost_s or COSTS_S.get(_name_of(fn), 0.0))
        self.process.check_alive()
        return fn(*args)


class SimBuffer(SampleBuffer):
    """Tells the monitor what it acknowledged."""

    monitor: InvariantChecks
    process: ActorProcess

    @handler(concurrency=1024)
    async def put(self, request: Put) -> Stored:
        stored = await super().put(request)
        if self.process.alive:
            self.monitor.stored(request.trajectory, stored.fate)
        return stored

    @handler(concurrency=16)
    async def draw_term(self, request: DrawTerm) -> Term:
        reply = await super().draw_term(request)
        if self.process.alive:
            self.monitor.drew(reply.term)
        return reply

    @handler(concurrency=16)
    async def claim(self, request: Claim) -> Batch | NotReady:
        reply = await super().claim(request)
        if self.process.alive and isinstance(reply, Batch):
            self.monitor.trainer_answered("CLAIM", request.step, request.term, self._groups.training.term)
        return reply

    @handler(concurrency=16)
    async def commit(self, request: Commit) -> Ack:
        newest = self._groups.training.term
        ack = await super().commit(request)
        if self.process.alive:
            self.monitor.trainer_answered("COMMIT", request.step, request.term, newest)
        return ack


class SimDepartures(Departures):
    """Tells the monitor what became of each request that was parked."""

    async def prepare(
        self, engine: Engine, shared: EngineRequest, leaving: Leaving, order: PrepareMove, weights: WeightsPuller
    ) -> MovePrepared | NotMoved:
        reply = await super().prepare(engine, shared, leaving, order, weights)
        parked, monitor = leaving.parked, cast("SimEngine", self._actor).monitor
        if parked is not None and parked.number == order.number:
            move = (order.request_id, order.number)
            parked.taken.add_done_callback(lambda taken: taken.result() or monitor.kept(move))
        return reply

    def take(self, request: TakeMove) -> Ack | NotMoved:
        reply = super().take(request)
        if isinstance(reply, Ack):
            cast("SimEngine", self._actor).monitor.given((request.request_id, request.number))
        return reply


class SimMoves(EngineMoves):
    departures_class = SimDepartures


class SimEngine(EngineWorker):
    """Tells the monitor which requests left it, and what it sampled."""

    monitor: InvariantChecks
    process: ActorProcess

    def _sampled(self, shared: EngineRequest, chunk: Chunk) -> None:
        super()._sampled(shared, chunk)
        self.monitor.tokens.sampled(shared.request, shared.tokens)

    def make(self, path: str) -> EngineHook:
        return SimMoves(self) if path == plugins.ENGINE_MOVES else super().make(path)


class SimServer(SessionServer):
    """Its requests come without sockets. Tells the monitor whose session is which sample's."""

    def __init__(self, model: str, gateway: "SimGateway") -> None:
        super().__init__(model)
        self._gateway = gateway

    def add(self, session: Session) -> None:
        self._gateway.monitor.tokens.opened(session.id, session.recorder.ticket)
        super().add(session)

    async def serve(self, listening: Any, *opening: Any) -> None:
        await self._gateway.http.serve(self._app(opening))


class NoSocket:
    """Where a gateway listens."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80


class SimGateway(Gateway):
    """Is asked without sockets."""

    monitor: InvariantChecks
    process: ActorProcess

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.notice = self._tell
        self.http = HttpTasks(self._broke)
        before, self._server = self._server, SimServer(self.run.folder.name, self)
        self._server.admin_key = before.admin_key

    async def _bound(self, host: str, port: int, before: Address) -> Any:
        return NoSocket()

    def _tell(self, text: str, *, good: bool = False) -> None:
        """The name of its log differs from run to run."""
        self._kernel.notice(text.replace(str(self.run.folder), "RUN"), good=good)

    def held(self) -> list[str]:
        """Sessions that are open, openings that wait and requests under way."""
        sessions = len({session.id for session in self._server._sessions.values()})  # pyright: ignore[reportPrivateUsage]
        return [*self.http.paths, *["a session"] * sessions, *["an opening"] * len(self._openings)]

    def _broke(self, text: str) -> None:
        self.monitor.fail("no actor breaks", f"{self.name}: {text}")


class SimRewards(RewardService):
    """Scores without worker processes, and tells the monitor what."""

    monitor: InvariantChecks
    process: ActorProcess

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._scorer: Any = ToyScorer(lambda request: self.monitor.tokens.scored(request))


class SimTrainer(Trainer):
    """Trains a toy, whose saves are where it may be made to crash."""

    monitor: InvariantChecks
    process: ActorProcess
    saving: Callable[[ActorProcess, str], None]

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self.offload = self._offload_and_save

    async def _offload_and_save(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT:
        result = await self._kernel.offload(fn, *args, cost_s=cost_s)
        if fn is name:
            self.saving(self.process, "named")
        elif _name_of(fn) == "write_toy":
            self.saving(self.process, "written")
        return result

    def _build(self) -> TrainEngine:
        return ToyTrainEngine(lambda *update: self.monitor.trained(*update, term=self.term), lambda point: self.saving(self.process, point))


def _name_of(fn: Callable[..., object]) -> str:
    """Of a function, or of the one that a partial calls."""
    return getattr(getattr(fn, "func", fn), "__name__", "")
