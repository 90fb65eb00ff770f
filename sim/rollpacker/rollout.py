"""A round of tail batching on modelled engines: the planner of live jobs says what is launched, kept and put off."""

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from pydantic import Field

from rubato.planning.roofline import Deployment, Roofline
from rubato.planning.tail import TailRound, TailRules, TailState, begin, close, train
from rubato.runtime.config import Section
from rubato.sim.distribution import Quantiles
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.timeline import SimEvent, Timeline

PROMPT_TOKENS = 200
"""An assumption, as in configs/workloads: the paper names none."""

NORMAL = NormalDist()


class RoundCount:
    """Counts a round's responses as they end. A response is any name; it belongs to one prompt of the round."""

    def __init__(self, round_: TailRound) -> None:
        self._round = round_
        self._ended: dict[int, list[str]] = {prompt: [] for prompt in round_.prompts}
        self._launched = dict.fromkeys(round_.prompts, round_.launch)
        self._failed = dict.fromkeys(round_.prompts, 0)
        self._complete: dict[int, tuple[str, ...]] = {}

    @property
    def complete(self) -> dict[int, tuple[str, ...]]:
        """The responses to train, by prompt: of whole groups only."""
        return dict(self._complete)

    @property
    def over(self) -> bool:
        """Whether the batch is there: every other response is to be aborted."""
        return len(self._complete) == self._round.groups

    def finished(self, prompt: int, response: str) -> bool:
        """Whether it completes its group, whose other responses are to be aborted. One that comes too late is dropped."""
        if self.over or prompt in self._complete:
            return False
        self._ended[prompt].append(response)
        if len(self._ended[prompt]) < self._round.responses:
            return False
        self._complete[prompt] = tuple(self._ended[prompt])
        return True

    def failed(self, prompt: int) -> bool:
        """One response of `prompt` ended without a sample. Whether another must be started, for the rest can't complete the group."""
        self._failed[prompt] += 1
        if self.over or prompt in self._complete:
            return False
        if self._launched[prompt] - self._failed[prompt] >= self._round.responses:
            return False
        self._launched[prompt] += 1
        return True


class LengthModel(Section):
    """Response lengths. A prompt's own difficulty and chance decide together, joined by a Gaussian copula."""

    tasks: tuple[Quantiles, ...] = Field(min_length=1)
    """Tokens of a response, of tasks with equal shares of the prompts."""
    most: int = Field(ge=1)
    """The limit of a response."""
    correlation: float = Field(ge=0, lt=1)
    """Of the normal scores of two responses to one prompt."""
    at_limit: float = Field(default=0.0, ge=0, lt=1)
    """Share of responses that run into the limit, the highest scores, in place of what the law says of them."""

    def tokens(self, seed: int, prompt: int, response: int) -> int:
        """The same for the same arguments, but for a try that an abort ended: `response` then is a new one."""
        task, hard = difficulty(seed, prompt, len(self.tasks))
        score = self.correlation**0.5 * hard + (1 - self.correlation) ** 0.5 * _chance(seed, prompt, response)
        share = NORMAL.cdf(score)
        return self.most if share > 1 - self.at_limit else max(1, min(self.most, round(self.tasks[task].at(share))))


@lru_cache(maxsize=1 << 12)
def difficulty(seed: int, prompt: int, num_tasks: int) -> tuple[int, float]:
    """A prompt's task, and its own normal score."""
    own = Random(f"{seed}/{prompt}")
    return own.choice(range(num_tasks)), own.gauss(0, 1)


@lru_cache(maxsize=1 << 17)
def _chance(seed: int, prompt: int, response: int) -> float:
    """A response's own normal score: every size and every speculation asks for the same ones."""
    return Random(f"{seed}/{prompt}/{response}").gauss(0, 1)


class RoundDone(NamedTuple):
    """`seconds` until the batch was there; when each response that is trained ended, in order, and its tokens."""

    kind: str
    seconds: float
    ended: tuple[tuple[float, int], ...]
    trained: tuple[int, ...]
    freed_s: float | None
    """When half of the engines were freed, where that was asked for."""


class RoundRun:
    """One round on `num` new engines: weights have just changed, so nothing is cached."""

    def __init__(self, engine: Deployment, num: int, free_at: float | None = None) -> None:
        """`free_at`: the share of responses that ended at which the second half of the engines hands its requests to the first."""
        self._timeline = Timeline()
        roofline = Roofline(engine)
        self._engines = [ModelledEngine(self._timeline, f"engine-{n}", roofline) for n in range(num)]
        self._free_at = free_at
        self._freed_s: float | None = None
        self._place: dict[str, ModelledEngine] = {}
        self._names: dict[int, list[str]] = {}
        self._left: dict[str, int] = {}
        self._ended: dict[str, tuple[float, int]] = {}
        self._over: SimEvent = self._timeline.event()

    def run(self, round_: TailRound, lengths: LengthModel, seed: int) -> RoundDone:
        count, launched = RoundCount(round_), 0
        for prompt in round_.prompts:
            self._names[prompt] = [f"{prompt}/{number}" for number in range(round_.launch)]
            for number, name in enumerate(self._names[prompt]):
                engine = self._engines[launched % len(self._engines)]
                launched += 1
                # A long round draws its responses anew: those that were aborted are gone.
                response = number if round_.kind == "short" else 1000 + number
                tokens = lengths.tokens(seed, prompt, response)
                self._timeline.start(self._respond(count, prompt, name, tokens, engine, round_))
        self._timeline.run(until=self._over)
        kept = [name for names in count.complete.values() for name in names]
        ended = tuple(sorted(self._ended[name] for name in kept))
        return RoundDone(round_.kind, self._timeline.now, ended, tuple(count.complete), self._freed_s)

    async def _respond(self, count: RoundCount, prompt: int, name: str, tokens: int, engine: ModelledEngine, round_: TailRound) -> None:
        left, self._left[name] = tokens, tokens
        while left:
            self._place[name] = engine
            self._left[name] = 0
            await engine.generate(name, PROMPT_TOKENS + tokens - left, left)
            left = self._left[name]
            engine = self._engines[self._engines.index(engine) % max(1, len(self._engines) // 2)]
        if self._place.pop(name, None) is None:
            return  # aborted
        self._ended[name] = (self._timeline.now, tokens)
        if count.finished(prompt, name):
            others = [other for other in self._names[prompt] if other in self._place]
            for other in others:
                self._timeline.start(self._place.pop(other).abort(other))
        if count.over:
            self._over.set()
        elif self._free_at is not None and len(self._ended) >= self._free_at * round_.groups * round_.launch:
            self._free_at = None
            self._free_half()

    def _free_half(self) -> None:
        self._freed_s = self._timeline.now
        half = set(self._engines[len(self._engines) // 2 :])
        for name, engine in self._place.items():
            if engine in half:
                self._timeline.start(self._move(name, engine))

    async def _move(self, name: str, engine: ModelledEngine) -> None:
        """The tokens move, and their KV is computed anew."""
        self._left[name] = await engine.abort(name)


def periods_of(rules: TailRules, least: int, engine: Deployment, num: int, lengths: LengthModel, seed: int) -> Sequence[RoundDone]:
    """Rounds on policy, at least so many, up to the end of a period: until no prompt waits, or four times as many were done."""
    state, done = TailState(), list[RoundDone]()
    while len(done) < least or (state.waiting and len(done) < 4 * least):
        state, round_ = begin(state, rules.checked())
        if round_ is None:
            raise RuntimeError("on policy, a round follows each update")
        done.append(RoundRun(engine, num).run(round_, lengths, seed))
        state = train(close(state, round_.number, done[-1].trained), round_.number)
    return done
