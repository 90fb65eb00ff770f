"""The one place that knows which mechanisms there are: from a key of the config, or a message, to the import path of a plug-in.

A plug-in is imported when the key is set, or the message comes, and not before.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rubato.runtime.actor import Handles

if TYPE_CHECKING:
    from rubato.actors.messages.generation import Route
    from rubato.planning.engine_info import EngineInfo
    from rubato.runtime.config import Config as Job


def rollout_hooks(config: Any) -> Iterator[str]:
    """Paths of the hooks of an environment manager, see actors/envs/rollout.py."""
    if config.cluster.dir:
        yield "rubato.actors.cluster.rollmux:GeneratingCount"
    yield from _players(config)


def check_rollout_host(config: Any) -> None:
    """Raises ConfigError where what they need is not on this host."""
    check_sandbox(config.env, "env")
    for path in _players(config):
        load(f"{path.partition(':')[0]}:check_host")(config)


def _players(config: Any) -> Iterator[str]:
    if config.env.agent or any(task.agent for task in config.tasks.values()):
        yield "rubato.actors.gateway.agents:Agents"
    if config.env.target == VERIFIERS or any(task.verifiers for task in config.tasks.values()):
        yield "rubato.actors.gateway.episodes:Episodes"


ROLLOUT_MESSAGES: Mapping[str, tuple[str, str]] = {"Survey": ("orchestrator", "rubato.actors.survey.outlook:RolloutOutlook")}
"""The section of the actor that sends the message, and the hook that answers it."""

ENV_WORKERS, GUARD = "rubato.actors.envs.pooled:EnvWorkers", "rubato.runtime.pool.guard:guard_children"
ENV_COROUTINES, AGENT_SANDBOX = "rubato.actors.envs.coroutines:Coroutines", "rubato.actors.gateway.sandboxed:AgentSandbox"
"""Paths for environments in processes of their own, for a user's in the manager's, for coroutines of theirs, and for agents in sandboxes."""

TORCH_VERBS, ENGINE_VERBS = "rubato.actors.engines.torch_verbs:VERBS", frozenset({"export", "sleep", "wake", "reconfigure"})
"""What the torch engine can do for orders of an orchestrator or a cluster, and the names of these."""

REASONING, REASONING_HELD_OUT = "rubato.actors.envs.reasoning:ReasoningGymEnv", "rubato.actors.envs.reasoning:HELD_OUT"
TEXTARENA, DATA_ROWS = "rubato.actors.envs.games:TextArenaEnv", "rubato.actors.data.datasets:data_rows"
VERIFIERS = "rubato.actors.envs.verifiers:VerifiersTaskset"
HUB_ROWS, NAMED_RENDERER = "rubato.actors.hub.data_sets:folder_of", "rubato.actors.envs.named_renderer:NamedRenderer"
"""Paths for `tasks.NAME.reasoning_gym`, `textarena`, `data` and `verifiers`, for data sets by their name at a hub, and for `rollout.renderer`."""

ROLLOUT_CHECK, TASK_CHECKS, RENDERING_CHECK = (
    "rubato.actors.envs.task_checks:check_job",
    "rubato.actors.envs.task_checks:check_tasks",
    "rubato.actors.envs.task_checks:check_rendering",
)
SPLIT_ADVICE, OWN_TASKS = "rubato.actors.envs.task_checks:advice_on_split", "rubato.actors.gateway.own_tasks:OwnTasks"
"""Checks of limits, of `tasks` and of the prompts, by the launcher alone; advice on a task; and the environment of an agent without one."""

TRAINER_HOST, TRAINER_FOLDER, TRAINER_PRELOAD = (
    "rubato.actors.training.preflight:check_host",
    "rubato.actors.training.preflight:preflight",
    "rubato.actors.training.preflight:preload",
)
MODEL_CHECK = "rubato.actors.checkpoints.model_check:check_model_folder"
MIRROR_BRINGER = "rubato.actors.checkpoints.mirror_launch:bring_back"
"""Checks, by the launcher alone, of what a trainer needs of its host, model folder and process, and of a model folder."""


def sandbox_wall(section: Any) -> Any:
    """What workers of `reward` or `env` are started behind; None: nothing."""
    return None if section.sandbox == "none" else load("rubato.actors.sandbox:wall_of")(section)


def sandboxed(env: Any, tasks: Any) -> Any:
    """The section `env`, whose sandbox, if it has one, shows the rows of `tasks`."""
    return env if env.sandbox == "none" else load("rubato.actors.sandbox:showing_rows")(env, tasks)


def check_sandbox(section: Any, key: str) -> None:
    """Raises ConfigError where this host has not the sandbox that the section `key` asks for."""
    if section.sandbox != "none":
        load("rubato.actors.sandbox:check")(section, key)


REWARD_URL = "rubato.actors.rewards.invoke:HttpBackend"
"""Path for `reward.url`, and for reward functions that are URLs."""

CALL_LIMITS: Mapping[str, str] = {"deadline_factor": "rubato.actors.rewards.deadlines:AnchoredLimit"}
"""Key of the section `reward` → path; see actors/rewards/backend.py."""


STEP_HOOKS_OF_PEERS: Mapping[str, str] = {"fabric_controller": "rubato.actors.traffic.intents:FabricIntents"}
"""Role → the StepHook that the trainer has once an actor of that role is there."""
SIZES_APART = "rubato.actors.traffic.sizes:SizesApart"
"""Path of what that hook needs where weights lie on several hosts, or what changed travels alone."""


def train_engine(train: Any) -> str:
    """Import path of the TrainEngine's class; empty: the one of `train.kind` (actors/training/train_engine.py)."""
    return "rubato.actors.adapters.training:LoraTrainEngine" if train.lora is not None else ""


MIXTURE, MIXTURE_LAYER = "rubato.actors.training.experts:Mixture", "rubato.actors.engines.experts:MixtureLayer"
"""Paths for models whose layers are mixtures of experts: what trains them, and what the built-in engine computes them by."""

VARLEN = "rubato.actors.training.varlen:attend"
"""Path of what a row's attention is on a GPU in half precision."""

TRAIN_PREFLIGHTS: Mapping[str, str] = {
    "train.lora": "rubato.actors.adapters.check:preflight",
    "checkpoint.mirror": "rubato.actors.checkpoints.mirror_launch:preflight",
}
"""What looks at the model before anything is started, as `Actor.preflight` does."""


def step_hooks(config: Any) -> Iterator[tuple[str, str]]:
    """Import path and key of each StepHook of the trainer, in the order in which they are called (actors/training/hooks.py)."""
    yield "rubato.actors.adapters.check:AdapterCheck" if config.train.lora else "rubato.actors.training.checks:LogprobCheck", "check"
    yield "rubato.actors.training.evaluation:Evaluation", "eval"
    if config.logging.loggers:
        yield "rubato.actors.report.loggers:Logging", "logging.loggers"
    yield "rubato.actors.training.checks:Concerns", "train"
    if config.checkpoint.mirror:
        yield "rubato.actors.training.mirroring:Mirroring", "checkpoint.mirror"
    for target in config.train.hooks:
        yield target, "train.hooks"


def ranked_engine(config: Any) -> str:
    """Import path of the TrainEngine of a trainer whose model lies on ranks of their own, see actors/ranks/head.py; empty where it trains itself."""
    return "rubato.actors.ranks.head:RankedEngine" if config.train.mesh.size > 1 else ""


def weights_sender(config: Any) -> str:
    """What the weights leave the trainer by (actors/weights/transport.py)."""
    return "rubato.actors.ranks.head:RankedSender" if config.train.mesh.size > 1 else "rubato.actors.weights.transport:BlobSender"


def roles_of_trainer(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those that a trainer needs beside it, by the unchecked config: a section of `actors` each."""
    train = tree.get("train")
    mesh = train.get("mesh") if isinstance(train, dict) else None
    several = isinstance(mesh, dict) and any(mesh.get(key, 1) != 1 for key in ("replicate", "shard"))
    return load("rubato.actors.ranks.rank:roles_of_mesh")(tree) if several else {}


def lease_path(config: Any) -> str:
    """Import path of the actor's ComputeLease; empty: the default (actors/cluster/lease.py)."""
    return "rubato.actors.cluster.rollmux:PoolLease" if config.cluster.dir else config.cluster.lease


def named(paths: Mapping[str, str], config: Any) -> list[Any]:
    """Classes of `paths` whose key is set in `config`."""
    return [load(path) for path in chosen(paths, config)]


def chosen(paths: Mapping[str, str], config: Any) -> Iterator[str]:
    """The same, as paths."""
    return (path for key, path in paths.items() if reduce(getattr, key.split("."), config))


def load(path: str) -> Any:
    """The object of ours that `path`, module:Name, names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


HookT = TypeVar("HookT", bound=Handles)


class Hooked(Generic[HookT]):
    """Hooks of an actor, each made once: where the config names it, or when its first message or peer comes."""

    hook_messages: ClassVar[Mapping[str, str]] = {}
    """Import path of the hook, by tag of the message that it answers."""

    def begin_hooks(self, paths: Iterator[str]) -> None:
        """Make those that the config names."""
        self.hooks: list[HookT] = []
        self._by_path: dict[str, HookT] = {}
        for path in paths:
            self.hook(path)

    def plugin_for(self, tag: str) -> HookT | None:
        path = self.hook_messages.get(tag)
        return None if path is None else self.hook(path)

    def hook(self, path: str) -> Any:
        """The hook of that class, which goes along from now on."""
        found = self._by_path.get(path)
        if found is None:
            found = self._by_path[path] = self.make(path)
            self.hooks.append(found)
            self.came(found)
        return found

    def make(self, path: str) -> HookT:
        """A new one."""
        return load(path)(self)

    def came(self, hook: HookT) -> None:
        """After it is one of `hooks`."""


def batch_policies(config: Any) -> Iterator[tuple[str, str]]:
    """Import path and key of each plug-in of the sample buffer, the innermost first (actors/samples/policy.py)."""
    if config.staleness.stragglers == "drop":
        yield "rubato.actors.batching.stragglers:DropStragglers", "staleness.stragglers"
    if config.train.dynamic_sampling:
        yield "rubato.actors.batching.dynamic_sampling:DynamicSampling", "train.dynamic_sampling"
    if config.staleness.alpha == "auto":
        yield "rubato.actors.batching.adaptive_alpha:AdaptiveAlpha", "staleness.alpha"
    if config.tail_batching.enabled:
        yield "rubato.actors.batching.tail_batching:TailBatching", "tail_batching"
    for target in config.samples.policy:
        yield target, "samples.policy"


# -- proxies: see actors/proxy/picker.py -------------------------------------------------------------------------------

MOVES, SURVEYS, TURNS = (
    "rubato.actors.moves.proxy_moves:Moves",
    "rubato.actors.survey.surveys:Surveys",
    "rubato.actors.cluster.rollmux:RolloutPermit",
)

PROXY_HOOKS: Mapping[str, str] = {"cluster.dir": TURNS}

PROXY_HOST_CHECKS: Mapping[str, str] = {"cluster.dir": "rubato.actors.cluster.pools:check_pools"}

PROXY_MESSAGES: Mapping[str, str] = {"Move": MOVES, "Survey": SURVEYS}
"""By the message that the mechanism sends."""

PROXY_PEERS: Mapping[str, str] = {"fabric_controller": "rubato.actors.traffic.phases:RolloutPhases"}
"""By the role of an actor that the mechanism has."""

PICKERS: Mapping[str, str] = {"affinity": "rubato.actors.affinity.picker:AffinityPicker"}


def picker_of(config: Any) -> str | None:
    """Path of the picker for a proxy with these sections; None: the default."""
    return next(chosen(PICKERS, config), None)


def picker_for(engine: "EngineInfo") -> str | None:
    """Path of the picker that replaces the default once such an engine is there."""
    return "rubato.actors.stages.picker:StagePicker" if engine.serves != "both" else None


def proxy_hooks_of(job: "Job") -> list[str]:
    """All that a proxy of the job may come to have."""
    turns = [TURNS] if job.section("cluster").dir else []
    return turns + ([*PROXY_MESSAGES.values()] if _moves(job) else [])


def proxy_checks(job: "Job") -> list[str]:
    """Paths of checks that compare the sections of mechanisms with the job's others."""
    found = ["rubato.actors.affinity.picker:check_affinity"] if job.section("affinity") else []
    if job.section("proxy").balance != "fixed" or _stages(job):
        found.append("rubato.actors.stages.picker:check_stages")
    return found + (["rubato.actors.cluster.rollmux:check_cluster"] if job.section("cluster").dir else [])


# -- engines: see actors/engines/engine.py --------------------------------------------------------------------------------

PINS, ORDERS, ENGINE_MOVES = (
    "rubato.actors.engines.weights:Pins",
    "rubato.actors.moves.orders:Orders",
    "rubato.actors.moves.departures:EngineMoves",
)

NAMED_ADAPTERS, SERVER_WATCH = "rubato.actors.adapters.serving:NamedAdapters", "rubato.actors.engines.vllm_server:ServerWatch"
CLUSTER_ORDERS, METER = "rubato.actors.cluster.rollmux:PermittedOrders", "rubato.actors.affinity.meter:StepMeter"
ENGINE_HOOKS: Mapping[str, str] = {"cluster.dir": CLUSTER_ORDERS, "train.lora": NAMED_ADAPTERS, "engine.url": SERVER_WATCH}

ENGINE_MESSAGES: Mapping[str, str] = {
    "HoldWeights": PINS,
    "WithdrawWeights": NAMED_ADAPTERS,
    "Measure": METER,
    **dict.fromkeys(("SleepEngine", "WakeEngine", "Reconfigure"), ORDERS),
    **dict.fromkeys(("PrepareMove", "AbortMove", "TakeMove", "AwaitCaches", "FetchCache"), ENGINE_MOVES),
}
"""By the message that the mechanism sends."""


def engine_hooks_of(job: "Job") -> list[str]:
    """All that an engine of the job may come to have."""
    adapters = [NAMED_ADAPTERS] if job.section("train").lora else []
    meter = [METER] if job.has("affinity") and job.section("affinity") else []
    return [PINS, *adapters, *meter, *([ORDERS, ENGINE_MOVES] if _moves(job) else [])]


def engine_hook_of(route: "Route") -> str | None:
    """Path of the hook that a request by this route needs."""
    return ENGINE_MOVES if route.moved is not None or route.cache_at or route.hand_over else None


ENGINE_JOB, ENGINE_HOST, ENGINE_FOLDER, ENGINE_PRELOAD = (
    "rubato.actors.engines.kinds:check",
    "rubato.actors.engines.kinds:check_host",
    "rubato.actors.engines.kinds:preflight",
    "rubato.actors.engines.kinds:preload",
)
"""Checks, by the launcher alone, of what each kind of engine needs of its job, host, model folder and process."""

SERVER_URL, SERVER_KEY = "rubato.actors.engines.vllm_http:flaw_of_url", "rubato.actors.engines.vllm_http:key_in"
"""Checks of `engine.url` and `engine.api_key_env`."""

HARDWARE, MODEL_SHAPE, PACE_CHECK = ("rubato.actors.catalog:hardware", "rubato.actors.catalog:model", "rubato.actors.catalog:deployed")
"""Paths of what reads `engine.pace` and `engine.hardware`."""


def capabilities(config: Any) -> tuple[str, ...]:
    """Capabilities that an engine with these sections must have."""
    return (*(("cache",) if config.engine.serves != "both" else ()), *(("adapters",) if _adapted(config) else ()))


RELAYED, DELTAS = "rubato.actors.weights.relayed:Relayed", "rubato.runtime.blobs.patches:put_delta"
PARTED, ROUNDED = "rubato.actors.weights.parted:whole_image", "rubato.actors.weights.rounding:rounded"
"""Of weights that cross hosts, lie on several, or are stored in another type than engines compute in."""

ADAPTED_ENGINES: Mapping[str, str] = {
    "torch": "rubato.actors.adapters.torch_engine:AdaptedTorchEngine",
    "vllm": "rubato.actors.adapters.vllm_engine:AdaptedVllmEngine",
}
"""`engine.kind` → what makes it where `train.lora` is set; one of the user's own has to have the capability."""


def engine_kind(config: Any) -> tuple[str, Mapping[str, Any]]:
    """The kind or the import path of the engine's class, and what it is built with beside the sections."""
    kind = config.engine.kind
    if not _adapted(config) or kind not in ADAPTED_ENGINES:
        return kind, {}
    return ADAPTED_ENGINES[kind], {"lora": config.train.lora} if kind == "vllm" else {}


def _adapted(config: Any) -> bool:
    return config.train.lora is not None and config.engine.kind != "scripted"


def timing(engine: Any) -> Any:
    """Durations of the work of an engine of such a section, see RealTime in actors/engines/scheduler.py."""
    if engine.pace is None:
        return load("rubato.actors.engines.scheduler:RealTime")()
    return load("rubato.actors.engines.pace:EnginePace")(engine.pace)


def _stages(job: "Job") -> bool:
    """Some engines only prefill, or only decode."""
    if not job.has("engine"):
        return False
    pools = [pool for spec in job.actors.values() for pool in spec.pools.values()]
    return job.section("engine").serves != "both" or any("engine.serves" in pool.set for pool in pools)


def _moves(job: "Job") -> bool:
    """Requests may change engines, and engines sleep."""
    return _stages(job) or bool(job.section("cluster").dir) or "orchestrator" in job.actors
