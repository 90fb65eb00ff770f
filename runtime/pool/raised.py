"""Takes in whatever user code raises, and tells of it in few and printable characters: nothing about an exception can be relied on."""

import os
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Self

TEXT_LIMIT = 2_000
"""Characters kept of an exception's text, and of each line of its traceback."""

TRACEBACK_LIMIT = 64 * 1024
"""Characters printed of a traceback, the last ones."""


class Caught:
    """`with Caught() as caught:` keeps in `caught.error` what was raised inside, whatever its base class.

    Only SystemExit and KeyboardInterrupt pass. No task of ours runs in a worker, so a CancelledError is user code's own.
    """

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return not isinstance(error, SystemExit | KeyboardInterrupt)


def clean(text: str) -> str:
    """Its first characters, with escapes for what can't be printed or sent."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:TEXT_LIMIT])[:TEXT_LIMIT]


def text_of(error: BaseException) -> str:
    """Its repr, or its type where the repr can't be had."""
    with Caught():
        return clean(repr(error))
    return name_of(error)


def name_of(error: BaseException) -> str:
    return clean(type(error).__name__)


def place_of(error: BaseException) -> str:
    """The last frame as `file:line in function`; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return clean(f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}") if frames else ""


def print_traceback(error: BaseException) -> None:
    """To the worker's stderr, whatever user code made of `sys.stderr`; no line longer than a reader can use."""
    told = text_of(error)
    with Caught():
        lines = [
            line if len(line) <= TEXT_LIMIT else f"{line[:TEXT_LIMIT]}…\n" for line in traceback.format_exception(error)
        ]
        told = "".join(lines)[-TRACEBACK_LIMIT:]
    with suppress(OSError):  # user code closed it
        os.write(2, told.encode(errors="backslashreplace"))
