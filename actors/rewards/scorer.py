"""Scores batches of trajectories: each function over those whose task has it, wherever it runs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from actors.config import RewardSection, is_url
from actors.messages.samples import NotScored, Score, Scores
from actors.rewards.backend import RewardBackend, RewardRefused
from actors.rewards.deadlines import Deadlines
from actors.rewards.local import ElasticBackend, LocalBackend
from actors.tasks import TaskSection, rewards_of
from runtime.observe.figures import Metrics

ALONE_TIMEOUTS = 3
"""A batch that failed is tried one by one for this many times `reward.timeout_s`; what is left then fails as the batch did."""


class Scorer:
    """Runs reward functions one after another, each over those of a batch of requests whose task has it.

    `run` must go on meanwhile where `reward.min_workers` is set.
    """

    def __init__(
        self,
        section: RewardSection,
        tasks: Mapping[str, TaskSection] = MappingProxyType({}),
        *,
        metrics: Metrics | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        self._section = section
        self._functions = rewards_of(tasks, section)
        self._metrics = metrics = metrics or Metrics()
        self._deadlines = Deadlines(section)
        local = LocalBackend if section.min_workers is None else ElasticBackend
        self._local: RewardBackend = local(section, metrics, self._deadlines, on_output)
        self._remote: RewardBackend | None = None

    async def start(self) -> str:
        """Make every function ready; returns "" or the sentence that says which one can't be used."""
        for function in dict.fromkeys(name for names in self._functions.values() for name in names):
            if problem := await self._backend(function).load(function):
                return problem
        return ""

    async def run(self) -> None:
        """What the functions' places need beside calls, until cancelled."""
        await self._local.run()

    async def close(self) -> None:
        """Kill the workers and drop the connections."""
        await self._local.close()
        if self._remote is not None:
            await self._remote.close()

    def functions_of(self, request: Score) -> tuple[str, ...]:
        """Those of its task; a task that the config does not name has what all others have."""
        return self._functions.get(request.task, self._section.targets)

    async def score(self, requests: Sequence[Score]) -> list[Scores | NotScored]:
        """One reply per request. When a batch fails, each of its members is tried alone, so that one bad trajectory costs no other."""
        if self._deadlines.are_anchored and len(requests) > 1:
            return [reply for request in requests for reply in await self.score([request])]
        try:
            return await self._score(requests)
        except RewardRefused as error:
            if len(requests) == 1:
                return [NotScored(error.reason, error.detail)]
            return await self._one_by_one(requests, error)

    async def _one_by_one(self, requests: Sequence[Score], together: RewardRefused) -> list[Scores | NotScored]:
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

    async def _score(self, requests: Sequence[Score]) -> list[Scores | NotScored]:
        wanted = [self.functions_of(request) for request in requests]
        found: list[dict[str, float]] = [{} for _ in requests]
        failed: dict[int, NotScored] = {}
        for function in dict.fromkeys(name for names in wanted for name in names):
            at = [index for index, names in enumerate(wanted) if function in names and index not in failed]
            numbers = await self._backend(function).call(function, [requests[index] for index in at]) if at else []
            for index, number in zip(at, numbers, strict=True):
                if isinstance(number, NotScored):
                    failed[index] = number
                else:
                    found[index][function] = number
        return [
            failed.get(index) or Scores(tuple(scores[name] for name in names))
            for index, (scores, names) in enumerate(zip(found, wanted, strict=True))
        ]

    def _backend(self, function: str) -> RewardBackend:
        if not is_url(function):
            return self._local
        if self._remote is None:
            from actors.rewards.invoke import HttpBackend  # httpx, for those alone who have a URL

            self._remote = HttpBackend(self._metrics, self._deadlines)
        return self._remote
