"""What the planner of advice says of a simulated job: the figures are those that a live job's rows have."""

from statistics import fmean

from rubato.planning.advice import AdviceView
from rubato.sim.cluster import ClusterJobSpec
from rubato.sim.job import Job


def view_of(spec: ClusterJobSpec, job: Job, warmup_steps: int) -> AdviceView:
    """Of the steps behind the first `warmup_steps`, at least one. Environments share a manager that costs nothing and has room for all."""
    counted, before = job.rows[warmup_steps:], job.rows[warmup_steps - 1] if warmup_steps else None
    span_s = counted[-1].ended_s - (before.ended_s if before else 0.0)
    batch = spec.batch_groups * spec.group_size
    played = job.played[-batch * len(counted) :]
    wall_s = sum(each.wall_s for each in played)
    return AdviceView(
        step_s=span_s / len(counted),
        waited_s=fmean(row.waited_s for row in counted),
        train_s=fmean(row.train_s for row in counted),
        alpha=spec.alpha_max if spec.alpha == "auto" else spec.alpha,
        batch=batch,
        rollout_s=wall_s / len(played),
        env_share=sum(each.env_s for each in played) / max(1e-9, wall_s),
        engines=sum(pool.count for pool in spec.pools),
        slots=sum(pool.count * pool.engine.num_slots for pool in spec.pools),
        managers=1,
        room=spec.environments,
    )
