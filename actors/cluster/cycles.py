"""A job's steps as the permits tell them: how long each phase took, and how long it stood in line."""

from typing import NamedTuple

from rubato.actors.cluster.permits import PermitEvent
from rubato.planning.consolidation import RolloutTail
from rubato.planning.round_robin import StepTimes


class Cycle(NamedTuple):
    """One step of one job, from the start of its rollout to that of the next."""

    job: str
    times: StepTimes
    """Its phases; `environment` is what was neither a phase nor a wait."""
    waited_s: float
    """In line for its permits."""
    tail: RolloutTail = RolloutTail()
    """When the rollout gave places away; `kept` counts those that it kept."""

    @property
    def slowdown(self) -> float:
        """Its time ÷ its time alone."""
        alone = sum(self.times)
        return (alone + self.waited_s) / alone if alone > 0 else 1.0


class _Open:
    """A cycle under way. Times are wall clock, in seconds."""

    def __init__(self, job: str, began_s: float) -> None:
        self.job, self.began_s = job, began_s
        self.ended_s = 0.0
        self.rollout_s = self.train_s = self.waited_s = 0.0
        self.tail = RolloutTail()
        self.trained = False
        self.num_held = 0
        """Permits that it holds just now."""

    def done(self) -> Cycle | None:
        """The cycle, if the next has begun and nothing of this one is held any more."""
        if not self.ended_s or self.num_held:
            return None
        rest_s = self.ended_s - self.began_s - self.waited_s - self.rollout_s - self.train_s
        return Cycle(self.job, StepTimes(max(0.0, rest_s), self.rollout_s, self.train_s), self.waited_s, self.tail)


class Cycles:
    """Makes cycles of events, which come in order for each pool, and nearly so between them.

    `rollout` names the pools in which jobs generate. A cycle that began before `since_s` is left out: its beginning was not seen, or the
    cluster was away.
    """

    def __init__(self, rollout: frozenset[str], since_s: float = 0.0) -> None:
        self._rollout, self._since_s = rollout, since_s
        self._open: dict[str, _Open] = {}
        self._waits: dict[tuple[str, int], float] = {}
        """Pool and ticket → when it began to wait."""
        self._holds: dict[tuple[str, int], tuple[float, _Open]] = {}
        """Pool and ticket → when it began, and the cycle that it is of."""
        self._narrowed: dict[tuple[str, int], tuple[float, int]] = {}
        """Pool and ticket → when it gave places away, and how many it kept."""

    def told(self, pool: str, event: PermitEvent) -> Cycle | None:
        """One more event of `pool`; the cycle that is complete with it, if one is."""
        key, at = (pool, event.stand.ticket), event.at_s
        if event.kind == "waits":
            self._waits[key] = at
            return None
        if event.kind == "holds":
            return self._began(pool, event, max(0.0, at - self._waits.pop(key, at)))
        if event.kind == "narrows":
            self._narrowed[key] = at, len(event.stand.places)
            return None
        self._waits.pop(key, None)
        narrowed_at, kept = self._narrowed.pop(key, (at, 0))
        began, cycle = self._holds.pop(key, (0.0, None))
        if cycle is None:
            return None
        cycle.num_held -= 1
        if pool in self._rollout:
            cycle.rollout_s += at - began
            cycle.tail = RolloutTail((narrowed_at - began) / (at - began), kept) if at > narrowed_at else RolloutTail()
        else:
            cycle.train_s += at - began
        return self._told(cycle)

    def forget(self, job: str) -> None:
        """What is under way of a job that ended, or moves."""
        self._open.pop(job, None)

    def _began(self, pool: str, event: PermitEvent, waited_s: float) -> Cycle | None:
        job, at = event.stand.job, event.at_s
        cycle, ended = self._open.get(job), None
        if pool in self._rollout and (cycle is None or cycle.trained):
            if cycle is not None:
                cycle.ended_s = at - waited_s
                ended = self._told(cycle)
            cycle = self._open[job] = _Open(job, at - waited_s)
        if cycle is not None:
            cycle.waited_s += waited_s
            cycle.trained = cycle.trained or pool not in self._rollout
            cycle.num_held += 1
            self._holds[pool, event.stand.ticket] = (at, cycle)
        return ended

    def _told(self, cycle: _Open) -> Cycle | None:
        return cycle.done() if cycle.began_s >= self._since_s else None
