"""What the tails of jobs' rollouts are: one rollout of each, on modelled engines, by the length curve of its responses."""

import math
from collections.abc import Mapping
from statistics import fmean

from pydantic import Field

from rubato.planning.consolidation import TAIL, RolloutTail
from rubato.planning.roofline import Deployment, Roofline
from rubato.runtime.config import Section
from rubato.sim.rollmux.tail import StepRollout
from rubato.sim.rollpacker.rollout import LengthModel
from rubato.sim.timeline import Timeline

STEPS = 4
"""That a tail is averaged over."""


class TailCurve(Section):
    """A model and the lengths of its responses."""

    engine: Deployment
    lengths: LengthModel


class TailsSpec(Section):
    """Rollouts whose tails move. Each GPU of the rollout node holds an engine, or `engine.tp` of them do."""

    gpus: int = Field(ge=1)
    """Of the rollout node."""
    prompts: int = Field(ge=1)
    responses: int = Field(ge=1)
    """Per prompt."""
    curves: dict[str, TailCurve] = Field(min_length=1)


def tails_of(spec: TailsSpec | None, seed: int) -> Mapping[str, RolloutTail]:
    """By curve; "" is a rollout that keeps its nodes to the last response."""
    return {"": RolloutTail()} | ({name: _tail(spec, curve, seed) for name, curve in spec.curves.items()} if spec else {})


def tail_named(tails: Mapping[str, RolloutTail], name: str, whose: str) -> RolloutTail:
    """Raises ValueError, one sentence, where there is none."""
    if name not in tails:
        raise ValueError(f"{whose}.tail is {name}, and tails.curves has {', '.join(filter(None, tails)) or 'none'}")
    return tails[name]


def _tail(spec: TailsSpec, curve: TailCurve, seed: int) -> RolloutTail:
    count = spec.prompts * spec.responses
    left = count - math.ceil((1 - TAIL) * count)
    engines = spec.gpus // curve.engine.num_gpus
    kept = math.ceil(left / curve.engine.num_slots)
    if not left or kept >= engines:
        return RolloutTail()
    steps = [(_spans(spec, curve, seed + at, engines), _spans(spec, curve, seed + at, kept)) for at in range(STEPS)]
    begins = fmean(plain[0] / sum(plain) for plain, _ in steps)
    return RolloutTail(begins, kept / engines, fmean(moved[1] / plain[1] for plain, moved in steps))


def _spans(spec: TailsSpec, curve: TailCurve, seed: int, kept: int) -> tuple[float, float]:
    """Seconds until the tail begins, and of the tail on `kept` engines."""
    timeline, engines = Timeline(), spec.gpus // curve.engine.num_gpus
    rollout = StepRollout(timeline, Roofline(curve.engine), range(engines))
    lengths = {f"{p}/{n}": curve.lengths.tokens(seed, p, n) for p in range(spec.prompts) for n in range(spec.responses)}
    marks: list[float] = []

    async def play() -> None:
        rollout.start(lengths)
        await rollout.ended(math.ceil((1 - TAIL) * len(lengths)))
        marks.append(timeline.now)
        if kept < engines:
            rollout.consolidate(range(engines - kept, engines))
        await rollout.ended(len(lengths))
        marks.append(timeline.now)

    timeline.run(until=timeline.start(play()).ended)
    return marks[0], marks[1] - marks[0]
