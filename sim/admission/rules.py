"""Models of published rules of admission, hand-over and age, beside which ours is measured. Pure: a view in, groups out.

They follow what papers, documentation and public code say of a rule, and nothing else of those systems: engine, trainer and workload are
the same for all. No rule here stops a turn that is under way. Groups are counted, as everywhere in the planners; the age of a group
counts from the version at which it was admitted.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class WaitingGroup(NamedTuple):
    """A group whose members are all scored. Both numbers count from 0."""

    admitted: int
    """As how many-th it was admitted."""
    completed: int
    """As how many-th it was complete."""


@dataclass(frozen=True, slots=True)
class RuleView:
    """What a rule may look at."""

    batch_groups: int
    version: int
    """Steps trained so far."""
    open: int
    """Groups that run."""
    ready: tuple[WaitingGroup, ...]
    """Oldest admission first."""
    bound: int
    """Groups of the batch that is being trained."""
    completed: int
    """Groups that were ever complete."""


class AdmissionRule(Protocol):
    """One published rule."""

    @property
    def name(self) -> str: ...

    def admit(self, view: RuleView) -> int:
        """How many groups may start now, at most."""
        ...

    def is_old(self, age: int) -> bool:
        """Whether a group that would be trained at this age is dropped, running or ready."""
        ...

    def take(self, view: RuleView) -> tuple[int, ...] | None:
        """Places in `view.ready` of the next batch; None while it must wait."""
        ...


@dataclass(frozen=True, slots=True)
class ArealRule:
    """Model of AReaL's rule: what was admitted may not run ahead of training by more than η batches. Nothing is dropped for its age.

    Source: AReaL (arXiv 2505.24298), section 5.1, ⌊(N - 1) / B⌋ ≤ i + η, and `capacity` in its code: (η + version + 1)·B less what was
    accepted or runs. What is complete is taken, oldest admission first; a straggler comes later, at whatever age.
    """

    eta: int
    name: str = "areal"

    def admit(self, view: RuleView) -> int:
        return (self.eta + view.version + 1) * view.batch_groups - (view.completed + view.open)

    def is_old(self, age: int) -> bool:
        return False

    def take(self, view: RuleView) -> tuple[int, ...] | None:
        return _oldest(view)


@dataclass(frozen=True, slots=True)
class RollRule:
    """Model of ROLL's rule (`async_generation_ratio` α): a buffer of (1 + α) batches, from which groups older than α are dropped.

    Source: ROLL Flash (arXiv 2510.11345), section 4, and ReplayBuffer in the public code: a quota of (1 + α)·B groups that grows by a batch
    at each step; the batch is of the oldest that are complete; groups that were begun more than ⌈α⌉ steps ago end.
    """

    alpha: int
    name: str = "roll"

    def admit(self, view: RuleView) -> int:
        return (1 + self.alpha) * view.batch_groups - (view.open + len(view.ready) + view.bound)

    def is_old(self, age: int) -> bool:
        return age > self.alpha

    def take(self, view: RuleView) -> tuple[int, ...] | None:
        return _oldest(view)


@dataclass(frozen=True, slots=True)
class PrimeRlRule:
    """Model of prime-rl's rule: rollouts start until one whole batch lies ready beside the one that is trained, and what would be more
    than k versions old is dropped.

    Source: its public orchestrator: TARGET_LAG is one batch, `max_off_policy_steps` is k; batches are made of groups in the order in which
    they come in, after a sweep of the stale ones.
    """

    most_off_policy: int
    name: str = "prime-rl"

    def admit(self, view: RuleView) -> int:
        return 0 if len(view.ready) >= view.batch_groups else view.batch_groups

    def is_old(self, age: int) -> bool:
        return age > self.most_off_policy

    def take(self, view: RuleView) -> tuple[int, ...] | None:
        if len(view.ready) < view.batch_groups:
            return None
        by_arrival = sorted(range(len(view.ready)), key=lambda at: view.ready[at].completed)
        return tuple(by_arrival[: view.batch_groups])


def _oldest(view: RuleView) -> tuple[int, ...] | None:
    if len(view.ready) < view.batch_groups:
        return None
    by_admission = sorted(range(len(view.ready)), key=lambda at: view.ready[at].admitted)
    return tuple(by_admission[: view.batch_groups])
