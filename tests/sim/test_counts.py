"""Bills of materials against counts that others published, and against each other."""

from itertools import product

import pytest

from rubato.sim.hardware import Prices
from rubato.sim.rfabric.counts import FABRICS, FabricParts, FabricSize, clos, superpod

PRICES = Prices(name="400G", transceiver=659, eps_port=1090, ocs_port=520)


@pytest.mark.parametrize(
    ("gpus", "switches"),
    [
        (1024, (32, 16)), (2048, (64, 32)), (4096, (128, 128, 64)), (8192, (256, 256, 128)), (16384, (512, 512, 256)),
    ],
)  # fmt: skip
def test_fat_trees_have_the_switches_of_nvidias_superpods(gpus, switches):
    assert superpod(gpus, 64) == switches


@pytest.mark.parametrize(("gpus", "radix"), [*product((1024, 4096, 32768), (64, 128))])
def test_a_fat_trees_ports_are_its_switches_times_the_radix(gpus, radix):
    assert clos(gpus, radix).eps_ports == sum(superpod(gpus, radix)) * radix


@pytest.mark.parametrize(("gpus", "radix"), [*product((1024, 2048, 4096, 32768), (64, 128))])
def test_oversubscription_of_one_is_the_fat_tree(gpus, radix):
    assert FABRICS["oversubscribed"](FabricSize(gpus, radix, oversubscription=1)) == clos(gpus, radix)


@pytest.mark.parametrize(
    ("fabric", "gpus", "usd"),
    [
        ("fat-tree", 2048, 5906), ("fat-tree", 4096, 9404), ("sip", 2048, 1179), ("sip", 4096, 2219),
        ("rfabric", 4096, 5197), ("oversubscribed", 2048, 10722 / 3), ("oversubscribed", 4096, 14220 / 3),
    ],
)  # fmt: skip
def test_the_cost_per_gpu_follows_from_the_counts(fabric, gpus, usd):
    per_gpu = FABRICS[fabric](FabricSize(gpus, 64)).usd(PRICES) / gpus

    assert per_gpu == pytest.approx(usd, rel=1e-9)


def test_the_parts_of_a_tree_beyond_three_tiers_are_refused():
    with pytest.raises(ValueError, match="exceed a three-tier tree"):
        clos(10**6, 64)


def test_more_core_share_costs_more_and_moves_nothing_else():
    small, large = (FABRICS["rfabric"](FabricSize(4096, 64, core_share=c)) for c in (0.25, 1.0))

    assert small == FabricParts(2 * 4096, 3 * 4096, 1.5 * 4096, 3)
    assert large.ocs_ports == 3 * 4096
    assert small[:2] == large[:2]
