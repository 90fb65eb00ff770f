"""The sections of every role in the second mode: what a job's specification says, in the words of a live config."""

from pathlib import Path
from typing import Any

from rubato.actors.config import CheckSection, EvalSection, RewardSection, RolloutSection, StalenessSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.envs.manager import EnvManager
from rubato.actors.envs.section import EnvSection
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.rewards.service import RewardService
from rubato.actors.training.trainer import CheckpointSection
from rubato.sim.cluster import ClusterJobSpec, PoolSpec, sections_of
from rubato.sim.live.roofline_engine import RooflineSection
from rubato.sim.simtest.actors import SimTrainer
from rubato.sim.simtest.setup import Setup, configs

LONG_S = 3600.0
"""Deadlines that must never pass here."""


def check(spec: ClusterJobSpec) -> None:
    """Raises ValueError, one sentence, for what the real actors are not run with."""
    if spec.draw != "mixture" and (len(spec.tasks) > 1 or spec.affinity or _classes(spec)):
        raise ValueError("the real actors tell tasks apart only where the live planner draws them: set draw to mixture")
    if any(task.reset_failure.probability or task.reward_failure for task in spec.tasks):
        raise ValueError("no environment and no reward fails in the second mode: set their failures to 0")
    if not spec.reward_workers and any(task.reward_s.model_dump() != STILL for task in spec.tasks):
        raise ValueError("rewards that take time need workers in the second mode: set reward_workers")
    if len(_classes(spec)) < sum(len(pool.tasks) for pool in spec.pools):
        raise ValueError("a task has one class of hardware in the second mode: name it in one pool")


STILL = {"law": "constant", "value": 0.0}


def staleness_of(spec: ClusterJobSpec) -> StalenessSection:
    return StalenessSection(alpha=spec.alpha, alpha_min=spec.alpha_min, alpha_max=spec.alpha_max, stragglers=spec.stragglers)


def engine_pools(spec: ClusterJobSpec) -> list[PoolSpec]:
    """The pool of each engine."""
    return [pool for pool in spec.pools for _ in range(pool.count)]


def engine_config(base: EngineWorker.Config, spec: ClusterJobSpec, pool: PoolSpec) -> EngineWorker.Config:
    """Of an engine of `pool`."""
    own, load_s = pool.engine, spec.weights.load_s(spec.trainer.model.weight_bytes, pool.engine.num_gpus)
    changes = {"spec": own, "num_slots": own.num_slots, "load_s": load_s, "serves": pool.serves}
    return base.model_copy(update={"engine": base.engine.model_copy(update=changes)})


def live_configs(spec: ClusterJobSpec, setup: Setup, model: Path) -> dict[str, Any]:
    """Of every role; engines differ by their pool."""
    base = configs(setup, model)
    train, staleness, tasks = base["trainer"], staleness_of(spec), _tasks(spec, setup.seed)
    only = next(iter(tasks.values()))
    if spec.draw != "mixture":
        tasks = {}  # a live job's only task has no name
    reward = RewardSection(
        functions=("rubato.sim.live.environment:scored",) if spec.reward_workers else (),
        workers=max(1, spec.reward_workers), min_workers=spec.reward_min_workers, timeout_s=LONG_S,
    )  # fmt: skip
    longest = max(task.max_context for task in spec.tasks)
    sampled = max(min(task.max_action_tokens, task.max_context) for task in spec.tasks)
    rollout = RolloutSection(
        max_turns=1 << 16, max_new_tokens=sampled, max_len=longest + sampled, generate_timeout_s=LONG_S,
        reward_timeout_s=LONG_S, hold_s=2.0,
    )  # fmt: skip
    engine = RooflineSection(
        kind="rubato.sim.live.roofline_engine:RooflineEngine", spec=spec.pools[0].engine, max_len=longest + sampled,
        scripted=base["engine"].engine.scripted,
    )  # fmt: skip
    environment = {
        "class": only.target, "kwargs": only.kwargs, "concurrency": spec.environments, "isolation": "inline",
        "reset_timeout_s": LONG_S, "step_timeout_s": LONG_S,
    }  # fmt: skip
    return base | {
        "sample_buffer": base["sample_buffer"].model_copy(update={"staleness": staleness, "tasks": tasks}),
        "llm_proxy": LLMProxy.Config(affinity=spec.affinity or _classes(spec)),
        "engine": EngineWorker.Config(model=train.model, engine=engine),
        "env_manager": EnvManager.Config(
            env=EnvSection.model_validate(environment), rollout=rollout, model=train.model, reward=reward, tasks=tasks
        ),
        "reward_service": RewardService.Config(reward=reward, tasks=tasks),
        "trainer": SimTrainer.Config(
            model=train.model, train=train.train, staleness=staleness, eval=EvalSection(every=0, final_num_tasks=0),
            checkpoint=CheckpointSection(every=setup.checkpoint_every), check=CheckSection(enabled=False),
        ),
    }  # fmt: skip


def _tasks(spec: ClusterJobSpec, seed: int) -> dict[str, Any]:
    found = sections_of(spec)
    return {name: task.model_copy(update={"kwargs": {**task.kwargs, "seed": seed}}) for name, task in found.items()}


def _classes(spec: ClusterJobSpec) -> dict[str, str]:
    """Task → class of hardware, which is a pool's name."""
    return {task: pool.name for pool in spec.pools for task in pool.tasks}
