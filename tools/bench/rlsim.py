"""How fast RLSim is: max-min rates of 262,144 flows, and one RL iteration per fabric: `python tools/bench/rlsim.py 4096 32768`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np

from rubato.sim.net.clos import ClosSpec, clos
from rubato.sim.net.maxmin import max_min_rates
from rubato.sim.rfabric.throughput import ThroughputScenario, simulate
from rubato.sim.scenario import load

CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "sim" / "rfabric_throughput.yaml"
NICS, FLOWS_PER_NIC = 32_768, 8
FABRICS = ("fat-tree", "rail-optimised", "oversubscribed", "rfabric")


def main() -> None:
    network = clos(ClosSpec(NICS, 64, 1.0, nics=1))
    source = np.repeat(np.arange(NICS), FLOWS_PER_NIC)
    target = (source + np.random.default_rng(1).integers(1, NICS, len(source))) % NICS
    paths, width = network.route(source, target), np.ones(len(source))
    max_min_rates(paths, width, network.capacity, compiled=True)  # compiles
    best = min(_timed(lambda: max_min_rates(paths, width, network.capacity, compiled=True)) for _ in range(5))
    print(f"max-min over {len(source)} random flows on {NICS} NICs: {best:.3f} s (best of 5, numba)")
    scenario = load(CONFIG).scenario
    assert isinstance(scenario, ThroughputScenario)
    for gpus in map(int, sys.argv[1:] or ("4096",)):
        for name in FABRICS:
            seconds = _timed(lambda name=name, gpus=gpus: simulate(scenario, gpus, name))
            print(f"one RL iteration, {gpus} GPUs, {name}: {seconds:.2f} s")


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
