"""Useful time of a run under failures: processes and hosts are lost as tools/bench/failures.py kills them, and are back after what that measured.

What a hit costs is an outcome: who is away holds up whatever needs it, rollouts of a lost manager begin again, a lost trainer its step.
Steps are paced, and rollouts last so many times a step, so that no hardware is in it. Groups, ages and attempts go by the live buffer's rules.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, PositiveFloat, model_validator

from rubato.actors.messages.samples import Ticket
from rubato.actors.samples.group import GroupLimits
from rubato.actors.samples.groups import Groups
from rubato.runtime.config import Section
from rubato.sim.buffer_model import NEVER_LAPSES_S, ModelledBuffer
from rubato.sim.job import Environments, Job
from rubato.sim.manager_model import ModelledManager, RolloutFailed, TurnRequest
from rubato.sim.outcome import Cell, Plot, RunProgress, RunResult, Table
from rubato.sim.scenario import Scenario, ScenarioKind
from rubato.sim.timeline import SimEvent, Timeline
from rubato.sim.workload import Episode, Turn

Role = Literal["engine", "env_manager", "trainer", "sample_buffer", "llm_proxy", "redis", "host"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Of which a hit draws one; *host* is the launcher with all below it."""

How = Literal["rubato", "whole"]
HOWS: tuple[How, ...] = get_args(How)
"""What died is started again; or all of the job is, whatever died."""

STORE = ("sample_buffer", "redis")
"""Without which no ticket, trajectory, batch or version goes through."""


class Hit(NamedTuple):
    """One failure: in the step after `step`, that share of the pace after the row of `step`."""

    step: int
    role: Role
    share: float


def hits_of(seed: int, steps: int, every: int) -> list[Hit]:
    """The seed's, one in each `every` steps; no role again before all had their turn."""
    rng, deck, found = Random(seed), list[Role](), list[Hit]()
    for begin in range(1, steps, every):
        last = min(begin + every, steps)
        if not deck:
            deck = rng.sample(ROLES, len(ROLES))
        found.append(Hit(rng.randrange(begin, last), deck.pop(), rng.uniform(0.1, 0.9)))
    return found


class PacedJob(Section):
    """The job of the bench; all of its times are shares of a step's."""

    steps: int = Field(ge=2)
    every: int = Field(ge=1)
    """One step of so many is hit."""
    engines: int = Field(ge=1)
    env_managers: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    """Rollouts at once of each manager."""
    batch_groups: int = Field(ge=1)
    group_size: int = Field(ge=2)
    alpha: int = Field(ge=0)
    max_attempts: int = Field(ge=1)
    turns: int = Field(ge=1)
    tokens: int = Field(ge=1)
    """Of each turn."""
    token_share: float = Field(gt=0)
    """What a token lasts."""


class UsefulTime(Scenario):
    """The same hits strike both kinds of job, at every length of a step."""

    job: PacedJob
    seeds: tuple[int, ...] = Field(min_length=2)
    """Each draws who is hit, and when."""
    steps_s: tuple[PositiveFloat, ...] = Field(min_length=1)
    away_s: Mapping[Role, PositiveFloat]
    """From the death of one to its being ready again, as measured live; *host*: until the whole run is, which was launched again, as the other
    kind of job is at each hit."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if missing := [role for role in ROLES if role not in self.away_s]:
            raise ValueError(f"away_s lacks {', '.join(missing)}")
        return self


class PacedCosts:
    """The job's parts, some of which are away at times."""

    def __init__(self, scenario: UsefulTime, pace_s: float, how: How, seed: int) -> None:
        job = self._job = scenario.job
        self._away_s, self._pace_s, self._how = scenario.away_s, pace_s, how
        self._hits = {hit.step: hit for hit in hits_of(seed, job.steps, job.every)}
        self._chance = Random(f"{seed}/who")
        self.timeline = Timeline()
        self._back_s: dict[str, float] = {}
        """When who is away is back."""
        self._lost: dict[str, int] = {}
        """How often each was."""
        self._training: SimEvent | None = None
        """Happens at the end of the step that is under way, or as it is lost."""
        self.version = 0
        self._managers = [f"env_manager-{number}" for number in range(job.env_managers)]
        self._engines = [f"engine-{number}" for number in range(job.engines)]
        self.environments = [Environments(self._manager(name), job.concurrency) for name in self._managers]

    def _manager(self, name: str) -> ModelledManager:
        async def up() -> None:
            await self.up(name, *STORE)

        async def score(session: str, episode: Episode) -> None:
            pass

        return ModelledManager(self.timeline, _Turns(self, name), score, up=up)

    # -- failures ---------------------------------------------------------------------------------------------------

    async def up(self, *names: str) -> None:
        """Return once none of them is away."""
        while (left_s := max(self._back_s.get(name, 0.0) for name in names) - self.timeline.now) > 0:
            await self.timeline.sleep(left_s)

    def times_lost(self, name: str) -> int:
        return self._lost.get(name, 0)

    def _strike(self, hit: Hit) -> None:
        role = "host" if self._how == "whole" else hit.role
        members = {"engine": self._engines, "env_manager": self._managers}.get(role, [role])
        gone = [*ROLES, *self._engines, *self._managers] if role == "host" else [self._chance.choice(members)]
        for name in gone:
            self._lost[name] = self.times_lost(name) + 1
            self._back_s[name] = max(self._back_s.get(name, 0.0), self.timeline.now + self._away_s[role])
        if "trainer" in gone and self._training is not None:
            self._training.set(False)

    # -- costs of a job ---------------------------------------------------------------------------------------------

    def episode(self, ticket: Ticket) -> Episode:
        return Episode("paced", (), (Turn(1, self._job.tokens, 0.0),) * self._job.turns)

    async def token(self) -> None:
        """Sampled by an engine that is there; where that is lost meanwhile, by another."""
        sampled = False
        while not sampled:
            there = [name for name in self._engines if self._back_s.get(name, 0.0) <= self.timeline.now]
            engine = self._chance.choice(there or self._engines)
            await self.up(engine)
            lost = self.times_lost(engine)
            await self.timeline.sleep(self._job.token_share * self._pace_s)
            sampled = self.times_lost(engine) == lost

    async def store(self) -> None:
        await self.up(*STORE)

    async def train(self, step: int, tokens: int, sequences: int) -> None:
        trained = False
        while not trained:
            await self.up("trainer", *STORE)
            self._training = self.timeline.event()
            self.timeline.at(self.timeline.now + self._pace_s, _ended(self._training))
            trained = await self._training

    async def publish(self, step: int) -> None:
        await self.up("trainer", *STORE)
        self.version = step

    async def finish(self, step: int) -> None:
        pass

    async def checkpoint(self, step: int) -> None:
        """The row of `step` is there, and it is saved."""
        if hit := self._hits.get(step):
            self.timeline.at(self.timeline.now + hit.share * self._pace_s, lambda: self._strike(hit))

    def used(self) -> Mapping[str, tuple[float, float]]:
        return {}


def _ended(training: SimEvent) -> Callable[[], None]:
    return lambda: training.set(True)


class _Turns(NamedTuple):
    """What rollouts of one manager ask for tokens. Those that it had when it was lost are played again."""

    costs: PacedCosts
    manager: str

    async def generate(self, request: TurnRequest, context: int, new_tokens: int, task: str = "") -> int:
        costs, lost = self.costs, self.costs.times_lost(self.manager)
        await costs.up("llm_proxy")
        version = costs.version
        for _ in range(new_tokens):
            await costs.token()
            if costs.times_lost(self.manager) != lost:
                raise RolloutFailed("manager_lost", retry=True)
        await costs.up("llm_proxy")
        return version

    def forget(self, session: str) -> None:
        pass


def useful_share(scenario: UsefulTime, pace_s: float, how: How, seed: int) -> float:
    """Steps times their pace, by the time from the begin of the first one's training to the last row."""
    job = scenario.job
    costs = PacedCosts(scenario, pace_s, how, seed)
    limits = GroupLimits(
        group_size=job.group_size, batch_groups=job.batch_groups, steps=job.steps, run_seed=seed,
        max_attempts=job.max_attempts, unbounded_batches=1, ticket_ttl_s=NEVER_LAPSES_S,
    )  # fmt: skip
    rows = Job(ModelledBuffer(costs.timeline, Groups(limits, job.alpha)), job.steps, costs).run()
    return job.steps * pace_s / (rows[-1].ended_s - (rows[0].ended_s - pace_s))


def run(scenario: UsefulTime, progress: RunProgress) -> RunResult:
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    for number, pace_s in enumerate(scenario.steps_s):
        told: list[str] = []
        for how in HOWS:
            shares = [useful_share(scenario, pace_s, how, seed) for seed in scenario.seeds]
            name = f"{how}_{pace_s:g}"
            figures |= {name: fmean(shares), f"{name}_least": min(shares), f"{name}_most": max(shares)}
            rows += [(pace_s, how, seed, share) for seed, share in zip(scenario.seeds, shares, strict=True)]
            told.append(f"{how} {fmean(shares):.3f} ± {stdev(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})")
        notes.append(f"useful at {pace_s:g} s a step, {len(scenario.seeds)} seeds: {'; '.join(told)}")
        progress(number + 1, len(scenario.steps_s), f"{pace_s:g} s")
    return RunResult(
        figures=figures,
        tables={"useful": Table(("step_s", "job", "seed", "useful_frac"), rows)},
        plots={"useful": Plot("Useful time under failures", lambda figure: _draw(figure, scenario.steps_s, figures))},
        notes=notes,
    )


def _draw(figure: Any, steps_s: Sequence[float], figures: Mapping[str, float]) -> None:
    axes = figure.subplots()
    for how in HOWS:
        means, least, most = ([figures[f"{how}_{pace_s:g}{what}"] for pace_s in steps_s] for what in ("", "_least", "_most"))
        below, above = ([abs(a - b) for a, b in zip(means, ends, strict=True)] for ends in (least, most))
        axes.errorbar(steps_s, means, (below, above), fmt="o-", capsize=3, label=how)
    axes.set_xscale("log")
    axes.set_xlabel("a step, s")
    axes.set_ylabel("useful share of the time")
    axes.legend()


KIND = ScenarioKind(UsefulTime, run)
