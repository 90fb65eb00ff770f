"""RollArt, R3: a reward model on GPUs of its own against one behind functions, whose GPUs then roll out."""

from collections import deque
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from planning.autoscale import PoolBounds, PoolMeter, WorkersWanted, autoscale
from planning.roofline import EngineSpec, Roofline
from planning.routing import RequestView
from sim.cluster import PoolSpec, engines_of
from sim.distribution import Distribution
from sim.outcome import Cell, RunProgress, RunResult, Table
from sim.proxy_model import ModelledProxy
from sim.rollart.batch import BatchRun
from sim.scenario import Scenario, ScenarioKind
from sim.timeline import SimEvent, Timeline
from sim.workload import Episode, TaskSpec, chance_of, episode


class Serverless(Scenario):
    """`gpus` roll out where functions score; `reward_gpus` of them score where they do not."""

    engine: EngineSpec
    reward: EngineSpec
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
    """Engines of its own, at the head of the queue to whoever comes first."""

    def __init__(self, scenario: Serverless, timeline: Timeline) -> None:
        super().__init__(scenario)
        pool = PoolSpec(name="reward", engine=scenario.reward, count=scenario.reward_gpus)
        self.engines = engines_of(timeline, (pool,))
        self._proxy = ModelledProxy(timeline, self.engines)

    async def score(self, session: str, episode: Episode) -> None:
        await self._proxy.generate(RequestView(session), episode.tokens, self.verdict(session))
        self._proxy.forget(session)


class Functions(Rewards):
    """Instances that `planning.autoscale` starts and ends, one call at a time each; from none to as many as there are trajectories at once.

    One starts by bringing the reward model from host memory to its GPU.
    """

    def __init__(self, scenario: Serverless, timeline: Timeline) -> None:
        super().__init__(scenario)
        self._timeline = timeline
        self._model = Roofline(scenario.reward)
        self._start_s = self._model.swap_s()
        self._bounds = PoolBounds(0, scenario.concurrency)
        self._meter = PoolMeter()
        self._plan = WorkersWanted(0, "nothing was asked yet")
        self._waiting: deque[SimEvent] = deque()
        self._idle = self._busy = self._starting = 0
        self._look_at = -1.0
        self._since, self._instance_s = 0.0, 0.0
        self.most = self.cold_starts = 0
        """Instances at once, and those that were started."""

    async def score(self, session: str, episode: Episode) -> None:
        tokens = self.verdict(session)
        steps_s = tokens * self._model.step_s(1, episode.tokens + tokens / 2)
        service_s = self._scenario.call_s + self._model.prefill_s(episode.tokens) + steps_s
        self._meter.arrived(self._timeline.now)
        place = self._timeline.event()
        self._waiting.append(place)
        self._look()
        await place
        await self._timeline.sleep(service_s)
        self._meter.served(service_s)
        self._busy -= 1
        self._idle += 1
        self._look()

    def instance_s(self) -> float:
        """Seconds that instances were there until now, idle or not."""
        now = self._timeline.now
        self._instance_s += (now - self._since) * self._num
        self._since = now
        return self._instance_s

    @property
    def _num(self) -> int:
        return self._idle + self._busy + self._starting

    def _look(self) -> None:
        """Give those that wait what is idle, then start and end as planned now."""
        self.instance_s()
        while self._idle and self._waiting:
            self._idle -= 1
            self._busy += 1
            self._waiting.popleft().set()
        now = self._timeline.now
        load = self._meter.load(now, waiting=len(self._waiting), running=self._busy, workers=self._num)
        self._plan = autoscale(load, self._bounds, self._plan)
        for _ in range(self._plan.workers - self._num):
            self._starting += 1
            self.cold_starts += 1
            self._timeline.at(now + self._start_s, self._started)
        self._idle -= min(self._idle, max(0, self._num - self._plan.workers))
        self.most = max(self.most, self._num)
        if self._plan.again_s is not None and self._plan.again_s > self._look_at:
            self._look_at = self._plan.again_s
            self._timeline.at(self._look_at, self._look)

    def _started(self) -> None:
        self.instance_s()
        self._meter.started(self._start_s)
        self._starting -= 1
        self._idle += 1
        self._look()


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
        rows.append((arm, done.seconds, used, rewarding))
        progress(len(rows), 2, arm)
    local, freed = rows
    instance_s = functions.instance_s()
    return RunResult(
        figures={
            "rollout_local": float(local[1]),
            "rollout_serverless": float(freed[1]),
            "rollout_speedup": float(local[1]) / float(freed[1]),
            "utilisation_local": float(local[3]),
            "utilisation_serverless": float(freed[2]),
            "instances_mean": instance_s / float(freed[1]),
            "instances_most": float(functions.most),
            "cold_starts": float(functions.cold_starts),
        },
        tables={"phases": Table(("arm", "rollout_s", "rollout_gpus_busy", "reward_gpus_busy"), rows)},
        notes=(
            "Utilisation is of the GPUs in question: they score in one arm and roll out in the other.",
            f"Functions: {instance_s / float(freed[1]):.1f} instances on average, at most {functions.most}, {functions.cold_starts} started.",
        ),
    )


KIND = ScenarioKind(Serverless, run)
