"""Answers what a trajectory is worth, by user functions in killable worker processes; each failure has a name. It keeps no state."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, cast

import msgspec

from actors.config import RewardSection
from actors.messages.samples import MOST_REWARD, NotScored, Score, Scores, flaw_of_reward
from actors.tasks import Tasks, TaskSection, rewards_of
from planning.hopeless import RECENT, is_hopeless
from runtime.actor import Actor, handler
from runtime.config import ActorConfig
from runtime.errors import check_all
from runtime.importer import check_module
from runtime.kernel import Kernel
from runtime.observe.figures import ITSELF
from runtime.pool.errors import (
    BadResult,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from runtime.pool.pool import Unsendable, WorkerPool, decode, encode_call
from runtime.pool.sandbox import WorkerLimits

BATCH = 64
"""Trajectories per call of a function: enough to make the call's own cost vanish."""

MAX_NOTICES = 3
"""Kinds of failure the user is told about; the log has all of them."""

LOAD_S = 60.0
"""For importing a user's module: some load a model."""

LOAD_TRIES = 3
"""Of one function, while its worker dies as it loads."""

KILLED_TRIES = 3
"""Tries of a call that was only a bystander of another one's death."""

ALONE_TIMEOUTS = 3
"""A batch that failed is tried one by one for this many times `reward.timeout_s`; what is left then fails as the batch did."""

_Waiting = tuple[Score, "asyncio.Future[Scores | NotScored]"]


class RewardService(Actor):
    """While a worker is busy, requests gather and go to it as one batch."""

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
        check_all(partial(check_module, target, key=key) for target, key in named.items())

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = config.reward
        self._functions = rewards_of(config.tasks, config.reward)
        self._scorer = LocalScorer(
            config.reward, config.tasks, on_output=lambda line: self.log.info("user_output", text=line)
        )
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._noticed: set[str] = set()
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._ever_good = False

    async def on_start(self) -> None:
        """Load the functions; one that can't be loaded ends the job with a sentence."""
        if problem := await self._scorer.start():
            self.finish(problem, failed=True)
        for index in range(self._section.workers):
            self.spawn(self._serve(), name=f"{self.name}.batches-{index}")

    async def on_stop(self) -> None:
        """Kill the workers."""
        await self._scorer.close()

    @handler(concurrency=1024)
    async def score(self, request: Score) -> Scores | NotScored:
        """The functions' numbers for one trajectory, or why there are none."""
        if not self._functions.get(request.task, self._section.functions):
            return Scores(())
        reply: asyncio.Future[Scores | NotScored] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, reply))
        self._arrived.set()
        with self.waits.on(request.trajectory_id, stage="queue", holder=ITSELF):
            return await reply

    async def _serve(self) -> None:
        while True:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
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
        for (request, reply), scores in zip(batch, found, strict=True):
            if isinstance(scores, NotScored):
                self._failed(request, scores)
            else:
                self._ever_good = True
                self._recent.append(False)
            if not reply.done():
                reply.set_result(scores)

    def _failed(self, request: Score, why: NotScored) -> None:
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


class LocalScorer:
    """Runs reward functions one after another, each over those of a batch of requests whose task has it."""

    def __init__(
        self,
        section: RewardSection,
        tasks: Mapping[str, TaskSection] = MappingProxyType({}),
        *,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        self._section = section
        self._functions = rewards_of(tasks, section)
        self._takes: dict[str, Sequence[str]] = {}
        self._pool = WorkerPool(
            workers=section.workers,
            limits=WorkerLimits(section.memory_mb, max_processes=section.max_processes, writes=False),
            on_output=on_output,
        )

    async def start(self) -> str:
        """Load every function in every worker; returns "" or the sentence that says which one can't be used."""
        for name in dict.fromkeys(name for names in self._functions.values() for name in names):
            try:
                await self._load(name)
            except TargetMissing as error:
                return f"reward function {error}"
            except PoolError as error:
                return f"reward function {name} can't be loaded: {describe(error)}"
        return ""

    async def _load(self, name: str) -> None:
        """A worker that ended meanwhile may have been killed by somebody else: no reason to end a job at the first time."""
        for tries_left in reversed(range(LOAD_TRIES)):
            try:
                self._takes[name] = (await self._pool.preload(name, deadline_s=LOAD_S)).takes
                return
            except (WorkerDied, WorkerKilled):
                if not tries_left:
                    raise

    def functions_of(self, request: Score) -> tuple[str, ...]:
        """Those of its task; a task that the config does not name has what all others have."""
        return self._functions.get(request.task, self._section.functions)

    async def close(self) -> None:
        """Kill the workers."""
        await self._pool.close()

    async def score(self, requests: Sequence[Score]) -> list[Scores | NotScored]:
        """One reply per request. When a batch fails, each of its members is tried alone, so that one bad trajectory costs no other."""
        try:
            return [*await self._score(requests)]
        except _Refused as error:
            if len(requests) == 1:
                return [NotScored(error.reason, error.detail)]
            return await self._one_by_one(requests, error)

    async def _one_by_one(self, requests: Sequence[Score], together: "_Refused") -> list[Scores | NotScored]:
        """Bounded as a whole: were each of a full batch given its own timeout, the last would wait for minutes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + ALONE_TIMEOUTS * self._section.timeout_s
        replies: list[Scores | NotScored] = []
        for request in requests:
            if loop.time() < end:
                replies += await self.score([request])
            else:
                replies.append(NotScored(together.reason, f"{together.detail} (in one call with others)"))
        return replies

    async def _score(self, requests: Sequence[Score]) -> list[Scores]:
        wanted = [self.functions_of(request) for request in requests]
        found: list[dict[str, float]] = [{} for _ in requests]
        for name in dict.fromkeys(name for names in wanted for name in names):
            at = [index for index, names in enumerate(wanted) if name in names]
            arguments = _arguments([requests[index] for index in at], self._takes.get(name, ("**",)))
            for index, number in zip(at, await self._call(name, arguments, len(at)), strict=True):
                found[index][name] = number
        return [Scores(tuple(scores[name] for name in names)) for scores, names in zip(found, wanted, strict=True)]

    async def _call(self, name: str, arguments: bytes, num: int) -> list[float]:
        for tries_left in reversed(range(KILLED_TRIES)):
            try:
                reply = await self._pool.apply(name, arguments, deadline_s=self._section.timeout_s)
            except WorkerKilled as error:
                if not tries_left:
                    raise _Refused(error.reason, f"{name}: {error}") from error
            except PoolError as error:
                raise _Refused(error.reason, f"{name} {describe(error)}{self._limits(error)}") from error
            else:
                return _checked(name, decode(reply), num)
        raise AssertionError

    def _limits(self, error: PoolError) -> str:
        if not (isinstance(error, UserCodeRaised) and error.at_limit):
            return ""
        return f" (reward.memory_mb={self._section.memory_mb}, reward.max_processes={self._section.max_processes})"


@dataclass(eq=False)
class _Refused(Exception):
    reason: str
    detail: str


def describe(error: PoolError) -> str:
    """What user code did, for the middle of a sentence."""
    match error:
        case UserCodeRaised():
            return f"raised {error.text} at {error.where}"
        case WorkerTimeout() | WorkerDied(reason="exited" | "crashed"):
            return f"failed: {error}"
        case BadResult():
            return f"returned nothing usable: {error}"
        case _:
            return str(error)


def _arguments(requests: Sequence[Score], takes: Sequence[str]) -> bytes:
    """Completions, then one list per column that any of the requests has and the function `takes`."""
    rows: list[dict[str, Any]] = []
    for request in requests:
        row = msgspec.msgpack.decode(request.columns, type=dict[str, Any])
        rows.append({**row, "texts": list(request.completions)})
    names = dict.fromkeys(name for row in rows for name in row if name in takes or "**" in takes)
    names.pop("completions", None)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return encode_call(completions=["\n".join(request.completions) for request in requests], **columns)


def _checked(name: str, result: Any, num: int) -> list[float]:
    if not isinstance(result, list):
        kind = result.type_name if isinstance(result, Unsendable) else type(result).__name__
        raise _Refused("wrong_type", f"{name} returned a {kind} instead of a list of numbers")
    numbers = cast("list[Any]", result)
    if len(numbers) != num:
        raise _Refused("wrong_length", f"{name} returned {len(numbers)} numbers for {num} trajectories")
    for number in numbers:
        if not isinstance(number, Real):
            kind = number.type_name if isinstance(number, Unsendable) else type(number).__name__
            raise _Refused("wrong_type", f"{name} returned a {kind} instead of a number")
        if flaw := flaw_of_reward(float(number)):
            most = f", more than ±{MOST_REWARD:g}" if flaw == "out_of_range" else ""
            raise _Refused(flaw, f"{name} returned {number}{most}")
    return [float(number) for number in numbers]
