"""RollArt's staleness rule, `staleness.stragglers: drop`: no step waits for a straggler; a group that no step may train any more ends.

Its rollouts that run are cancelled, and its slot goes to another prompt. By whole groups, as ROLL's code drops them: the members of one begin
together, so that they grow too old together. Live buffer and RLSim's use the same.
"""

from rubato.actors.samples.policy import PolicyPlugin
from rubato.planning.staleness import HandOver, SupplyView, hand_over, too_old
from rubato.runtime.config import Config


class DropStragglers(PolicyPlugin):
    """Ends groups as `stale` as soon as the step is bound that leaves them behind."""

    @classmethod
    def check(cls, job: Config) -> None:
        """As `PolicyPlugin`."""
        if job.section("tail_batching").enabled:
            raise ValueError("stragglers=drop has no effect beside tail_batching, which trains whole rounds. Leave one of them out")

    def next_batch(self, view: SupplyView) -> HandOver:
        """As `BatchPolicy`: the oldest that are ready, whatever still runs."""
        return hand_over(view, waits=False)

    def asked(self, step: int, ess: float, kl: float) -> None:
        """As `PolicyPlugin`: a restart may have left some."""
        self._drop()

    def bound(self, step: int) -> None:
        """As `PolicyPlugin`."""
        self._drop()

    def _drop(self) -> None:
        groups = self.groups
        step, version = groups.base + 1, groups.training.version
        under_way = [*groups.open(), *groups.ready()]
        for at in too_old((group.version(version) for group in under_way), step, groups.alpha):
            groups.discard(under_way[at], "stale", f"too old for step {step} (staleness.stragglers=drop)")
