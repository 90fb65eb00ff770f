"""The reward service in virtual time: its workers take what waits as one batch each, as actors/rewards/service.py does."""

from collections import deque

from rubato.actors.rewards.service import BATCH
from rubato.planning.autoscale import PoolBounds, PoolMeter, WorkersWanted, autoscale
from rubato.sim.timeline import SimEvent, Timeline
from rubato.sim.workload import Episode


class ElasticWorkers:
    """Workers that `rubato.planning.autoscale` starts and ends, one call at a time each, as actors/rewards/local.py has them."""

    def __init__(self, timeline: Timeline, bounds: PoolBounds, start_s: float, *, idle: int = 0) -> None:
        """`idle` are there from the beginning."""
        self._timeline = timeline
        self._bounds = bounds
        self._start_s = start_s
        self._meter = PoolMeter()
        self._plan = WorkersWanted(0, "nothing was asked yet")
        self._waiting: deque[SimEvent] = deque()
        self._idle, self._busy, self._starting = idle, 0, 0
        self._look_at = -1.0
        self._since, self._worker_s = 0.0, 0.0
        self.most = self.cold_starts = 0
        """Workers at once, and those that were started."""
        if idle:
            self._look()

    async def call(self, service_s: float) -> None:
        """Wait for a worker, and until it is through."""
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

    def worker_s(self) -> float:
        """Seconds that workers were there until now, idle or not."""
        now = self._timeline.now
        self._worker_s += (now - self._since) * self._num
        self._since = now
        return self._worker_s

    @property
    def _num(self) -> int:
        return self._idle + self._busy + self._starting

    def _look(self) -> None:
        """Give those that wait what is idle, then start and end as planned now."""
        self.worker_s()
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
        self.worker_s()
        self._meter.started(self._start_s)
        self._starting -= 1
        self._idle += 1
        self._look()


class RewardPool:
    """`workers` at once; each scores the trajectories of its batch one after another, and answers them together.

    With `elastic` there are as many as that has: a batch waits for one that is free.
    """

    def __init__(self, timeline: Timeline, workers: int, elastic: ElasticWorkers | None = None) -> None:
        self._timeline = timeline
        self._waiting: deque[tuple[float, SimEvent]] = deque()
        self._arrived = timeline.event()
        self._spend = timeline.sleep if elastic is None else elastic.call
        for _ in range(workers):
            timeline.start(self._serve())

    async def score(self, session: str, episode: Episode) -> None:
        """Takes `reward_s` of its task, and the wait for a worker."""
        scored = self._timeline.event()
        self._waiting.append((episode.reward_s, scored))
        self._arrived.set()
        await scored

    async def _serve(self) -> None:
        while True:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            if not batch:
                self._arrived = self._timeline.event() if self._arrived.happened else self._arrived
                await self._arrived
                continue
            await self._spend(sum(reward_s for reward_s, _ in batch))
            for _, scored in batch:
                scored.set()
