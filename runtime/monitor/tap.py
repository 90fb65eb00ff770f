"""`rubato tap RUN NAME`: the frames of a running actor, live, a line for each envelope.

Frames are read without their types, so a tap shows what travelled, also of messages that this host does not know.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from rubato.bus.codec import Envelope, EnvelopeKind, decode_frame
from rubato.bus.errors import AskFailed
from rubato.runtime.errors import LaunchError
from rubato.runtime.guest import join
from rubato.runtime.messages import NotTapped, Tap, Tapped
from rubato.runtime.registry import list_actors

WAIT_S = 0.3
ANSWER_S = 10.0

_KINDS = {int(kind): kind.name for kind in EnvelopeKind}

SHOWN_CHARACTERS = 160
"""Of a body, unless the whole is asked for."""


def main(argv: Sequence[str]) -> int:
    """Print until Ctrl-C, or for `--seconds`. Exit 1 when the actor ends meanwhile."""
    parser = argparse.ArgumentParser("rubato tap", description="Print the messages of a running actor as they travel.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("name", metavar="NAME", help="an actor of it, such as engine-1")
    parser.add_argument("--only", action="append", default=[], metavar="MESSAGE", help="messages of this class; repeat")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="end after so long")
    parser.add_argument("--full", action="store_true", help="whole bodies")
    given = parser.parse_args(list(argv))
    return asyncio.run(_tap(given.run, given.name, given))


async def _tap(folder: Path, name: str, given: argparse.Namespace) -> int:
    async with join(folder, types=False) as guest:
        names = sorted(record.name for record in await list_actors(guest.store) if record.name != guest.name)
        if name not in names:
            raise LaunchError(f"{name} does not run in {folder}. Running: {', '.join(names)}.")
        loop = asyncio.get_running_loop()
        end = loop.time() + given.seconds
        while loop.time() < end:
            try:
                said = await guest.ref(name).ask(Tap(min(WAIT_S, end - loop.time())), timeout=ANSWER_S, retry=False)
            except AskFailed as error:
                raise LaunchError(f"{name} can't be tapped any more: {error}.") from error
            if isinstance(said, NotTapped):
                raise LaunchError(f"{name} is not tapped: {said.why}.")
            for line in _lines(said, frozenset(given.only), given.full):
                print(line, flush=True)  # noqa: T201 - what was asked for
    return 0


def _lines(said: Tapped, only: frozenset[str], full: bool) -> Iterator[str]:
    for frame in said.frames:
        for envelope in decode_frame(frame.data):
            if not only or envelope.tag in only:
                yield f"{_clock(frame.at_s)} {'to' if frame.sent else 'from':<4} {frame.peer}  {_described(envelope, full)}"
    if said.lost:
        yield f"… {said.lost} frames more than there was room for"


def _described(envelope: Envelope, full: bool) -> str:
    kind = _KINDS.get(envelope.kind, f"kind {envelope.kind}")
    number = f" #{envelope.id}" if envelope.id else ""
    tag = f" {envelope.tag}" if envelope.tag else ""
    try:
        body = str(_plain(msgspec.msgpack.decode(envelope.body)))
    except (msgspec.MsgspecError, ValueError):
        body = f"<{len(envelope.body)} bytes that are no MessagePack>"
    body = body if full or len(body) <= SHOWN_CHARACTERS else f"{body[:SHOWN_CHARACTERS]}…"
    return f"{kind}{number}{tag} {'' if body == 'None' else body}".rstrip()


def _plain(value: Any) -> Any:
    """Bytes and arrays as their size: their content says nothing to a reader."""
    if isinstance(value, bytes):
        return _Shown(f"<{len(value)} bytes>")
    if isinstance(value, msgspec.msgpack.Ext):
        return _Shown(f"<array or buffer, code {value.code}>")
    if isinstance(value, list):
        return [_plain(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in cast("dict[Any, Any]", value).items()}
    return value


class _Shown(str):
    """Printed without quotes inside of a list."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s * 1000) % 1000:03}"
