"""Rubato: an asynchronous runtime of actors and messages for RL post-training of language-model agents.

What a program of yours takes from here is in `__all__`, and with the members of each name in docs/api.txt: these are stable, and a release
that changes one says so in CHANGELOG.md. All else, a module of `rubato.actors` as well as a line of `rubato.runtime`, is open to read and
may change without notice; the keys of configs and metrics are stable too (docs/config.md, docs/metrics.md).

A name loads its module when it is first used: `import rubato` loads none, and no torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rubato.actors.envs.environment import Environment
    from rubato.bus.errors import AskFailed
    from rubato.bus.message import Ack, Array, Buffer, Message, Request
    from rubato.runtime.actor import Actor, RunInfo, handler, ref
    from rubato.runtime.config import ActorConfig, Config
    from rubato.runtime.config.compose import from_mapping, load
    from rubato.runtime.courier import Ref
    from rubato.runtime.embed import EmbeddedJob, embed
    from rubato.runtime.errors import ConfigError, LaunchError, RubatoError
    from rubato.runtime.guest import Guest, join
    from rubato.runtime.kernel import Kernel

__all__ = [
    "Ack",
    "Actor",
    "ActorConfig",
    "Array",
    "AskFailed",
    "Buffer",
    "Config",
    "ConfigError",
    "EmbeddedJob",
    "Environment",
    "Guest",
    "Kernel",
    "LaunchError",
    "Message",
    "Ref",
    "Request",
    "RubatoError",
    "RunInfo",
    "embed",
    "from_mapping",
    "handler",
    "join",
    "launch",
    "load",
    "ref",
]

_WHERE = {
    "actors.envs.environment": "Environment",
    "bus.errors": "AskFailed",
    "bus.message": "Ack Array Buffer Message Request",
    "runtime.actor": "Actor RunInfo handler ref",
    "runtime.config": "ActorConfig Config",
    "runtime.config.compose": "from_mapping load",
    "runtime.courier": "Ref",
    "runtime.embed": "EmbeddedJob embed",
    "runtime.errors": "ConfigError LaunchError RubatoError",
    "runtime.guest": "Guest join",
    "runtime.kernel": "Kernel",
}
"""Module → its names."""

_BUS = os.path.join(__path__[0], "bus")
if os.path.islink(_BUS) or not os.path.isdir(_BUS):
    # A checkout: the packages stand at its top, and the links here are for tools that read without running (small files, where git makes
    # no links). An installed package has them in this folder.
    __path__.insert(0, os.path.dirname(__path__[0]))


def launch(config: "str | os.PathLike[str]", *changes: str, run_dir: "str | os.PathLike[str] | None" = None) -> int:
    """Run a job as `rubato launch CONFIG key=value…` does, in processes of its own; returns its exit code once it has ended.

    Raises RubatoError, whose text is a sentence for the user, where the job is refused. For a job inside this process: `embed`.
    """
    from rubato.runtime.launch import commands

    folder = [] if run_dir is None else ["--run-dir", os.fspath(run_dir)]
    return commands.launch([os.fspath(config), *changes, *folder])


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names.split():
            return getattr(importlib.import_module(f"rubato.{module}"), name)
    raise AttributeError(f"module 'rubato' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
