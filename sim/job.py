"""A whole job in virtual time: environments roll out, the buffer admits and hands over, the trainer trains and publishes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import Field

from actors.messages.samples import Ticket
from actors.samples.book import Limits
from actors.samples.groups import Group
from runtime.config.config import Section
from sim.batching import ModelledEngine
from sim.buffer_model import ModelledBuffer
from sim.engine_model import EngineModel, EngineSpec
from sim.proxy_model import ModelledProxy
from sim.rollout import SimGaveUp, SimRolloutContext, drawn_scores, play
from sim.timeline import Timeline
from sim.training_model import TrainerSpec
from sim.weight_sync import StoreSync
from sim.workload import TaskSpec, episode, task_of

NEVER_LAPSES_S = 1e9
"""Modelled holders of tickets do not die."""


class PoolSpec(Section):
    """Engines of one kind; `name` is the pool that task domains are mapped to."""

    name: str
    engine: EngineSpec
    count: int = Field(ge=1)
    tasks: tuple[str, ...] = ()
    """Task domains that are sent here; none means that every domain may come."""


class ClusterJobSpec(Section):
    """What a job consists of; the same knobs as a live job's configuration."""

    pools: tuple[PoolSpec, ...] = Field(min_length=1)
    trainer: TrainerSpec
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    weights: StoreSync
    alpha: int = Field(default=1, ge=0)
    batch_groups: int = Field(ge=1)
    group_size: int = Field(default=8, ge=2)
    environments: int = Field(ge=1)
    """Rollouts at once."""
    steps: int = Field(ge=1)
    max_attempts: int = Field(default=3, ge=1)


class ClusterStep(NamedTuple):
    """One training step; times in virtual seconds."""

    step: int
    claimed_s: float
    waited_s: float
    train_s: float
    published_s: float
    tokens: int


@dataclass
class ClusterJob:
    """`run` simulates all steps; what happened stands in the fields afterwards."""

    spec: ClusterJobSpec
    seed: int
    rows: list[ClusterStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timeline = Timeline()
        self.engines = engines_of(self.timeline, self.spec.pools)
        limits = Limits(
            group_size=self.spec.group_size, batch_groups=self.spec.batch_groups, steps=self.spec.steps,
            run_seed=self.seed, max_attempts=self.spec.max_attempts, unbounded_batches=8, ticket_ttl_s=NEVER_LAPSES_S,
        )  # fmt: skip
        self.buffer = ModelledBuffer(self.timeline, limits, self.spec.alpha)
        self._tokens: dict[str, int] = {}
        mapped = allowed_engines(self.spec.pools)
        self.stage = SimRolloutContext(
            self.timeline, ModelledProxy(self.timeline, self.engines), drawn_scores(self.timeline),
            version=lambda: self.buffer.book.version, allowed=lambda task: mapped.get(task, ()), alpha=self.spec.alpha,
        )  # fmt: skip

    def run(self, steps: int | None = None) -> None:
        """Simulate up to the end of step `steps`; None means the job's last. A job that goes on admits as in its middle."""
        for _ in range(self.spec.environments):
            self.timeline.start(self._environment())
        self.timeline.run(until=self.timeline.start(self._trainer(steps or self.spec.steps)).ended)

    async def _environment(self) -> None:
        while True:
            changed = self.buffer.changed
            ticket = self.buffer.issue()
            if ticket is None:
                await changed
            else:
                await self._roll_out(ticket)

    async def _roll_out(self, ticket: Ticket) -> None:
        name = ticket.trajectory_id
        drawn = episode(task_of(self.spec.tasks, self.seed, ticket.group_id), self.seed, name, ticket.attempt)
        try:
            played = await play(self.stage, f"{name}.{ticket.attempt}", drawn, ticket.version)
        except SimGaveUp as given_up:
            self.buffer.give_up(ticket, given_up.reason, retry=given_up.retry)
            return
        self._tokens[name] = drawn.tokens
        # Alternating rewards give every group a spread: what is learned is no part of the model.
        self.buffer.put(ticket, played.version_first, float(int(name.rpartition(".")[2]) % 2))

    async def _trainer(self, steps: int) -> None:
        for step in range(1, steps + 1):
            began = self.timeline.now
            while (batch := self.buffer.claim(step)) is None:
                await self.buffer.changed
            claimed = self.timeline.now
            tokens, sequences = self._size(batch)
            train_s = self.spec.trainer.step_s(tokens, sequences)
            await self.timeline.sleep(train_s)
            await self._publish(step)
            self.buffer.trained(step, batch)
            row = ClusterStep(step, claimed, claimed - began, train_s, self.timeline.now, tokens)
            self.rows.append(row)

    async def _publish(self, step: int) -> None:
        """Hand the weights to the store, which the trainer waits for, as the live one does; engines pull on their own."""
        size = self.spec.trainer.model.weight_bytes
        await self.timeline.sleep(self.spec.weights.push_s(size))
        for engine in self.engines:
            self.timeline.start(self._pull(engine, step, size))

    async def _pull(self, engine: ModelledEngine, step: int, size: int) -> None:
        await self.timeline.sleep(self.spec.weights.staged_s(size) - self.spec.weights.push_s(size))
        engine.suspend()
        await self.timeline.sleep(self.spec.weights.load_s(size, engine.model.spec.num_gpus))
        engine.resume(step)

    def _size(self, batch: list[Group]) -> tuple[int, int]:
        names = [f"{g.id}.{i}" for g in batch for i, member in enumerate(g.members) if member.state == "scored"]
        return sum(self._tokens.pop(name) for name in names), len(names)


def engines_of(timeline: Timeline, pools: tuple[PoolSpec, ...]) -> list[ModelledEngine]:
    """All engines of all pools, named after their pool."""
    return [
        ModelledEngine(timeline, f"{pool.name}-{number}", EngineModel(pool.engine))
        for pool in pools
        for number in range(pool.count)
    ]


def allowed_engines(pools: tuple[PoolSpec, ...]) -> dict[str, frozenset[str]]:
    """Task domain -> engines; a domain that no pool names may go anywhere."""
    allowed: dict[str, set[str]] = {}
    for pool in pools:
        for task in pool.tasks:
            allowed.setdefault(task, set()).update(f"{pool.name}-{number}" for number in range(pool.count))
    return {task: frozenset(names) for task, names in allowed.items()}
