"""`rubato tinker CONFIG`: serve Tinker's API on the model, the engines and the hosts that a config has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rubato.actors.messages.generation import GENERATION
from rubato.actors.messages.tinker import TINKER
from rubato.runtime.actor import Actor
from rubato.runtime.config.compose import compose
from rubato.runtime.config.config import Config, Roles, class_of, root_model, validated
from rubato.runtime.config.overrides import read
from rubato.runtime.config.sections import BaseRoot
from rubato.runtime.config.source import ConfigSource
from rubato.runtime.errors import ConfigError
from rubato.runtime.launch.commands import launch

PROXY, ENGINE, TRAINER, SERVER = (
    "rubato.actors.proxy.proxy:LLMProxy",
    "rubato.actors.engines.worker:EngineWorker",
    "rubato.actors.gateway.tinker.trainer:TinkerTrainer",
    "rubato.actors.gateway.tinker.server:TinkerServer",
)

RANK = 32
"""Of the SDK's adapters, where its user names none: engines keep room for such."""

PROXY_ROLE, TRAINER_ROLE = "llm_proxy", "trainer"


def main(argv: Sequence[str]) -> int:
    """Serve until it is stopped; RubatoError is the caller's to print."""
    return launch(list(argv), name="tinker", load_by=load)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The job of a server: of the config's actors its engines and their proxies, of its sections what these, server and trainer read.

    Raises ConfigError.
    """
    source = read(Path(path), overrides)
    tree = {key: value for key, value in source.tree.items() if value is not None}
    if not isinstance(given := tree.get("actors"), dict) or not given:
        raise ConfigError(f"{source.file} names no actors. Add a section actors with a class for each role.")
    before = _classes(source, given)
    actors = tree["actors"] = dict(given) if TINKER in given else _served(given, before)
    left = sorted({*given} - {*actors}) + sorted(({*tree} & _sections(before)) - _sections(_classes(source, actors)))
    tree = {key: value for key, value in tree.items() if key not in left}
    _fill(tree)
    config = compose(source._replace(tree=tree))
    if left:
        config.notes = (*config.notes, f"left out, since a server has no use for it: {', '.join(left)}")
    return config


def _classes(source: ConfigSource, actors: Mapping[str, Any]) -> dict[str, type[Actor]]:
    roles = validated(Roles, {"actors": actors}, source._replace(tree={"actors": actors}).filled_in(), BaseRoot).actors
    return {role: class_of(source, role, spec) for role, spec in roles.items()}


def _sections(classes: Mapping[str, type[Actor]]) -> set[str]:
    return {*root_model(classes).model_fields}


def _served(given: Mapping[str, Any], classes: Mapping[str, type[Actor]]) -> dict[str, Any]:
    """Sections of the actors that a server needs. Where engines, proxies and the trainer are to run is as the config has it."""
    engines = {role: given[role] for role, cls in classes.items() if GENERATION in cls.provides} or {"engine": {"class": ENGINE}}
    trainer = {key: value for key, value in (given.get(TRAINER_ROLE) or {}).items() if key not in ("class", "count")}
    return {
        PROXY_ROLE: given.get(PROXY_ROLE, {"class": PROXY}),
        **engines,
        TRAINER_ROLE: {**trainer, "class": TRAINER},
        TINKER: {"class": SERVER},
    }


def _fill(tree: dict[str, Any]) -> None:
    """What the config leaves to a server: adapters, a model by the folder that tinker.models has, and no figures of training steps."""
    model, section, train = tree.get("model") or {}, tree.get(TINKER) or {}, tree.get("train") or {}
    if not (isinstance(model, dict) and isinstance(section, dict) and isinstance(train, dict)):
        return  # refused as the config is checked
    named = section.get("models")
    folders = [folder for folder in named.values() if folder] if isinstance(named, dict) else []
    if folders and not model.get("path"):
        tree["model"] = {**model, "path": folders[0]}
    tree["train"] = {**train, "lora": train.get("lora") or {"rank": RANK}}
    if isinstance(report := tree.get("report", {}), dict):
        tree["report"] = {"finish": "", "advice": "", "fit": "", **report}
