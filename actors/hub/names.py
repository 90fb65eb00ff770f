"""Models and data sets that a config calls by their name at a hub, such as Qwen/Qwen3-8B: found once before a launch, and brought before
actors start.

`python -m rubato.actors.hub.names RUN_DIR` links models that the run's config names into the run folder, at the very path that the name is:
who reads `model.path` below the run folder finds a model folder there. What was fetched stays in the hub's own cache, which all runs share,
and so do the rows of data sets, which are read there.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rubato.actors.config import HubName, name_of
from rubato.actors.data.tasks import DataSection, HubRows
from rubato.actors.hub import data_sets, repository
from rubato.actors.hub.repository import Kind
from rubato.runtime.config.overrides import read
from rubato.runtime.config.source import Keys
from rubato.runtime.errors import ConfigError

KEYS: Mapping[Keys, Kind] = {("model", "path"): "model", ("train", "reference"): "model", ("train", "lora", "start"): "adapter"}
"""What may be such a name, and what it is then. A relative path in these starts at the run folder. Data sets of `tasks` may be
names too."""


def found(tree: Mapping[str, Any]) -> dict[Keys, HubName]:
    """The names in a config that `pin` went through."""
    names = [*_names(tree), *((keys, rows[0].name) for keys, rows in _rows(tree))]
    return {keys: name for keys, name in names if name.is_pinned}


def pin(tree: Mapping[str, Any], folder: Path) -> tuple[dict[Keys, str], list[str]]:
    """Each name in the config `tree`, of a run in `folder`, at the commit that it stands for now; and sentences for the user.

    What lies in the run folder already is no name. Blocks, and asks the hub. Raises ConfigError, one sentence per name that can't be had.
    """
    pinned: dict[Keys, str] = {}
    said: list[str] = []
    wrong: list[str] = []
    for keys, name in _names(tree):
        if os.path.exists(folder / str(name)):
            continue
        key = ".".join(keys)
        try:
            if os.path.isdir(str(name)):
                raise ConfigError(
                    f"{key}={name}: a relative path starts at the run folder, and {folder / str(name)} does not exist. For the folder here "
                    f"write {key}={os.path.abspath(str(name))}"
                )
            commit, told = repository.look(name, KEYS[keys], f"{key}={name}")
        except ConfigError as error:
            wrong.append(str(error))
            continue
        said += [told] if told else []
        pinned[keys] = str(name._replace(revision=commit))
    for keys, rows in _rows(tree):
        name = rows[0].name
        try:
            commit, told = data_sets.look(rows, f"{'.'.join(keys)}={name}")
        except ConfigError as error:
            wrong.append(str(error))
            continue
        said += [told] if told else []
        pinned[keys] = str(name._replace(revision=commit))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return pinned, said


def _names(tree: Mapping[str, Any]) -> Iterator[tuple[Keys, HubName]]:
    for keys in KEYS:
        value: Any = tree
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and (name := name_of(value)):
            yield keys, name


def _rows(tree: Mapping[str, Any]) -> Iterator[tuple[Keys, tuple[HubRows, ...]]]:
    """What tasks take of data sets at a hub, by the key that names one."""
    tasks: Any = tree.get("tasks")
    for task, section in tasks.items() if isinstance(tasks, dict) else ():
        if section and section.get("data"):
            for key, rows in DataSection(**section["data"]).hub_rows.items():
                yield ("tasks", task, "data", key), rows


def main(argv: Sequence[str]) -> int:
    """Bring what the config of the run in `argv[0]` names. Progress goes to standard output as JSON lines."""
    folder = Path(argv[0])
    try:
        tree = read(folder / "config.yaml").filled_in().tree
        for keys, name in found(tree).items():
            link = folder / str(name)
            if keys in KEYS and not link.is_dir():
                _link(link, repository.fetch(name, KEYS[keys], f"{'.'.join(keys)}={name}", _tell))
        for keys, taken in _rows(tree):
            for rows in taken:
                data_sets.fetch(rows, f"{'.'.join(keys)}={rows.name}", _tell)
        brought = dict.fromkeys(found(tree).values())
        _tell(", ".join(f"{name.repo} at {name.revision[:12]}" for name in brought), 1.0)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - its last line is what the launcher shows
        return 1
    return 0


def _link(link: Path, target: Path) -> None:
    """In one step: a process that finds it finds all of the model."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(link)


def _tell(what: str, progress: float) -> None:
    print(json.dumps({"what": what, "progress": progress}), flush=True)  # noqa: T201 - the launcher reads it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
