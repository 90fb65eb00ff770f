"""How large a simulated job is and how it is configured: drawn from the seed, like its faults."""

import importlib.util
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rubato.actors.config import (
    CheckSection,
    EvalSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    SamplesSection,
    StalenessSection,
    TailBatchingSection,
    TrainSection,
)
from rubato.actors.engines.section import EngineSection, ScriptedSection
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.envs.manager import EnvManager
from rubato.actors.envs.section import EnvSection
from rubato.actors.gateway.gateway import GatewaySection
from rubato.actors.proxy.proxy import LLMProxy
from rubato.actors.rewards.service import RewardService
from rubato.actors.training.trainer import CheckpointSection
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorSpec, Config
from rubato.runtime.config.sections import BaseRoot
from rubato.runtime.registry import role_of
from rubato.sim.simtest.actors import SimBuffer, SimEngine, SimGateway, SimRewards, SimTrainer

CLASSES: Mapping[str, type[Actor]] = {
    "sample_buffer": SimBuffer,
    "llm_proxy": LLMProxy,
    "engine": SimEngine,
    "env_manager": EnvManager,
    "gateway": SimGateway,
    "reward_service": SimRewards,
    "trainer": SimTrainer,
}


SESSIONS_SHARE = 0.2
"""Of the seeds, how many have a gateway, and agents from outside, in place of environment managers."""

DROPS_SHARE = 0.25
"""Of the seeds, how many drop stragglers."""

SESSIONS_STEPS = 0.6
"""Of the steps that such a seed draws, how many it has: agents ask more often than environments step."""

IDLE_S, QUEUE_S, WAIT_S = 4.0, 8.0, 15.0
"""Limits of the gateway: shorter than most faults last."""


class Setup(NamedTuple):
    """One job."""

    seed: int
    steps: int
    alpha: int
    group_size: int
    batch_groups: int
    num_engines: int
    num_managers: int
    concurrency: int
    num_slots: int
    checkpoint_every: int
    window: int
    """Messages of credit; small ones make the accounting matter."""
    durable: bool
    patience_s: float
    delay_s: float
    latency_s: float
    extra_rollouts: int = 0
    auto: bool = False
    """α adapts, up to `alpha`."""
    tail: bool = False
    """Groups go by rounds, and not by `extra_rollouts`."""
    sessions: bool = False
    """Rollouts are played by agents from outside."""
    trains_all: bool = False
    """Of a session, what led nowhere too."""
    drops: bool = False
    """No step waits for stragglers, where groups don't go by rounds."""

    @property
    def managers(self) -> list[str]:
        """What plays rollouts. A job has one gateway."""
        return ["gateway-1"] if self.sessions else [f"env_manager-{i + 1}" for i in range(self.num_managers)]

    @property
    def names(self) -> list[str]:
        """Every process, the trainer last."""
        engines = [f"engine-{i + 1}" for i in range(self.num_engines)]
        return ["sample_buffer-1", "llm_proxy-1", *engines, "reward_service-1", *self.managers, "trainer-1"]


def can_serve() -> bool:
    """Whether a gateway can run here: its package is an extra."""
    return importlib.util.find_spec("starlette") is not None


def draw(seed: int, *, sessions: bool | None = None) -> Setup:
    """`sessions`: whether agents from outside play; else the seed says it, where a gateway can run."""
    of_sessions = random.Random(f"{seed}/sessions")
    are_drawn, trains_all = of_sessions.random() < SESSIONS_SHARE, of_sessions.random() < 0.25
    drops = random.Random(f"{seed}/stragglers").random() < DROPS_SHARE
    rng = random.Random(f"{seed}/setup")
    drawn = Setup(
        seed=seed,
        steps=rng.randint(20, 24),
        alpha=rng.choice((0, 1, 1, 2, 3)),
        group_size=rng.choice((2, 2, 3)),
        batch_groups=rng.choice((2, 2, 3)),
        num_engines=rng.choice((2, 2, 3)),
        num_managers=rng.choice((1, 2, 2)),
        concurrency=rng.choice((3, 6, 8)),
        num_slots=rng.choice((2, 4)),
        checkpoint_every=rng.choice((1, 2, 3, 5)),
        window=rng.choice((2, 4, 64)),
        durable=rng.random() < 0.5,
        patience_s=rng.choice((1.0, 20.0)),
        delay_s=rng.choice((0.0, 0.002, 0.02)),
        latency_s=rng.choice((0.0, 0.001, 0.005)),
        extra_rollouts=rng.choice((0, 0, 1, 2)),
        tail=rng.random() < 0.15,
        drops=drops,
    )
    if sessions if sessions is not None else are_drawn and can_serve():
        return drawn._replace(sessions=True, trains_all=trains_all, steps=int(SESSIONS_STEPS * drawn.steps))
    return drawn


def job(setup: Setup, configs: Mapping[str, Any]) -> Config:
    """What runs. However often an actor is hit, it is started again."""
    roles = [role_of(name) for name in setup.names]
    classes = {role: actor for role, actor in CLASSES.items() if role in roles}
    specs = {role: ActorSpec.model_validate({"class": "sim", "count": roles.count(role), "restarts": 100_000}) for role in classes}
    return Config(BaseRoot(actors=specs), classes, configs, {})


def configs(setup: Setup, model: Path) -> dict[str, Any]:
    """The config of each role."""
    train = TrainSection(batch_groups=setup.batch_groups, group_size=setup.group_size)
    samples = SamplesSection(ticket_ttl_s=8.0, extra_rollouts=0 if setup.tail else setup.extra_rollouts)
    alpha: dict[str, Any] = {"alpha": "auto", "alpha_max": setup.alpha} if setup.auto else {"alpha": setup.alpha}
    staleness = StalenessSection(**alpha, stragglers="drop" if setup.drops and not setup.tail else "wait")
    tail = TailBatchingSection(enabled=setup.tail, eta_prompts=1.5, eta_responses=1.5)
    where = ModelSection(path=str(model))
    reward = RewardSection(functions=("rubato.sim.simtest.toys:score",))
    scripted = ScriptedSection(token_s=0.01, stop_share=0.4, vocab_size=8)
    rollout = RolloutSection(
        max_turns=2, max_new_tokens=3, max_len=64, generate_timeout_s=20.0, reward_timeout_s=10.0, put_timeout_s=60.0, hold_s=2.0
    )  # fmt: skip
    gateway = GatewaySection(idle_s=IDLE_S, queue_s=QUEUE_S, wait_s=WAIT_S, train="all" if setup.trains_all else "main")
    manager = {
        "env": EnvSection.model_validate(
            {"class": "rubato.sim.simtest.toys:WalkEnv", "concurrency": setup.concurrency, "isolation": "inline"}
        ),
        "rollout": rollout,
        "model": where,
        "reward": reward,
    }
    return {
        "sample_buffer": SimBuffer.Config(staleness=staleness, train=train, samples=samples, tail_batching=tail),
        "llm_proxy": LLMProxy.Config(),
        "engine": EngineWorker.Config(
            model=where, engine=EngineSection(kind="scripted", num_slots=setup.num_slots, max_len=64, stream_every=2, scripted=scripted)
        ),
        "env_manager": EnvManager.Config(**manager),
        "gateway": SimGateway.Config(**manager, gateway=gateway),
        "reward_service": RewardService.Config(reward=reward),
        "trainer": SimTrainer.Config(
            model=where,
            train=train,
            staleness=staleness,
            eval=EvalSection(every=7, num_tasks=2, final_num_tasks=2, timeout_s=60.0),
            checkpoint=CheckpointSection(every=setup.checkpoint_every, keep=2),
            check=CheckSection(enabled=False),
        ),
    }
