"""What tools/bench/rollout.py compares on: an environment whose steps last what a law says, and batch-level stepping of many at once."""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from rubato.actors.envs.environment import Observation, Step
from rubato.actors.envs.hosting import EnvHost, HostedEnv
from rubato.actors.envs.manager import EnvManager
from rubato.actors.envs.section import EnvSection
from rubato.actors.messages.samples import Purpose
from rubato.runtime.kernel import Kernel

TURNS, ENVIRONMENTS, GROUP = 15, 64, 2
PARETO_SHAPE, PARETO_MOST = 2.0, 20.0
"""A mean, and no variance: one step in 1,600 is cut at twenty times the mean."""


def latency(sigma_over_mu: float | None, chance: random.Random) -> float:
    """What one step takes, in units of μ: N(1, σ/μ) cut at 0; None draws from a Pareto tail of mean 1."""
    if sigma_over_mu is None:
        return min(PARETO_MOST, (1 - 1 / PARETO_SHAPE) * chance.paretovariate(PARETO_SHAPE))
    return max(0.0, chance.gauss(1.0, sigma_over_mu))


class PacedSteps:
    """Ends after 15 steps, each as long as `latency` says: a trajectory of a seed takes the same steps wherever it is played."""

    def __init__(self, *, mu_s: float, sigma_over_mu: float | None, spread: bool) -> None:
        """`spread`: the first groups have 1 to 15 turns, so that those after them begin one after the other, as after a long time."""
        self._mu_s, self._sigma_over_mu, self._spread = mu_s, sigma_over_mu, spread
        self._chance, self._left = random.Random(), 0

    async def reset(self, *, seed: int, row: int, trajectory: str) -> tuple[str, Mapping[str, Any]]:
        """Draw from the seed of the group and the name of the trajectory. Takes no time."""
        self._chance = random.Random(f"{seed} {trajectory}")
        self._left = 1 + row % TURNS if self._spread and row * GROUP < ENVIRONMENTS else TURNS
        return "go", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Wait for as long as the step takes."""
        await asyncio.sleep(self._mu_s * latency(self._sigma_over_mu, self._chance))
        self._left -= 1
        return "go", self._chance.random(), self._left == 0, False, {}

    def close(self) -> None:
        """Nothing to release."""


class LockStepManager(EnvManager):
    """Batch-level stepping: all `env.concurrency` environments take a turn, and the next begins when the last of them is through.

    Trajectories have to be equally long, so that a batch ends as a whole. One that fails leaves the others waiting.
    """

    def __init__(self, config: EnvManager.Config, kernel: Kernel) -> None:
        self._turn = asyncio.Barrier(config.env.concurrency)
        super().__init__(config, kernel)

    def _hosts_of(self) -> dict[str, EnvHost]:
        tasks = self._tasks.items()
        return {name: LockStepHost(task.env, turn=self._turn, on_output=self._output, task=name) for name, task in tasks}


class LockStepHost(EnvHost):
    """Gives out environments whose steps end together."""

    def __init__(self, section: EnvSection, *, turn: asyncio.Barrier, **options: Any) -> None:
        super().__init__(section, **options)
        self._turn = turn

    async def borrow(self, purpose: Purpose) -> HostedEnv:
        env = await super().borrow(purpose)
        return env if isinstance(env, LockStepEnv) else LockStepEnv(env, self._turn)


class LockStepEnv(HostedEnv):
    """`env`, whose step is over when those of all others are."""

    asynchronous = True

    def __init__(self, env: HostedEnv, turn: asyncio.Barrier) -> None:
        self._env, self._turn = env, turn

    async def reset(self, seed: int, told: Mapping[str, Any] = {}) -> tuple[Observation, Mapping[str, Any]]:
        return await self._env.reset(seed, told)

    async def step(self, action: str, began: Callable[[], object] = lambda: None) -> Step:
        result = await self._env.step(action, began)
        await self._turn.wait()
        return result

    async def close(self) -> None:
        await self._env.close()
