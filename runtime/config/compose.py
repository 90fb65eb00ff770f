"""Composes a job's root config from the sections its actor classes declare, and resolves a tree against it."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from runtime.actor import Actor, ActorConfig
from runtime.config.config import ActorSpec, BaseRoot, Config, Section
from runtime.config.errors import sentences
from runtime.config.source import ConfigSource
from runtime.errors import ConfigError
from runtime.importer import load_class

ROLE = re.compile(r"^[a-z][a-z0-9_]*$")
RESERVED_ROLES = frozenset({"node"})


class _Roles(BaseModel):
    """The one section that must be read before the others are known."""

    actors: dict[str, ActorSpec]


def compose(source: ConfigSource) -> Config:
    """Import the actor classes that `source` names and check the whole tree. Raises ConfigError."""
    tree = {key: value for key, value in source.tree.items() if value is not None}
    if not tree.get("actors"):
        raise ConfigError(f"{source.file} names no actors. Add a section actors with a class for each role.")
    roles = _validated(_Roles, {"actors": tree["actors"]}, source, BaseRoot).actors
    for role in roles:
        if not ROLE.match(role) or role in RESERVED_ROLES:
            text = f"actors.{role} can't be a role: use small letters, digits and _, and not the name node."
            raise ConfigError(source.sentence(("actors", role), text))
    classes = {role: _load(source, role, spec) for role, spec in roles.items()}
    for role, spec in roles.items():
        _check_role(source, role, classes)
        _check_count(source, role, spec.count, classes[role])
    root_class = root_model(classes)
    root = _validated(root_class, tree, source, root_class)
    configs = {role: _actor_config(source, root, cls) for role, cls in classes.items()}
    config = Config(root, classes, configs)
    for cls in classes.values():
        try:
            cls.check(config)
        except ValueError as error:
            raise ConfigError(f"{source.file}: {error}.") from error
    return config


def root_model(classes: Mapping[str, type[Actor]]) -> type[BaseRoot]:
    """The model of a whole config: the runtime's sections, then those of `classes` by field name.

    Raises ConfigError when two classes declare one section differently, or one takes a name of the runtime's.
    """
    found: dict[str, tuple[str, FieldInfo]] = {}
    for role, cls in classes.items():
        for name, field in cls.Config.model_fields.items():
            if name in BaseRoot.model_fields:
                if field.annotation is not BaseRoot.model_fields[name].annotation:
                    raise ConfigError(f"{_named(cls.Config)} can't declare a section {name}: it is the runtime's own.")
                continue
            if name in found and found[name][1].annotation is not field.annotation:
                other_role, other = found[name]
                raise ConfigError(
                    f"{other_role} and {role} declare the section {name} as two classes, {_named(other.annotation)} and "
                    f"{_named(field.annotation)}. They must share one."
                )
            if name not in found or field.is_required():
                found[name] = (role, field)
    fields: dict[str, Any] = {name: (field.annotation, field) for name, (_, field) in found.items()}
    return create_model("Root", __base__=BaseRoot, **fields)


def _load(source: ConfigSource, role: str, spec: ActorSpec) -> type[Actor]:
    keys = ("actors", role, "class")
    try:
        return load_class(spec.target, Actor, key=".".join(keys))
    except ConfigError as error:
        raise ConfigError(source.sentence(keys, str(error))) from error


def _check_role(source: ConfigSource, role: str, classes: Mapping[str, type[Actor]]) -> None:
    cls = classes[role]
    if cls.role and cls.role != role:
        text = f"actors.{role} can't be a {cls.__name__}: others look for that under the role {cls.role}. Did you mean actors.{cls.role}?"
        raise ConfigError(source.sentence(("actors", role), text))
    missing = [needed for needed in cls.needs if needed not in classes]
    if missing:
        near = difflib.get_close_matches(missing[0], classes, n=1)
        advice = f"Did you mean that by actors.{near[0]}?" if near else f"Add actors.{missing[0]} with its class."
        text = f"actors has no {missing[0]}, which {role} needs. {advice}"
        raise ConfigError(source.sentence(("actors",), text))


def _check_count(source: ConfigSource, role: str, count: int, cls: type[Actor]) -> None:
    key = f"actors.{role}.count"
    if not cls.least <= count <= cls.most:
        bound = f"at least {cls.least}" if count < cls.least else f"at most {cls.most}"
        text = f"{key} is {count}; a job needs {bound} {role}. Set {key}={max(cls.least, min(count, cls.most))}."
        raise ConfigError(source.sentence(("actors", role, "count"), text))


def _actor_config(source: ConfigSource, root: BaseRoot, cls: type[Actor]) -> ActorConfig:
    sections = {name: getattr(root, name) for name in cls.Config.model_fields}
    return cast("ActorConfig", _validated(cls.Config, sections, source, type(root)))


def _validated(model: type[Any], tree: Mapping[str, Any], source: ConfigSource, root: type[Section]) -> Any:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(sentences(error, source, root))) from error


def _named(annotation: object) -> str:
    return f"{getattr(annotation, '__module__', '')}.{getattr(annotation, '__qualname__', annotation)}"
