"""Which module simulates which kind of scenario; each holds a `KIND` (sim/scenario.py) and is imported only when asked for."""

from collections.abc import Mapping
from typing import Final

KINDS: Final[Mapping[str, str]] = {
    "fabric_testbed": "sim.live.testbed",
    "modelsync": "sim.rollmux.modelsync",
    "one_host": "sim.onehost.scenario",
    "rfabric_throughput": "sim.rfabric.throughput",
    "rfabric_characterisation": "sim.rfabric.characterisation",
    "rfabric_cost": "sim.rfabric.cost",
    "rollart_affinity": "sim.rollart.affinity",
    "rollart_failures": "sim.rollart.failures",
    "rollart_serverless": "sim.rollart.serverless",
    "rollart_sigma": "sim.rollart.sigma",
    "rollart_staleness": "sim.rollart.staleness",
    "rollart_weight_pull": "sim.rollart.weight_pull",
}
