"""An environment that takes the time, and shows the tokens, that a workload says; and the scores of its trajectories."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards.backend import columns_of
from rubato.actors.rewards.local import ElasticBackend
from rubato.actors.rewards.scorer import Scorer
from rubato.runtime.observe.figures import Metrics
from rubato.runtime.pool.pool import WorkerPool
from rubato.runtime.pool.values import Traits, decode
from rubato.sim.simtest.toys import WORDS, ToyScorer
from rubato.sim.workload import TaskSpec, episode

FIRST_WORD = 2
"""Of the toy tokenizer's, the first that stands for nothing; the others follow it."""

DIGITS = WORDS[FIRST_WORD:]

NUM_DIGITS = 8
"""Of the number that ends each observation: how many tokens are sampled next. 6^8 is above any limit of a model."""

END_TOKENS = 1
"""What the toy chat template adds to an observation: its end."""


class ModelledEnv:
    """`task` is a TaskSpec as plain data; `seed` is the job's. Plays the very episode that the modelled job draws for a trajectory.

    The last words of each observation say how many tokens the turn samples, for the modelled engine to read.
    """

    def __init__(self, task: Mapping[str, Any], seed: int) -> None:
        self._task = TaskSpec.model_validate(task)
        self._seed = seed

    async def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """A manager names each rollout's task after itself and the trajectory: env_manager-1.g00000001.0."""
        rollout = asyncio.current_task()
        name = rollout.get_name().partition(".")[2] if rollout is not None else str(seed)
        self._episode = episode(self._task, self._seed, name)
        self._turn = 0
        for seconds in self._episode.resets_s:
            await asyncio.sleep(seconds)
        return self._shown(), {"reward_s": self._episode.reward_s}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        await asyncio.sleep(self._episode.turns[self._turn].step_s)
        self._turn += 1
        if self._turn == len(self._episode.turns):
            return "", 1.0, True, False, {}
        return self._shown(), 0.0, False, False, {}

    def close(self) -> None:
        """Nothing is held."""

    def _shown(self) -> str:
        turn = self._episode.turns[self._turn]
        words = [DIGITS[0]] * (turn.shown - END_TOKENS - NUM_DIGITS)
        return " ".join([*words, *_digits(turn.sampled)])


def _digits(num: int) -> list[str]:
    base = len(DIGITS)
    return [DIGITS[num // base**place % base] for place in reversed(range(NUM_DIGITS))]


def asked(prompt: Sequence[int]) -> int:
    """How many tokens the turn behind `prompt` samples."""
    found = 0
    for token in prompt[-END_TOKENS - NUM_DIGITS : -END_TOKENS]:
        found = found * len(DIGITS) + token - FIRST_WORD
    return found


class ModelledScorer(ToyScorer):
    """Scores one trajectory after another, each in the time that its episode says."""

    async def score(self, requests: Sequence[Score]) -> list[Scores | NotScored]:
        await asyncio.sleep(sum(columns_of(request)["reward_s"] for request in requests))
        return [Scores((0.0,)) for _ in requests]


class ModelledWorker(WorkerPool):
    """One worker process of rewards that takes `start_s` to start, and for each trajectory what its episode says."""

    def __init__(self, start_s: float) -> None:
        super().__init__()
        self._start_s = start_s

    async def preload(self, target: str, *, deadline_s: float, attributes: Sequence[str] = ()) -> Traits:
        await asyncio.sleep(self._start_s)
        return Traits(inline=False, asynchronous=False, declared={}, takes=("reward_s",))

    async def apply(self, target: str, payload: bytes, *, deadline_s: float, took: Callable[[float], object] | None = None) -> bytes:
        _, columns = decode(payload)
        await asyncio.sleep(sum(columns["reward_s"]))
        return msgspec.msgpack.encode([0.0] * len(columns["reward_s"]))

    async def close(self) -> None:
        """There is no process."""


def elastic_scorer(section: RewardSection, metrics: Metrics, start_s: float) -> Scorer:
    """The live one with workers that come and go, which are modelled."""
    scorer = Scorer(section, metrics=metrics)
    backend = scorer._local  # pyright: ignore[reportPrivateUsage]
    assert isinstance(backend, ElasticBackend)
    backend._new_pool = partial(ModelledWorker, start_s)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return scorer


def scored() -> None:
    """Named in the config, so that rollouts ask for a score; never called."""
