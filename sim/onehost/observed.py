"""What a live run was seen to do, and the same figures of a simulated one: steps per second, and how idle each role was."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rubato.runtime.config import Section
from rubato.runtime.observe.figures import WINDOW_S
from rubato.sim.job import JobStep
from rubato.sim.onehost.calibrated import Rollouts

ROLES = ("trainer", "engine", "env_manager", "llm_proxy", "sample_buffer", "reward_service")
"""Whose idle share is compared."""


class Observed(Section):
    """One run's window. `idle` is by role, a mean over its processes and over time, each value looking back some seconds."""

    engines: int = Field(ge=1)
    env_managers: int = Field(ge=1)
    steps: int = Field(ge=1)
    window: tuple[int, int]
    """First and last training step that count."""
    steps_s: float = Field(gt=0)
    """Training steps per second."""
    idle: dict[str, float] = Field(min_length=1)
    foreign_cores: float = Field(default=0.0, ge=0)
    """Cores that others on the host took meanwhile."""
    train_cpu_s_per_token: float = Field(default=0.0, ge=0)
    """What the same work cost in this run: tells how fast the host was then. Not used by the simulation."""
    rollouts: Rollouts | None = None
    """What its policy sampled: the work that this run had to do, which is nothing a simulator of time can foretell."""


def observe(rows: Sequence[JobStep], window: tuple[int, int], engines: int, env_managers: int) -> Observed:
    """A simulated run, as a live one would have reported itself."""
    first, last = window
    counted = rows[first - 1 : last]
    seconds = counted[-1].ended_s - rows[first - 2].ended_s
    idle: dict[str, float] = dict.fromkeys(ROLES, 0.0)
    for row in counted:
        shares = idle_shares(rows, row)
        for role in ROLES:
            mine = [share for name, share in shares.items() if name.rpartition("-")[0] == role]
            idle[role] += sum(mine) / len(mine) * (row.ended_s - row.began_s) / seconds
    return Observed(engines=engines, env_managers=env_managers, steps=len(rows), window=window, steps_s=len(counted) / seconds, idle=idle)


def idle_shares(rows: Sequence[JobStep], row: JobStep) -> Mapping[str, float]:
    """As runtime/kernel.py reports it: the smaller of 1 - busy and 1 - CPU, over about the last `WINDOW_S` seconds."""
    then = next((r for r in reversed(rows[: row.step - 1]) if row.ended_s - r.ended_s >= WINDOW_S), None)
    span_s = row.ended_s - (then.ended_s if then else 0.0)
    shares: dict[str, float] = {}
    for name, used in row.used.items():
        before = then.used[name] if then else (0.0, 0.0)
        shares[name] = 1.0 - min(1.0, max(now - past for now, past in zip(used, before, strict=True)) / span_s)
    return shares
