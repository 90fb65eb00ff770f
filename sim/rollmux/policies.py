"""Who shares with whom: RollMux's planner as live jobs have it, and the schedulers that it is held against."""

from random import Random

from rubato.planning.coexecution import CoexecutionGroup, JobProfile, PlacementPlan, SharedCluster, admit, busiest, depart, place, room
from rubato.planning.regrouping import settled
from rubato.sim.rollmux.multiplexed import Groups


class Departing:
    """A job that leaves frees the nodes that no other is pinned to."""

    def __init__(self, cluster: SharedCluster) -> None:
        self.cluster = cluster

    def departed(self, groups: Groups, name: str, left_s: dict[str, float]) -> Groups:
        return depart(groups, name)

    def usd_hour(self, groups: Groups) -> float:
        return sum(group.usd_hour(self.cluster) for group in groups)


class Planned(Departing):
    """RollMux: Algorithm 1, the live planner."""

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        return admit(groups, job, place(job, groups, self.cluster))


class Regrouped(Planned):
    """The same, and after each arrival and departure jobs move where that pays; one that moves starts cold."""

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        return self._settled(super().arrived(groups, job, left_s), left_s)

    def departed(self, groups: Groups, name: str, left_s: dict[str, float]) -> Groups:
        return self._settled(depart(groups, name), left_s)

    def _settled(self, groups: Groups, left_s: dict[str, float]) -> Groups:
        cold_s = {pinned.job.name: pinned.job.cold_s for group in groups for pinned in group.jobs}
        plan = settled(groups, left_s, self.cluster)
        for move in plan.moves:
            left_s[move.job] += cold_s[move.job]
        return plan.groups


class Alone(Departing):
    """Solo-D: a group for each job."""

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        return admit(groups, job, own_group(groups, job, self.cluster))


class RandomGroup(Departing):
    """Any group that has host memory for the job, or one of its own, each as likely."""

    def __init__(self, cluster: SharedCluster, seed: int) -> None:
        super().__init__(cluster)
        self._chance = Random(seed)

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        plans = [*(plan for _, plan in roomy(groups, job, self.cluster)), own_group(groups, job, self.cluster)]
        return admit(groups, job, self._chance.choice(plans))


class MostIdle(Departing):
    """The group whose busiest resource is idle the most, of those with host memory for the job; one of its own where there is none."""

    def arrived(self, groups: Groups, job: JobProfile, left_s: dict[str, float]) -> Groups:
        found = roomy(groups, job, self.cluster)
        if not found:
            return admit(groups, job, own_group(groups, job, self.cluster))
        _, plan = min(found, key=lambda item: busiest(item[0], self.cluster))
        return admit(groups, job, plan)


def roomy(groups: Groups, job: JobProfile, cluster: SharedCluster) -> list[tuple[CoexecutionGroup, PlacementPlan]]:
    """Each group with room for the job's states, and its least loaded nodes; as many new ones as the job has more than the group."""
    found: list[tuple[CoexecutionGroup, PlacementPlan]] = []
    for group in groups:
        added = max(0, job.rollout_nodes - len(group.nodes))
        nodes = room(group, job, added, cluster) if len(group.jobs) < cluster.residents else None
        if nodes is not None:
            found.append((group, PlacementPlan(group.number, nodes, added * cluster.rollout.usd_hour, {}, "")))
    return found


def own_group(groups: Groups, job: JobProfile, cluster: SharedCluster) -> PlacementPlan:
    number = max((group.number for group in groups), default=-1) + 1
    usd = job.rollout_nodes * cluster.rollout.usd_hour + job.train_nodes * cluster.train.usd_hour
    return PlacementPlan(number, tuple(range(job.rollout_nodes)), usd, {job.name: 1.0}, "")
