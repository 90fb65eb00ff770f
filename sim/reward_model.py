"""The reward service in virtual time: its workers take what waits as one batch each, as actors/rewards/service.py does."""

from collections import deque

from actors.rewards.service import BATCH
from sim.timeline import SimEvent, Timeline
from sim.workload import Episode


class RewardPool:
    """`workers` at once; each scores the trajectories of its batch one after another, and answers them together."""

    def __init__(self, timeline: Timeline, workers: int) -> None:
        self._timeline = timeline
        self._waiting: deque[tuple[float, SimEvent]] = deque()
        self._arrived = timeline.event()
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
            await self._timeline.sleep(sum(reward_s for reward_s, _ in batch))
            for _, scored in batch:
                scored.set()
