"""Seconds of a placement decision by the jobs that run: python tools/bench/coexecution.py [--jobs 100 2000] [--epsilon 0.05] [--json FILE]

Jobs of the nine shapes of RollMux's simulation (arXiv 2512.11306, section 7.4: balanced, rollout-heavy, train-heavy; small, medium, large),
SLO uniform in [1, 2], on 1, 2 or 4 nodes of each pool and with the host memory of its 7B, 14B and 32B models. Job after job is placed; at
each count so many more arrive, and are not kept. H20 nodes at $1.85 per GPU and hour, H800 nodes at $5.28.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planning.coexecution import CoexecutionGroup, JobProfile, NodePool, SharedCluster, admit, place
from planning.round_robin import StepTimes

COUNTS = (5, 9, 13, 100, 500, 1000, 2000)
"""Jobs of the paper's table of latencies."""

SIZES = (
    ((50, 100), (25, 50), 1, 275.7e9, 240.0e9),
    ((100, 200), (50, 100), 2, 445.4e9, 456.1e9),
    ((200, 300), (100, 200), 4, 490.3e9, 520.4e9),
)
"""Seconds of a balanced phase, of a short one beside a long one of twice the balanced, nodes of each pool, bytes per node."""


def cluster(epsilon: float = 0.0) -> SharedCluster:
    """Nodes of eight GPUs and 2 TB, without a limit."""
    rollout = NodePool(8 * 1.85, 2e12, switch_s=0.9, cores=96)
    return SharedCluster(rollout, NodePool(8 * 5.28, 2e12, switch_s=4.1), epsilon=epsilon)


def job(name: str, rng: Random) -> JobProfile:
    """One of the nine shapes, with 16 steps seen of 0.3 to 1 times its longest."""
    balanced, short, nodes, rollout_bytes, train_bytes = SIZES[rng.randrange(3)]
    long = (2 * balanced[0], 2 * balanced[1])
    rollout, train = ((balanced, balanced), (long, short), (short, long))[rng.randrange(3)]
    rollout_s, train_s = rng.uniform(*rollout), rng.uniform(*train)
    seen = tuple(
        StepTimes(0.0, rollout_s * part, train_s * part) for part in (rng.uniform(0.3, 1.0) for _ in range(16))
    )
    return JobProfile(
        name, rollout_s, train_s, nodes, nodes, rollout_bytes, train_bytes, round(rng.uniform(1, 2), 2), seen=seen
    )


def measured(counts: Sequence[int], decisions: int, epsilon: float) -> list[dict[str, Any]]:
    """Per count: groups, dollars per hour, those of the same jobs each alone, and milliseconds per decision."""
    rng, pools = Random(1), cluster(epsilon)
    groups: tuple[CoexecutionGroup, ...] = ()
    found: list[dict[str, Any]] = []
    alone = 0.0
    running = 0
    for count in sorted(counts):
        for number in range(running, count):
            arriving = job(f"job{number}", rng)
            alone += arriving.rollout_nodes * pools.rollout.usd_hour + arriving.train_nodes * pools.train.usd_hour
            groups = admit(groups, arriving, place(arriving, groups, pools))
        running = count
        times: list[float] = []
        for number in range(decisions):
            arriving = job(f"next{number}", rng)
            began = perf_counter()
            place(arriving, groups, pools)
            times.append(1e3 * (perf_counter() - began))
        usd = sum(group.usd_hour(pools) for group in groups)
        row = {"jobs": count, "groups": len(groups), "usd_hour": usd, "usd_hour_alone": alone}
        found.append(row | {"ms_median": median(times), "ms_most": max(times)})
        print(
            f"{count} jobs in {len(groups)} groups: {median(times):.1f} ms per decision, {max(times):.1f} ms at most; "
            f"{usd:.0f} $/h, each alone {alone:.0f}",
            flush=True,
        )
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=list(COUNTS), metavar="N", help="concurrent jobs")
    parser.add_argument("--decisions", type=int, default=32, help="arrivals that are timed at each count")
    parser.add_argument("--epsilon", type=float, default=0.0, help="above 0: plan by the steps seen")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    asked = parser.parse_args(argv)
    rows = measured(asked.jobs, asked.decisions, asked.epsilon)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"epsilon": asked.epsilon, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
