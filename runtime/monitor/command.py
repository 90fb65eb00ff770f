"""`rubato monitor RUN [--once | --json | --why]`: one look at a run, or the live view."""

import argparse
import asyncio
import importlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from rubato.runtime.errors import ExitCode, RubatoError
from rubato.runtime.monitor.source import RunSource, View, read_config
from rubato.runtime.monitor.text import once, render

PLAIN_WIDTH = 80
"""Width where the output is no terminal."""


def main(argv: Sequence[str]) -> int:
    """One look, or the live view; RubatoError is the caller's to print."""
    if own := _own(argv):
        run: Callable[[Sequence[str]], int] = importlib.import_module(own).main
        return run(argv)
    given = _parser().parse_args(list(argv))
    source = RunSource(given.run)
    if given.once or given.json or given.why:
        print(_rendered(asyncio.run(_look(source)), given))  # noqa: T201 - what was asked for
        return ExitCode.DONE
    return _live(given, source)


def _own(argv: Sequence[str]) -> str:
    """The module that the run named first has for this, if any: `report.monitor`."""
    folder = next((word for word in argv if not word.startswith("-")), "")
    report = read_config(Path(folder) / "config.yaml").get("report") if folder else None
    return str(cast("dict[str, object]", report).get("monitor") or "") if isinstance(report, dict) else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rubato monitor", description="Watch a run, or print how it stands.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one table")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--why", action="store_true", help="print what waits for what")
    parser.add_argument("--allow-actions", action="store_true", help="let the live view drain, kill and add actors")
    return parser


def _rendered(view: View, given: argparse.Namespace) -> str:
    if given.json:
        return msgspec.json.encode(view.shown).decode()
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    return render(view.shown, width) if given.why else once(view.shown, view.rows, width=width)


async def _look(source: RunSource) -> View:
    try:
        return await source.read()
    finally:
        await source.close()


def _live(given: argparse.Namespace, source: RunSource) -> int:
    if not sys.stdout.isatty():
        raise RubatoError("the live view needs a terminal. Use --once, --json or --why to print.")
    from rubato.runtime.monitor.app import MonitorApp, RunActions

    app = MonitorApp(source, RunActions(given.run) if given.allow_actions else None)
    app.run()
    return app.return_code or 0
