"""Circuits of one phase, as they are picked live."""

from collections.abc import Sequence

from rubato.planning.demand import Demand, Links, per_link
from rubato.planning.phase_time import LinkRates, template
from rubato.planning.topology import direct


def links_for(traffic: Sequence[Demand], endpoints: Sequence[str], ports_per_endpoint: int) -> Links:
    return template([traffic], endpoints, ports_per_endpoint, (), lambda directed, ports: direct(per_link(directed), ports), LinkRates(1.0))
