"""Command lines that start a program in a sandbox of Debian's bubblewrap: what it sees, what it reaches, and how much it may use.

It sees the system's programs and libraries and Python's, read-only, and what it is shown beside them. /tmp and /dev/shm are its own and in memory,
as are its process ids, its IPC and, unless it is given the host's, its network, which then leads nowhere. It ends with the thread that started it.

The kernel bounds what each process uses (`Bounds`) and, for all of them together, how many there are. It bounds no sum of their memory, and no
memory that belongs to no process: a memory cgroup around the job does. What is printed is bounded by the reader of the pipe.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rubato.runtime.errors import ConfigError
from rubato.runtime.importer import OURS, PACKAGES, VARIABLE, in_use
from rubato.runtime.pool.guard import VARIABLE as STARTED_BY
from rubato.runtime.pool.sandbox import choose_uid, shortcoming

TOOL, HELPERS = "bwrap", ("setpriv", "prlimit", "choom")
"""What it needs: bubblewrap from 0.8 on, and util-linux's."""

TRIAL_S = 20.0

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")

SETTINGS = (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf",
    "passwd", "pki/tls", "pki/ca-trust", "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
"""Of /etc."""

VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONSAFEPATH", "OMP_NUM_THREADS", VARIABLE, STARTED_BY)
"""That a program keeps, beside those that it is named."""

INSTALLED = ("site-packages", "dist-packages")

MEMORY_MB = 8192
"""Where no other bound is given: in a sandbox there always is one."""

MOST_FILES_OPEN = 1024


class Bounds(NamedTuple):
    """What a sandboxed program may use."""

    memory_mb: int = 0
    """Address space of each process (RLIMIT_AS), shared mappings included, in MiB; 0 is MEMORY_MB."""
    max_processes: int = 256
    """Processes and threads of the whole sandbox (RLIMIT_NPROC, for a user id, or a user namespace, of its own)."""
    cpu_s: int = 0
    """Processor seconds of each process (RLIMIT_CPU); 0 leaves them alone."""
    tmp_mb: int = 512
    """Size of its /tmp, of its /dev/shm, and of each file that it writes (RLIMIT_FSIZE), in MiB."""


class Sandbox(NamedTuple):
    """What a sandboxed program may reach."""

    network: bool = False
    """The host's network, its loopback and abstract sockets included."""
    read: tuple[str, ...] = ()
    """Files and folders beside the system's, and Unix sockets to connect to."""
    env: tuple[str, ...] = ()
    """Names of variables of ours beside VARIABLES."""
    bounds: Bounds = Bounds()


class Command(NamedTuple):
    """What to start, and the whole environment to start it with: on a command line it could be read by other users."""

    argv: tuple[str, ...]
    env: dict[str, str]


def sandboxed(command: Sequence[str], sandbox: Sandbox, env: Mapping[str, str] | None = None) -> Command:
    """How to start `command` in a sandbox, with the variables `env` beside those of ours that it keeps. Its working folder is /tmp.

    It exits as `command` does, with 128 + N for a signal N, and a kill of it ends all that runs in there. Where no sandbox can be had, it
    fails: `flaw_of` tells beforehand. Start no more than one command with the result: where we are root it has a user id of its own.
    Raises OSError where that can't be.
    """
    uid = choose_uid()
    as_user = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--") if uid else ()
    limits = ("prlimit", f"--nproc={sandbox.bounds.max_processes}", "--")
    first = ("choom", "-n", "1000", "--")  # when memory runs out the kernel ends it before an actor, as it does workers
    return Command((*first, *_entered(sandbox), *as_user, *limits, *command), {**_kept(sandbox, os.environ), **(env or {})})


class SandboxWall:
    """Around worker processes of runtime/pool, which take on their user id and their limit on processes themselves."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def around(self, argv: Sequence[str], env: Mapping[str, str]) -> Command:
        return Command((*_entered(self._sandbox), *argv), _kept(self._sandbox, env))

    def exit_code(self, code: int) -> int:
        return exit_code(code)


def exit_code(code: int) -> int:
    """What a command ended with in its sandbox, or minus the signal that it died of."""
    return 128 - code if 128 < code <= 128 + 64 else code


def _kept(sandbox: Sandbox, env: Mapping[str, str]) -> dict[str, str]:
    named = {name: env[name] for name in (*VARIABLES, *sandbox.env) if name in env}
    return {**named, "HOME": "/tmp", "TMPDIR": "/tmp"}


def _entered(sandbox: Sandbox) -> Iterator[str]:
    if text := shortcoming():
        raise PermissionError(text)
    bounds, root = sandbox.bounds, os.geteuid() == 0
    tmp_bytes = bounds.tmp_mb << 20
    yield from (TOOL, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session")
    # Root needs no namespace of users, and in one it would stay exempt from the limit on processes: it takes on an id without an account.
    yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if root else ("--unshare-user", "--disable-userns")
    if not sandbox.network:
        yield "--unshare-net"
    for place in SYSTEM:
        if os.path.islink(place):
            yield from ("--symlink", os.readlink(place), place)
        else:
            yield from ("--ro-bind-try", place, place)
    for place in (f"/etc/{name}" for name in SETTINGS):
        if os.path.exists(place):
            yield from _bound(place)
    yield from ("--proc", "/proc", "--dev", "/dev")
    for place in ("/tmp", "/dev/shm"):
        yield from ("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", place)
    shown = _shown(sandbox.read)
    for place in shown:
        yield from _bound(place)
    for code in _kept_code() if root else ():
        if any(Path(code) != Path(place) and Path(code).is_relative_to(place) for place in shown):  # in a run folder, its owner's alone
            run = os.path.dirname(code)
            yield from ("--perms", "0755", "--tmpfs", run, *_bound(code), "--remount-ro", run)
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")
    memory = (bounds.memory_mb or MEMORY_MB) << 20
    yield from ("prlimit", f"--as={memory}", f"--fsize={tmp_bytes}", f"--nofile={MOST_FILES_OPEN}", "--core=0")
    yield from (f"--cpu={bounds.cpu_s}", "--") if bounds.cpu_s else ("--",)


def _bound(place: str) -> Iterator[str]:
    """Below folders that all may enter: those that bubblewrap makes by itself are for their owner alone."""
    for folder in [*Path(place).parents][-2::-1]:
        yield from ("--dir", str(folder))
    yield from ("--ro-bind", place, place)


def _shown(more: Iterable[str]) -> list[str]:
    """Python's folders, ours, the code that the run keeps, and `more`; those within others left out, outer ones first."""
    wanted = {os.path.abspath(place) for place in (*_python_places(), *_our_places(), *_kept_code(), *more)}
    wanted |= {os.path.realpath(place) for place in wanted}
    found: list[str] = []
    for place in sorted(wanted, key=lambda place: place.count("/")):
        if not any(Path(place).is_relative_to(outer) for outer in (*SYSTEM, *found)):
            found.append(place)
    return found


def _kept_code() -> list[str]:
    return [os.path.abspath(code.folder) for code in in_use() if code.folder.is_dir()]


def _python_places() -> Iterator[str]:
    """This interpreter, and what is installed for it. What else it imports from (PYTHONPATH, a package that is edited) is to be named."""
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    yield from (place for place in sys.path if os.path.basename(place) in INSTALLED and os.path.isdir(place))


def _our_places() -> Iterator[str]:
    """Our packages, not the checkout that they may lie in."""
    places = (OURS, *(OURS / package for package in PACKAGES)) if OURS.name == "rubato" else (OURS / name for name in ("rubato", *PACKAGES))
    return (str(place) for place in places if place.is_dir())


def flaw_of(sandbox: Sandbox) -> str:
    """Why no program can be started in it here, found by starting one; "" where one can. Blocks for a fraction of a second."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if missing := [name for name in (TOOL, *HELPERS) if shutil.which(name) is None]:
        package = "bubblewrap" if TOOL in missing else "util-linux"
        return f"{missing[0]} is not installed: apt install {package}"
    if text := shortcoming():
        return text.rstrip(".")
    if "/" in sandbox.read:
        return "it can't be shown /, only folders below"
    # With a process of its own and Python's modules, as a worker is one.
    argv, env = sandboxed((sys.executable, "-c", "import os, json; os.waitpid(os.fork() or os._exit(0), 0)"), sandbox)
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a program in it did not end within {TRIAL_S:g} s"
    except OSError as error:
        return str(error)
    if not done.returncode:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"a program in it ended with {done.returncode}"


def check(sandbox: Sandbox, key: str) -> None:
    """Raises ConfigError where the config's `key` asks for a sandbox that can't be had here."""
    if flaw := flaw_of(sandbox):
        raise ConfigError(f"{key}=bwrap can't be had on this host: {flaw}. See docs/security.md, or go without by {key}=none.")
