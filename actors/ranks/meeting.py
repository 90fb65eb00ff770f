"""How the ranks of a term find each other, and the interface over which those of several hosts compute."""

import os
import socket
from typing import NamedTuple

import psutil

from rubato.bus.address import bind_listener, host_port, spelt

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which the libraries of collectives are given an interface: by themselves they take that of the host's name."""


class Meeting(NamedTuple):
    """Where the ranks of one term meet: a file, if all of them are on one host, else a port of the first rank."""

    place: str
    """Path of the file, or the first rank's address."""
    port: int = 0
    """0: a file."""
    listener: socket.socket | None = None
    """The first rank's."""
    address: str = ""
    """By which others reach this rank."""

    @classmethod
    def at(cls, store: str, listener: socket.socket | None = None, address: str = "") -> "Meeting":
        """What a JoinTerm's `store` names. Raises BadAddress."""
        if store.startswith("/"):
            return cls(store)
        return cls(*host_port(store), listener, address)

    def name_interface(self) -> None:
        """Have collectives go over the interface of this rank's address, unless the environment of the process names one."""
        if (name := interface_of(self.address)) is not None:
            for variable in INTERFACES:
                os.environ.setdefault(variable, name)


def listen(address: str) -> tuple[socket.socket, str]:
    """A socket that waits at a free port of `address`, and its HOST:PORT. Raises OSError."""
    listener = bind_listener(address, 0)
    return listener, f"{spelt(address)}:{listener.getsockname()[1]}"


def interface_of(address: str) -> str | None:
    """Name of the interface that has this address, or host's name; None where none has it, as behind a translation of addresses."""
    try:
        found = {where[4][0] for where in socket.getaddrinfo(address, None)}
    except OSError:
        return None
    there = psutil.net_if_addrs().items()
    return next((name for name, addresses in there if any(each.address.partition("%")[0] in found for each in addresses)), None)
