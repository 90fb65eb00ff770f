"""Do predicted quantiles of lengths hold on what live runs sampled? Steps of a run's samples.jsonl, each forecast from the eight before it.

python tools/bench/forecast.py RUN… [--json FILE]

A step's trajectories are forecast at its start, and once half and four fifths of them have ended; those still running then count. Of each
quantile the share that ended within it is compared with it, over all steps together. The limit on tokens is not told to the forecast.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planning.forecast import WINDOW, Seen, fit  # noqa: E402

QUANTILES = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95)
ENDED = (0.0, 0.5, 0.8)


class Off(NamedTuple):
    """By how much the share of `num` trajectories within a quantile is off, at worst."""

    ended: float
    quantile: float
    off: float
    num: int


def steps_of(run: Path) -> list[list[Seen]]:
    """Trained or without spread: what was whole when its step was claimed, in the order of steps. Raises ValueError, one sentence."""
    file = run / "samples.jsonl"
    if not file.is_file():
        raise ValueError(f"{file} is not there: name the folder of a run.")
    found: dict[int, list[Seen]] = defaultdict(list)
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        if sample.get("step") and sample.get("purpose") == "train" and sample.get("tokens"):
            found[sample["step"]].append(Seen(sample["task"], str(sample["row"]), float(sample["tokens"])))
    return [found[step] for step in sorted(found)]


def worst(steps: Sequence[Sequence[Seen]]) -> list[Off]:
    """For each share of a step that has ended, the quantile that is most off. Of a length that many have any share up to theirs is right."""
    found: list[Off] = []
    for ended in ENDED:
        below, at_most, num = dict.fromkeys(QUANTILES, 0), dict.fromkeys(QUANTILES, 0), 0
        for at in range(WINDOW, len(steps)):
            lengths = sorted(seen.tokens for seen in steps[at])
            far = lengths[int(ended * len(lengths))] if ended else 0.0
            now = [seen if seen.tokens <= far else seen._replace(tokens=far, done=False) for seen in steps[at]]
            forecast = fit(steps[at - WINDOW : at], now if ended else ())
            running = [seen for seen in steps[at] if seen.tokens > far]
            num += len(running)
            for quantile in QUANTILES:
                for seen in running:
                    most = far + forecast.remaining(seen._replace(tokens=far, done=False), quantile).tokens
                    below[quantile] += seen.tokens < most - 1e-6
                    at_most[quantile] += seen.tokens <= most + 1e-6
        if num:
            off = {q: max(below[q] / num - q, q - at_most[q] / num, 0.0) for q in QUANTILES}
            quantile = max(off, key=off.__getitem__)
            found.append(Off(ended, quantile, off[quantile], num))
    return found


def main(argv: Sequence[str]) -> int:
    """Print a line for each run and share; write JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    try:
        found = {str(run): worst(steps_of(run)) for run in asked.runs}
    except ValueError as error:
        parser.error(str(error))
    for run, offs in found.items():
        if not offs:
            print(f"{run}: no more than {WINDOW} steps, nothing to forecast")
        for each in offs:
            print(
                f"{run}: {each.ended:4.0%} ended, {each.num} running: quantile {each.quantile} is off by {100 * each.off:.1f} points, at worst"
            )
    if asked.json:
        asked.json.write_text(json.dumps({run: [each._asdict() for each in offs] for run, offs in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
