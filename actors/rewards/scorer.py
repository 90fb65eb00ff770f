"""Scores batches of trajectories: each function over those whose task has it, wherever it runs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rubato.actors.config import RewardSection, is_url
from rubato.actors.data.tasks import TaskSection, rewards_of
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.plugins import CALL_LIMITS, REWARD_URL, load, named
from rubato.actors.rewards.backend import CallLimit, RewardBackend, RewardRefused, Told
from rubato.actors.rewards.local import ElasticBackend, LocalBackend
from rubato.runtime.observe.figures import Metrics

TIMEOUT = "timeout"
"""Reason of a call that gave no answer within `reward.timeout_s`."""

Early = Callable[[int, Scores | NotScored], object]


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
        self._limit: CallLimit = next(iter(named(CALL_LIMITS, section)), CallLimit)(section)
        local = LocalBackend if section.min_workers is None else ElasticBackend
        self._local: RewardBackend = local(section, metrics, self._limit, on_output)
        self._remote: RewardBackend | None = None

    @property
    def one_each(self) -> bool:
        """Whether each trajectory has a call of its own."""
        return self._limit.per_task

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

    def once(self, request: Score) -> bool:
        """Whether some function of its task must not be asked twice for the same trajectory."""
        return any(self._backend(function).once(function) for function in self.functions_of(request))

    async def score(self, requests: Sequence[Score], early: Early | None = None) -> list[Scores | NotScored]:
        """One reply per request; `early` is told the place and the reply of each that is known before all are.

        When a call fails, each of its members is tried alone, so that one bad trajectory costs no other.
        """
        if self.one_each and len(requests) > 1:
            return [reply for request in requests for reply in await self.score([request])]
        wanted = [self.functions_of(request) for request in requests]
        found: list[dict[str, float]] = [{} for _ in requests]
        failed: dict[int, NotScored] = {}

        def told(index: int, function: str, outcome: float | NotScored) -> None:
            if isinstance(outcome, NotScored):
                failed[index] = outcome
            else:
                found[index][function] = outcome
            if early is not None and (index in failed or len(found[index]) == len(set(wanted[index]))):
                early(index, reply(index))

        def reply(index: int) -> Scores | NotScored:
            return failed.get(index) or Scores(tuple(found[index][name] for name in wanted[index]))

        for function in dict.fromkeys(name for names in wanted for name in names):
            at = [index for index, names in enumerate(wanted) if function in names and index not in failed]
            if at:
                asked = [requests[index] for index in at]
                await self._ask(function, asked, lambda n, outcome, at=at, name=function: told(at[n], name, outcome))
        return [reply(index) for index in range(len(requests))]

    async def _ask(self, function: str, requests: Sequence[Score], told: Told) -> None:
        """In one call, and where that fails each alone."""
        backend = self._backend(function)
        try:
            outcomes = await backend.call(function, requests)
        except RewardRefused as error:
            why = NotScored(error.reason, error.detail)
            if backend.once(function) or (len(requests) == 1 and not is_url(function)):
                outcomes = [why] * len(requests)
            else:
                await self._ask_alone(function, requests, why, told)
                return
        for at, outcome in enumerate(outcomes):
            told(at, outcome)

    async def _ask_alone(self, function: str, requests: Sequence[Score], together: NotScored, told: Told) -> None:
        """One after another, which is cheap, until one hangs or `reward.timeout_s` is over; what is left then, or all where the whole call hung,
        at once and within one further `reward.timeout_s`."""
        backend, loop = self._backend(function), asyncio.get_running_loop()
        end = loop.time() + self._section.timeout_s
        done, hung = 0, together.reason == TIMEOUT
        while not hung and done < len(requests) and loop.time() < end:
            outcome: float | NotScored = together
            if len(requests) > 1:
                try:
                    (outcome,) = await backend.call(function, [requests[done]])
                except RewardRefused as error:
                    outcome = NotScored(error.reason, error.detail)
            hung = isinstance(outcome, NotScored) and outcome.reason == TIMEOUT
            told(done, outcome)
            done += 1
        if done < len(requests):
            await backend.each(function, requests[done:], lambda at, outcome: told(done + at, outcome))

    def _backend(self, function: str) -> RewardBackend:
        if not is_url(function):
            return self._local
        remote = self._remote
        if remote is None:
            remote = self._remote = load(REWARD_URL)(self._metrics, self._limit)
        return remote
