"""`rubato monitor CLUSTER [--once | --json | --why]`: named by `report.monitor` in a cluster's config."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rubato.actors.cluster.board import ClusterBoard, read_board
from rubato.runtime.errors import ExitCode, RubatoError

EVERY_S = 1.0


def main(argv: Sequence[str]) -> int:
    """One look, or a table that is drawn again each second; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser("rubato monitor", description="Watch a cluster, or print how it stands.")
    parser.add_argument("cluster", type=Path, metavar="CLUSTER", help="folder of the cluster")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one table")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--why", action="store_true", help="print which job waits for which")
    given = parser.parse_args(list(argv))
    folder = given.cluster.resolve()
    if given.once or given.json or given.why:
        board = asyncio.run(read_board(folder))
        print(board.whys() if given.why else board.table() if given.once else _json(board))  # noqa: T201
        return ExitCode.DONE
    if not sys.stdout.isatty():
        raise RubatoError("the live view needs a terminal. Use --once, --json or --why to print.")
    asyncio.run(_live(folder))
    return ExitCode.DONE


def _json(board: ClusterBoard) -> str:
    return msgspec.json.encode(board.data()).decode()


async def _live(folder: Path) -> None:
    from rich.live import Live
    from rich.text import Text

    board = await read_board(folder)
    with Live(Text(board.table()), screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text(board.table()), refresh=True)
            await asyncio.sleep(EVERY_S)
            board = await read_board(folder)
