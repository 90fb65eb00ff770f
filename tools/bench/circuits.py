"""How long the circuit planner takes, per traffic pattern: python tools/bench/circuits.py [--racks 128] [--uplinks 32]

Patterns between racks: `ring` (data parallel), `skewed` (bipartite, a few heavy partners each), `dense` (everybody to everybody).
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planning.circuits import FabricSnapshot, materialise, plan
from planning.demand import Demand, Flows, Links, flows, per_link
from planning.multihop import bottleneck
from planning.pods import plan_pods
from planning.switching import PhaseCost, schedule
from planning.topology import direct, template
from sim.rfabric.baselines import greedy, matching


def patterns(num: int) -> dict[str, tuple[Demand, ...]]:
    rng = random.Random(1)
    names = [f"rack{i}" for i in range(num)]
    ring = tuple((names[i], names[(i + 1) % num], 10**9) for i in range(num))
    half = num // 2
    skewed = tuple(
        (names[i], names[half + rng.randrange(half)], rng.randint(10**6, 10**9)) for i in range(half) for _ in range(12)
    )
    dense = tuple((a, b, rng.randint(10**6, 10**9)) for a in names for b in names if a != b)
    return {"ring": ring, "skewed": skewed, "dense": dense}


def median_ms(work: Callable[[], object], repeat: int) -> float:
    took: list[float] = []
    for _ in range(repeat):
        began = time.process_time()
        work()
        took.append(1e3 * (time.process_time() - began))
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--racks", type=int, default=128)
    parser.add_argument("--uplinks", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    names = tuple(f"rack{i}" for i in range(args.racks))
    print(f"{args.racks} racks, {args.uplinks} uplinks each; median CPU time of {args.repeat} runs, in ms")
    print("links: planner → bytes over the fullest link by shortest paths, relative to direct")
    for name, traffic in patterns(args.racks).items():
        directed = flows(traffic, names)
        links = direct(per_link(directed), [args.uplinks] * args.racks)
        old = materialise(direct({}, [args.uplinks] * args.racks), (), args.uplinks)
        cached = FabricSnapshot(args.uplinks, links, old, 1.0, 1.0, 0.01)
        print(f"{name:7} replan {median_ms(lambda t=traffic, s=cached: plan(s._replace(links=template(t, names, args.uplinks))), args.repeat):7.1f}   "
              f"from a template {median_ms(lambda s=cached: plan(s), args.repeat):7.1f}   "
              f"pods of 8 {median_ms(lambda d=directed: plan_pods(d, [i // 8 for i in range(args.racks)], args.uplinks), args.repeat):7.1f}")  # fmt: skip
        compare(directed, links, args)
    costs = [PhaseCost(1.0, tuple(random.Random(i).random() for _ in range(8))) for i in range(8)]
    print(f"schedule of 8 phases over 8 topologies {median_ms(lambda: schedule(costs, 0.01), args.repeat):.1f}")


def compare(directed: Flows, links: Links, args: argparse.Namespace) -> None:
    best = bottleneck(directed, links, args.racks)
    for name, planner in (("greedy", greedy), ("matching", matching)):
        found: list[Links] = []
        took = median_ms(lambda p=planner, f=found: f.append(p(per_link(directed), [args.uplinks] * args.racks)), 1)
        print(f"        {name:9} {took:8.1f}   x{bottleneck(directed, found[-1], args.racks) / best:.2f}")


if __name__ == "__main__":
    main()
