"""A job's config: the sections that its actor classes declare, composed into one tree, and a user's file checked against it."""

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from runtime.actor import Actor
from runtime.config.sections import ActorConfig, ActorSpec, BaseRoot, Section
from runtime.config.source import ConfigSource, Keys, Tree, given, read
from runtime.config.variables import Filled, hidden, hides_of, unfilled
from runtime.config.yaml_core import dump_yaml
from runtime.errors import ConfigError, check_all
from runtime.importer import absolute, check_module, has_module, load_class

ROLE = re.compile(r"^[a-z][a-z0-9_]*$")
RESERVED_ROLES = frozenset({"node"})


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
        """`text` without what the environment gave to this config: for whoever writes or shows anything."""
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

    def part(self, name: str) -> Pool:
        """The pool `name`, or the role of that name, which has no pools. Raises ConfigError."""
        parts = {pool or role: Pool(role, pool) for role, spec in self.actors.items() for pool in spec.pools or ("",)}
        if name not in parts:
            near = difflib.get_close_matches(name, parts, n=1)
            guess = f"Did you mean {near[0]}?" if near else f"These are {', '.join(parts)}."
            raise ConfigError(f"{name} is not a pool of this run, nor a role without pools. {guess}")
        return parts[name]

    def hardware_of(self, role: str, pool: str) -> str:
        """The class of the hardware of `pool`; empty where it names none, or `role` has no pool."""
        return self.actors[role].pools[pool].hardware if pool else ""

    def pool_of(self, role: str, name: str) -> str:
        """The pool of `role` that is meant by `name`; by an empty one its only pool, or none. Raises ConfigError, one sentence."""
        pools = list(self.actors[role].pools)
        if name in pools or (not name and not pools):
            return name
        if not name and len(pools) == 1:
            return pools[0]
        if not pools:
            raise ConfigError(f"{role} has no pools, so there is no {name}. Leave --pool out.")
        if not name:
            raise ConfigError(f"{role} has the pools {', '.join(pools)}. Say which with --pool.")
        near = difflib.get_close_matches(name, pools, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"Its pools are {', '.join(pools)}."
        raise ConfigError(f"{name} is not a pool of {role}. {guess}")

    @property
    def model_path(self) -> str:
        """Where the job's base model lies, relative to the run folder; empty where no actor declares one."""
        return str(getattr(getattr(self._root, "model", None), "path", ""))

    def check_host(self) -> None:
        """Let every role look whether this host has what the config names. Raises ConfigError with all that is missing; nothing was written."""
        roles = [partial(cls.check_host, config) for cls, config in self._in_use()]
        self._check_all([self._check_modules, *self._reporters(), *roles])

    def preflight(self, folder: Path) -> None:
        """`check_host`, and let every role look at what it will need in the run folder `folder`. Raises ConfigError; nothing was started."""
        self.check_host()
        self._check_all([partial(cls.preflight, config, folder) for cls, config in self._in_use()])

    def problems(self, folder: Path, *, replaced: bool = False) -> list[str]:
        """All that a launch in `folder` would be refused for, a sentence each.

        A model that `prepare` will make there is not missed, and a run there that will be `replaced` is not looked at.
        """
        model = Path(os.path.normpath(folder / self.model_path))
        made_later = self.prepare and not os.path.exists(model) and model.is_relative_to(folder)
        looks = not made_later and not (replaced and os.path.exists(folder / "checkpoints"))

        def look(cls: type[Actor], config: ActorConfig) -> None:
            cls.check_host(config)
            if looks:
                cls.preflight(config, folder)

        looking = [partial(look, *each) for each in self._in_use()]
        try:
            self._check_all([self._check_modules, *self._reporters(), *looking])
        except ConfigError as error:
            return str(error).splitlines()
        return []

    def _check_all(self, checks: Sequence[Callable[[], None]]) -> None:
        try:
            check_all(checks)
        except ConfigError as error:
            raise ConfigError(self.hidden(str(error))) from None

    def _in_use(self) -> list[tuple[type[Actor], ActorConfig]]:
        return [
            (self._classes[role], self.actor_config(role, pool))
            for role in self.actors
            for pool in dict.fromkeys(self.members(role))
        ]

    def _reporters(self) -> list[Callable[[], None]]:
        """Checks of what runs within ours."""
        named = [("report.console", self.report.console), ("report.advice", self.report.advice)]
        return [partial(check_module, target, key=key) for key, target in named if target]

    def _check_modules(self) -> None:
        """Those that run by themselves, as `python -m`."""
        own = [("report.finish", self.report.finish), ("report.monitor", self.report.monitor)]
        named = [("prepare", name) for name in self.prepare] + [each for each in own if each[1]]
        if missing := [f"{key}: there is no module {name}." for key, name in named if not has_module(name)]:
            raise ConfigError("\n".join(missing))

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


def load(path: str | Path, overrides: Sequence[str] = (), *, resumed: bool = False) -> Config:
    """Read `path`, apply `key.sub=value` overrides (values are YAML), import the actors it names and check the whole.

    `resumed`: it is a run's own, which has every default resolved; those that depend on a key that changes are taken anew.
    Raises ConfigError with one sentence per mistake; nothing has been started or written then.
    """
    return compose(read(Path(path), overrides), before=read(Path(path)).tree if resumed else None)


def load_without_types(path: str | Path) -> Config:
    """The runtime's own sections of a run's config and none of its roles; nothing of the user's is imported, however broken it is."""
    source = read(Path(path))
    own = {name: source.tree[name] for name in ("run", "bus", "state") if source.tree.get(name) is not None}
    source = source._replace(tree=own).filled_in()
    return Config(BaseRoot(**source.tree, actors={}), {}, {}, source.filled)


def load_role(path: str | Path, role: str) -> Config:
    """For a process of one `role`: a run's own config, which was checked as a whole, with the class and the sections of that role alone."""
    source = read(Path(path)).filled_in()
    spec = _validated(_Roles, {"actors": source.tree["actors"]}, source, BaseRoot).actors[role]
    classes = {role: _load(source, role, spec)}
    root_class = root_model(classes)
    source = source._replace(tree={key: value for key, value in source.tree.items() if key in root_class.model_fields})

    def part(source: ConfigSource) -> tuple[BaseRoot, ActorConfig]:
        root = _validated(root_class, source.tree, source, root_class)
        return root, _actor_config(source, root, classes[role])

    root, own = part(source)
    config = Config(root, classes, {role: own}, source.filled)
    config.pooled = {
        Pool(role, name): part(source.changed_by(pool.set, ("actors", role, "pools", name, "set")))[1]
        for name, pool in spec.pools.items()
    }
    return config


def from_mapping(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The same from what a YAML file would hold: for a program that keeps its config beside its code."""
    return compose(given(tree, overrides))


class _Roles(BaseModel):
    """The one section that must be read before the others are known."""

    actors: dict[str, ActorSpec]


def compose(source: ConfigSource, *, before: Tree | None = None) -> Config:
    """Import the actor classes that `source` names and check the whole tree. Raises ConfigError.

    `before` is the resolved tree of the run that goes on, if one does.
    """
    written = {key: value for key, value in source.tree.items() if value is not None}
    source = source._replace(tree=written).filled_in()
    tree = source.tree
    if not tree.get("actors"):
        raise ConfigError(f"{source.file} names no actors. Add a section actors with a class for each role.")
    _check_classes(source, tree["actors"])
    _check_changed_pools(source)
    roles = _validated(_Roles, {"actors": tree["actors"]}, source, BaseRoot).actors
    for role in roles:
        if not ROLE.match(role) or role in RESERVED_ROLES:
            text = f"actors.{role} can't be a role: use small letters, digits and _, and not the name node."
            raise ConfigError(source.sentence(("actors", role), text))
    classes = {role: _load(source, role, spec) for role, spec in roles.items()}
    for role in roles:
        _check_role(source, role, classes)
    root_class = root_model(classes)
    if before is not None:
        written = _following(root_class, written, before, source.overridden)
        source = source._replace(tree=written).filled_in()
    config = _checked(source, root_class, classes)
    config.pooled = {
        Pool(role, name): _in_pool(source, root_class, classes, Pool(role, name), pool.set)
        for role, spec in roles.items()
        for name, pool in spec.pools.items()
    }
    config.tree()  # refuses a variable where it can't be kept
    return config


def _checked(source: ConfigSource, root_class: type[BaseRoot], classes: Mapping[str, type[Actor]]) -> Config:
    """The config that the whole tree of `source` makes."""
    notes: list[str] = []
    root = _validated(root_class, source.tree, source, root_class, notes)
    for role, spec in root.actors.items():
        _check_count(source, role, spec, classes[role], others=bool(root.bus.host))
    configs = {role: _actor_config(source, root, cls) for role, cls in classes.items()}
    config = Config(root, classes, configs, source.filled, notes)
    for cls in classes.values():
        try:
            cls.check(config)
        except ValueError as error:
            raise ConfigError(source.sentence((), f"{error}.")) from error
    return config


def _in_pool(
    source: ConfigSource,
    root_class: type[BaseRoot],
    classes: Mapping[str, type[Actor]],
    pool: Pool,
    changes: Mapping[str, Any],
) -> ActorConfig:
    """The config of `pool`'s processes, checked as if the whole job had it."""
    role = pool.role
    inner = source.changed_by(changes, ("actors", role, "pools", pool.name, "set"))
    config = _checked(inner, root_class, classes)
    read = _config_class(classes[role]).model_fields
    for key in changes:
        if key.split(".")[0] not in read:
            text = f"{key} has no effect there: {role} reads {', '.join(read) or 'no section'}."
            raise ConfigError(inner.sentence(tuple(key.split(".")), text))
    return config.actor_config(role)


def _following(root: type[BaseRoot], tree: Tree, before: Tree, overridden: Collection[Keys]) -> Tree:
    """Without the defaults that a run resolved from keys that have changed since: they follow anew."""
    tree = dict(tree)
    for name, field in root.model_fields.items():
        follows: Mapping[str, str] = getattr(field.annotation, "follows", {})
        old, new = before.get(name), tree.get(name)
        if follows and isinstance(old, dict) and isinstance(new, dict):
            was, now = cast("Tree", old), cast("Tree", new)
            changed = {key for key, other in follows.items() if was.get(other) != now.get(other)}
            tree[name] = {k: v for k, v in now.items() if k not in changed or (name, k) in overridden}
    return tree


def root_model(classes: Mapping[str, type[Actor]]) -> type[BaseRoot]:
    """The model of a whole config: the runtime's sections, then those of `classes` by field name.

    Raises ConfigError when two classes declare one section differently, or one takes a name of the runtime's.
    """
    found: dict[str, tuple[str, FieldInfo]] = {}
    for role, cls in classes.items():
        for name, field in _config_class(cls).model_fields.items():
            if name in BaseRoot.model_fields:
                if field.annotation is not BaseRoot.model_fields[name].annotation:
                    raise ConfigError(
                        f"{_named(_config_class(cls))} can't declare a section {name}: it is the runtime's own."
                    )
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


def _check_classes(source: ConfigSource, actors: object) -> None:
    """A role without a class is most likely another one, mistyped."""
    specs = cast("dict[str, object]", actors) if isinstance(actors, dict) else {}
    known = [role for role, spec in specs.items() if isinstance(spec, dict) and "class" in spec]
    for role in specs.keys() - known:
        if near := difflib.get_close_matches(role, known, n=1):
            text = f"actors.{role} names no class. Did you mean actors.{near[0]}?"
            raise ConfigError(source.sentence(("actors", role), text))


def _check_changed_pools(source: ConfigSource) -> None:
    """A single key that is changed of a pool which the file does not have is most likely another pool's, mistyped."""
    written = {keys[:4] for keys in source.lines if len(keys) >= 4 and keys[2] == "pools"}
    for keys in source.overridden:
        pool = keys[:4]
        if len(keys) > 4 and keys[0] == "actors" and keys[2] == "pools" and pool not in written:
            beside = [known[3] for known in written if known[:3] == pool[:3]]
            if near := difflib.get_close_matches(pool[3], beside, n=1):
                text = f"{'.'.join(pool)} is not there. Did you mean {near[0]}? A new pool is given whole: {'.'.join(pool)}='{{count: 1}}'."
                raise ConfigError(source.sentence(keys, text))


def _load(source: ConfigSource, role: str, spec: ActorSpec) -> type[Actor]:
    keys = ("actors", role, "class")
    try:
        return load_class(spec.target, Actor, key=".".join(keys))
    except ConfigError as error:
        raise ConfigError(source.sentence(keys, str(error))) from error


def _check_role(source: ConfigSource, role: str, classes: Mapping[str, type[Actor]]) -> None:
    cls = classes[role]
    if cls.role and cls.role != role and not cls.provides:
        text = f"actors.{role} can't be a {cls.__name__}: others look for that under the role {cls.role}. Did you mean actors.{cls.role}?"
        raise ConfigError(source.sentence(("actors", role), text))
    there = {
        *classes,
        *(each.role for each in classes.values()),
        *(word for each in classes.values() for word in each.provides),
    }
    missing = [needed for needed in cls.needs if needed not in there]
    if missing:
        near = difflib.get_close_matches(missing[0], classes, n=1)
        advice = f"Did you mean that by actors.{near[0]}?" if near else f"Add actors.{missing[0]} with its class."
        text = f"actors has no {missing[0]}, which {role} needs. {advice}"
        raise ConfigError(source.sentence(("actors",), text))


def _check_count(source: ConfigSource, role: str, spec: ActorSpec, cls: type[Actor], *, others: bool) -> None:
    """Of what a job may have several, other hosts may bring them all, where they can come in."""
    key, count, shared = f"actors.{role}.count", spec.count, cls.most > 1
    if not (0 if others and shared else cls.least) <= count <= cls.most:
        bound = f"at least {cls.least}" if count < cls.least else f"at most {cls.most}"
        advice = f"Set {key}={max(cls.least, min(count, cls.most))}"
        told = f"{key} is {count}"
        if spec.pools:
            told, advice = f"the pools of {role} have {count} processes together", "Change the count of one of them"
        advice += ", or bus.host if other hosts are to bring them." if shared and not count else "."
        text = f"{told}; a job needs {bound} {role}. {advice}"
        raise ConfigError(source.sentence(("actors", role, "pools" if spec.pools else "count"), text))


def _actor_config(source: ConfigSource, root: BaseRoot, cls: type[Actor]) -> ActorConfig:
    declared = _config_class(cls)
    sections = {name: getattr(root, name) for name in declared.model_fields}
    return cast("ActorConfig", _validated(declared, sections, source, type(root)))


def _config_class(cls: type[Actor]) -> type[ActorConfig]:
    return cls.Config or ActorConfig


def _validated(
    model: type[Any], tree: Mapping[str, Any], source: ConfigSource, root: type[Section], notes: list[str] | None = None
) -> Any:
    """The model that `tree` makes; `notes` gets what a section has to say. Raises ConfigError."""
    try:
        return model.model_validate(tree, context=notes)
    except ValidationError as error:
        from runtime.config.explain import sentences  # of no use where nothing is wrong

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
