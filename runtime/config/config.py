"""A job's config as its processes have it: the sections that its actor classes declare, in one tree."""

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from rubato.runtime.actor import Actor
from rubato.runtime.config.sections import ActorConfig, ActorSpec, BaseRoot, Section
from rubato.runtime.config.source import ConfigSource, Filled, Keys, hidden, hides_of, read_file, unfilled
from rubato.runtime.config.yaml_core import dump_yaml
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import absolute, load_class


class Pool(NamedTuple):
    """One pool of one role."""

    role: str
    name: str


class Config:
    """A resolved configuration: checked as a whole, with every actor class imported."""

    def __init__(
        self,
        root: BaseRoot,
        classes: Mapping[str, type[Actor]],
        configs: Mapping[str, ActorConfig],
        filled: Mapping[str, Filled],
        notes: Collection[str] = (),
    ) -> None:
        self.run = root.run
        self.bus = root.bus
        self.state = root.state
        self.host = root.host
        self.launch = root.launch
        self.prepare = root.prepare
        self.actors: Mapping[str, ActorSpec] = root.actors
        self.report = root.report
        self.notes = tuple(dict.fromkeys(notes))
        """Sentences for the user on keys that have another name today."""
        self._root = root
        self._classes = classes
        self._configs = configs
        self._filled = filled
        self._hides = hides_of(filled.values())
        self.pooled: Mapping[Pool, ActorConfig] = {}
        """The config of each pool's processes."""

    def hidden(self, text: str) -> str:
        """`text` without the values that environment variables gave to this config: for all that is written or shown."""
        return hidden(text, self._hides)

    def has(self, name: str) -> bool:
        """Whether an actor of this job declares the section `name`."""
        return name in type(self._root).model_fields

    def section(self, name: str) -> Any:
        """The section called `name`, as the class its actors declare. Raises KeyError where no actor declares it."""
        if not self.has(name):
            raise KeyError(name)
        return getattr(self._root, name)

    def actor_class(self, role: str) -> type[Actor]:
        """The class behind `role`; KeyError for a role that the config does not have."""
        return self._classes[role]

    def actor_config(self, role: str, pool: str = "") -> Any:
        """The `Config` of `role`'s class, holding the sections it asked for, as processes of `pool` have them."""
        return self.pooled[Pool(role, pool)] if pool else self._configs[role]

    def members(self, role: str) -> tuple[str, ...]:
        """The pool of each process of `role` that is started at launch; empty names where it has no pools."""
        return self.actors[role].members if self._classes[role].starts(self._configs[role]) else ()

    def hardware_of(self, role: str, pool: str) -> str:
        """The class of the hardware of `pool`; empty where it names none, or `role` has no pool."""
        return self.actors[role].pools[pool].hardware if pool else ""

    @property
    def model_path(self) -> str:
        """Where the job's base model lies, relative to the run folder; empty where no actor declares one."""
        return str(getattr(getattr(self._root, "model", None), "path", ""))

    @property
    def brought_by(self) -> tuple[str, ...]:
        """The module that brings what the config names elsewhere, where it does."""
        return (self.launch.names,) if self._brought else ()

    @property
    def brings_model(self) -> bool:
        """Whether the model is among what that module brings."""
        return ("model", "path") in self._brought

    @property
    def _brought(self) -> Collection[Keys]:
        module = self.launch.names
        return importlib.import_module(module).found(self.tree(filled=True)) if module else ()

    def tree(self, *, filled: bool = False) -> dict[str, Any]:
        """Everything resolved, defaults included, as plain data; files of code by their whole path.

        What the environment gave stands as it was written, unless `filled`.
        """
        whole = absolute(_plain(self._root.model_dump(by_alias=True)))
        return whole if filled else unfilled(whole, self._filled)

    def dump(self, *, shared: bool = False) -> str:
        """Everything resolved, defaults included, as YAML that `load` reads again; `shared` leaves out what concerns one host."""
        tree = self.tree()
        if shared:
            tree["bus"] = {"ports": tree["bus"]["ports"]}
            tree["state"]["url"] = ""
            tree["host"] = tree["launch"] = {}
        return dump_yaml(tree)


def load_without_types(path: str | Path) -> Config:
    """The runtime's own sections of a run's config and none of its roles; nothing of the user's is imported, however broken it is."""
    source = read_file(Path(path))
    own = {name: source.tree[name] for name in ("run", "bus", "state") if source.tree.get(name) is not None}
    source = source._replace(tree=own).filled_in()
    return Config(BaseRoot(**source.tree, actors={}), {}, {}, source.filled)


def load_role(path: str | Path, role: str) -> Config:
    """For a process of one `role`: a run's own config, which was checked as a whole, with the class and the sections of that role alone."""
    source = read_file(Path(path)).filled_in()
    spec = validated(Roles, {"actors": source.tree["actors"]}, source, BaseRoot).actors[role]
    classes = {role: class_of(source, role, spec)}
    root_class = root_model(classes)
    source = source._replace(tree={key: value for key, value in source.tree.items() if key in root_class.model_fields})

    def part(source: ConfigSource) -> tuple[BaseRoot, ActorConfig]:
        root = validated(root_class, source.tree, source, root_class)
        return root, actor_config_of(source, root, classes[role])

    root, own = part(source)
    config = Config(root, classes, {role: own}, source.filled)
    config.pooled = {
        Pool(role, name): part(source.changed_by(pool.set, ("actors", role, "pools", name, "set")))[1] for name, pool in spec.pools.items()
    }
    return config


class Roles(BaseModel):
    """The one section that must be read before the others are known."""

    actors: dict[str, ActorSpec]


def root_model(classes: Mapping[str, type[Actor]]) -> type[BaseRoot]:
    """The model of a whole config: the runtime's sections, then those of `classes` by field name.

    Raises ConfigError when two classes declare one section differently, or one takes a name of the runtime's.
    """
    found: dict[str, tuple[str, FieldInfo]] = {}
    for role, cls in classes.items():
        for name, field in config_class(cls).model_fields.items():
            if name in BaseRoot.model_fields:
                if field.annotation is not BaseRoot.model_fields[name].annotation:
                    raise ConfigError(f"{_named(config_class(cls))} can't declare a section {name}: it is the runtime's own.")
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


def class_of(source: ConfigSource, role: str, spec: ActorSpec) -> type[Actor]:
    keys = ("actors", role, "class")
    try:
        return load_class(spec.target, Actor, key=".".join(keys))
    except ConfigError as error:
        raise ConfigError(source.sentence(keys, str(error))) from error


def actor_config_of(source: ConfigSource, root: BaseRoot, cls: type[Actor]) -> ActorConfig:
    declared = config_class(cls)
    sections = {name: getattr(root, name) for name in declared.model_fields}
    return cast("ActorConfig", validated(declared, sections, source, type(root)))


def config_class(cls: type[Actor]) -> type[ActorConfig]:
    return cls.Config or ActorConfig


def validated(model: type[Any], tree: Mapping[str, Any], source: ConfigSource, root: type[Section], notes: list[str] | None = None) -> Any:
    """The model that `tree` makes; `notes` gets what a section has to say. Raises ConfigError."""
    try:
        return model.model_validate(tree, context=notes)
    except ValidationError as error:
        from rubato.runtime.config.explain import sentences  # of no use where nothing is wrong

        raise ConfigError("\n".join(sentences(error, source, root))) from error


def _plain(value: Any) -> Any:
    """As YAML has it: lists for tuples and sets, text for paths; keys keep their type."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in cast("list[Any]", value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _named(annotation: object) -> str:
    return f"{getattr(annotation, '__module__', '')}.{getattr(annotation, '__qualname__', annotation)}"
