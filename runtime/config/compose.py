"""A job's config as its user gives it: composed of the sections of all its actors, checked as a whole, and looked at on this host."""

import difflib
import importlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rubato.runtime.actor import Actor
from rubato.runtime.code_search import has_module
from rubato.runtime.config.config import Config, Pool, Roles, actor_config_of, class_of, config_class, root_model, validated
from rubato.runtime.config.overrides import given, read
from rubato.runtime.config.sections import ActorConfig, ActorSpec, BaseRoot
from rubato.runtime.config.source import ConfigSource, Keys, Tree, set_key
from rubato.runtime.errors import ConfigError, check_all
from rubato.runtime.importer import check_module

ROLE = re.compile(r"^[a-z][a-z0-9_]*$")

RESERVED_ROLES = frozenset({"node"})


def load(path: str | Path, overrides: Sequence[str] = (), *, resumed: bool = False) -> Config:
    """Read `path`, apply `key.sub=value` overrides (values are YAML), import the actors it names and check the whole.

    `resumed`: it is a run's own, which has every default resolved; those that depend on a key that changes are taken anew.
    Raises ConfigError with one sentence per mistake; nothing has been started or written then.
    """
    return compose(read(Path(path), overrides), before=read(Path(path)).tree if resumed else None)


def from_mapping(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The same from what a YAML file would hold: for a program that keeps its config beside its code."""
    return compose(given(tree, overrides))


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
    roles = validated(Roles, {"actors": tree["actors"]}, source, BaseRoot).actors
    for role in roles:
        if not ROLE.match(role) or role in RESERVED_ROLES:
            text = f"actors.{role} can't be a role: use small letters, digits and _, and not the name node."
            raise ConfigError(source.sentence(("actors", role), text))
    classes = {role: class_of(source, role, spec) for role, spec in roles.items()}
    if brought := _brought(tree, classes, before or {}):
        actors = {role: section for role, section in {**written["actors"], **brought}.items() if role not in brought or section}
        written = {**written, "actors": actors}
        return compose(source._replace(tree=written), before=before)
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


def _brought(tree: Tree, classes: Mapping[str, type[Actor]], before: Tree) -> Tree:
    """Sections of `actors` that other roles bring and `tree` lacks, or has as they were brought to the run that goes on; empty ones are not
    brought any more."""
    found: Tree = {}
    for cls in classes.values():
        then, now = cls.brings(before), cls.brings(tree)
        for role in {**then, **now}:
            known, section = tree["actors"].get(role), now.get(role, {})
            if known is None and section:
                found[role] = section
            elif known is not None and role in then and then[role] != section and _has(known, then[role]):
                found[role] = _brought_anew(known, then[role], section) if section else {}
    return found


def _has(known: object, brought: object) -> bool:
    """Whether `known` says all that `brought` does, whatever it says besides."""
    if isinstance(known, dict) and isinstance(brought, dict):
        tree = cast("Tree", known)
        return all(key in tree and _has(tree[key], value) for key, value in cast("Tree", brought).items())
    return known == brought


def _brought_anew(known: Tree, then: Tree, now: Tree) -> Tree:
    """`known` with `now` in place of `then`, which had been brought to it."""
    found = {key: value for key, value in known.items() if key not in then}
    for key, value in now.items():
        trees = (known.get(key), then.get(key), value)
        found[key] = _brought_anew(*cast("tuple[Tree, Tree, Tree]", trees)) if all(isinstance(each, dict) for each in trees) else value
    return found


def _checked(source: ConfigSource, root_class: type[BaseRoot], classes: Mapping[str, type[Actor]]) -> Config:
    """The config that the whole tree of `source` makes."""
    notes: list[str] = []
    root = validated(root_class, source.tree, source, root_class, notes)
    for role, spec in root.actors.items():
        _check_count(source, role, spec, classes[role], others=bool(root.bus.host))
    configs = {role: actor_config_of(source, root, cls) for role, cls in classes.items()}
    config = Config(root, classes, configs, source.filled, notes)
    for cls in classes.values():
        try:
            cls.check(config)
        except ValueError as error:
            raise ConfigError(source.sentence((), f"{error}.")) from error
    return config


def _in_pool(
    source: ConfigSource, root_class: type[BaseRoot], classes: Mapping[str, type[Actor]], pool: Pool, changes: Mapping[str, Any]
) -> ActorConfig:
    """The config of `pool`'s processes, checked as if the whole job had it."""
    role = pool.role
    inner = source.changed_by(changes, ("actors", role, "pools", pool.name, "set"))
    config = _checked(inner, root_class, classes)
    read = config_class(classes[role]).model_fields
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


def _check_role(source: ConfigSource, role: str, classes: Mapping[str, type[Actor]]) -> None:
    cls = classes[role]
    if cls.role and cls.role != role and not cls.provides:
        text = f"actors.{role} can't be a {cls.__name__}: others look for that under the role {cls.role}. Did you mean actors.{cls.role}?"
        raise ConfigError(source.sentence(("actors", role), text))
    there = {*classes, *(each.role for each in classes.values()), *(word for each in classes.values() for word in each.provides)}
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


def part_named(config: Config, name: str) -> Pool:
    """The pool `name`, or the role of that name, which has no pools. Raises ConfigError."""
    parts = {pool or role: Pool(role, pool) for role, spec in config.actors.items() for pool in spec.pools or ("",)}
    if name not in parts:
        near = difflib.get_close_matches(name, parts, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"These are {', '.join(parts)}."
        raise ConfigError(f"{name} is not a pool of this run, nor a role without pools. {guess}")
    return parts[name]


def pool_named(config: Config, role: str, name: str) -> str:
    """The pool of `role` that is meant by `name`; by an empty one its only pool, or none. Raises ConfigError, one sentence."""
    pools = list(config.actors[role].pools)
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


def pinned(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """`config` with what it names elsewhere as that is now, for a run in `folder`; and sentences for the user. Blocks, and may ask other
    hosts. Raises ConfigError for what can't be had.
    """
    if not config.launch.names or not has_module(config.launch.names):
        return config, []
    changes, told = importlib.import_module(config.launch.names).pin(config.tree(filled=True), folder)
    if not changes:
        return config, told
    source = given(config.tree())
    for keys, value in changes.items():
        set_key(source.tree, keys, value, ".".join(keys))
    return compose(source), told


def check_host(config: Config) -> None:
    """Let every role look whether this host has what the config names. Raises ConfigError with all that is missing; nothing was written."""
    roles = [partial(cls.check_host, own) for cls, own in _in_use(config)]
    _check_all(config, [partial(_check_modules, config), *_reporters(config), *roles])


def preflight(config: Config, folder: Path) -> None:
    """`check_host`, and let every role look at what it will need in the run folder `folder`. Raises ConfigError; nothing was started."""
    check_host(config)
    _check_all(config, [partial(cls.preflight, own, folder) for cls, own in _in_use(config)])


def keeps_copies(config: Config) -> bool:
    """Whether a run of this config can go on in another folder once its own is gone."""
    return any(cls.keeps_copies(own) for cls, own in _in_use(config))


def bring_back(config: Config, folder: Path) -> list[str]:
    """Let every role that keeps copies elsewhere bring them into `folder`; sentences for the user. Blocks, and may ask other hosts.
    Raises ConfigError.
    """
    try:
        check_host(config)
        return [config.hidden(cls.bring_back(own, folder)) for cls, own in _in_use(config) if cls.keeps_copies(own)]
    except ConfigError as error:
        raise ConfigError(config.hidden(str(error))) from None


def problems(config: Config, folder: Path, *, replaced: bool = False, pinned: bool = True, brought: bool = False) -> list[str]:
    """All that a launch in `folder` would be refused for, a sentence each.

    A model that `prepare` will make there is not missed, nor one that is brought, or whose name was not `pinned`; and a run there that
    will be `replaced` is not looked at. Nor is a folder that much is to be `brought` to.
    """
    model = Path(os.path.normpath(folder / config.model_path))
    made = config.prepare or config.brings_model or not pinned
    made_later = made and not os.path.exists(model) and model.is_relative_to(folder)
    looks = not made_later and not brought and not (replaced and os.path.exists(folder / "checkpoints"))

    def look(cls: type[Actor], own: ActorConfig) -> None:
        cls.check_host(own)
        if looks:
            cls.preflight(own, folder)

    looking = [partial(look, *each) for each in _in_use(config)]
    try:
        _check_all(config, [partial(_check_modules, config), *_reporters(config), *_listeners(config), *looking])
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _check_all(config: Config, checks: Sequence[Callable[[], None]]) -> None:
    try:
        check_all(checks)
    except ConfigError as error:
        raise ConfigError(config.hidden(str(error))) from None


def _in_use(config: Config) -> list[tuple[type[Actor], ActorConfig]]:
    return [
        (config.actor_class(role), config.actor_config(role, pool))
        for role in config.actors
        for pool in dict.fromkeys(config.members(role))
    ]


def _reporters(config: Config) -> list[Callable[[], None]]:
    """Checks of what runs within ours."""
    named = [("report.console", config.report.console), ("report.advice", config.report.advice)]
    return [partial(check_module, target, key=key) for key, target in named if target]


def _listeners(config: Config) -> list[Callable[[], None]]:
    """The check of what this host's node agent listens at."""
    if not config.host.listen:
        return []
    from rubato.runtime.launch.endpoint import check_listen  # for hosts alone that listen

    return [partial(check_listen, config.host.listen)]


def _check_modules(config: Config) -> None:
    """Those that run by themselves, as `python -m`."""
    own = [("report.finish", config.report.finish), ("report.monitor", config.report.monitor)]
    own += [("launch.names", config.launch.names), ("report.fit", config.report.fit)]
    named = [("prepare", name) for name in config.prepare] + [each for each in own if each[1]]
    if missing := [f"{key}: there is no module {name}." for key, name in named if not has_module(name)]:
        raise ConfigError("\n".join(missing))
