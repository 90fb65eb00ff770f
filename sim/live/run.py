"""The second mode: the real actors over the memory transport on a virtual loop, with the modelled engine, trainer and environments.

What differs from sim/job.py is what the actors themselves do: messages, credit, leases, tickets, weights as blobs.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rubato.actors import plugins
from rubato.actors.cluster.lease import finished
from rubato.actors.messages.moves import Move, Moved
from rubato.actors.proxy.proxy import LLMProxy
from rubato.runtime.observe.figures import Metrics
from rubato.sim.cluster import ClusterJobSpec
from rubato.sim.live.configs import LONG_S, check, engine_config, engine_pools, live_configs, staleness_of
from rubato.sim.live.environment import ModelledScorer, elastic_scorer
from rubato.sim.moves_model import next_move
from rubato.sim.simtest.actors import SimKernel, SimRewards
from rubato.sim.simtest.checks import InvariantChecks
from rubato.sim.simtest.journal import Record
from rubato.sim.simtest.loop import SimLoop
from rubato.sim.simtest.process import ActorProcess
from rubato.sim.simtest.run import SeedJob, settings
from rubato.sim.simtest.setup import Setup
from rubato.sim.simtest.toys import write_tokenizer
from rubato.sim.simtest.world import World
from rubato.sim.virtual import run_virtual

ResultT = TypeVar("ResultT")

LIMIT_S = 86_400.0


class ModelledKernel(SimKernel):
    """A training step takes what the model says of the tokens in its batch."""

    spec: ClusterJobSpec

    async def offload(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT:
        if fn is not finished:
            return await super().offload(fn, *args, cost_s=cost_s)
        outcome: Any = await super().offload(fn, *args)
        groups, _ = outcome
        sizes = [len(segment.tokens) // 4 for group in groups for rollout in group for segment in rollout.segments]
        await super().offload(_nothing, cost_s=self.spec.trainer.step_s(sum(sizes), len(sizes)))
        return outcome


class LiveWorld(World):
    """Its roles' sections say what the job's specification says."""

    kernel_class = ModelledKernel
    spec: ClusterJobSpec

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._configs = live_configs(self.spec, self.setup, self._model)
        self._pools = {f"engine-{number}": pool for number, pool in enumerate(engine_pools(self.spec), 1)}
        self.num_moved = 0
        """Requests that changed their engine."""
        self._rewards: Metrics | None = None

    @property
    def num_reward_starts(self) -> int:
        """Workers of the reward service that were started since it is there."""
        return int(self._rewards.snapshot().get("reward/cold_starts", 0)) if self._rewards is not None else 0

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        await super().run(tasks)
        if self.spec.move_every_s:
            proxy = self.processes["llm_proxy-1"]
            proxy.context.run(proxy.actor.spawn, self._keep_moving(proxy.actor), name="moves")

    def config_of(self, name: str) -> Any:
        if name in self._pools:
            return engine_config(self._configs["engine"], self.spec, self._pools[name])
        return super().config_of(name)

    def hardware_of(self, name: str) -> str:
        return self._pools[name].name if name in self._pools else ""

    def _equip(self, actor: Any, process: ActorProcess) -> None:
        super()._equip(actor, process)
        assert isinstance(process.kernel, ModelledKernel)
        process.kernel.spec = self.spec
        if isinstance(actor, SimRewards):
            actor._scorer = self._scorer(actor)  # pyright: ignore[reportPrivateUsage]

    def _scorer(self, actor: SimRewards) -> Any:
        if self.spec.reward_min_workers is None:
            return ModelledScorer()
        self._rewards = actor.metrics
        return elastic_scorer(actor.config.reward, actor.metrics, self.spec.reward_start_s)

    async def _keep_moving(self, proxy: LLMProxy) -> None:
        """As rubato.sim.moves_model.keep_moving, of the real proxy."""
        while True:
            await asyncio.sleep(self.spec.move_every_s)
            seats = proxy.placement.seats
            found = next_move({name: tuple(seat.requests) for name, seat in seats.items()})
            if found is not None:
                proxy.spawn(self._move(proxy, Move(*found)), name="move")

    async def _move(self, proxy: LLMProxy, order: Move) -> None:
        self.num_moved += isinstance(await proxy.hook(plugins.MOVES).move(order), Moved)


class LiveRun(NamedTuple):
    """`rows` of metrics.jsonl, one per step."""

    rows: list[dict[str, Any]]
    moved: int
    """Requests that changed their engine."""
    reward_starts: int
    """Workers of the reward service that were started, where they come and go."""


def run(spec: ClusterJobSpec, seed: int, folder: Path) -> LiveRun:
    """Raises ValueError where `spec` asks for what these actors can't do, and rubato.sim.simtest.checks.Violation when one breaks a promise."""
    check(spec)
    setup = Setup(
        seed=seed, steps=spec.steps, alpha=staleness_of(spec).bound, group_size=spec.group_size, batch_groups=spec.batch_groups,
        num_engines=sum(pool.count for pool in spec.pools), num_managers=1, concurrency=spec.environments,
        num_slots=spec.pools[0].engine.num_slots, checkpoint_every=1 << 20, window=64, durable=True, patience_s=20.0,
        delay_s=0.0, latency_s=0.0,
    )  # fmt: skip
    loop = SimLoop(None, limit_s=LIMIT_S)
    record, monitor = Record(loop.time, keep=False), InvariantChecks(setup.alpha, setup.window)
    monitor.now = loop.time
    job = SeedJob(setup, [], folder, write_tokenizer(folder / "model"), record, monitor)
    job.progress_s = LONG_S
    job.world_class = type("JobWorld", (LiveWorld,), {"spec": spec})
    with settings(setup):
        run_virtual(job.main, loop=loop)
    if monitor.violation is not None:
        raise monitor.violation
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert isinstance(job.world, LiveWorld)
    return LiveRun(rows, job.world.num_moved, job.world.num_reward_starts)


def _nothing() -> None:
    """Takes the time that it is given."""
