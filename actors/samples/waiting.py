"""Says what the buffer holds and what callers wait for, for the monitor: (detail, holder) each."""

from typing import TYPE_CHECKING

from actors.samples.group import Group
from actors.samples.groups import Groups
from planning.staleness import HandOver

if TYPE_CHECKING:
    from runtime.observe.metrics import Metrics

ENV_MANAGER, TRAINER = "env_manager", "trainer"


def why_no_batch(groups: Groups, plan: HandOver) -> tuple[str, str]:
    """How many groups there are, which is the oldest that runs, and who holds it."""
    oldest = next(groups.open(), None)
    if oldest is None:
        admission = groups.admission()
        return f"{plan.why}; none runs: {admission.why}", ENV_MANAGER if admission.num_groups else ""
    holders = _holders(oldest)
    held = f"at {', '.join(holders)}" if holders else "whose tickets nobody took yet"
    size = len(oldest.members)
    detail = f"{plan.why}; oldest group {oldest.id} has {oldest.num_settled} of {size} members, the rest {held}"
    return detail, holders[0] if holders else ENV_MANAGER


def why_no_tickets(groups: Groups) -> tuple[str, str]:
    """What fills the slots, and who frees the next one: the trainer where a batch is ready, else who runs the oldest group."""
    admission, oldest = groups.admission(), next(groups.open(), None)
    if oldest is None or sum(1 for _ in groups.ready()) >= groups.limits.batch_groups:
        return admission.why, TRAINER
    return f"{admission.why}; oldest group {oldest.id}", next(iter(_holders(oldest)), ENV_MANAGER)


def why_unfinished(group: Group) -> tuple[str, str]:
    """How far a held-out evaluation is."""
    detail = f"{group.num_settled} of {len(group.members)} held-out tasks of {group.id}"
    return detail, next(iter(_holders(group)), ENV_MANAGER)


def gauges(groups: Groups, metrics: "Metrics") -> None:
    """Depths in samples: held in groups that still run, ready to be claimed, bound to a step not trained yet."""
    bound = [group for group in groups.live.values() if group.state == "bound"]
    metrics.gauge("queue/held/depth", sum(group.num_scored for group in groups.open()))
    metrics.gauge("queue/ready/depth", sum(group.num_scored for group in groups.ready()))
    metrics.gauge("queue/bound/depth", sum(group.num_scored for group in bound))
    metrics.gauge("groups/ready", sum(1 for _ in groups.ready()))
    metrics.gauge("groups/in_flight", sum(1 for _ in groups.open()))


def _holders(group: Group) -> list[str]:
    return sorted({member.holder for member in group.members if member.state == "running"})
