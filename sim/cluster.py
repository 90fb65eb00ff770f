"""A job on a cluster: pools of modelled engines, a trainer on GPUs of its own, weights through a store."""

from collections.abc import Callable, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from rubato.actors.config import Alpha
from rubato.actors.data.prompts import Mixture, mixture_of
from rubato.actors.data.tasks import TaskSection
from rubato.actors.messages.samples import Ticket
from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.planning.adaptive_alpha import AlphaBounds
from rubato.planning.autoscale import PoolBounds
from rubato.planning.roofline import Deployment, Roofline
from rubato.runtime.config import Section
from rubato.sim.affinity_model import ModelledAffinity, fixed_shares
from rubato.sim.buffer_model import NEVER_LAPSES_S, ModelledBuffer
from rubato.sim.disaggregated import DisaggregatedProxy
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.job import Environments, Job
from rubato.sim.manager_model import GeneratesTokens, ModelledManager, Scores, drawn_scores
from rubato.sim.moves_model import keep_moving
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.reward_model import ElasticWorkers, RewardPool
from rubato.sim.timeline import SimEvent, Timeline
from rubato.sim.training_model import TrainerSpec
from rubato.sim.weight_sync import StoreSync
from rubato.sim.workload import Episode, TaskSpec, episode, task_of


class PoolSpec(Section):
    """Engines of one kind; `name` is the pool that task domains are mapped to."""

    name: str
    engine: Deployment
    count: int = Field(ge=1)
    tasks: tuple[str, ...] = ()
    """Task domains that are sent here; none means that every domain may come."""
    serves: Literal["both", "prefill", "decode"] = "both"
    """As the live `engine.serves`; either every pool does both, or some prefill and the others decode."""


class ClusterJobSpec(Section):
    """What a job consists of; the same knobs as a live job's configuration."""

    pools: tuple[PoolSpec, ...] = Field(min_length=1)
    trainer: TrainerSpec
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    weights: StoreSync
    alpha: Alpha = 1
    alpha_min: int = Field(default=0, ge=0)
    alpha_max: int = Field(default=8, ge=0)
    stragglers: Literal["wait", "drop"] = "wait"
    """As the live `staleness.stragglers`."""
    drift: float = Field(default=0.0, ge=0)
    """How fast older samples lose weight: see `rubato.sim.buffer_model.ess_of`."""
    batch_groups: int = Field(ge=1)
    group_size: int = Field(default=8, ge=2)
    environments: int = Field(ge=1)
    """Rollouts at once."""
    steps: int = Field(ge=1)
    max_attempts: int = Field(default=3, ge=1)
    affinity: Literal["", "learned"] = ""
    """learned: domains are shared out by what is seen, anew at each weight version. Otherwise pools that name their `tasks` say it."""
    draw: Literal["chance", "mixture"] = "chance"
    """Of which task a group is. chance: its name says it, so that all who are compared meet the same groups. mixture: as a live job has it."""
    reward_workers: int = Field(default=0, ge=0)
    """Of the reward service, which score one trajectory after another; with 0 each score takes its time by itself."""
    reward_min_workers: int | None = Field(default=None, ge=0)
    """As the live `reward.min_workers`: from here to `reward_workers` there are as many as scores need, one at first. None: always all."""
    reward_start_s: float = Field(default=1.0, ge=0)
    """What one of them takes to start; the first is there from the beginning."""
    move_every_s: float = Field(default=0.0, ge=0)
    """Period at which a request moves from the engine that has most to the one that has fewest; 0 moves none."""

    @model_validator(mode="after")
    def _maps_tasks_once(self) -> Self:
        if self.affinity and (named := [pool.name for pool in self.pools if pool.tasks]):
            raise ValueError(f"affinity is {self.affinity}, so tasks of the pool {named[0]} have no effect. Leave them out")
        return self

    @model_validator(mode="after")
    def _bounds_rewards(self) -> Self:
        if self.reward_min_workers is not None and self.reward_min_workers > self.reward_workers:
            least, most = self.reward_min_workers, self.reward_workers
            raise ValueError(f"reward_min_workers={least} is more than reward_workers={most}. Raise reward_workers")
        if self.reward_min_workers is not None and not self.reward_workers:
            raise ValueError("reward_min_workers has no effect without reward_workers: set how many there are at most")
        return self

    @model_validator(mode="after")
    def _serves_both_stages(self) -> Self:
        stages = {pool.serves for pool in self.pools}
        if stages == {"both"}:
            return self
        if stages != {"prefill", "decode"}:
            raise ValueError("pools that prefill or decode need pools for both stages, and none that does both")
        if self.affinity or self.move_every_s or any(pool.tasks for pool in self.pools) or self.stragglers == "drop":
            raise ValueError("pools that prefill or decode go with neither affinity, tasks of a pool, move_every_s nor stragglers=drop")
        return self


class ClusterCosts:
    """Engines compute side by side; managers, proxy and buffer cost nothing."""

    def __init__(self, spec: ClusterJobSpec, seed: int) -> None:
        self.timeline = Timeline()
        self.engines = engines_of(self.timeline, spec.pools)
        self.affinity = affinity_of(self.engines, spec.pools, learned=spec.affinity == "learned")
        self.reward_workers: ElasticWorkers | None = None
        """Where they come and go."""
        manager = ModelledManager(self.timeline, self._proxy(spec), self._scores(spec))
        self.environments = (Environments(manager, spec.environments),)
        self._spec = spec
        self._seed = seed
        self._pushed: SimEvent | None = None

    def _proxy(self, spec: ClusterJobSpec) -> GeneratesTokens:
        if any(pool.serves != "both" for pool in spec.pools):
            num_prefill = sum(pool.count for pool in spec.pools if pool.serves == "prefill")
            return DisaggregatedProxy(self.timeline, self.engines, num_prefill)
        proxy = ModelledProxy(self.timeline, self.engines, self.affinity)
        if spec.move_every_s:
            self.timeline.start(keep_moving(self.timeline, proxy, spec.move_every_s))
        return proxy

    def _scores(self, spec: ClusterJobSpec) -> Scores:
        if not spec.reward_workers:
            return drawn_scores(self.timeline)
        if spec.reward_min_workers is None:
            return RewardPool(self.timeline, spec.reward_workers).score
        bounds = PoolBounds(spec.reward_min_workers, spec.reward_workers)
        self.reward_workers = ElasticWorkers(self.timeline, bounds, spec.reward_start_s, idle=1)
        return RewardPool(self.timeline, spec.reward_workers, self.reward_workers).score

    def episode(self, ticket: Ticket) -> Episode:
        named = [task for task in self._spec.tasks if task.name == ticket.task]
        task = named[0] if named else task_of(self._spec.tasks, self._seed, ticket.group_id)
        return episode(task, self._seed, ticket.trajectory_id, ticket.attempt)

    async def store(self) -> None:
        pass

    async def train(self, step: int, tokens: int, sequences: int) -> None:
        await self.timeline.sleep(self._spec.trainer.step_s(tokens, sequences))

    async def publish(self, step: int) -> None:
        """The trainer waits until the store has the version before, as the live one does; the rest goes on beside its next step."""
        if self._pushed is not None:
            await self._pushed
        self._pushed = self.timeline.start(self._push(step, self._spec.trainer.model.weight_bytes)).ended

    async def _push(self, step: int, size: int) -> None:
        """Hand the weights to the store; engines pull on their own."""
        await self.timeline.sleep(self._spec.weights.push_s(size))
        for engine in self.engines:
            self.timeline.start(self._pull(engine, step, size))
        if self.affinity is not None:
            self.affinity.replan()

    async def _pull(self, engine: ModelledEngine, step: int, size: int) -> None:
        weights = self._spec.weights
        await self.timeline.sleep(weights.staged_s(size) - weights.push_s(size))
        engine.suspend()
        await self.timeline.sleep(weights.load_s(size, engine.model.spec.num_gpus))
        engine.resume(step)

    async def finish(self, step: int) -> None:
        pass

    async def checkpoint(self, step: int) -> None:
        pass

    def used(self) -> Mapping[str, tuple[float, float]]:
        return {}


def cluster_job(
    spec: ClusterJobSpec, seed: int, costs: type[ClusterCosts] = ClusterCosts, groups_of: Callable[[GroupLimits, int], Groups] = Groups
) -> Job:
    """`groups_of` makes the groups, of their limits and α."""
    limits = GroupLimits(
        group_size=spec.group_size, batch_groups=spec.batch_groups, steps=spec.steps, run_seed=seed,
        max_attempts=spec.max_attempts, unbounded_batches=8, ticket_ttl_s=NEVER_LAPSES_S,
        mixture=mixture_of(sections_of(spec), seed) if spec.draw == "mixture" else Mixture(),
    )  # fmt: skip
    made = costs(spec, seed)
    bounds = AlphaBounds(spec.alpha_min, spec.alpha_max) if spec.alpha == "auto" else None
    groups = groups_of(limits, spec.alpha_max if spec.alpha == "auto" else spec.alpha)
    return Job(ModelledBuffer(made.timeline, groups, bounds, spec.drift, drops=spec.stragglers == "drop"), spec.steps, made)


def sections_of(spec: ClusterJobSpec) -> dict[str, TaskSection]:
    """The live section `tasks` that says the same of them as `spec`; their environment class is the second mode's."""
    found: dict[str, TaskSection] = {}
    for task in spec.tasks:
        kwargs = {"task": task.model_dump(mode="json")}
        given = {"class": "rubato.sim.live.environment:ModelledEnv", "weight": task.share, "kwargs": kwargs}
        found[task.name] = TaskSection.model_validate(given)
    return found


def engines_of(timeline: Timeline, pools: tuple[PoolSpec, ...]) -> list[ModelledEngine]:
    """All engines of all pools, named after their pool; those that only prefill come first."""
    return [
        ModelledEngine(timeline, f"{pool.name}-{number}", Roofline(pool.engine))
        for pool in sorted(pools, key=lambda pool: pool.serves != "prefill")
        for number in range(pool.count)
    ]


def affinity_of(engines: list[ModelledEngine], pools: tuple[PoolSpec, ...], *, learned: bool = False) -> ModelledAffinity | None:
    """Sends each task domain to the pools that name it, or as is learned; None where every domain may go anywhere."""
    if not learned and not any(pool.tasks for pool in pools):
        return None
    by_pool = {p.name: [e for e in engines if e.name.rpartition("-")[0] == p.name] for p in pools}
    shares = fixed_shares({p.name: p.tasks for p in pools}, {p.name: p.count for p in pools})
    return ModelledAffinity(by_pool, shares, learned=learned)


def manager_of(timeline: Timeline, engines: list[ModelledEngine], affinity: ModelledAffinity | None = None) -> ModelledManager:
    """Plays rollouts through a proxy of its own."""
    return ModelledManager(timeline, ModelledProxy(timeline, engines, affinity), drawn_scores(timeline))
