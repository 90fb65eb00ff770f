"""`rubato samples RUN`: what the model wrote, and what became of it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rubato.actors.report.transcripts.reading import EVAL, Filters, FoundSamples, SampleRow, decoder, find, group_or_trajectory, sample_of
from rubato.actors.report.transcripts.writing import summary, table, whole, width_of
from rubato.runtime.errors import ExitCode

SHOWN = 20
"""Lines without `-n`: a screen."""


def main(argv: Sequence[str]) -> int:
    """Print a table, trajectories turn by turn, or JSON; RubatoError is the caller's to print."""
    given = _parser().parse_args(list(argv))
    purpose = given.purpose or ("" if given.name else "eval" if given.fate == EVAL else "train")
    filters = Filters(group_or_trajectory(given.name), given.step, given.fate, given.task, given.row, purpose)
    found, decode = find(given.run, filters), decoder(given.run)
    most = given.n if given.n is not None else len(found) if given.json or given.name else SHOWN
    chosen = choose(found, most, best=given.best, worst=given.worst)
    if given.json:
        for row in chosen:
            print(msgspec.json.encode(sample_of(row, decode)).decode())  # noqa: T201
        return ExitCode.DONE
    samples = [sample_of(row, decode) for row in chosen]
    console = Console(highlight=False, soft_wrap=False)
    console.width = width_of(console)
    if given.name:
        for sample in samples:
            console.print(whole(sample))
        return ExitCode.DONE
    console.print(summary(found))
    console.print(table(samples, console.width))
    if samples:
        console.print(f"a whole one: rubato samples {given.run} {samples[-1].trajectory_id}", style="dim", markup=False)
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rubato samples", description="Show what the model wrote: one line for each trajectory that the run keeps, or some of them whole."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, whether it runs, has ended or was killed")
    parser.add_argument(
        "name", nargs="?", default="", metavar="ID", help="show this trajectory turn by turn, or all of this group: g12.3, g12"
    )
    parser.add_argument("--step", type=int, help="trained in this step; of held-out ones the version")
    parser.add_argument("--fate", default="", help="trained, zero_spread, stale, failed, …, eval")
    parser.add_argument("--task", default="", help="of the task of this name")
    parser.add_argument("--row", type=int, help="of this row of its task")
    parser.add_argument("--purpose", choices=("train", "eval"), help="training (the default), or held out")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="those with the highest reward")
    order.add_argument("--worst", action="store_true", help="those with the lowest reward")
    parser.add_argument("-n", type=int, default=SHOWN, help=f"how many (default {SHOWN}, the newest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line; without -n all that are kept")
    parser.set_defaults(n=None)
    return parser


def choose(found: FoundSamples, num: int, *, best: bool, worst: bool) -> list[SampleRow]:
    """The newest `num` samples as they came, and where there is room behind them those that left no text; or those of the highest or lowest reward, these first."""
    if best or worst:
        scored = [row for row in found.kept if row.line["reward"] is not None]
        return sorted(scored, key=lambda row: row.line["reward"], reverse=best)[:num]
    kept = found.kept[-num:] if num > 0 else []
    return [*kept, *found.textless[-(num - len(kept)) :]] if num > len(kept) else kept
