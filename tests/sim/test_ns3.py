"""Packets in ns-3 take as long as the flow level says, but for what packets cost: a band, not an equality.

`-s` prints packet time over fluid time: 1.04 (incast) to 1.26 (rings) with ns-3.37; docs/rlsim.md has them all. Every scenario's fluid time is what
its fullest link needs, which no transport can beat. It is 10 to 48 ms: over 800 round trips of an empty network, as long as 500 MB take at 400 Gb/s.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from rubato.sim.net import collectives
from rubato.sim.net.clos import ClosSpec, clos
from rubato.sim.net.network import Network, complete, flows

ORACLE = Path(__file__).with_name("ns3_oracle.cc")
LIBRARIES = ("applications", "internet", "point-to-point", "traffic-control", "network", "core")

NIC = 1.25e9
MB = 1e6

HEADERS = 1502 / 1448
"""On a point-to-point cable: PPP 2, IP 20, TCP 20 and its time stamp 12 bytes beside 1448 of payload. Nothing can be faster."""

LIMIT = HEADERS * 4 / 3
"""A window that is halved when congested and grows linearly is three quarters of its peak on average: were there no queue to bridge the gaps, a full
link would be busy for that share of the time. Slow start costs nothing beside it: its first window, 10 packets, fills an empty path. Acknowledgements
(2 % of the way back) and flows that share unevenly until they converge may add to it: this is what to expect and no theorem."""


class Scenario(NamedTuple):
    """Servers with one NIC, numbered leaf by leaf."""

    spec: ClosSpec
    transfers: list[collectives.Transfer]


def star(servers):
    return ClosSpec(servers, 2 * servers, NIC, nics=1)


CLOS = ClosSpec(servers=12, radix=6, nic_bytes_s=NIC, oversubscription=2, nics=1)
"""Three leaves of four servers, two NICs' worth of uplinks each, one pod."""

SCENARIOS = {
    "incast, 15 to 1": Scenario(star(16), [(i, 0, 4 * MB) for i in range(1, 16)]),
    "all-to-all of 8": Scenario(star(8), list(collectives.all_to_all([range(8)], 2 * MB))),
    "two rings of 8": Scenario(star(8), list(collectives.rings([range(8)], 16 * MB))),
    "permutation, 2:1 leaves": Scenario(CLOS, [(i, (i + 3) % 12, 8 * MB) for i in range(12)]),
    "all-to-all of 12, 2:1 leaves": Scenario(CLOS, list(collectives.all_to_all([range(12)], MB))),
    "the same, one server gets 3 times the bytes": Scenario(
        CLOS, [(a, b, size * (1 if b else 3)) for a, b, size in collectives.all_to_all([range(12)], MB / 2)]
    ),
}


@pytest.fixture(scope="module")
def ns3(tmp_path_factory):
    """The compiled oracle."""
    if not shutil.which("g++") or not Path("/usr/include/ns3").is_dir():
        pytest.skip("ns-3 or g++ is not installed: apt-get install libns3-dev")
    program = tmp_path_factory.mktemp("ns3") / "oracle"
    libraries = [f"-lns3-{name}" for name in LIBRARIES]
    subprocess.run(["g++", "-std=c++17", "-O1", ORACLE, "-o", program, *libraries], check=True)
    return program


def packet_seconds(ns3, scenario):
    """Per flow."""
    lines = [*cables(scenario.spec), *(f"flow {a} {b} {size:.0f}" for a, b, size in scenario.transfers)]
    ran = subprocess.run([ns3], input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=True)
    return np.array(json.loads(ran.stdout))


@pytest.fixture(scope="module", params=SCENARIOS)
def judged(request, ns3):
    """A scenario's name, itself, and the seconds that its packets took, flow by flow."""
    scenario = SCENARIOS[request.param]
    return request.param, scenario, packet_seconds(ns3, scenario)


def cables(spec):
    """Servers, then leaves, then a spine; the uplinks of a leaf are one cable, as even spraying makes them."""
    leaves = -(-spec.servers // spec.down)
    for server in range(spec.servers):
        yield f"link {server} {spec.servers + server // spec.down} {spec.nic_bytes_s}"
    for leaf in range(leaves if leaves > 1 else 0):
        yield f"link {spec.servers + leaf} {spec.servers + leaves} {spec.nic_bytes_s * spec.down / spec.oversubscription}"


def fluid(network: Network, scenario: Scenario):
    return complete(network, flows(scenario.transfers, 1))


def full_links(network: Network, scenario: Scenario):
    """The fullest links of all, and how many seconds they need at least."""
    needs = fluid(network, scenario).link_bytes / network.capacity
    return np.flatnonzero(needs > needs.max() * (1 - 1e-9)), needs.max()


@pytest.mark.slow
def test_packets_take_longer_than_fluid_within_the_band(judged):
    name, scenario, packets = judged
    network = clos(scenario.spec)

    ideal = fluid(network, scenario)

    ratio = packets.max() / ideal.seconds
    each = packets / ideal.finish_s
    print(f"{name}: {ideal.seconds * 1e3:.1f} ms, packets {ratio:.3f}, single flows {each.min():.2f} to {each.max():.2f}")
    assert ideal.seconds == pytest.approx(full_links(network, scenario)[1], rel=1e-9)
    assert HEADERS <= ratio <= LIMIT


@pytest.mark.slow
def test_a_full_link_of_half_its_rate_leaves_the_band(judged):
    _, scenario, packets = judged
    network = clos(scenario.spec)
    slower = network.capacity.copy()
    slower[full_links(network, scenario)[0][0]] /= 2

    ratio = packets.max() / fluid(network._replace(capacity=slower), scenario).seconds

    assert ratio < HEADERS


@pytest.mark.slow
def test_full_links_of_twice_their_rate_leave_the_band(judged):
    _, scenario, packets = judged
    network = clos(scenario.spec)
    faster = network.capacity.copy()
    faster[full_links(network, scenario)[0]] *= 2

    ratio = packets.max() / fluid(network._replace(capacity=faster), scenario).seconds

    assert ratio > LIMIT


@pytest.mark.slow
def test_short_transfers_leave_the_band(ns3):
    ratio = {}
    for size in (10e3, 2 * MB):
        rings = Scenario(star(8), list(collectives.rings([range(8)], 2 * size)))
        ratio[size] = packet_seconds(ns3, rings).max() / fluid(clos(rings.spec), rings).seconds
        print(f"two rings of 8, {size / MB} MB: packets {ratio[size]:.3f}")

    assert ratio[10e3] > max(LIMIT, ratio[2 * MB])
