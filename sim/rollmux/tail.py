"""RollMux, Figure 11: two jobs take turns on a rollout node; a rollout's last responses move together, and the next job starts beside them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from pydantic import Field

from rubato.planning.roofline import Deployment, Roofline
from rubato.runtime.config import Section
from rubato.sim.engine_model import ModelledEngine
from rubato.sim.outcome import Cell, LaneSpan, Plot, RunProgress, RunResult, Table
from rubato.sim.rollpacker.rollout import PROMPT_TOKENS, LengthModel
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.timeline import SimEvent, Timeline
from rubato.sim.training_model import TrainerSpec


class TailJob(Section):
    """A model and the lengths of its responses. Each GPU of the rollout node holds an engine, or `engine.tp` of them do."""

    engine: Deployment
    trainer: TrainerSpec
    lengths: LengthModel
    rollout_switch_s: float = Field(default=0.0, ge=0)
    train_switch_s: float = Field(default=0.0, ge=0)


class TailMigration(Scenario):
    """Pairs of jobs on one rollout node and one training node, with and without migration."""

    jobs: dict[str, TailJob] = Field(min_length=1)
    pairs: tuple[tuple[str, str], ...] = Field(min_length=1)
    gpus: int = Field(ge=1)
    """Of the rollout node."""
    prompts: int = Field(ge=1)
    responses: int = Field(ge=1)
    """Per prompt."""
    moved_at: float = Field(gt=0, lt=1)
    """Share of responses that have ended when the rest moves."""
    steps: int = Field(ge=3)
    """Of each job; two are left out."""
    sensitivity: tuple[int, ...] = ()
    """Other numbers of responses per prompt."""


class Lock:
    """Given in the order of asking."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._held = False
        self._asked: list[SimEvent] = []

    async def take(self) -> None:
        if self._held:
            self._asked.append(self._timeline.event())
            await self._asked[-1]
        self._held = True

    def give(self) -> None:
        self._held = False
        if self._asked:
            self._held = True
            self._asked.pop(0).set()


class StepRollout:
    """One step's responses on engines of their own: weights have just changed, so nothing is cached."""

    def __init__(self, timeline: Timeline, roofline: Roofline, gpus: Sequence[int]) -> None:
        self._timeline = timeline
        self._engines = {gpu: ModelledEngine(timeline, f"engine-{gpu}", roofline) for gpu in gpus}
        self._place: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._ended = 0
        self._marks: dict[int, SimEvent] = {}

    def start(self, lengths: Mapping[str, int]) -> None:
        gpus = list(self._engines)
        for number, (name, tokens) in enumerate(lengths.items()):
            self._place[name] = gpus[number % len(gpus)]
            self._timeline.start(self._respond(name, tokens))

    async def ended(self, num: int) -> None:
        """Returns when so many responses have ended."""
        if self._ended < num:
            await self._marks.setdefault(num, self._timeline.event())

    def consolidate(self, gpus: Sequence[int]) -> None:
        """What still runs elsewhere goes on here, keys and values with it."""
        for number, (name, gpu) in enumerate(self._place.items()):
            if gpu not in gpus:
                self._timeline.start(self._move(name, gpu, gpus[number % len(gpus)]))

    async def _move(self, name: str, source: int, target: int) -> None:
        self._place[name] = target
        self._left[name] = await self._engines[source].abort(name)

    async def _respond(self, name: str, tokens: int) -> None:
        left, at = tokens, self._place[name]
        while left:
            self._left[name] = 0
            context = PROMPT_TOKENS + tokens - left
            engine = self._engines[self._place[name]]
            if at != self._place[name]:
                at = self._place[name]
                await self._timeline.sleep(engine.model.kv_move_s(context))
                engine.adopt(name, context)
            await engine.generate(name, context, left)
            left = self._left[name]
        del self._place[name]
        self._ended += 1
        if self._ended in self._marks:
            self._marks[self._ended].set()


class PairRun:
    """Jobs that ask for the two nodes by turns; a `moved_at` of 1 moves nothing."""

    def __init__(self, scenario: TailMigration, names: Sequence[str], moved_at: float) -> None:
        self._scenario = scenario
        self._names = names
        self._moved_at = moved_at
        self._timeline = Timeline()
        self._rollout, self._train = Lock(self._timeline), Lock(self._timeline)
        self._rooflines = [Roofline(scenario.jobs[name].engine) for name in names]
        self._tails: set[int] = set()
        """GPUs that tails still have."""
        self.ends: list[list[float]] = [[] for _ in names]
        self.spans: list[LaneSpan] = []

    def run(self) -> list[float]:
        """Seconds per step of each job, while all run."""
        jobs = [self._timeline.start(self._job(at)) for at in range(len(self._names))]
        for job in jobs:
            self._timeline.run(until=job.ended)
        return [(ends[-1] - ends[1]) / (len(ends) - 2) for ends in self.ends]

    async def _job(self, at: int) -> None:
        scenario, spec = self._scenario, self._scenario.jobs[self._names[at]]
        switched = len(self._names) > 1
        count = scenario.prompts * scenario.responses
        while min(map(len, self.ends)) < scenario.steps:
            lengths = {
                f"{prompt}/{number}": spec.lengths.tokens(scenario.seed + len(self.ends[at]), prompt, number)
                for prompt in range(scenario.prompts)
                for number in range(scenario.responses)
            }
            await self._roll_out(at, spec, lengths, spec.rollout_switch_s * switched)
            await self._train.take()
            began = self._timeline.now
            update_s = spec.trainer.step_s(sum(lengths.values()) + count * PROMPT_TOKENS, count)
            await self._timeline.sleep(spec.train_switch_s * switched + update_s)
            self._train.give()
            self._span("training node", at, "update", began)
            self.ends[at].append(self._timeline.now)

    async def _roll_out(self, at: int, spec: TailJob, lengths: Mapping[str, int], switch_s: float) -> None:
        """The node goes to the next job once the tail has moved, else at the end."""
        await self._rollout.take()
        began = self._timeline.now
        await self._timeline.sleep(switch_s)
        gpus = [gpu for gpu in range(self._scenario.gpus) if gpu not in self._tails]
        rollout = StepRollout(self._timeline, self._rooflines[at], gpus)
        rollout.start(lengths)
        tail: set[int] = set()
        if self._moved_at < 1:
            moved = math.ceil(self._moved_at * len(lengths))
            await rollout.ended(moved)
            tail = set(gpus[-math.ceil((len(lengths) - moved) / spec.engine.num_slots) :])
            rollout.consolidate(sorted(tail))
            self._tails |= tail
            self._span("rollout node", at, "rollout", began)
            began = self._timeline.now
            self._rollout.give()
        await rollout.ended(len(lengths))
        self._tails -= tail
        self._span("rollout node, tail" if tail else "rollout node", at, "tail" if tail else "rollout", began)
        if not tail:
            self._rollout.give()

    def _span(self, lane: str, at: int, what: str, began: float) -> None:
        process = f"{' + '.join(self._names)}, {'migrating' if self._moved_at < 1 else 'not migrating'}"
        name = f"{self._names[at]} {at + 1}: {what}"
        self.spans.append(LaneSpan(process, lane, name, began, self._timeline.now - began))


def run(scenario: TailMigration, progress: RunProgress) -> RunResult:
    figures: dict[str, float | bool] = {}
    rows: list[tuple[Cell, ...]] = []
    spans: list[LaneSpan] = []
    for number, pair in enumerate(scenario.pairs):
        progress(number, len(scenario.pairs), " + ".join(pair))
        solo = [PairRun(scenario, (name,), 1.0).run()[0] for name in pair]
        arms = [PairRun(scenario, pair, moved_at) for moved_at in (1.0, scenario.moved_at)]
        plain, moved = (arm.run() for arm in arms)
        spans += [span for arm in arms for span in arm.spans]
        gain = figures["_".join(pair)] = _gain(plain, moved)
        rows += [("+".join(pair), name, *seconds, gain) for name, *seconds in zip(pair, solo, plain, moved, strict=True)]
    gains = {pair: figures["_".join(pair)] for pair in scenario.pairs}
    figures |= _orders(gains)
    columns = ("pair", "job", "solo_s", "shared_s", "migrating_s", "gain")
    return RunResult(
        figures=figures,
        tables={"phases": Table(columns, rows), "sensitivity": Table(("pair", "responses", "gain"), list(_swept(scenario)))},
        plots={"tail": Plot("What migration of the tail gains", lambda figure: _bars(figure, gains))},
        spans=spans,
        notes=("keys and values move with their responses, each over a NIC of its own",),
    )


def _gain(plain: Sequence[float], moved: Sequence[float]) -> float:
    """Throughput, the mean of the jobs'."""
    return fmean(a / b for a, b in zip(plain, moved, strict=True))


def _orders(gains: Mapping[tuple[str, str], float]) -> dict[str, bool]:
    """Of the pairs as they are listed: unlike jobs first, then pairs of one kind by length and by size."""
    unlike, *alike = gains.values()
    orders = {"moving_pays": min(gains.values()) >= 1, "unlike_gain_least": unlike <= min(alike, default=unlike)}
    names = ("longer_gain_more", "larger_gain_more")
    return orders | {name: a < b for name, (a, b) in zip(names, pairwise(alike), strict=False)}


def _swept(scenario: TailMigration) -> Iterator[tuple[Cell, ...]]:
    for responses in scenario.sensitivity:
        changed = scenario.model_copy(update={"responses": responses})
        for pair in scenario.pairs:
            plain, moved = (PairRun(changed, pair, moved_at).run() for moved_at in (1.0, scenario.moved_at))
            yield "+".join(pair), responses, _gain(plain, moved)


def _bars(figure: Any, gains: Mapping[tuple[str, str], float]) -> None:
    axes = figure.subplots()
    axes.bar([" + ".join(pair) for pair in gains], list(gains.values()))
    axes.set_ylabel("throughput, migrating ÷ not")


KIND = ScenarioKind(TailMigration, run)
