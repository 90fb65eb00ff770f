"""Repositories of a hub that speaks Hugging Face's protocol, through `huggingface_hub`: its cache, its login and its HF_… variables hold.

Its library is imported here alone, and this where a config names something at the hub.
"""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import msgspec

from rubato.actors.adapters.shapes import WEIGHTS as ADAPTER_WEIGHTS
from rubato.actors.checkpoints.model_folder import ADAPTER_CONFIG, INDEX, LARGEST_BESIDE, WEIGHT_SUFFIXES, WEIGHTS, Index, weight_files
from rubato.actors.config import HubName
from rubato.runtime.errors import ConfigError

Kind = Literal["model", "adapter", "data set"]

ANSWER_S = 10.0
"""Longest wait for what the hub says of a repository."""

AT_ONCE = 4
"""Files fetched side by side."""

CARD = "README.md"

DESCRIBED_BY: Mapping[Kind, str] = {"model": "config.json", "adapter": ADAPTER_CONFIG, "data set": CARD}
"""The file that says what a repository holds."""

READ = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md", ""}
"""Of files beside weights."""


class Listing(NamedTuple):
    """A repository at one commit: its files and how many bytes each has."""

    commit: str
    files: Mapping[str, int]


def look(name: HubName, kind: Kind, given: str) -> tuple[str, str]:
    """The commit that `name` stands for now, with the file that describes it in the cache; and a sentence where the hub was not asked.

    `given` is how the config names it. Raises ConfigError, one sentence.
    """
    described = DESCRIBED_BY[kind]
    if name.is_pinned and cached(name, described, kind):
        return name.revision, ""
    try:
        listing = listed(name, kind, given)
    except Unreachable as error:
        there = cached(name, described, kind)
        if there is None:
            raise ConfigError(f"{given} is not in the cache {_cache()}, and {error}, or name a folder.") from None
        return there.name, f"{given}: {error.reason}, so commit {there.name[:12]} is taken, which the cache has"
    if described not in listing.files:
        raise ConfigError(f"{given}: {_endpoint()}/{name.repo} has no {described}, so it is no {kind} in Hugging Face's format.")
    if kind == "model" and not {WEIGHTS, INDEX} & listing.files.keys():
        raise ConfigError(f"{given}: {_endpoint()}/{name.repo} has no {WEIGHTS}, nor {INDEX}: weights in another form are not read.")
    return file_of(name, described, kind, given).parent.name, ""  # under this revision, so that the cache knows what it stood for


def described_in(name: HubName) -> Path:
    """The folder of the cache that has a model's config.json, and may lack the rest. Raises OSError where it has not."""
    there = cached(name, DESCRIBED_BY["model"], "model")
    if there is None:
        raise FileNotFoundError(str(name))
    return there


def fetch(name: HubName, kind: Kind, given: str, tell: Callable[[str, float], None]) -> Path:
    """The folder in the cache that holds all of the repository that a run reads. `name` is pinned. Raises ConfigError, one sentence."""
    described = DESCRIBED_BY[kind]
    try:
        listing = listed(name, kind, given)
    except Unreachable as error:
        there = cached(name, described, kind)
        if there is None or not _is_whole(there, kind):
            raise ConfigError(f"{given} is not in the cache {_cache()}, or not all of it, and {error}, or name a folder.") from None
        return there
    index = file_of(name, INDEX, kind, given) if kind == "model" and INDEX in listing.files and WEIGHTS not in listing.files else None
    wanted = _wanted(listing.files, index)
    bring(name, kind, wanted, given, tell)
    there = cached(name, described, kind)
    assert there is not None, "it was among the files"
    return there


def bring(name: HubName, kind: Kind, wanted: Mapping[str, int], given: str, tell: Callable[[str, float], None]) -> dict[str, Path]:
    """The files `wanted`, whose sizes it has, in the cache. Raises ConfigError, one sentence."""
    total, done, found = sum(wanted.values()), 0, dict[str, Path]()
    check_room({file: size for file, size in wanted.items() if cached(name, file, kind) is None}, given)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        largest_first = sorted(wanted, key=lambda file: -wanted[file])
        fetching = {threads.submit(file_of, name, file, kind, given): file for file in largest_first}
        with ExitStack() as undo:
            undo.callback(threads.shutdown, cancel_futures=True)
            for each in as_completed(fetching):
                file = fetching[each]
                found[file] = each.result()
                done += wanted[file]
                tell(f"{name.repo} from the hub, {done / 1e9:.1f} of {total / 1e9:.1f} GB", done / max(1, total))
            undo.pop_all()
    return found


def _wanted(files: Mapping[str, int], index: Path | None) -> dict[str, int]:
    """What makes a model folder: its weights in one form, and the files beside them."""
    weights = {WEIGHTS, ADAPTER_WEIGHTS}
    if index is not None:
        weights = set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values())
    other = {PurePosixPath(file).parts[0] for file in files if "/" in file and PurePosixPath(file).suffix in WEIGHT_SUFFIXES}

    def is_beside(file: str) -> bool:
        path = PurePosixPath(file)
        hidden = any(part.startswith(".") for part in path.parts)
        return path.suffix in READ and not hidden and path.parts[0] not in other and files[file] <= LARGEST_BESIDE

    return {file: size for file, size in files.items() if file in weights or is_beside(file)}


def _is_whole(folder: Path, kind: Kind) -> bool:
    """Whether it has the weights that it should have, and a tokenizer."""
    if kind == "adapter":
        return (folder / ADAPTER_WEIGHTS).exists()
    try:
        return bool(weight_files(folder)) and (folder / "tokenizer.json").exists()
    except ValueError:
        return False


def check_room(missing: Mapping[str, int], given: str) -> None:
    cache = Path(_cache())
    there = next(place for place in (cache, *cache.parents) if place.exists())
    free, needed = shutil.disk_usage(there).free, sum(missing.values())
    if needed > free:
        raise ConfigError(
            f"{given} takes {needed / 1e9:.1f} GB, and the cache {cache} has {free / 1e9:.1f} GB free. Set HF_HOME elsewhere."
        )


class Unreachable(ConfigError):
    """The hub gave no answer; the sentence goes on after `and`."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason = reason


def listed(name: HubName, kind: Kind, given: str) -> Listing:
    """Asked of the hub. Raises Unreachable, or ConfigError, one sentence."""
    from huggingface_hub import HfApi

    ask = HfApi().dataset_info if kind == "data set" else HfApi().model_info
    try:
        told = ask(name.repo, revision=name.revision or None, files_metadata=True, timeout=ANSWER_S)
    except Exception as error:
        raise _sentence(error, name, kind, given) from error
    return Listing(str(told.sha), {each.rfilename: each.size or 0 for each in told.siblings or ()})


def file_of(name: HubName, file: str, kind: Kind, given: str) -> Path:
    """In the cache, fetched where it is not. Raises ConfigError, one sentence."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name.repo, file, repo_type=_type(kind), revision=name.revision or None))
    except Exception as error:
        raise _sentence(error, name, kind, given) from error


def cached(name: HubName, file: str, kind: Kind) -> Path | None:
    """The folder of the cache that has `file` of it."""
    from huggingface_hub import try_to_load_from_cache

    there = try_to_load_from_cache(name.repo, file, repo_type=_type(kind), revision=name.revision or None)
    return Path(there).parents[len(PurePosixPath(file).parts) - 1] if isinstance(there, str) else None


def _type(kind: Kind) -> str:
    """As the library calls it; an adapter is a model to it."""
    return "dataset" if kind == "data set" else "model"


def page(name: HubName, kind: Kind) -> str:
    """Where a person reads of it."""
    return f"{_endpoint()}/{'datasets/' if kind == 'data set' else ''}{name.repo}"


def _sentence(error: Exception, name: HubName, kind: Kind, given: str) -> ConfigError:
    """What `error` of the library means."""
    from huggingface_hub import errors

    where = page(name, kind)
    match error:
        case ConfigError():
            return error
        case errors.GatedRepoError():
            return ConfigError(
                f"{given}: {where} is gated, and {_login()} has no access to it: ask for it on that page, then log in here with "
                "`hf auth login`, or set HF_TOKEN."
            )
        case errors.RepositoryNotFoundError():
            here = "file or folder here" if kind == "data set" else "folder in the run's"
            return ConfigError(
                f"{given}: there is no such {here}, and {_endpoint()} has no {kind} {name.repo} that {_login()} may see. Check the "
                "name; for a private one log in with `hf auth login`, or set HF_TOKEN."
            )
        case errors.RevisionNotFoundError():
            return ConfigError(f"{given}: {where} has no revision {name.revision}. Name a branch, a tag or a commit of it.")
        case errors.HFValidationError():
            return ConfigError(f"{given} is no name that a hub could have: {_first_line(error)}.")
        case errors.OfflineModeIsEnabled():
            return Unreachable("HF_HUB_OFFLINE is set", "unset it")
        case errors.LocalEntryNotFoundError():
            cause = error.__cause__ or error
            return Unreachable(f"{_endpoint()} can't be reached ({_first_line(cause)})", "try again")
        case errors.HfHubHTTPError():
            return ConfigError(f"{given}: {where} answered with an error: {_first_line(error)}.")
        case OSError() if error.errno is not None:
            return ConfigError(f"{given} could not be written to the cache {_cache()}: {error.strerror}.")
        case _:
            return Unreachable(f"{_endpoint()} can't be reached ({_first_line(error)})", "try again")


def _login() -> str:
    """Who is logged in at the hub from here, in words."""
    from huggingface_hub import HfApi, get_token

    if not get_token():
        return "a visitor without login (none is set here)"
    with suppress(Exception):
        return f"the login {HfApi().whoami()['name']}"
    return "the login set here, which the hub does not know,"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
