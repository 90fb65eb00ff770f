"""The one place that knows which mechanisms there are: from a key of the config, or a message, to the import path of a plug-in.

A plug-in is imported when the key is set, or the message comes, and not before.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib import import_module
from typing import Any

ROLLOUT_HOOKS: Mapping[str, str] = {"cluster.dir": "actors.envs.generating:GeneratingCount"}
"""See actors/envs/hooks.py."""

ROLLOUT_MESSAGES: Mapping[str, tuple[str, str]] = {"Survey": ("orchestrator", "actors.envs.outlook:RolloutOutlook")}
"""The section of the actor that sends the message, and the hook that answers it."""

CALL_LIMITS: Mapping[str, str] = {"deadline_factor": "actors.rewards.deadlines:AnchoredLimit"}
"""Of the section `reward`; see actors/rewards/backend.py."""


STEP_HOOKS_OF_PEERS: Mapping[str, str] = {"fabric_controller": "actors.training.intents:FabricIntents"}
"""Role → the StepHook that the trainer has once an actor of that role is there."""


def step_hooks(config: Any) -> Iterator[tuple[str, str]]:
    """Import path and key of each StepHook of the trainer, in the order in which they are called (actors/training/hooks.py)."""
    yield "actors.training.checks:LogprobCheck", "check"
    yield "actors.training.evaluation:Evaluation", "eval"
    if config.logging.loggers:
        yield "actors.loggers:Logging", "logging.loggers"
    yield "actors.training.checks:Concerns", "train"
    for target in config.train.hooks:
        yield target, "train.hooks"


def turns_of(config: Any) -> str | None:
    """Import path of the trainer's Turns; None: the default (actors/training/turns.py)."""
    return "actors.training.permit:SharedTurns" if config.cluster.dir else None


def named(paths: Mapping[str, str], config: Any) -> list[Any]:
    """Those of `paths` whose key is set in `config`."""
    return [load(path) for key, path in paths.items() if reduce(getattr, key.split("."), config)]


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
