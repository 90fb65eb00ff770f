"""Moves the staleness bound α to where samples per second × effective sample size is highest, one version at a time.

A larger α lets rollouts run on beside training and behind stragglers, and makes samples older, which weigh less. What one version is worth
is estimated from what the last steps showed, tried, and taken back where it did not come true: the estimate only says what to try.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import stdev

WINDOW = 5
"""Steps that are judged together."""

MARGIN = 0.02
"""Hysteresis: what promises less, as a share, is not tried; what did not bring this much for an older sample is taken back."""

COMES_TRUE, DOUBT = 0.65, 0.35
"""Of the gain by Little's law this share is expected, give or take: slots are held longer where there are more of them."""

REST = 4
"""Windows for which a direction that was taken back is not tried again; twice as many each further time."""

REST_MOST = 64

LEAST_ESS = 0.3
"""Below this share of effective samples α goes down whatever the rate: a few tokens decide the update then."""


@dataclass(frozen=True, slots=True)
class AlphaBounds:
    """α stays between these, both included. Raises ValueError the wrong way round."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"α can't be at least {self.least} and at most {self.most}")

    def nearest(self, alpha: int) -> int:
        """`alpha`, or the bound that it is beyond."""
        return max(self.least, min(self.most, alpha))


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step showed."""

    seconds: float
    """From the hand-over of the batch before to that of this one."""
    samples: int
    """In its batch."""
    waited_s: float
    """Of `seconds`, for which the trainer had nothing to train."""
    rollout_idle: float
    """Share of rollout places, over `seconds`, that were empty for want of a slot."""
    spare: bool
    """A further batch stood ready behind this one."""
    age: float
    """Mean age of the batch's samples, in versions."""
    ess: float = 1.0
    """Effective sample size of a batch as a share of it, (Σw)² / (n·Σw²); 1 where it was not measured."""
    kl: float = 0.0
    """KL(behaviour ‖ current) in nats of what the ages add; 0 where it was not measured."""

    @property
    def effective(self) -> float:
        """The lower of the two estimates of the share of effective samples.

        For log-normal weights of mean 1 the KL divergence is σ²/2 and the effective share exp(-σ²): exp(-2·KL). A sample of weights that
        misses the rare large ones shows too large a share; the divergence does not depend on them.
        """
        return max(0.01, min(self.ess, math.exp(-2 * max(0.0, self.kl)), 1.0))


@dataclass(frozen=True, slots=True)
class AlphaState:
    """All that is remembered from one step to the next."""

    alpha: int
    window: tuple[StepFigures, ...] = ()
    settling: int = 0
    """Steps to come whose samples were still admitted under another α."""
    came_from: int = -1
    """The α before the one that is on trial; -1: none is."""
    before: float = 0.0
    """Its worth, in effective samples per second."""
    noise: float = 0.0
    """Standard error of that, as a share."""
    expected: float = 0.0
    """What the move was to bring, as a share."""
    doubt: float = 0.0
    """Standard deviation of that."""
    rests: tuple[int, int] = (0, 0)
    """Windows for which α does not go down, up."""
    refused: tuple[int, int] = (0, 0)
    """How often in a row a step down, up was taken back."""


@dataclass(frozen=True, slots=True)
class AlphaPlan:
    """The state to go on with. `why` is empty where α stays."""

    state: AlphaState
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Worth:
    """A window, in figures."""

    rate: float
    """Samples per second."""
    effective: float
    trainer_idle: float
    rollout_idle: float
    spare: float
    """Share of steps behind which a further batch stood ready."""
    loss: float
    """-ln of the effective share, per version of age."""
    noise: float
    """Standard error of the rate, as a share."""

    @property
    def value(self) -> float:
        return self.rate * self.effective


def begin(alpha: int, bounds: AlphaBounds) -> AlphaState:
    """Where a job begins: its first steps fill engines and buffer, and are not judged."""
    alpha = bounds.nearest(alpha)
    return AlphaState(alpha, settling=alpha + 1)


def adapt(state: AlphaState, step: StepFigures, bounds: AlphaBounds) -> AlphaPlan:
    """Take one step in; at the end of a window α may move by one. Invariant: the α of the new state is within `bounds`."""
    if not bounds.least <= state.alpha <= bounds.most:
        moved = begin(state.alpha, bounds)
        return AlphaPlan(moved, f"the bounds are {bounds.least} and {bounds.most}")
    if state.settling:
        return AlphaPlan(replace(state, settling=state.settling - 1))
    window = (*state.window, step)
    if len(window) < WINDOW:
        return AlphaPlan(replace(state, window=window))
    found = _worth(window)
    rests = (max(0, state.rests[0] - 1), max(0, state.rests[1] - 1))
    rested = replace(state, window=(), rests=rests)
    if found.effective < LEAST_ESS and state.alpha > bounds.least:
        return _back(rested, state.alpha - 1, f"{found.effective:.0%} of the samples are effective")
    if state.came_from >= 0:
        gain = _gain(rested, found)
        if gain < (MARGIN if state.alpha > state.came_from else -MARGIN):
            why = f"{state.alpha} instead of {state.came_from} brought {gain:+.0%} effective samples/s"
            return _back(rested, state.came_from, why)
        rested = replace(rested, came_from=-1, refused=(0, 0))
    return _next(rested, found, bounds)


def _gain(state: AlphaState, found: _Worth) -> float:
    """What the move on trial brings: what was measured and what was expected, each by how sure it is."""
    measured = found.value / state.before - 1
    noise = max(1e-6, math.hypot(found.noise, state.noise))
    sure = 1 / max(1e-6, state.doubt) ** 2
    return (measured / noise**2 + state.expected * sure) / (1 / noise**2 + sure)


def _back(state: AlphaState, alpha: int, why: str) -> AlphaPlan:
    """To `alpha`; the direction that is left is not tried for some time."""
    up = state.alpha > alpha
    counts, rests = list(state.refused), list(state.rests)
    rests[up] = min(REST_MOST, REST << counts[up])
    counts[up] = min(counts[up] + 1, REST_MOST)
    settling = _settling(state.alpha, alpha)
    return AlphaPlan(AlphaState(alpha, (), settling, rests=(rests[0], rests[1]), refused=(counts[0], counts[1])), why)


def _next(state: AlphaState, found: _Worth, bounds: AlphaBounds) -> AlphaPlan:
    """Which neighbour promises more than here, if one does and may be tried.

    While trainer and rollouts both wait, slots are what there is too little of: by Little's law (samples under way = rate × time that
    each is under way) the rate grows with them, one batch to the α + 1 that there are.
    """
    both_idle = min(found.trainer_idle, found.rollout_idle)
    law = both_idle / (state.alpha + 1)
    up = (1 + COMES_TRUE * law) * math.exp(-found.loss) - 1
    idle = f"trainer idle {found.trainer_idle:.0%}, rollout places without a slot {found.rollout_idle:.0%}"
    if state.alpha < bounds.most and not state.rests[1] and up > MARGIN:
        return _try(state, found, 1, up, DOUBT * law, f"{idle}: {up:+.0%} effective samples/s expected")
    if state.alpha == bounds.least or state.rests[0]:
        return AlphaPlan(state)
    # Without the spare batch, its rollouts no longer hide behind the training that goes on meanwhile.
    law = (both_idle + (1 - found.spare) * (1 - found.trainer_idle)) / state.alpha
    down = math.exp(found.loss) / (1 + COMES_TRUE * law) - 1
    if down > MARGIN or (found.spare == 1 and found.trainer_idle < MARGIN):
        costs = f"a version of age costs {1 - math.exp(-found.loss):.0%} of the samples"
        return _try(state, found, -1, down, DOUBT * law, f"{idle}; {costs}: {down:+.0%} effective samples/s expected")
    return AlphaPlan(state)


def _try(state: AlphaState, found: _Worth, by: int, expected: float, doubt: float, why: str) -> AlphaPlan:
    alpha = state.alpha + by
    moved = replace(
        state, alpha=alpha, settling=_settling(state.alpha, alpha), came_from=state.alpha, before=found.value,
        noise=found.noise, expected=expected, doubt=doubt,
    )  # fmt: skip
    return AlphaPlan(moved, why)


def _settling(old: int, new: int) -> int:
    """Until the oldest sample that was admitted under the old bound is trained."""
    return max(old, new) + 1


def _worth(window: Sequence[StepFigures]) -> _Worth:
    seconds = max(1e-9, math.fsum(step.seconds for step in window))
    samples = sum(step.samples for step in window)
    effective = math.fsum(step.effective for step in window) / len(window)
    age = math.fsum(step.age for step in window) / len(window)
    return _Worth(
        rate=samples / seconds,
        effective=effective,
        trainer_idle=min(1.0, math.fsum(step.waited_s for step in window) / seconds),
        rollout_idle=min(1.0, math.fsum(step.rollout_idle * step.seconds for step in window) / seconds),
        spare=sum(step.spare for step in window) / len(window),
        loss=-math.log(effective) / age if age > 0 else 0.0,
        noise=stdev(step.seconds for step in window) / seconds * math.sqrt(len(window)),
    )
