"""The one place that knows which mechanisms there are: from a key of the config, or a message, to the import path of a plug-in.

A plug-in is imported when the key is set, or the message comes, and not before.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.messages.generation import Route
    from planning.engine_info import EngineInfo
    from runtime.config import Config as Job

ROLLOUT_HOOKS: Mapping[str, str] = {"cluster.dir": "actors.cluster.rollmux:GeneratingCount"}
"""See actors/envs/hooks.py."""

ROLLOUT_MESSAGES: Mapping[str, tuple[str, str]] = {"Survey": ("orchestrator", "actors.survey.manager:RolloutOutlook")}
"""The section of the actor that sends the message, and the hook that answers it."""

ENV_WORKERS, GUARD = "actors.envs.pooled:EnvWorkers", "runtime.pool.guard:guard_children"
"""Of environments that run in processes of their own; and of a user's that share the manager's."""

NAMED_RENDERER = "actors.envs.named_renderer:NamedRenderer"
"""Of `rollout.renderer`."""

REASONING, REASONING_HELD_OUT = "actors.envs.reasoning:ReasoningGymEnv", "actors.envs.reasoning:HELD_OUT"
"""Of `tasks.NAME.reasoning_gym`."""

DATA_ROWS = "actors.data.datasets:data_rows"
"""Of `tasks.NAME.data`."""

TASK_CHECKS, RENDERING_CHECK = "actors.envs.task_checks:check_tasks", "actors.envs.task_checks:check_rendering"
"""Of the launcher alone: what it looks at of `tasks`, and of the prompts."""

REWARD_URL = "actors.rewards.invoke:HttpBackend"
"""Of `reward.url`, and of reward functions that are URLs."""

CALL_LIMITS: Mapping[str, str] = {"deadline_factor": "actors.rewards.deadlines:AnchoredLimit"}
"""Of the section `reward`; see actors/rewards/backend.py."""


STEP_HOOKS_OF_PEERS: Mapping[str, str] = {"fabric_controller": "actors.training.intents:FabricIntents"}
"""Role → the StepHook that the trainer has once an actor of that role is there."""


def step_hooks(config: Any) -> Iterator[tuple[str, str]]:
    """Import path and key of each StepHook of the trainer, in the order in which they are called (actors/training/hooks.py)."""
    yield "actors.training.checks:LogprobCheck", "check"
    yield "actors.training.evaluation:Evaluation", "eval"
    if config.logging.loggers:
        yield "actors.report.loggers:Logging", "logging.loggers"
    yield "actors.training.checks:Concerns", "train"
    for target in config.train.hooks:
        yield target, "train.hooks"


def lease_path(config: Any) -> str:
    """Import path of the actor's ComputeLease; empty: the default (actors/cluster/lease.py)."""
    return "actors.cluster.rollmux:PoolLease" if config.cluster.dir else config.cluster.lease


def named(paths: Mapping[str, str], config: Any) -> list[Any]:
    """Those of `paths` whose key is set in `config`."""
    return [load(path) for path in chosen(paths, config)]


def chosen(paths: Mapping[str, str], config: Any) -> Iterator[str]:
    """The same, as paths."""
    return (path for key, path in paths.items() if reduce(getattr, key.split("."), config))


def load(path: str) -> Any:
    """The object of ours that `path`, module:Name, names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def batch_policies(config: Any) -> Iterator[tuple[str, str]]:
    """Import path and key of each plug-in of the sample buffer, the innermost first (actors/samples/policy.py)."""
    if config.train.dynamic_sampling:
        yield "actors.batching.dynamic_sampling:DynamicSampling", "train.dynamic_sampling"
    if config.staleness.alpha == "auto":
        yield "actors.batching.adaptive_alpha:AdaptiveAlpha", "staleness.alpha"
    if config.tail_batching.enabled:
        yield "actors.batching.tail_batching:TailBatching", "tail_batching"
    for target in config.samples.policy:
        yield target, "samples.policy"


# -- proxies: see actors/proxy/picker.py and actors/proxy/hooks.py ----------------------------------------------------------

MOVES, SURVEYS, TURNS = (
    "actors.moves.proxy:Moves",
    "actors.survey.proxy:Surveys",
    "actors.cluster.rollmux:RolloutPermit",
)

PROXY_HOOKS: Mapping[str, str] = {"cluster.dir": TURNS}

PROXY_HOST_CHECKS: Mapping[str, str] = {"cluster.dir": "actors.cluster.pools:check_pools"}

PROXY_MESSAGES: Mapping[str, str] = {"Move": MOVES, "Survey": SURVEYS}
"""By the message that the mechanism sends."""

PROXY_PEERS: Mapping[str, str] = {"fabric_controller": "actors.traffic.proxy:RolloutPhases"}
"""By the role of an actor that the mechanism has."""


PICKERS: Mapping[str, str] = {"affinity": "actors.affinity.picker:AffinityPicker"}


def picker_of(config: Any) -> str | None:
    """Of a proxy with these sections; None: the default."""
    return next(chosen(PICKERS, config), None)


def picker_for(engine: "EngineInfo") -> str | None:
    """What the default picker is replaced by once such an engine is there."""
    return "actors.stages.picker:StagePicker" if engine.serves != "both" else None


def proxy_hooks_of(job: "Job") -> list[str]:
    """All that a proxy of the job may come to have."""
    turns = [TURNS] if job.section("cluster").dir else []
    return turns + ([*PROXY_MESSAGES.values()] if _moves(job) else [])


def proxy_checks(job: "Job") -> list[str]:
    """What compares the sections of mechanisms with the job's others."""
    found = ["actors.affinity.picker:check_affinity"] if job.section("affinity") else []
    if job.section("proxy").balance != "fixed" or _stages(job):
        found.append("actors.stages.picker:check_stages")
    return found + (["actors.cluster.rollmux:check_cluster"] if job.section("cluster").dir else [])


# -- engines: see actors/engines/hooks.py ---------------------------------------------------------------------------------

PINS, ORDERS, ENGINE_MOVES = "actors.engines.pins:Pins", "actors.moves.orders:Orders", "actors.moves.engine:EngineMoves"

ENGINE_HOOKS: Mapping[str, str] = {"cluster.dir": "actors.cluster.rollmux:PermittedOrders"}

ENGINE_MESSAGES: Mapping[str, str] = {
    "HoldWeights": PINS,
    **dict.fromkeys(("SleepEngine", "WakeEngine", "Reconfigure"), ORDERS),
    **dict.fromkeys(("PrepareMove", "AbortMove", "TakeMove", "AwaitCaches", "FetchCache"), ENGINE_MOVES),
}
"""By the message that the mechanism sends."""


def engine_hooks_of(job: "Job") -> list[str]:
    """All that an engine of the job may come to have."""
    return [PINS, *([ORDERS, ENGINE_MOVES] if _moves(job) else [])]


def engine_hook_of(route: "Route") -> str | None:
    """What a request that came by this route needs."""
    return ENGINE_MOVES if route.moved is not None or route.cache_at or route.hand_over else None


HARDWARE, MODEL_SHAPE, PACE_CHECK = "actors.catalog:hardware", "actors.catalog:model", "actors.catalog:deployed"
"""What looks at `engine.pace` and `engine.hardware`."""


def capabilities(engine: Any) -> tuple[str, ...]:
    """What the engine of such a section has to be able to do."""
    return ("cache",) if engine.serves != "both" else ()


def timing(engine: Any) -> Any:
    """What the work of an engine of such a section is to last, see actors/engines/timing.py."""
    if engine.pace is None:
        return load("actors.engines.timing:RealTime")()
    return load("actors.engines.pace:EnginePace")(engine.pace)


def _stages(job: "Job") -> bool:
    """Some engines only prefill, or only decode."""
    if not job.has("engine"):
        return False
    pools = [pool for spec in job.actors.values() for pool in spec.pools.values()]
    return job.section("engine").serves != "both" or any("engine.serves" in pool.set for pool in pools)


def _moves(job: "Job") -> bool:
    """Requests may change engines, and engines sleep."""
    return _stages(job) or bool(job.section("cluster").dir) or "orchestrator" in job.actors
