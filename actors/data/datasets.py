"""Data sets: rows of a JSONL or Parquet file, or of a folder that `datasets` saved or a hub brought, and in which order groups get them."""

import hashlib
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rubato.actors import plugins
from rubato.actors.config import one_of
from rubato.actors.data.tasks import EXTRA, OWN_COLUMNS, SUFFIXES, DataSection
from rubato.bus.message import well_formed
from rubato.planning.prompts import Epochs, shuffled
from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import load_configured

Row = Mapping[str, Any]

KEPT = 8
"""Files whose rows stay in memory, in each process that plays them."""

UTF_8_MARK = b"\xef\xbb\xbf"
"""Some editors begin a file with it."""

HELD_OUT_SEED = 0
"""The rows that `eval_rows` holds out are the same in every run, so that their results compare."""


class Split(NamedTuple):
    """Row numbers of a data set: `train` in its `source`, `held_out` in its `eval_source`, or in `source` where there is none."""

    train: Sequence[int]
    held_out: Sequence[int]


def split_of(data: DataSection) -> Split:
    """What is trained on, and what is held out; where nothing is, evaluations show rows that are trained on. Blocks; raises ConfigError."""
    num = len(read_rows(data.source))
    if data.eval_source:
        return Split(range(num), range(len(read_rows(data.eval_source))))
    if data.eval_rows >= num:
        raise ConfigError(f"data file {data.source} has {num} rows, and eval_rows={data.eval_rows} leaves none to train on.")
    drawn = shuffled(num, HELD_OUT_SEED, 0) if data.eval_rows else []
    held_out = drawn[: data.eval_rows]
    out = set(held_out)
    return Split([row for row in range(num) if row not in out], held_out or range(num))


class DataRows(NamedTuple):
    """What a task with a data set gives its groups."""

    epochs: Epochs
    num: int
    """Rows to train on, of which `epochs` are."""
    held_out: Sequence[int]
    digest: str
    """Of the content of its `source`; and of its `eval_source`, empty where there is none."""
    held_out_digest: str


def data_rows(data: DataSection, seed: int) -> DataRows:
    """Of a run with that seed. Blocks: reads the files; raises ConfigError, at once for a sampler that can't be used."""
    split = split_of(data)
    epochs = epochs_of(data, split.train, seed)
    epochs.row(0)
    held_out_digest = digest_of(data.eval_source) if data.eval_source else ""
    return DataRows(epochs, len(split.train), split.held_out, digest_of(data.source), held_out_digest)


def epochs_of(data: DataSection, train: Sequence[int], seed: int) -> Epochs:
    """The rows of `train` in the order in which groups get them: that of `data.sampler`, which may leave out and repeat, else shuffled.

    Drawing from it raises ConfigError where the sampler fails, or names a row that there is not. Blocks.
    """
    if not data.sampler:
        return Epochs(lambda epoch: [train[at] for at in shuffled(len(train), seed, epoch)])
    rows = read_rows(data.source)
    ask, places = load_configured(data.sampler), range(len(train))

    def order(epoch: int) -> Sequence[int]:
        try:
            asked = ask([rows[row] for row in train], epoch=epoch, seed=seed)
            found = [train[places.index(operator.index(at))] for at in asked]
        except Exception as error:
            raise ConfigError(f"sampler {data.sampler} failed in epoch {epoch}: {error!r}.") from error
        if not found:
            raise ConfigError(f"sampler {data.sampler} gave no rows for epoch {epoch}.")
        return found

    return Epochs(order)


def check_data(data: DataSection, key: str) -> None:
    """Raises ConfigError, one sentence, where rows or columns are missing or can't be read. Blocks: reads the files."""
    for path in filter(None, (data.source, data.eval_source)):
        rows = read_rows(path)
        for name in (name for name in columns_of(path) if name in OWN_COLUMNS):
            raise ConfigError(
                f"{key}: data file {path} has a column {name}, which is the name of a column that Rubato gives to graders and reward "
                f"functions itself. Rename it in the file, for instance to data_{name}; its other names are {', '.join(OWN_COLUMNS)}."
            )
        for name in ("prompt", "answer"):
            column = getattr(data, name)
            try:
                one_of(column, [*rows[0]])
            except ValueError as error:
                said = str(error)
                end = "" if said.endswith("?") else "."
                raise ConfigError(f"{key}.{name}: data file {path} has no column {column}: {said}{end}") from None
            without = rows.without(column) if isinstance(rows, _Rows) else _without(rows, column)
            if without >= 0:
                raise ConfigError(f"data file {path}: row {without + 1} has no {column}.")
    split_of(data)


def values_of(path: str, column: str) -> Iterator[Any]:
    """One column, row by row. Blocks."""
    rows = read_rows(path)
    return rows.values(column) if isinstance(rows, _Rows) else (row[column] for row in rows)


@lru_cache(KEPT)
def columns_of(path: str) -> tuple[str, ...]:
    """The names of all columns, in the order in which rows bring them. Blocks; raises as `read_rows`."""
    rows = read_rows(path)
    return rows.columns if isinstance(rows, _Rows) else tuple(dict.fromkeys(name for row in rows for name in row))


def _without(rows: Sequence[Row], column: str) -> int:
    """The first row that has nothing there; -1 where all have something."""
    return next((number for number, row in enumerate(rows) if row.get(column) is None), -1)


@lru_cache(KEPT)
def read_rows(path: str) -> Sequence[Row]:
    """All rows, at least one. Blocks; raises ConfigError, one sentence, with the line where one is malformed."""
    place = place_of(path)
    if os.path.isdir(place):  # unlike Path.is_dir, it takes a name too long for an answer
        rows = _saved(place)
    elif _is_of_a_hub(path):
        raise ConfigError(f"data set {path} is not in {place.parent}: a launch fetches it (launch.names).")
    elif not os.path.isfile(place):
        raise ConfigError(f"data file {path} does not exist. Relative paths start at the working folder.")
    elif place.suffix == ".parquet":
        rows = _table(place)
    elif place.suffix in SUFFIXES:
        try:
            rows = [*_lines(place)]
        except OSError as error:
            raise ConfigError(f"data file {path} can't be read: {error.strerror}.") from error
    else:
        raise ConfigError(f"data file {path} is none of {', '.join(SUFFIXES)}, and no folder that datasets saved.")
    if not rows:
        raise ConfigError(f"data file {path} is empty: it has no rows.")
    return rows


def place_of(path: str) -> Path:
    """Where rows lie: at `path`, or in the cache, where that is the text of a HubRows."""
    return plugins.load(plugins.HUB_ROWS)(path) if _is_of_a_hub(path) else Path(path)


def _is_of_a_hub(path: str) -> bool:
    return ":" in path and not os.path.isabs(path)


def is_awaited(path: str) -> bool:
    """Whether its rows are at a hub, and not fetched yet. Blocks."""
    return _is_of_a_hub(path) and not place_of(path).is_dir()


@lru_cache(KEPT)
def digest_of(path: str) -> str:
    """Of the content of a data file, or of all files of a folder that `datasets` saved. Blocks; raises ConfigError."""
    place = place_of(path)
    try:
        files = [place]
        if place.is_dir():
            files = [place / each["filename"] for each in json.loads((place / "state.json").read_text())["_data_files"]]
        found = hashlib.sha256()
        for file in files:
            with file.open("rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"data file {path} can't be read: {_first_line(error)}.") from error
    return found.hexdigest()[:32]


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(UTF_8_MARK) if number == 1 else line
            if not line.strip():
                continue
            try:
                row = _decoded(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                said = "not in UTF-8" if isinstance(error, UnicodeDecodeError) else f"not valid JSON: {error}"
                said = "nested too deeply" if isinstance(error, RecursionError) else said
                raise ConfigError(f"data file {path}, line {number}: {said}. Each line is a row of its own.") from error
            if not isinstance(row, dict):
                shown = line.decode().strip()[:40]
                raise ConfigError(f"data file {path}, line {number}: a row is an object with columns, not {shown}.")
            yield row


def _decoded(line: bytes) -> Any:
    """JSON; half of a surrogate pair in it, which Python's json writes, becomes U+FFFD. Raises as msgspec does."""
    try:
        return msgspec.json.decode(line)
    except msgspec.MsgspecError:
        if b"\\ud" not in line.lower():
            raise
        with suppress(ValueError, RecursionError):
            return well_formed(json.loads(line.decode(), parse_constant=_refused))
        raise


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class _Rows(Sequence[Row]):
    """Of an Arrow table, made into Python's objects one at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, at: Any) -> Any:
        return self._table.slice(at, 1).to_pylist()[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """As `columns_of`."""
        return tuple(self._table.column_names)

    def values(self, column: str) -> Iterator[Any]:
        """Of one column."""
        return (value for chunk in self._table.column(column).chunks for value in chunk.to_pylist())

    def without(self, column: str) -> int:
        """As `_without`."""
        return self._table.column(column).is_null().index(True).as_py()


def _table(path: Path) -> Sequence[Row]:
    check_extra("pyarrow", f"data file {path} is Parquet, which")
    import pyarrow
    from pyarrow import parquet

    try:
        return _Rows(parquet.read_table(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data file {path} can't be read as Parquet: {_first_line(error)}.") from error


def _saved(folder: Path) -> Sequence[Row]:
    """What `Dataset.save_to_disk` writes: Arrow streams, named in state.json. In a folder from a hub that names files of any form."""
    if (folder / "dataset_dict.json").is_file():
        try:
            splits = [str(split) for split in json.loads((folder / "dataset_dict.json").read_text())["splits"]]
            told = f"{', '.join(splits)}: name one, as {folder / splits[0]}"
        except (OSError, ValueError, TypeError, LookupError):
            told = "that its dataset_dict.json should name, which can't be read: name one of its folders"
        raise ConfigError(f"data folder {folder} holds the splits {told}.")
    if not (folder / "state.json").is_file():
        raise ConfigError(f"data folder {folder} has no state.json: it is none that datasets saved. Name a file in it.")
    try:
        files = [folder / file["filename"] for file in json.loads((folder / "state.json").read_text())["_data_files"]]
        forms = {file.suffix for file in files}
        if forms and forms <= {*SUFFIXES} - {".parquet"}:
            return [row for file in files for row in _lines(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"data folder {folder} can't be read: {_first_line(error)}.") from error
    check_extra("pyarrow", f"data folder {folder} is of Arrow files, which")
    import pyarrow

    try:
        return _Rows(pyarrow.concat_tables([_arrow(file) for file in files]))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data folder {folder} can't be read: {_first_line(error)}.") from error


def _arrow(file: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    if file.suffix == ".parquet":
        return parquet.read_table(file)
    return pyarrow.ipc.open_stream(pyarrow.memory_map(os.fspath(file))).read_all()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def check_extra(module: str, what: str, install: str = EXTRA) -> None:
    """Raises ConfigError where the package of `module` is not installed; `what` begins the sentence."""
    if find_spec(module) is None:
        raise ConfigError(f"{what} needs the package {module.replace('_', '-')}, which is not installed: {install}")
