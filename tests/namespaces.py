"""Two hosts with addresses of their own on one machine, as network namespaces. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest


class Hosts(NamedTuple):
    """Names of the two namespaces, and the address of the first."""

    first: str
    second: str
    address: str

    def link(self, state: str) -> None:
        """Plug the second host's cable in (`up`) or out (`down`)."""
        ip("-n", self.second, "link", "set", "wire", state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Generator[Hosts]:
    """Skips the test where none can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"{os.getpid() % 10_000:04d}"
    hosts = Hosts(f"rubato-a{mark}", f"rubato-b{mark}", "10.203.7.1")
    with ExitStack() as stack:
        for name in (hosts.first, hosts.second):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "wire", "netns", hosts.first, "type", "veth", "peer", "name", "wire", "netns", hosts.second)
        for name, address in ((hosts.first, hosts.address), (hosts.second, "10.203.7.2")):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield hosts
