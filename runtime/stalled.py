"""Says, for every unfinished task of a loop, which await it stands at: the body of a deadlock report."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from runtime.observe.waits import Waits

MAX_TASKS = 40
"""Tasks listed; a system of hundreds that stands still repeats itself."""

MAX_FRAMES = 6
"""Awaits shown per task, innermost first."""


def report(headline: str, loop: asyncio.AbstractEventLoop, waits: Iterable[tuple[str, Waits]] = ()) -> str:
    """`headline`, then a line per task with its chain of awaits, then what actors said that they wait for."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [headline, *(f"  {task.get_name()}: {_standing(task)}" for task in tasks[:MAX_TASKS])]
    if len(tasks) > MAX_TASKS:
        lines.append(f"  … and {len(tasks) - MAX_TASKS} more tasks")
    now = loop.time()
    for actor, held in waits:
        for view in held.snapshot(now):
            facts = ", ".join(fact for fact in (view.detail, view.holder, view.limit) if fact)
            lines.append(f"  {actor} waits {view.age_s:.1f} s for {view.what}" + (f" ({facts})" if facts else ""))
    return "\n".join(lines)


def _standing(task: asyncio.Task[Any]) -> str:
    frames, leaf = _chain(task.get_coro())
    if not frames:
        return "has not started" if leaf is None else f"waits on {_described(leaf)}"
    places = [_place(code, line) for code, line in reversed(frames)]
    shown = " < ".join(places[:MAX_FRAMES]) + (" < …" if len(places) > MAX_FRAMES else "")
    return f"waits on {_described(leaf)} in {shown}"


def _chain(awaited: Any) -> tuple[list[tuple[CodeType, int]], Any]:
    """The suspended frames from the task's own coroutine inwards, and what the innermost awaits."""
    frames: list[tuple[CodeType, int]] = []
    while awaited is not None:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        frames.append((frame.f_code, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames, awaited


def _place(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    return f"{code.co_qualname} ({path.name}:{line})"


def _described(leaf: Any) -> str:
    if isinstance(leaf, asyncio.Task):
        return f"task {leaf.get_name()}"
    if leaf is None or type(leaf).__name__ in ("FutureIter", "_asyncio.FutureIter"):
        return "a future"
    return type(leaf).__name__
