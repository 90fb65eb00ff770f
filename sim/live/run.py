"""The second mode: the real actors over the memory transport on a virtual loop, with the modelled engine, trainer and environments.

What differs from sim/job.py is what the actors themselves do: messages, credit, leases, tickets, weights as blobs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from actors.config import EvalSection, RolloutSection, StalenessSection
from actors.engines.worker import EngineWorker
from actors.envs.manager import EnvManager
from actors.envs.section import EnvSection
from actors.training.agreement import CheckSection
from actors.training.trainer import CheckpointSection
from sim.cluster import ClusterJobSpec
from sim.live.engine import RooflineSection
from sim.simtest.actors import SimKernel, SimTrainer
from sim.simtest.checks import InvariantChecks
from sim.simtest.journal import Record
from sim.simtest.loop import SimLoop
from sim.simtest.process import ActorProcess
from sim.simtest.run import SeedJob, settings
from sim.simtest.setup import Setup, configs
from sim.simtest.toys import write_tokenizer
from sim.simtest.world import World
from sim.virtual import run_virtual

ResultT = TypeVar("ResultT")

LIMIT_S = 86_400.0
LONG_S = 3600.0
"""Deadlines that must never pass here."""


class ModelledKernel(SimKernel):
    """A training step takes what the model says of the tokens in its batch."""

    spec: ClusterJobSpec

    async def offload(self, fn: Callable[..., ResultT], *args: Any, cost_s: float = 0.0) -> ResultT:
        if getattr(fn, "__name__", "") != "_train":
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
    tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._configs = live_configs(self.spec, self.tokens, self.setup, self._model)

    def _equip(self, actor: Any, process: ActorProcess) -> None:
        super()._equip(actor, process)
        assert isinstance(process.kernel, ModelledKernel)
        process.kernel.spec = self.spec


def run(spec: ClusterJobSpec, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, one per step. Every task must sample one constant number of tokens per turn; one pool, no rewards.

    Raises ValueError where `spec` is none of that, and sim.simtest.checks.Violation when an actor breaks a promise.
    """
    tokens = sampled_per_turn(spec)
    setup = Setup(
        seed=seed, steps=spec.steps, alpha=staleness_of(spec).bound, group_size=spec.group_size, batch_groups=spec.batch_groups,
        num_engines=spec.pools[0].count, num_managers=1, concurrency=spec.environments,
        num_slots=spec.pools[0].engine.num_slots, checkpoint_every=1 << 20, window=64, durable=True, patience_s=20.0,
        delay_s=0.0, latency_s=0.0,
    )  # fmt: skip
    loop = SimLoop(None, limit_s=LIMIT_S)
    record, monitor = Record(loop.time, keep=False), InvariantChecks(setup.alpha, setup.window)
    monitor.now = loop.time
    job = SeedJob(setup, [], folder, write_tokenizer(folder / "model"), record, monitor)
    job.progress_s = LONG_S
    job.world_class = type("JobWorld", (LiveWorld,), {"spec": spec, "tokens": tokens})
    with settings(setup):
        run_virtual(job.main, loop=loop)
    if monitor.violation is not None:
        raise monitor.violation
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def sampled_per_turn(spec: ClusterJobSpec) -> int:
    """What every turn samples. Raises ValueError where turns or pools differ: the real sampler has one limit."""
    laws = {task.action_tokens.model_dump_json() for task in spec.tasks}
    if len(spec.pools) != 1 or len(laws) != 1 or spec.tasks[0].action_tokens.law != "constant":
        raise ValueError("the real actors run one pool, and tasks whose turns all sample one constant number of tokens")
    return int(spec.tasks[0].action_tokens.value)


def staleness_of(spec: ClusterJobSpec) -> StalenessSection:
    return StalenessSection(alpha=spec.alpha, alpha_min=spec.alpha_min, alpha_max=spec.alpha_max)


def live_configs(spec: ClusterJobSpec, tokens: int, setup: Setup, model: Path) -> dict[str, Any]:
    """The sections of every role."""
    base = configs(setup, model)
    engine, pool = base["engine"].engine, spec.pools[0]
    max_len = max(task.max_context for task in spec.tasks)
    size = spec.trainer.model.weight_bytes
    roofline = RooflineSection(
        kind="sim.live.engine:RooflineEngine", spec=pool.engine, num_slots=pool.engine.num_slots, max_len=max_len,
        load_s=spec.weights.load_s(size, pool.engine.num_gpus), scripted=engine.scripted,
    )  # fmt: skip
    environment = {
        "class": "sim.live.environment:ModelledEnv", "concurrency": spec.environments, "isolation": "inline",
        "kwargs": {"tasks": [task.model_dump(mode="json") for task in spec.tasks], "seed": setup.seed},
        "reset_timeout_s": LONG_S, "step_timeout_s": LONG_S,
    }  # fmt: skip
    rollout = RolloutSection(
        max_turns=1 << 16, max_new_tokens=tokens, max_len=max_len, generate_timeout_s=LONG_S, hold_s=2.0
    )
    train, staleness = base["trainer"], staleness_of(spec)
    return base | {
        "sample_buffer": base["sample_buffer"].model_copy(update={"staleness": staleness}),
        "engine": EngineWorker.Config(model=train.model, engine=roofline),
        "env_manager": EnvManager.Config(
            env=EnvSection.model_validate(environment), rollout=rollout, model=train.model
        ),
        "trainer": SimTrainer.Config(
            model=train.model, train=train.train, staleness=staleness, eval=EvalSection(every=0, final_num_tasks=0),
            checkpoint=CheckpointSection(every=setup.checkpoint_every), check=CheckSection(enabled=False),
        ),
    }  # fmt: skip


def _nothing() -> None:
    """Takes the time that it is given."""
