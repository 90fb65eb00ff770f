"""A job on one host: every actor is a process on the same cores, and costs what a recorded run's did."""

from collections.abc import Mapping
from typing import NamedTuple

from rubato.actors.config import RolloutSection, SamplesSection, StalenessSection, TrainSection
from rubato.actors.engines.section import EngineSection
from rubato.actors.envs.section import EnvSection
from rubato.actors.messages.samples import Ticket
from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.actors.training.trainer import CheckpointSection
from rubato.planning.adaptive_alpha import AlphaBounds
from rubato.runtime.config import RunSection
from rubato.runtime.errors import ConfigError
from rubato.sim.buffer_model import NEVER_LAPSES_S, ModelledBuffer
from rubato.sim.job import Environments, Job
from rubato.sim.manager_model import ModelledManager, TurnRequest
from rubato.sim.onehost.calibrated import Calibration
from rubato.sim.onehost.cores import Cores, HostProcess
from rubato.sim.onehost.hosted_engine import HostedEngine
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.timeline import Timeline
from rubato.sim.workload import Episode, Turn, chance_of


class HostJobSpec(NamedTuple):
    """What a live job's config says, and how many processes of the two roles that scale."""

    run: RunSection
    train: TrainSection
    staleness: StalenessSection
    samples: SamplesSection
    env: EnvSection
    rollout: RolloutSection
    engine: EngineSection
    checkpoint: CheckpointSection
    num_engines: int
    num_managers: int


class HostCosts:
    """CPU costs of the parts, which share the cores: what costs one part CPU seconds slows the others too."""

    def __init__(self, spec: HostJobSpec, calibration: Calibration, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._cpu, self._rollouts = calibration.costs, calibration.rollouts
        self.timeline = Timeline()
        self._cores = Cores(self.timeline, calibration.cores - self._cpu.background_cores)
        self._parts: dict[str, HostProcess] = {}
        self._proxy_part, self._rewards, self._buffer, self._node, self._trainer = (
            self._part(name) for name in ("llm_proxy-1", "reward_service-1", "sample_buffer-1", "node-1", "trainer-1")
        )
        managers = [self._part(f"env_manager-{number + 1}") for number in range(spec.num_managers)]
        self._engines = [self._engine(f"engine-{number + 1}") for number in range(spec.num_engines)]
        self._proxy = ModelledProxy(self.timeline, self._engines)
        self.environments = [Environments(self._manager(part), spec.env.concurrency) for part in managers]
        self._train_busy_s = 0.0

    def _part(self, name: str) -> HostProcess:
        return self._parts.setdefault(name, HostProcess(self._cores, self.timeline, name))

    def _engine(self, name: str) -> HostedEngine:
        loop, steps = (HostProcess(self._cores, self.timeline, name) for _ in range(2))
        return HostedEngine(self.timeline, loop, steps, self._spec.engine, self._cpu.engine)

    def _manager(self, part: HostProcess) -> ModelledManager:
        turns = _TurnThroughProcesses(part, self._proxy_part, self._proxy, self._cpu.env_manager_turn_s, self._cpu.llm_proxy_turn_s / 2)
        return ModelledManager(self.timeline, turns, self._score)

    # -- rollouts -------------------------------------------------------------------------------------------------

    def episode(self, ticket: Ticket) -> Episode:
        """Turns as recorded at that stage of training; the first shows the prompt, each later one what the environment answers."""
        like = self._rollouts
        chance = chance_of(self._seed, f"{ticket.trajectory_id}/{ticket.attempt}")
        turns = max(1, round(like.stage(ticket.version).turns.draw(chance)))
        sampled = max(1, round(like.action_tokens))
        shown = [like.prompt_tokens] + [like.observation_tokens] * (min(turns, self._spec.rollout.max_turns) - 1)
        return Episode("recorded", (), tuple(Turn(round(num), sampled, 0.0) for num in shown))

    async def _score(self, session: str, episode: Episode) -> None:
        await self._rewards.handle(self._cpu.reward_service_trajectory_s)

    async def store(self) -> None:
        await self._buffer.handle(self._cpu.sample_buffer_trajectory_s)
        await self._node.handle(self._cpu.node_trajectory_s)

    # -- training -------------------------------------------------------------------------------------------------

    async def train(self, step: int, tokens: int, sequences: int) -> None:
        costs, began = self._cpu.trainer, self.timeline.now
        share = self._rollouts.stage(step - 1).trained_share
        await self._trainer.work(costs.step_s + costs.token_s * share * tokens)
        self._train_busy_s += self.timeline.now - began

    async def publish(self, step: int) -> None:
        await self._trainer.work(self._cpu.trainer.publish_s)
        await self.timeline.sleep(self._cpu.trainer.publish_wait_s)
        for engine in self._engines:
            engine.published(step)

    async def finish(self, step: int) -> None:
        await self._trainer.work(self._cpu.trainer.rest_s)
        await self.timeline.sleep(self._cpu.trainer.rest_wait_s)

    async def checkpoint(self, step: int) -> None:
        if step % self._spec.checkpoint.every == 0:
            await self._trainer.work(self._cpu.trainer.checkpoint_s)
            await self.timeline.sleep(self._cpu.trainer.checkpoint_wait_s)

    def used(self) -> Mapping[str, tuple[float, float]]:
        used = {name: (part.cpu_s, 0.0) for name, part in self._parts.items()}
        used["trainer-1"] = (used["trainer-1"][0], self._train_busy_s)
        for engine in self._engines:
            used[engine.name] = (engine.cpu_s, engine.busy_until(self.timeline.now))
        return used


def host_job(spec: HostJobSpec, calibration: Calibration, seed: int) -> Job:
    """Raises ConfigError for what is not modelled."""
    limits = GroupLimits(
        group_size=spec.train.group_size, batch_groups=spec.train.batch_groups, steps=spec.run.steps, run_seed=seed,
        max_attempts=spec.samples.max_attempts, unbounded_batches=spec.samples.unbounded_batches,
        ticket_ttl_s=NEVER_LAPSES_S,
    )  # fmt: skip
    costs = HostCosts(spec, calibration, seed)
    staleness = spec.staleness
    if staleness.stragglers == "drop":
        raise ConfigError("staleness.stragglers=drop is not modelled for processes on one host. Set it to wait")
    bounds = AlphaBounds(staleness.alpha_min, staleness.alpha_max) if staleness.alpha == "auto" else None
    buffer = ModelledBuffer(costs.timeline, Groups(limits, staleness.bound), bounds)
    return Job(buffer, spec.run.steps, costs)


class _TurnThroughProcesses(NamedTuple):
    """A turn's way: manager, proxy, engine, proxy, and back to the manager, whose next turn begins with the environment's step."""

    manager: HostProcess
    proxy: HostProcess
    routed: ModelledProxy
    manager_s: float
    proxy_s: float

    async def generate(self, request: TurnRequest, context: int, new_tokens: int, task: str = "") -> int:
        await self.manager.handle(self.manager_s)
        await self.proxy.handle(self.proxy_s)
        version = await self.routed.generate(request, context, new_tokens, task)
        await self.proxy.handle(self.proxy_s)
        return version

    def forget(self, session: str) -> None:
        self.routed.forget(session)
