"""A whole job on one host in virtual time: every actor is a process on the same cores, and the live planners decide."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from actors.config import StalenessSection, TrainSection
from actors.engines.section import EngineSection
from actors.envs.section import EnvSection, RolloutSection
from actors.messages.samples import Ticket
from actors.samples.book import Limits
from actors.samples.groups import Group
from actors.samples.section import SamplesSection
from actors.training.section import CheckpointSection
from planning.snapshot import RequestView
from runtime.config.config import RunSection, StateSection
from sim.buffer_model import ModelledBuffer
from sim.onehost.cores import Cores, Part
from sim.onehost.costs import Calibration
from sim.onehost.engine import HostedEngine
from sim.proxy_model import ModelledProxy
from sim.rollout import Played, SimGaveUp, SimRolloutContext, play
from sim.timeline import Timeline
from sim.workload import Episode, Turn, chance_of

NEVER_LAPSES_S = 1e9
"""Modelled holders of tickets do not die."""


class JobShape(NamedTuple):
    """What a live job's config says, and how many processes of the two roles that scale."""

    run: RunSection
    train: TrainSection
    staleness: StalenessSection
    samples: SamplesSection
    env: EnvSection
    rollout: RolloutSection
    engine: EngineSection
    checkpoint: CheckpointSection
    state: StateSection
    num_engines: int
    num_managers: int


@dataclass(frozen=True, slots=True)
class HostStep:
    """One training step, in virtual seconds, from the end of the one before; `used` has CPU and busy seconds so far by part."""

    step: int
    began_s: float
    asked_s: float
    """The checkpoint of the step before, if any, is behind it."""
    claimed_s: float
    trained_s: float
    published_s: float
    ended_s: float
    tokens: int
    used: dict[str, tuple[float, float]]


class HostedJob:
    """`run` simulates all steps; `rows` then says what happened."""

    def __init__(self, shape: JobShape, calibration: Calibration, seed: int) -> None:
        self.shape, self.costs, self.rollouts = shape, calibration.costs, calibration.rollouts
        self._seed = seed
        self.timeline = timeline = Timeline()
        cores = Cores(timeline, calibration.cores - self.costs.background_cores)
        self.parts: dict[str, Part] = {}
        for name in ("llm_proxy-1", "reward_service-1", "sample_buffer-1", "node-1", "trainer-1"):
            self.parts[name] = Part(cores, timeline, name)
        managers = [f"env_manager-{i + 1}" for i in range(shape.num_managers)]
        engines = [f"engine-{i + 1}" for i in range(shape.num_engines)]
        self.parts |= {name: Part(cores, timeline, name) for name in managers}
        self.managers = [self.parts[name] for name in managers]
        self.engines = [
            HostedEngine(
                timeline, Part(cores, timeline, name), Part(cores, timeline, name), shape.engine, self.costs.engine
            )
            for name in engines
        ]
        self.proxy = ModelledProxy(timeline, self.engines)
        train = shape.train
        limits = Limits(
            group_size=train.group_size, batch_groups=train.batch_groups, steps=shape.run.steps, run_seed=seed,
            max_attempts=shape.samples.max_attempts, unbounded_batches=shape.samples.unbounded_batches,
            ticket_ttl_s=NEVER_LAPSES_S,
        )  # fmt: skip
        self.buffer = ModelledBuffer(timeline, limits, shape.staleness.bound)
        self.rows: list[HostStep] = []
        self._tokens: dict[str, int] = {}
        self._train_busy_s = self._counts_s = 0.0

    def run(self) -> list[HostStep]:
        """Simulate every step."""
        for manager in self.managers:
            stage = self._stage(manager)
            for _ in range(self.shape.env.concurrency):
                self.timeline.start(self._environment(stage))
        self.timeline.run(until=self.timeline.start(self._trainer()).ended)
        return self.rows

    # -- rollouts -------------------------------------------------------------------------------------------------

    def _stage(self, manager: Part) -> SimRolloutContext:
        return SimRolloutContext(
            self.timeline, _ThroughProcesses(self, manager), self._score, version=lambda: self.buffer.book.version,
            allowed=lambda task: (), alpha=self.shape.staleness.bound,
        )  # fmt: skip

    async def _environment(self, stage: SimRolloutContext) -> None:
        while True:
            changed = self.buffer.changed
            ticket = self.buffer.issue()
            if ticket is None:
                await changed
            else:
                await self._roll_out(stage, ticket)

    async def _roll_out(self, stage: SimRolloutContext, ticket: Ticket) -> None:
        drawn = self._episode(ticket)
        try:
            played: Played = await play(stage, f"{ticket.trajectory_id}.{ticket.attempt}", drawn, ticket.version)
        except SimGaveUp as given_up:
            self.buffer.give_up(ticket, given_up.reason, retry=given_up.retry)
            return
        await self.parts["sample_buffer-1"].handle(self.costs.sample_buffer_trajectory_s)
        await self.parts["node-1"].handle(self.costs.node_trajectory_s)
        self._tokens[ticket.trajectory_id] = drawn.tokens
        self.buffer.put(ticket, played.version_first, float(int(ticket.trajectory_id.rpartition(".")[2]) % 2))

    def _episode(self, ticket: Ticket) -> Episode:
        """Turns as recorded at that stage of training; the first shows the prompt, each later one what the environment answers."""
        like = self.rollouts
        chance = chance_of(self._seed, f"{ticket.trajectory_id}/{ticket.attempt}")
        turns = max(1, round(like.stage(ticket.version).turns.draw(chance)))
        sampled = max(1, round(like.action_tokens))
        shown = [like.prompt_tokens] + [like.observation_tokens] * (min(turns, self.shape.rollout.max_turns) - 1)
        return Episode("recorded", (), tuple(Turn(round(num), sampled, 0.0) for num in shown))

    async def _score(self, session: str, episode: Episode) -> None:
        await self.parts["reward_service-1"].handle(self.costs.reward_service_trajectory_s)

    # -- training -------------------------------------------------------------------------------------------------

    async def _trainer(self) -> None:
        timeline, costs, part = self.timeline, self.costs.trainer, self.parts["trainer-1"]
        for step in range(1, self.shape.run.steps + 1):
            asked = timeline.now
            while (batch := self.buffer.claim(step)) is None:
                await self.buffer.changed
            claimed, tokens = timeline.now, self._size(batch)
            share = self.rollouts.stage(step - 1).trained_share
            await part.work(costs.step_s + costs.token_s * share * tokens)
            trained = timeline.now
            self._train_busy_s += trained - claimed
            await part.work(costs.publish_s)
            await timeline.sleep(costs.publish_wait_s)
            for engine in self.engines:
                engine.published(step)
            self.buffer.trained(step, batch)
            published = timeline.now
            await part.work(costs.rest_s)
            await timeline.sleep(costs.rest_wait_s)
            began = self.rows[-1].ended_s if self.rows else 0.0
            row = HostStep(step, began, asked, claimed, trained, published, timeline.now, tokens, self._used())
            self.rows.append(row)
            if step % self.shape.checkpoint.every == 0:
                await self._save(claimed)

    async def _save(self, claimed_s: float) -> None:
        """As actors/training/saving.py: written now, counted once the store can't forget the step; one at a time."""
        await self.timeline.sleep(max(0.0, self._counts_s - self.timeline.now))
        await self.parts["trainer-1"].work(self.costs.trainer.checkpoint_s)
        await self.timeline.sleep(self.costs.trainer.checkpoint_wait_s)
        self._counts_s = max(self.timeline.now, claimed_s + self.shape.state.window_s)

    def _size(self, batch: list[Group]) -> int:
        names = [f"{g.id}.{i}" for g in batch for i, member in enumerate(g.members) if member.state == "scored"]
        return sum(self._tokens.pop(name) for name in names)

    def _used(self) -> dict[str, tuple[float, float]]:
        used = {name: (part.cpu_s, 0.0) for name, part in self.parts.items()}
        used["trainer-1"] = (used["trainer-1"][0], self._train_busy_s)
        for engine in self.engines:
            used[engine.name] = (engine.cpu_s, engine.busy_until(self.timeline.now))
        return used


class _ThroughProcesses:
    """A turn's way: manager, proxy, engine, proxy, and back to the manager, whose next turn begins with the environment's step."""

    def __init__(self, job: HostedJob, manager: Part) -> None:
        self._manager, self._proxy, self._routed = manager, job.parts["llm_proxy-1"], job.proxy
        self._turn_s, self._proxy_s = job.costs.env_manager_turn_s, job.costs.llm_proxy_turn_s / 2

    async def generate(self, request: RequestView, context: int, new_tokens: int, allowed: Collection[str] = ()) -> int:
        await self._manager.handle(self._turn_s)
        await self._proxy.handle(self._proxy_s)
        version = await self._routed.generate(request, context, new_tokens, allowed)
        await self._proxy.handle(self._proxy_s)
        return version

    def forget(self, session: str) -> None:
        self._routed.forget(session)
