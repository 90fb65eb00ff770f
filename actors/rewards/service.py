"""Answers what a trajectory is worth, by reward functions wherever they run; each failure has a name. It keeps no state that a score
depends on."""

import asyncio
import math
from collections import deque
from functools import partial
from typing import ClassVar

from rubato.actors.config import RewardSection, is_url
from rubato.actors.data.tasks import Tasks, rewards_of
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.plugins import check_sandbox
from rubato.actors.rewards.scorer import Scorer
from rubato.planning.failures import RECENT, is_hopeless
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.errors import check_all
from rubato.runtime.importer import check_module
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.figures import ITSELF

BATCH = 64
"""Trajectories per call of a function: enough to make the call's own cost vanish. One alone where the time that it may take depends on its task."""

MAX_NOTICES = 3
"""Kinds of failure the user is told about; the log has all of them."""

FORGETS = 0.98
"""Weight that a call keeps with each further one: the newest fifty count."""


class CallCost:
    """What a call of the functions takes of a worker, fitted by least squares to a fixed part and one for each trajectory in it."""

    def __init__(self) -> None:
        self._weight = self._nums = self._seconds = self._squares = self._products = 0.0

    def note(self, num: int, seconds: float) -> None:
        """One call, of `num` trajectories."""
        sums = (self._weight, self._nums, self._seconds, self._squares, self._products)
        found = (1.0, num, seconds, num * num, num * seconds)
        sums = [FORGETS * before + new for before, new in zip(sums, found, strict=True)]
        self._weight, self._nums, self._seconds, self._squares, self._products = sums

    @property
    def each_s(self) -> float:
        """What one trajectory more takes; where calls of one size alone were seen, its share of them."""
        if not self._nums:
            return 0.0
        share = self._seconds / self._nums
        spread = self._squares - self._nums**2 / self._weight
        if spread < 0.01 * self._squares:
            return share
        return min(share, max(0.0, (self._products - self._nums * self._seconds / self._weight) / spread))

    @property
    def alone_s(self) -> float:
        """What a call of one trajectory takes."""
        return self.each_s + max(0.0, self._seconds - self.each_s * self._nums) / max(self._weight, 1.0)


_Waiting = tuple[Score, "asyncio.Future[Scores | NotScored]"]


class RewardService(Actor):
    """While all workers are busy, requests gather; one that gets free takes its share of them as one batch."""

    role: ClassVar[str] = "reward_service"
    drain_order: ClassVar[int] = 60

    class Config(ActorConfig):
        reward: RewardSection = RewardSection()
        tasks: Tasks = {}

    config: Config

    @classmethod
    def check_host(cls, config: Config) -> None:
        """The functions' modules; what is in them shows when a worker loads them."""
        own = {t: f"tasks.{name}.rewards" for name, task in config.tasks.items() for t in task.rewards or ()}
        named = own | dict.fromkeys(config.reward.functions, "reward.functions")
        modules = (partial(check_module, target, key=key) for target, key in named.items() if not is_url(target))
        check_all([*modules, partial(check_sandbox, config.reward, "reward")])

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = config.reward
        self._functions = rewards_of(config.tasks, config.reward)
        self._scorer = Scorer(
            config.reward, config.tasks, metrics=self.metrics, on_output=lambda line: self.log.info("user_output", text=line)
        )
        self._batch = 1 if self._scorer.one_each else BATCH
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._noticed: set[str] = set()
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._ever_good = self._stopping = False
        self._cost = CallCost()

    async def on_start(self) -> None:
        """Load the functions; one that can't be loaded ends the job with a sentence."""
        if problem := await self._scorer.start():
            self.finish(problem, failed=True)
        self.metrics.gauge("rollout/reward_workers", self._section.workers)
        if self._section.min_workers is not None:
            self.spawn(self._scorer.run(), name=f"{self.name}.workers")
        for index in range(self._section.workers):
            self.spawn(self._serve(), name=f"{self.name}.batches-{index}")

    async def on_stop(self) -> None:
        """Kill the workers."""
        self._stopping = True
        await self._scorer.close()

    @handler(concurrency=1024)
    async def score(self, request: Score) -> Scores | NotScored:
        """The functions' numbers for one trajectory, or why there are none."""
        if not self._functions.get(request.task, self._section.targets):
            return Scores(())
        reply: asyncio.Future[Scores | NotScored] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, reply))
        self._arrived.set()
        with self.waits.on(request.trajectory_id, stage="queue", holder=ITSELF):
            return await reply

    async def _serve(self) -> None:
        while True:
            share = math.ceil(len(self._waiting) / self._section.workers)  # the other workers have theirs
            batch = [self._waiting.popleft() for _ in range(min(self._batch, share))]
            batch = [(request, reply) for request, reply in batch if not reply.done()]
            if batch:
                await self._answer(batch)
            elif not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()

    async def _answer(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        detail, limit = f"{len(batch)} trajectories", f"reward.timeout_s={self._section.timeout_s:g}"
        wait = self.waits.on(batch[0][0].trajectory_id, stage="reward", detail=detail, limit=limit)
        with wait, self.metrics.busy():
            found = await self._scorer.score([request for request, _ in batch])
        self.metrics.observe("reward/batch", len(batch))
        self.metrics.observe("reward/wall_s", loop.time() - began)
        self._cost.note(len(batch), loop.time() - began)
        self.metrics.gauge("rollout/reward_each_s", self._cost.each_s)
        self.metrics.gauge("rollout/reward_alone_s", self._cost.alone_s)
        for (request, reply), scores in zip(batch, found, strict=True):
            if isinstance(scores, NotScored):
                scores = NotScored(scores.reason, self.run.hidden(scores.detail))
                self._failed(request, scores)
            else:
                self._ever_good = True
                self._recent.append(False)
            if not reply.done():
                reply.set_result(scores)

    def _failed(self, request: Score, why: NotScored) -> None:
        if self._stopping:
            return  # that its pool was closed is no news
        self.metrics.count("reward/failed")
        self.metrics.count(f"reward/failed/{why.reason}")
        self.log.warning("not_scored", trajectory=request.trajectory_id, reason=why.reason, detail=why.detail)
        log = self.run.folder / "logs" / f"{self.name}.jsonl"
        if why.reason not in self._noticed and len(self._noticed) < MAX_NOTICES:
            self._noticed.add(why.reason)
            self.notice(f"reward function {why.detail}. The rollout leaves its group. Log: {log}")
        if why.reason == "lost":
            return
        self._recent.append(True)
        if is_hopeless(self._recent, ever_good=self._ever_good):  # nothing to learn from
            share = f"{sum(self._recent)} of the last {len(self._recent)} trajectories got no reward"
            self.finish(f"reward function {why.detail}. {share}. Log: {log}", failed=True)
