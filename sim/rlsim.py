"""The command `rubato sim`: simulates a scenario, writes its folder, and says which of its claims hold."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rubato.runtime.errors import ConfigError, ExitCode
from rubato.sim import claims, report, scenario
from rubato.sim.outcome import RunProgress, RunResult


def main(argv: Sequence[str]) -> int:
    """Simulate as ARGV says; SURPRISED where a claim did not come out as expected. Raises ConfigError for bad input."""
    args = _parsed(argv)
    loaded = scenario.load(Path(args.scenario), args.overrides)
    folder = Path(args.out)
    with report.folder_for(folder, force=args.force):
        outcome = _simulated(loaded, args.scenario)
        judged = claims.judge(loaded.scenario.claims, outcome.figures, optional=loaded.optional)
        report.write(folder, loaded.scenario, outcome, judged, plots=not args.no_plots)
    _print(loaded.scenario, outcome, judged, folder)
    return ExitCode.SURPRISED if any(claim.surprising for claim in judged) else ExitCode.DONE


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("rubato sim", description="Simulate a scenario and check its claims.")
    parser.add_argument("scenario", help="a YAML file, e.g. configs/sim/rfabric_cost.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the scenario")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for run.json, CSVs, plots and trace.json")
    parser.add_argument("--force", action="store_true", help="overwrite a run in DIR")
    parser.add_argument("--no-plots", action="store_true", help="leave the PNGs out")
    return parser.parse_intermixed_args(list(argv))


def _simulated(loaded: scenario.Loaded, name: str) -> RunResult:
    import numpy as np

    try:
        with np.errstate(over="raise", invalid="raise"):
            return _with_bar(loaded)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{name} can't be simulated: {scenario.reason(error)}.") from error


def _with_bar(loaded: scenario.Loaded) -> RunResult:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        progress: RunProgress = tell
        return loaded.kind.run(loaded.scenario, progress)


def _print(stated: scenario.Scenario, outcome: RunResult, judged: Sequence[claims.FigureClaim], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    lines = [f"{claim.name}: {claim.reason}" for claim in judged if not claim.holds and claim.reason]
    print(f"{stated.title} · simulated, calibrated on {stated.calibration}")  # noqa: T201
    table = Table("claim", "kind", "paper", "our bar", "ours", "tolerance", "holds", "expected", box=None, pad_edge=False)
    for claim in judged:
        paper, bar, ours = ("" if value is None else f"{value} {claim.unit}" for value in (claim.paper, claim.bar, claim.ours))
        cells = (claim.name, claim.kind, paper, bar, ours, claim.tolerance)
        table.add_row(*cells, "yes" if claim.holds else "no", claim.expected)
    if judged:
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    chosen = [f"chosen by an outcome: {key}: {why}" for key, why in stated.chosen.items()]
    for line in (*lines, *chosen, *outcome.notes):
        print(line)  # noqa: T201
    print(f"results in {folder}; trace.json opens in ui.perfetto.dev")  # noqa: T201
    print(claims.summary(judged))  # noqa: T201
