"""The racks of an optical fabric on one machine: a network namespace each, and a veth pair between every two, with htb at both ends.

Needs root, `ip` and `tc` (iproute2), and a kernel with htb. Whatever is made here is gone when the `with` block ends, and
nothing else of the machine is touched. Rack i reaches rack j by its device `to-j` alone: the two ends' counters say what went there.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Self

from runtime.errors import RubatoError

QUEUE_BYTES = 262_144
"""Before each class; what does not fit is dropped, as a rack switch would."""


class NoNamespaces(RubatoError):
    """This machine can't have the test-bed; the sentence says why."""


def ip(*words: str) -> str:
    """What `ip WORDS…` prints. Raises NoNamespaces."""
    return _run("ip", *words)


def hindrance() -> str:
    """Why there can be no test-bed here, as far as it shows without trying; empty where nothing speaks against it."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    return f"there is no {' and no '.join(missing)} on the PATH: install iproute2" if missing else ""


class Racks:
    """`with Racks(prefix, {rack: address}) as racks:` makes the namespaces PREFIX-RACK; links have `mbps` until somebody sets them."""

    def __init__(self, prefix: str, addresses: Mapping[str, str], *, mbps: float) -> None:
        self.prefix, self._mbps = prefix, mbps
        self.names, self._addresses = list(addresses), list(addresses.values())
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        why = hindrance()
        if why:
            raise NoNamespaces(f"no test-bed: {why}.")
        with ExitStack() as stack:
            for rack, address in zip(self.names, self._addresses, strict=True):
                self._make_rack(rack, address, stack)
            for a, b in combinations(range(len(self.names)), 2):
                self._join(a, b)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *why: object) -> None:
        self._stack.close()

    def namespace(self, rack: str) -> str:
        return f"{self.prefix}-{rack}"

    def command(self, rack: str, words: Sequence[str]) -> list[str]:
        """`words` as a command that runs in `rack`."""
        return ["ip", "netns", "exec", self.namespace(rack), *words]

    def sent_bytes(self) -> dict[tuple[str, str], int]:
        """By (from, to): what passed the links so far, headers included."""
        found: dict[tuple[str, str], int] = {}
        for rack in self.names:
            for link in json.loads(ip("-n", self.namespace(rack), "-j", "-s", "link", "show")):
                if link["ifname"].startswith("to-"):
                    found[rack, self.names[int(link["ifname"][3:])]] = link["stats64"]["tx"]["bytes"]
        return found

    def _make_rack(self, rack: str, address: str, stack: ExitStack) -> None:
        name = self.namespace(rack)
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{address}/32", "dev", "lo")
        # BBR, where it is the default, is slow to find out that a circuit came (docs/decisions/0013).
        _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")

    def _join(self, a: int, b: int) -> None:
        here, there = (self.namespace(self.names[i]) for i in (a, b))
        ip("link", "add", f"to-{b}", "netns", here, "type", "veth", "peer", "name", f"to-{a}", "netns", there)
        for i, j, name in ((a, b, here), (b, a, there)):
            ip("-n", name, "link", "set", f"to-{j}", "up")
            _run(
                "tc", "-n", name, "-batch", "-",
                stdin=f"qdisc add dev to-{j} root handle 1: htb default 1\n"
                f"class add dev to-{j} parent 1: classid 1:1 htb rate {self._mbps * 1e3:.0f}kbit quantum 60000\n"
                f"qdisc add dev to-{j} parent 1:1 bfifo limit {QUEUE_BYTES}\n",
            )  # fmt: skip
            ip("-n", name, "route", "add", f"{self._addresses[j]}/32", "dev", f"to-{j}", "src", self._addresses[i])


def _run(*words: str, stdin: str = "") -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"no test-bed: `{' '.join(words)}` said: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
