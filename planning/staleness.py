"""Decides how many groups may start, when a batch may be handed over, and what is too old to train.

A step `n` starts from weight version `n - 1`, and a sample whose first token came from version `v` has age `n - 1 - v` in it.
Invariant: when slots bound admission and every hand-over follows `hand_over`, no age exceeds α, and where it waits for stragglers nothing is
dropped for age.
"""

from collections.abc import Iterable
from dataclasses import dataclass

UNBOUNDED = -1
"""α of a job that never drops a sample for its age."""

OLDEST = 0
"""The version of the base model: the bound of an unbounded job."""


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """What admission depends on. Groups are counted, not samples."""

    alpha: int
    batch_groups: int
    charged: int
    """Groups that hold a slot: admitted, and neither trained nor dropped yet."""
    version: int
    """Steps trained so far."""
    steps: int
    """Steps of the whole job."""
    unbounded_batches: int = 8
    """Slots in batches where α is unbounded: memory is not."""


@dataclass(frozen=True, slots=True)
class Admission:
    """How many new groups may start now."""

    num_groups: int
    why: str


@dataclass(frozen=True, slots=True)
class SupplyView:
    """What there is for the batch of `step`. A group's version is the oldest that any first token of it has, or may still get."""

    step: int
    alpha: int
    batch_groups: int
    ready: tuple[int, ...]
    """Versions of the complete groups, those that were admitted first coming first."""
    in_flight: tuple[int, ...]
    """Versions of the groups that still run."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Whether the batch may be claimed now, and the oldest version that may be in it."""

    take: bool
    min_version: int
    why: str
    chosen: tuple[int, ...] = ()
    """Places in `SupplyView.ready` of the groups to take, in the order in which they train."""


def is_stale(version_first: int, version: int, alpha: int) -> bool:
    """Whether a sample begun under `version_first` is too old for an update that starts from `version`."""
    return alpha != UNBOUNDED and version - version_first > alpha


def min_version(step: int, alpha: int) -> int:
    """The oldest first-token version that `step` may train on."""
    return OLDEST if alpha == UNBOUNDED else step - 1 - alpha


def admit(view: AdmissionView) -> Admission:
    """Fill (α + 1) batches of slots, but start no group that the remaining steps can't train.

    A group that starts now meets at most that many slots' worth of groups of its age or older, which the next α + 1 steps train.
    """
    batches = view.unbounded_batches if view.alpha == UNBOUNDED else view.alpha + 1
    free = batches * view.batch_groups - view.charged
    needed = (view.steps - view.version) * view.batch_groups - view.charged
    if needed <= 0:
        return Admission(0, f"the {max(0, view.steps - view.version)} steps left have all the groups they train")
    if free <= 0:
        return Admission(0, f"all {batches * view.batch_groups} slots hold groups that are not trained yet")
    if needed < free:
        return Admission(needed, f"the steps left train {needed} more groups")
    return Admission(free, f"{free} of {batches * view.batch_groups} slots are free")


def too_old(versions: Iterable[int], step: int, alpha: int) -> tuple[int, ...]:
    """Places of the groups of these versions that neither `step` nor one after it may train."""
    oldest = min_version(step, alpha)
    return tuple(at for at, version in enumerate(versions) if version < oldest)


def hand_over(view: SupplyView, *, waits: bool = True) -> HandOver:
    """Take the oldest ready groups, unless it `waits` and that would leave a group behind that the following steps can no longer train in time.

    Groups of version at most `min_version + k` must be trained by step `step + k`, which leaves them k further batches. While
    more than k batches of them would remain, and one of them still runs, a younger group must not take its place: the
    hand-over waits. Long rollouts are thus waited for and not dropped, so that the batch is no selection of short ones.

    Where it does not wait, the caller ends what is `too_old`: RollArt's rule (arXiv 2512.22560, section 7.2), by which n - v0 <= α or
    the trajectory is aborted.
    """
    oldest = min_version(view.step, view.alpha)
    usable = sorted((version, at) for at, version in enumerate(view.ready) if version >= oldest)
    if len(usable) < view.batch_groups:
        return HandOver(False, oldest, f"{len(usable)} of {view.batch_groups} groups")
    batch, rest = usable[: view.batch_groups], usable[view.batch_groups :]
    for k in range(max(0, view.alpha) if waits else 0):
        limit = oldest + k
        running = sum(version <= limit for version in view.in_flight)
        if not running or batch[-1][0] <= limit:
            continue
        left = running + sum(version <= limit for version, _ in rest)
        if left > k * view.batch_groups:
            return HandOver(False, oldest, f"{running} running groups would be too old after step {view.step + k}")
    why = f"the {view.batch_groups} oldest of {len(usable)} groups"
    return HandOver(True, oldest, why, tuple(at for _, at in batch))
