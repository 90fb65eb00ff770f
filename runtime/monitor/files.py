"""What a run folder tells by itself: rows of metrics.jsonl, the newest lines of a log, the resolved config."""

import json
from collections import deque
from pathlib import Path
from typing import Any, cast

from runtime.monitor.snapshot import Row

MAX_ROWS = 10_000
"""Rows kept, newest first to stay: what a sparkline can show, in a few MB."""

LOG_BYTES = 32 * 1024
"""Read from the end of a log: some hundred lines, more than a screen holds."""

BASIC = ("t", "level", "logger", "actor", "event", "incarnation")
"""Fields of a log line that are written by position or left out."""


class RowTail:
    """The rows of a metrics.jsonl that grows. A line that is still being written is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rows: deque[dict[str, float]] = deque(maxlen=MAX_ROWS)

    def read(self) -> list[Row]:
        """All rows so far, oldest first; a resumed run's repeated steps replace those they repeat."""
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._offset:
                    self._offset = 0
                    self._rows.clear()
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return list(self._rows)
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._add(_numbers(_object(line)))
        return list(self._rows)

    def _add(self, row: dict[str, float]) -> None:
        if not row:
            return
        while self._rows and "step" in row and self._rows[-1].get("step", 0) >= row["step"]:
            self._rows.pop()
        self._rows.append(row)


class ConfigFile:
    """The resolved config as plain data, parsed again only when it changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_ns = -1
        self._config: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Empty where there is none or it can't be read."""
        import yaml

        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                found: object = yaml.safe_load(self._path.read_text())
                self._config = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
                self._changed_ns = changed_ns
        except (OSError, yaml.YAMLError):
            return {}
        return self._config


def log_tail(path: Path, lines: int) -> list[str]:
    """The newest `lines` of a log, each as `HH:MM:SS event field=value …`; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            found = file.read().splitlines()
    except OSError:
        return []
    whole = found[1:] if size > LOG_BYTES else found
    told = [_told(entry) for line in whole if (entry := _object(line))]
    return told[-lines:]


def _told(entry: dict[str, Any]) -> str:
    level = str(entry.get("level", "info"))
    mark = "" if level in ("info", "debug") else f"{level}: "
    fields = " ".join(f"{key}={value}" for key, value in entry.items() if key not in BASIC)
    return f"{str(entry.get('t', ''))[11:19]} {mark}{entry.get('event', '')} {fields}".rstrip()


def _object(line: bytes) -> dict[str, Any]:
    try:
        found: object = json.loads(line)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {key: v for key, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}
