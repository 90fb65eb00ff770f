"""Says what would make a job faster, and by how much: each change is judged by what holds the job up once it is made.

A step takes as long as the slower of training and rolling out, or both in turn where α is 0. Rolling out a batch takes at least as
long as each role needs for its part of it, and as the rollouts that may be in flight need to pass through (the asymptotic bounds of
closed queueing networks: Lazowska, Zahorjan, Graham, Sevcik, Quantitative System Performance, 1984, chapter 5). How much work is
where follows from times by Little's law. So a gain is an upper bound: what is near the next limit gains less. That of α alone is none: it
takes the rollouts in flight to grow as the slots do, while of more groups fewer wait for their last rollout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rubato.planning.staleness import UNBOUNDED

Bound = Literal["training-bound", "generation-bound", "environment-bound", "reward-bound", "rollout-bound"]

ChangeName = Literal["concurrency", "reward_workers", "env_workers", "env_manager", "alpha", "engine", "trainer"]
"""Those that cost less come first: of two that give the same the first is advised."""

PROCESSES: tuple[ChangeName, ...] = ("engine", "env_manager", "reward_workers", "env_workers")
"""Changes that start further ones."""

KEYS: tuple[ChangeName, ...] = ("concurrency", "reward_workers", "env_workers")
"""Changes of one key."""

WORTH = 0.03
"""Gains below this are within what steps differ by."""

FULL = 0.9
"""From this share on a limit on rollouts in flight is reached: one that ends leaves its place empty for a moment."""

CROWDED = 0.9
"""Share of a host's cores in use from which another process there takes its time from the others."""

NEVER_WAITED = 0.05
"""A trainer that waits a smaller share of its time holds the rollouts up: they would fill the slots that its batches have."""

NEARLY = 1.02
"""Of several counts the smallest is advised whose step is at most so many times as long as that of the largest."""


@dataclass(frozen=True, slots=True)
class AdviceView:
    """A stretch of a run: means over its steps, and what there is of each role."""

    step_s: float
    """From one step to the next; above 0."""
    waited_s: float
    """Of them the trainer waited for its batch."""
    train_s: float
    """Of them it updated the model."""
    alpha: int
    batch: int
    """Samples of a step; at least 1."""
    rollout_s: float
    """Mean of one rollout."""
    env_share: float
    """Of it, in resets and steps of the environment; what is left of it and of `reward_share` counts as generation."""
    engines: int
    slots: int
    """Requests that all engines decode at once."""
    managers: int
    room: int
    """Rollouts that all environment managers have room for."""
    pause_s: float = 0.0
    """An engine stands still for new weights, once a step."""
    env_workers: int = 0
    """Processes in which environments run, of all managers; 0: environments wait without keeping others from running."""
    manager_busy: float = 0.0
    """Share of time of one manager, on average."""
    host_busy: float = 0.0
    """Share of the cores of the trainer's host that are in use."""
    reward_share: float = 0.0
    """Of a rollout, in the wait for its scores."""
    reward_workers: int = 0
    """Processes that score, of all reward services; 0: nothing is known of them, and they count as no bound."""
    reward_services: int = 0
    reward_each_s: float = 0.0
    """Of a worker's time, what one sample more takes in a call."""
    reward_alone_s: float = 0.0
    """What a call of one sample takes."""


class SingleChange(NamedTuple):
    """What is changed: the new number of `name`, and by how much the job's throughput rises, 0.18 for 18 %."""

    name: ChangeName
    before: int
    after: int
    gain: float

    @property
    def key(self) -> str:
        """`engine_1_more`, `concurrency_2_times`: the name of a metric."""
        if self.name in ("concurrency", "trainer"):
            return f"{self.name}_{self.after // self.before}_times"
        return f"{self.name}_{self.after - self.before}_more"

    @property
    def words(self) -> str:
        """`2 environment managers more`."""
        more = self.after - self.before
        match self.name:
            case "concurrency":
                return f"env.concurrency {self.before} → {self.after}"
            case "reward_workers":
                return f"reward.workers {self.before} → {self.after}"
            case "env_workers":
                return f"env.workers {self.before} → {self.after}"
            case "alpha":
                return f"α {self.before} → {self.after}"
            case "trainer":
                return "a trainer twice as fast"
            case "engine":
                return f"{more} {'engine' if more == 1 else 'engines'} more"
            case "env_manager":
                return f"{more} environment {'manager' if more == 1 else 'managers'} more"


@dataclass(frozen=True, slots=True)
class Advice:
    """What holds the job up, and the changes that are worth a word, the most useful first; `bound` is empty where there are none."""

    bound: Bound | Literal[""]
    changes: tuple[SingleChange, ...]
    why: str
    """One sentence."""


def advise(view: AdviceView) -> Advice:
    """Every change that gives at least `WORTH`. An idle trainer asks for more rollouts, one that never waits for a faster trainer."""
    changes = tuple(change for change in what_if(view) if change.gain >= WORTH)
    if not changes:
        return Advice("", (), "balanced: no single change gives more than a few percent")
    first, *others = changes
    bound = _bound(view, first)
    listed = [f"{first.words} gives +{first.gain:.0%}" if _is_one(first) else f"{first.words} give +{first.gain:.0%}"]
    listed += [f"{change.words} +{change.gain:.0%}" for change in others]
    crowded = view.host_busy > CROWDED and any(change.name in PROCESSES for change in changes)
    where = f"; this host's cores are {view.host_busy:.0%} busy: put new processes on another" if crowded else ""
    return Advice(bound, changes, f"{bound}: {', '.join(listed)}{where}")


def what_if(view: AdviceView) -> list[SingleChange]:
    """Every change there is with its gain, the largest first; one that gives nothing is among them, with 0."""
    now = _period(_Changed(view))
    found = [
        (SingleChange(name, before, after, max(0.0, now / _period(changed) - 1.0)), _span(changed))
        for name, before, after, changed in _candidates(view)
    ]
    # Two that meet the same next limit: the one that would go further is the surer.
    found.sort(key=lambda each: (-round(each[0].gain, 6), round(each[1], 9)))
    return [change for change, _ in found]


# -- the model of a step ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Changed:
    """A view, and what is different from it."""

    view: AdviceView
    engines: float = 1.0
    managers: float = 1.0
    room: float = 1.0
    alpha: int = 0
    trainer: float = 1.0
    rewards: float = 1.0
    workers: float = 1.0


_Candidate = tuple[ChangeName, int, int, _Changed]


def _candidates(view: AdviceView) -> Iterator[_Candidate]:
    same = _Changed(view)
    each = max(1, view.room // max(1, view.managers))
    yield "concurrency", each, 2 * each, replace(same, room=2.0)
    if view.reward_workers:
        scorers = max(1, view.reward_workers // max(1, view.reward_services))
        yield from _enough("reward_workers", scorers, lambda times: replace(same, rewards=times))
    if view.env_workers:
        each = max(1, view.env_workers // max(1, view.managers))
        yield from _enough("env_workers", each, lambda times: replace(same, workers=times))
    yield from _enough("env_manager", view.managers, lambda times: replace(same, managers=times, room=times))
    if view.alpha != UNBOUNDED:
        yield "alpha", view.alpha, view.alpha + 1, replace(same, alpha=1)
    yield from _enough("engine", view.engines, lambda times: replace(same, engines=times))
    yield "trainer", 1, 2, replace(same, trainer=2.0)


def _enough(name: ChangeName, count: int, times: Callable[[float], _Changed]) -> Iterator[_Candidate]:
    """The smallest number, up to twice of what there are, that does about what twice does; nothing where there are none."""
    counts = [(n, times(n / count)) for n in range(count + 1, 2 * count + 1)]
    for n, changed in counts:
        if _period(changed) <= NEARLY * _period(counts[-1][1]):
            yield name, count, n, changed
            return


def _period(changed: _Changed) -> float:
    """Seconds of a step."""
    view = changed.view
    own_s = view.step_s - view.waited_s
    own_s -= min(own_s, view.train_s) * (1.0 - 1.0 / changed.trainer)
    span_s = _span(changed)
    return own_s + span_s if view.alpha + changed.alpha == 0 else max(own_s, span_s)


def _span(changed: _Changed) -> float:
    """Seconds in which a batch is rolled out while the trainer holds nothing up."""
    view = changed.view
    load = _load(view)
    by_engines = load.span_s * min(1.0, load.generating / max(1, view.slots)) / changed.engines
    by_workers = (
        load.span_s * min(1.0, load.stepping / view.env_workers) / (changed.managers * changed.workers) if view.env_workers else 0.0
    )
    by_rewards = min(load.span_s, load.scoring_s) / changed.rewards
    by_managers = load.span_s * load.manager_busy / changed.managers
    in_flight = _in_flight(changed, load)
    return load.paused_s + max(by_engines, by_workers, by_rewards, by_managers, load.span_s * load.served / max(in_flight, 1e-9))


class _Load(NamedTuple):
    """Rollouts by where they are, on average while rollouts are what the job is at."""

    span_s: float
    """Without pauses."""
    paused_s: float
    in_flight: float
    generating: float
    stepping: float
    scoring_s: float
    """In which all reward workers together score a batch."""
    manager_busy: float
    served: float
    """Those in flight that do not queue for a part that is busy."""


def _load(view: AdviceView) -> _Load:
    """Little's law: a batch of rollouts passes in each span, and each of them stays for `rollout_s`."""
    whole_s = max(view.waited_s if view.alpha == 0 else view.step_s, 1e-9)
    paused_s = min(view.pause_s, 0.9 * whole_s)
    span_s = whole_s - paused_s
    in_flight = min(view.batch * view.rollout_s / whole_s, float(max(1, view.room)))
    stepping, scoring = in_flight * view.env_share, in_flight * view.reward_share
    generating = max(0.0, in_flight - stepping - scoring)
    queued = max(0.0, generating - view.slots)
    if view.env_workers:
        queued += max(0.0, stepping - view.env_workers)
    scoring_s = view.batch * view.reward_each_s / view.reward_workers if view.reward_workers else 0.0
    if view.reward_workers:
        queued += max(0.0, scoring - view.batch * view.reward_alone_s / whole_s)
    busy = min(0.99, view.manager_busy * view.step_s / whole_s)
    queued += view.managers * busy * busy / (1.0 - busy)  # as in an M/M/1 queue
    served = max(in_flight - queued, 0.01 * in_flight)
    return _Load(span_s, paused_s, in_flight, generating, stepping, scoring_s, busy, served)


def _in_flight(changed: _Changed, load: _Load) -> float:
    """Rollouts that may run at once, by the managers' room and by the (α + 1) batches of slots, less those of the batch that is trained.

    Where there is room left it is the slots that bind. The others of them hold groups that are not complete: more slots, in the same share.
    """
    view = changed.view
    trained = 0.0 if view.alpha == 0 else view.batch * (1.0 - view.waited_s / view.step_s)
    if load.in_flight >= FULL * view.room:
        by_room, by_slots = load.in_flight, max(load.in_flight, view.batch * (view.alpha + 1) - trained)
    else:
        idle = max(0.0, 1.0 - view.waited_s / view.step_s / NEVER_WAITED) if view.alpha else 0.0
        by_room = float(view.room)
        by_slots = load.in_flight + idle * max(0.0, view.batch * view.alpha - load.in_flight)
    if view.alpha == UNBOUNDED:
        return by_room * changed.room
    return min(by_room * changed.room, by_slots * (view.alpha + 1 + changed.alpha) / (view.alpha + 1))


def _bound(view: AdviceView, first: SingleChange) -> Bound:
    match first.name:
        case "trainer":
            return "training-bound"
        case "engine":
            return "generation-bound"
        case "env_workers" | "env_manager":
            return "environment-bound"
        case "reward_workers":
            return "reward-bound"
        case "alpha" | "concurrency":
            return "environment-bound" if view.env_share > 0.5 else "rollout-bound"


def _is_one(change: SingleChange) -> bool:
    return change.name in (*KEYS, "alpha", "trainer") or change.after == change.before + 1
