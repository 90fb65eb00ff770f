"""RollArt, R3: a reward model on GPUs of its own against one behind functions, whose GPUs then roll out."""

from collections.abc import Sequence
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from rubato.planning.autoscale import PoolBounds
from rubato.planning.roofline import Deployment, Roofline
from rubato.sim.cluster import PoolSpec, engines_of
from rubato.sim.distribution import Distribution
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.manager_model import TurnRequest
from rubato.sim.outcome import Cell, RunProgress, RunResult, Table
from rubato.sim.proxy_model import ModelledProxy
from rubato.sim.reward_model import ElasticWorkers
from rubato.sim.rollart.batch import BatchRun
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.timeline import Timeline
from rubato.sim.workload import Episode, TaskSpec, chance_of, episode


class Serverless(Scenario):
    """`gpus` roll out where functions score; `reward_gpus` of them score where they do not."""

    engine: Deployment
    reward: Deployment
    verdict_tokens: Distribution
    task: TaskSpec
    trajectories: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    gpus: int = Field(ge=2)
    reward_gpus: int = Field(ge=1)
    call_s: float = Field(ge=0)
    """A function call, beside what its model computes and the start of an instance."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reward_gpus >= self.gpus:
            raise ValueError("reward_gpus must be fewer than gpus")
        return self


class Rewards:
    """Scores a trajectory by letting the reward model read its tokens and write a verdict."""

    def __init__(self, scenario: Serverless) -> None:
        self._scenario = scenario

    def verdict(self, session: str) -> int:
        return max(1, round(self._scenario.verdict_tokens.draw(chance_of(self._scenario.seed, f"{session}/verdict"))))


class OwnGpus(Rewards):
    """Engines of its own; each goes to the first request of the queue."""

    def __init__(self, scenario: Serverless, timeline: Timeline) -> None:
        super().__init__(scenario)
        pool = PoolSpec(name="reward", engine=scenario.reward, count=scenario.reward_gpus)
        self.engines = engines_of(timeline, (pool,))
        self._proxy = ModelledProxy(timeline, self.engines)

    async def score(self, session: str, episode: Episode) -> None:
        await self._proxy.generate(TurnRequest(session), episode.tokens, self.verdict(session))
        self._proxy.forget(session)


class Functions(Rewards):
    """Instances from none to as many as there are trajectories at once.

    One starts by bringing the reward model from host memory to its GPU.
    """

    def __init__(self, scenario: Serverless, timeline: Timeline) -> None:
        super().__init__(scenario)
        self._model = Roofline(scenario.reward)
        self.instances = ElasticWorkers(timeline, PoolBounds(0, scenario.concurrency), self._model.swap_s())

    async def score(self, session: str, episode: Episode) -> None:
        tokens = self.verdict(session)
        steps_s = tokens * self._model.step_s(1, episode.tokens + tokens / 2)
        await self.instances.call(self._scenario.call_s + self._model.prefill_s(episode.tokens) + steps_s)


def run(scenario: Serverless, progress: RunProgress) -> RunResult:
    episodes = [episode(scenario.task, scenario.seed, f"t{number}") for number in range(scenario.trajectories)]
    rows: list[tuple[Cell, ...]] = []
    for arm, gpus in (("local", scenario.gpus - scenario.reward_gpus), ("serverless", scenario.gpus)):
        batch = BatchRun((PoolSpec(name="rollout", engine=scenario.engine, count=gpus),))
        own = OwnGpus(scenario, batch.timeline)
        functions = Functions(scenario, batch.timeline)
        batch.score_by(own.score if arm == "local" else functions.score)
        done = batch.trajectories(episodes, concurrency=scenario.concurrency)
        used = fmean(done.busy_s.values()) / done.seconds
        rewarding = fmean(engine.usage.busy_s for engine in own.engines) / done.seconds
        rows.append((arm, done.seconds, used, rewarding, _filled(batch.engines, done.seconds), _filled(own.engines, done.seconds)))
        progress(len(rows), 2, arm)
    local, freed = rows
    instances = functions.instances
    instance_s = instances.worker_s()
    return RunResult(
        figures={
            "rollout_local": float(local[1]),
            "rollout_serverless": float(freed[1]),
            "rollout_speedup": float(local[1]) / float(freed[1]),
            "utilisation_local": float(local[3]),
            "utilisation_serverless": float(freed[2]),
            "filled_local": float(local[5]),
            "filled_serverless": float(freed[4]),
            "instances_mean": instance_s / float(freed[1]),
            "instances_most": float(instances.most),
            "cold_starts": float(instances.cold_starts),
        },
        tables={
            "phases": Table(
                ("arm", "rollout_s", "rollout_gpus_busy", "reward_gpus_busy", "rollout_gpus_filled", "reward_gpus_filled"), rows
            )
        },
        notes=(
            "Utilisation is of the GPUs in question: they score in one arm and roll out in the other. It is the share of time in which they compute.",
            f"By requests over those that they could decode at once it is {local[5]:.1%} where they score, and {freed[4]:.1%} where they roll out.",
            f"Functions: {instance_s / float(freed[1]):.1f} instances on average, at most {instances.most}, {instances.cold_starts} started.",
        ),
    )


def _filled(engines: Sequence[ModelledEngine], seconds: float) -> float:
    """Requests that were decoded, over those that they had room for."""
    return fmean(engine.usage.request_s / engine.num_slots for engine in engines) / seconds


KIND = ScenarioKind(Serverless, run)
