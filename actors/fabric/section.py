"""The fabric's section of the config: read by the controller and by the emulated switch."""

from collections.abc import Mapping
from itertools import chain
from typing import Self
from urllib.parse import urlsplit

import httpx
from pydantic import Field, field_validator, model_validator

from rubato.actors.fabric.driver import SwitchCapabilities
from rubato.bus.address import host_port, is_loopback
from rubato.bus.errors import BadAddress
from rubato.runtime.config import Section

MOST_S = 3600.0
"""Of any time of the switch's; what takes longer than an hour is no phase's circuits."""
REQUESTS = 10
"""What one attempt may ask of the switch, each answered at the last moment: NETCONF reads, opens a session, reads, edits, commits, looks at
mirrors, looks once more at the end, verifies."""
STORE_S = 30.0
"""For the Store, and for pauses between two looks."""

MOST_MULTI_HOP = 16
"""Endpoints of a linear program that takes some tenths of a second: it is solved where the controller's messages wait."""


BASELINES: Mapping[str, str] = {"greedy": "rubato.sim.rfabric.baselines:greedy", "matching": "rubato.sim.rfabric.baselines:matching"}
"""`fabric.planner` → function: what others do, which no job of ours needs; imported only when it is chosen."""

OCS = ("polatis", "netconf")
DRIVERS: Mapping[str, str] = {"sonic": "rubato.actors.fabric.connect:sonic", **{name: f"rubato_ocs.{name}:driver" for name in OCS}}
"""`fabric.driver` → function that makes one of the section; those of OCS are of the package in plugins/ocs."""


class FabricSection(Section):
    """The optical fabric and its switch."""

    enabled: bool = True
    """False leaves the switch alone: everything takes the electrical path."""
    ports: int = Field(default=64, ge=2)
    """Duplex ports of the switch."""
    ports_per_endpoint: int = Field(default=4, ge=2)
    """Ports of each endpoint; endpoints beyond ports / ports_per_endpoint stay on the electrical path."""
    link_gbps: float = Field(default=400.0, gt=0)
    """Bandwidth of one circuit, each way: what a topology is worth to a phase."""
    reconfiguration_s: float = Field(default=0.010, ge=0, le=MOST_S)
    """Time that changed circuits are dark; 3D MEMS by default."""
    drain_s: float = Field(default=0.0, ge=0, le=MOST_S)
    """Time between the notice that circuits will go dark and the change, for bytes that are under way."""
    driver: str = "sonic"
    """What the switch speaks: sonic, SONiC's RESTCONF; polatis, Polatis' RESTCONF, and netconf, NETCONF over ssh, of the package
    rubato-ocs (plugins/ocs). Or a function of yours as `package.module:function`, which makes an OcsDriver of this section."""
    switch_url: str = ""
    """https://host:port of the switch; ssh://user@host:830 for NETCONF. Empty: the actor `optical_switch`, an emulated SONiC switch."""
    switch_user: str = ""
    """User name at the switch over RESTCONF."""
    switch_password_file: str = ""
    """File with the password alone. NETCONF takes keys from ssh's own configuration."""
    switch_ca_file: str = ""
    """Certificate that signed the switch's own, where the system does not know it."""
    switch_timeout_s: float = Field(default=2.0, gt=0, le=MOST_S)
    """For a request and its whole answer; a switch that takes longer counts as unreachable."""
    tune_timeout_s: float = Field(default=5.0, gt=0, le=MOST_S)
    """Circuits that carry no light so long after the reconfiguration time count as failed."""
    listen: str = ""
    """127.0.0.1:port or [::1]:port on which the emulated switch answers HTTP too, port 0 for a free one; empty: on the bus alone."""
    racks: dict[str, tuple[str, ...]] = {}
    """The racks in the order of their ports on the switch, each with the addresses of its hosts (their bus.host). Empty: every actor
    is an endpoint of its own, in the order of first appearance."""
    pods: dict[str, tuple[str, ...]] = {}
    """The racks of each pod, every rack in one: for planner pods."""
    planner: str = "direct"
    """How circuits are chosen for a phase. direct: a link for each pair that talks, the slowest as fast as can be. pods: each rack's ports are
    split between its pod and the core first (RFabric). multi_hop: several hops by a linear program, for more partners than ports (the
    extra `fabric`). greedy (MixNet) and matching (TopoOpt), for comparison. Or your own function as `package.module:function`."""
    static: bool = False
    """One set of circuits for all phases, by their traffic together: what a fabric that never changes could do at best."""
    testbed: str = ""
    """Prefix of the network namespaces PREFIX-RACK, whose links the emulated switch makes as fast as its circuits (tools/fabric_testbed.py
    makes them). Empty: bytes don't follow circuits."""
    trickle_mbps: float = Field(default=8.0, gt=0)
    """In a test-bed, what two racks without a circuit can send each other."""

    @property
    def driver_path(self) -> str:
        """Where the function that makes the driver is."""
        return DRIVERS.get(self.driver, self.driver)

    @property
    def capabilities(self) -> SwitchCapabilities:
        """What the section says of the switch."""
        return SwitchCapabilities(self.ports, self.reconfiguration_s)

    @property
    def attempt_s(self) -> float:
        """Longer than one attempt to bring the switch to new circuits, draining included."""
        asked_s = REQUESTS * self.switch_timeout_s
        return self.drain_s + self.reconfiguration_s + self.tune_timeout_s + asked_s + STORE_S

    @field_validator("driver")
    @classmethod
    def _is_known(cls, driver: str) -> str:
        if driver not in DRIVERS and ":" not in driver:
            raise ValueError(f"{driver} is not {', '.join(DRIVERS)}, nor a function of yours as package.module:function")
        return driver

    @field_validator("planner")
    @classmethod
    def _known(cls, planner: str) -> str:
        if planner not in ("direct", "pods", "multi_hop", *BASELINES) and ":" not in planner:
            raise ValueError(
                f"{planner} is not direct, pods, multi_hop, greedy or matching, nor a function of yours as package.module:function"
            )
        return planner

    @model_validator(mode="after")
    def _fits(self) -> Self:
        scheme = "ssh://" if self.driver == "netconf" else ("http://", "https://")
        if self.driver in DRIVERS and self.switch_url and not self.switch_url.startswith(scheme):
            raise ValueError(f"switch_url {self.switch_url!r} is not for driver {self.driver!r}: netconf takes ssh://, the others https://")
        if self.switch_url and self.driver in DRIVERS:
            _check_address(self.switch_url)
        if len(self.racks) * self.ports_per_endpoint > self.ports:
            raise ValueError(
                f"{len(self.racks)} racks with {self.ports_per_endpoint} ports each need more than the switch's {self.ports} ports"
            )
        if self.testbed and (len(self.racks) < 2 or not all(self.racks.values())):
            raise ValueError("testbed needs racks: two or more, each with the address of its host")
        if self.planner == "pods" and (not self.racks or sorted(chain(*self.pods.values())) != sorted(self.racks)):
            raise ValueError("planner pods needs racks, and pods with every rack in one of them: pods={pod-a: [rack-0, rack-1], …}")
        if self.pods and self.planner != "pods":
            raise ValueError(f"pods are for planner pods, and planner is {self.planner}")
        if self.planner == "multi_hop" and (self.testbed or self.ports // self.ports_per_endpoint > MOST_MULTI_HOP):
            raise ValueError(
                f"planner multi_hop is for at most {MOST_MULTI_HOP} endpoints (ports / ports_per_endpoint) that forward for others, "
                "which the racks of a testbed do not"
            )
        if not self.switch_url and self.driver != "sonic":
            raise ValueError(f"driver {self.driver!r} needs switch_url: the emulated switch speaks sonic alone")
        if self.listen and not _stays_here(self.listen):
            raise ValueError(
                f"listen {self.listen!r} is no loopback address such as 127.0.0.1:0 or [::1]:0; HTTP without TLS stays on this host"
            )
        return self


def _stays_here(listen: str) -> bool:
    try:
        return is_loopback(host_port(listen)[0])
    except BadAddress:
        return False


def _check_address(url: str) -> None:
    """Raises ValueError for what neither httpx nor ssh could connect to."""
    try:
        host, port = httpx.URL(url).host, urlsplit(url).port
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"switch_url {url!r} is no address: {error}") from error
    if not host or port == 0:
        raise ValueError(f"switch_url {url!r} names no {'port' if host else 'host'}")
