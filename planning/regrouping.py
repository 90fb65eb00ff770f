"""Which groups to dissolve once a job has left: those whose jobs fit into the others for less, what moving them costs included.

RollMux (arXiv 2512.11306) never moves a job, so that what departures leave stays until the last job of a group is done. A move stops a job
and starts it cold elsewhere: its time is lost and its own nodes are paid meanwhile, and its bound must hold over the steps left all the same.
A job that is slowed by it pays for its share of the nodes longer, and the group that it comes to is kept for as long as it stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rubato.planning.coexecution import CoexecutionGroup, JobProfile, PinnedJob, SharedCluster, admit, keeps, share

HOUR_S = 3600.0


class JobMove(NamedTuple):
    """A job goes to another group, onto these of its rollout nodes."""

    job: str
    source: int
    target: int
    nodes: tuple[int, ...]


class RegroupingPlan(NamedTuple):
    """Moves, in order, and what the groups are after them."""

    groups: tuple[CoexecutionGroup, ...]
    moves: tuple[JobMove, ...]
    saved_usd: float
    """Until the jobs moved are done, what moving costs subtracted."""
    why: str


def regroup(groups: Sequence[CoexecutionGroup], changed: int, left_s: Mapping[str, float], cluster: SharedCluster) -> RegroupingPlan:
    """What to dissolve after a job has left group `changed`: that group, or others one after the other into it.

    `left_s` is what each job has still to go, alone. Linear in groups. No move at all unless it saves more than it costs.
    """
    now = tuple(groups)
    moves: list[JobMove] = []
    saved = 0.0
    reasons: list[str] = []
    while True:
        best = max(_candidates(now, changed, left_s, cluster), key=lambda plan: plan.saved_usd, default=None)
        if best is None or best.saved_usd <= 0:
            break
        now = best.groups
        moves += best.moves
        saved += best.saved_usd
        reasons.append(best.why)
        if any(move.source == changed for move in best.moves):
            break
    why = "; ".join(reasons) or f"no group is worth dissolving after a job has left group {changed}"
    return RegroupingPlan(now, tuple(moves), saved, why)


def settled(groups: Sequence[CoexecutionGroup], left_s: Mapping[str, float], cluster: SharedCluster) -> RegroupingPlan:
    """`regroup` around each group in turn, until nothing is worth a move. Quadratic in groups: for a caller that has seconds,
    after an arrival too."""
    now, moves, saved, reasons = tuple(groups), list[JobMove](), 0.0, list[str]()
    left = dict(left_s)
    cold_s = {pinned.job.name: pinned.job.cold_s for group in now for pinned in group.jobs}
    waiting = [group.number for group in now]
    while waiting:
        number = waiting.pop(0)
        plan = regroup(now, number, left, cluster) if any(group.number == number for group in now) else None
        if plan is None or not plan.moves:
            continue
        for move in plan.moves:
            left[move.job] += cold_s[move.job]
        now, saved = plan.groups, saved + plan.saved_usd
        moves += plan.moves
        reasons.append(plan.why)
        waiting = [group.number for group in now]
    return RegroupingPlan(now, tuple(moves), saved, "; ".join(reasons) or "no group is worth dissolving")


def _candidates(
    groups: Sequence[CoexecutionGroup], changed: int, left_s: Mapping[str, float], cluster: SharedCluster
) -> Iterable[RegroupingPlan]:
    for source in groups:
        others = [group for group in groups if group is not source]
        targets = others if source.number == changed else [group for group in others if group.number == changed]
        plan = _dissolved(source, targets, left_s, cluster)
        if plan is not None:
            after = {group.number: group for group in plan.groups}
            yield plan._replace(groups=tuple(after.get(group.number, group) for group in others))


def _dissolved(
    source: CoexecutionGroup, targets: Sequence[CoexecutionGroup], left_s: Mapping[str, float], cluster: SharedCluster
) -> RegroupingPlan | None:
    """All of `source`'s jobs moved into `targets`; None where one of them fits nowhere."""
    moves: list[JobMove] = []
    hours = max(left_s[pinned.job.name] for pinned in source.jobs) / HOUR_S
    saved = source.usd_hour(cluster) * hours
    slowdown, before = dict[str, float](), {group.number: group for group in targets}
    for job in sorted((pinned.job for pinned in source.jobs), key=lambda job: (-job.rollout_s, job.name)):
        left = left_s[job.name]
        slo = job.slo - job.cold_s / left if left > 0 else 0.0
        found = share(job._replace(slo=slo), targets, cluster) if slo >= 1 else None
        if found is None or found.group is None:
            return None
        # Those who move in later see the tighter bound too, until the whole is decided.
        targets = admit(targets, job._replace(slo=slo), found)
        moves.append(JobMove(job.name, source.number, found.group, found.nodes))
        slowdown |= found.slowdown
        saved -= found.usd_hour * left / HOUR_S + _own_usd_hour(job, cluster) * job.cold_s / HOUR_S
    for group in targets:
        new = [move.job for move in moves if move.target == group.number]
        if new:
            saved -= _kept_usd(before[group.number], [left_s[name] for name in new], left_s, cluster)
            saved -= _slowing_usd([source, before[group.number]], group, slowdown, hours * HOUR_S, left_s, cluster)
    agreed = {pinned.job.name: pinned.job for pinned in source.jobs}
    groups = tuple(group._replace(jobs=tuple(_agreed(pinned, agreed) for pinned in group.jobs)) for group in targets)
    where = ", ".join(f"{move.job} to {move.target}" for move in moves)
    why = f"group {source.number} is dissolved ({where}): {saved:.2f} $ saved over {hours:.1f} h, moves paid"
    return RegroupingPlan(groups, tuple(moves), saved, why)


def _kept_usd(target: CoexecutionGroup, new_s: Sequence[float], left_s: Mapping[str, float], cluster: SharedCluster) -> float:
    """What `target` costs for as long as those who come to it outlast its own jobs."""
    own_s = max(left_s[pinned.job.name] for pinned in target.jobs)
    return target.usd_hour(cluster) * max(0.0, max(new_s) - own_s) / HOUR_S


def _slowing_usd(
    before: Sequence[CoexecutionGroup],
    after: CoexecutionGroup,
    slowdown: Mapping[str, float],
    most_s: float,
    left_s: Mapping[str, float],
    cluster: SharedCluster,
) -> float:
    """What the jobs of `after` pay for being slower than they were, each its share of the group's price."""
    was = {name: slow for group in before for name, slow in (keeps(group, cluster) or {}).items()}
    names = [pinned.job.name for pinned in after.jobs]
    longer_s = sum((slowdown[name] - was.get(name, 1.0)) * min(left_s[name], most_s) for name in names)
    return after.usd_hour(cluster) / len(names) * longer_s / HOUR_S


def _agreed(pinned: PinnedJob, agreed: Mapping[str, JobProfile]) -> PinnedJob:
    return pinned._replace(job=agreed.get(pinned.job.name, pinned.job))


def _own_usd_hour(job: JobProfile, cluster: SharedCluster) -> float:
    return job.rollout_nodes * cluster.rollout.usd_hour + job.train_nodes * cluster.train.usd_hour
