"""A job in virtual time whose response lengths follow a digitised distribution, under our admission planner or a published rule's model."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

from rubato.actors.messages.samples import Ticket
from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.sample import Outcome, group_number
from rubato.planning.adaptive_alpha import AlphaBounds
from rubato.planning.roofline import Deployment
from rubato.planning.staleness import OLDEST, UNBOUNDED, Admission, HandOver
from rubato.sim.admission.rules import AdmissionRule, RuleView, WaitingGroup
from rubato.sim.buffer_model import NEVER_LAPSES_S, ModelledBuffer
from rubato.sim.cluster import ClusterCosts, ClusterJobSpec, PoolSpec
from rubato.sim.distribution import Quantiles
from rubato.sim.job import Job
from rubato.sim.training_model import TrainerSpec
from rubato.sim.weight_sync import StoreSync
from rubato.sim.workload import Episode, TaskSpec, Turn, chance_of

LENGTHS = Path(__file__).resolve().parents[2] / "configs" / "lengths"

CORRELATION = 0.5
"""Of the lengths within a group, as normal scores; an assumption: hard prompts make all of their responses long (RollPacker, section 2)."""

DRIFT = 0.09
"""Assumed of the policy, see `rubato.sim.buffer_model.ess_of`: the quickstart's `policy/ess` is 0.92, 0.84 and 0.64 where all samples are 1, 2 and
4 versions old, which this law gives as 0.91, 0.84 and 0.70."""

PROMPT_TOKENS = 200


class LengthWorkload(NamedTuple):
    """Lengths, and what a step takes beside the tokens."""

    lengths: Quantiles
    step_s: float = 4.0


class RuledGroups(Groups):
    """The live buffer's groups, with another's rule for admission, age and hand-over."""

    def __init__(self, limits: GroupLimits, rule: AdmissionRule) -> None:
        super().__init__(limits, UNBOUNDED)
        self._rule = rule
        self._completed: dict[str, int] = {}

    def admission(self) -> Admission:
        return Admission(max(0, self._rule.admit(self._view())), self._rule.name)

    def score(self, trajectory: str, outcome: Outcome, payload: bytes | None = None, digest: str = "") -> str:
        fate = super().score(trajectory, outcome, payload, digest)
        group = self._place(trajectory)[0]
        if group.state == "ready":
            self._completed[group.id] = len(self._completed)
        return fate

    def plan(self, step: int, num_groups: int) -> HandOver:
        for group in [*self.open(), *self.ready()]:
            if self._rule.is_old(step - 1 - group.begun):
                self._end(group, group.discard("stale"))
        chosen = self._rule.take(self._view())
        return HandOver(chosen is not None, OLDEST, self._rule.name, chosen or ())

    def _view(self) -> RuleView:
        ready = tuple(WaitingGroup(group_number(group.id), self._completed[group.id]) for group in self.ready())
        num_open = sum(1 for _ in self.open())
        return RuleView(
            batch_groups=self.limits.batch_groups,
            version=self.training.version,
            open=num_open,
            ready=ready,
            bound=len(self.live) - num_open - len(ready),
            completed=len(self._completed),
        )


class LengthCosts(ClusterCosts):
    """One turn a rollout, of a length that is correlated within its group. `drawn` are all lengths by trajectory, begun or trained."""

    def __init__(self, spec: ClusterJobSpec, seed: int, lengths: Quantiles) -> None:
        super().__init__(spec, seed)
        self._chance, self._lengths = seed, lengths
        self.drawn: dict[str, int] = {}

    def episode(self, ticket: Ticket) -> Episode:
        name = ticket.trajectory_id
        shared, own = (chance_of(self._chance, each).gauss(0, 1) for each in (ticket.group_id, name))
        share = NormalDist().cdf(CORRELATION**0.5 * shared + (1 - CORRELATION) ** 0.5 * own)
        self.drawn[name] = max(1, round(self._lengths.at(share)))
        return Episode("lengths", (0.0,), (Turn(PROMPT_TOKENS, self.drawn[name], 0.0),))


class LengthJob(NamedTuple):
    """A job and what was drawn for it."""

    job: Job
    drawn: Mapping[str, int]
    groups: Groups
    trained: list[str]


class RuleFigures(NamedTuple):
    """What a rule did to a job."""

    tokens_s: float
    """Sampled tokens of trained samples, per second."""
    samples_s: float
    ess: float
    """Mean share of effective samples, by the assumed law."""
    age_mean: float
    age_max: int
    dropped: float
    """Share of the rollouts that were begun and dropped for their age."""
    length_bias: float
    """Mean length of what was trained over that of all that was begun; 1 is no selection."""

    @property
    def value(self) -> float:
        """Effective samples per second."""
        return self.samples_s * self.ess


def distributions() -> dict[str, Quantiles]:
    """By name, such as `math` or `7B-8k`: all of configs/lengths."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(LENGTHS.glob("*.csv")):
        with path.open(newline="") as file:
            for name, tokens, share in list(csv.reader(file))[1:]:
                scale = 100.0 if "rollpacker" in path.name else 1.0
                found.setdefault(name, []).append((float(share) / scale, float(tokens)))
    return {name: _quantiles(points, 16384.0 if name in ("math", "code", "judge") else None) for name, points in found.items()}


def length_job(
    workload: LengthWorkload,
    rule: AdmissionRule | int | Literal["auto"],
    *,
    steps: int,
    seed: int,
    hardware: Deployment,
    bounds: AlphaBounds | None = None,
    environments: int = 96,
    drops: bool = False,
) -> LengthJob:
    """32 samples a step in groups of 4 on one engine, and a trainer of eight such GPUs; `rule` may be an α of ours, or auto.

    `drops`: of ours, with `staleness.stragglers=drop`.
    """
    engine = hardware.model_copy(update={"num_slots": 64})
    length = workload.lengths.points[-1][1]
    task = TaskSpec.model_validate(
        {
            "name": "lengths", "turns": {"value": 1}, "prompt_tokens": {"value": PROMPT_TOKENS},
            "observation_tokens": {"value": 1}, "action_tokens": {"value": length},
        }
    )  # fmt: skip
    spec = ClusterJobSpec(
        pools=(PoolSpec(name="engines", engine=engine, count=1),),
        trainer=TrainerSpec(gpu=engine.gpu, model=engine.model, gpus=8, fixed_s=workload.step_s),
        tasks=(task,),
        weights=StoreSync(push_bytes_s=1e11, pull_bytes_s=1e11, load_bytes_s=1e11),
        batch_groups=8, group_size=4, environments=environments, steps=2 * steps, drift=DRIFT,
    )  # fmt: skip
    limits = GroupLimits(
        group_size=4, batch_groups=8, steps=2 * steps, run_seed=seed, max_attempts=3, unbounded_batches=8,
        ticket_ttl_s=NEVER_LAPSES_S,
    )  # fmt: skip
    auto = (bounds or AlphaBounds(0, 8)) if rule == "auto" else None
    own = auto.most if auto is not None else rule if isinstance(rule, int) else None
    groups = Groups(limits, own) if own is not None else RuledGroups(limits, rule)  # type: ignore[arg-type]
    costs = LengthCosts(spec, seed, workload.lengths)
    buffer = ModelledBuffer(costs.timeline, groups, auto, DRIFT, drops=drops)
    job = Job(buffer, 2 * steps, costs)
    job.run(steps)
    return LengthJob(job, costs.drawn, groups, buffer.trained_names)


def measured(played: LengthJob) -> RuleFigures:
    """Of the whole job, its beginning included."""
    job, drawn = played.job, played.drawn
    seconds, ages, ess = job.rows[-1].published_s, job.buffer.ages, job.buffer.ess
    trained = [drawn[name] for name in played.trained]
    gone = sum(1 for name in drawn if _group(name) not in played.groups.live) - len(trained)
    return RuleFigures(
        tokens_s=sum(trained) / seconds,
        samples_s=len(trained) / seconds,
        ess=fmean(ess),
        age_mean=fmean(ages),
        age_max=max(ages),
        dropped=max(0, gone) / len(drawn),
        length_bias=fmean(trained) / fmean(drawn.values()),
    )


def _group(trajectory: str) -> str:
    return trajectory.rpartition(".")[0]


def _quantiles(points: Sequence[tuple[float, float]], limit: float | None) -> Quantiles:
    """Rising shares from 0 to 1, and no falling lengths; what lies beyond the last point goes straight to the `limit`."""
    rising: list[tuple[float, float]] = [(0.0, 1.0)]
    for share, tokens in points:
        if rising[-1][0] < share < 1:
            rising.append((share, max(rising[-1][1], tokens)))
    end = max(rising[-1][1], limit or points[-1][1])
    return Quantiles(law="quantiles", points=(*rising, (1.0, end)))
