"""Forecasts what a request still has to sample, and its time in environments: survival per task, narrowed by its prompt, moved with the drift.

OrchestrRL forecasts the distribution of lengths across steps by a time series and conditions on progress within the step; its text was not
available. What is done here is ours: the product-limit estimate of Kaplan and Meier (1958) per task, in which running requests are censored
observations, so that the short ones that finish first do not bias it; as many steps as would have forecast the last ones best; a trend of
log-lengths over these, where it is beyond noise; and a Gaussian copula between requests of one prompt.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, linear_regression, pvariance, stdev
from typing import NamedTuple

WINDOW = 8
"""Steps that are remembered at most."""

WINDOWS = (WINDOW, 4, 2, 1)
"""So many of them make a task's curve: as many as would have forecast its last WINDOW steps best. While lengths change, few do."""

BEYOND_NOISE = 3.0
"""Standard errors from which a trend is one: eight steps of some hundred requests still show drift of 2 or 3 % a step."""

MEAN_OF = 10
"""Quantiles, evenly spread, whose mean stands for that of all."""

NORMAL = NormalDist()
EDGE = 1e-6


class Seen(NamedTuple):
    """A request that was observed, or is. `tokens` are those sampled over all its turns, `env_s` the seconds that environments took of it."""

    task: str
    prompt: str
    tokens: float
    env_s: float = 0.0
    done: bool = True


class Remaining(NamedTuple):
    """What is still to come, with a probability of `quantile` at most: tokens, and seconds in environments."""

    tokens: float
    env_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """One task's distribution of work; work is tokens, and time in environments as the tokens that would be sampled meanwhile."""

    works: tuple[float, ...]
    """At which requests finished, ascending."""
    below: tuple[float, ...]
    """P(work <= that)."""
    token_share: float
    """Of all work, what was sampled."""
    likeness: float
    """Correlation between requests of one prompt, of their normal scores; 0 to 1."""
    scores: Mapping[str, tuple[int, float]]
    """Of each prompt: how many finished, and the mean of their normal scores."""
    trend: float
    """Growth of the log of work per step."""

    def cdf(self, work: float) -> float:
        """P(a request's work is at most `work`)."""
        place = bisect_right(self.works, work)
        return self.below[place - 1] if place else 0.0

    def quantile(self, share: float) -> float:
        """The least work that `share` of requests do not exceed."""
        return self.works[min(bisect_left(self.below, share - 1e-12), len(self.works) - 1)]

    def left(self, prompt: str, work: float, quantile: float) -> float:
        """What `quantile` of the requests of `prompt` that came as far as `work` do not exceed beyond it; 0 where none came as far."""
        mean, spread = self._posterior(prompt)
        passed = self._through(self.cdf(work), lambda z: NORMAL.cdf((z - mean) / spread))
        share = passed + quantile * (1 - passed)
        return max(0.0, self.quantile(self._through(share, lambda z: NORMAL.cdf(mean + spread * z))) - work)

    def _posterior(self, prompt: str) -> tuple[float, float]:
        """Mean and deviation of the next score of a prompt of which `count` are known: the conditional normal of equal correlations."""
        count, mean = self.scores.get(prompt, (0, 0.0))
        weight = count * self.likeness / (1 + (count - 1) * self.likeness) if count else 0.0
        return weight * mean, math.sqrt(max(EDGE, 1 - weight * self.likeness))

    @staticmethod
    def _through(share: float, change: Callable[[float], float]) -> float:
        return share if share <= 0 or share >= 1 else change(NORMAL.inv_cdf(min(1 - EDGE, max(EDGE, share))))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The curves of all tasks that finished a request, and of all together under the name ""."""

    curves: Mapping[str, LengthCurve]
    tokens_s: float
    limit: float

    def remaining(self, request: Seen, quantile: float = 0.5) -> Remaining:
        """Of a running `request` at `quantile` within (0, 1); rises with the quantile.

        Work divides into tokens and environments as the task's did on average. Of a request that came further than all before it as much is
        expected again as it has, within the limit.
        """
        if not 0 < quantile < 1:
            raise ValueError(f"a quantile is between 0 and 1, not {quantile}; 0.8 is usual for stragglers")
        curve = self.curves.get(request.task) or self.curves.get("")
        work = request.tokens + request.env_s * self.tokens_s
        if curve is None or work >= curve.works[-1]:
            left = max(0.0, min(request.tokens, self.limit - request.tokens))
            return Remaining(left, 0.0, "no request came further")
        left = curve.left(request.prompt, work, quantile)
        tokens = max(0.0, min(left * curve.token_share, self.limit - request.tokens))
        env_s = left * (1 - curve.token_share) / self.tokens_s
        known = curve.scores.get(request.prompt, (0, 0.0))[0]
        of = f"of {known} requests of its prompt and {len(curve.works)} of its task" if known else f"of {len(curve.works)}"
        return Remaining(tokens, env_s, f"quantile {quantile:g} {of}, trend {100 * math.expm1(curve.trend):+.1f} % a step")

    def expected(self, request: Seen) -> Remaining:
        """What is to come of a running `request` on average."""
        found = [self.remaining(request, (i + 0.5) / MEAN_OF) for i in range(MEAN_OF)]
        return Remaining(fmean(each.tokens for each in found), fmean(each.env_s for each in found), found[-1].why)

    def spread(self, requests: Mapping[str, Seen]) -> dict[str, Remaining]:
        """What is to come of each by its name, at quantiles that its name decides: together they are distributed as forecast.

        One quantile for all would have no long tail, which is what degrees of parallelism are chosen for.
        """
        return {name: self.remaining(request, _share_of(name)) for name, request in requests.items()}


def _share_of(name: str) -> float:
    """Within (0, 1), evenly over names."""
    return (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) + 0.5) / (1 << 32)


class Over(NamedTuple):
    """A step that is over, with what is learnt from it once."""

    seen: tuple[Seen, ...]
    apart: Mapping[str, tuple[float, ...]]
    """Of each task, how far its lengths were from the curve of each of WINDOWS steps before it."""
    scores: Mapping[str, tuple[tuple[str, float], ...]]
    """Of each task: prompt and normal score of its requests, among those of their time."""


def past(steps: Iterable[Sequence[Seen]], *, tokens_s: float = 30.0) -> tuple[Over, ...]:
    """Whole `steps`, the oldest first, as `fit` wants them."""
    found: tuple[Over, ...] = ()
    for seen in steps:
        found = (*found, over(found, seen, tokens_s=tokens_s))
    return found


def over(before: Sequence[Over], seen: Sequence[Seen], *, tokens_s: float = 30.0) -> Over:
    """The step that is over with `seen`; `before` are those before it, the oldest first."""
    tasks = sorted({each.task for each in seen})
    by_task = {task: _pairs([each.seen for each in before], seen, task) for task in ("", *tasks)}
    apart = {task: _apart(pairs, tokens_s) for task, pairs in by_task.items()}
    scores = {task: _scores(by_task[task], _window(before, task), tokens_s) for task in tasks}
    return Over(tuple(seen), {task: each for task, each in apart.items() if each}, scores)


def fit(steps: Sequence[Over], now: Sequence[Seen] = (), *, tokens_s: float = 30.0, limit: float = math.inf) -> Forecast:
    """The forecast for the step that is running, of `steps` that are over, the oldest first, and of what is seen of it `now`.

    The last steps, as many of WINDOWS as suit a task, make its distribution; requests of one prompt are compared over all of `steps`.
    `tokens_s` is what a request samples per second, `limit` the most tokens it may sample. Raises ValueError where either is not positive.
    """
    if tokens_s <= 0 or limit <= 0:
        raise ValueError(f"the rate and the limit of a request must be positive, not {tokens_s} and {limit}")
    tasks = sorted({each.task for step in (*(step.seen for step in steps), now) for each in step})
    curves: dict[str, LengthCurve] = {}
    for task in ("", *tasks):
        pairs = _pairs([each.seen for each in steps], now, task)
        curve = _curve(pairs, _window(steps, task), tokens_s, limit)
        if curve:
            likeness, scores = _prompts(score for step in steps for score in step.scores.get(task, ()))
            curves[task] = replace(curve, likeness=likeness, scores=scores)
    return Forecast(curves, tokens_s, limit)


def _pairs(steps: Sequence[Sequence[Seen]], now: Sequence[Seen], task: str) -> list[tuple[int, Seen]]:
    """Requests of a task, or all for "", of the last WINDOW steps and of `now`, with the age of their step."""
    recent = [*steps[-WINDOW:], now]
    return [(len(recent) - 1 - at, seen) for at, step in enumerate(recent) for seen in step if task in ("", seen.task)]


def _window(steps: Sequence[Over], task: str) -> int:
    """The largest of WINDOWS whose curves were as near to the last WINDOW steps as any, within a standard error over these.

    A task that was not in all of them has WINDOW: a smaller one might not even have a request of it.
    """
    known = [step.apart[task] for step in steps[-WINDOW:] if task in step.apart]
    if len(known) < WINDOW:
        return WINDOW
    columns = list(zip(*known, strict=True))
    best = min(columns, key=fmean)
    for window, column in zip(WINDOWS, columns, strict=True):
        more = [each - least for each, least in zip(column, best, strict=True)]
        if fmean(more) <= stdev(more) / math.sqrt(len(more)):
            return window
    return WINDOW


def _apart(pairs: Sequence[tuple[int, Seen]], tokens_s: float) -> tuple[float, ...]:
    """For each of WINDOWS, how far the logs of works of age 0 are from those before; empty where there are none of either."""
    logs = [(age, math.log1p(seen.tokens + seen.env_s * tokens_s)) for age, seen in pairs if seen.done]
    now, found = [each for age, each in logs if not age], list[float]()
    for window in WINDOWS:
        recent = [(age, each) for age, each in logs if 0 < age <= window]
        if not recent or not now:
            return ()
        trend = _trend((-age, each) for age, each in recent)
        found.append(_cramer([each + trend * age for age, each in recent], now))
    return tuple(found)


def _cramer(first: Sequence[float], second: Sequence[float]) -> float:
    """Integral of the squared difference of two distributions, of draws from each: what a forecast adds to the least CRPS there can be."""
    steps = sorted([(each, 1 / len(first)) for each in first] + [(each, -1 / len(second)) for each in second])
    total = difference = before = 0.0
    for at, step in steps:
        total += difference**2 * (at - before)
        difference, before = difference + step, at
    return total


def _scores(pairs: Sequence[tuple[int, Seen]], window: int, tokens_s: float) -> tuple[tuple[str, float], ...]:
    """Prompt and normal score of the requests of age 0 that are done, in the curve of their step and those before it."""
    curve = _curve(pairs, window, tokens_s, math.inf)
    if curve is None:
        return ()
    return tuple((seen.prompt, _score(curve, seen.tokens + seen.env_s * tokens_s)) for age, seen in pairs if not age and seen.done)


def _curve(pairs: Sequence[tuple[int, Seen]], window: int, tokens_s: float, limit: float) -> LengthCurve | None:
    """Of requests with the age of their step; None where none is done. Prompts are left out."""
    recent = [(age, seen) for age, seen in pairs if age <= window]
    points = [(-age, math.log1p(seen.tokens + seen.env_s * tokens_s)) for age, seen in recent if age and seen.done]
    trend = _trend(points)

    growth = {age: math.exp(trend * age) for age in range(window + 1)}

    def work(age: int, seen: Seen) -> float:
        grown = growth[age]
        tokens = seen.tokens if seen.tokens >= limit else min(limit, seen.tokens * grown)
        return tokens + seen.env_s * grown * tokens_s

    ends = [(work(age, seen), seen.done) for age, seen in recent]
    works, below = _product_limit(ends, limit)
    if not works:
        return None
    total = sum(end for end, _ in ends)
    env = sum(seen.env_s * growth[age] for age, seen in recent) * tokens_s
    return LengthCurve(works, below, 1 - env / total if total else 1.0, 0.0, {}, trend)


def _trend(points: Iterable[tuple[int, float]]) -> float:
    """Slope of the steps' interquartile means by least squares; 0 where it may be noise.

    Interquartile, because very short responses spread far in logs.
    """
    steps: dict[int, list[float]] = {}
    for x, y in points:
        steps.setdefault(x, []).append(y)
    if len(steps) < 3:
        return 0.0
    levels = {x: fmean(sorted(ys)[len(ys) // 4 : len(ys) - len(ys) // 4]) for x, ys in steps.items()}
    slope, start = linear_regression(list(levels), list(levels.values()))
    rest = sum((y - start - slope * x) ** 2 for x, y in levels.items())
    error = rest / (len(levels) - 2) / (len(levels) * pvariance(levels))
    return slope if slope**2 > BEYOND_NOISE**2 * error else 0.0


def _product_limit(ends: Iterable[tuple[float, bool]], limit: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Works at which requests finished and P(work <= each), of (work, whether it is done); running ones are censored there.

    What longer running ones leave without an end lies at twice the longest, or at the limit.
    """
    ordered = sorted((work, not done) for work, done in ends)
    survival, works, below = 1.0, list[float](), list[float]()
    for place, (work, running) in enumerate(ordered):
        if running:
            continue
        survival *= 1 - 1 / (len(ordered) - place)
        if works and works[-1] == work:
            below[-1] = 1 - survival
        else:
            works.append(work)
            below.append(1 - survival)
    if works and survival > EDGE:
        longest = ordered[-1][0]
        works.append(max(longest, min(limit, 2 * longest)))
        below.append(1.0)
    elif works:
        below[-1] = 1.0
    return tuple(works), tuple(below)


def _score(curve: LengthCurve, work: float) -> float:
    """Normal score of the middle of a step of the curve."""
    place = bisect_left(curve.works, work)
    before = curve.below[place - 1] if place else 0.0
    at = curve.below[place] if place < len(curve.below) else 1.0
    return NORMAL.inv_cdf(min(1 - EDGE, max(EDGE, (before + at) / 2)))


def _prompts(scored: Iterable[tuple[str, float]]) -> tuple[float, dict[str, tuple[int, float]]]:
    """Correlation of two requests of one prompt, less a standard error, and each prompt's count and mean score."""
    of: dict[str, list[float]] = {}
    for prompt, score in scored:
        of.setdefault(prompt, []).append(score)
    several = [scores for scores in of.values() if len(scores) > 1]
    pairs = sum(len(scores) * (len(scores) - 1) / 2 for scores in several)
    likeness = 0.0
    if pairs:
        products = sum((sum(z) ** 2 - sum(each * each for each in z)) / (len(z) - 1) for z in several)
        squares = sum(each * each for scores in several for each in scores)
        likeness = min(0.99, max(0.0, products / squares - pairs**-0.5)) if squares else 0.0
    return likeness, {prompt: (len(scores), sum(scores) / len(scores)) for prompt, scores in of.items()}
