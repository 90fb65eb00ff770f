"""Which module simulates which kind of scenario; each holds a `KIND` (sim/scenario.py) and is imported only when asked for."""

from collections.abc import Mapping
from typing import Final

KINDS: Final[Mapping[str, str]] = {
    "modelsync": "sim.rollmux.modelsync",
    "rfabric_throughput": "sim.rfabric.throughput",
    "rfabric_cost": "sim.rfabric.cost",
    "rollart_weight_pull": "sim.rollart.weight_pull",
}
