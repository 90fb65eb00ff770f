"""The run folder: where a run keeps what outlives its processes, how others find it, and the keys with which it admits other hosts."""

import fcntl
import json
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from rubato.bus.keys import new_keys
from rubato.runtime.config.differences import ChangedKey, differing
from rubato.runtime.config.source import parse
from rubato.runtime.errors import ConfigError, LaunchError
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.launch.card import KEYS_FILE, RunCard, RunKeys, read_card
from rubato.runtime.observe.trace import wall_s

PREFIX = "rubato-"
"""Of folders of sockets."""
ALIVE = ".sockets.lock"
"""In each of them, see _mark_alive."""
ADDRESSES = ("state.url", "checkpoint.mirror")
"""Keys whose values may hold a password, so that no change of one is written down."""
CHANGES = "changes.jsonl"
"""A line for each resumption with other values: `unix_s`, and `changed`, each with its `key`, `old` and `new`."""

MADE = (
    CHANGES, "checkpoints", "cluster.json", CODE, "config.yaml", "evals.jsonl", "hosts", "logs", "metrics.jsonl", "report.png", "run.json", "run.tmp", "samples", "samples.jsonl",
    "samples-*.jsonl.gz", "samples.lost-*.jsonl.gz", "samples.lost.jsonl", "samples.parts.json", "state", "trace", "trace.json", "trace.json.tmp", "trajectories",
)  # fmt: skip
"""Patterns of what a run writes into its folder, and all that `force` takes away: a model made there, the keys and a user's files stay."""
MARK = "rubato\n"
"""What the lock file of a folder of ours holds: a `config.yaml` or `logs` beside it are a run's, not a user's."""
REPLACED = ".replaced"
"""Where the run before waits until the launch that replaces it is sure to start."""
BROUGHT = ".brought"
"""Folder in which a run that comes back is put together."""

CARD_GROWS = 32
"""Bytes by which the figures of a run's end may be longer than those at its start."""
MAX_TEMPORARY_BYTES = 60
"""Of the folder for temporary files: the system allows some 107 bytes for a socket's path, and actors' names need the rest."""


class Words(NamedTuple):
    """What a user of the folder is told to say."""

    resume: str
    force: str
    other: str


ON_THE_COMMAND_LINE = Words("--resume", "--force", "another --run-dir")
ON_A_HOST = Words("", "", "another --run-dir")
IN_A_PROGRAM = Words("resume=True and its store=", "force=True", "another folder")


class RunFolder:
    """Owns the lock of a run folder while a launcher, or a program that embeds the job (which needs no sockets), runs in it."""

    def __init__(self, path: Path, *, embedded: bool = False, words: Words | None = None) -> None:
        """`words` are those of what it is for; without, those of a launch, or of a program."""
        self.path = path
        self._embedded = embedded
        self._words = words or (IN_A_PROGRAM if embedded else ON_THE_COMMAND_LINE)
        self._lock: IO[str] | None = None
        self._resumes = False
        self._sockets: Path | None = None
        self._alive: int | None = None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def card(self) -> Path:
        return self.path / "run.json"

    def open(self, *, resume: bool, force: bool, model: str = "", update_code: bool = False, same_sockets: bool = False) -> RunCard:
        """Take the folder for a launch. Raises LaunchError when it holds a run and neither flag allows for that.

        A run that made no step is replaced without `force`. What is replaced is only set aside until `commit`; `close` before
        that brings it back. `model` is the job's base model, which is never taken away. With `update_code` a resumed run's kept code is
        replaced too. With `same_sockets` its sockets lie where they lay before, if that place is free, for processes that had them.
        """
        try:
            card = self._open(resume=resume, force=force, model=model, update_code=update_code, same=same_sockets)
        except LaunchError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise self._unusable(error) from error
        return card

    def problems(self, *, resume: bool, force: bool, model: str) -> list[str]:
        """The sentence that `open` would refuse with, if any; nothing is made or changed."""
        try:
            self._check(resume=resume, force=force, model=model)
            if is_held(self.path):
                raise self._held()
            self._check_new(resume=resume, force=force)
            there = next(place for place in (self.path, *self.path.parents) if os.path.exists(place))
            if not (there.is_dir() and os.access(there, os.W_OK)):
                return [f"{self.path} can't be used as a run folder: {there} can't be written. Choose {self._words.other}."]
        except LaunchError as error:
            return [str(error)]
        except OSError as error:
            return [str(self._unusable(error))]
        return []

    def _held(self) -> LaunchError:
        return LaunchError(f"{self.path} is running already. Watch it with: rubato monitor {shlex.quote(str(self.path))}")

    def _unusable(self, error: OSError) -> LaunchError:
        path = str(self.path)
        shown = path if len(path) < 200 else f"{path[:80]}…"
        at = f" ({error.filename})" if error.filename and str(error.filename) != path and len(path) < 200 else ""
        return LaunchError(f"{shown} can't be used as a run folder: {error.strerror}{at}. Choose {self._words.other}.")

    def _open(self, *, resume: bool, force: bool, model: str, update_code: bool, same: bool) -> RunCard:
        temporary = tempfile.gettempdir()
        if not self._embedded and len(os.fsencode(temporary)) > MAX_TEMPORARY_BYTES:
            raise LaunchError(f"{temporary} is too long for the paths of sockets. Set TMPDIR=/tmp.")
        self._check(resume=resume, force=force, model=model)
        self._take_lock()
        self._bring_back()  # of a launch that was killed before it started
        self._check_new(resume=resume, force=force)
        self._resumes = resume
        previous = self._previous(needed=resume)
        if not resume:
            self._set_aside([entry.name for entry in self.path.iterdir() if _is_made(entry.name)], model)
            previous = None
        else:
            self._set_aside((CODE,) if update_code else (), "", copied=self.config)
        (self.path / "logs").mkdir(mode=0o700, exist_ok=True)
        if not self._embedded:
            self._sockets = _sockets(previous.sockets if same and previous else "")
            self._alive = _mark_alive(self._sockets)
            _sweep(self._sockets.parent)
        run_id = previous.id if previous else f"{self.path.name}-{secrets.token_hex(4)}"
        gate = previous.gate if previous else ""
        return RunCard(run_id, str(self._sockets or ""), "", os.getpid(), wall_s(), gate=gate)

    def _check(self, *, resume: bool, force: bool, model: str) -> None:
        """Raises LaunchError where there is nothing to resume, or the folder is not a run's."""
        ours = self._is_ours()
        if resume and not (ours and self.config.exists()):
            raise LaunchError(f"{self.path} holds no run to resume. Leave {self._words.resume} out to start one there.")
        if not ours:
            self._check_foreign(force=force, model=model)

    def _check_new(self, *, resume: bool, force: bool) -> None:
        """Raises LaunchError where there is a run, and neither `resume` nor `force` was given."""
        began = any(self._holds(name) for name in ("metrics.jsonl", "checkpoints", "samples.jsonl", "samples"))
        if began and not (resume or force):
            either = f"Add {self._words.resume} to go on, {self._words.force} to overwrite, or" if self._words.resume else "Choose"
            raise LaunchError(f"{self.path} already holds a run{self._standing()}. {either} {self._words.other}.")

    def bring(self, bring: Callable[[Path], list[str]], config: str, model: str) -> list[str]:
        """Make this the folder of a run that is to be resumed, with what `bring` brings into it; returns what that returns.

        Raises LaunchError where it holds a run, or other files.
        """
        try:
            self._check(resume=False, force=False, model=model)
            self._take_lock()
            try:
                told = self._brought(bring, config)
            finally:
                self.close()
                if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                    shutil.rmtree(self.path, ignore_errors=True)
        except OSError as error:
            raise self._unusable(error) from error
        return told

    def commit(self) -> None:
        """The launch is sure to start: what it replaces goes."""
        aside = self.path / REPLACED
        if aside.exists():
            changed = self._changed(aside) if self._resumes else []
            gone = self.path / f"{REPLACED}.gone"
            shutil.rmtree(gone, ignore_errors=True)
            aside.rename(gone)  # at once, whatever becomes of the removal
            if changed:
                line = json.dumps({"unix_s": wall_s(), "changed": [each._asdict() for each in changed]})
                with os.fdopen(os.open(self.path / CHANGES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
                    file.write(f"{line}\n")
            shutil.rmtree(gone, ignore_errors=True)

    def _changed(self, aside: Path) -> list[ChangedKey]:
        """What this launch goes on with that the one before had otherwise, but for addresses: one may hold a password."""
        places = aside / self.config.name, self.config
        try:
            old, new = (parse(path.read_text(), str(path)).tree for path in places)
        except (ConfigError, FileNotFoundError):
            return []  # the one before was killed before its config was whole
        return [each for each in differing(old, new) if each.old is not None and each.key not in ADDRESSES]

    def write(self, card: RunCard) -> None:
        """Publish the card atomically, 0600."""
        write_private(self.card, card, spare=CARD_GROWS)

    def write_end(self, card: RunCard) -> None:
        """The card of a run that is over: on a full disk over the bytes of the one before, whose room it has."""
        try:
            self.write(card)
        except OSError:
            with suppress(OSError), self.card.open("r+b", buffering=0) as file:
                text, size = msgspec.json.encode(card), self.card.stat().st_size
                if len(text) <= size:
                    file.write(text.ljust(size))

    def open_to_others(self) -> str:
        """A sentence where other users of this host may look into the folder; empty where it is its owner's alone."""
        mode = self.path.stat().st_mode & 0o777
        if not mode & 0o077:
            return ""
        return (
            f"{self.path} was there before, and other users of this host may look into it (mode {mode:o}): samples, checkpoints and logs "
            f"can be read. Close it with: chmod 700 {shlex.quote(str(self.path))}"
        )

    def close(self) -> None:
        """Release the folder; the sockets go, everything else stays, and what was to be replaced is back unless `commit` came."""
        if self._sockets is not None:
            _clear(self._sockets)
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
        if self._lock is not None:
            self._bring_back()
            self._lock.close()
            self._lock = None

    def _previous(self, *, needed: bool) -> RunCard | None:
        """The card of the launch before, whose sockets are cleared away: we hold the lock, so that launch is over."""
        try:
            previous = read_card(self.path)
        except LaunchError:
            if needed and self.card.exists():
                raise
            return None
        if Path(previous.sockets).name.startswith(PREFIX):
            _clear(Path(previous.sockets))
        return previous

    def _brought(self, bring: Callable[[Path], list[str]], config: str) -> list[str]:
        """What is brought counts once its config is there; one that was cut short then is ended here."""
        room, told = self.path / BROUGHT, list[str]()
        if not (room / self.config.name).exists():
            self._check_new(resume=False, force=False)
            shutil.rmtree(room, ignore_errors=True)
            room.mkdir(mode=0o700)
            with ExitStack() as undo:
                undo.callback(shutil.rmtree, room, ignore_errors=True)
                told = bring(room)
                draft = room / f".{self.config.name}"
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                    file.write(config)
                draft.replace(room / self.config.name)
                undo.pop_all()
        for entry in sorted(room.iterdir(), key=lambda entry: entry.name == self.config.name):
            entry.replace(self.path / entry.name)
        room.rmdir()
        return told

    def _take_lock(self) -> None:
        make_private(self.path)
        lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise self._held() from None
        lock.truncate(0)
        lock.write(MARK)
        lock.flush()
        self._lock = lock

    def _is_ours(self) -> bool:
        """Whether a run was launched here before."""
        with suppress(FileNotFoundError):
            if (self.path / ".lock").read_text(errors="replace") == MARK:
                return True
        try:
            read_card(self.path)
        except LaunchError:
            return False
        return True

    def _check_foreign(self, *, force: bool, model: str) -> None:
        """Raises LaunchError where a launch would mix its files with others, or --force was meant for something else."""
        found = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        kept = {".lock", KEYS_FILE, *Path(os.path.relpath(self.path / model, self.path)).parts[:1]}
        names = [name for name in found if _is_made(name) or (force and name not in kept)]
        if names:
            told = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise LaunchError(f"{self.path} holds {told}, but no run of ours: nothing there was touched. Choose {self._words.other}.")

    def _holds(self, name: str) -> bool:
        path = self.path / name
        return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0

    def _set_aside(self, names: Sequence[str], model: str, copied: Path | None = None) -> None:
        """Move what the run before made under `names` out of the way, so that it can come back; of `copied` a copy."""
        found = [name for name in names if os.path.lexists(self.path / name)]
        place = Path(os.path.normpath(self.path / model))
        for name in found:
            if model and place.is_relative_to(self.path / name):
                raise LaunchError(
                    f"model.path={model} lies in {self.path / name}, which belongs to the run to be replaced. "
                    f"Copy the model elsewhere, or choose {self._words.other}."
                )
        if found or copied:
            (self.path / REPLACED).mkdir()
            for name in reversed(found):
                (self.path / name).rename(self.path / REPLACED / name)
        if copied:
            shutil.copy2(copied, self.path / REPLACED)

    def _bring_back(self) -> None:
        aside = self.path / REPLACED
        if not aside.is_dir():
            return
        for entry in list(aside.iterdir()):
            _remove(self.path / entry.name)
            entry.rename(self.path / entry.name)
        aside.rmdir()

    def _standing(self) -> str:
        try:
            last = (self.path / "metrics.jsonl").read_text().splitlines()[-1]
            return f" (step {int(json.loads(last)['step'])})"
        except (OSError, IndexError, ValueError, KeyError, TypeError):
            return ""


def _is_made(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in MADE)


def _sockets(before: str) -> Path:
    """A new private folder, at `before` where a launch had one there that is gone."""
    if Path(before).name.startswith(PREFIX):
        with suppress(OSError):
            os.mkdir(before, 0o700)
            return Path(before)
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def _mark_alive(sockets: Path) -> int:
    """A file there that is locked for as long as this process lives: it has its name only then."""
    draft = sockets / f"{ALIVE}.new"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    draft.rename(sockets / ALIVE)
    return file


def _sweep(place: Path) -> None:
    """Remove the folders of sockets whose process was killed: a run that goes on clears its own away, a placed host has a run folder of its own each time."""
    for mark in place.glob(f"{PREFIX}*/{ALIVE}"):
        with suppress(OSError), mark.open("a") as file:  # of another user, of one that lives, or gone by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(mark.parent)


def is_held(folder: Path) -> bool:
    """Whether a launcher holds this folder, whatever its card says. A held lock is not touched by the asking."""
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def make_private(folder: Path) -> None:
    """Make it its owner's alone, and its parents as usual. One that was there is closed only while it is empty. Raises OSError."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        if not any(folder.iterdir()):
            with suppress(PermissionError):  # another user's, who lets us write there
                folder.chmod(0o700)


def write_private(path: Path, content: msgspec.Struct, *, spare: int = 0) -> None:
    """Write `content` as JSON, atomically and 0600, with `spare` blanks behind it."""
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(content) + b" " * spare)
    temporary.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- keys --------------------------------------------------------------------------------------------------------------


def make_keys(folder: Path, *, replace: bool = False) -> RunKeys:
    """Write fresh keys into `folder`, which is made if need be. Raises LaunchError where keys are and may not be replaced."""
    path = folder / KEYS_FILE
    if os.path.exists(path) and not replace:  # unlike Path.exists, it takes a name too long for an answer
        raise LaunchError(
            f"{path} exists: the run's hosts know these keys. Add --replace for new ones; the old token is void then, and a "
            "running job goes on with the old keys until it is resumed."
        )
    keys = RunKeys(*new_keys(), secrets.token_urlsafe(32))
    write_keys(folder, keys)
    return keys


def write_keys(folder: Path, keys: RunKeys) -> None:
    """Atomically, 0600, in a folder that is made 0700 if it is new."""
    try:
        make_private(folder)
        write_private(folder / KEYS_FILE, keys)
    except OSError as error:
        raise LaunchError(f"the keys can't be written to {folder}: {error.strerror}.") from error


def _clear(folder: Path) -> None:
    """Remove a private folder of sockets. It is renamed first, or a process that still dies would make a file in it meanwhile."""
    gone = folder.with_name(f"{folder.name}.gone")
    with suppress(OSError):
        folder.rename(gone)
    for each in (gone, folder):
        shutil.rmtree(each, ignore_errors=True)
