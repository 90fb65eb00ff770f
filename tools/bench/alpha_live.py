"""Time to a reward with staleness.alpha=auto and with fixed ones, on live processes: python tools/bench/alpha_live.py [--seeds 5 | --short]

Each run is a launch of the quickstart (or --config) until its end; settings alternate, seed after seed. Prints each setting's mean and spread of
the seconds until the mean reward of five steps first reached the goal, auto's mean over the best fixed one's, and on how many seeds it is ahead. Needs an idle machine, and
for five seeds of five settings about an hour of two cores.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.quickstart import GOAL, ROOT, SHORT, launched, points_of, seconds_to
from tools.bench.short import NO_RESULT

NEVER = float("inf")
SCRIPTED = (
    "engine.kind=scripted", "engine.scripted.vocab_size=4096", "train.kind=scripted", "train.scripted.step_s=0.1",
    "train.scripted.weights_mib=0.01", "check.enabled=false",
)  # fmt: skip
"""That a run which only shows that it starts loads no model."""


def time_to_goal(config: Path, alpha: str, seed: int, overrides: Sequence[str]) -> float:
    """Seconds; infinite where the goal was not reached."""
    with tempfile.TemporaryDirectory(prefix="rubato-alpha-") as folder:
        run = launched(config, [f"staleness.alpha={alpha}", f"run.seed={seed}", *overrides], Path(folder))
        found = seconds_to(GOAL, points_of(run))
    return NEVER if found is None else found


class Summary(NamedTuple):
    """Of auto beside the fixed α whose mean is least."""

    means: dict[str, float]
    best: str
    auto_over_best: float
    """Of means; infinite where no fixed α reached the goal with every seed."""
    wins: int
    """Seeds with which auto was there first."""


def summary(times: dict[str, list[float]]) -> Summary:
    """Of the same seeds with each setting."""
    means = {alpha: fmean(seconds) for alpha, seconds in times.items()}
    best = min((alpha for alpha in means if alpha != "auto"), key=lambda alpha: means[alpha])
    ratio = means["auto"] / means[best] if means[best] < NEVER else NEVER
    return Summary(means, best, ratio, sum(a < b for a, b in zip(times["auto"], times[best], strict=True)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--alphas", nargs="+", default=["0", "1", "2", "4"], metavar="N", help="fixed ones")
    parser.add_argument(
        "--short", action="store_true", help="three scripted steps of auto and of α = 1: it starts, its figures say nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_intermixed_args(argv)
    alphas, seeds, overrides = asked.alphas, asked.seeds, asked.overrides
    if asked.short:
        print(NO_RESULT, flush=True)
        alphas, seeds, overrides = ["1"], 1, [*SHORT, *SCRIPTED, *overrides]
    times: dict[str, list[float]] = {alpha: [] for alpha in ("auto", *alphas)}
    for seed in range(1, seeds + 1):
        for alpha, seconds in times.items():
            seconds.append(time_to_goal(asked.config, alpha, seed, overrides))
            print(f"seed {seed}, α {alpha}: {GOAL:g} after {seconds[-1]:.1f} s", flush=True)
    found = summary(times)
    for alpha, seconds in times.items():
        print(f"α {alpha}: {found.means[alpha]:.1f} s to the goal, mean; {min(seconds):.1f} to {max(seconds):.1f} s")
    print(f"auto over α = {found.best}: {found.auto_over_best:.2f}, ahead on {found.wins} of {seeds} seeds")
    if asked.json is not None:
        plain = {alpha: [None if s == NEVER else s for s in seconds] for alpha, seconds in times.items()}
        asked.json.write_text(json.dumps(plain, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
