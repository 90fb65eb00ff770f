"""Logs are events with fields: one JSON object per line and actor, secrets removed, the standard library's logging included."""

import logging
import logging.handlers
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from rubato.runtime.observe.trace import append_whole

MAX_BYTES = 64 * 1024 * 1024
"""Size at which a log file is moved to `.1` (replacing the one before): no actor fills a disk."""

SECRET_KEYS = re.compile(r"(?i)password|passwd|secret|api_?key|private_?key|authorization|credential")
SECRET_IN_URL = re.compile(r"(?i)(?<=://)[^/@\s]+(?=@)|(?<=password=)[^&\s]+|(?<=secret=)[^&\s]+")
HIDDEN = "***"

Hide = Callable[[str], str]


def logger(name: str) -> FilteringBoundLogger:
    """The logger `rubato.<name>`: it writes through the standard library's logging, so an embedding program keeps its own set-up."""
    wrapped = structlog.wrap_logger(
        logging.getLogger(f"rubato.{name}"),
        processors=[
            structlog.stdlib.filter_by_level,
            *_common(),
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        cache_logger_on_first_use=True,
    )
    return cast("FilteringBoundLogger", wrapped)


def configure(path: Path, *, actor: str, level: int = logging.INFO, hide: Hide = str) -> None:
    """Send all logging of this process to the file `path`, as actor `actor`. Only a process's entry point calls it, once.

    `hide` takes out of each text what may stand in no file.

    Warnings of the `warnings` module become log lines too. Handlers that were set before are replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(json_formatter(actor, hide))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)


class LogFile(logging.handlers.RotatingFileHandler):
    """A line that its disk refuses is dropped, and counted in a line of its own once there is room; nothing is printed of it."""

    num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            if self.shouldRollover(record):
                self.doRollover()
            if self.num_dropped:
                self._append(self.format(self._told(self.num_dropped)) + self.terminator)
                self.num_dropped = 0
            self._append(line)
        except OSError:
            self.num_dropped += 1
        except Exception:  # noqa: BLE001 - as logging does: of a line that can't be put together
            self.handleError(record)

    def _append(self, line: str) -> None:
        """Past the stream's own buffer, which would hold it back and write it later."""
        if self.stream is None:  # pyright: ignore[reportUnnecessaryComparison] - it is after a rollover that failed
            self.stream = self._open()
        append_whole(self.stream.fileno(), line.encode())

    @staticmethod
    def _told(num: int) -> logging.LogRecord:
        said = f"{num} log lines before this one were dropped: their disk refused them"
        return logging.LogRecord("rubato.log", logging.WARNING, "", 0, said, (), None)


def json_formatter(actor: str, hide: Hide = str) -> logging.Formatter:
    """Renders records of ours and of others as JSON lines with `t level logger actor event` first, then the fields."""

    def add_actor(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        head = {key: event.pop(key) for key in ("t", "level", "logger") if key in event}
        return {**head, "actor": actor, "event": event.pop("event", ""), **event}

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_common(), structlog.stdlib.PositionalArgumentsFormatter()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            partial(hide_secrets, hide=hide),
            add_actor,
            structlog.processors.JSONRenderer(ensure_ascii=False, default=str),
        ],
    )


def hide_secrets(_: WrappedLogger, __: str, event: EventDict, *, hide: Hide = str) -> EventDict:
    """Blank the values of keys that name a secret, and the user:password part of any URL; what `hide` takes out, everywhere."""
    return {key: _hidden(key, value, hide) for key, value in event.items()}


def without_passwords(tree: Any) -> Any:
    """A copy of plain data such as a config, without the passwords in the URLs in it: for what leaves this host."""
    if isinstance(tree, dict):
        return {key: without_passwords(value) for key, value in cast("dict[Any, Any]", tree).items()}
    if isinstance(tree, list):
        return [without_passwords(value) for value in cast("list[Any]", tree)]
    return SECRET_IN_URL.sub(HIDDEN, tree) if isinstance(tree, str) else tree


def _hidden(key: str, value: object, hide: Hide) -> object:
    if SECRET_KEYS.search(key):
        return HIDDEN
    if isinstance(value, str):
        value = hide(value)
        return SECRET_IN_URL.sub(HIDDEN, value) if "://" in value else value
    if isinstance(value, dict):
        return {k: _hidden(str(k), v, hide) for k, v in cast("dict[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_hidden("", item, hide) for item in cast("list[object]", value)]
    return value


def _common() -> list[Processor]:
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="t"),
    ]
