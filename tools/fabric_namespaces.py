"""The racks of an optical fabric on one machine: a network namespace each, and a veth pair between every two, with htb at both ends.

All of it is made inside namespaces of the process's own (`enter`), which the kernel takes away with the last process in
them: root is not needed where users may have such namespaces, and nothing of the machine is touched or left behind. Needed are `ip` and `tc`
(iproute2), `unshare` and `mount` (util-linux), and a kernel with htb. Rack i reaches rack j by its device `to-j` alone: the
two ends' counters say what went there.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NoReturn

from rubato.runtime.errors import RubatoError

QUEUE_BYTES = 262_144
"""Before each class; what does not fit is dropped, as a rack switch would."""

HIDDEN = Path("/run")
"""Covered by a file system of our own, or `ip netns` could not keep its names there."""

PREPARE = f"mount -t tmpfs tmpfs {HIDDEN} && ip link set lo up"
"""The second shows whether links may be made too."""

SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Where `tc` is, but not on every user's PATH."""

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "sysctl": "procps", "unshare": "util-linux", "mount": "util-linux"}
REFUSALS = {"kernel/unprivileged_userns_clone": "0", "kernel/apparmor_restrict_unprivileged_userns": "1", "user/max_user_namespaces": "0"}
"""Settings by which a kernel keeps users from namespaces of their own."""


class NoNamespaces(RubatoError):
    """This machine can't have the test-bed; the sentence says why."""


def enter(command: Sequence[str]) -> NoReturn:
    """Go on as `command`, in network and mount namespaces of its own. Raises NoNamespaces.

    Only who may not have them as they are gets a user namespace too: in it root can't read other users' files.
    """
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS))
    if missing := [tool for tool in PACKAGES if shutil.which(tool, path=path) is None]:
        packages = " and ".join(dict.fromkeys(PACKAGES[tool] for tool in missing))
        raise NoNamespaces(f"no test-bed: there is no {' and no '.join(missing)} on the PATH. Install {packages}.")
    said, environment = "", {**os.environ, "PATH": path}
    for way in ((), ("--user", "--map-root-user")):
        words = ["unshare", *way, "--net", "--mount", "sh", "-c", f'{PREPARE} && exec "$@"', "sh"]
        tried = subprocess.run([*words, "true"], env=environment, capture_output=True, text=True, check=False)
        if not tried.returncode:
            os.execvpe(words[0], [*words, *command], environment)
        said = " ".join(tried.stderr.split())
    raise NoNamespaces(f"no test-bed: the kernel gives this user no namespaces ({said}). {_remedy()}")


def _remedy() -> str:
    for name, refusing in REFUSALS.items():
        setting = Path("/proc/sys", name)
        if setting.exists() and setting.read_text().strip() == refusing:
            return f"{name.replace('/', '.')} is {refusing}: change it, or run this as root."
    return "Root may have them, in a container with the capabilities SYS_ADMIN and NET_ADMIN."


class Racks:
    """Namespaces PREFIX-RACK, by {rack: address}; `make` them once, after `enter`."""

    def __init__(self, prefix: str, addresses: Mapping[str, str]) -> None:
        self.prefix = prefix
        self.names, self._addresses = list(addresses), list(addresses.values())

    def make(self, mbps: float | Callable[[str, str], float]) -> None:
        """Links have `mbps`, which may be another one for each two racks, until they are set. Raises NoNamespaces."""
        for rack in self.names:
            self._make_rack(rack)
        for a, b in combinations(range(len(self.names)), 2):
            self._join(a, b, mbps(self.names[a], self.names[b]) if callable(mbps) else mbps)

    def namespace(self, rack: str) -> str:
        return f"{self.prefix}-{rack}"

    def command(self, rack: str, words: Sequence[str]) -> list[str]:
        """`words` as a command that runs in `rack`."""
        return ["ip", "netns", "exec", self.namespace(rack), *words]

    def sent_bytes(self) -> dict[tuple[str, str], int]:
        """By (from, to): what passed the links so far, headers included."""
        found: dict[tuple[str, str], int] = {}
        for rack in self.names:
            for link in json.loads(_ip("-n", self.namespace(rack), "-j", "-s", "link", "show")):
                if link["ifname"].startswith("to-"):
                    found[rack, self.names[int(link["ifname"][3:])]] = link["stats64"]["tx"]["bytes"]
        return found

    def _make_rack(self, rack: str) -> None:
        name = self.namespace(rack)
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        # BBR, where it is the default, is slow to find out that a circuit came (docs/decisions/0013).
        _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")

    def _join(self, a: int, b: int, mbps: float) -> None:
        here, there = (self.namespace(self.names[i]) for i in (a, b))
        _ip("link", "add", f"to-{b}", "netns", here, "type", "veth", "peer", "name", f"to-{a}", "netns", there)
        for i, j, name in ((a, b, here), (b, a, there)):
            _ip("-n", name, "link", "set", f"to-{j}", "up")
            if j == (0 if i else 1):  # its first link has the rack's address: what computes together goes by interfaces, and lo is none
                _ip("-n", name, "addr", "add", f"{self._addresses[i]}/32", "dev", f"to-{j}")
            _run(
                "tc", "-n", name, "-batch", "-",
                stdin=f"qdisc add dev to-{j} root handle 1: htb default 1\n"
                f"class add dev to-{j} parent 1: classid 1:1 htb rate {mbps * 1e3:.0f}kbit quantum 60000\n"
                f"qdisc add dev to-{j} parent 1:1 bfifo limit {QUEUE_BYTES}\n",
            )  # fmt: skip
            _ip("-n", name, "route", "add", f"{self._addresses[j]}/32", "dev", f"to-{j}", "src", self._addresses[i])


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str, stdin: str = "") -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"no test-bed: `{' '.join(words)}` said: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
