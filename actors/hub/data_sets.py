"""Data sets at a hub: which files of a repository are a subset's split, and the folder of the cache in which these lie.

A repository is read as the library `datasets` reads it, but without that: by `configs` of its card, else by what its files are called. Files
are Parquet or JSON lines. Such a folder looks like one that `datasets` saved: state.json names its files, which are links into the hub's cache.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

from rubato.actors.config import HubName, one_of
from rubato.actors.data.datasets import check_extra
from rubato.actors.data.tasks import SUFFIXES, HubRows
from rubato.actors.hub import repository
from rubato.actors.hub.repository import CARD, Listing, Unreachable
from rubato.runtime.errors import ConfigError

LARGEST_CARD = 2**20
"""Bytes of a card that is read."""

MOST_FILES = 10_000
"""Files of one split."""

MOST_PATTERNS, LONGEST_PATTERN = 1000, 256
"""Patterns of one split in a card, and characters of each."""

OTHER_FORMS = {
    ".csv",
    ".tsv",
    ".txt",
    ".arrow",
    ".xlsx",
    ".gz",
    ".zst",
    ".xz",
    ".bz2",
    ".zip",
    ".tar",
    ".tgz",
    ".7z",
    ".lz4",
    ".pkl",
    ".npy",
}
"""Suffixes of rows that are not read."""

CALLED = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Word in a path → the split that is meant."""

PART_OF = re.compile(r"(.+)-\d{5}-of-\d{5}")


def folder_of(rows: str) -> Path:
    """Where the rows with that text lie in the cache, or will lie."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "rubato" / rows


def look(wanted: Sequence[HubRows], given: str) -> tuple[str, str]:
    """The commit that the name in `wanted` stands for now, whose files have these splits; and a sentence where the hub was not asked.

    All of `wanted` are of one name; `given` is how the config has it. Raises ConfigError, one sentence.
    """
    name = wanted[0].name
    if name.is_pinned and all(_is_whole(folder_of(str(rows))) for rows in wanted):
        return name.revision, ""
    try:
        listing = repository.listed(name, "data set", given)
    except Unreachable as error:
        there = repository.cached(name, CARD, "data set")
        if there is None or not all(_is_whole(folder_of(str(_at(rows, there.name)))) for rows in wanted):
            raise ConfigError(f"{given} is not in the cache {folder_of('')}, and {error}, or name a file.") from None
        return there.name, f"{given}: {error.reason}, so commit {there.name[:12]} is taken, which the cache has"
    for rows in wanted:
        _files(rows, listing, given)
    return listing.commit, ""


def fetch(rows: HubRows, given: str, tell: Callable[[str, float], None]) -> None:
    """Bring a split into its folder; what is there whole stays. Raises ConfigError, one sentence, or OSError."""
    folder = folder_of(str(rows))
    if _is_whole(folder):
        return
    try:
        listing = repository.listed(rows.name, "data set", given)
        files = _files(rows, listing, given)
        brought = repository.bring(rows.name, "data set", {file: listing.files[file] for file in files}, given, tell)
    except Unreachable as error:
        raise ConfigError(f"{given} is not in the cache {folder_of('')}, or not all of it, and {error}, or name a file.") from None
    fresh, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    fresh.mkdir(parents=True)
    try:
        links = [f"{number:05d}-{PurePosixPath(file).name}" for number, file in enumerate(files)]
        for link, file in zip(links, files, strict=True):
            (fresh / link).symlink_to(brought[file])
        (fresh / "state.json").write_text(json.dumps({"_data_files": [{"filename": link} for link in links]}))
        if folder.exists():
            folder.rename(old)  # the hub's cache was emptied since
        fresh.rename(folder)
    except OSError:
        if not _is_whole(folder):  # else another run was faster
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _at(rows: HubRows, commit: str) -> HubRows:
    return rows._replace(name=rows.name._replace(revision=commit))


def _is_whole(folder: Path) -> bool:
    try:
        named = json.loads((folder / "state.json").read_bytes())["_data_files"]
        return all((folder / each["filename"]).is_file() for each in named)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _files(rows: HubRows, listing: Listing, given: str) -> list[str]:
    """The files of a split, in the order of their names. Raises ConfigError, one sentence."""
    where = repository.page(rows.name, "data set")
    splits, subset = _splits(rows, listing, given, where)
    if not splits:
        forms = Counter(PurePosixPath(file).suffix for file in listing.files if PurePosixPath(file).suffix in OTHER_FORMS)
        told = f", but of {', '.join(forms)}, which are not read" if forms else ""
        raise ConfigError(f"{given}: {where} has no Parquet or JSON lines{told}. {_advice(rows.name)}")
    try:
        files = splits[one_of(rows.split, [*splits])]
    except ValueError as error:
        said = str(error)
        raise ConfigError(f"{given}: {where} has no such split{subset}: {said}{'' if said.endswith('?') else '.'}") from None
    other = next((file for file in files if PurePosixPath(file).suffix not in SUFFIXES), None)
    if other or not files:
        what = f"has {other}, which is neither Parquet nor JSON lines" if other else "has no files of rows"
        raise ConfigError(f"{given}: split {rows.split}{subset} of {where} {what}. {_advice(rows.name)}")
    if len(files) > MOST_FILES:
        raise ConfigError(f"{given}: split {rows.split}{subset} of {where} has {len(files):,} files; at most {MOST_FILES:,} are read.")
    if any(file.endswith(".parquet") for file in files):
        check_extra("pyarrow", f"{given}: {where} is Parquet, which")
    return files


def _advice(name: HubName) -> str:
    copy = f"{name.repo}@refs/convert/parquet"
    return f"Try the Parquet copy that the hub makes, {copy}, or save it with the library datasets, and name that folder."


def _splits(rows: HubRows, listing: Listing, given: str, where: str) -> tuple[Mapping[str, list[str]], str]:
    """The files of rows of each split, with whatever a card names; and words for the subset."""
    files = sorted(file for file in listing.files if _is_data(file))
    configs = _configs(rows.name, listing, given)
    if not configs:
        below = [file for file in files if file.startswith(f"{rows.subset}/")] if rows.subset else files
        if rows.subset and not below:
            raise ConfigError(f"{given}: {where} has no subset {rows.subset}: its card names none, and it has no such folder.")
        return _called([file for file in below if file.endswith(SUFFIXES)]), f" in subset {rows.subset}" if rows.subset else ""
    names = [str(config.get("config_name", "default")) for config in configs]
    subset = rows.subset or next((name for name, config in zip(names, configs, strict=True) if config.get("default") is True), "")
    subset = subset or (names[0] if len(names) == 1 else "default" if "default" in names else "")
    if not subset:
        raise ConfigError(
            f"{given}: {where} has several subsets and no default: name one as subset of the same section. They are {_some(names)}."
        )
    try:
        config = configs[names.index(one_of(subset, names))]
    except ValueError as error:
        said = str(error)
        raise ConfigError(f"{given}: {where} has no such subset: {said}{'' if said.endswith('?') else '.'}") from None
    folder = str(config.get("data_dir") or "").strip("/")
    below = [file for file in files if not folder or file.startswith(f"{folder}/")]
    told = f" in subset {subset}"
    if (named := config.get("data_files")) is None:
        return _called([file for file in below if file.endswith(SUFFIXES)]), told
    patterns = dict(_patterns(named))
    every = [each for found in patterns.values() for each in found]
    if len(every) > MOST_PATTERNS or max(map(len, every), default=0) > LONGEST_PATTERN:
        most = f"{MOST_PATTERNS:,} patterns of files{told}, or one of over {LONGEST_PATTERN} characters"
        raise ConfigError(f"{given}: the card of {where} has more than {most}.")
    prefix = f"{folder}/" if folder else ""
    mine = {split: [prefix + each.removeprefix("./") for each in found] for split, found in patterns.items() if split == rows.split}
    matched = {split: [file for file in files if any(_matches(file, each) for each in found)] for split, found in mine.items()}
    return {split: matched.get(split, []) for split in patterns}, told


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _is_data(file: str) -> bool:
    """Whether it may hold rows, read here or not."""
    path = PurePosixPath(file)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    described = path.name in ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")
    return not hidden and not described and path.suffix in {*SUFFIXES, *OTHER_FORMS}


def _configs(name: HubName, listing: Listing, given: str) -> list[dict[str, Any]]:
    """What the card says of subsets; nothing where it says nothing."""
    if CARD not in listing.files:
        return []
    where = repository.page(name, "data set")
    if listing.files[CARD] > LARGEST_CARD:
        raise ConfigError(f"{given}: the card of {where} has {listing.files[CARD]:,} bytes; at most {LARGEST_CARD:,} are read.")
    card = repository.file_of(name, CARD, "data set", given).read_bytes()  # under this revision, so that the cache knows what it stood for
    head = re.match(rb"\s*---\r?\n(.*?)\r?\n---", card[:LARGEST_CARD], re.DOTALL)
    try:
        told = yaml.load(head[1], getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if head else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{given}: the card of {where} begins with what is no YAML: {str(error).splitlines()[0]}.") from None
    configs = cast("dict[str, Any]", told).get("configs") if isinstance(told, dict) else None
    return [cast("dict[str, Any]", each) for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []


def _patterns(named: object) -> Iterator[tuple[str, list[str]]]:
    """Split → patterns, of the forms that `data_files` of a card may have."""
    if isinstance(named, dict):
        yield from ((str(split), _texts(found)) for split, found in cast("dict[Any, Any]", named).items())
    elif isinstance(named, list) and named and all(isinstance(each, dict) for each in cast("list[Any]", named)):
        for each in cast("list[dict[str, Any]]", named):
            yield str(each.get("split", "train")), _texts(each.get("path"))
    else:
        yield "train", _texts(named)


def _texts(found: object) -> list[str]:
    return [str(each) for each in (cast("list[Any]", found) if isinstance(found, list) else [found]) if isinstance(each, str)]


def _matches(file: str, pattern: str) -> bool:
    return _match(file.split("/"), pattern.split("/"))


def _match(parts: list[str], pattern: list[str]) -> bool:
    """`**` is any number of folders, and `*` stays within one."""
    reached = {0}
    for each in pattern:
        if each == "**":
            reached = {*range(min(reached, default=len(parts) + 1), len(parts) + 1)}
        else:
            reached = {at + 1 for at in reached if at < len(parts) and fnmatchcase(parts[at], each)}
    return len(parts) in reached


def _called(files: Sequence[str]) -> Mapping[str, list[str]]:
    """The files of each split by their own names and those of their folders; all are `train` where none says another."""
    found: dict[str, list[str]] = {}
    for file in files:
        if split := _split_in(PurePosixPath(file)):
            found.setdefault(split, []).append(file)
    return found or ({"train": [*files]} if files else {})


def _split_in(path: PurePosixPath) -> str:
    if part := PART_OF.fullmatch(path.stem):
        return part[1]
    for text in (path.stem, *reversed(path.parts[:-1])):
        words = [CALLED[word] for word in re.split(r"[^a-z]+", text.lower()) if word in CALLED]
        if words and not text.startswith("partial-"):
            return words[0]
    return ""
