"""Decides which addresses exist and which need keys: all but ipc:// and loopback tcp:// between processes, and mem:// within one."""

import errno
import ipaddress
import os
import socket
import stat
from typing import NamedTuple

from rubato.bus.errors import BadAddress

IPC = "ipc"
TCP = "tcp"
MEMORY = "mem"

IPC_PATH_BYTES = 107
"""`sun_path` of a Unix socket holds 108 bytes, one of them the closing zero."""

_EXAMPLES = "use ipc:///folder/name, tcp://127.0.0.1:PORT or mem://name"


class Address(NamedTuple):
    """`place` is a path (ipc), a host (tcp, with `port`; 0 lets the system choose) or a name (mem)."""

    scheme: str
    place: str
    port: int = 0
    last_port: int = 0
    """To be bound anywhere from `port` to this one; 0 where there is no such choice."""


def parse(address: str, *, keyed: bool = False) -> Address:
    """Raises BadAddress for what is malformed, too long, or, unless `keyed`, not allowed without keys."""
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or "\0" in rest:
        raise BadAddress(f"{address!r} is not an address; {_EXAMPLES}")
    if scheme == IPC:
        return _ipc(address, rest)
    if scheme == TCP:
        return _tcp(address, rest, keyed=keyed)
    if scheme == MEMORY:
        return Address(MEMORY, rest)
    raise BadAddress(f"{address!r} has the unknown scheme {scheme!r}; {_EXAMPLES}")


def check_free(path: str) -> None:
    """Raise BadAddress when a process already listens at this ipc path, or it cannot be bound.

    Needed because ZeroMQ unlinks the path before it binds: it would take the endpoint of a living process without a word.
    A socket left behind by a dead process is free.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            raise BadAddress(f"the folder {folder} for the socket {path} does not exist") from None
        return
    except OSError as error:
        raise BadAddress(f"{path} cannot be bound: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise BadAddress(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Refused means that no process listens; a full backlog (EAGAIN) means that one does.
        if probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise BadAddress(f"ipc://{path} is taken by a living process")


def _ipc(address: str, path: str) -> Address:
    if not path.startswith("/"):
        raise BadAddress(f"{address!r} must hold an absolute path, like ipc:///run/rubato/engine-1")
    size = len(os.fsencode(path))
    if size > IPC_PATH_BYTES:
        raise BadAddress(f"the socket path {path} has {size} bytes and the system allows {IPC_PATH_BYTES}; use a shorter folder")
    return Address(IPC, path)


def _tcp(address: str, rest: str, *, keyed: bool) -> Address:
    host, _, port = rest.rpartition(":")
    if "-" in port:
        first, last = parse_ports(port) or (None, 0)
    else:
        first, last = 0 if port == "*" else _port(port), 0
    if not host or first is None or (":" in host and not is_bracketed(host)):
        raise BadAddress(f"{address!r} must name a host and a port, like tcp://127.0.0.1:7788")
    if not keyed and not is_loopback(host):
        raise BadAddress(f"{address} needs keys. Make them with: rubato keys new --run RUN")
    return Address(TCP, host, first, last)


def host_port(text: str) -> tuple[str, int]:
    """`host:port` and `[v6-address]:port`, the host without brackets, as sockets take it; empty where none is named. Raises BadAddress."""
    host, colon, digits = text.rpartition(":")
    port = _port(digits)
    if not colon or port is None or ((":" in host or "[" in host) and not is_bracketed(host)):
        raise BadAddress(f"{text!r} must be a host and a port, like 127.0.0.1:7788 or [::1]:7788")
    return bare(host), port


def is_bracketed(text: str) -> bool:
    """Whether `text` is an IPv6 address in brackets, with a port behind it or without."""
    inner, bracket, port = text.removeprefix("[").partition("]")
    if not (text.startswith("[") and bracket) or (port and (port[0] != ":" or _port(port[1:]) is None)):
        return False
    try:
        return ipaddress.ip_address(inner).version == 6
    except ValueError:
        return False


def bare(host: str) -> str:
    """`host` without the brackets in which an address of IPv6 stands where a port follows."""
    return host[1:-1] if is_bracketed(host) and host.endswith("]") else host


def spelt(host: str) -> str:
    """`host` as it stands before a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def bind_listener(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """A socket that listens there, on all addresses where `host` is empty. Raises OSError."""
    family = socket.AF_INET6 if ":" in bare(host) else socket.AF_INET
    return socket.create_server((bare(host), port), family=family, backlog=backlog)


def parse_ports(text: str) -> tuple[int, int] | None:
    """The first and the last port of a range like 31000-31100; None where it is no such range."""
    first, last = map(_port, text.partition("-")[::2])
    return (first, last) if first and last and first <= last else None


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) <= 65535 else None


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name, can't be reached from elsewhere. A name other than localhost may stand for anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
