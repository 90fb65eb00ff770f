"""Tasksets of the library verifiers, by name: what a config says of one, and the class that stands for its environments here.

Nothing of verifiers is imported: it runs in an interpreter of its own (actors/gateway/env_server.py), which plays the rollouts.
"""

import os
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rubato.actors.envs.environment import Observation, Step
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import example

EVAL_SHARE = 5
"""One task in this many is held out, where no arguments of their own say which are."""

MAKE = "rubato env make verifiers --run"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One taskset, and what plays it."""

    python: str
    """Interpreter of an environment in which verifiers and the taskset are installed."""
    taskset: dict[str, Any]
    """Its config, as verifiers has it: `id`, and keys of its own. An id that is a path/to/file.py is that file."""
    harness: dict[str, Any]
    """The same of the harness; an empty id is the taskset's own, else verifiers' chat loop without tools, `null`."""
    renderer: str = "default"
    """How verifiers makes token ids of messages: the name of one of the package renderers; `default` is the model's chat template."""
    limit: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """So many tasks of the taskset are read, from its first on."""
    split: Literal["", "train", "eval"] = ""

    def chosen(self, tasks: Sequence[bytes], seed: int) -> int:
        """Which of `tasks` is that of `seed`, among those of the split."""
        if self.split and len(tasks) >= EVAL_SHARE:
            places = [at for at in range(len(tasks)) if (at % EVAL_SHARE == EVAL_SHARE - 1) == (self.split == "eval")]
        else:
            places = range(len(tasks))
        return random.Random(seed).choice(places)


def settings_of(kwargs: Mapping[str, Any], key: str) -> Settings:
    """What `kwargs`, of the config's key, say. Raises ConfigError, one sentence, for what is wrong in them."""
    named = {name: {"id": value} if isinstance(value, str) else value for name, value in kwargs.items() if name in ("taskset", "harness")}
    try:
        settings = msgspec.convert({"harness": {}, **kwargs, **named}, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key}: {error}. It has taskset and python, and may have harness, renderer and limit.") from error
    for name in ("taskset", "harness"):
        given = getattr(settings, name).get("id", "")
        if not isinstance(given, str) or (not given and name == "taskset"):
            raise ConfigError(f"{key}.{name}: its id is no name of a {name}, nor a path/to/file.py.")
    return msgspec.structs.replace(
        settings,
        python=os.path.abspath(os.path.expanduser(settings.python)),
        taskset=_found(settings.taskset),
        harness=_found(settings.harness),
    )


def _found(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """With an absolute path where its id is one of a file."""
    given = plugin.get("id", "")
    return {**plugin, "id": os.path.abspath(os.path.expanduser(example(given)))} if given.endswith(".py") else {**plugin}


class VerifiersTaskset:
    """Stands for the environments of a taskset. `kwargs` are those of Settings. The seed says which task it is."""

    held_out: Mapping[str, Any] = {"split": "eval"}
    inline = True

    def __init__(self, **kwargs: Any) -> None:
        """Nothing is started: what plays the rollout reads the same arguments."""

    def reset(self, *, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Nothing to show."""
        return "", {}

    def step(self, action: str) -> Step:
        """Not called."""
        return "", 0.0, True, False, {}

    def close(self) -> None: ...
